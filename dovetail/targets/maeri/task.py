"""A launch of the engine: a layer, where its operands lie, and the order of its virtual neurons, as 32-bit words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields

from dovetail.errors import SimulationError
from dovetail.targets.maeri.delivery import Tile
from dovetail.targets.maeri.layer import Layer
from dovetail.targets.maeri.schedule import Item, Segment
from dovetail.targets.maeri.tree import Range

MOST_ITEMS = 1 << 16
"""Most items, and most segments of one, a launch may have."""
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies: an image's rows, columns and channels, or a matrix' rows and elements (columns: 0)."""

    address: int
    row: int
    """Bytes from one row to the next."""
    column: int
    channel: int


@dataclass(frozen=True, slots=True)
class Task:
    """What a launch computes: sums of products, each begun with its channel's bias."""

    layer: Layer
    depthwise: bool
    """Whether weights are [1, R, S, C * M] rather than [O, R, S, C]."""
    zero_point: int
    """Taken off every input."""
    unsigned: bool
    """Whether inputs are uint8, else int8."""
    source: Place
    result: Place
    """Of the sums, int32."""
    weights: int
    """Bytes from the start of the constants."""
    bias: int
    items: tuple[Item, ...]


def encode(task: Task) -> tuple[int, ...]:
    """The words of a launch."""
    words = [*astuple(task.layer), task.depthwise, task.zero_point, task.unsigned, *astuple(task.source),
             *astuple(task.result), task.weights, task.bias, len(task.items)]  # fmt: skip
    for item in task.items:
        words += [item.start, item.place.start, item.place.size, *astuple(item.tile), *item.taps, len(item.segments)]
        for part in item.segments:
            words += [part.channel, part.first, part.count]
    return tuple(int(word) & _MASK for word in words)


def decode(words: Sequence[int]) -> Task:
    """Read the words of a launch.

    Raises:
        SimulationError: they are too few, too many, or name more items than a launch may have.
    """
    stream = iter(words)
    try:
        layer = Layer(*_take(stream, len(fields(Layer))))
        depthwise, zero_point, unsigned = _take(stream, 3)
        source, result = Place(*_take(stream, 4)), Place(*_take(stream, 4))
        weights, bias, count = _take(stream, 3)
        items = tuple(_item(stream) for _ in range(_bounded(count)))
    except (StopIteration, RuntimeError):
        raise SimulationError("the task ends too early", where="maeri",
                              hint="look at the driver: WORDS must count the words of the whole task") from None
    if next(stream, None) is not None:
        raise SimulationError("the task has words after its last item", where="maeri",
                              hint="look at the driver: WORDS must count the words of the whole task")
    signed = zero_point - (1 << 32) if zero_point >> 31 else zero_point
    return Task(layer, bool(depthwise), signed, bool(unsigned), source, result, weights, bias, items)


def _item(stream: Iterator[int]) -> Item:
    start, first, size = _take(stream, 3)
    tile = Tile(*_take(stream, len(fields(Tile))))
    low, high, count = _take(stream, 3)
    segments = tuple(Segment(*_take(stream, 3)) for _ in range(_bounded(count)))
    return Item(0, tile, Range(first, size), start, segments, (low, high))


def _take(stream: Iterator[int], count: int) -> list[int]:
    return [next(stream) for _ in range(count)]


def _bounded(count: int) -> int:
    if count > MOST_ITEMS:
        raise SimulationError(f"the task has {count} items or segments, the limit is {MOST_ITEMS}", where="maeri",
                              hint="look at the words of the task; the driver may point to something else")
    return count
