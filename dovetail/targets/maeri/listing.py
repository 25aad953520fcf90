"""The list scheduler: unit after unit, each spread over the multipliers so that they end together.

Where every multiplier has a port of its own, a layer's sums are dealt out to virtual neurons of one size, output
channel after output channel, so that every one works until the same cycle, whenever it could begin. How large they are
is tried out: products of a sum that do not fill the last step, and multipliers that are left over, are what is lost.
Where ports are shared, virtual neurons work in step instead, so that what is sent is shared too: gangs on ports of
their own, one as wide as lets it end first, or several that share out the positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice

import numpy as np

from dovetail.errors import ModelError, TargetError
from dovetail.targets.maeri.tile import MultiplierTile, tile_of
from dovetail.targets.maeri.clashes import asked, shares
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.floor import Floorplan, UnitRoom, start_of
from dovetail.targets.maeri.gangs import in_one_gang, side_by_side
from dovetail.targets.maeri.memory import shortage
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer, OrderNetwork, Times
from dovetail.targets.maeri.order import ChannelSegment, Item, LayerItems, NetworkOrder, busy, laid_out, in_order
from dovetail.targets.maeri.rules import ChannelRange, Rules
from dovetail.targets.maeri.single import MOST_WAYS, alongside, singly
from dovetail.targets.maeri.timing import ItemTiming, timing
from dovetail.targets.maeri.tree import Range, collisions, leaving

_TRIED = 6
"""Sizes of virtual neurons tried per layer, of those that look best."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Room for one virtual neuron, and the cycle from which it is free."""

    place: Range
    free: int


def _chunks(work: MultiplierLayer, unit: ChannelRange) -> list[ChannelSegment]:
    """The sums of a unit, filter after filter."""
    if work.turned:
        return [ChannelSegment(0, unit.first, unit.end - unit.first)]
    return [ChannelSegment(channel, 0, work.positions) for channel in range(unit.first, unit.end)]


def _deal(
    work: MultiplierLayer,
    unit: ChannelRange,
    config: MaeriConfig,
    tile: MultiplierTile,
    lanes: Sequence[Lane],
    room: UnitRoom,
) -> tuple[Item, ...]:
    """Deal a unit's sums out to virtual neurons of a size so that all end together."""
    taps = work.layer.taps
    times = [timing(config, work.layer, tile, taps, lane.place.start) for lane in lanes]
    starts = [start_of(work, time, max(lane.free, room.held), room) for lane, time in zip(lanes, times, strict=True)]
    chunks = _chunks(work, unit)
    if room.whole and not work.turned:
        parts = _whole_filters(work, times, starts, chunks)
    else:
        sums = sum(chunk.count for chunk in chunks)
        guess = max(starts) + times[0].load + times[0].tail + sums * times[0].later // len(lanes)
        dealt = _earliest(lambda each: not _until(times, starts, chunks, each)[1], min(starts), guess)
        parts = _until(times, starts, chunks, dealt)[0]
    return tuple(
        Item(unit.work, tile, Range(lane.place.start, time.size), start, tuple(segments), (0, taps))
        for lane, time, start, segments in zip(lanes, times, starts, parts, strict=True)
        if segments
    )


