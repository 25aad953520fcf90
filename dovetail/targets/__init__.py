"""The targets Dovetail comes with, and how a user's own target file is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from dovetail.errors import TargetError
from dovetail.target import Target
from dovetail.target.parts import PARTS, part_of
from dovetail.user_file import import_file

BUILT_IN = {
    "riscv": "riscv:TARGET",
    "riscv_big_small": "riscv:BIG_SMALL",
    "riscv_dot4": "riscv_dot4:TARGET",
    "riscv_xpulp": "riscv_xpulp:TARGET",
    "riscv_imac": "riscv:IMAC",
    "riscv64": "riscv:RV64",
    "cortex_m0plus": "cortex_m:M0PLUS",
    "cortex_m3": "cortex_m:M3",
    "cortex_m4": "cortex_m:M4",
    "cortex_m7": "cortex_m:M7",
    "cortex_m23": "cortex_m:M23",
    "cortex_m33": "cortex_m:M33",
    "cortex_m55": "cortex_m:M55",
    "ne16": "ne16:TARGET",
    "vta": "vta:TARGET",
    "maeri": "maeri:TARGET",
    "spinnaker2": "spinnaker2_engine:TARGET",
    "diana": "diana:TARGET",
    "opencl": "opencl:TARGET",
    "macarray": "macarray:TARGET",
    "kestrel": "kestrel:TARGET",
}
"""The targets in this package: name -> module and variable. The microcontrollers of `parts.PARTS` are targets too."""


def load_target(name: str) -> Target:
    """A built-in target or a part by name, or the `TARGET` of a Python file by path.

    Raises:
        TargetError: no such target, the file does not import, has no `TARGET`, or names a memory or a file that is
            not there.
    """
    if name in PARTS:
        return part_of(name, load_target(PARTS[name].core))
    variable = "TARGET"
    if name in BUILT_IN:
        place, variable = BUILT_IN[name].split(":")
        module = importlib.import_module(f"dovetail.targets.{place}")
    elif name.endswith(".py") and Path(name).is_file():
        module = import_file(Path(name))
    else:
        hint = f"use one of {', '.join(BUILT_IN)}, a part (dovetail targets --parts), or the path of a target file"
        raise TargetError("there is no such target", where=f"target '{name}'", hint=hint)
    target = getattr(module, variable, None)
    if not isinstance(target, Target):
        raise TargetError("the file does not define TARGET", where=name, hint="end the file with TARGET = Target(...)")
    _check_names(target, name)
    return target


def advice(suits: Callable[[Target], bool]) -> str:
    """What to do where a target does not suit: the built-in ones that do, as a hint."""
    return f"use --target {' or '.join(name for name in BUILT_IN if suits(load_target(name)))}, or a file of your own"


def _check_names(target: Target, where: str) -> None:
    memories = [memory.name for memory in target.memories]
    named = [("the program", target.code), ("the values", target.values)]
    named += [(f"the operands of {engine.name}", engine.memory) for engine in target.engines]
    named += [(f"the constants of {engine.name}", engine.constants) for engine in target.engines if engine.constants]
    for what, memory in named:
        if memory not in memories:
            hint = f"the memories are {', '.join(memories)}"
            raise TargetError(f"there is no memory '{memory}' for {what}", where=where, hint=hint)
    _check_reach(target, where)
    for engine in target.engines:
        missing = [path for path in engine.files.values() if isinstance(path, Path) and not path.is_file()]
        if missing:
            hint = f"write {missing[0]}, or change `files` of the engine"
            raise TargetError(f"the driver of {engine.name} has no file {missing[0].name}", where=where, hint=hint)


def _check_reach(target: Target, where: str) -> None:
    """Who must reach which memory does, and names in `Memory.reach` are known."""
    known = ["core", *(engine.name for engine in target.engines), *(dma.name for dma in target.dmas)]
    for memory in target.memories:
        for name in memory.reach:
            if name not in known:
                what = f"{memory.name} is reached by '{name}', which there is not"
                raise TargetError(what, where=where, hint=f"name some of {', '.join(known)} in Memory.reach")
    needed = [("core", target.code, "it runs the program"), ("core", target.values, "it has inputs and outputs there")]
    for engine in (one for one in target.engines if one.device is not None):
        needed.append((engine.name, engine.memory, "its operands lie there"))
        needed.append((engine.name, engine.constants or engine.memory, "it reads its constants there"))
        if engine.dma is not None and engine.stream is None:
            hint = "give the Engine a stream= as well"
            raise TargetError(
                f"{engine.dma.name} copies in lists, and {engine.name} takes none", where=where, hint=hint
            )
        if engine.stream is not None and not engine.wait:
            hint = "give the Engine a wait= function"
            raise TargetError(f"nobody waits for the lists of {engine.name}", where=where, hint=hint)
        carrier = target.dma_of(engine)
        who = carrier.name if carrier else "core"
        if engine.memory != target.values:
            needed += [(who, name, "it brings operands and results") for name in (engine.memory, target.values)]
    for who, name, why in needed:
        if not target.memory(name).is_reached_by(who):
            hint = f'add "{who}" to the reach of {name}, or take another memory'
            raise TargetError(f"{who} must reach {name}: {why}", where=where, hint=hint)
