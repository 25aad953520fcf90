"""Further cores, and the mailbox by which core 0 starts jobs on them (driver: emit/runtime/cores.c).

Registers, each of 4 bytes: 0 the number of the core that reads it; 4 and 8 are the workers' own: reading takes the
next job (0 for none), writing says that it has finished. From 16 on there are 16 bytes for each core: 0 START (writing
hands over a job, reading gives the number of jobs handed over), 4 DONE (the number of jobs finished), 8 ROOM (jobs it
can still be handed), 12 AFTER (writing holds the next job back until the core in bits 24 to 31 has finished as many
jobs as bits 0 to 23 say, modulo 2^24; each write adds a condition). Reading DONE lowers the interrupt line and, where a
job is left, lets it rise when the next one has finished.

A worker runs a job when core 0 looks whether it has finished, at once and to its end, with a clock of its own: it
begins when it was handed over, or when the one before, and those it is held back by, have finished; these are carried
out first. A correct program cannot tell the difference, because it does not touch what the job reads and writes before
it has waited; where a wait is missing, old data are found. Each core has its memories to itself: what they cost one
another is not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dovetail.codegen.build.elf import describe_address
from dovetail.errors import SimulationError
from dovetail.sim.core import NEVER, STOP_LIMIT, CoreSetup
from dovetail.sim.device import Activity, AddressWindow, Device, access
from dovetail.sim.processor import Processor

SIZE = 4096
"""Bytes of address space."""
LATENCY = 8
"""Cycles from the write of a register of the mailbox until the other core's wfi ends or the register shows it: an
assumption, of a write over the bus and an interrupt line with two stages of registers. (The event unit of the PULP
clusters needs 2, F. Glaser et al., "Energy-efficient hardware-accelerated synchronization for shared-L1-memory
multiprocessor clusters", 2020; what it costs to run the driver comes on top and is simulated.)"""
PLACES = 64
"""Jobs a worker can be handed ahead, the running one included."""
_FIRST, _EACH = 16, 16


class Worker(Device):
    """A further core, numbered from 1, with its jobs in the order they are handed over; as a `Device` what it sees of
    the mailbox, which is at address `base`. Its memories are shared with all cores."""

    def __init__(self, number: int, setup: CoreSetup, base: int) -> None:
        self.number, self.name = number, f"core{number}"
        self._symbols = setup.symbols
        self._processor = Processor(setup, [AddressWindow(base, SIZE, self)], self._access)
        self._queue: deque[tuple[int, int, list[tuple[Worker, int]]]] = deque()
        """Jobs, when they are there, and the jobs of others they are held back by."""
        self._held: list[tuple[Worker, int]] = []
        """The jobs of others that the next one is held back by."""
        self._next = 0
        self._ended: int | None = None
        self._ends: list[int] = []
        """By job carried out, the cycle in which others know that it has finished."""
        self._awake = False
        self._activities: list[Activity] = []
        self.instruction_limit = NEVER
        """Instructions it may have executed in all."""
        self.given = 0
        """Jobs handed over so far."""
        self.finished = 0
        """Jobs core 0 knows to have finished."""
        self._raised = False

    @property
    def instructions(self) -> int:
        """Executed so far."""
        return int(self._processor.state.instructions)

    @property
    def room(self) -> int:
        """Jobs it can still be handed."""
        return PLACES - (self.given - self.finished)

    def traffic(self) -> dict[str, int]:
        """See `WaitPorts.traffic`."""
        return self._processor.traffic()

    def start(self, entry: int) -> None:
        """Stand at the firmware's entry point."""
        self._processor.start(entry)

    def give(self, job: int, now: int) -> None:
        """Take a job, the address of a function, at cycle `now`."""
        if not self.room:
            what = f"job {self.given + 1} was started with all {PLACES} places taken"
            raise SimulationError(what, where=self.name, hint="wait until ROOM is not 0")
        self._queue.append((job, now + LATENCY, self._held))
        self._held = []
        self.given += 1

    def hold(self, other: Worker, ticket: int) -> None:
        """Hold the next job back until another worker has finished a job, by its number modulo 2^24."""
        number = other.given - ((other.given - ticket) & 0xFFFFFF)
        if other is self or not 0 < number <= other.given:
            what = f"its next job is held back by job {ticket} of {other.name}, which has not been handed over"
            raise SimulationError(what, where=self.name, hint="give core_after the ticket of a core_start")
        self._held.append((other, number))

    def look(self, now: int) -> int:
        """How many jobs have finished by cycle `now`; the next one left is carried out."""
        self._raised = False
        self._count(now)
        while self.finished == len(self._ends) < self.given:
            self.end_of(self.finished + 1)
            self._count(now)
        return self.finished

    def end_of(self, number: int) -> int:
        """The cycle in which others know that a job, counted from 1, has finished; it is carried out if need be."""
        while len(self._ends) < number:
            job, begin, held = self._queue.popleft()
            ends = [other.end_of(ticket) for other, ticket in held]
            self._ends.append(self._run(job, max([begin, *ends])) + LATENCY)
        return self._ends[number - 1]

    def next_event(self) -> int | None:
        """The cycle at which the job core 0 waits for is known to have finished; None when it waits for none."""
        return self._ends[self.finished] if self.finished < len(self._ends) else None

    def advance(self, now: int) -> None:
        self._raised = self._count(now) or self._raised

    def interrupt(self) -> bool:
        return self._raised

    def activities(self) -> list[Activity]:
        return self._activities

    def read(self, offset: int, now: int) -> int:
        if offset == 0:
            return self.number
        if offset == 4:
            job, self._next = self._next, 0
            return job
        raise self._unknown("read", offset)

    def write(self, offset: int, value: int, now: int) -> None:
        if offset != 8:
            raise self._unknown("write", offset)
        self._ended = now

    def _unknown(self, kind: str, offset: int) -> SimulationError:
        what = f"{kind} of offset {offset:#x} by {self.name}: there is no such register"
        hint = "look at cores.c: a worker reads its number and job, and writes its end"
        return SimulationError(what, where="mailbox", hint=hint)

    def _access(self, kind: str, device: Device, offset: int, value: int) -> int:
        return access(kind, device, offset, value, int(self._processor.state.cycles))

    def _count(self, now: int) -> bool:
        before = self.finished
        while self.finished < len(self._ends) and self._ends[self.finished] <= now:
            self.finished += 1
        return self.finished > before

    def _run(self, job: int, begin: int) -> int:
        """Carry out a job that is there from cycle `begin` on; returns the cycle of its end."""
        state = self._processor.state
        if not self._awake:
            self._until_asleep()  # through the start-up code, long ago
            self._awake = True
        state.cycles = max(int(state.cycles), begin)
        begin, before, self._next, self._ended = int(state.cycles), self.instructions, job, None
        self._until_asleep()
        if self._ended is None:
            hint = "look at the job's code for a loop without an end, or a wait for an interrupt that never comes"
            raise SimulationError(f"the job at {self._processor.place(job)} does not end", where=self.name, hint=hint)
        label = describe_address(job & ~1, self._symbols).removesuffix("+0x0")
        self._activities.append(Activity(begin, self._ended, label, instructions=self.instructions - before))
        return self._ended

    def _until_asleep(self) -> None:
        processor = self._processor
        processor.asleep_at = None
        processor.state.instruction_limit = self.instruction_limit
        try:
            while processor.asleep_at is None:
                processor.execute()
                if processor.state.stop_reason == STOP_LIMIT:
                    what = "a job executed too many instructions without an end"
                    hint = "look at the job's code for a loop without an end"
                    raise SimulationError(what, where=processor.place(processor.core.pc()), hint=hint)
        except SimulationError as error:
            raise SimulationError(f"{self.name}: {error.what}", where=error.where, hint=error.hint) from None


class Mailbox(Device):
    """The mailbox as core 0 sees it; a `Device`."""

    name = "mailbox"

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def reset(self) -> None:
        """See `Device.reset`: workers are made anew instead."""

    def read(self, offset: int, now: int) -> int:
        if offset == 0:
            return 0
        worker, register = self._find(offset)
        if register == 4:
            return worker.look(now)
        if register in (0, 8):
            return worker.room if register else worker.given
        raise self._unknown(f"read of offset {offset:#x}")

    def write(self, offset: int, value: int, now: int) -> None:
        worker, register = self._find(offset)
        if register == 12:
            other, _ = self._find(_FIRST + _EACH * (value >> 24))
            worker.hold(other, value & 0xFFFFFF)
            return
        if register:
            raise self._unknown(f"write of {value:#x} to offset {offset:#x}")
        worker.give(value, now)

    def next_event(self) -> int | None:
        return min((event for worker in self._workers if (event := worker.next_event()) is not None), default=None)

    def advance(self, now: int) -> None:
        for worker in self._workers:
            worker.advance(now)

    def interrupt(self) -> bool:
        return any(worker.interrupt() for worker in self._workers)

    def _unknown(self, what: str) -> SimulationError:
        hint = "look at cores.c: core 0 writes jobs and reads how many are done"
        return SimulationError(f"{what} by core 0: there is no such register", where="mailbox", hint=hint)

    def _find(self, offset: int) -> tuple[Worker, int]:
        number, register = divmod(offset - _FIRST, _EACH)
        if not 1 <= number <= len(self._workers):
            what = f"there is no core for offset {offset:#x}: the chip has {len(self._workers) + 1}"
            raise SimulationError(what, where="mailbox", hint="start jobs only on cores the target has")
        return self._workers[number - 1], register
