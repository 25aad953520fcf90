"""Parts of the driver's list: settings, fences, and loops of instructions (driver/gemmini.c reads them)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dovetail.records import Record
from dovetail.target.layers import Image

Words = tuple[int, ...]
FENCE = (1 << 16,)
"""All that was issued before has had its effects in memory."""
SUMS, ADDED = 1 << 31, 3 << 30
"""Places in the accumulator, written and added to."""
MVIN, MVIN2, MVIN3, MVOUT = 2, 1, 14, 3
WAYS = {MVIN: 0, MVIN2: 1, MVIN3: 2}
"""Moves in -> their settings."""


class Config(Record):
    """One Gemmini, with what an instruction costs to issue."""

    dim: int = 16
    """Rows and columns of the array: 4, 8, 16 or 32."""
    scratchpad: int = 256 << 10
    """Bytes."""
    accumulator: int = 64 << 10
    """Bytes."""
    latency: int = 40
    """Cycles from a request to memory's answer."""

    @property
    def rows(self) -> int:
        """Rows of the scratchpad."""
        return self.scratchpad // self.dim

    @property
    def sums(self) -> int:
        """Rows of the accumulator."""
        return self.accumulator // (4 * self.dim)


def both(value: int) -> Words:
    """The words of 64 bits, the lower first."""
    return value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF


def pattern(scale: float) -> int:
    """The bits of a float32."""
    return int(np.float32(scale).view(np.uint32))


def setting(first: int, second: int) -> Words:
    """config."""
    return (5 << 16 | 1, *both(first), *both(second))


def array_setting(a: int, sums: int) -> Words:
    """config_ex: weight-stationary; rows from one of A to the next, and of sums. A launch begins with it."""
    return setting(pattern(1.0) << 32 | a << 16 | 4, sums << 48)


def way_in(funct: int, stride: int, block: int = 0, scale: float = 1.0, shrunk: bool = False) -> Words:
    """config_ld: bytes between rows in memory, local rows between blocks of columns."""
    return setting(pattern(scale) << 32 | block << 16 | 1 << 8 | WAYS[funct] << 3 | shrunk << 2 | 1, stride)


def way_out(stride: int, scale: float, relu: bool, pool: int = 0) -> Words:
    """config_st: bytes between rows in memory, the scale, and fields of a pool."""
    return setting(pool | relu << 2 | 2, pattern(scale) << 32 | stride)


def local(row: int, rows: int, columns: int) -> int:
    """A local operand."""
    return rows << 48 | columns << 32 | row


class MoveLoop(Record):
    """A loop around a move: turns, and steps of the address and of the local row."""

    turns: int
    address: int
    row: int


def moves(funct: int, address: int, operand: int, loops: Sequence[MoveLoop]) -> Words:
    """Moves in loops, the longest innermost; at most three."""
    three = sorted((*(MoveLoop(1, 0, 0),) * (3 - len(loops)), *loops), key=lambda loop: loop.turns)
    if three[1].turns == 1:
        loop = three[2]
        place = (loop.turns, address, *both(operand), loop.address & 0xFFFFFFFF, loop.row & 0xFFFFFFFF)
        return (7 << 16 | funct << 8 | 4, *place)
    steps = [loop.address & 0xFFFFFFFF for loop in three] + [loop.row & 0xFFFFFFFF for loop in three]
    return (13 << 16 | funct << 8 | 2, *(loop.turns for loop in three), address, *both(operand), *steps)


