"""Names that load their module when they are first used, and old names: these warn with the new one, for one release.

if not TYPE_CHECKING:  # at the end of a module
    __getattr__ = names(__name__, {"dovetail.package.module": ("late",)}, Old="New", moved="dovetail.other.moved")
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "dovetail.quantize.cells": "dovetail.quantize.recurrent",
    # before there were guests
    "dovetail.mesh": "dovetail.guests.mesh",
    "dovetail.operators.detection": "dovetail.guests.operators.detection",
    "dovetail.operators.signal": "dovetail.guests.operators.signal",
    "dovetail.targets.fields": "dovetail.fields",
    "dovetail.targets.parts": "dovetail.target.parts",
    "dovetail.tools": "dovetail.guests",
    "dovetail.tools.agent": "dovetail.guests.agent.server",
    "dovetail.tools.arrays": "dovetail.arrays",
    "dovetail.tools.explain": "dovetail.explain",
    "dovetail.tools.prove": "dovetail.prove",
    "dovetail.tools.ptq.prepare": "dovetail.guests.ptq.preparation",
    "dovetail.tools.report.report": "dovetail.report",
    "dovetail.tools.vectors": "dovetail.guests.check.vectors",
    # before stages had folders in the order of data
    "dovetail.adapt": "dovetail.legalize",
    "dovetail.frontend": "dovetail.read",
    "dovetail.graph": "dovetail.ir",
    "dovetail.operators.activation": "dovetail.ir.operators.activation",
    "dovetail.operators.arithmetic": "dovetail.ir.operators.arithmetic",
    "dovetail.operators.base": "dovetail.ir.operators.base",
    "dovetail.operators.elementwise": "dovetail.ir.operators.elementwise",
    "dovetail.operators.linear": "dovetail.ir.operators.linear",
    "dovetail.operators.movement": "dovetail.ir.operators.movement",
    "dovetail.operators.reduction": "dovetail.ir.operators.reduction",
    "dovetail.simulate": "dovetail.sim",
}
"""Old module or package -> the new one; what is not listed of a package has kept its name within it."""


class OldNameWarning(DeprecationWarning):
    """A name of before is used; the message says the new one."""


def _new_name(name: str) -> str:
    """The new name of a module; empty where it has not moved."""
    old, rest = name, ""
    while old not in MODULES:
        old, _, last = old.rpartition(".")
        if not old:
            return ""
        rest = f".{last}{rest}"
    return MODULES[old] + rest


class _MovedModules(MetaPathFinder, Loader):
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of an old name; None for all others."""
        return ModuleSpec(fullname, self) if fullname.startswith("dovetail.") and _new_name(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the new module in the place of the old one."""
        old, new = module.__name__, _new_name(module.__name__)
        warnings.warn(f"{old} is {new} now", OldNameWarning, stacklevel=2)
        if any(name.startswith(f"{old}.") for name in MODULES):
            # Python gives a package each module that was imported by way of it: the new one must not get old names.
            module.__dict__.update(__path__=[], __getattr__=lambda name: getattr(import_module(new), name))
        else:
            sys.modules[old] = import_module(new)


def install() -> None:
    """Let modules be found by their old names; each use is shown once."""
    warnings.simplefilter("default", OldNameWarning)
    sys.meta_path.insert(0, _MovedModules())


def names(module: str, late: Mapping[str, tuple[str, ...]] | None = None, **renamed: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module.

    Args:
        module: its name.
        late: names of it by the module that has them, which is loaded when one of them is first used.
        renamed: old names of it -> the new one, with its module before a dot where that is another.
    """
    places = {name: place for place, own in (late or {}).items() for name in own}

    def load(name: str) -> Any:
        if name in places:
            return getattr(import_module(places[name]), name)
        if name not in renamed:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        place, _, new = renamed[name].rpartition(".")
        warnings.warn(f"{module}.{name} is {place or module}.{new} now", OldNameWarning, stacklevel=2)
        return getattr(import_module(place or module), new)

    return load
