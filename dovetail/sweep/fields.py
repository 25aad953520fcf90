"""What may be set about a target: read from its description, so no target is known by name.

Memories, the DMA and the core by their fields; and, where a target is made by a function of a configuration
(`Target.recipe`), the numbers of that configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any

from dovetail.errors import DovetailError, TargetError
from dovetail.target.cores import with_cores
from dovetail.target.description import Recipe, Target

Value = int | float | bool
"""What a field is set to."""

ENGINE = "engine"
"""Stands for the name of the one part a recipe describes."""

_ABOUT = {
    "size": "bytes of the memory",
    "alignment": "bytes its buffers are aligned to",
    "bytes_per_cycle": "bytes it moves per cycle",
    "setup_cycles": "cycles a transfer costs beyond its bytes",
    "stack": "bytes of stack reserved",
}
_MULTIPLES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True)
class Field:
    """One number of a target."""

    name: str
    """As it is given to `--set`."""
    present: Value
    """What it is."""
    about: str
    """What it means; empty where its name says it."""
    apply: Callable[[Target, Value], Target] | None = None
    """The target with another value; raises DovetailError where there is no such target. None for `config`."""
    config: str = ""
    """The field of the target's configuration it is; empty for others."""


def fields_of(target: Target) -> dict[str, Field]:
    """Everything that may be set, by name, in the order it is to be set in."""
    found = _recipe_fields(target.recipe) if target.recipe is not None else []
    for number, memory in enumerate(target.memories):
        for name in ("size", "alignment"):
            found.append(_field(f"{memory.name}.{name}", getattr(memory, name), _set_memory(number, name)))
    if target.dma is not None:
        for name in ("bytes_per_cycle", "setup_cycles"):
            found.append(_field(f"{target.dma.name}.{name}", getattr(target.dma, name), _set_dma(name)))
    found.append(_field("core.stack", target.core.stack, _set_stack))
    for name, cycles in _costs(target).items():
        found.append(_field(f"core.{name}", cycles, _set_cost(name), "cycles of such an instruction"))
    found.append(_field("cores", len(target.cores), _set_cores, "cores like its own that share every layer"))
    return {field.name: field for field in found}


def changed(target: Target, settings: Mapping[str, Value]) -> Target:
    """The target with these values, by the names of its fields.

    Raises:
        DovetailError: there is no such target.
    """
    known = {name: field for name, field in fields_of(target).items() if name in settings}
    config = {field.config: settings[name] for name, field in known.items() if field.config}
    if config:
        assert target.recipe is not None, "only a recipe has a configuration"
        target = target.recipe.make(replace(target.recipe.config, **config))
    for name, field in known.items():
        target = field.apply(target, settings[name]) if field.apply is not None else target
    return target


def _field(name: str, present: Value, apply: Callable[[Target, Value], Target], about: str = "") -> Field:
    return Field(name, present, about or _ABOUT.get(name.rpartition(".")[2], ""), apply)


def _set_memory(number: int, name: str) -> Callable[[Target, Value], Target]:
    def apply(target: Target, value: Value) -> Target:
        """The target with one memory changed."""
        memories = list(target.memories)
        given: dict[str, Any] = {name: _positive(value, f"{memories[number].name}.{name}")}
        memories[number] = replace(memories[number], **given)
        return replace(target, memories=tuple(memories))

    return apply


def _set_dma(name: str) -> Callable[[Target, Value], Target]:
    def apply(target: Target, value: Value) -> Target:
        """The target with its DMA changed."""
        assert target.dma is not None, "only offered where there is one"
        free = name == "setup_cycles" and value == 0
        given: dict[str, Any] = {name: value if free else _positive(value, f"{target.dma.name}.{name}")}
        return replace(target, dma=replace(target.dma, **given))

    return apply


def _set_cores(target: Target, value: Value) -> Target:
    return with_cores(target, int(value))


def _set_stack(target: Target, value: Value) -> Target:
    return replace(target, core=replace(target.core, stack=int(_positive(value, "core.stack"))))


