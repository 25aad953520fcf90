"""Writes a stream: what lies where in the SRAMs and in DRAM, loop nests as GEMM and ALU instructions, tokens last.

A loop nest over SRAM entries becomes instructions of two loops with micro-operations inside. Which loops become the
instruction's two, which are written out as micro-operations and which as instructions of their own is chosen by the
cycles it costs, under the rule that successive micro-operations write different accumulators.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations, product
from math import prod

from dovetail.ir.graph import Graph
from dovetail.ir.types import Box
from dovetail.loops import Access, Allocation, Pool, Span, Window, tokens
from dovetail.records import Record
from dovetail.target import Operand
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.isa import Alu, AluOpcode, Finish, Flags, Gemm, Instruction, Load, Uop, VtaMemory, queue_of
from dovetail.targets.vta.mapping import RegionConstants, depth

Triple = tuple[int, int, int]
"""An accumulator, input (ALU: second accumulator) and weight entry, or the steps of each."""

_MOST_ITERATIONS = (1 << 14) - 1
_UOP_CYCLES = 0.75
"""Cost of a micro-operation: half a bus cycle, and room in its memory."""


class VtaLoop(Record):
    """One loop of a nest: how often, and how far each entry moves per iteration."""

    extent: int
    step: Triple


class MicroNest(Record):
    """A nest as instructions that share their loops and, but for where they begin, their micro-operations."""

    outer: VtaLoop
    inner: VtaLoop
    uops: tuple[Triple, ...]
    starts: tuple[Triple, ...]
    """First entries of each instruction."""


_ONCE = VtaLoop(1, (0, 0, 0))


@lru_cache(maxsize=4096)
def micro(nest: tuple[VtaLoop, ...], entries: int, pipeline: int, hazard: bool) -> MicroNest:
    """The cheapest instructions for a nest, whose loops may be in any order, as sums and ALU steps may be done in any.

    `entries`: micro-operations the memory holds. `pipeline`: cycles an instruction costs beyond its steps. `hazard`:
    whether successive steps must write different accumulators (they must for GEMM).

    Raises:
        ValueError: there is none, because a loop is too long for its field.
    """
    loops = _merged([loop for loop in nest if loop.extent > 1])
    best: tuple[float, int, tuple[VtaLoop, VtaLoop, list[VtaLoop], list[VtaLoop]]] | None = None
    for outer, inner, inside, outside in _choices(loops):
        uops, count = prod([loop.extent for loop in inside]), prod([loop.extent for loop in outside])
        cost = count * (pipeline + _UOP_CYCLES * uops)
        if (best is not None and (cost, count) >= best[:2]) or uops > entries:
            continue
        order = sorted(inside, key=lambda loop: (loop.step[0] != 0, loop.extent))
        if max(outer.extent, inner.extent) > _MOST_ITERATIONS or (hazard and not _alternates([outer, inner, *order])):
            continue
        best = cost, count, (outer, inner, order, outside)
    if best is None:
        raise ValueError(f"no instruction can hold the loops {nest}")
    outer, inner, order, outside = best[2]
    return MicroNest(outer, inner, _positions(order), _positions(outside))


def _merged(loops: list[VtaLoop]) -> tuple[VtaLoop, ...]:
    """Loops joined where one continues another in every entry."""
    changed = True
    while changed:
        changed = False
        for a, b in permutations(loops, 2):
            if a.step == tuple(step * b.extent for step in b.step) and a.extent * b.extent <= _MOST_ITERATIONS:
                others = [loop for loop in loops if loop is not a and loop is not b]
                loops = [*others, VtaLoop(a.extent * b.extent, b.step)]
                changed = True
                break
    return tuple(loops)


def _choices(loops: Sequence[VtaLoop]) -> Iterator[tuple[VtaLoop, VtaLoop, list[VtaLoop], list[VtaLoop]]]:
    """Every way to give each loop a place: outer, inner, among the micro-operations, or around the instructions."""
    for count in range(min(2, len(loops)) + 1):
        for chosen in permutations(range(len(loops)), count):
            pair = [_ONCE] * (2 - count) + [loops[index] for index in chosen]
            rest = [loop for index, loop in enumerate(loops) if index not in chosen]
            for inside in product((True, False), repeat=len(rest)):
                kept = [loop for loop, here in zip(rest, inside, strict=True) if here]
                yield pair[0], pair[1], kept, [loop for loop, here in zip(rest, inside, strict=True) if not here]


def _alternates(order: Sequence[VtaLoop]) -> bool:
    """Whether two successive steps never write the same accumulator: the fastest loop moves it."""
    real = [loop for loop in order if loop.extent > 1]
    return not real or real[-1].step[0] != 0


def _positions(loops: Sequence[VtaLoop]) -> tuple[Triple, ...]:
    """Every position of a nest, the last loop fastest."""
    found: list[Triple] = []
    for indices in product(*(range(loop.extent) for loop in loops)):
        steps = [tuple(index * step for step in loop.step) for index, loop in zip(indices, loops, strict=True)]
        found.append((sum(s[0] for s in steps), sum(s[1] for s in steps), sum(s[2] for s in steps)))
    return tuple(found)


_QUEUES = {"load": 0, "compute": 1, "store": 2}


class VtaRegion(Record):
    """A region with what the stream must know beyond it."""

    graph: Graph
    """As `mapping.joined` gives it."""
    x: tuple[Operand, ...]
    """Parts of the operand, of as many blocks each: byte address counted from the INP pointer; byte strides of batch,
    block, row, column and lanes."""
    y: Operand
    """The same, counted from the OUT pointer."""
    constants: RegionConstants


class InstructionStream(Record):
    """A region's instructions and the micro-operations they load."""

    instructions: tuple[Instruction, ...]
    uops: tuple[Uop, ...]


