"""Items: equal virtual neurons that compute some sums of a layer, as records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.targets.maeri.network import MultiplierLayer
from dovetail.targets.maeri.tile import MultiplierTile
from dovetail.targets.maeri.tree import Range
from dovetail.targets.maeri.words import Count, Natural

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChannelSegment:
    """Some sums of one output channel, or of neighbouring ones where a tile has several filters."""

    channel: Natural
    """The (first) output channel."""
    first: Natural
    """The first position of the result, rows first; counted in tiles of positions."""
    count: Count
    """Number of positions."""


@dataclass(frozen=True, slots=True)
class Item:
    """Equal virtual neurons side by side that work in step, from their first weight until their last sum has left."""

    work: Natural
    """Number of the layer, in the network's order."""
    start: Natural
    """The cycle in which its first weight is sent."""
    place: Range
    """All its multipliers."""
    tile: MultiplierTile
    """One virtual neuron, or several that share what is sent."""
    taps: tuple[Natural, Natural]
    """The products of each sum it adds up: [first, end) in the order channel, row, column of the kernel. Where that is
    not all of them, other items add the rest in the accumulation buffer."""
    segments: tuple[ChannelSegment, ...]
    """In order; all weights of a segment come before its first input."""

    @property
    def products(self) -> int:
        """Products of each sum."""
        return self.taps[1] - self.taps[0]

    @property
    def channels(self) -> Numbers:
        """The (first) output channel of each position."""
        return np.repeat([part.channel for part in self.segments], [part.count for part in self.segments])

    @property
    def positions(self) -> Numbers:
        """Numbers of the positions, in tiles, rows first."""
        return np.concatenate([np.arange(part.first, part.first + part.count) for part in self.segments])


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