def _earliest(enough: Callable[[int], bool], least: int, guess: int) -> int:
    """The first cycle from `least` on that is enough, as all behind it are; looked for around a guess."""
    low, high, step = least, guess, max((guess - least) // 32, 1)
    if enough(high):
        while high - step > least and enough(high - step):
            high, step = high - step, 2 * step
        low = max(high - step, least)
    else:
        low, high = guess, guess + step
        while not enough(high):
            low, high, step = high, high + 2 * step, 2 * step
    return bisect_left(range(high), True, low, key=enough)


def _until(
    times: Sequence[ItemTiming], starts: Sequence[int], chunks: Sequence[ChannelSegment], until: int
) -> tuple[list[list[ChannelSegment]], int]:
    """Deal out what can be done until a cycle, chunk after chunk; the shares and how many sums are left."""
    number, done, shares = 0, 0, []
    for start, time in zip(starts, times, strict=True):
        room, share = until - start - time.load - time.tail, list[ChannelSegment]()
        while number < len(chunks) and (count := min(chunks[number].count - done, time.fitting(room))) > 0:
            share.append(ChannelSegment(chunks[number].channel, chunks[number].first + done, count))
            room -= time.apart(count) + time.load_after(count)
            done += count
            if done == chunks[number].count:
                number, done = number + 1, 0
        shares.append(share)
    return shares, sum(chunk.count for chunk in chunks[number:]) - done


def _whole_filters(
    work: MultiplierLayer, times: Sequence[ItemTiming], starts: Sequence[int], chunks: Sequence[ChannelSegment]
) -> list[list[ChannelSegment]]:
    """Give each channel to the virtual neuron that is free first."""
    ends, shares = list(starts), [list[ChannelSegment]() for _ in starts]
    for chunk in chunks:
        lane = min(range(len(ends)), key=lambda each: (ends[each], each))
        ends[lane] += times[lane].load_after(chunk.count if shares[lane] else 0)
        ends[lane] += times[lane].positions(work.layer.out_columns, 0, chunk.count)
        shares[lane].append(chunk)
    return shares


def arrange(
    network: OrderNetwork,
    config: MaeriConfig,
    rules: Rules | None = None,
    sizes: Mapping[int, int] | None = None,
    cautious: bool = False,
) -> NetworkOrder:
    """An order of a network. Where memories are too small for it, one in which layers come one after the other, with
    fewer and fewer virtual neurons.

    Args:
        network: what to compute.
        config: on what.
        rules: the user's own.
        sizes: how large virtual neurons are, by layer number, where that is chosen already.
        cautious: whether each unit waits until all others have long left.

    Raises:
        ModelError: the rules name no layer, or contradict each other.
        TargetError: a layer does not fit, or not as the rules say; or no order fits the memories.
    """
    rules = rules or Rules()
    order = _arranged(network, config, rules, sizes or {}, cautious)
    short, most = shortage(network, config, order.spans), rules.at_most or config.multipliers
    while short is not None and most:
        try:
            order = _arranged(network, config, replace(rules, at_most=most), sizes or {}, True)
        except (ModelError, TargetError):  # not without what the rules want at the same time
            break
        short, most = shortage(network, config, order.spans), most // 2
    if short is not None:
        raise short
    return order


def _arranged(
    network: OrderNetwork, config: MaeriConfig, rules: Rules, sizes: Mapping[int, int], cautious: bool
) -> NetworkOrder:
    """Lay out unit after unit."""
    if len(network.works) == 1 and rules == Rules():
        work = network.works[0]
        alone = _LayerKey((work.layer, work.is_image, work.turned, work.kind), network)
        return replace(_laid_alone(alone, config, sizes.get(0), cautious), network=network)
    return _laid_out(network, config, rules, sizes, cautious)


@dataclass(frozen=True)
class _LayerKey:
    """All that says how a layer is laid out by itself."""

    work: tuple[OrderLayer, bool, bool, str]
    """Its sizes; whether it is an image, whether it is turned; its kind."""
    network: OrderNetwork = field(compare=False)
    """One that has this layer alone."""


@lru_cache(maxsize=4096)
def _laid_alone(alone: _LayerKey, config: MaeriConfig, size: int | None, cautious: bool) -> NetworkOrder:
    return _laid_out(alone.network, config, Rules(), {} if size is None else {0: size}, cautious)


def _laid_out(
    network: OrderNetwork, config: MaeriConfig, rules: Rules, sizes: Mapping[int, int], cautious: bool
) -> NetworkOrder:
    floor = Floorplan(network, config, asked(rules, network, config))
    waiting = set(floor.asked.units)
    while waiting:
        group = _next(floor, waiting)
        if len(group) == 1:
            room = floor.room(group[0])
            if cautious:
                latest = int(floor.free.max())
                room = replace(room, ready=max(room.ready, latest + latest // 16 + 16))
                room = replace(room, held=max(room.held, room.ready))
            floor.add(group[0], _lay(floor, group[0], room, sizes.get(group[0].work)))
        else:
            _lay_together(floor, group)
        waiting -= set(group)
    for unit, pin, _ in floor.asked.pins:
        if pin.end is not None and floor.done[unit].exists > pin.end:
            what = f"{pin.what} ends in cycle {floor.done[unit].exists:,}; the rules want it by {pin.end:,}"
            raise TargetError(what, where="rules", hint="give it more time, or leave out rules that hold it back")
    items = [item for laid in floor.done.values() for item in laid.items]
    return NetworkOrder(network, config, in_order(items), max(laid.exists for laid in floor.done.values()))


def _next(floor: Floorplan, waiting: set[ChannelRange]) -> tuple[ChannelRange, ...]:
    """What is laid out next: what can begin first; several units where they begin together."""
    blocked = {y for x, y in (*floor.asked.before, *floor.asked.no_later) if x in waiting and x != y}
    groups: list[tuple[ChannelRange, ...]] = [(unit,) for unit in sorted(waiting)]
    for together, _ in floor.asked.together:
        groups = [group for group in groups if not set(group) & set(together)]
        groups += [together] if set(together) & waiting else []
    inside = [
        group
        for group in groups
        if not any(unit in blocked and not _only_inside(floor, unit, group, waiting) for unit in group)
    ]
    return min(inside, key=lambda group: (max(max(floor.ready(unit), floor.held(unit)) for unit in group), group))


def _only_inside(
    floor: Floorplan, unit: ChannelRange, group: tuple[ChannelRange, ...], waiting: set[ChannelRange]
) -> bool:
    """Whether a unit waits only for units that begin with it, and need only be no later."""
    if any(y == unit and x in waiting for x, y in floor.asked.before):
        return False
    return all(x in group for x, y in floor.asked.no_later if y == unit and x in waiting)


def _lay_together(floor: Floorplan, group: tuple[ChannelRange, ...]) -> None:
    """Lay out units that begin in the same cycle: each on its share of the multipliers, or on one virtual neuron."""
    rooms = {unit: floor.room(unit) for unit in group}
    start = max(int(floor.free.max()), *(max(room.ready, room.held) for room in rooms.values()))
    rooms = {unit: replace(room, ready=start, held=start) for unit, room in rooms.items()}
    free, done = floor.free.copy(), dict(floor.done)
    if not _lay_shares(floor, rooms):
        floor.free, floor.done = free, done
        if not alongside(floor, rooms):
            names = ", ".join(dict.fromkeys(floor.network.works[unit.work].name for unit in group))
            hint = "leave one out of the group, or give the group more multipliers"
            raise TargetError(f"{names} cannot begin together", where="rules", hint=hint)


def _lay_shares(floor: Floorplan, rooms: Mapping[ChannelRange, UnitRoom]) -> bool:
    """Lay out units that begin together each on its share of the multipliers; whether that is possible."""
    found = shares({unit: room.region for unit, room in rooms.items()}, floor.config)
    for unit, place in (found or {}).items():
        sharing = max(
            (sum(other.work in works for other in rooms) for works, _, _ in floor.asked.limits if unit.work in works),
            default=1,
        )
        room = replace(rooms[unit], region=place, within=place, most=max(rooms[unit].most // sharing, 1))
        try:
            floor.add(unit, _lay(floor, unit, room, None))
        except TargetError:
            return False
        if min(item.start for item in floor.done[unit].items) != room.held:
            return False
    return found is not None


def _lay(floor: Floorplan, unit: ChannelRange, room: UnitRoom, size: int | None) -> LayerItems:
    """Lay out a unit: what ends first."""
    work, config = floor.network.works[unit.work], floor.config
    ways = _spread(floor, unit, room, size)
    if config.shared_ports:
        alone = replace(room, held=max(room.held, int(floor.free.max())))
        rooms = [room] if room == alone else [room, alone]
        ways = chain(*(way(floor, unit, each) for each in rooms for way in (in_one_gang, side_by_side)))
    best: tuple[int, int, tuple[Item, ...]] | None = None
    for items in ways:
        ends = _ends(floor, items)
        if best is None or max(ends) < best[0]:
            slack = floor.slack(items, ends)
            if slack is not None:
                best = max(ends), slack, items
    if best is None and room.held < floor.free.max():
        return _lay(floor, unit, replace(room, held=int(floor.free.max())), size)
    for item in islice(singly(floor, unit, room), MOST_WAYS) if best is None else ():
        ended = laid_out((item,), work, config).ends
        slack = floor.slack((item,), ended)
        if slack is not None and (best is None or max(ended) < best[0]):
            best = max(ended), slack, (item,)
    if best is None:
        what = f"a sum of {work.layer.taps} products does not fit {room.region.size} multipliers"
        hint = "allow folding, take more multipliers, or let filters be divided"
        raise TargetError(what, where=work.name, hint=hint)
    return laid_out(best[2], work, config, best[1])


def _ends(floor: Floorplan, items: Sequence[Item]) -> list[int]:
    """The cycle after each item's last sum has left, if nothing is in the way."""
    return [item.start + busy(item, floor.network, floor.config) for item in items]


def _spread(floor: Floorplan, unit: ChannelRange, room: UnitRoom, size: int | None) -> Iterable[tuple[Item, ...]]:
    """Ways to deal a unit out to virtual neurons that have ports of their own, closer ones first."""
    work = floor.network.works[unit.work]
    spacing, found = 1, False
    while not found and spacing <= 2 * room.region.size:  # further apart where the bus cannot take more sums
        for candidate in [size] if size else tried_sizes(work, floor.config, room.whole, spacing, room.region.size):
            tile = tile_of(work.layer, candidate)
            least = max(_width(work, floor.config, tile), 2)
            width = max(min(least * spacing, room.region.size), least)
            for lanes in _lanes(floor, unit, width, room):
                items = _deal(work, unit, floor.config, tile, lanes, room)
                found = found or floor.slack(items, _ends(floor, items)) is not None
                yield items
        spacing *= 2


def _width(work: MultiplierLayer, config: MaeriConfig, tile: MultiplierTile) -> int:
    """Multipliers of a virtual neuron, with the one that carries sums back where there is one."""
    return timing(config, work.layer, tile, work.layer.taps).size


def _lanes(floor: Floorplan, unit: ChannelRange, width: int, room: UnitRoom) -> list[list[Lane]]:
    """Room for virtual neurons, each from when its multipliers are free: side by side from the left, and where it is
    free first."""
    work, base = floor.network.works[unit.work], room.region.start
    count = min(room.region.size // width, room.most)
    sums = unit.end - unit.first if room.whole or work.turned else (unit.end - unit.first) * work.positions
    if not count:
        return []
    free = np.maximum(floor.free[base : room.region.end], room.held)
    places = [Range(number * width, width) for number in range(count)]
    ways = [[Lane(Range(base + place.start, width), int(free[place.start : place.end].max())) for place in places]]
    if sums < count:
        ways.append(
            [replace(lane, place=Range(base + lane.place.start, width)) for lane in _first_free(free, width, sums)]
        )
    return ways


def _first_free(free: Times, width: int, count: int) -> list[Lane]:
    """Places of a width, those that are free first."""
    lanes: list[Lane] = []
    until = free.astype(np.int64)
    for _ in range(count):
        starts = np.lib.stride_tricks.sliding_window_view(until, width).max(axis=1)
        place = int(starts.argmin())
        if starts[place] > free.max():  # what is left are pieces
            break
        lanes.append(Lane(Range(place, width), int(starts[place])))
        until[place : place + width] = int(free.max()) + 1
    return lanes


def tried_sizes(
    work: MultiplierLayer, config: MaeriConfig, whole: bool, spacing: int = 1, multipliers: int | None = None
) -> list[int]:
    """Sizes of virtual neurons worth trying for a layer, the best guess first.

    Each takes `spacing` times its own multipliers, so that fewer sums meet on the collection bus. Without an
    accumulation buffer one more multiplier carries sums back.
    """
    taps, room = work.layer.taps, multipliers or config.multipliers
    carried = 0 if config.accumulation_buffer else 1
    if taps > room and (not config.fold or room - carried < 1):
        return []
    least = 1 if taps <= room else -(-taps // (room - carried))
    most = min(taps, config.weight_depth) if config.fold and not (whole and taps <= room) else 1
    if whole:
        most = min(most, least)
    if least > config.weight_depth:
        return []
    sizes = dict.fromkeys(max(-(-taps // folds), min(taps, 2)) for folds in range(least, most + 1))
    fitting = [size for size in sizes if _drains(config, size, max(size, 2) * spacing, -(-taps // size), room)]
    guessed = sorted((_guess(work, config, size), size) for size in fitting)
    return [size for _, size in guessed[:_TRIED]]


def _guess(work: MultiplierLayer, config: MaeriConfig, size: int) -> int:
    """Cycles of a layer, all virtual neurons beginning together."""
    folds = -(-work.layer.taps // size)
    carried = folds > 1 and not config.accumulation_buffer
    lanes = max(config.multipliers // max(size + carried, 2), 1)
    sums = -(-work.outputs * work.positions // lanes)
    links = leaving(config.multipliers, Range(0, min(max(size + carried, 2), config.multipliers))).most
    step = folds if not carried else (folds - 1) * (links + 2) + 1
    drained = 0 if config.prefetch else links + 3
    return step * sums + -(-sums // work.positions) * (folds + drained)


def _drains(config: MaeriConfig, size: int, width: int, folds: int, room: int) -> bool:
    """Whether the collection bus takes all sums of virtual neurons, one every `width` multipliers, as they come."""
    places = [Range(number * width, size) for number in range(max(room // width, 1))]
    outputs = [leaving(config.multipliers, place).switch for place in places]
    return collisions(config.multipliers, config.collection, outputs) <= folds
