"""Makes the devices a simulation names."""

from __future__ import annotations

import importlib
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dovetail.errors import SimulationError
from dovetail.simulate.device import Bus, Device
from dovetail.simulate.protocol import DeviceSpec
from dovetail.user_file import import_file


def make_device(spec: DeviceSpec, bus: Bus) -> Device:
    """Call the factory of `spec`.

    Raises:
        SimulationError: the module, file or function does not exist, or it does not take the arguments.
    """
    factory = find(spec.factory, "device factory")
    try:
        device: Device = factory(bus, **spec.arguments)
    except TypeError as error:
        raise SimulationError(
            f"the device factory failed: {error}",
            where=spec.factory,
            hint=f"let it take the bus and {', '.join(sorted(spec.arguments)) or 'nothing else'}",
        ) from None
    return device


def find(place: str, what: str) -> Any:
    """The object "module:name" or "file.py:name" names.

    Args:
        place: where it is. what: a word for it in the message.

    Raises:
        SimulationError: there is none.
        TargetError: the file does not import.
    """
    module_name, _, name = place.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        path = Path(module_name)
        module = _from_file(path, path.stat().st_mtime_ns) if is_file else importlib.import_module(module_name)
        return getattr(module, name)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise SimulationError(f"there is no such {what}: {error}", where=place,
                              hint="write it as 'module:function' or 'file.py:function'") from None


@lru_cache(maxsize=8)
def _from_file(path: Path, changed: int) -> ModuleType:
    """The module of a file, run anew only when the file has changed."""
    return import_file(path)
