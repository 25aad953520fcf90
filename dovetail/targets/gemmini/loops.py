"""Gemmini's instructions that are loops: the single instructions they stand for (`loop_ws`, `loop_conv_ws`).

Both put A at the lower end of a half of the scratchpad, B at its upper end, and sums into a half of the accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dovetail.records import Record
from dovetail.targets.gemmini.machine import (
    COMPUTE,
    COMPUTE_KEPT,
    CONFIG,
    LOOP_CONV,
    LOOP_WS,
    MVIN,
    MVIN2,
    MVIN3,
    MVOUT,
    NOWHERE,
    PRELOAD,
    GemminiMachine,
    Step,
    bits,
)

SUMS = 1 << 31
"""The accumulator, overwritten."""
ADDED = 3 << 30
"""The accumulator, added to."""


def block(row: int, rows: int, columns: int) -> int:
    """A local operand."""
    return rows << 48 | columns << 32 | row


def settings(way: int, stride: int, apart: int) -> Step:
    """The settings of a way in, its scale 1."""
    one = int(np.float32(1).view(np.uint32))
    return CONFIG, one << 32 | apart << 16 | 1 << 8 | way << 3 | 1, stride


def expanded(machine: GemminiMachine, funct: int, first: int, second: int) -> Iterator[Step]:
    """An instruction, or those a loop is made of; none for a loop's settings, which are kept."""
    if funct == LOOP_CONV:
        yield from convolution(machine, first, second)
    elif funct == LOOP_WS:
        yield from product(machine, first, second)
    elif LOOP_WS < funct < MVIN3 or LOOP_CONV < funct <= LOOP_CONV + 6:
        machine.loop[funct] = (first, second)
    else:
        yield funct, first, second


def product(machine: GemminiMachine, first: int, second: int) -> Iterator[Step]:
    """C = A B + D, each operand in blocks of `dim`."""
    if first >> 16 & 15 or second & 7 or first >> 8 & 6:
        raise machine.refuse("loop_ws is modelled without transposes, sums of two matrices and operands left in place")
    dim, loop = machine.dim, machine.loop
    rows, columns, inner = (bits(loop[LOOP_WS + 1][1], low, 16) for low in (0, 16, 32))
    short = [bits(loop[LOOP_WS + 1][0], low, 16) for low in (0, 16, 32)]
    (a, b), (d, c) = loop[LOOP_WS + 2], loop[LOOP_WS + 3]
    (a_step, b_step), (d_step, c_step) = loop[LOOP_WS + 4], loop[LOOP_WS + 5]
    adds, full, low = first & 1, first >> 1 & 1, first >> 2 & 1
    half = len(machine.scratchpad) // 2
    if (rows * inner + inner * columns) * dim > half or rows * columns * dim > len(machine.accumulator) // 2:
        raise machine.refuse("loop_ws: the operands do not fit half of the memories")
    b_first = half - inner * columns * dim

    def held(index: int, count: int, pad: int) -> int:
        return dim - (pad if index == count - 1 else 0)

    places = [(i, j, held(i, rows, short[0]), held(j, columns, short[1])) for i in range(rows) for j in range(columns)]
    for i, j, tall, wide in places if d else ():
        yield MVIN3, d + (i * d_step + j) * dim * (1 if low else 4), block(SUMS + (i * columns + j) * dim, tall, wide)
    for k in range(inner):
        deep = held(k, inner, short[2])
        for i, j, tall, wide in sorted(places, key=lambda place: place[1]):
            if i == 0:
                yield MVIN2, b + (k * b_step + j) * dim, block(b_first + (k * columns + j) * dim, deep, wide)
            if j == 0:
                yield MVIN, a + (i * a_step + k) * dim, block((i * inner + k) * dim, tall, deep)
            kept = i > 0
            weights = NOWHERE if kept else b_first + (k * columns + j) * dim
            to = (ADDED if d or k or adds else SUMS) + (i * columns + j) * dim
            yield PRELOAD, block(weights, deep, wide), block(to, tall, wide)
            yield (
                COMPUTE_KEPT if kept else COMPUTE,
                block((i * inner + k) * dim, tall, deep),
                block(NOWHERE, tall, wide),
            )
    for i, j, tall, wide in places if c else ():
        from_ = ADDED | full << 29 | (i * columns + j) * dim
        yield MVOUT, c + (i * c_step + j) * dim * (4 if full else 1), block(from_, tall, wide)


