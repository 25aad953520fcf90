"""A launch of the engine: a layer, where its operands lie, and the order of its virtual neurons, as 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from itertools import islice

import numpy as np

from dovetail.errors import SimulationError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import DType, TensorType
from dovetail.targets.maeri.tile import MultiplierTile
from dovetail.targets.maeri.network import OrderLayer, OrderNetwork, network
from dovetail.targets.maeri.order import ChannelSegment, Item
from dovetail.targets.maeri.tree import Range


class TaskKind(IntEnum):
    """Kinds of layers."""

    CONVOLUTION = 0
    """Weights are [O, R, S, C]; dense layers of several vectors too."""
    DEPTHWISE = 1
    """Weights are [1, R, S, C * M]."""
    TURNED = 2
    """A dense layer of one vector, which stays in the multipliers; weights are [positions, C]."""


MOST_ITEMS = 1 << 16
"""Most items, and most segments of one, a launch may have."""
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class StridedArray:
    """Where an array lies: an image's rows, columns and channels, or a matrix' rows and elements (columns: 0)."""

    address: int
    row: int
    """Bytes from one row to the next."""
    column: int
    channel: int


@dataclass(frozen=True, slots=True)
class OutputStage:
    """What the stage behind the collection bus makes of sums: int8."""

    scales: int
    """Bytes from the start of the constants: multiplier and shift of each channel; of an addition, those of the sum
    and of both operands."""
    zero_point: int
    """Added to every result."""
    low: int
    high: int
    other: StridedArray
    """The second image of an addition."""
    other_zero_point: int


@dataclass(frozen=True, slots=True)
class Task:
    """What a launch computes: sums of products, each begun with its channel's bias. An addition of two images has no
    items; its layer says their sizes, each channel a group."""

    layer: OrderLayer
    kind: TaskKind
    """What the layer is, and so how its weights lie."""
    zero_point: int
    """Taken off every input."""
    unsigned: bool
    """Whether inputs are uint8, else int8."""
    source: StridedArray
    result: StridedArray
    """Of the sums, int32; of what a stage makes of them, int8."""
    weights: int
    """Bytes from the start of the constants."""
    bias: int
    items: tuple[Item, ...]
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Rows above, columns to the left, rows below and columns to the right that are not in memory; the layer's image
    has them."""
    stage: OutputStage | None = None
    """None where sums are stored."""


def encode(task: Task) -> tuple[int, ...]:
    """The words of a launch."""
    words = [
        *astuple(task.layer),
        *(task.kind, task.zero_point, task.unsigned),
        *astuple(task.source),
        *astuple(task.result),
        *(task.weights, task.bias, *task.padding, task.stage is not None),
    ]
    if task.stage is not None:
        stage = task.stage
        words += [stage.scales, stage.zero_point, stage.low, stage.high, *astuple(stage.other), stage.other_zero_point]
    words.append(len(task.items))
    for item in task.items:
        words += [item.start, item.place.start, item.place.size, *astuple(item.tile), *item.taps, len(item.segments)]
        for part in item.segments:
            words += astuple(part)
    return tuple(int(word) & _MASK for word in words)


def layers_of(tasks: Sequence[Task]) -> OrderNetwork:
    """The layers of tasks beside each other, as a network with weights of zeros."""
    builder, results = GraphBuilder("launch"), []
    for task in tasks:
        layer, turned = task.layer, task.kind == TaskKind.TURNED
        image = (1, layer.in_rows, layer.in_columns, layer.channels * layer.groups)
        kind = TensorType((1, layer.channels) if turned else image, DType.UINT8 if task.unsigned else DType.INT8)
        x = builder.input(builder.fresh("x"), kind)
        channels, kernel = layer.filters * layer.groups, (layer.rows, layer.columns)
        shape: tuple[int, ...] = (channels, *kernel, layer.channels)
        if task.kind != TaskKind.CONVOLUTION:
            shape = (layer.in_rows, layer.channels) if turned else (1, *kernel, channels)
        w = builder.constant("weights", np.zeros(shape, np.int8))
        operator = DepthwiseConv2d if task.kind == TaskKind.DEPTHWISE else Conv2d
        stride, zero = (layer.stride, layer.stride), task.zero_point
        window = FullyConnected(input_zero_point=zero) if turned else operator(stride, input_zero_point=zero)
        results.append(builder.add(window, [x, w], "result"))
    return network(builder.finish(results))


def decode(words: Sequence[int]) -> Task:
    """Read the words of a launch.

    Raises:
        SimulationError: they are too few, too many, or name more items than a launch may have.
    """
    stream = iter(words)

    def take(count: int) -> list[int]:
        found = list(islice(stream, count))
        if len(found) < count:
            raise _wrong("the task ends too early")
        return found

    def bounded(count: int) -> range:
        if count > MOST_ITEMS:
            hint = "look at the words of the task; the driver may point to something else"
            raise _wrong(f"the task has {count} items or segments, the limit is {MOST_ITEMS}", hint)
        return range(count)

    def item() -> Item:
        start, first, size = take(3)
        rows, columns, channels, filters, groups, out_rows, out_columns, flat = take(len(fields(MultiplierTile)))
        tile = MultiplierTile(rows, columns, channels, filters, groups, out_rows, out_columns, bool(flat))
        low, high, count = take(3)
        segments = tuple(ChannelSegment(*take(3)) for _ in bounded(count))
        return Item(0, tile, Range(first, size), start, segments, (low, high))

    def signed(count: int) -> list[int]:
        return [word - (word >> 31 << 32) for word in take(count)]

    layer = OrderLayer(*take(len(fields(OrderLayer))))
    (kind,), (zero_point,), (unsigned,) = take(1), signed(1), take(1)
    if kind > max(TaskKind):
        raise _wrong(f"the task has a layer of kind {kind}", "look at the words of the task")
    source, result = StridedArray(*take(4)), StridedArray(*take(4))
    weights, bias, top, left, bottom, right, staged = take(7)
    stage = None
    if staged:
        (scales,), (zero, least, most), other = take(1), signed(3), StridedArray(*take(4))
        stage = OutputStage(scales, zero, least, most, other, signed(1)[0])
    items = tuple(item() for _ in bounded(take(1)[0]))
    if next(stream, None) is not None:
        raise _wrong("the task has words after its last item")
    given = (layer, TaskKind(kind), zero_point, bool(unsigned), source, result, weights, bias, items)
    return Task(*given, (top, left, bottom, right), stage)


def _wrong(
    what: str, hint: str = "look at the driver: WORDS must count the words of the whole task"
) -> SimulationError:
    return SimulationError(what, where="maeri", hint=hint)
