"""A launch of the engine: a layer, where its operands lie, and the order of its virtual neurons, as 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import islice

from dovetail.errors import SimulationError
from dovetail.targets.maeri.listing import Item, Segment
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.timing import Range, Tile

MOST_ITEMS = 1 << 16
"""Most items, and most segments of one, a launch may have."""
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Strided:
    """Where an array lies: an image's rows, columns and channels, or a matrix' rows and elements (columns: 0)."""

    address: int
    row: int
    """Bytes from one row to the next."""
    column: int
    channel: int


@dataclass(frozen=True, slots=True)
class Task:
    """What a launch computes: sums of products, each begun with its channel's bias."""

    layer: OrderLayer
    depthwise: bool
    """Whether weights are [1, R, S, C * M] rather than [O, R, S, C]."""
    zero_point: int
    """Taken off every input."""
    unsigned: bool
    """Whether inputs are uint8, else int8."""
    source: Strided
    result: Strided
    """Of the sums, int32."""
    weights: int
    """Bytes from the start of the constants."""
    bias: int
    items: tuple[Item, ...]


def encode(task: Task) -> tuple[int, ...]:
    """The words of a launch."""
    words = [
        *astuple(task.layer),
        *(task.depthwise, task.zero_point, task.unsigned),
        *astuple(task.source),
        *astuple(task.result),
        *(task.weights, task.bias, len(task.items)),
    ]
    for item in task.items:
        words += [item.start, item.place.start, item.place.size, *astuple(item.tile), *item.taps, len(item.segments)]
        for part in item.segments:
            words += astuple(part)
    return tuple(int(word) & _MASK for word in words)


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
        tile = Tile(*take(len(fields(Tile))))
        low, high, count = take(3)
        segments = tuple(Segment(*take(3)) for _ in bounded(count))
        return Item(0, tile, Range(first, size), start, segments, (low, high))

    layer = OrderLayer(*take(len(fields(OrderLayer))))
    depthwise, zero_point, unsigned = take(3)
    source, result = Strided(*take(4)), Strided(*take(4))
    weights, bias, count = take(3)
    items = tuple(item() for _ in bounded(count))
    if next(stream, None) is not None:
        raise _wrong("the task has words after its last item")
    signed = zero_point - (1 << 32) if zero_point >> 31 else zero_point
    return Task(layer, bool(depthwise), signed, bool(unsigned), source, result, weights, bias, items)


def _wrong(
    what: str, hint: str = "look at the driver: WORDS must count the words of the whole task"
) -> SimulationError:
    return SimulationError(what, where="maeri", hint=hint)
