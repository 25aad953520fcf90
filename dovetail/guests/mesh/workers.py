"""Elements run on a farm: processes of this machine or the workers of a Dask cluster, the results in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import SimulationError
from dovetail.farm import Farm, LostResult
from dovetail.files import TemporaryFolder
from dovetail.guests.mesh.element import BASE, ElementDevice, StoredPart
from dovetail.guests.mesh.layers import Ints
from dovetail.sim.device import DeviceSpec, regions_of, target_devices
from dovetail.sim.protocol import RunRequest, SimulationResult, SimulationSetup
from dovetail.target.description import Target
from dovetail.user_file import blamed

if TYPE_CHECKING:
    from dovetail.sim.machine import Machine

_LIMIT = 2_000_000_000
"""Instructions of an element, over all inputs."""
LOST_HINT = "look for a bad pointer in the element's driver or device model, or give the process more memory"


@dataclass(frozen=True, slots=True)
class ElementJob:
    """An element to run; may be sent to another machine."""

    firmware: bytes
    """An ELF file."""
    data: bytes
    """For the symbol element_data."""
    inputs: tuple[int, ...] = ()
    """Inputs that each piece computes."""
    own: frozenset[int] = frozenset()
    """Keys of messages the element sends to itself."""
    messages: tuple[Mapping[int, bytes], ...] = ()
    """Per input: message by key."""
    tensors: tuple[Mapping[int, bytes], ...] = ()
    """Per input: tensor in DRAM by number."""


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Messages, results and cycles of an element."""

    sent: Mapping[int, Mapping[int, bytes]]
    """Input -> message by key."""
    stored: Mapping[int, Sequence[StoredPart]]
    """Input -> parts of tensors."""
    clocks: Ints
    """[inputs, pieces, 4] as `RackRun.clocks`."""
    cycles: int
    """Executing, and waiting for the MAC array."""
    instructions: int
    stack: int
    """Most bytes of stack."""


def element_setup(target: Target) -> SimulationSetup:
    """The emulated element of a target, its firmware left out."""
    assert target.mesh is not None
    has_engines = target.mesh.pieces is not None
    array = {"array": "" if has_engines else target.mesh.mac.place}
    device = DeviceSpec("dovetail.guests.mesh.element:element_device", BASE, 4096, array)
    devices = (device, *(target_devices(target) if has_engines else ()))
    own = (target.core.isa, target.core.costs)
    return SimulationSetup(Path(), regions_of(target), devices, *own, extension=target.core.extension)


def run_element(setup: SimulationSetup, job: ElementJob) -> ElementRun:
    """Run an element in this process.

    Raises:
        SimulationError: it does something it must not, or a device model of the user's fails.
    """
    try:
        machine, device = _element(setup, job.firmware, job.data)
        device.inputs, device.own, device.tensors = job.inputs, job.own, job.tensors
        device.messages = [dict(messages) for messages in job.messages]
        result = machine.run(RunRequest((), {}, _LIMIT))
    except Exception as error:
        fault = None if isinstance(error, SimulationError) else blamed(error)
        if fault is None:
            raise
        raise SimulationError(fault.what, where=fault.where, hint=fault.hint) from None
    return _run_of(machine, result, device.clocks(len(job.messages), machine.cycles))


def _run_of(machine: Machine, result: SimulationResult, clocks: Ints) -> ElementRun:
    """The run of an element since it began, or since its last barrier."""
    device = machine.devices[0]
    assert isinstance(device, ElementDevice)
    counts = (machine.cycles, result.executed_instructions or 0, result.stack_bytes or 0)
    return ElementRun(dict(device.sent), {number: [*parts] for number, parts in device.stored.items()}, clocks, *counts)


def _element(setup: SimulationSetup, firmware: bytes, data: bytes) -> tuple[Machine, ElementDevice]:
    """An element with its firmware, an ELF file, and its data, before its first instruction."""
    from dovetail.sim.machine import Machine

    with TemporaryFolder() as folder:
        path = Path(folder) / "element.elf"
        path.write_bytes(firmware)
        machine = Machine(replace(setup, elf=path))
    device = machine.devices[0]
    assert isinstance(device, ElementDevice)
    machine.firmware.write("element_data", data)
    return machine, device


class LiveElement:
    """An element of a network in sections, at the barrier before one of them.

    Args:
        setup: the element.
        firmware: an ELF file.
        data: for the symbol element_data.
        sections: how many there are.
        dram: what it loads, at `rate` bytes per clock.
    """

    def __init__(
        self, setup: SimulationSetup, firmware: bytes, data: bytes, sections: int, dram: bytes, rate: float
    ) -> None:
        self._machine, self._device = _element(setup, firmware, data)
        self._device.inputs = [1 << 20] * sections
        self._device.dram, self._device.rate = dram, rate
        self._machine.run(RunRequest((), {}, _LIMIT))

    def step(
        self, section: int, number: int, messages: Mapping[int, bytes], tensors: Mapping[int, bytes]
    ) -> ElementRun:
        """Run to the next barrier.

        Args:
            section: the one it is before.
            number: of the input.
            messages: by key.
            tensors: in DRAM, by number.

        Returns:
            What it did; its clocks, [1, sections, 4], count from the barrier, waiting for loads left out.
        """
        machine, device = self._machine, self._device
        before = machine.cycles
        device.enter(section, number, messages, tensors)
        result = machine.run(RunRequest(({},), {}, _LIMIT))
        clocks = device.clocks(number + 1, machine.cycles)[number:]
        return _run_of(machine, result, clocks - before - device.waited)


def run_wave(
    spread: Farm, setup: SimulationSetup, wave: Mapping[int, ElementJob], ended: Callable[[], None] = lambda: None
) -> dict[int, ElementRun]:
    """Run elements side by side.

    Args:
        spread: runs them.
        setup: the element.
        wave: by number of the element.
        ended: called as each has ended.

    Raises:
        SimulationError: one of them failed, or ended the process it ran in, twice.
    """
    numbers: Sequence[int] = list(wave)
    runs: dict[int, ElementRun] = {}
    for place, run in spread(partial(run_element, setup), list(wave.values())):
        if isinstance(run, LostResult):
            raise SimulationError(run.value, where=f"element {numbers[place]}", hint=LOST_HINT)
        runs[numbers[place]] = run
        ended()
    return runs
