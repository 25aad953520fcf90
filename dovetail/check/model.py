"""A program with its engines' Python models alone: no firmware, no core. For engines of `JobRegisters`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dovetail.errors import ProgramError, SimulationError
from dovetail.graph.types import Array
from dovetail.program.interpret import Machine
from dovetail.program.ir import Launch
from dovetail.simulate.device import Bytes, Device, MemoryRegion
from dovetail.simulate.factory import make_device
from dovetail.simulate.job_device import FINISHED, START
from dovetail.simulate.protocol import DeviceSpec
from dovetail.target.description import Command, Engine, Target
from dovetail.target.registers import JOB

if TYPE_CHECKING:
    from dovetail.compile import Compiled

JOB_DEVICE = "dovetail.simulate.job_device:JobDevice"
LAST = 8
"""Register accesses shown of a port that hangs."""


class MemoryView:
    """A `Bus` over the memories of an interpreted program."""

    def __init__(self, target: Target, memories: Mapping[str, Array]) -> None:
        self.regions: Sequence[MemoryRegion] = tuple(MemoryRegion(m.name, m.base, m.size) for m in target.memories)
        self._memories = memories

    def view(self, address: int, nbytes: int) -> Bytes:
        """See `Bus.view`."""
        for region in self.regions:
            offset = address - region.base
            if offset >= 0 and nbytes >= 0 and offset + nbytes <= region.size:
                return self._memories[region.name][offset : offset + nbytes]
        raise SimulationError(f"{nbytes} bytes at {address:#x} are not inside one memory")


def has_model(target: Target, engine: Engine) -> bool:
    """Whether an engine can be tried by its Python model alone."""
    return engine.device is not None and engine.device.factory == JOB_DEVICE and not target.reads_constants(engine)


def writes_of(command: Command) -> list[tuple[int, int]]:
    """Byte offset and value of each register a driver of `JobRegisters` writes for a command, in order."""
    return [*((JOB + 4 * index, word) for index, word in enumerate(command.words)), (START, 1)]


def last_writes(command: Command) -> str:
    """The last register writes of a command, for people."""
    writes = [f"write {offset:#x} = {value & 0xFFFFFFFF:#x}" for offset, value in writes_of(command)]
    return "; ".join(writes[-LAST:])


def carry_out(device: Device, command: Command) -> None:
    """One job from start to end."""
    for offset, value in writes_of(command):
        device.write(offset, value, 0)
    while (event := device.next_event()) is not None:
        device.advance(event)
    device.read(FINISHED, 0)


def device_of(engine: Engine, bus: MemoryView) -> Device:
    """An engine's Python model on these memories."""
    assert engine.device is not None
    model = engine.device
    return make_device(DeviceSpec(model.factory, model.base, model.size, model.arguments), bus)


def on_model(compiled: Compiled, inputs: Mapping[str, Array], seconds: float) -> dict[str, Array]:
    """The outputs of a program whose launches the devices carry out.

    Raises:
        SimulationError: a device accesses what it must not, or does not come to an end.
    """
    program, target, unit = compiled.plan.program, compiled.unit.target, compiled.unit
    machine = Machine(program, target)
    for memory in machine.memories.values():
        memory[:] = 0xA5  # as the simulated chip's: what nobody wrote is no friendly zero
    bus = MemoryView(target, machine.memories)
    for name, view in program.inputs.items():
        machine.write(view, inputs[name])
    for index, statement in enumerate(program.statements):
        if not isinstance(statement, Launch):
            machine.step(index, statement)
            continue
        device = device_of(target.engine(statement.engine), bus)
        for _, command in unit.commands[index]:
            if not isinstance(command, Command):
                raise ProgramError(f"{statement.engine} is software and has no device")
            with time_limit(seconds, last_writes(command)):
                carry_out(device, command)
    return {name: machine.read(view) for name, view in program.outputs.items()}


@contextmanager
def time_limit(seconds: float, last: str) -> Iterator[None]:
    """Raise SimulationError where the body takes longer; in the main thread of a system with alarms, else nothing."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        """Called by the alarm; says where the model is."""
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
        raise SimulationError(f"it hangs: no end within {seconds:g} s", where=place,
                              hint=f"last register accesses: {last}")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
