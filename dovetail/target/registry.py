"""Targets by name: those of installed packages, microcontrollers, and files of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path

from dovetail import plugins
from dovetail.errors import DovetailError, TargetError
from dovetail.target.description import Target
from dovetail.target.parts import PARTS, part_of
from dovetail.user_file import import_file


def is_installed(name: str) -> bool:
    """Whether a name, not a file, stands for a target: one of a package, or a microcontroller of `parts.PARTS`."""
    return name in PARTS or name in plugins.names(plugins.TARGETS)


def installed_targets(tell: Callable[[str], None] = lambda sentence: None) -> Iterator[tuple[str, Target]]:
    """The targets of installed packages by name, Dovetail's own first; `tell` hears of those that cannot be used."""
    for error in plugins.collisions(plugins.TARGETS):
        tell(str(error))
    for name in plugins.names(plugins.TARGETS):
        try:
            target = load_target(name)
        except DovetailError as error:
            tell(str(error))
        else:
            yield name, target


def load_target(name: str) -> Target:
    """A target of an installed package or a part by name, or the `TARGET` of a Python file by path.

    Raises:
        TargetError: no such target, the file does not import, has no `TARGET`, or names a memory or a file that is
            not there.
        PluginError: the package that has the target is broken.
    """
    if name in PARTS:
        return part_of(name, load_target(PARTS[name].core))
    target = plugins.load(plugins.TARGETS, name, lambda value: _accepted(value, name))
    if target is not None:
        return target
    if not name.endswith(".py"):
        known = plugins.names(plugins.TARGETS)
        near = [f"did you mean {one}? Else " for one in get_close_matches(name, [*known, *PARTS], n=1)]
        hint = f"use one of {', '.join(known)}, a part (dovetail targets --parts), or the path of a target file"
        raise TargetError("there is no such target", where=f"target '{name}'", hint="".join([*near, hint]))
    if not Path(name).is_file():
        raise TargetError("there is no such target file", where=name, hint="check the spelling and the directory")
    own = getattr(import_file(Path(name)), "TARGET", None)
    if not isinstance(own, Target):
        raise TargetError("the file does not define TARGET", where=name, hint="end the file with TARGET = Target(...)")
    _check_names(own, name)
    return own


def _accepted(value: object, name: str) -> Target:
    """The target of an entry point; raises TargetError where it is not complete, or not one of this name."""
    if not isinstance(value, Target):
        raise TargetError(f"is {type(value).__name__}, not a Target", where=name, hint="name a Target")
    if value.name != name:
        hint = "give the entry point and the Target one name"
        raise TargetError(f"the target is called '{value.name}', not '{name}'", where=name, hint=hint)
    _check_names(value, name)
    return value


def advice(suits: Callable[[Target], bool]) -> str:
    """A hint that names the installed targets for which `suits` is true."""
    names = [name for name, target in installed_targets() if suits(target)]
    return f"use --target {' or '.join(names)}, or a file of your own"


def _check_names(target: Target, where: str) -> None:
    """Raise TargetError with all that is wrong with its names, or else with what its units reach."""
    if faults := [*_name_faults(target)] or [*_reach_faults(target)]:
        what, hints = "; ".join(what for what, _ in faults), dict.fromkeys(hint for _, hint in faults)
        raise TargetError(what, where=where, hint="; ".join(hints))


def _name_faults(target: Target) -> Iterator[tuple[str, str]]:
    """Each wrong name of a memory or file, and each wrong buffer, with a hint."""
    memories = [memory.name for memory in target.memories]
    named = [("the program", target.code), ("the values", target.values)]
    named += [(f"the operands of {engine.name}", engine.memory) for engine in target.engines]
    named += [(f"the constants of {engine.name}", engine.constants) for engine in target.engines if engine.constants]
    named += [(f"the buffer of {engine.name}", engine.buffer) for engine in target.engines if engine.buffer]
    for what, name in named:
        if name not in memories:
            yield f"there is no memory '{name}' for {what}", f"the memories are {', '.join(memories)}"
    known = ["core", *(engine.name for engine in target.engines), *(dma.name for dma in target.dmas)]
    for memory in target.memories:
        for name in memory.reach:
            if name not in known:
                hint = f"name some of {', '.join(known)} in Memory.reach"
                yield f"{memory.name} is reached by '{name}', which there is not", hint
    for engine in target.engines:
        if engine.buffer and (engine.buffer in (engine.memory, target.values, target.code) or engine.joint):
            what = f"the buffer of {engine.name} must be a memory of its own, of launches one after the other"
            yield what, "give Engine.buffer a Memory for nothing else, and no joint"
        if loads := [one.name for one in engine.offloads if one.buffered and not engine.buffer]:
            what = f"{', '.join(loads)} of {engine.name} load into a buffer, which it has not"
            yield what, "name a memory as Engine.buffer, or leave out Offload.buffered"
        for path in (path for path in engine.files.values() if isinstance(path, Path) and not path.is_file()):
            yield (
                f"the driver of {engine.name} has no file {path.name}",
                f"write {path}, or change `files` of the engine",
            )


def _reach_faults(target: Target) -> Iterator[tuple[str, str]]:
    """Each unit that does not reach a memory it needs, and each engine of which nobody takes or awaits lists."""
    needed = [("core", target.code, "it runs the program"), ("core", target.values, "it has inputs and outputs there")]
    for engine in (one for one in target.engines if one.device is not None):
        needed.append((engine.name, engine.memory, "its operands lie there"))
        needed.append((engine.name, engine.constants_memory, "it reads its constants there"))
        if engine.dma is not None and engine.stream is None:
            yield (
                f"{engine.dma.name} copies in lists, and {engine.name} takes none",
                "give the Engine a stream= as well",
            )
        if engine.stream is not None and not engine.wait:
            yield f"nobody waits for the lists of {engine.name}", "give the Engine a wait= function"
        carrier = target.dma_of(engine)
        who = carrier.name if carrier else "core"
        if engine.memory != target.values:
            needed += [(who, name, "it brings operands and results") for name in (engine.memory, target.values)]
    for who, name, why in needed:
        if not target.memory(name).is_reached_by(who):
            yield f"{who} must reach {name}: {why}", f'add "{who}" to the reach of {name}, or take another memory'
