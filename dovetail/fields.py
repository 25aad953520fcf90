"""The numbers of a target that may be set: read from its description, so no target is known by name.

Memories, the DMA and the core by their fields; and, where a target is made by a function of a configuration
(`Target.recipe`), the numbers of that configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import product
from math import prod
from typing import Any

from dovetail.documented import document
from dovetail.errors import DovetailError, TargetError
from dovetail.records import Record
from dovetail.target.description import Recipe, Target, with_cores

Value = int | float | bool
"""A value of a field."""

ENGINE = "engine"
"""Stands for the name of the one part a recipe describes."""

_ABOUT = {
    "size": ("bytes of the memory", 1),
    "alignment": ("bytes its buffers are aligned to", 1),
    "waits": ("cycles a core waits for a read", 0),
    "width": ("bytes it reads at once", 1),
    "prefetch": ("reads instructions ahead", 0),
    "pj_per_byte": ("pJ of a byte read or written", 0),
    "cache.size": ("bytes of the cache before it", 1),
    "cache.ways": ("places of a line in it; 0 for all", 0),
    "bytes_per_cycle": ("bytes it moves per cycle", 1),
    "setup_cycles": ("cycles a transfer costs beyond its bytes", 0),
    "pj_per_mac": ("pJ of a multiply-accumulate", 0),
    "pj_per_cycle": ("pJ of a busy cycle", 0),
    "stack": ("bytes of stack reserved", 1),
}
"""Meaning and least value, by the end of a field's name."""
_OF_MEMORIES = ("size", "alignment", "waits", "width", "prefetch", "pj_per_byte")
_OF_DMA, _OF_ENGINES = ("bytes_per_cycle", "setup_cycles"), ("pj_per_mac", "pj_per_cycle")
_MULTIPLES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Field(Record):
    """A number of a target that `--set` may change."""

    name: str
    """Name for `--set`."""
    present: Value
    """Value in the target as it is."""
    about: str
    """Meaning of the number; empty if the name says it."""
    apply: Callable[[Target, Value], Target] | None = None
    """The target with another value; raises DovetailError if no target can have it."""
    config: str = ""
    """The field of the target's configuration it is; empty for others."""


def fields_of(target: Target) -> dict[str, Field]:
    """The numbers of a target that may be set, by name, in the order of setting."""
    found = _recipe_fields(target.recipe) if target.recipe is not None else []
    for number, memory in enumerate(target.memories):
        own = ("memories", number)
        found += [_field(f"{memory.name}.{name}", target, (*own, name)) for name in _OF_MEMORIES]
        for place, cache in enumerate(memory.caches):
            prefix = f"{memory.name}.{'' if len(cache.holds) > 1 else f'{cache.holds[0]}_'}cache"
            found += [_field(f"{prefix}.{name}", target, (*own, "caches", place, name)) for name in ("size", "ways")]
    if target.dma is not None:
        found += [_field(f"{target.dma.name}.{name}", target, ("dma", name)) for name in _OF_DMA]
    for number, engine in enumerate(target.engines):
        found += [_field(f"{engine.name}.{name}", target, ("engines", number, name)) for name in _OF_ENGINES]
    found += [_field(f"core.{name}", target, ("core", name)) for name in ("stack", "pj_per_cycle")]
    for name, cycles in _costs(target).items():
        found.append(Field(f"core.{name}", cycles, "cycles of such an instruction", partial(_set_cost, name)))
    about = "cores like its own that share every layer"
    found.append(Field("cores", len(target.cores), about, lambda own, value: with_cores(own, int(value))))
    return {field.name: field for field in found}


def changed(target: Target, settings: Mapping[str, Value]) -> Target:
    """The target with these values, by the names of its fields. Raises DovetailError where there is no such target."""
    known = {name: field for name, field in fields_of(target).items() if name in settings}
    config = {field.config: settings[name] for name, field in known.items() if field.config}
    if config:
        assert target.recipe is not None, "only a recipe has a configuration"
        target = target.recipe.make(replace(target.recipe.config, **config))
    for name, field in known.items():
        target = field.apply(target, settings[name]) if field.apply is not None else target
    return target


def settings_of(target: Target, texts: Sequence[str]) -> dict[str, Value]:
    """The values that texts of `--set` ("NAME=VALUE") give; raises DovetailError if a text is not of this form, or
    names no field."""
    axes = axes_of(target, texts) if texts else ()
    for axis in axes:
        if len(axis.values) > 1:
            hint = "give one, or use dovetail sweep to compile for each"
            raise DovetailError(f"{len(axis.values)} values are given", where=f"--set {axis.field.name}", hint=hint)
    return {axis.field.name: axis.values[0] for axis in axes}


