"""Gemmini computed: its two local memories and its instructions, from its documents (docs/gemmini.md).

It shares nothing with what makes the instructions. What is not modelled (the output-stationary dataflow, transposes,
normalisation, several pixels a row, dilated and transposed convolutions) is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dovetail.errors import SimulationError
from dovetail.records import Record
from dovetail.sim.device import Bus, Bytes

CONFIG, MVIN2, MVIN, MVOUT, COMPUTE, COMPUTE_KEPT, PRELOAD, FLUSH = range(8)
LOOP_WS, LOOP_CONV, MVIN3 = 8, 15, 14
LOADS = {MVIN: 0, MVIN2: 1, MVIN3: 2}
"""Instructions that move in -> the settings they use."""
NOWHERE = 0xFFFFFFFF
"""The local address of nothing."""
Numbers = NDArray[np.int32]


def bits(value: int, low: int, width: int) -> int:
    """A field of an operand."""
    return value >> low & (1 << width) - 1


def scaled(values: NDArray[Any], scale: np.float32) -> NDArray[np.int8]:
    """A float32 product, to the nearest (halves to even), saturated to int8."""
    product = np.rint(values.astype(np.float32) * scale)
    return np.asarray(np.clip(product, -128, 127), np.int8)


def real(pattern: int) -> np.float32:
    """The float32 of 32 bits."""
    return np.float32(np.array([pattern], np.uint32).view(np.float32)[0])


@dataclass
class WayIn:
    """Settings of one of the three ways in."""

    stride: int = 0
    block: int = 0
    scale: np.float32 = field(default_factory=lambda: np.float32(1))
    shrunk: bool = False


class LocalOperand(Record):
    """The local operand of an instruction: where, and how many rows and columns."""

    word: int

    @property
    def is_nothing(self) -> bool:
        """Whether there is none."""
        return self.word & NOWHERE == NOWHERE

    @property
    def accumulator(self) -> bool:
        """Whether it lies in the accumulator; else in the scratchpad."""
        return bool(self.word >> 31 & 1)

    @property
    def adds(self) -> bool:
        """Whether what is written is added."""
        return bool(self.word >> 30 & 1)

    @property
    def full(self) -> bool:
        """Whether it is read at full width."""
        return bool(self.word >> 29 & 1)

    @property
    def row(self) -> int:
        """The first row."""
        return self.word & 0x3FFFFFF

    @property
    def columns(self) -> int:
        """Columns."""
        return bits(self.word, 32, 16)

    @property
    def rows(self) -> int:
        """Rows."""
        return bits(self.word, 48, 16)


Step = tuple[int, int, int]
"""An instruction: funct, rs1, rs2."""


class GemminiMachine:
    """The state of a Gemmini of the weight-stationary dataflow, and what instructions do to it and to memory.

    Args:
        bus: the memories.
        dim: rows and columns of the array.
        scratchpad_rows: of `dim` int8 each. accumulator_rows: of `dim` int32 each.
    """

    def __init__(self, bus: Bus, dim: int = 16, scratchpad_rows: int = 16384, accumulator_rows: int = 1024) -> None:
        self.bus, self.dim = bus, dim
        self.scratchpad = np.zeros((scratchpad_rows, dim), np.int8)
        self.accumulator = np.zeros((accumulator_rows, dim), np.int32)
        self.loading = [WayIn(), WayIn(), WayIn()]
        self.store_stride, self.store_scale, self.relu, self.pool = 0, np.float32(1), False, 0
        self.a_stride = self.c_stride = 0
        self.kept = np.zeros((dim, dim), np.float64)
        self.weights, self.target = LocalOperand(NOWHERE), LocalOperand(NOWHERE)
        self.loop: dict[int, tuple[int, int]] = {}

    def refuse(self, what: str) -> SimulationError:
        """The error for what is not modelled, or what no Gemmini can do."""
        return SimulationError(what, where="gemmini", hint="docs/gemmini.md says what the model has")

    def dram(self, address: int, rows: int, width: int, stride: int) -> Bytes:
        """Rows of bytes in memory, writable."""
        extent = (rows - 1) * stride + width
        return as_strided(self.bus.view(address, extent), (rows, width), (stride, 1))

    def execute(self, funct: int, first: int, second: int) -> None:
        """Carry out one instruction that is no loop."""
        if funct == CONFIG:
            self.configure(first, second)
        elif funct in LOADS:
            self.move_in(first, LocalOperand(second), self.loading[LOADS[funct]])
        elif funct == MVOUT:
            self.move_out(first, LocalOperand(second))
        elif funct == PRELOAD:
            self.weights, self.target = LocalOperand(first), LocalOperand(second)
        elif funct in (COMPUTE, COMPUTE_KEPT):
            self.compute(LocalOperand(first), LocalOperand(second), funct == COMPUTE)
        elif funct != FLUSH:
            raise self.refuse(f"there is no instruction with funct {funct}")

    def configure(self, first: int, second: int) -> None:
        """Settings of the array (0), a way in (1), or the way out (2)."""
        kind = first & 3
        if kind == 0:
            if not first >> 7 & 1 and (not first >> 2 & 1 or first >> 8 & 3):
                raise self.refuse("the output-stationary dataflow and transposes are not modelled")
            self.a_stride, self.c_stride = bits(first, 16, 16), bits(second, 48, 16)
        elif kind == 1:
            if bits(first, 8, 8) > 1:
                raise self.refuse("several pixels a row are not modelled")
            own = self.loading[bits(first, 3, 2)]
            own.stride, own.block, own.shrunk = second, bits(first, 16, 16), bool(first >> 2 & 1)
            own.scale = real(first >> 32)
        elif kind == 2:
            if first >> 2 & 2:
                raise self.refuse("of activations only ReLU is modelled")
            self.store_stride, self.store_scale = second & 0xFFFFFFFF, real(second >> 32)
            self.relu, self.pool = bool(first >> 2 & 1), first
        else:
            raise self.refuse("normalisation is not modelled")

    def move_in(self, address: int, to: LocalOperand, own: WayIn) -> None:
        """Rows from memory, or zeros from address 0, into a local memory."""
        wide = to.accumulator and not own.shrunk
        size = 4 if wide else 1
        if address:
            held = self.dram(address, to.rows, to.columns * size, own.stride)
            values = np.ascontiguousarray(held).view(np.int32 if wide else np.int8)
            if not wide and own.scale != 1:
                values = scaled(values, own.scale)
        else:
            values = np.zeros((to.rows, to.columns), np.int8)
        memory: NDArray[Any] = self.accumulator if to.accumulator else self.scratchpad
        row, together = to.row & 0x1FFFFFFF, own.block >= to.rows or to.columns <= self.dim
        for first in range(0, to.rows, to.rows if together else 1):
            part = values if together else values[first : first + 1]
            for block, column in enumerate(range(0, to.columns, self.dim)):
                piece = part[:, column : column + self.dim]
                start = row + first + block * own.block
                target = memory[start : start + len(piece), : piece.shape[1]]
                if to.accumulator and to.adds:
                    target += piece
                else:
                    target[...] = piece

    def results(self, place: LocalOperand, rows: NDArray[np.intp]) -> NDArray[np.int8]:
        """Rows as they leave: those of the accumulator scaled, limited, and through ReLU."""
        if not place.accumulator:
            return self.scratchpad[rows]
        values = scaled(self.accumulator[rows], self.store_scale)
        return np.maximum(values, 0) if self.relu else values

    def move_out(self, address: int, place: LocalOperand) -> None:
        """Rows to memory; with a pool, the most of each window."""
        if self.pool >> 4 & 3:
            self.move_pooled(address, place)
            return
        if place.word >> 26 & 7:
            raise self.refuse("normalisation is not modelled")
        for block, column in enumerate(range(0, place.columns, self.dim)):
            rows = place.row + block * self.dim + np.arange(place.rows)
            width = min(self.dim, place.columns - column)
            if place.accumulator and place.full:
                values = self.accumulator[rows, :width].astype("<i4").view(np.uint8)
            else:
                values = self.results(place, rows)[:, :width].view(np.uint8)
            size = values.shape[1] // width
            self.write(address + column * size, values, self.store_stride)

    def write(self, address: int, values: Bytes, stride: int) -> None:
        """Rows of bytes to memory."""
        self.dram(address, len(values), values.shape[1], stride)[...] = values

    def move_pooled(self, address: int, place: LocalOperand) -> None:
        """The most of each window; what lies outside of the image counts as 0."""
        stride, size, above, left = (bits(self.pool, low, 2) for low in (4, 6, 8, 10))
        width, rows, columns, tall, wide = (bits(self.pool, low, 8) for low in (24, 32, 40, 48, 56))
        image = self.results(place, place.row + np.arange(tall * wide))[:, : place.columns].reshape(tall, wide, -1)
        down, right = (np.arange(count)[:, None] * stride + np.arange(size) for count in (rows, columns))
        most = (down.max() + 1 + above, right.max() + 1 + left)
        padded = np.zeros((max(tall + above, most[0]), max(wide + left, most[1]), place.columns), np.int8)
        padded[above : above + tall, left : left + wide] = image
        windows = padded[down[:, None, :, None], right[None, :, None, :]]
        values = windows.max(axis=(2, 3)).view(np.uint8)
        for row in range(rows):
            self.write(address + row * width * self.store_stride, values[row], self.store_stride)

    def compute(self, a: LocalOperand, addend: LocalOperand, fresh: bool) -> None:
        """A block of A times the weights held, to where the preload said."""
        dim = self.dim
        if fresh:
            self.kept = np.zeros((dim, dim), np.float64)
            if not self.weights.is_nothing:
                rows, columns = self.weights.rows, self.weights.columns
                self.kept[:rows, :columns] = self.scratchpad[self.weights.row :][:rows, :columns]
        total = np.zeros((dim, dim), np.int64)
        if not a.is_nothing:
            held = self.scratchpad[a.row : a.row + (a.rows - 1) * max(self.a_stride, 1) + 1 : max(self.a_stride, 1)]
            total[: a.rows] += np.rint(held[:, : a.columns] @ self.kept[: a.columns]).astype(np.int64)
        if not addend.is_nothing:
            total[: addend.rows, : addend.columns] += self.scratchpad[addend.row :][: addend.rows, : addend.columns]
        if self.target.is_nothing:
            return
        if not self.target.accumulator:
            raise self.refuse("results in the scratchpad are not modelled")
        rows, columns, step = self.target.rows, self.target.columns, max(self.c_stride, 1)
        first = self.target.row & 0x1FFFFFFF
        place = self.accumulator[first : first + (rows - 1) * step + 1 : step, :columns]
        values = total[:rows, :columns].astype(np.int32)
        if self.target.adds:
            place += values
        else:
            place[...] = values
