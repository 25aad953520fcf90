"""The targets Dovetail comes with, and how a user's own target file is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from pathlib import Path
from types import ModuleType

from dovetail.errors import DovetailError, TargetError
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
        TargetError: no such target, the file does not run, or it has no `TARGET`.
    """
    variable = "TARGET"
    if name in BUILT_IN:
        place, variable = BUILT_IN[name].split(":")
        module = importlib.import_module(f"dovetail.targets.{place}")
    elif name.endswith(".py") and Path(name).is_file():
        module = _run(name)
    else:
        raise TargetError(
            f"there is no target '{name}'", hint=f"use one of {', '.join(BUILT_IN)}, or the path of a target file"
        )
    target = getattr(module, variable, None)
    if not isinstance(target, Target):
        raise TargetError("it does not define TARGET", where=name, hint="end the file with TARGET = Target(...)")
    return target


def _run(name: str) -> ModuleType:
    """The module of a user's file."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except DovetailError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        what = error.msg if isinstance(error, SyntaxError) else error
        raise TargetError(f"the file does not run: {type(error).__name__}: {what}",
                          where=f"{name}:{line}" if line else name, hint="correct it there") from error
    return module
