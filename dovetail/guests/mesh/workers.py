"""Elements run on a farm: processes of this machine or the workers of a Dask cluster, the results in order."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dovetail.errors import SimulationError
from dovetail.farm import Farm, LostResult
from dovetail.guests.mesh.element import BASE, runner
from dovetail.sim.device import DeviceSpec, MemoryRegion, target_devices
from dovetail.sim.protocol import Buffers, RunRequest, SimulationResult, SimulationSetup
from dovetail.target.description import Target
from dovetail.user_file import blamed

_LIMIT = 2_000_000_000
"""Instructions of an element, over all inputs."""


@dataclass(frozen=True, slots=True)
class ElementJob:
    """An element to run; may be sent to another machine."""

    firmware: bytes
    """An ELF file."""
    data: Buffers
    """Its own: tables, and how many inputs each piece computes."""
    brought: tuple[Buffers, ...]
    """What each input brings it, by key."""


def element_setup(target: Target) -> SimulationSetup:
    """The emulated element of a target, its firmware left out."""
    assert target.mesh is not None
    whole = target.mesh.pieces is not None
    array = {"array": "" if whole else target.mesh.mac.place}
    device = DeviceSpec("dovetail.guests.mesh.element:element_device", BASE, 4096, array)
    devices = (device, *(target_devices(target) if whole else ()))
    memories = tuple(MemoryRegion(m.name, m.base, m.size, m.is_reached_by("core")) for m in target.memories)
    own = (target.core.isa, target.core.costs)
    return SimulationSetup(Path(), memories, devices, *own, extension=target.core.extension)


def run_element(setup: SimulationSetup, job: ElementJob) -> SimulationResult:
    """Run an element in this process.

    Raises:
        SimulationError: it does something it must not, or a device model of the user's fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "element.elf"
        path.write_bytes(job.firmware)
        try:
            return runner(replace(setup, elf=path))(RunRequest((job.data, *job.brought), {}, _LIMIT))
        except Exception as error:
            told = None if isinstance(error, SimulationError) else blamed(error)
            if told is None:
                raise
            raise SimulationError(told.what, where=told.where, hint=told.hint) from None


def run_wave(
    spread: Farm, setup: SimulationSetup, wave: Mapping[int, ElementJob], told: Callable[[], None] = lambda: None
) -> dict[int, SimulationResult]:
    """Run elements side by side.

    Args:
        spread: what does it.
        setup: the element.
        wave: by number of the element.
        told: called as each has ended.

    Raises:
        SimulationError: one of them failed, or ended the process it ran in, twice.
    """
    numbers: Sequence[int] = list(wave)
    found: dict[int, SimulationResult] = {}
    for place, result in spread(partial(run_element, setup), [wave[number] for number in numbers]):
        if isinstance(result, LostResult):
            hint = "look for a bad pointer in the element's driver or device model, or give the process more memory"
            raise SimulationError(result.value, where=f"element {numbers[place]}", hint=hint)
        found[numbers[place]] = result
        told()
    return found
