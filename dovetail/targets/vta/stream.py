"""Streams of instructions: bytes, readable text, what can be wrong with them, and when their instructions run.

The model of time, in cycles from the launch:

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

import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from dovetail.errors import DovetailError, TargetError
from dovetail.records import Record
from dovetail.targets.vta import isa
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.isa import NO_FLAGS, Alu, Finish, Flags, Gemm, Instruction, Load, Store, Uop, VtaMemory


class Fault(Enum):
    """Kinds of wrong streams."""

    DECODE = "decode"
    """The bytes are not instructions."""
    DEADLOCK = "deadlock"
    """No queue can move."""
    RACE = "race"
    """Two queues touch the same data, and no chain of tokens says which comes first."""
    BOUNDS = "bounds"
    """An access outside a memory or buffer."""
    UNINITIALISED = "uninitialised"
    """A read of what this stream never wrote."""
    HAZARD = "hazard"
    """Successive micro-operations of a GEMM write the same accumulator."""
    SHIFT = "shift"
    """A shift by an amount the ALU does not look at as a whole."""
    LEFTOVER = "leftover"
    """Tokens nobody took."""
    UNFINISHED = "unfinished"
    """FINISH is missing or not the last."""
    REWRITTEN = "rewritten"
    """A byte of DRAM is stored twice."""
    UNWRITTEN = "unwritten"
    """A byte of a buffer to be filled is never stored."""
    WRONG_OUTPUT = "wrong output"
    """A stored byte is not the expected one."""


class StreamError(DovetailError):
    """A stream that is wrong.

    Attributes:
        kind: the kind of fault.
    """

    def __init__(self, kind: Fault, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(f"{kind.name}: {what}", where=where or "instruction stream", hint=hint)
        self.kind = kind


def assemble(instructions: Iterable[Instruction], config: VtaConfig) -> bytes:
    """The stream of `instructions`, 16 bytes each; TargetError as `encode`."""
    return b"".join(struct.pack("<4I", *isa.encode(instruction, config)) for instruction in instructions)


def assemble_uops(uops: Iterable[Uop], config: VtaConfig) -> bytes:
    """The bytes of micro-operations, 4 each; TargetError as `encode_uop`."""
    return b"".join(struct.pack("<I", isa.encode_uop(uop, config)) for uop in uops)


def disassemble(stream: bytes, config: VtaConfig) -> tuple[Instruction, ...]:
    """The instructions of a stream.

    Raises:
        StreamError: DECODE.
    """
    if len(stream) % isa.INSTRUCTION_BYTES:
        what = f"a stream must be a multiple of {isa.INSTRUCTION_BYTES} bytes, is {len(stream)}"
        raise StreamError(Fault.DECODE, what, hint="look at where the stream begins and at its length")
    found = []
    for number, (low, high) in enumerate(struct.iter_unpack("<QQ", stream)):
        try:
            found.append(isa.decode_halves(low, high, config))
        except TargetError as error:
            what = f"instruction {number} ({high:016x}{low:016x}): {error.where}: {error.what}"
            raise StreamError(Fault.DECODE, what, hint="look at where the stream begins and at its length") from None
    return tuple(found)


def check_finished(instructions: Sequence[Instruction]) -> None:
    """Check that there is one FINISH, at the end.

    Raises:
        StreamError: UNFINISHED.
    """
    first = next((n for n, instruction in enumerate(instructions) if isinstance(instruction, Finish)), None)
    if first == len(instructions) - 1 and instructions:
        return
    hint = "end the stream with a FINISH"
    if not instructions:
        what = "the stream is empty, without even a FINISH"
    elif first is None:
        last = name(instructions, len(instructions) - 1)
        what = f"the stream has no FINISH; the last of {len(instructions)} is {last}"
    else:
        what = f"{name(instructions, first + 1)} comes after {name(instructions, first)}"
        hint = "let FINISH be the last instruction"
    raise StreamError(Fault.UNFINISHED, what, hint=hint)


def name(instructions: Sequence[Instruction], number: int) -> str:
    """An instruction in messages: its number and printed form."""
    return f"instruction {number} ({explain(instructions[number])})"


def explain(instruction: Instruction) -> str:
    """An instruction in one line."""
    i = instruction
    if isinstance(i, Finish):
        text = "FINISH"
    elif isinstance(i, Load):
        pads = f" pad y {i.y_pad[0]},{i.y_pad[1]} x {i.x_pad[0]},{i.x_pad[1]}" if any((*i.y_pad, *i.x_pad)) else ""
        text = f"LOAD {i.memory.name}[{i.sram}] <- dram {i.dram}, {i.y_size} x {i.x_size} stride {i.x_stride}{pads}"
    elif isinstance(i, Store):
        text = f"STORE {i.memory.name}[{i.sram}] -> dram {i.dram}, {i.y_size} x {i.x_size} stride {i.x_stride}"
    else:
        loops = f"uops {i.uop_begin}..{i.uop_end} x {i.iter_out} x {i.iter_in}"
        loops += f" dst +{i.dst[0]},{i.dst[1]} src +{i.src[0]},{i.src[1]}"
        if isinstance(i, Gemm):
            text = f"GEMM{' reset' if i.reset else ''} {loops} wgt +{i.wgt[0]},{i.wgt[1]}"
        else:
            text = f"ALU {i.opcode.name} {f'imm {i.imm}' if i.use_imm else 'acc'} {loops}"
    words = [flag.replace("_", " ") for flag in Flags.__struct_fields__ if getattr(i.flags, flag)]
    return f"{text} [{', '.join(words)}]" if words else text


def listing(stream: bytes, config: VtaConfig) -> str:
    """The stream as text, a line per instruction with its number and queue; StreamError DECODE as `disassemble`."""
    numbered = enumerate(disassemble(stream, config))
    return "".join(f"{number:5d} {isa.queue_of(each):7s} {explain(each)}\n" for number, each in numbered)


QUEUES = ("load", "compute", "store")
LOAD, COMPUTE, STORE = range(3)
Clock = tuple[int, int, int]
"""Per queue the last instruction (its number in the stream) known to have ended, -1 for none."""


class InstructionStart(Record):
    """An instruction that starts: its number in the stream, its queue, and its clock, which names itself."""

    number: int
    instruction: Instruction
    queue: int
    clock: Clock

    def __str__(self) -> str:
        return f"instruction {self.number} ({explain(self.instruction)})"


class InstructionBar(Record):
    """A bar of the timeline: instruction `index` ran in `queue` from cycle `start` to cycle `end`."""

    queue: str
    start: int
    end: int
    index: int


class Execution(Record):
    """Times of a stream. Cycles count from the launch; tiles are batch x block_in x block_out products."""

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
    loaded: Mapping[VtaMemory, int]
    """DRAM bytes read, per memory filled."""
    stored: int
    """DRAM bytes written."""
    timeline: tuple[InstructionBar, ...]
    """By start, then instruction."""


Token = tuple[int, InstructionStart]
"""The cycle a token is there from, and the instruction that pushed it."""


class _BusTransfer(Record):
    """A LOAD or STORE between its start and its place on the bus."""

    issue: InstructionStart
    start: int
    request: int
    beats: int
    padding: int


def run_schedule(
    instructions: Sequence[Instruction],
    config: VtaConfig,
    effect: Callable[[InstructionStart], None] | None = None,
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
    return _QueueSimulation(instructions, config, effect).run(leftovers)


class _QueueSimulation:
    def __init__(
        self, instructions: Sequence[Instruction], config: VtaConfig, effect: Callable[[InstructionStart], None] | None
    ) -> None:
        self.instructions, self.config, self.effect = instructions, config, effect
        self.queue = [QUEUES.index(isa.queue_of(instruction)) for instruction in instructions]
        self.delivered: tuple[list[int], ...] = ([], [], [])
        self.arrival: list[int] = []
        self.done = [0, 0, 0]
        self.ends: tuple[list[int], ...] = ([], [], [])
        self.clocks: list[Clock] = [(-1, -1, -1)] * 3
        self.tokens: dict[tuple[int, int], deque[Token]] = {
            pair: deque() for pair in ((LOAD, COMPUTE), (COMPUTE, LOAD), (COMPUTE, STORE), (STORE, COMPUTE))
        }
        self.transfers: list[_BusTransfer | None] = [None, None, None]
        # when each queue's next event is, once it is known: a start, or the bus request of its transfer
        self.times: list[int | None] = [None, None, None]
        self.bus_free = self.bus_busy = 0
        self.fetch_cycles = -(-isa.INSTRUCTION_BYTES // config.bus_bytes)
        queued = list(zip(instructions, self.queue, strict=True))
        self.pops, self.pushes = ([_neighbours(*each, push) for each in queued] for push in (False, True))
        self.spans: list[InstructionBar] = []

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
        issue = InstructionStart(number, instruction, queue, self.clocks[queue])
        if self.effect is not None:
            self.effect(issue)
        if isinstance(instruction, Load | Store):
            self.transfers[queue] = self._transfer(issue, instruction, time)
            self.times[queue] = time + self.config.bus_latency
        else:
            self._end(issue, time, time + _cycles(instruction, self.config))

    def _transfer(self, issue: InstructionStart, instruction: Load | Store, time: int) -> _BusTransfer:
        row_bytes = instruction.x_size * isa.element_bytes(instruction.memory, self.config)
        beats = instruction.y_size * -(-row_bytes // self.config.bus_bytes)
        padding = instruction.entries - instruction.y_size * instruction.x_size
        return _BusTransfer(issue, time, time + self.config.bus_latency, beats, padding)

    def _move(self, transfer: _BusTransfer) -> None:
        """Give the bus to the transfer that asked first."""
        end = transfer.request
        if transfer.beats:
            end = max(end, self.bus_free) + transfer.beats
            self.bus_free = end
            self.bus_busy += transfer.beats
        self.transfers[transfer.issue.queue] = None
        self._end(transfer.issue, transfer.start, end + transfer.padding)

    def _end(self, issue: InstructionStart, start: int, end: int) -> None:
        self.done[issue.queue] += 1
        self.times[issue.queue] = None
        self.ends[issue.queue].append(end)
        self.spans.append(InstructionBar(QUEUES[issue.queue], start, end, issue.number))
        for target in self.pushes[issue.number]:
            self.tokens[issue.queue, target].append((end, issue))

    def _execution(self) -> Execution:
        tiles, resets, operations, stored = 0, 0, 0, 0
        loaded: dict[VtaMemory, int] = {memory: 0 for memory in VtaMemory if memory is not VtaMemory.OUT}
        for instruction in self.instructions:
            if isinstance(instruction, Load | Store):
                size = isa.element_bytes(instruction.memory, self.config) * instruction.x_size * instruction.y_size
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
            places = f"{self.config.queue_depth} places of the {QUEUES[self.queue[number]]} queue"
            reasons.append(f"the fetch waits with {name(self.instructions, number)} for one of the {places}")
        hint = "give every pop a push of the queue it waits for, earlier in the stream"
        return StreamError(Fault.DEADLOCK, f"no queue can move: {'; '.join(reasons)}", hint=hint)

    def _waiting(self, queue: int, number: int) -> list[str]:
        reasons = []
        for source in self.pops[number]:
            if not self.tokens[source, queue]:
                pushers = [n for n, q in enumerate(self.queue) if q == source and queue in self.pushes[n]]
                later = [n for n in pushers if n >= self._next(source)]
                who = f"all {len(pushers)} it ever gets are taken" if pushers else "no instruction pushes one"
                who = f"next to push one is {name(self.instructions, later[0])}" if later else who
                waits = f"{QUEUES[queue]} waits with {name(self.instructions, number)}"
                reasons.append(f"{waits} for a token from {QUEUES[source]} ({who})")
        return reasons

    def _next(self, queue: int) -> int:
        """Number of the first instruction of a queue that has not run."""
        ran = [span.index for span in self.spans if span.queue == QUEUES[queue]]
        return max(ran, default=-1) + 1

    def _check_leftovers(self) -> None:
        left = [
            f"{len(tokens)} from {QUEUES[source]} to {QUEUES[target]}, the first pushed by "
            f"{name(self.instructions, tokens[0][1].number)}"
            for (source, target), tokens in self.tokens.items()
            if tokens
        ]
        if left:
            hint = "give every push a pop"
            raise StreamError(Fault.LEFTOVER, "tokens are left at the end: " + "; ".join(left), hint=hint)


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
