"""When the instructions of a stream run: queues, tokens, bus; and what is known to happen before what.

The model, in cycles from the launch:

- The fetch delivers instruction after instruction to the queues, in stream order, each ceil(16 / bus_bytes) cycles
  after the one before, over a port of its own. An instruction holds its place in its queue until it ends; the fetch
  waits while the queue it delivers to has queue_depth of them.
- An instruction starts when it is delivered, the one before it in its queue has ended, and every token it pops is
  there. Tokens between two queues are taken in the order they were pushed; an instruction pushes when it ends.
- LOAD and STORE ask for the bus bus_latency cycles after their start, hold it for y_size * ceil(row bytes / bus_bytes)
  cycles, and then take a cycle for every padded entry. The bus serves requests in order of time, at equal times
  load before compute before store, and each as a whole. Without bytes to move the bus is not asked for.
- GEMM takes pipeline_cycles + steps, ALU pipeline_cycles + alu_interval * steps, FINISH 1.

Happening before: every instruction knows, per queue, the last instruction that ended before it began because of
tokens and queue order alone. Which token an instruction takes does not depend on time, so neither does this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.isa import (
    INSTRUCTION_BYTES,
    NO_FLAGS,
    Alu,
    Finish,
    Gemm,
    Instruction,
    Load,
    Memory,
    Store,
    element_bytes,
    queue_of,
)
from dovetail.targets.vta.stream import Fault, StreamError, name

QUEUES = ("load", "compute", "store")
LOAD, COMPUTE, STORE = range(3)
Clock = tuple[int, int, int]
"""Per queue the last instruction (its number in the stream) known to have ended, -1 for none."""


@dataclass(frozen=True, slots=True)
class Issue:
    """An instruction that starts: its number in the stream, its queue, and its clock, which names itself."""

    number: int
    instruction: Instruction
    queue: int
    clock: Clock


@dataclass(frozen=True, slots=True)
class Span:
    """A bar of the timeline: instruction `index` ran in `queue` from cycle `start` to cycle `end`."""

    queue: str
    start: int
    end: int
    index: int


@dataclass(frozen=True, slots=True)
class Execution:
    """What a stream took. Cycles are counted from the launch; tiles are batch x block_in x block_out products."""

    cycles: int
    """Until all queues are empty."""
    busy: Mapping[str, int]
    """Per queue the cycles between start and end of its instructions, waiting for the bus included."""
    bus_busy: int
    """Cycles the bus moved data."""
    gemm_tiles: int
    """Micro-operations of GEMM instructions without reset."""
    reset_tiles: int
    """Micro-operations of GEMM instructions with reset."""
    alu_operations: int
    """Micro-operations of ALU instructions, an entry of batch x block each."""
    loaded: Mapping[Memory, int]
    """DRAM bytes read, per memory filled."""
    stored: int
    """DRAM bytes written."""
    timeline: tuple[Span, ...]
    """By start, then instruction."""


Token = tuple[int, Issue]
"""The cycle a token is there from, and the instruction that pushed it."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A LOAD or STORE between its start and its place on the bus."""

    issue: Issue
    start: int
    request: int
    beats: int
    padding: int


def run_schedule(
    instructions: Sequence[Instruction], config: VtaConfig, effect: Callable[[Issue], None] | None = None,
    leftovers: bool = True,
) -> Execution:
    """Run a stream in time.

    Args:
        instructions: the stream, at least one instruction.
        config: the timing.
        effect: called for every instruction when it starts; whatever happens before an instruction was called before.
        leftovers: whether tokens nobody took are a fault.

    Raises:
        StreamError: DEADLOCK or LEFTOVER, and what `effect` raises.
    """
    return _Schedule(instructions, config, effect).run(leftovers)


