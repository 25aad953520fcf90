"""An engine whose driver writes jobs into registers (`dovetail.target.JobRegisters`), computed by plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dovetail.errors import SimulationError
from dovetail.simulate.device import Activity, Bus
from dovetail.simulate.factory import find
from dovetail.simulate.launch_queue import LaunchQueue
from dovetail.target.registers import JOB, JobRegisters

START, FINISHED, ROOM = 0x00, 0x04, 0x08
"""Byte offsets."""


class JobDevice:
    """See `JobRegisters.device`, which names the arguments.

    Raises:
        SimulationError: the model lacks a function.
    """

    def __init__(self, bus: Bus, name: str, model: str, registers: Sequence[str], places: int = 1) -> None:
        self.name = name
        self._bus, self._places = bus, places
        self._registers = JobRegisters(tuple(registers))
        self._cycles: Callable[[Mapping[str, int]], int] = find(f"{model}:cycles", "function")
        self._macs: Callable[[Mapping[str, int]], int] = find(f"{model}:macs", "function")
        self._compute: Callable[[Mapping[str, int], Bus], None] = find(f"{model}:compute", "function")
        self.reset()

    def reset(self) -> None:
        """See `Device.reset`."""
        self._queue: LaunchQueue[dict[str, int]] = LaunchQueue(self.name, self._places)
        self._written = {JOB + 4 * index: 0 for index in range(len(self._registers.names))}

    def read(self, offset: int, now: int) -> int:
        """See `Device.read`."""
        if offset == FINISHED:
            return self._queue.collect()
        if offset != ROOM and offset not in self._written:
            raise SimulationError(f"there is no register to read at offset {offset:#x}", where=self.name,
                                  hint="look at the driver: it reads the job's registers, ROOM and FINISHED, see its "
                                       "header")
        return self._queue.room if offset == ROOM else self._written[offset]

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        if offset == START:
            self._queue.check_room()
            job = self._registers.job(self._written)
            self._queue.hand_over(job, now, self._cycles(job))
        elif offset in self._written:
            self._written[offset] = value
        else:
            raise SimulationError(f"there is no register to write at offset {offset:#x}", where=self.name,
                                  hint="look at the driver: it writes the job's registers and START, see its header")

    def next_event(self) -> int | None:
        """See `Device.next_event`."""
        return self._queue.next_event()

    def advance(self, now: int) -> None:
        """See `Device.advance`."""
        for launch in self._queue.ended(now):
            self._compute(launch.work, self._bus)
            label = f"job {launch.number}"
            self._queue.activities.append(Activity(launch.start, launch.end, label, macs=self._macs(launch.work)))

    def interrupt(self) -> bool:
        """See `Device.interrupt`."""
        return self._queue.interrupt

    def activities(self) -> list[Activity]:
        """See `Device.activities`."""
        return list(self._queue.activities)
