"""The targets Dovetail comes with, and how a user's own target file is loaded."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from dovetail.errors import TargetError
from dovetail.target.description import Target

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
        TargetError: no such target, or the file has no `TARGET`. Errors inside the user's file pass through.
    """
    variable = "TARGET"
    if name in BUILT_IN:
        place, variable = BUILT_IN[name].split(":")
        module = importlib.import_module(f"dovetail.targets.{place}")
    elif name.endswith(".py") and Path(name).is_file():
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        if spec is None or spec.loader is None:
            raise TargetError("the file cannot be loaded as Python", where=name,
                              hint="give a Python file with TARGET = Target(...)")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
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
