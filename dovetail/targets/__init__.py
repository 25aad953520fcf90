"""The targets Dovetail comes with, and how a user's own target file is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from dovetail.errors import TargetError
from dovetail.target import Target
from dovetail.user_file import import_file

BUILT_IN = {
    "riscv": "riscv:TARGET",
    "riscv_big_small": "riscv:BIG_SMALL",
    "riscv_dot4": "riscv_dot4:TARGET",
    "riscv_xpulp": "riscv_xpulp:TARGET",
    "cortex_m4": "cortex_m:M4",
    "cortex_m7": "cortex_m:M7",
    "cortex_m33": "cortex_m:M33",
    "ne16": "ne16:TARGET",
    "vta": "vta:TARGET",
    "maeri": "maeri:TARGET",
    "spinnaker2": "spinnaker2:TARGET",
    "diana": "diana:TARGET",
    "opencl": "opencl:TARGET",
    "macarray": "macarray:TARGET",
}
"""The targets in this package: name -> module and variable."""


def load_target(name: str) -> Target:
    """A built-in target by name, or the `TARGET` of a Python file by path.

    Raises:
        TargetError: no such target, the file does not import, has no `TARGET`, or names a memory or a file that is
            not there.
    """
    variable = "TARGET"
    if name in BUILT_IN:
        place, variable = BUILT_IN[name].split(":")
        module = importlib.import_module(f"dovetail.targets.{place}")
    elif name.endswith(".py") and Path(name).is_file():
        module = import_file(Path(name))
    else:
        hint = f"use one of {', '.join(BUILT_IN)}, or the path of a target file"
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
    for engine in target.engines:
        missing = [path for path in engine.files.values() if isinstance(path, Path) and not path.is_file()]
        if missing:
            hint = f"write {missing[0]}, or change `files` of the engine"
            raise TargetError(f"the driver of {engine.name} has no file {missing[0].name}", where=where, hint=hint)
