"""The program IR: buffers in memories and a list of statements the core executes in order.

Copies run on the DMA and launches on engines while the core goes on; each queue works in order. A `Wait` holds the
core until a queue has finished the statement it names. Everything has a fixed address.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from dovetail.graph.graph import Graph
from dovetail.graph.types import Array, Box, DType, Shape, TensorType, box_shape
from dovetail.target.pattern import Match

CORE = "core"
"""The queue name of what the core does itself."""


class Role(enum.Enum):
    """What a buffer is for."""

    INPUT = "input"
    OUTPUT = "output"
    VALUE = "value"
    """An activation of the network."""
    TILE = "tile"
    """Part of an activation, or constants, copied close to an engine."""
    SCRATCH = "scratch"
    CONSTANT = "constant"
    """Known at compile time; lies with the code."""


@dataclass(frozen=True)
class Buffer:
    """A stretch of memory."""

    name: str
    """A C identifier, unique in the program."""
    memory: str
    nbytes: int
    role: Role
    address: int | None = None
    """First byte; None until allocated, and always for constants, which the linker places."""


@dataclass(frozen=True)
class View:
    """A strided part of a buffer."""

    buffer: str
    type: TensorType
    strides: tuple[int, ...]
    """Bytes from one element to the next along each axis."""
    offset: int = 0
    """Bytes from the start of the buffer."""

    @property
    def span(self) -> tuple[int, int]:
        """First byte and one past the last byte touched, relative to the buffer."""
        if 0 in self.type.shape:
            return self.offset, self.offset
        reach = sum((size - 1) * stride for size, stride in zip(self.type.shape, self.strides, strict=True))
        return self.offset, self.offset + reach + self.type.dtype.numpy.itemsize

    @property
    def is_dense(self) -> bool:
        """True when the elements lie side by side in row-major order."""
        dense = dense_strides(self.type.shape, self.type.dtype)
        axes = zip(self.type.shape, self.strides, dense, strict=True)
        return all(size == 1 or stride == expected for size, stride, expected in axes)

    def part(self, box: Box) -> View:
        """The view of a box of this view."""
        start = sum(begin * stride for (begin, _), stride in zip(box, self.strides, strict=True))
        kind = TensorType(box_shape(box), self.type.dtype)
        return View(self.buffer, kind, self.strides, self.offset + start)


def dense_strides(shape: Shape, dtype: DType) -> tuple[int, ...]:
    """Row-major byte strides."""
    strides = [dtype.numpy.itemsize]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def dense_view(buffer: str, kind: TensorType, offset: int = 0) -> View:
    """A whole value lying row-major from `offset`."""
    return View(buffer, kind, dense_strides(kind.shape, kind.dtype), offset)


@dataclass(frozen=True)
class Begin:
    """From here on the core works for this layer (an index into `Program.layers`)."""

    layer: int


@dataclass(frozen=True)
class Copy:
    """A strided copy by the DMA: `destination` is `source` surrounded by `before`/`after` elements of `fill`."""

    layer: int
    source: View
    destination: View
    """Includes the padding."""
    before: Shape = ()
    """Elements of padding per axis ahead of the source; empty for none."""
    fill: int = 0


@dataclass(frozen=True)
class Launch:
    """A start of an engine on one tile."""

    layer: int
    engine: str
    match: Match
    """The offload's pattern in the tile's own graph."""
    operands: Mapping[str, View]
    """Runtime operands by value name, packed constants by their name, "scratch"."""
    result: View
    packed: Mapping[str, Array] = field(default_factory=dict)
    """What the bytes of each packed constant must be."""

    @property
    def graph(self) -> Graph:
        """The computation of this tile."""
        return self.match.graph


@dataclass(frozen=True)
class Call:
    """A kernel run by the core, finished when the next statement begins."""

    layer: int
    graph: Graph
    operands: Mapping[str, View]
    """Runtime operands by value name."""
    result: View


@dataclass(frozen=True)
class Wait:
    """Hold the core until `queue` has finished the statement at index `statement` (and all before it)."""

    layer: int
    queue: str
    statement: int


Statement: TypeAlias = Begin | Copy | Launch | Call | Wait


@dataclass(frozen=True)
class Program:
    """A whole network as statements over placed buffers."""

    name: str
    buffers: Mapping[str, Buffer]
    constants: Mapping[str, Array]
    """Bytes of every CONSTANT buffer, uint8."""
    statements: tuple[Statement, ...]
    layers: tuple[str, ...]
    inputs: Mapping[str, View]
    """The network's inputs by value name; dense."""
    outputs: Mapping[str, View]
    values: Mapping[str, View] = field(default_factory=dict)
    """Where each intermediate value lies when it has been computed, for checks."""
    dma: str = "dma"
    """Name of the queue that copies run on."""


def queue_of(statement: Statement, dma: str) -> str:
    """The queue a statement runs on."""
    if isinstance(statement, Copy):
        return dma
    return statement.engine if isinstance(statement, Launch) else CORE


def reads(statement: Statement) -> tuple[View, ...]:
    """Every view a statement reads."""
    if isinstance(statement, Copy):
        return (statement.source,)
    if isinstance(statement, Launch):
        return tuple(view for name, view in statement.operands.items() if name != "scratch")
    return tuple(statement.operands.values()) if isinstance(statement, Call) else ()


def writes(statement: Statement) -> tuple[View, ...]:
    """Every view a statement writes."""
    if isinstance(statement, Copy):
        return (statement.destination,)
    if isinstance(statement, Launch):
        scratch = statement.operands.get("scratch")
        return (statement.result, scratch) if scratch else (statement.result,)
    return (statement.result,) if isinstance(statement, Call) else ()


def as_array(memory: Array, view: View, base: int) -> Array:
    """A numpy view of `view`, whose buffer begins at byte `base` of `memory` (uint8)."""
    dtype = view.type.dtype.numpy
    start, stop = view.span
    raw = memory[base + start : base + stop]
    return np.ndarray(view.type.shape, dtype, buffer=raw.data, strides=view.strides)