def cut(total: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Whole pieces, then the rest: where they begin, how many there are, and their size."""
    if whole := total // most:
        yield 0, whole, most
    if rest := total % most:
        yield total - rest, 1, rest


class Held(Record):
    """The place of a picture in the scratchpad: a row of it for each pixel and block of channels, zeros around. Those
    right of a line are those left of the next."""

    first: int
    pitch: int
    """Rows from a line to the next."""
    block: int
    """... from a block of channels to the next."""
    above: int
    left: int

    def at(self, line: int, column: int, block: int = 0) -> int:
        """The scratchpad's row of a pixel."""
        return self.first + block * self.block + (line + self.above) * self.pitch + self.left + column


def brought(
    config: Config, image: Image, held: Held, lines: tuple[int, int], blocks: tuple[int, int]
) -> Iterator[Words]:
    """Some lines of a picture, of some blocks of channels; the way in has the pixel's stride and the block's."""
    begin, end = blocks[0] * config.dim, min(blocks[1] * config.dim, image.channels)
    most = max(64, config.dim)
    for channel, groups, wide in cut(end - begin, most):
        for column, chunks, count in cut(image.columns, config.dim):
            address = image.address + lines[0] * image.row + column * image.pixel + begin + channel
            row = held.at(lines[0], column, (begin + channel) // config.dim)
            loops = (
                MoveLoop(lines[1] - lines[0], image.row, held.pitch),
                MoveLoop(chunks, config.dim * image.pixel, config.dim),
                MoveLoop(groups, most, most // config.dim * held.block),
            )
            yield moves(MVIN, address, local(row, count, wide), loops)


def cleared(config: Config, value: int, row: int, rows: int, blocks: int, apart: int) -> Iterator[Words]:
    """The value at an address (0 for zeros) in rows that follow one another, of each block of channels."""
    for start, chunks, count in cut(rows, config.dim):
        loops = (MoveLoop(blocks, 0, apart), MoveLoop(chunks, 0, config.dim))
        yield moves(MVIN3, value, local(row + start, count, config.dim), loops)


class PixelWalk(Record):
    """An order of the pixels of a band: runs whose rows of A and of sums have one step each."""

    runs: int
    length: int
    """Pixels of a run."""
    a: tuple[int, int]
    """Rows of A from a run to the next, and from a pixel to the next."""
    sums: tuple[int, int]
    """... of the sums."""

    def cycles(self, dim: int) -> int:
        """Cycles for a block of weights: those of the array, or of the core if it takes longer to issue them."""
        chunks, rest = divmod(self.length, dim)
        array = self.runs * (chunks * dim + max(rest, LEAST if rest else 0))
        pairs, around = self.runs * (chunks + bool(rest)), SWEEP * bool(chunks) + SHORT * bool(rest)
        return max(array, PAIR * pairs + TURN * min(self.runs, chunks) + around)


PAIR, TURN, SWEEP, SHORT = 8, 8, 44, 52
"""Cycles of the core for a preload and a compute in the driver's loop, and for what stands around it: around those of
`dim` pixels, and of fewer."""
LEAST = 4
"""Rows the array takes at least."""


class LineBand(Record):
    """Lines of a result that are made together."""

    first: int
    lines: int
    walk: PixelWalk
    pitch: int
    """Rows of sums from a line to the next."""
    rows: int
    """Rows of sums."""
    column: int = 0
    """The first column of a result of one line."""


def products(
    config: Config,
    walk: PixelWalk,
    a: tuple[int, int, int],
    weights: tuple[int, int, int],
    sums: int,
    taps: int,
    sizes: tuple[int, int],
) -> Words:
    """The products of a band, a row of taps of the window and a block of output channels.

    Args:
        a: row of the first operand, rows to the next tap, and to the next block of input channels. weights: the same of
            the weights.
        sums: the operand of the first sum. taps: in the row. sizes: input and output channels.
    """
    dim, (inputs, outputs) = config.dim, sizes
    blocks, (chunks, rest) = -(-inputs // dim), divmod(walk.length, dim)
    longer, shorter = (16, 19) if walk.runs >= chunks else (19, 16)
    return (
        *(25 << 16 | 3, a[0], weights[0], sums, taps, a[1], weights[1], blocks, a[2], weights[2], outputs),
        *(min(inputs, dim), inputs - (blocks - 1) * dim, dim if chunks else 0, rest, longer, shorter),
        *(walk.runs, walk.a[0], walk.sums[0], chunks, dim * walk.a[1], dim * walk.sums[1]),
        *(chunks * dim * walk.a[1], chunks * dim * walk.sums[1]),
    )
