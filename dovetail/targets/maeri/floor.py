"""A floor plan: units laid out one after the other, and ways to lay out the next in gangs or by single virtual neurons.

A gang is virtual neurons in step on ports of their own, which several multipliers share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product, repeat
from math import gcd

import numpy as np

from dovetail.errors import TargetError
from dovetail.records import Record
from dovetail.targets.maeri.bound import along, fastest
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.machine import NeuronClock, clock, clock_of
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer, OrderNetwork, Times, exists_from
from dovetail.targets.maeri.order import LayerItems, laid_out
from dovetail.targets.maeri.rules import ChannelRange, UnitRules, allowed, channels_read, region
from dovetail.targets.maeri.tile import ChannelSegment, Item, MultiplierTile, grid, tile_of
from dovetail.targets.maeri.tree import Range, configure

MOST_WAYS = 3000
"""Places of a single virtual neuron that are tried for a unit."""
_STEPS = 20_000
"""Choices that are looked at for several units that begin together."""
Lane = tuple[Item, NeuronClock]
"""An item without sums, and its times."""


class UnitRoom(Record):
    """Place and time that a unit may use."""

    ready: int
    """The cycle from which all its inputs exist."""
    earliest: int
    """The cycle from which its first weight may be sent."""
    region: Range
    """The multipliers it may use, as whole ports."""
    within: Range
    """All multipliers it may use; perhaps only a part of the last port."""
    most: int
    """Virtual neurons at the same time."""
    whole: bool
    """Whether an output channel stays on one of them."""


class Floorplan:
    """The units that are laid out so far."""

    def __init__(self, network: OrderNetwork, config: MaeriConfig, rules: UnitRules) -> None:
        self.network, self.config, self.rules = network, config, rules
        self.free = np.zeros(config.multipliers, np.int64)
        """The cycle from which each multiplier is free."""
        self.done: dict[ChannelRange, LayerItems] = {}
        self._ready: dict[ChannelRange, int] = {}

    @property
    def placed(self) -> list[tuple[Item, int]]:
        """The items of all units that are laid out, with their ends."""
        return [pair for laid in self.done.values() for pair in zip(laid.items, laid.ends, strict=True)]

    def ready(self, unit: ChannelRange) -> int:
        """The cycle from which all inputs of a unit exist, once all that it is computed from is laid out."""
        if unit not in self._ready:
            work, results = self.network.works[unit.work], dict[str, Times]()
            for other, laid in self.done.items():
                name = self.network.works[other.work].node.output
                results[name] = np.maximum(results[name], laid.times) if name in results else laid.times
            times = exists_from(self.network.graph, work.node.inputs[0], results)
            self._ready[unit] = int(times[channels_read(work, unit)].max(initial=0))
        return self._ready[unit]

    def earliest(self, unit: ChannelRange) -> int:
        """The cycle from which no rule keeps a unit from beginning."""
        earliest = max((pin.begin for other, pin in self.rules.pins if other == unit), default=0)
        for other, laid in self.done.items():
            if (other, unit) in self.rules.before:
                earliest = max(earliest, laid.exists)
            if (other, unit) in self.rules.no_later:
                earliest = max(earliest, laid.start)
            is_limited = any({other, unit} <= units for units, _ in self.rules.limits)
            if (other, unit) in self.rules.apart or is_limited:
                earliest = max(earliest, laid.finish)
        return earliest

    def room(self, unit: ChannelRange) -> UnitRoom:
        """Place and time that a unit may use."""
        most = self.rules.limit(unit) or self.config.multipliers
        ports, within = region(self.rules, unit, self.config), allowed(self.rules, unit, self.config)
        return UnitRoom(self.ready(unit), self.earliest(unit), ports, within, most, unit.work in self.rules.whole)

    def clock(self, item: Item) -> NeuronClock:
        """Times of an item's virtual neurons."""
        return clock_of(self.config, self.network.works[item.work].layer, item)

    def time(self, unit: ChannelRange, tile: MultiplierTile, at: int = 0) -> NeuronClock:
        """Times of a unit's virtual neurons from multiplier `at` on."""
        low, high = self.taps(unit)
        return clock(self.config, self.network.works[unit.work].layer, tile, high - low, at)

    def taps(self, unit: ChannelRange) -> tuple[int, int]:
        """The products of each sum of a unit."""
        return unit.taps or (0, self.network.works[unit.work].layer.taps)

    def start(self, unit: ChannelRange, room: UnitRoom, time: NeuronClock, place: Range) -> int:
        """The cycle in which a unit can begin at a place; the vector of a turned layer is its weights."""
        free = max(int(self.free[self._taken(place)].max()), room.earliest)
        return max(free, room.ready - (0 if self.network.works[unit.work].turned else time.lead))

    def item(
        self, unit: ChannelRange, room: UnitRoom, tile: MultiplierTile, at: int, segments: Sequence[ChannelSegment]
    ) -> Item:
        """An item of a unit from multiplier `at` on that begins as soon as it can."""
        time = self.time(unit, tile, at)
        place = Range(at, time.size * tile.neurons)
        return Item(unit.work, self.start(unit, room, time, place), place, tile, self.taps(unit), tuple(segments))

    def _taken(self, place: Range) -> slice:
        """The multipliers that nothing else can use: those of a place, or of its whole ports where these are shared."""
        width = self.config.feed_width if self.config.shared_ports else 1
        return slice(place.start // width * width, -(-place.end // width) * width)

    def end(self, item: Item) -> int:
        """The cycle after an item's last sum has left, if nothing is in the way."""
        return item.start + self.clock(item).end(item.segments)

    def fits(self, items: Sequence[Item]) -> bool:
        """Whether lines take the sums of items, none of units that are laid out has to wait for them, and the tree can
        be set up."""
        first, users = min(item.start for item in items), dict[int, list[tuple[int, int, float, bool]]]()
        own = [(item, self.end(item), True) for item in items]
        for item, end, is_own in (*own, *((item, end, False) for item, end in self.placed if end > first)):
            own_clock = self.clock(item)
            for line, sums in Counter(own_clock.group.lines).items():
                users.setdefault(line, []).append((item.start, end, sums / own_clock.later, is_own))
        for each in users.values():
            for start, end, _, is_own in each if len(each) > 1 else ():
                meeting = [other for other in each if other[0] < end and other[1] > start]
                crowded = sum(rate for _, _, rate, _ in meeting) > 1.0 + 1e-9
                if crowded or any(other[3] != is_own for other in meeting):
                    return False
        return self._fits_tree(items)

    def _fits_tree(self, items: Sequence[Item]) -> bool:
        """Whether the tree can be set up for items, and for them beside each item that is laid out."""
        first, last = min(item.start for item in items), max(map(self.end, items))
        own = [place for item in items for place in self.clock(item).group.places]
        try:
            configure(self.config.multipliers, own)
            for item, end in self.placed:
                if item.start < last and end > first:
                    others = self.clock(item).group.places
                    beside = [p for p in own if all(p.end <= o.start or o.end <= p.start for o in others)]
                    configure(self.config.multipliers, [*beside, *others])
        except TargetError:
            return False
        return True

    def add(self, unit: ChannelRange, items: Sequence[Item]) -> None:
        """Lay out a unit."""
        laid = self.done[unit] = laid_out(items, self.network.works, self.config)
        for item, finish in zip(laid.items, laid.ends, strict=True):
            free = self.free[self._taken(item.place)]
            np.maximum(free, finish, out=free)


def single_neurons(floor: Floorplan, unit: ChannelRange, room: UnitRoom, sizes: int | None = None) -> Iterator[Item]:
    """Ways to compute a unit by one virtual neuron, of all sizes or so many, large ones and early ones first."""
    work, config, within = floor.network.works[unit.work], floor.config, room.within
    step, (low, high) = config.port_width if config.ports else 1, floor.taps(unit)
    segments = segments_of(work, unit, MultiplierTile())
    for size in range(min(high - low, within.size), 0, -1):
        tile = tile_of(work.layer, size)
        try:
            width = floor.time(unit, tile).size
        except TargetError:  # more steps than a multiplier holds weights, or folding is off
            continue
        items = [
            floor.item(unit, room, tile, at, segments)
            for at in range(-(-within.start // step) * step, within.end - width + 1, step)
        ]
        yield from sorted(items, key=lambda item: item.start)
        sizes = sizes - bool(items) if sizes is not None else None
        if sizes == 0:
            return


def lay_alongside(floor: Floorplan, rooms: Mapping[ChannelRange, UnitRoom]) -> bool:
    """Lay out units that begin in the same cycle, each on one virtual neuron; whether there is a way."""
    width = floor.config.port_width if floor.config.ports else 1
    choices = [
        [item for item in islice(single_neurons(floor, unit, room), MOST_WAYS) if item.start == room.earliest]
        for unit, room in rooms.items()
    ]
    for items in islice(_disjoint(choices, width, repeat(None, _STEPS)), MOST_WAYS // 10):
        if floor.fits(items):
            for unit, item in zip(rooms, items, strict=True):
                floor.add(unit, (item,))
            return True
    return False


def _disjoint(
    choices: Sequence[Sequence[Item]], width: int, steps: Iterator[None], taken: frozenset[int] = frozenset()
) -> Iterator[tuple[Item, ...]]:
    """One item of each choice, on ports of their own, as long as there are `steps` left."""
    if not choices:
        yield ()
        return
    for item, _ in zip(choices[0], steps, strict=False):
        ports = frozenset(range(item.place.start // width, -(-item.place.end // width)))
        if not ports & taken:
            yield from ((item, *others) for others in _disjoint(choices[1:], width, steps, taken | ports))


def gangs(floor: Floorplan, unit: ChannelRange, room: UnitRoom) -> Iterable[tuple[Item, ...]]:
    """Ways to compute a unit by virtual neurons in step: one gang where it is free first, or as many on ports of their
    own as there is room for, the last one perhaps narrower."""
    work, config, start = floor.network.works[unit.work], floor.config, room.region.start
    whole, part, divide = room.whole and not work.turned, _as_layer(work, unit), _divisor(work, unit)
    width, unit_width = config.feed_width, config.port_width if config.ports else 1
    sizes = (room.region.size // count // unit_width * unit_width for count in range(1, room.region.size + 1))
    for size in filter(None, dict.fromkeys(sizes)):
        best = fastest(part, config, room.most, size, whole, divide)
        if best is None:
            continue
        tile, _ = best
        taken = -(-floor.time(unit, tile).size * tile.neurons // width)
        free = floor.free.max(keepdims=True)
        if config.ports:
            free = floor.free[start : room.region.end].reshape(-1, width).max(axis=1)
        windows = np.lib.stride_tricks.sliding_window_view(free, taken).max(axis=1)
        for at in dict.fromkeys((int(windows.argmin()), 0)):
            yield deal(floor, unit, room, [(tile, start + at * width)])
        count = min(len(free) // taken, room.most // tile.neurons)
        lanes = [(tile, start + number * taken * width) for number in range(count)]
        if count > 1:
            yield deal(floor, unit, room, lanes)
        neurons, left = room.most - count * tile.neurons, (len(free) - count * taken) * width
        for alone in (False, True) if neurons > 0 and left and not whole else ():
            found = fastest(part, config, neurons, left, alone, along(tile, part))
            if found and _divides(found[0], tile):
                yield deal(floor, unit, room, [*lanes, (found[0], start + count * taken * width)])


def _divides(tile: MultiplierTile, other: MultiplierTile) -> bool:
    """Whether a tile has the positions of another one, and a part of its filters and groups."""
    same = (tile.out_rows, tile.out_columns) == (other.out_rows, other.out_columns)
    return same and not other.filters % tile.filters and not other.groups % tile.groups


def deal(
    floor: Floorplan, unit: ChannelRange, room: UnitRoom, tiles: Sequence[tuple[MultiplierTile, int]]
) -> tuple[Item, ...]:
    """Deal a unit's sums out to gangs (tile, first multiplier), equal but for a narrower last one, so that all end
    together."""
    work, items = floor.network.works[unit.work], [floor.item(unit, room, tile, at, ()) for tile, at in tiles]
    chunks, lanes = segments_of(work, unit, tiles[0][0]), [(item, floor.clock(item)) for item in items]
    parts: Sequence[Sequence[ChannelSegment]] = [chunks]
    if room.whole and not work.turned:
        parts = _whole_filters(lanes, chunks)
    elif len(lanes) > 1:
        starts, time = [item.start for item in items], lanes[0][1]
        guess = max(starts) + time.first.last + sum(chunk.count for chunk in chunks) * time.later // len(lanes)
        until = _first_enough(lambda each: not _dealt_until(work, lanes, chunks, each)[1], min(starts), guess)
        parts = _dealt_until(work, lanes, chunks, until)[0]
    return tuple(replace(item, segments=tuple(part)) for item, part in zip(items, parts, strict=True) if part)


def _channels(work: MultiplierLayer, tile: MultiplierTile, chunk: ChannelSegment, wide: MultiplierTile) -> list[int]:
    """The first channels of a tile's segments for a segment of one that has perhaps more filters or groups."""
    filters = work.layer.filters
    return [
        chunk.channel + group * filters + filter_
        for group, filter_ in product(range(0, wide.groups, tile.groups), range(0, wide.filters, tile.filters))
        if chunk.channel % filters + filter_ < filters and chunk.channel + group * filters < work.outputs
    ]


def _positions(time: NeuronClock, column: int, count: int, segments: int, cycles: int) -> int:
    """Positions from a column on, of at most so many, that so many segments can have in some cycles."""
    if segments == 1:
        return int(np.searchsorted(time.plays.stretch(column, count).exists, cycles, side="right"))

    def end(positions: int) -> int:
        own = time.plays.stretch(column, positions)
        return (segments - 1) * time.after(own) + own.last

    return bisect_right(range(1, count + 1), cycles, key=end)


def _first_enough(enough: Callable[[int], bool], least: int, guess: int) -> int:
    """The first cycle from `least` on that is enough, as all later cycles are."""
    step = max((guess - least) // 32, 1)
    while not enough(guess):
        least, guess, step = guess, guess + step, 2 * step
    return bisect_left(range(guess), True, least, key=enough)


def _dealt_until(
    work: MultiplierLayer, lanes: Sequence[Lane], chunks: Sequence[ChannelSegment], until: int
) -> tuple[list[list[ChannelSegment]], int]:
    """Deal out the sums that fit until a cycle, chunk after chunk; the shares and the number of sums that are left."""
    number, done, shares = 0, 0, []
    for lane, time in lanes:
        cycle, share = lane.start, list[ChannelSegment]()
        while number < len(chunks):
            chunk, column = chunks[number], (chunks[number].first + done) % time.plays.columns
            channels = _channels(work, lane.tile, chunk, lanes[0][0].tile)
            count = _positions(time, column, chunk.count - done, len(channels), until - cycle)
            if not count:
                break
            share += [ChannelSegment(channel, chunk.first + done, count) for channel in channels]
            cycle += len(channels) * time.after(time.plays.stretch(column, count))
            done += count
            if done == chunk.count:
                number, done = number + 1, 0
        shares.append(share)
    return shares, sum(chunk.count for chunk in chunks[number:]) - done


def _whole_filters(lanes: Sequence[Lane], chunks: Sequence[ChannelSegment]) -> list[list[ChannelSegment]]:
    """Give each channel to the virtual neurons that are free first, or hardly later further left: what is free then
    lies side by side."""
    ends, shares = [lane.start for lane, _ in lanes], [list[ChannelSegment]() for _ in lanes]
    for chunk in chunks:
        at = next(each for each, end in enumerate(ends) if end <= min(ends) + lanes[each][1].first.last)
        ends[at] += lanes[at][1].after(lanes[at][1].plays.stretch(0, chunk.count))
        shares[at].append(chunk)
    return shares


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


def segments_of(work: MultiplierLayer, unit: ChannelRange, tile: MultiplierTile) -> tuple[ChannelSegment, ...]:
    """A unit's filters, as many at a time as a tile has."""
    rows, columns = grid(work.layer, tile)
    if work.turned:
        return (ChannelSegment(0, unit.first // tile.out_rows, -(-(unit.end - unit.first) // tile.out_rows)),)
    firsts: Iterable[int] = range(unit.first, unit.end, tile.filters * tile.groups)
    if unit.end - unit.first == work.channels:
        groups, filters = range(0, work.layer.groups, tile.groups), range(0, work.layer.filters, tile.filters)
        firsts = (group * work.layer.filters + filter_ for group in groups for filter_ in filters)
    return tuple(ChannelSegment(first, 0, rows * columns) for first in firsts)
