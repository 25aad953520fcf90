"""The targets Dovetail comes with, and how a user's own target file is loaded."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from dovetail.errors import TargetError
from dovetail.target.description import Target

BUILT_IN = ("riscv", "ne16", "vta", "riscv_dot4")
"""Names of the targets in this package."""


def load_target(name: str) -> Target:
    """A built-in target by name, or the `TARGET` of a Python file by path.

    Raises:
        TargetError: no such target, or the file has no `TARGET`. Errors inside the user's file pass through.
    """
    if name in BUILT_IN:
        module = importlib.import_module(f"dovetail.targets.{name}")
    elif name.endswith(".py") and Path(name).is_file():
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        if spec is None or spec.loader is None:
            raise TargetError(f"{name} cannot be loaded as Python")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        raise TargetError(
            f"there is no target '{name}'", hint=f"use one of {', '.join(BUILT_IN)}, or the path of a target file"
        )
    target = getattr(module, "TARGET", None)
    if not isinstance(target, Target):
        raise TargetError(f"{name} does not define TARGET", hint="end the file with TARGET = Target(...)")
    return target