def cut(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Pieces of at most so many: where they begin, and how many they are."""
    return ((start, min(most, total - start)) for start in range(0, total, most))


def convolution(machine: GemminiMachine, first: int, second: int) -> Iterator[Step]:
    """A convolution of square images and kernels with zero padding, its results not pooled."""
    one, two, three, four, five, six = (machine.loop[LOOP_CONV + 1 + index] for index in range(6))
    plain = not (first & 0xF007E or bits(first, 8, 8) > 1 or second & 6) and second & 1 and bits(four[0], 0, 8) <= 1
    if not plain or bits(two[1], 48, 16) != 1:
        raise machine.refuse("loop_conv_ws is modelled for one image, plain: no pools, dilation or transposes")
    tall, wide, inputs, left = (bits(three[0], low, 16) for low in (48, 32, 16, 0))
    rows, columns, stride = bits(four[0], 48, 16), bits(four[1], 0, 16), bits(one[1], 48, 8)
    made = LoopedConvolution(
        dim=machine.dim,
        half=len(machine.scratchpad) // 2,
        stride=stride,
        kernel=bits(two[0], 48, 16),
        depth=bits(one[0], 32, 16),
        inputs=inputs,
        outputs=bits(two[1], 0, 16),
        taps=(tall, wide),
        size=(rows, columns),
        image=(rows * stride + tall - 1, columns * stride + wide - 1),
        before=(bits(three[1], 32, 16), left),
        after=(bits(three[1], 24, 8), bits(three[1], 48, 16)),
        lines=(bits(three[1], 0, 16), bits(one[1], 32, 16)),
        steps=(bits(four[1], 48, 16), bits(four[1], 32, 16), bits(four[1], 16, 16)),
    )
    if six[0]:
        yield from made.biases(0 if first & 1 else six[0])
    if six[1]:
        yield from made.operand(six[1])
    if five[0]:
        yield from made.weights(five[0])
    yield from made.products()
    if five[1]:
        yield from made.results(five[1])


class LoopedConvolution(Record):
    """The settings `loop_conv_ws` was told; pairs are rows and columns."""

    dim: int
    half: int
    """Rows of half of the scratchpad."""
    stride: int
    kernel: int
    depth: int
    """Input channels in memory."""
    inputs: int
    outputs: int
    taps: tuple[int, int]
    size: tuple[int, int]
    """Rows and columns of the result."""
    image: tuple[int, int]
    """The operand's, its borders included."""
    before: tuple[int, int]
    after: tuple[int, int]
    lines: tuple[int, int]
    """Columns of the whole operand and of the whole result in memory."""
    steps: tuple[int, int, int]
    """Bytes from a pixel of the operand, a row of weights, and a pixel of the result to the next."""

    @property
    def most(self) -> int:
        """Columns of a move in."""
        return max(64 // self.dim, 1) * self.dim

    def sums(self, channel: int, row: int, column: int) -> int:
        """Row of the accumulator."""
        rows, columns = self.size
        return channel // self.dim * rows * columns + row * columns + column

    def weight(self, channel: int, tap: int, start: int) -> int:
        """Row of the scratchpad of a weight."""
        rows = self.taps[0] * self.taps[1] * self.inputs
        first = self.half - -(-self.outputs // self.dim) * rows
        return first + channel // self.dim * rows + tap * self.inputs + start

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Pixels of the result in pieces of a row: row, first column, and how many."""
        return ((row, column, count) for row in range(self.size[0]) for column, count in cut(self.size[1], self.dim))

    def biases(self, address: int) -> Iterator[Step]:
        """The first sums."""
        yield settings(2, 0, self.size[0] * self.size[1])
        for row, column, count in self.pieces():
            for channel, some in cut(self.outputs, max(64 // (4 * self.dim), 1) * self.dim):
                to = SUMS + self.sums(channel, row, column)
                yield MVIN3, address and address + 4 * channel, block(to, count, some)

    def operand(self, address: int) -> Iterator[Step]:
        """The operand with zeros around it."""
        rows, columns = self.image
        left, right = self.before[1], self.after[1]
        yield settings(0, self.steps[0], rows * columns)
        parts = ((0, left, True), (left, columns - left - right, False), (columns - right, right, True))
        for row in range(rows):
            outside = row < self.before[0] or row >= rows - self.after[0]
            for start, width, edge in parts:
                for column, count in cut(width, self.dim):
                    pixel = (row - self.before[0]) * self.lines[0] + start + column - left
                    for channel, some in cut(self.inputs, self.most):
                        to = channel // self.dim * rows * columns + row * columns + start + column
                        at = 0 if edge or outside else address + pixel * self.steps[0] + channel
                        yield MVIN, at, block(to, count, some)

    def weights(self, address: int) -> Iterator[Step]:
        """All weights."""
        tall, wide = self.taps
        yield settings(1, self.steps[1], tall * wide * self.inputs)
        for channel, some in cut(self.outputs, self.most):
            for tap in range(tall * wide):
                for start, count in cut(self.inputs, self.dim):
                    at = ((tap // wide) * self.kernel + tap % wide) * self.depth + start
                    to = self.weight(channel, tap, start)
                    yield MVIN2, address + at * self.steps[1] + channel, block(to, count, some)

    def products(self) -> Iterator[Step]:
        """All products; weights stay for all pixels."""
        (tall, wide), (rows, columns) = self.taps, self.image
        for channel, some in cut(self.outputs, self.dim):
            for tap in range(tall * wide):
                for start, count in cut(self.inputs, self.dim):
                    held, funct = self.weight(channel, tap, start), COMPUTE
                    for row, column, across in self.pieces():
                        line = start // self.dim * rows + row * self.stride + tap // wide
                        at = line * columns + column * self.stride + tap % wide
                        to = ADDED + self.sums(channel, row, column)
                        yield PRELOAD, block(held, count, some), block(to, across, some)
                        yield funct, block(at, across, count), block(NOWHERE, across, some)
                        held, funct = NOWHERE, COMPUTE_KEPT

    def results(self, address: int) -> Iterator[Step]:
        """The results to memory."""
        for row, column, across in self.pieces():
            for channel, some in cut(self.outputs, self.dim):
                at = address + (row * self.lines[1] + column) * self.steps[2] + channel
                yield MVOUT, at, block(ADDED + self.sums(channel, row, column), across, some)
