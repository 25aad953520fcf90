"""Writes a stream: what lies where in the SRAMs and in DRAM, micro-operations shared, tokens last."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from dovetail.graph.graph import Graph
from dovetail.graph.types import Box
from dovetail.loops import Access, Allocation, Pool, Span, Tokens, Window, tokens
from dovetail.target import Operand
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.constants import Constants, depth
from dovetail.targets.vta.isa import Alu, AluOpcode, Finish, Flags, Gemm, Instruction, Load, Memory, Uop, queue_of
from dovetail.targets.vta.micro import Loop, micro

_QUEUES = {"load": 0, "compute": 1, "store": 2}


@dataclass(frozen=True)
class Placed:
    """A region with what the stream must know beyond it."""

    graph: Graph
    x: Operand
    """Byte address counted from the INP pointer; byte strides of batch, block, row, column and lanes."""
    y: Operand
    """The same, counted from the OUT pointer."""
    constants: Constants


@dataclass(frozen=True)
class Stream:
    """A region's instructions and the micro-operations they load."""

    instructions: tuple[Instruction, ...]
    uops: tuple[Uop, ...]


@dataclass(frozen=True)
class Make:
    """How the instructions of a nest are made from their loops."""

    opcode: AluOpcode | None = None
    """None for GEMM."""
    reset: bool = False
    number: int | None = None
    """An ALU's immediate operand; None when it reads a second accumulator."""

    def instruction(self, begin: int, end: int, outer: Loop, inner: Loop) -> Instruction:
        """The instruction for micro-operations begin..end-1."""
        dst, src, wgt = zip(outer.step, inner.step, strict=True)
        if self.opcode is None:
            return Gemm(self.reset, begin, end, outer.extent, inner.extent, dst, src, wgt)
        number = self.number if self.number is not None else 0
        return Alu(self.opcode, self.number is not None, number, begin, end, outer.extent, inner.extent, dst, src)


@dataclass(frozen=True)
class Buffer:
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


@dataclass(frozen=True)
class _Step:
    instruction: Instruction
    access: Access
    segment: int = -1
    """Which load of micro-operations must have happened."""


class Writer:
    """Collects the instructions of one tile after the other, remembering what lies where."""

    def __init__(self, placed: Placed, config: VtaConfig, slots: Mapping[str, Mapping[str, Pool]]) -> None:
        self.config = config
        self.constants = placed.constants
        self.origins: Mapping[str, tuple[int, ...]] = {}
        """First index of each argument's leading dimensions in the tile being written."""
        self._operands = {"x": placed.x, "y": placed.y}
        self._depth = depth(placed.graph, config)
        self._slots = slots
        self._steps: list[_Step] = []
        self._segments: list[list[Uop]] = [[]]
        self._known: dict[tuple[Uop, ...], int] = {}
        self._buffers: dict[int, Buffer] = {}

    def allocate(self, allocation: Allocation, key: Hashable | None) -> None:
        """Give a buffer its slot; `key` says what will be loaded into it, None when nothing is."""
        pool = self._slots[allocation.memory][allocation.name]
        found = pool.find(key)
        base = pool.take(key) if found is None else found
        shape = allocation.shape[:-2]
        self._buffers[allocation.buffer] = Buffer(allocation.memory, shape, base, found is not None)

    def buffer(self, window: Window) -> Buffer:
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
        steps = self._argument_steps(window.array)
        box = shifted(window.box, self.origins.get(window.array, ()))[: len(steps)]
        first = sum(low * step for (low, _), step in zip(box, steps, strict=True))
        if window.array in self._operands:
            first += self._operands[window.array].address // self.config.inp_element
        else:
            first += self.constants.first[window.array]
        return first, tuple((high - low, step) for (low, high), step in zip(box, steps, strict=True))

    def _argument_steps(self, array: str) -> tuple[int, ...]:
        if array not in self._operands:
            return self.constants.steps[array]
        lanes = 2 if self.config.batch > 1 else 1
        image = [step // self.config.inp_element for step in self._operands[array].strides[1:-lanes]]
        if len(image) == 3:
            return tuple(image)
        (step,) = image
        return (step * self._depth, step, 0) if array == "x" else (step, 0, 0)

    def issue(self, instruction: Instruction, reads: Sequence[Span] = (), writes: Sequence[Span] = ()) -> None:
        """Append an instruction without micro-operations."""
        access = Access(_QUEUES[queue_of(instruction)], tuple(reads), tuple(writes))
        self._steps.append(_Step(instruction, access))

    def compute(
        self, make: Make, nest: Sequence[Loop], first: tuple[int, int, int], reads: Sequence[Span], out: Span
    ) -> None:
        """Append the GEMM or ALU instructions of a nest that begins at the entries `first`."""
        config = self.config
        plan = micro(tuple(nest), config.uop_entries, config.pipeline_cycles, make.opcode is None)
        for start in plan.starts:
            d, s, w = (a + b for a, b in zip(first, start, strict=True))
            begin = self._uops(tuple(Uop(d + dst, s + src, w + wgt) for dst, src, wgt in plan.uops))
            instruction = make.instruction(begin, begin + len(plan.uops), plan.outer, plan.inner)
            access = Access(_QUEUES["compute"], tuple(reads), (out,))
            self._steps.append(_Step(instruction, access, len(self._segments) - 1))

    def _uops(self, wanted: tuple[Uop, ...]) -> int:
        """Index of the micro-operations in their memory."""
        if wanted not in self._known:
            if len(self._segments[-1]) + len(wanted) > self.config.uop_entries:
                self._segments.append([])
                self._known.clear()
            self._known[wanted] = len(self._segments[-1])
            self._segments[-1].extend(wanted)
        return self._known[wanted]

    def finish(self) -> Stream:
        """The stream, ended and synchronised."""
        steps = [*self._with_uops(), _Step(Finish(), Access(_QUEUES["compute"]))]
        sizes = {"INP": self.config.inp_entries, "WGT": self.config.wgt_entries, "OUT": self.config.acc_entries}
        marks = tokens([step.access for step in steps], sizes)
        done = [replace(step.instruction, flags=_flags(mark)) for step, mark in zip(steps, marks, strict=True)]
        return Stream(tuple(done), tuple(uop for segment in self._segments for uop in segment))

    def _with_uops(self) -> list[_Step]:
        """The steps with a load of micro-operations ahead of the first that needs each segment."""
        found: list[_Step] = []
        current, start = -1, 0
        for step in self._steps:
            while current < step.segment:
                current += 1
                size = len(self._segments[current])
                found.append(_Step(Load(Memory.UOP, 0, start, 1, size, size), Access(_QUEUES["compute"])))
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


def _flags(mark: Tokens) -> Flags:
    return Flags(mark.pop_prev, mark.pop_next, mark.push_prev, mark.push_next)
