"""Orders as data: items of equal virtual neurons, and, by `timing.py`, when they end and their sums exist."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork, Times
from dovetail.targets.maeri.tile import MultiplierTile, grid
from dovetail.targets.maeri.timing import ItemTiming, timing
from dovetail.targets.maeri.tree import Range


@dataclass(frozen=True, slots=True)
class ChannelSegment:
    """Some sums of one output channel, or of neighbouring ones where a tile has several filters."""

    channel: int
    """The (first) output channel."""
    first: int
    """The first position of the result, rows first; counted in tiles of positions."""
    count: int
    """Number of positions."""


@dataclass(frozen=True, slots=True)
class Item:
    """Equal virtual neurons side by side that work in step, from their first weight until their last sum has left."""

    work: int
    """Number of the layer, in the network's order."""
    start: int
    """The cycle in which its first weight is sent."""
    place: Range
    """All its multipliers."""
    tile: MultiplierTile
    """One virtual neuron, or several that share what is sent."""
    taps: tuple[int, int]
    """The products of each sum it adds up: [first, end) in the order channel, row, column of the kernel. Where that is
    not all of them, other items add the rest in the accumulation buffer."""
    segments: tuple[ChannelSegment, ...]
    """In order; all weights of a segment come before its first input."""


def neurons(item: Item, time: ItemTiming) -> list[Range]:
    """The places of an item's virtual neurons."""
    return [Range(item.place.start + number * time.size, time.size) for number in range(item.tile.neurons)]


def in_order(items: Iterable[Item]) -> tuple[Item, ...]:
    """Items by start, then place."""
    return tuple(sorted(items, key=lambda item: (item.start, item.place.start)))


def sweep(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, set[int]]]:
    """Every cycle in which a span [begin, end) begins or ends, with the numbers of the spans at work from then on."""
    begins, ends = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for number, (begin, end) in enumerate(spans):
        begins[begin].add(number)
        ends[end].add(number)
    working = set[int]()
    for cycle in sorted({*begins, *ends}):
        working = (working - ends[cycle]) | begins[cycle]
        yield cycle, working


def channels_of(work: MultiplierLayer, tile: MultiplierTile, first: int) -> list[int]:
    """The filters of a segment, by its first."""
    group, filter_ = divmod(first, work.layer.filters)
    return [
        (group + g) * work.layer.filters + filter_ + f
        for g in range(min(tile.groups, work.layer.groups - group))
        for f in range(min(tile.filters, work.layer.filters - filter_))
    ]


def timing_of(item: Item, work: MultiplierLayer, config: MaeriConfig) -> ItemTiming:
    """Times of an item's virtual neurons."""
    return timing(config, work.layer, item.tile, item.taps[1] - item.taps[0], item.place.start)


def _products(item: Item, columns: int, time: ItemTiming) -> tuple[list[int], int]:
    """Cycles from an item's start to the first product of each segment, and to the last product of all."""
    firsts, cycle, earlier = list[int](), 0, 0
    for part in item.segments:
        cycle += time.load_after(earlier)
        firsts.append(cycle)
        cycle += time.positions(columns, part.first, part.count)
        earlier = part.count
    return firsts, cycle


def _margin(time: ItemTiming, item: Item) -> int:
    """Cycles added where sums of several virtual neurons go round, queue at lines, or follow those of the filter before
    at once: which of them meet is not known to the cycle."""
    if item.tile.neurons == 1:
        return 0
    crowded = 4 if time.loops or time.pace[0] > time.folds else 0
    return crowded + (0 if time.drains else 2 * len(item.segments) + 8)


def busy(item: Item, work: MultiplierLayer, config: MaeriConfig) -> int:
    """Cycles from an item's first weight until its last sum has left."""
    time = timing_of(item, work, config)
    return _products(item, grid(work.layer, item.tile)[1], time)[1] + time.tail + _margin(time, item)


@dataclass(frozen=True)
class NetworkOrder:
    """A valid order of a network."""

    network: OrderNetwork
    config: MaeriConfig
    items: tuple[Item, ...]
    """By start, then place."""
    makespan: int
    """Cycles until the last result exists."""

    def work(self, item: Item) -> MultiplierLayer:
        """The layer an item belongs to."""
        return self.network.works[item.work]

    def end(self, item: Item) -> int:
        """The cycle after an item's last sum has left."""
        return item.start + busy(item, self.work(item), self.config)

    @property
    def spans(self) -> list[tuple[Item, int, int]]:
        """Every item, the cycle of its first weight, and the cycle after its last sum has left."""
        return [(item, item.start, self.end(item)) for item in self.items]

    def timing(self, item: Item) -> ItemTiming:
        """Times of an item's virtual neurons."""
        return timing_of(item, self.work(item), self.config)


@dataclass(frozen=True)
class LayerItems:
    """Items of one layer, laid out."""

    items: tuple[Item, ...]
    ends: tuple[int, ...]
    """The cycle after each item's last sum has left."""
    times: Times
    """Cycle from which results of the layer exist, by [channel, row]; 0 where these items compute none."""

    @property
    def finish(self) -> int:
        """The cycle after the last sum has left."""
        return max(self.ends)

    @property
    def exists(self) -> int:
        """The cycle from which all their results exist."""
        return int(self.times.max())


def laid_out(items: Sequence[Item], work: MultiplierLayer, config: MaeriConfig, slack: int = 0) -> LayerItems:
    """Items of a layer with their ends; results exist `slack` cycles later, where others' sums may be in the way."""
    times, ends = np.zeros((work.outputs, work.layer.out_rows), np.int64), []
    for item in items:
        time, columns = timing_of(item, work, config), grid(work.layer, item.tile)[1]
        firsts, end = _products(item, columns, time)
        behind = item.start + time.tail + _margin(time, item)
        ends.append(behind + end)
        for part, begin in zip(item.segments, firsts, strict=True):
            channels, last = channels_of(work, item.tile, part.channel), part.first + part.count - 1
            for row in range(part.first // columns, last // columns + 1):
                count = min((row + 1) * columns - 1, last) - part.first + 1
                exists = begin + time.positions(columns, part.first, count) + behind + slack
                rows = slice(row * item.tile.out_rows, (row + 1) * item.tile.out_rows)
                for channel in channels:
                    np.maximum(times[channel, rows], exists, out=times[channel, rows])
    return LayerItems(tuple(items), tuple(ends), work.of_result(times))