def _set_cost(name: str) -> Callable[[Target, Value], Target]:
    def apply(target: Target, value: Value) -> Target:
        """The target with another duration of one class of instructions."""
        if value < 0:
            raise TargetError(f"must be at least 0, is {value}", where=f"core.{name}",
                              hint="give clock cycles, 0 or more")
        return replace(target, core=replace(target.core, costs={**target.core.costs, name: int(value)}))

    return apply


def _positive(value: Value, name: str) -> Value:
    if value <= 0:
        raise TargetError(f"must be at least 1, is {value}", where=name,
                          hint="give a number above 0, such as 64 or 32K")
    return value


def _costs(target: Target) -> dict[str, int]:
    """Cycles of each class of instructions; nothing where the core is not simulated."""
    from dovetail.simulate.architecture import core_costs

    try:
        costs = core_costs(target.core.isa, target.core.costs, target.name)
    except DovetailError:
        return {}
    return {field.name: getattr(costs, field.name) for field in fields(costs)}


def _recipe_fields(recipe: Recipe) -> list[Field]:
    """The numbers of a target's configuration and what else its recipe takes."""
    assert is_dataclass(recipe.config), "a configuration is a dataclass"
    found = []
    for field in fields(recipe.config):
        present = getattr(recipe.config, field.name)
        if isinstance(present, int | float):
            found.append(Field(f"{recipe.name}.{field.name}", present, "", config=field.name))
    for name, derived in recipe.derived.items():
        about = "sets " + " and ".join(derived.sets)
        found.append(_field(f"{recipe.name}.{name}", derived.present(recipe.config), _set_derived(name), about))
    return found


def _set_derived(name: str) -> Callable[[Target, Value], Target]:
    def apply(target: Target, value: Value) -> Target:
        """The target made from the configuration that has this number."""
        assert target.recipe is not None, "only offered where there is one"
        return target.recipe.make(target.recipe.derived[name].apply(target.recipe.config, int(value)))

    return apply


def find(target: Target, name: str) -> Field:
    """The field of a name: as it is written, in other letters, or `engine.` for the name of the engine.

    Raises:
        TargetError: there is none; names the nearest.
    """
    wanted, known = name.strip(), fields_of(target)
    if target.recipe is not None and wanted.partition(".")[0].lower() == ENGINE:
        wanted = f"{target.recipe.name}.{wanted.partition('.')[2]}"
    by_letters = {own.lower(): field for own, field in known.items()}
    if wanted in known:
        return known[wanted]
    if wanted.lower() in by_letters:
        return by_letters[wanted.lower()]
    near = get_close_matches(wanted.lower(), by_letters, n=4, cutoff=0.55)
    last = wanted.lower().rpartition(".")[2]
    near += [own for own in by_letters if own.rpartition(".")[2] == last and own not in near]
    names = ", ".join(by_letters[own].name for own in near) or ", ".join(known)
    part = wanted.partition(".")[0].lower()
    of_engine = part == ENGINE or part in (engine.name.lower() for engine in target.engines)
    fixed = ", and no numbers of an engine: it is as it is" if of_engine and target.recipe is None else ""
    raise TargetError(f"there is no '{name.strip()}' to set{fixed}", where=target.name,
                      hint=f"use {'near it ' if near else ''}{names}")


def parse(text: str, field: Field) -> Value:
    """A value: a number, perhaps with K, M or G for 1024 times as many, or true or false.

    Raises:
        TargetError: it is none.
    """
    plain = text.strip().lower().removesuffix("ib").removesuffix("b")
    if isinstance(field.present, bool):
        if text.strip().lower() in ("true", "false", "1", "0"):
            return text.strip().lower() in ("true", "1")
        raise TargetError(f"this is true or false, not '{text.strip()}'", where=field.name,
                          hint=f"for example --set {field.name}=true,false")
    scale = _MULTIPLES.get(plain[-1:], 1)
    try:
        value: Value = int(plain[:-1] if scale > 1 else plain) * scale
    except ValueError:
        try:
            if not isinstance(field.present, float):
                raise
            value = float(plain)
        except ValueError:
            raise TargetError(f"'{text.strip()}' is no number", where=field.name,
                              hint=f"such as {field.present}, 64 or 32K") from None
    return value
