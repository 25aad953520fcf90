"""Dovetail fits a neural network to the accelerator you built.

The names below are for programs; `dovetail.target` describes hardware (docs/reference). Importing the package loads
none of the compiler: a name is loaded where it is used first.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dovetail.names import install
from dovetail.version import __version__

if TYPE_CHECKING:
    from dovetail.api import Build as Build
    from dovetail.api import Run as Run
    from dovetail.api import compile as compile
    from dovetail.api import open_build as open_build
    from dovetail.compile import Options as Options
    from dovetail.errors import DovetailError as DovetailError
    from dovetail.target.registry import load_target as load_target

install()
_PLACES = {
    **dict.fromkeys(("Build", "Run", "compile", "open_build"), "dovetail.api"),
    "Options": "dovetail.compile",
    "DovetailError": "dovetail.errors",
    "load_target": "dovetail.target.registry",
}
__all__ = ["Build", "DovetailError", "Options", "Run", "__version__", "compile", "load_target", "open_build"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    if name == "targets":
        return importlib.import_module("dovetail.targets")
    raise AttributeError(f"module 'dovetail' has no attribute '{name}'")


class _Package(ModuleType):
    """This package, whose `compile` is the function, though a file of that name lies in it: importing a file makes it
    an attribute of its package, and that one is kept from it."""

    @property
    def compile(self) -> Any:
        """`dovetail.api.compile`."""
        return __getattr__("compile")

    @compile.setter
    def compile(self, module: ModuleType) -> None:
        """The file stays where imports find it, in `sys.modules`."""


sys.modules[__name__].__class__ = _Package