class InstructionTemplate(Record):
    """How the instructions of a nest are made from their loops."""

    opcode: AluOpcode | None = None
    """None for GEMM."""
    reset: bool = False
    number: int | None = None
    """An ALU's immediate operand; None when it reads a second accumulator."""

    def instruction(self, begin: int, end: int, outer: VtaLoop, inner: VtaLoop) -> Instruction:
        """The instruction for micro-operations begin..end-1."""
        dst, src, wgt = zip(outer.step, inner.step, strict=True)
        if self.opcode is None:
            return Gemm(self.reset, begin, end, outer.extent, inner.extent, dst, src, wgt)
        number = self.number if self.number is not None else 0
        return Alu(self.opcode, self.number is not None, number, begin, end, outer.extent, inner.extent, dst, src)


class SlotBuffer(Record):
    """A buffer of the schedule in its slot."""

    memory: str
    shape: tuple[int, ...]
    """Entries along each dimension, lanes left out."""
    base: int
    here: bool
    """Whether what is to be loaded is there already."""

    @property
    def span(self) -> Span:
        """The entries it takes."""
        return Span(self.memory, self.base, self.base + prod(self.shape))


class _InstructionStep(Record):
    instruction: Instruction
    access: Access
    segment: int = -1
    """Which load of micro-operations must have happened."""


