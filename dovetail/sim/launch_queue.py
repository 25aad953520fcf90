"""Engines that take whole launches through registers: a few places, one at a time, an interrupt at each end."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Generic, TypeVar

from dovetail.documented import document
from dovetail.errors import SimulationError
from dovetail.records import Record
from dovetail.sim.device import Activity, Bus, Device, find
from dovetail.target.devices import JOB, JobRegisters

Work = TypeVar("Work")
MASK32 = 0xFFFFFFFF
"""Mask of all bits of a register."""
START, FINISHED, ROOM = 0x00, 0x04, 0x08
"""Byte offsets of the registers of most engines with a queue (`QueueDevice`)."""


class Launch(Record, Generic[Work]):
    """A launch that was handed over: its number from 1, its work, and its start and end in cycles."""

    number: int
    """Number from 1, in the order of starts."""
    work: Work
    """Registers or other description of the work."""
    start: int
    """Cycle it starts at."""
    end: int
    """Cycle it ends at."""


class LaunchQueue(Generic[Work]):
    """A queue with a fixed number of places. A launch begins when the launch before it has ended."""

    def __init__(self, name: str, places: int) -> None:
        self._name, self._places = name, places
        self._launches: deque[Launch[Work]] = deque()
        self._finished = 0
        self.interrupt = False
        """The level of the interrupt line: high from the end of a launch until `collect`."""

    @property
    def room(self) -> int:
        """Launches that can still be handed over."""
        return self._places - len(self._launches)

    @property
    def next_number(self) -> int:
        """The number the next launch gets."""
        return self._finished + len(self._launches) + 1

    def hand_over(self, work: Work, now: int, cycles: int) -> None:
        """Take a launch of so many cycles; `check_room` comes first."""
        start = max(now, self._launches[-1].end) if self._launches else now
        self._launches.append(Launch(self.next_number, work, start, start + cycles))

    def check_room(self) -> None:
        """Raise SimulationError if the queue is full."""
        if not self.room:
            what = f"launch {self.next_number} was started with all {self._places} places taken"
            raise SimulationError(what, where=self._name, hint="wait until ROOM is not 0")

    def next_event(self) -> int | None:
        """The cycle of the next end, None when idle."""
        return self._launches[0].end if self._launches else None

    def started(self, now: int) -> Launch[Work] | None:
        """The launch that runs at cycle `now`, None when idle."""
        return next((launch for launch in reversed(self._launches) if launch.start <= now), None)

    def ended(self, now: int) -> Iterator[Launch[Work]]:
        """The launches that have ended by cycle `now`; a launch counts as finished when the generator goes on."""
        while self._launches and self._launches[0].end <= now:
            yield self._launches[0]
            self._launches.popleft()
            self._finished += 1
            self.interrupt = True

    def collect(self) -> int:
        """The number of finished launches since reset, modulo 2^32; lowers the interrupt line."""
        self.interrupt = False
        return self._finished & MASK32


class QueueDevice(Device, Generic[Work]):
    """The part of a `Device` that is the same for all engines with a `LaunchQueue`.

    START, write: launch with the registers as they are; later writes to them do not matter to it. FINISHED, read:
    launches finished since reset, modulo 2^32; lowers the interrupt line. ROOM, read: launches that can still be handed
    over. A subclass says what it launches (`launch`), or what its registers do instead (`read`, `write`), and what
    happens when a launch ends (`complete`).

    Args:
        bus: the memories it reaches. name: its name in reports and messages.
        registers: byte offsets of the registers that keep what is written to them.
        places: launches it holds, the running one included.
    """

    START, FINISHED, ROOM = START, FINISHED, ROOM

    def __init__(self, bus: Bus, name: str, registers: Collection[int], places: int) -> None:
        self.name, self.bus = name, bus
        self._offsets, self._places = registers, places
        self.reset()

    def reset(self) -> None:
        self.clear()
        self._activities: list[Activity] = []

    def clear(self) -> None:
        """Zeros in all registers, and no launches."""
        self.registers: dict[int, int] = {int(offset): 0 for offset in self._offsets}
        """The contents of each register, by byte offset."""
        self.queue: LaunchQueue[Work] = LaunchQueue(self.name, self._places)

    def launch(self, now: int) -> None:
        """Hand over a launch with the registers as they are; there is room."""

    @abstractmethod
    def complete(self, launch: Launch[Work]) -> Activity:
        """Carry out a launch that has ended, and say what it was."""

    def read(self, offset: int, now: int) -> int:
        if offset == self.FINISHED:
            return self.queue.collect()
        if offset == self.ROOM:
            return self.queue.room
        self.check_register(offset)
        return self.registers[offset]

    def write(self, offset: int, value: int, now: int) -> None:
        if offset == self.START:
            self.queue.check_room()
            self.launch(now)
            return
        self.check_register(offset)
        self.registers[offset] = value & MASK32

    def parts(self, launch: Launch[Work]) -> Sequence[Activity]:
        """Carry out a launch that has ended, and say what it was, of several things at once each."""
        return [self.complete(launch)]

    def next_event(self) -> int | None:
        return self.queue.next_event()

    def advance(self, now: int) -> None:
        for launch in self.queue.ended(now):
            self._activities += self.parts(launch)

    def interrupt(self) -> bool:
        return self.queue.interrupt

    def activities(self) -> list[Activity]:
        return list(self._activities)

    def check_register(self, offset: int, header: str = "the engine's header") -> None:
        """Raise SimulationError if the device has no register at a byte offset."""
        if offset not in self.registers:
            hint = f"look at the driver: its offsets must be those of {header}"
            raise SimulationError(f"there is no register at offset {offset:#x}", where=self.name, hint=hint)


class ControlledDevice(QueueDevice[Work]):
    """A `QueueDevice` that is started by writing 1 to CONTROL.

    Args:
        bus: the memories it reaches. name: its name in reports and messages.
        registers: byte offsets of all registers, CONTROL, FINISHED and ROOM by these names.
        read_only: those the driver must not write.
        hint: what to tell the author of a driver that writes one of them.
    """

    PLACES = 2
    """Launches the device holds: one running, one waiting."""

    def __init__(
        self, bus: Bus, name: str, registers: type[IntEnum], read_only: Collection[IntEnum], hint: str
    ) -> None:
        self._map, self._read_only, self._hint = registers, read_only, hint
        self.START, self.FINISHED, self.ROOM = (registers[known] for known in ("CONTROL", "FINISHED", "ROOM"))
        super().__init__(bus, name, tuple(registers), self.PLACES)

    def write(self, offset: int, value: int, now: int) -> None:
        if offset in self._read_only:
            raise SimulationError(f"register {self._map(offset).name} is read-only", where=self.name, hint=self._hint)
        if offset == self.START and value != 1:
            hint = "look at the driver: write 1 to start"
            raise SimulationError(f"CONTROL was written {value}; it takes 1", where=self.name, hint=hint)
        super().write(offset, value, now)


class JobDevice(QueueDevice[dict[str, int]]):
    """An engine whose driver writes jobs into registers (`dovetail.target.JobRegisters`), computed by plain functions.

    See `JobRegisters.device`, which names the arguments. Raises SimulationError where the model lacks a function.
    """

    def __init__(self, bus: Bus, name: str, model: str, registers: Sequence[str], places: int = 1) -> None:
        self._job = JobRegisters(tuple(registers))
        self._cycles: Callable[[Mapping[str, int]], int] = find(f"{model}:cycles", "function")
        self._macs: Callable[[Mapping[str, int]], int] = find(f"{model}:macs", "function")
        self._compute: Callable[[Mapping[str, int], Bus], None] = find(f"{model}:compute", "function")
        super().__init__(bus, name, range(JOB, JOB + 4 * len(registers), 4), places)

    def launch(self, now: int) -> None:
        job = self._job.job(self.registers)
        self.queue.hand_over(job, now, self._cycles(job))

    def complete(self, launch: Launch[dict[str, int]]) -> Activity:
        self._compute(launch.work, self.bus)
        return Activity(launch.start, launch.end, f"job {launch.number}", macs=self._macs(launch.work))


MOST_FINISHED = 2
"""Largest value of FINISHED."""
RUNNING_DELAY = 2
"""Cycles from an end until RUNNING_JOB tells it."""
IDS = 256
"""Number of job numbers; after the last one they begin again at 0."""


class Control(IntEnum):
    """Byte offsets of the controller's registers, and of the chip's latch."""

    TRIGGER = 0x00
    ACQUIRE = 0x04
    FINISHED = 0x08
    STATUS = 0x0C
    RUNNING_JOB = 0x10
    SOFT_CLEAR = 0x14
    EVENT = 0xFC


class AddressLines(Enum):
    """Value of the address lines between accesses: the interconnect decides it, and the RTL looks at it then too."""

    HELD = "held"
    """The address of the last access, the worst there is: after a read of FINISHED it stays 0."""
    QUIET = "quiet"
    """No register of the controller: only a read in the very cycle loses an end."""


class HwpeDevice(QueueDevice[Work]):
    """A `QueueDevice` behind the controller of PULP's hardware processing engines, as its RTL behaves: pulp-platform/
    hwpe-ctrl rtl/hwpe_ctrl_slave.sv and hwpe_ctrl_regfile.sv of v1.6 to v2.0.

    - 0x00 TRIGGER, write 0: hand over the acquired context; the job runs when those before it have ended.
    - 0x04 ACQUIRE, read: the job's id (0..255, counting up), and from then on the job registers are its context; -1
      when all contexts are taken; -2 when one is acquired but not triggered yet.
    - 0x08 FINISHED, read: jobs ended since the last read, 2 at most. No driver can count with it: a third end is lost,
      and so is one while the address lines show FINISHED, with a request or without: in the cycle of a read, and for as
      long as nothing else drives the lines (`AddressLines`).
    - 0x0c STATUS, read: bit 0 (8, ...) set while context 0 (1, ...) is triggered and has not ended.
    - 0x10 RUNNING_JOB, read: jobs ended, modulo 256: the id of the one that runs. It follows an end two cycles late.
    - 0x14 SOFT_CLEAR, write: drops all jobs and clears all contexts.
    - 0xfc EVENT, which is the chip's: the controller ends a job with a pulse of one cycle, which PULP's event unit
      latches. Write 1: forget what is latched, and let the next end raise the interrupt line; write 0: forget, and keep
      the line low. Read: 1 when an end is latched. After a reset ends raise the line. Reading FINISHED forgets too.
    - the job's registers, where the engine has them. Contexts alternate and keep their values.

    A subclass says what a triggered job is and how long it takes (`begin`), and what its end does (`complete`).

    Args:
        bus: the memories it reaches.
        name: its name in reports and messages.
        registers: byte offsets of the job registers.
        contexts: jobs it holds, the running one included.
        lines: what the address lines show between accesses.
    """

    def __init__(
        self, bus: Bus, name: str, registers: Sequence[int], contexts: int, lines: AddressLines = AddressLines.HELD
    ) -> None:
        self._lines = lines
        super().__init__(bus, name, registers, contexts)

    def reset(self) -> None:
        """See `Device.reset`."""
        super().reset()
        self._latched, self._listening = False, True

    def clear(self) -> None:
        """See `QueueDevice.clear`."""
        super().clear()
        self._contexts = [dict(self.registers) for _ in range(self._places)]
        self._written: list[set[int]] = [set() for _ in range(self._places)]
        self._is_acquired = False
        self._finished, self._ended, self._last_end = 0, 0, -RUNNING_DELAY
        self._shown, self._read_at = -1, -1

    @abstractmethod
    def begin(self, identity: int, registers: dict[int, int]) -> tuple[Work, int]:
        """The job with an id that its registers (byte offset -> value) describe, and its cycles; raises SimulationError
        where the engine has no such job."""

    @property
    def _next_job(self) -> int:
        """Jobs triggered since the last clear: the number of the next."""
        return self.queue.next_number - 1

    @property
    def _context(self) -> dict[int, int]:
        return self._contexts[self._next_job % self._places]

    def advance(self, now: int) -> None:
        """See `Device.advance`."""
        for launch in self.queue.ended(now):
            self._activities.append(self.complete(launch))
            self._latched, self._ended, self._last_end = True, self._ended + 1, launch.end
            held = self._lines is AddressLines.HELD and self._shown == Control.FINISHED
            if not held and self._read_at != launch.end - 1:
                self._finished = min(self._finished + 1, MOST_FINISHED)

    def interrupt(self) -> bool:
        """See `Device.interrupt`."""
        return self._latched and self._listening

    def read(self, offset: int, now: int) -> int:
        """One register as an unsigned 32-bit word; SimulationError when there is none to read at `offset`."""
        if offset == Control.EVENT:
            return int(self._latched)
        self._shown = offset
        if offset == Control.ACQUIRE:
            return self._acquire() & MASK32
        if offset == Control.FINISHED:
            count, self._finished, self._read_at, self._latched = self._finished, 0, now, False
            return count
        if offset == Control.STATUS:
            running = range(self._next_job - (self._places - self.queue.room), self._next_job)
            return sum(1 << 8 * (number % self._places) for number in running)
        if offset == Control.RUNNING_JOB:
            return (self._ended - (now < self._last_end + RUNNING_DELAY)) % IDS
        self.check_register(offset)
        return self._context[offset]

    def write(self, offset: int, value: int, now: int) -> None:
        """Write one register; SimulationError for one that cannot be written, or a job the engine does not have."""
        if offset == Control.EVENT:
            self._latched, self._listening = False, bool(value & 1)
            return
        self._shown = offset
        if offset == Control.SOFT_CLEAR:
            self.clear()
        elif not self._is_acquired:
            what = f"the register at offset {offset:#x} is written before a job is acquired"
            hint = "look at the driver: acquire a job, write its registers, then write 0 to TRIGGER"
            raise SimulationError(what, where=self.name, hint=hint)
        elif offset == Control.TRIGGER:
            self._trigger(value, now)
        else:
            self.check_register(offset)
            self._context[offset] = value & MASK32
            self._written[self._next_job % self._places].add(offset)

    def _acquire(self) -> int:
        if self._is_acquired:
            return -2
        if not self.queue.room:
            return -1
        self._is_acquired = True
        return self._next_job % IDS

    def _trigger(self, value: int, now: int) -> None:
        if value != 0:
            hint = "look at the driver: write 0, which hands over the job and starts it"
            raise SimulationError(f"TRIGGER is written {value}; only 0 is modelled", where=self.name, hint=hint)
        try:
            work, cycles = self.begin(self._next_job % IDS, dict(self._context))
        except SimulationError as error:
            place, count = self._next_job % self._places, len(self._context)
            missing = count - len(self._written[place])
            if not missing:
                raise
            what = f"{error.what}; {missing} of the {count} job registers of context {place} were never written"
            raise SimulationError(what, where=error.where, hint=error.hint) from error
        self.queue.hand_over(work, now, cycles)
        self._is_acquired = False


document(__name__)
