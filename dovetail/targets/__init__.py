"""The targets Dovetail comes with, and how a user's own target file is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from dovetail.errors import TargetError
from dovetail.target.description import Target
from dovetail.user_file import import_file

BUILT_IN = {
    "riscv": "riscv:TARGET",
    "riscv_big_small": "riscv:BIG_SMALL",
    "riscv_dot4": "riscv_dot4:TARGET",
    "riscv_xpulp": "riscv_dot4:XPULP",
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
        TargetError: no such target, the file does not import, or it has no `TARGET`.
    """
    variable = "TARGET"
    if name in BUILT_IN:
        place, variable = BUILT_IN[name].split(":")
        module = importlib.import_module(f"dovetail.targets.{place}")
    elif name.endswith(".py") and Path(name).is_file():
        module = import_file(Path(name))
    else:
        raise TargetError("there is no such target", where=f"target '{name}'",
                          hint=f"use one of {', '.join(BUILT_IN)}, or the path of a target file")
    target = getattr(module, variable, None)
    if not isinstance(target, Target):
        raise TargetError("the file does not define TARGET", where=name, hint="end the file with TARGET = Target(...)")
    return target


def advice(suits: Callable[[Target], bool]) -> str:
    """What to do where a target does not suit: the built-in ones that do, as a hint."""
    return f"use --target {' or '.join(name for name in BUILT_IN if suits(load_target(name)))}, or a file of your own"
