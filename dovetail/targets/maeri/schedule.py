"""An order: which virtual neurons work where and when, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.delivery import Tile
from dovetail.targets.maeri.timing import Timing, timing
from dovetail.targets.maeri.tree import Range
from dovetail.targets.maeri.work import Network, Work


@dataclass(frozen=True, slots=True)
class Segment:
    """Some sums of one output channel, or of neighbouring ones where a tile has several filters."""

    channel: int
    """The (first) output channel."""
    first: int
    """The first position of the result, rows first; counted in tiles of positions."""
    count: int
    """So many positions from there."""


@dataclass(frozen=True, slots=True)
class Item:
    """Equal virtual neurons side by side that work in step, from their first weight to their last product."""

    work: int
    """Which layer, counted in the network's order."""
    tile: Tile
    """Of one virtual neuron, or of several that share what is sent."""
    place: Range
    """All its multipliers."""
    start: int
    """Cycle its first weight is sent."""
    segments: tuple[Segment, ...]
    """In order; all weights of a segment come before its first input."""
    taps: tuple[int, int]
    """The products of each sum it adds up: [first, end) in the order channel, row, column of the kernel. Where that is
    not all of them, other items add the rest in the accumulation buffer."""


@dataclass(frozen=True)
class Schedule:
    """A valid order of a network, and what it rests on."""

    network: Network
    config: MaeriConfig
    items: tuple[Item, ...]
    """By start, then place."""
    makespan: int
    """Cycles until the last result exists."""


def grid(work: Work, tile: Tile) -> tuple[int, int]:
    """Rows and columns of positions, in tiles."""
    return -(-work.layer.out_rows // tile.out_rows), -(-work.layer.out_columns // tile.out_columns)


def busy(item: Item, network: Network, config: MaeriConfig) -> int:
    """Cycles an item takes, from its first weight to its last product."""
    work = network.works[item.work]
    time = timing(config, work.layer, item.tile, item.taps[1] - item.taps[0])
    columns, cycles, before = grid(work, item.tile)[1], 0, 0
    for part in item.segments:
        cycles += time.load_after(before) + time.positions(columns, part.first, part.count)
        before = part.count
    return cycles


def neurons(item: Item, time: Timing) -> list[Range]:
    """The virtual neurons of an item."""
    return [Range(item.place.start + number * time.size, time.size) for number in range(item.tile.neurons)]


def ordered(items: Sequence[Item]) -> tuple[Item, ...]:
    """Items by start, then place."""
    return tuple(sorted(items, key=lambda item: (item.start, item.place.start)))