class _Schedule:
    """One run of a stream."""

    def __init__(
        self, instructions: Sequence[Instruction], config: VtaConfig, effect: Callable[[Issue], None] | None
    ) -> None:
        self.instructions, self.config, self.effect = instructions, config, effect
        self.queue = [QUEUES.index(queue_of(instruction)) for instruction in instructions]
        self.delivered: tuple[list[int], ...] = ([], [], [])
        self.arrival: list[int] = []
        self.done = [0, 0, 0]
        self.ends: tuple[list[int], ...] = ([], [], [])
        self.clocks: list[Clock] = [(-1, -1, -1)] * 3
        self.tokens: dict[tuple[int, int], deque[Token]] = {
            pair: deque() for pair in ((LOAD, COMPUTE), (COMPUTE, LOAD), (COMPUTE, STORE), (STORE, COMPUTE))
        }
        self.transfers: list[_Transfer | None] = [None, None, None]
        # when each queue's next event is, once it is known: a start, or the bus request of its transfer
        self.times: list[int | None] = [None, None, None]
        self.bus_free = self.bus_busy = 0
        self.fetch_cycles = -(-INSTRUCTION_BYTES // config.bus_bytes)
        self.pops = [_neighbours(instruction, queue, False) for instruction, queue in self._queued()]
        self.pushes = [_neighbours(instruction, queue, True) for instruction, queue in self._queued()]
        self.spans: list[Span] = []

    def _queued(self) -> list[tuple[Instruction, int]]:
        return list(zip(self.instructions, self.queue, strict=True))

    def run(self, leftovers: bool) -> Execution:
        """Carry out events in order of time: a start before a bus request, load before compute before store."""
        while True:
            if len(self.arrival) < len(self.instructions):
                self._fetch()
            best: tuple[int, int, int] | None = None
            for queue in range(3):
                transfer, time = self.transfers[queue], self.times[queue]
                if time is None:
                    time = self.times[queue] = self._start_time(queue)
                if time is not None:
                    event = (time, int(transfer is not None), queue)
                    best = event if best is None or event < best else best
            if best is None:
                break
            moving = self.transfers[best[2]]
            if moving is None:
                self._start(best[2], best[0])
            else:
                self._move(moving)
        if sum(self.done) < len(self.instructions):
            raise self._deadlock()
        if leftovers:
            self._check_leftovers()
        return self._execution()

    def _fetch(self) -> None:
        """Deliver as far as the queues' places allow, as far as is known now."""
        depth = self.config.queue_depth
        for number in range(len(self.arrival), len(self.instructions)):
            queue = self.queue[number]
            place = len(self.delivered[queue]) - depth
            if place >= len(self.ends[queue]):
                return
            time = (self.arrival[-1] if self.arrival else 0) + self.fetch_cycles
            self.arrival.append(max(time, self.ends[queue][place]) if place >= 0 else time)
            self.delivered[queue].append(number)

    def _start_time(self, queue: int) -> int | None:
        done = self.done[queue]
        if done >= len(self.delivered[queue]):
            return None
        number = self.delivered[queue][done]
        time = self.arrival[number]
        if done:
            time = max(time, self.ends[queue][-1])
        for source in self.pops[number]:
            tokens = self.tokens[source, queue]
            if not tokens:
                return None
            time = max(time, tokens[0][0])
        return time

    def _start(self, queue: int, time: int) -> None:
        number = self.delivered[queue][self.done[queue]]
        mine = self.clocks[queue]
        for source in self.pops[number]:
            other = self.tokens[source, queue].popleft()[1].clock
            mine = (max(mine[0], other[0]), max(mine[1], other[1]), max(mine[2], other[2]))
        clock = [*mine]
        clock[queue] = number
        self.clocks[queue] = (clock[0], clock[1], clock[2])
        instruction = self.instructions[number]
        issue = Issue(number, instruction, queue, self.clocks[queue])
        if self.effect is not None:
            self.effect(issue)
        if isinstance(instruction, Load | Store):
            self.transfers[queue] = self._transfer(issue, instruction, time)
            self.times[queue] = time + self.config.bus_latency
        else:
            self._end(issue, time, time + _cycles(instruction, self.config))

    def _transfer(self, issue: Issue, instruction: Load | Store, time: int) -> _Transfer:
        row_bytes = instruction.x_size * element_bytes(instruction.memory, self.config)
        beats = instruction.y_size * -(-row_bytes // self.config.bus_bytes)
        padding = instruction.entries - instruction.y_size * instruction.x_size
        return _Transfer(issue, time, time + self.config.bus_latency, beats, padding)

    def _move(self, transfer: _Transfer) -> None:
        """Give the bus to the transfer that asked first."""
        end = transfer.request
        if transfer.beats:
            end = max(end, self.bus_free) + transfer.beats
            self.bus_free = end
            self.bus_busy += transfer.beats
        self.transfers[transfer.issue.queue] = None
        self._end(transfer.issue, transfer.start, end + transfer.padding)

    def _end(self, issue: Issue, start: int, end: int) -> None:
        self.done[issue.queue] += 1
        self.times[issue.queue] = None
        self.ends[issue.queue].append(end)
        self.spans.append(Span(QUEUES[issue.queue], start, end, issue.number))
        for target in self.pushes[issue.number]:
            self.tokens[issue.queue, target].append((end, issue))

    def _execution(self) -> Execution:
        tiles, resets, operations, stored = 0, 0, 0, 0
        loaded: dict[Memory, int] = {memory: 0 for memory in Memory if memory is not Memory.OUT}
        for instruction in self.instructions:
            if isinstance(instruction, Load | Store):
                size = element_bytes(instruction.memory, self.config) * instruction.x_size * instruction.y_size
                if isinstance(instruction, Load):
                    loaded[instruction.memory] += size
                else:
                    stored += size
            elif isinstance(instruction, Gemm):
                tiles += 0 if instruction.reset else instruction.steps
                resets += instruction.steps if instruction.reset else 0
            elif isinstance(instruction, Alu):
                operations += instruction.steps
        spans = tuple(sorted(self.spans, key=lambda span: (span.start, span.index)))
        busy = {queue: sum(span.end - span.start for span in spans if span.queue == queue) for queue in QUEUES}
        cycles = max(span.end for span in spans)
        return Execution(cycles, busy, self.bus_busy, tiles, resets, operations, loaded, stored, spans)

    def _deadlock(self) -> StreamError:
        reasons = []
        for queue in range(3):
            if self.done[queue] < len(self.delivered[queue]):
                reasons += self._waiting(queue, self.delivered[queue][self.done[queue]])
        if len(self.arrival) < len(self.instructions):
            number = len(self.arrival)
            reasons.append(f"the fetch waits with {name(self.instructions, number)} for one of the "
                           f"{self.config.queue_depth} places of the {QUEUES[self.queue[number]]} queue")
        return StreamError(Fault.DEADLOCK, "no queue can move: " + "; ".join(reasons),
                           hint="give every pop a push of the queue it waits for, earlier in the stream")

    def _waiting(self, queue: int, number: int) -> list[str]:
        reasons = []
        for source in self.pops[number]:
            if not self.tokens[source, queue]:
                pushers = [n for n, q in enumerate(self.queue) if q == source and queue in self.pushes[n]]
                later = [n for n in pushers if n >= self._next(source)]
                who = f"next to push one is {name(self.instructions, later[0])}" if later else (
                    f"all {len(pushers)} it ever gets are taken" if pushers else "no instruction pushes one")
                reasons.append(f"{QUEUES[queue]} waits with {name(self.instructions, number)} for a token from "
                               f"{QUEUES[source]} ({who})")
        return reasons

    def _next(self, queue: int) -> int:
        """Number of the first instruction of a queue that has not run."""
        ran = [span.index for span in self.spans if span.queue == QUEUES[queue]]
        return max(ran, default=-1) + 1

    def _check_leftovers(self) -> None:
        left = [
            f"{len(tokens)} from {QUEUES[source]} to {QUEUES[target]}, the first pushed by "
            f"{name(self.instructions, tokens[0][1].number)}"
            for (source, target), tokens in self.tokens.items() if tokens
        ]  # fmt: skip
        if left:
            raise StreamError(Fault.LEFTOVER, "tokens are left at the end: " + "; ".join(left),
                              hint="give every push a pop")


def _neighbours(instruction: Instruction, queue: int, push: bool) -> tuple[int, ...]:
    """The queues an instruction pops from or pushes to; load's next is compute, compute's next is store."""
    flags = instruction.flags
    if flags is NO_FLAGS:
        return ()
    before, after = (flags.push_prev, flags.push_next) if push else (flags.pop_prev, flags.pop_next)
    return (*((queue - 1,) if before else ()), *((queue + 1,) if after else ()))


def _cycles(instruction: Gemm | Alu | Finish, config: VtaConfig) -> int:
    if isinstance(instruction, Gemm):
        return config.pipeline_cycles + instruction.steps
    if isinstance(instruction, Alu):
        return config.pipeline_cycles + config.alu_interval * instruction.steps
    return 1
