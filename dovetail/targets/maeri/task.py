"""A launch of the engine: a layer, the places of its operands, and the order of its virtual neurons, as 32-bit
words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import SimulationError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.types import DType, TensorType
from dovetail.targets.maeri.network import OrderLayer, OrderNetwork, TaskKind, network
from dovetail.targets.maeri.order import Item
from dovetail.targets.maeri.words import Address, WordReader, words_of


@dataclass(frozen=True, slots=True)
class StridedArray:
    """An array in memory: an image's rows, columns and channels, or a matrix' rows and elements (columns: 0)."""

    address: Address
    row: int
    """Bytes from one row to the next."""
    column: int
    channel: int


@dataclass(frozen=True, slots=True)
class OutputStage:
    """The stage behind the collection bus, which makes int8 of sums."""

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
    """Sums of products, each begun with its channel's bias.

    An addition of two images has no items; its layer says their sizes, each channel a group.
    """

    layer: OrderLayer
    kind: TaskKind
    zero_point: int
    """Taken off every input."""
    unsigned: bool
    """Whether inputs are uint8, else int8."""
    source: StridedArray
    result: StridedArray
    """Sums, int32; behind a stage int8."""
    weights: int
    """Bytes from the start of the constants."""
    bias: int
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Rows above, columns to the left, rows below and columns to the right that are not in memory; the layer's image
    has them."""
    stage: OutputStage | None = None
    """None where sums are stored."""
    items: tuple[Item, ...] = ()


def encode(task: Task) -> tuple[int, ...]:
    """The words of a launch."""
    items = (word for item in task.items for word in words_of(item, "work"))
    return (*words_of(task, "items"), len(task.items), *items)


def decode(words: Sequence[int]) -> Task:
    """Read the words of a launch.

    Raises:
        SimulationError: they are too few, too many, or no task.
    """
    reader = WordReader(words, _wrong)
    task = reader.record(Task, items=())
    items = reader.many(reader.take(1)[0], lambda: reader.record(Item, work=0))
    if reader.left:
        raise _wrong(f"there are {reader.left} words after the last item")
    return replace(task, items=items)


def _wrong(what: str) -> SimulationError:
    hint = "look at the driver: WORDS must count the words of the whole task, and TASK must point to it"
    return SimulationError(f"these words are no task: {what}", where="maeri", hint=hint)


def layers_of(tasks: Sequence[Task]) -> OrderNetwork:
    """The layers of tasks beside each other, as a network with weights of zeros."""
    builder, results = GraphBuilder("launch"), []
    for task in tasks:
        layer, kind = task.layer, DType.UINT8 if task.unsigned else DType.INT8
        image = (1, layer.in_rows, layer.in_columns, layer.channels * layer.groups)
        x = builder.input(
            builder.fresh("x"), TensorType((1, layer.channels) if task.kind is TaskKind.TURNED else image, kind)
        )
        weights = np.zeros(task.kind.weight_shape(layer), np.int8)
        results.append(
            task.kind.add_to(builder, x, weights, stride=layer.stride, zero_point=task.zero_point, stem="result")
        )
    return network(builder.finish(results))