class StreamWriter:
    """Collects the instructions of one tile after the other, remembering what lies where."""

    def __init__(
        self, placed: VtaRegion, config: VtaConfig, slots: Mapping[str, Mapping[str, Pool]], stride: tuple[int, int]
    ) -> None:
        self.config, self.stride = config, stride
        self.constants = placed.constants
        self.origins: Mapping[str, tuple[int, ...]] = {}
        """First index of each argument's leading dimensions in the tile being written."""
        self._operands = {"x": placed.x, "y": (placed.y,)}
        channels = placed.graph.types[placed.graph.inputs[0]].shape[-1]
        self._blocks = -(-channels // config.block) // len(placed.x)
        """Channel blocks of each part of the operand."""
        self._depth = depth(placed.graph, config)
        self._slots = slots
        self._steps: list[_InstructionStep] = []
        self._segments: list[list[Uop]] = [[]]
        self._known: dict[tuple[Uop, ...], int] = {}
        self._buffers: dict[int, SlotBuffer] = {}

    def allocate(self, allocation: Allocation, key: Hashable | None) -> None:
        """Give a buffer its slot; `key` says what will be loaded into it, None when nothing is."""
        pool = self._slots[allocation.memory][allocation.name]
        found = pool.find(key)
        base = pool.take(key) if found is None else found
        shape = allocation.shape[:-2]
        self._buffers[allocation.buffer] = SlotBuffer(allocation.memory, shape, base, found is not None)

    def allocate_together(self, name: str, allocations: Sequence[Allocation], key: Hashable) -> int | None:
        """Give buffers of one memory a slot they share, one behind the other; returns the first entry to load them to,
        None where they are there."""
        pool = self._slots[allocations[0].memory][name]
        found = pool.find(key)
        entry = first = pool.take(key) if found is None else found
        for allocation in allocations:
            shape = allocation.shape[:-2]
            self._buffers[allocation.buffer] = SlotBuffer(allocation.memory, shape, entry, found is not None)
            entry += prod(shape)
        return first if found is None else None

    def buffer(self, window: Window) -> SlotBuffer:
        """The buffer a window lies in."""
        assert window.buffer is not None
        return self._buffers[window.buffer]

    def entry(self, window: Window) -> int:
        """The first entry of a window of a buffer."""
        buffer = self.buffer(window)
        lows = [low for low, _ in window.box[: len(buffer.shape)]]
        return buffer.base + sum(low * step for low, step in zip(lows, row_major(buffer.shape), strict=True))

    def dram(self, window: Window) -> tuple[int, tuple[tuple[int, int], ...]]:
        """First element of a window of an argument, and (extent, step in elements) of its dimensions."""
        box = shifted(window.box, self.origins.get(window.array, ()))
        if window.array not in self._operands:
            steps, first = self.constants.steps[window.array], self.constants.first[window.array]
        else:
            parts = self._operands[window.array]
            part = box[0][0] // self._blocks if len(parts) > 1 else 0
            box = shifted(box, (-part * self._blocks,))
            steps = self._operand_steps(window.array, parts[part])
            first = parts[part].address // self.config.inp_element
        box = box[: len(steps)]
        first += sum(low * step for (low, _), step in zip(box, steps, strict=True))
        return first, tuple((high - low, step) for (low, high), step in zip(box, steps, strict=True))

    def _operand_steps(self, array: str, operand: Operand) -> tuple[int, ...]:
        lanes = 2 if self.config.batch > 1 else 1
        image = [step // self.config.inp_element for step in operand.strides[1:-lanes]]
        if len(image) == 3:
            return tuple(image)
        (step,) = image
        return (step * self._depth, step, 0) if array == "x" else (step, 0, 0)

    def issue(self, instruction: Instruction, reads: Sequence[Span] = (), writes: Sequence[Span] = ()) -> None:
        """Append an instruction without micro-operations."""
        access = Access(_QUEUES[queue_of(instruction)], tuple(reads), tuple(writes))
        self._steps.append(_InstructionStep(instruction, access))

    def compute(
        self,
        make: InstructionTemplate,
        nest: Sequence[VtaLoop],
        first: tuple[int, int, int],
        reads: Sequence[Span],
        out: Span,
    ) -> None:
        """Append the GEMM or ALU instructions of a nest that begins at the entries `first`."""
        config = self.config
        plan = micro(tuple(nest), config.uop_entries, config.pipeline_cycles, make.opcode is None)
        for start in plan.starts:
            d, s, w = (a + b for a, b in zip(first, start, strict=True))
            begin = self._uops(tuple(Uop(d + dst, s + src, w + wgt) for dst, src, wgt in plan.uops))
            instruction = make.instruction(begin, begin + len(plan.uops), plan.outer, plan.inner)
            access = Access(_QUEUES["compute"], tuple(reads), (out,))
            self._steps.append(_InstructionStep(instruction, access, len(self._segments) - 1))

    def _uops(self, wanted: tuple[Uop, ...]) -> int:
        """Index of the micro-operations in their memory."""
        if wanted not in self._known:
            if len(self._segments[-1]) + len(wanted) > self.config.uop_entries:
                self._segments.append([])
                self._known.clear()
            self._known[wanted] = len(self._segments[-1])
            self._segments[-1].extend(wanted)
        return self._known[wanted]

    def finish(self) -> InstructionStream:
        """The stream, ended and synchronised."""
        steps = [*self._with_uops(), _InstructionStep(Finish(), Access(_QUEUES["compute"]))]
        sizes = {"INP": self.config.inp_entries, "WGT": self.config.wgt_entries, "OUT": self.config.acc_entries}
        marks = tokens([step.access for step in steps], sizes)
        flags = (Flags(mark.pop_prev, mark.pop_next, mark.push_prev, mark.push_next) for mark in marks)
        done = [replace(step.instruction, flags=own) for step, own in zip(steps, flags, strict=True)]
        return InstructionStream(tuple(done), tuple(uop for segment in self._segments for uop in segment))

    def _with_uops(self) -> list[_InstructionStep]:
        """The steps with a load of micro-operations ahead of the first that needs each segment."""
        found: list[_InstructionStep] = []
        current, start = -1, 0
        for step in self._steps:
            while current < step.segment:
                current += 1
                size = len(self._segments[current])
                found.append(_InstructionStep(Load(VtaMemory.UOP, 0, start, 1, size, size), Access(_QUEUES["compute"])))
                start += size
            found.append(step)
        return found


def shifted(box: Box, origin: Sequence[int]) -> Box:
    """A box moved by `origin` along its first dimensions."""
    moved = tuple((low + start, high + start) for (low, high), start in zip(box, origin, strict=False))
    return (*moved, *box[len(origin) :])


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major steps in entries."""
    found = [1]
    for size in reversed(shape[1:]):
        found.append(found[-1] * size)
    return tuple(reversed(found)) if shape else ()


def rectangles(dims: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """(offset, rows, width, stride) of the fewest 2-D transfers of a strided array, dense on the other side."""
    merged: list[tuple[int, int]] = []
    for extent, step in dims:
        if extent == 1:
            continue
        if merged and merged[-1][1] == step * extent:
            merged[-1] = (merged[-1][0] * extent, step)
        else:
            merged.append((extent, step))
    if not merged or merged[-1][1] != 1:
        merged.append((1, 1))
    if len(merged) == 1:
        merged.insert(0, (1, merged[0][0]))
    *outer, (rows, stride), (width, _) = merged
    offsets = [0]
    for extent, step in outer:
        offsets = [offset + index * step for offset in offsets for index in range(extent)]
    for offset in offsets:
        yield offset, rows, width, stride
