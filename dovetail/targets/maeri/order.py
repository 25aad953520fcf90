"""Orders as data: items of equal virtual neurons, when they start and what they compute; and what follows from that by
`timing`: when they end, and from when their sums exist."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork, Times
from dovetail.targets.maeri.timing import ItemTiming, MultiplierTile, timing
from dovetail.targets.maeri.tree import Range


@dataclass(frozen=True, slots=True)
class ChannelSegment:
    """Some sums of one output channel, or of neighbouring ones where a tile has several filters."""

    channel: int
    """The (first) output channel."""
    first: int
    """The first position of the result, rows first; counted in tiles of positions."""
    count: int
    """So many positions from there."""


@dataclass(frozen=True, slots=True)
class Item:
    """Equal virtual neurons side by side that work in step, from their first weight until their last sum has left."""

    work: int
    """Which layer, counted in the network's order."""
    tile: MultiplierTile
    """Of one virtual neuron, or of several that share what is sent."""
    place: Range
    """All its multipliers."""
    start: int
    """Cycle its first weight is sent."""
    segments: tuple[ChannelSegment, ...]
    """In order; all weights of a segment come before its first input."""
    taps: tuple[int, int]
    """The products of each sum it adds up: [first, end) in the order channel, row, column of the kernel. Where that is
    not all of them, other items add the rest in the accumulation buffer."""


def timing_of(item: Item, work: MultiplierLayer, config: MaeriConfig) -> ItemTiming:
    """What an item's virtual neurons take."""
    return timing(config, work.layer, item.tile, item.taps[1] - item.taps[0], item.place.start)


def grid(work: MultiplierLayer, tile: MultiplierTile) -> tuple[int, int]:
    """Rows and columns of positions, in tiles."""
    return -(-work.layer.out_rows // tile.out_rows), -(-work.layer.out_columns // tile.out_columns)


def busy(item: Item, network: OrderNetwork, config: MaeriConfig) -> int:
    """Cycles an item takes, from its first weight until its last sum has left."""
    work = network.works[item.work]
    time, columns, cycles, before = timing_of(item, work, config), grid(work, item.tile)[1], 0, 0
    for part in item.segments:
        cycles += time.load_after(before) + time.positions(columns, part.first, part.count)
        before = part.count
    return cycles + time.tail + _margin(time, item, sum(part.count for part in item.segments) * time.later)


def _margin(time: ItemTiming, item: Item, cycles: int) -> int:
    """Cycles added where sums of several virtual neurons go round, queue at lines, or follow those of the filter
    before at once: who meets whom is not known to the cycle."""
    if item.tile.neurons == 1:
        return 0
    crowded = 4 if time.going or time.pace[0] > time.folds else 0
    return crowded + (0 if time.drains else 2 * len(item.segments) + 8)


@dataclass(frozen=True)
class NetworkOrder:
    """A valid order of a network, and what it rests on."""

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
        return item.start + busy(item, self.network, self.config)

    @property
    def spans(self) -> list[tuple[Item, int, int]]:
        """Every item, the cycle of its first weight, and the cycle after its last sum has left."""
        return [(item, item.start, self.end(item)) for item in self.items]

    def timing(self, item: Item) -> ItemTiming:
        """What an item's virtual neurons take."""
        return timing_of(item, self.work(item), self.config)


def neurons(item: Item, time: ItemTiming) -> list[Range]:
    """The virtual neurons of an item."""
    return [Range(item.place.start + number * time.size, time.size) for number in range(item.tile.neurons)]


def ordered(items: Iterable[Item]) -> tuple[Item, ...]:
    """Items by start, then place."""
    return tuple(sorted(items, key=lambda item: (item.start, item.place.start)))


def channels_of(work: MultiplierLayer, tile: MultiplierTile, first: int) -> list[int]:
    """The filters of a segment that begins at one."""
    group, filter_ = divmod(first, work.layer.filters)
    return [
        (group + g) * work.layer.filters + filter_ + f
        for g in range(min(tile.groups, work.layer.groups - group))
        for f in range(min(tile.filters, work.layer.filters - filter_))
    ]


@dataclass(frozen=True)
class LayerItems:
    """Items of one layer, laid out."""

    items: tuple[Item, ...]
    ends: tuple[int, ...]
    """The cycle after each one's last sum has left."""
    times: Times
    """When results of the layer exist, by [channel, row]; 0 where these items compute none."""

    @property
    def finish(self) -> int:
        """The cycle after the last sum has left."""
        return max(self.ends)

    @property
    def exists(self) -> int:
        """The cycle from which all their results exist."""
        return int(self.times.max())


def laid_out(items: Sequence[Item], work: MultiplierLayer, config: MaeriConfig, slack: int = 0) -> LayerItems:
    """When items of a layer end and their results exist; `slack` cycles later where others' sums may be in the way."""
    times = np.zeros((work.outputs, work.layer.out_rows), np.int64)
    ends = []
    for item in items:
        time = timing_of(item, work, config)
        columns, cycle, before = grid(work, item.tile)[1], item.start, 0
        late = slack + _margin(time, item, sum(part.count for part in item.segments) * time.later)
        for part in item.segments:
            cycle += time.load_after(before)
            before = part.count
            channels = channels_of(work, item.tile, part.channel)
            last = part.first + part.count - 1
            for row in range(part.first // columns, last // columns + 1):
                upto = min((row + 1) * columns - 1, last) - part.first + 1
                exists = cycle + time.positions(columns, part.first, upto) + time.tail + late
                rows = slice(row * item.tile.out_rows, (row + 1) * item.tile.out_rows)
                for channel in channels:
                    np.maximum(times[channel, rows], exists, out=times[channel, rows])
            cycle += time.positions(columns, part.first, part.count)
        ends.append(cycle + time.tail + late - slack)
    return LayerItems(tuple(items), tuple(ends), work.of_result(times))
