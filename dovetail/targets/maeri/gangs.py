"""Gangs: virtual neurons in step, on ports of their own that several multipliers share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd

import numpy as np

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.floor import Floorplan, UnitRoom, start_of
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer
from dovetail.targets.maeri.order import ChannelSegment, Item, timing_of
from dovetail.targets.maeri.rules import ChannelRange
from dovetail.targets.maeri.tile import MultiplierTile, grid
from dovetail.targets.maeri.tiling import by_ports, fastest
from dovetail.targets.maeri.timing import ItemTiming, timing
from dovetail.targets.maeri.tree import Range


def in_one_gang(floor: Floorplan, unit: ChannelRange, room: UnitRoom) -> Iterable[tuple[Item, ...]]:
    """Ways to compute a unit by virtual neurons in step on whole ports, of several widths."""
    work, config = floor.network.works[unit.work], floor.config
    layer, width, most = work.layer, config.feed_width, min(room.most, room.region.size)
    part, divide = _as_layer(work, unit), _divisor(work, unit)
    tiles = set[MultiplierTile]()
    while most:
        best = fastest(part, config, most, room.region.size, room.whole and not work.turned, divide)
        if best is None:
            return
        tile, _ = best
        most = min(tile.neurons, most) // 2
        if tile in tiles:
            continue
        tiles.add(tile)
        size = timing(config, layer, tile, layer.taps).size * tile.neurons
        free = floor.free.max(keepdims=True)
        if config.ports:
            free = floor.free[room.region.start : room.region.end].reshape(-1, width).max(axis=1)
        windows = np.lib.stride_tricks.sliding_window_view(free, min(-(-size // width), len(free))).max(axis=1)
        for at in dict.fromkeys((int(windows.argmin()), 0)):
            place = Range(room.region.start + at * width, size)
            time = timing(config, layer, tile, layer.taps, place.start)
            start = start_of(work, time, max(int(windows[at]), room.earliest), room)
            yield (Item(unit.work, start, place, tile, (0, layer.taps), _segments(work, unit, tile)),)


def side_by_side(floor: Floorplan, unit: ChannelRange, room: UnitRoom) -> Iterable[tuple[Item, ...]]:
    """Ways to compute a unit by several gangs, each some of its positions, so that they end together."""
    work, config = floor.network.works[unit.work], floor.config
    if room.whole or room.most < config.multipliers or not config.ports or unit.end - unit.first < work.channels:
        return
    layer, width, ports = work.layer, config.port_width, room.region.size // config.port_width
    for used, single in product((ports, ports // 2), (False, True)):
        tiles, at, gangs = by_ports(layer, config, single)[used], room.region.start, list[Item]()
        for tile in sorted(tiles, key=lambda tile: -tile.neurons * tile.size):
            time = timing(config, layer, tile, layer.taps, at)
            place = Range(at, time.size * tile.neurons)
            at = -(-place.end // width) * width
            start = start_of(work, time, max(int(floor.free[place.start : at].max()), room.earliest), room)
            gangs.append(Item(unit.work, start, place, tile, (0, layer.taps), _segments(work, unit, tile)))
        if len(gangs) > 1 and len({(gang.tile.out_rows, gang.tile.out_columns) for gang in gangs}) == 1:
            yield _dealt(work, config, gangs, by_filters=False)
            yield _dealt(work, config, gangs, by_filters=True)


def _dealt(work: MultiplierLayer, config: MaeriConfig, gangs: Sequence[Item], by_filters: bool) -> tuple[Item, ...]:
    """Share a layer out to gangs of which each could compute all of it.

    Gangs of different tiles share the positions. So do gangs of one tile; with `by_filters` these share the filters
    first.
    """
    rows, columns = grid(work.layer, gangs[0].tile)
    count = rows * columns
    alike: dict[tuple[MultiplierTile, int], list[Item]] = {}
    for number, gang in enumerate(gangs):
        alike.setdefault((gang.tile, 0 if by_filters else number), []).append(gang)
    groups = [(group, timing_of(group[0], work, config)) for group in alike.values()]

    def until(group: Sequence[Item], time: ItemTiming, positions: int) -> int:
        """The cycle in which gangs of a tile have computed so many positions of all filters."""
        each = -(-positions * len(group[0].segments) // len(group))
        loads, left = divmod(each, positions)
        cycles = loads * time.positions(columns, columns - 1, positions) + time.positions(columns, columns - 1, left)
        return max(gang.start for gang in group) + (loads + (left > 0)) * time.load_after(1) + cycles + 2 * time.tail

    def fitting(group: Sequence[Item], time: ItemTiming, limit: int) -> int:
        """Positions that gangs of a tile compute until a cycle."""
        return bisect_left(range(1, count + 1), limit + 1, key=lambda positions: until(group, time, positions))

    latest = max(until(group, time, count) for group, time in groups)
    limit = bisect_left(range(latest), count, key=lambda at: sum(fitting(*group, at) for group in groups))
    done, items = 0, list[Item]()
    for group, time in groups:
        share = min(fitting(group, time, limit), count - done)
        items += _in_turn(group, done, share) if share else ()
        done += share
    return tuple(items)


def _in_turn(gangs: Sequence[Item], first: int, count: int) -> Iterator[Item]:
    """Deal out positions [first, first + count) of every filter, as many to each of some equal gangs."""
    segments = gangs[0].segments
    total = len(segments) * count
    for number, gang in enumerate(gangs):
        low, high = total * number // len(gangs), total * (number + 1) // len(gangs)
        parts = []
        while low < high:
            which, done = divmod(low, count)
            size = min(count - done, high - low)
            parts.append(ChannelSegment(segments[which].channel, first + done, size))
            low += size
        if parts:
            yield replace(gang, segments=tuple(parts))


def _as_layer(work: MultiplierLayer, unit: ChannelRange) -> OrderLayer:
    """A unit as a layer of its own."""
    layer, count = work.layer, unit.end - unit.first
    if count == work.channels:
        return layer
    if work.turned:
        return replace(layer, in_rows=count)
    if layer.groups == 1:
        return replace(layer, filters=count)
    return replace(layer, groups=count, filters=1) if layer.filters == 1 else replace(layer, groups=1, filters=1)


def _divisor(work: MultiplierLayer, unit: ChannelRange) -> int:
    """A number that sizes of tiles along the channels must divide, so that they end where the unit does; 0 for any."""
    if unit.end - unit.first == work.channels:
        return 0
    return gcd(unit.first, unit.end) if work.turned else unit.end - unit.first


def _segments(work: MultiplierLayer, unit: ChannelRange, tile: MultiplierTile) -> tuple[ChannelSegment, ...]:
    """A unit's filters, as many at a time as a tile has."""
    rows, columns = grid(work.layer, tile)
    if work.turned:
        return (ChannelSegment(0, unit.first // tile.out_rows, -(-(unit.end - unit.first) // tile.out_rows)),)
    firsts: Iterable[int] = range(unit.first, unit.end, tile.filters * tile.groups)
    if unit.end - unit.first == work.channels:
        groups, filters = range(0, work.layer.groups, tile.groups), range(0, work.layer.filters, tile.filters)
        firsts = (group * work.layer.filters + filter_ for group in groups for filter_ in filters)
    return tuple(ChannelSegment(first, 0, rows * columns) for first in firsts)
