"""Dealing out a layer: to virtual neurons that work on their own, or to a set of them that works in step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.delivery import Tile
from dovetail.targets.maeri.schedule import Item, Segment, grid
from dovetail.targets.maeri.timing import Timing, timing
from dovetail.targets.maeri.tree import Range
from dovetail.targets.maeri.uniform import best_tile
from dovetail.targets.maeri.work import Times, Work


@dataclass(frozen=True, slots=True)
class Lane:
    """Room for one virtual neuron, and the cycle from which it is free."""

    place: Range
    free: int


@dataclass(frozen=True)
class Laid:
    """A layer laid out."""

    items: tuple[Item, ...]
    ends: tuple[int, ...]
    """The cycle after the last product of each."""
    times: Times
    """When its results exist, by [channel, row]."""

    @property
    def finish(self) -> int:
        """The cycle after the last product."""
        return max(self.ends)

    @property
    def exists(self) -> int:
        """The cycle from which all results exist."""
        return int(self.times.max())


def deal(
    number: int, work: Work, config: MaeriConfig, size: int, lanes: Sequence[Lane], ready: int, whole: bool
) -> tuple[Item, ...]:
    """Deal a layer's sums out so that all virtual neurons end together.

    Args:
        number: of the layer.
        work: the layer.
        config: of the engine.
        size: products of a virtual neuron.
        lanes: where they may work.
        ready: from when all inputs exist; weights may come before.
        whole: whether each output channel stays on one virtual neuron.
    """
    tile = Tile(channels=size)
    time = timing(config, work.layer, tile, work.layer.taps)
    starts = [max(lane.free, ready - time.load) for lane in lanes]
    if whole:
        parts = _whole_filters(work, time, starts)
    else:
        low, high = min(starts), max(starts) + time.later * work.outputs * work.positions + time.load * work.outputs
        while low < high:  # the first cycle by which all is done
            middle = (low + high) // 2
            if _deal_until(work, time, starts, middle)[1]:
                low = middle + 1
            else:
                high = middle
        parts = _deal_until(work, time, starts, low)[0]
    return tuple(
        Item(number, tile, lane.place, start, tuple(segments), (0, work.layer.taps))
        for lane, start, segments in zip(lanes, starts, parts, strict=True)
        if segments
    )


def _deal_until(
    work: Work, time: Timing, starts: Sequence[int], until: int
) -> tuple[list[list[Segment]], int]:
    """Deal out what can be done until a cycle, channel after channel; the shares and how many sums are left."""
    channel, first, shares = 0, 0, []
    for start in starts:
        room, share, count = until - start - time.load, list[Segment](), 0
        while channel < work.outputs and room >= time.later:
            count = min(work.positions - first, room // time.later)
            share.append(Segment(channel, first, count))
            room -= count * time.later + time.load_after(count)
            first += count
            if first == work.positions:
                channel, first = channel + 1, 0
        shares.append(share)
    return shares, (work.outputs - channel) * work.positions - first


def _whole_filters(work: Work, time: Timing, starts: Sequence[int]) -> list[list[Segment]]:
    """Give each channel to the virtual neuron that is free first."""
    ends, shares = list(starts), [list[Segment]() for _ in starts]
    for channel in range(work.outputs):
        lane = min(range(len(ends)), key=lambda each: (ends[each], each))
        shares[lane].append(Segment(channel, 0, work.positions))
        ends[lane] += time.load_after(work.positions if shares[lane][1:] else 0)
        ends[lane] += time.positions(work.layer.out_columns, 0, work.positions)
    return shares


def gang(number: int, work: Work, config: MaeriConfig, free: int, ready: int, neurons: int | None) -> Item:
    """The whole engine in step: the tile with the fewest cycles, so that what is sent is shared.

    Args:
        number: of the layer.
        work: the layer.
        config: of the engine.
        free: from when the multipliers are.
        ready: from when all inputs exist.
        neurons: the most virtual neurons side by side; None for as many as fit.
    """
    tile, _ = best_tile(work.layer, config, neurons)
    time = timing(config, work.layer, tile, work.layer.taps)
    rows, columns = grid(work, tile)
    segments = tuple(
        Segment(group * work.layer.filters + filter_, 0, rows * columns)
        for group in range(0, work.layer.groups, tile.groups)
        for filter_ in range(0, work.layer.filters, tile.filters)
    )
    place = Range(0, time.size * tile.neurons)
    return Item(number, tile, place, max(free, ready - time.load), segments, (0, work.layer.taps))


def laid_out(items: tuple[Item, ...], work: Work, config: MaeriConfig) -> Laid:
    """When items of a layer end and their results exist."""
    times = np.zeros((work.outputs, work.layer.out_rows), np.int64)
    ends = []
    for item in items:
        time = timing(config, work.layer, item.tile, item.taps[1] - item.taps[0])
        columns, cycle, before = grid(work, item.tile)[1], item.start, 0
        for part in item.segments:
            cycle += time.load_after(before)
            before = part.count
            channels = channels_of(work, item.tile, part.channel)
            last = part.first + part.count - 1
            for row in range(part.first // columns, last // columns + 1):
                upto = min((row + 1) * columns - 1, last) - part.first + 1
                exists = cycle + time.positions(columns, part.first, upto) + time.tail
                rows = slice(row * item.tile.out_rows, (row + 1) * item.tile.out_rows)
                for channel in channels:
                    np.maximum(times[channel, rows], exists, out=times[channel, rows])
            cycle += time.positions(columns, part.first, part.count)
        ends.append(cycle)
    return Laid(items, tuple(ends), times if work.is_image else times.max(axis=1, keepdims=True))


def channels_of(work: Work, tile: Tile, first: int) -> list[int]:
    """The output channels of a segment that begins at one."""
    group, filter_ = divmod(first, work.layer.filters)
    return [
        (group + g) * work.layer.filters + filter_ + f
        for g in range(min(tile.groups, work.layer.groups - group))
        for f in range(min(tile.filters, work.layer.filters - filter_))
    ]