def _field(name: str, target: Target, path: tuple[str | int, ...]) -> Field:
    """The number at the end of a path of fields and places."""
    present: Any = target
    for step in path:
        present = present[step] if isinstance(step, int) else getattr(present, step)
    about, least = _ABOUT.get(name.rpartition("cache.")[1] + name.rpartition(".")[2], ("", 1))
    return Field(name, present, about, partial(_set, path, least, name))


def _set(path: tuple[str | int, ...], least: int, name: str, target: Target, value: Value) -> Target:
    if value < least:
        hint = f"give a number from {least} on, such as 64 or 32K"
        raise TargetError(f"must be at least {least}, is {value}", where=name, hint=hint)
    changed_target: Target = _replaced(target, path, value)
    return changed_target


def _replaced(owner: Any, path: tuple[str | int, ...], value: Value) -> Any:
    """The owner with another value at the end of a path."""
    step, *rest = path
    if not path[1:]:
        return replace(owner, **{str(step): value})
    if isinstance(step, int):
        return tuple(_replaced(one, tuple(rest), value) if n == step else one for n, one in enumerate(owner))
    return replace(owner, **{step: _replaced(getattr(owner, step), tuple(rest), value)})


def _set_cost(name: str, target: Target, value: Value) -> Target:
    if value < 0:
        raise TargetError(f"must be at least 0, is {value}", where=f"core.{name}", hint="give clock cycles, 0 or more")
    return replace(target, core=replace(target.core, costs={**target.core.costs, name: int(value)}))


def _set_derived(name: str, target: Target, value: Value) -> Target:
    assert target.recipe is not None, "only offered where there is one"
    return target.recipe.make(target.recipe.derived[name].apply(target.recipe.config, int(value)))


def _costs(target: Target) -> dict[str, int]:
    """Cycles of each class of instructions; nothing where the core is not simulated."""
    from dovetail.sim.architecture import core_costs

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
        about, present = "sets " + " and ".join(derived.sets), derived.present(recipe.config)
        found.append(Field(f"{recipe.name}.{name}", present, about, partial(_set_derived, name)))
    return found


def find(target: Target, name: str) -> Field:
    """The field of a name: as it is written, in other letters, or `engine.` for the name of the engine.
    Raises TargetError where there is none; names the nearest."""
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
    hint = f"use {'near it ' if near else ''}{names}"
    raise TargetError(f"there is no '{name.strip()}' to set{fixed}", where=target.name, hint=hint)


def parse(text: str, field: Field) -> Value:
    """A value: a number, perhaps with K, M or G for 1024 times as many, or true or false.
    Raises TargetError where it is none."""
    given = text.strip().lower()
    plain = given.removesuffix("ib").removesuffix("b")
    if isinstance(field.present, bool):
        if given in ("true", "false", "1", "0"):
            return given in ("true", "1")
        hint = f"for example --set {field.name}=true,false"
        raise TargetError(f"this is true or false, not '{text.strip()}'", where=field.name, hint=hint)
    scale = _MULTIPLES.get(plain[-1:], 1)
    try:
        return int(plain[:-1] if scale > 1 else plain) * scale
    except ValueError:
        try:
            if not isinstance(field.present, float):
                raise
            return float(plain)
        except ValueError:
            raise TargetError(
                f"'{text.strip()}' is no number", where=field.name, hint=f"such as {field.present}, 64 or 32K"
            ) from None


MOST_POINTS = 4096
"""Points of a sweep."""


class Axis(Record):
    """A field and the values it takes."""

    field: Field
    """Number that varies."""
    values: tuple[Value, ...]
    """Values of the number, in order."""


def axes_of(target: Target, texts: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of a sweep, from the texts of `--set`.

    Args:
        target: whose fields they are.
        texts: each "NAME=VALUE,VALUE,...".

    Raises:
        DovetailError: one is not of this form, names no field, or there are too many points.
    """
    axes: list[Axis] = []
    for text in texts:
        name, equals, listed = text.partition("=")
        parts = [part for part in listed.split(",") if part.strip()]
        if not equals or not parts:
            hint = "for example --set l1.size=64K,128K"
            raise DovetailError(f"'{text}' is not NAME=VALUE,VALUE", where="--set", hint=hint)
        field = find(target, name)
        if any(axis.field.name == field.name for axis in axes):
            raise DovetailError("this is set twice", where=field.name, hint="give all its values in one --set")
        axes.append(Axis(field, tuple(dict.fromkeys(parse(part, field) for part in parts))))
    if not axes:
        raise DovetailError("nothing is set", where="--set", hint="for example --set l1.size=64K,128K")
    count = prod(len(axis.values) for axis in axes)
    if count > MOST_POINTS:
        raise DovetailError(
            f"these are {count:,} points, the most are {MOST_POINTS:,}", where="--set", hint="give fewer values"
        )
    return tuple(axes)


def points(axes: Sequence[Axis]) -> list[Mapping[str, Value]]:
    """Every combination, the last field changing fastest."""
    names = [axis.field.name for axis in axes]
    return [dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in axes))]


document(__name__)
