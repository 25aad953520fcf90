"""The list scheduler: unit after unit, each spread over the multipliers so that they end together.

Where every multiplier has a port of its own, a layer's sums are dealt out to virtual neurons of one size, output
channel after output channel, so that every one works until the same cycle, whenever it could begin. How large they are
is tried out: products of a sum that do not fill the last step, and multipliers that are left over, are what is lost.
Where ports are shared, virtual neurons work in step instead, so that what is sent is shared too: gangs on ports of
their own, one as wide as lets it end first, or several that share out the positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import gcd

import numpy as np

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import Network, OrderLayer, Times, Work, exists_from
from dovetail.targets.maeri.order import Item, Laid, Order, Segment, grid, laid_out, neurons, ordered, timing_of
from dovetail.targets.maeri.rules import Asked, Rules, Unit, asked
from dovetail.targets.maeri.timing import Tile, Timing, by_ports, fastest, shaped, timing
from dovetail.targets.maeri.tree import Range, collisions, configure, leaving, line_of

_TRIED = 6
"""Sizes of virtual neurons tried per layer, of those that look best."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Room for one virtual neuron, and the cycle from which it is free."""

    place: Range
    free: int


@dataclass(frozen=True)
class _Room:
    """Where and when a unit may work."""

    ready: int
    """From when all its inputs exist."""
    held: int
    """From when its first weight may be sent."""
    region: Range
    """The multipliers it may use, whole ports."""
    most: int
    """Virtual neurons at the same time."""
    whole: bool
    """Whether an output channel stays on one of them."""


def _chunks(work: Work, unit: Unit) -> list[Segment]:
    """The sums of a unit, filter after filter."""
    if work.turned:
        return [Segment(0, unit.first, unit.end - unit.first)]
    return [Segment(channel, 0, work.positions) for channel in range(unit.first, unit.end)]


def _deal(
    work: Work, unit: Unit, config: MaeriConfig, tile: Tile, lanes: Sequence[Lane], room: _Room
) -> tuple[Item, ...]:
    """Deal a unit's sums out to virtual neurons of a size so that all end together."""
    taps = work.layer.taps
    times = [timing(config, work.layer, tile, taps, lane.place.start) for lane in lanes]
    starts = [_start(work, time, max(lane.free, room.held), room) for lane, time in zip(lanes, times, strict=True)]
    chunks = _chunks(work, unit)
    if room.whole and not work.turned:
        parts = _whole_filters(work, times, starts, chunks)
    else:
        sums = sum(chunk.count for chunk in chunks)
        latest = max(starts) + sum(times[0].positions(1, 0, sums) + times[0].load_after(1) for _ in range(2))
        latest += len(chunks) * (times[0].load_after(0) + times[0].load_after(1) + times[0].tail)
        dealt = bisect_left(range(latest), 1, min(starts), key=lambda each: not _until(times, starts, chunks, each)[1])
        parts = _until(times, starts, chunks, dealt)[0]
    return tuple(
        Item(unit.work, tile, Range(lane.place.start, time.size), start, tuple(segments), (0, taps))
        for lane, time, start, segments in zip(lanes, times, starts, parts, strict=True)
        if segments
    )


def _start(work: Work, time: Timing, free: int, room: _Room) -> int:
    """When the first weight can be sent; the vector of a turned layer is its weights."""
    return max(free, room.ready - (0 if work.turned else time.lead))


def _until(
    times: Sequence[Timing], starts: Sequence[int], chunks: Sequence[Segment], until: int
) -> tuple[list[list[Segment]], int]:
    """Deal out what can be done until a cycle, chunk after chunk; the shares and how many sums are left."""
    number, done, shares = 0, 0, []
    for start, time in zip(starts, times, strict=True):
        room, share = until - start - time.load - time.tail, list[Segment]()
        while number < len(chunks) and (count := min(chunks[number].count - done, time.fitting(room))) > 0:
            share.append(Segment(chunks[number].channel, chunks[number].first + done, count))
            room -= time.positions(1, 0, count) + time.load_after(count)
            done += count
            if done == chunks[number].count:
                number, done = number + 1, 0
        shares.append(share)
    return shares, sum(chunk.count for chunk in chunks[number:]) - done


def _whole_filters(
    work: Work, times: Sequence[Timing], starts: Sequence[int], chunks: Sequence[Segment]
) -> list[list[Segment]]:
    """Give each channel to the virtual neuron that is free first."""
    ends, shares = list(starts), [list[Segment]() for _ in starts]
    for chunk in chunks:
        lane = min(range(len(ends)), key=lambda each: (ends[each], each))
        ends[lane] += times[lane].load_after(chunk.count if shares[lane] else 0)
        ends[lane] += times[lane].positions(work.layer.out_columns, 0, chunk.count)
        shares[lane].append(chunk)
    return shares


def _grain(config: MaeriConfig) -> int:
    """Multipliers regions are counted in: ports, and pairs, since two virtual neurons of two cannot share an adder."""
    return max(config.port_width, 2) if config.ports or not config.shared_ports else config.multipliers


class _Floor:
    """What is known while units are laid out one after the other."""

    def __init__(self, network: Network, config: MaeriConfig, asked: Asked) -> None:
        self.network, self.config, self.asked = network, config, asked
        self.free = np.zeros(config.multipliers, np.int64)
        self.done: dict[Unit, Laid] = {}
        self.of_work: dict[int, list[Unit]] = {}
        for unit in asked.units:
            self.of_work.setdefault(unit.work, []).append(unit)

    def times(self, work: int) -> Times | None:
        """When a layer's results exist; None where not all of it is laid out."""
        laid = [self.done[unit].times for unit in self.of_work[work] if unit in self.done]
        return np.asarray(np.max(laid, axis=0), np.int64) if len(laid) == len(self.of_work[work]) else None

    def ready(self, unit: Unit) -> int:
        """From when all inputs of a unit exist."""
        works = self.network.works
        known = {works[work].node.output: times for work in self.of_work if (times := self.times(work)) is not None}
        return int(exists_from(self.network.graph, works[unit.work].node.inputs[0], known).max(initial=0))

    def held(self, unit: Unit) -> int:
        """From when no rule keeps a unit from beginning."""
        latest = max((pin.begin for other, pin in self.asked.pins if other == unit), default=0)
        for x, laid in self.done.items():
            if (x, unit) in self.asked.rules_before:
                latest = max(latest, laid.exists)
            if (x, unit) in self.asked.no_later:
                latest = max(latest, min(item.start for item in laid.items))
            limited = any({x.work, unit.work} <= works for works, _, _ in self.asked.limits)
            if (x, unit) in self.asked.apart or limited:
                latest = max(latest, laid.finish)
        return latest

    def region(self, unit: Unit) -> Range:
        """The multipliers a unit may use, as whole ports."""
        low, high, width = 0, self.config.multipliers, _grain(self.config)
        for other, pin in self.asked.pins:
            if other == unit and pin.multipliers:
                low, high = max(low, pin.multipliers[0]), min(high, pin.multipliers[1])
        return Range(-(-low // width) * width, max(high // width * width - -(-low // width) * width, 0))

    def room(self, unit: Unit) -> _Room:
        """Where and when a unit may work."""
        most = self.asked.limit(unit.work) or self.config.multipliers
        whole = unit.work in self.asked.whole
        return _Room(self.ready(unit), self.held(unit), self.region(unit), most, whole)

    def slack(self, items: Sequence[Item], ends: Sequence[int]) -> int | None:
        """Cycles that sums of items may wait for others' on their lines; None where lines get more than they take, or
        where what is laid out already would have to wait."""
        config, first = self.config, min(item.start for item in items)
        users: dict[int, list[tuple[int, int, float, bool, int]]] = {}
        laid = [pair for each in self.done.values() for pair in zip(each.items, each.ends, strict=True)]
        for own, pairs in ((True, zip(items, ends, strict=True)), (False, (pair for pair in laid if pair[1] > first))):
            for item, end in pairs:
                time = timing_of(item, self.network.works[item.work], config)
                lines = [line_of(config.multipliers, config.collection, place) for place in neurons(item, time)]
                for number in set(lines):
                    users.setdefault(number, []).append(
                        (item.start, end, lines.count(number) / time.later, own, lines.count(number))
                    )
        most = 0
        for each in users.values():
            for start, end, _, own, mine in each if len(each) > 1 else ():
                meeting = [one for one in each if one[0] < end and one[1] > start]
                if sum(one[2] for one in meeting) > 1.0 + 1e-9 or any(one[3] != own for one in meeting):
                    return None
                most = max(most, sum(one[4] for one in meeting) - mine)
        return 2 * most if self._fits(items, ends) else None

    def _fits(self, items: Sequence[Item], ends: Sequence[int]) -> bool:
        """Whether the tree can be set up for items, and for them and each of those that are laid out already."""
        first, last = min(item.start for item in items), max(ends)

        def places(item: Item) -> list[Range]:
            return neurons(item, timing_of(item, self.network.works[item.work], self.config))

        own = [place for item in items for place in places(item)]
        try:
            configure(self.config.multipliers, own)
            for laid in self.done.values():
                for item, end in zip(laid.items, laid.ends, strict=True):
                    others = places(item) if item.start < last and end > first else []
                    beside = [each for each in own if all(each.end <= o.start or o.end <= each.start for o in others)]
                    if others:
                        configure(self.config.multipliers, [*beside, *others])
        except TargetError:
            return False
        return True

    def add(self, unit: Unit, laid: Laid) -> None:
        """Take a unit's multipliers, or whole ports where these are shared."""
        width = self.config.port_width if self.config.ports else self.config.multipliers
        for item, finish in zip(laid.items, laid.ends, strict=True):
            first, end = item.place.start, item.place.end
            if self.config.shared_ports:
                first, end = first // width * width, -(-end // width) * width
            np.maximum(self.free[first:end], finish, out=self.free[first:end])
        self.done[unit] = laid


def arrange(
    network: Network,
    config: MaeriConfig,
    rules: Rules | None = None,
    sizes: Mapping[int, int] | None = None,
    cautious: bool = False,
) -> Order:
    """An order of a network.

    Args:
        network: what to compute.
        config: on what.
        rules: the user's own.
        sizes: how large virtual neurons are, by layer number, where that is chosen already.
        cautious: whether each unit waits until all others have long left.

    Raises:
        ModelError: the rules name no layer, or contradict each other.
        TargetError: a layer does not fit, or not as the rules say.
    """
    floor = _Floor(network, config, asked(rules or Rules(), network, config))
    waiting = set(floor.asked.units)
    while waiting:
        group = _next(floor, waiting)
        if len(group) == 1:
            room = floor.room(group[0])
            if cautious:
                latest = int(floor.free.max())
                room = replace(room, ready=max(room.ready, latest + latest // 16 + 16))
                room = replace(room, held=max(room.held, room.ready))
            floor.add(group[0], _lay(floor, group[0], room, (sizes or {}).get(group[0].work)))
        else:
            _lay_together(floor, group)
        waiting -= set(group)
    for unit, pin in floor.asked.pins:
        if pin.end is not None and floor.done[unit].exists > pin.end:
            what = f"{pin.what} ends in cycle {floor.done[unit].exists:,}; the rules want it by {pin.end:,}"
            raise TargetError(what, where="rules", hint="give it more time, or leave out rules that hold it back")
    items = [item for laid in floor.done.values() for item in laid.items]
    return Order(network, config, ordered(items), max(laid.exists for laid in floor.done.values()))


def _next(floor: _Floor, waiting: set[Unit]) -> tuple[Unit, ...]:
    """What is laid out next: what can begin first; several units where they begin together."""
    blocked = {y for x, y in (*floor.asked.before, *floor.asked.no_later) if x in waiting and x != y}
    groups: list[tuple[Unit, ...]] = [(unit,) for unit in sorted(waiting)]
    for together in _joined(floor.asked):
        groups = [group for group in groups if not set(group) & set(together)]
        groups += [together] if set(together) & waiting else []
    inside = [
        group
        for group in groups
        if not any(unit in blocked and not _only_inside(floor, unit, group, waiting) for unit in group)
    ]
    return min(inside, key=lambda group: (max(max(floor.ready(unit), floor.held(unit)) for unit in group), group))


def _only_inside(floor: _Floor, unit: Unit, group: tuple[Unit, ...], waiting: set[Unit]) -> bool:
    """Whether a unit waits only for units that begin with it, and need only be no later."""
    if any(y == unit and x in waiting for x, y in floor.asked.before):
        return False
    return all(x in group for x, y in floor.asked.no_later if y == unit and x in waiting)


def _joined(asked: Asked) -> list[tuple[Unit, ...]]:
    """Groups that begin together, those that share a unit as one."""
    joined: list[set[Unit]] = []
    for group, _ in asked.together:
        touching = [each for each in joined if each & set(group)]
        joined = [each for each in joined if not each & set(group)] + [set(group).union(*touching)]
    return [tuple(sorted(each)) for each in joined]


def _lay_together(floor: _Floor, group: tuple[Unit, ...]) -> None:
    """Lay out units that begin in the same cycle, each on its share of the multipliers."""
    config, rooms = floor.config, {unit: floor.room(unit) for unit in group}
    start = max(int(floor.free.max()), *(max(room.ready, room.held) for room in rooms.values()))
    for unit, place in _shares(rooms, _grain(config), config.multipliers).items():
        sharing = max(
            (sum(other.work in works for other in group) for works, _, _ in floor.asked.limits if unit.work in works),
            default=1,
        )
        most = max(rooms[unit].most // sharing, 1)
        floor.add(unit, _lay(floor, unit, replace(rooms[unit], ready=start, held=start, region=place, most=most), None))
        begun = min(item.start for item in floor.done[unit].items)
        if begun != start:
            what = f"{floor.network.works[unit.work].name} cannot begin with the others of its group"
            raise TargetError(what, where="rules", hint="leave it out of the group, or give the group more multipliers")


def _shares(rooms: Mapping[Unit, _Room], width: int, multipliers: int) -> dict[Unit, Range]:
    """Multipliers for each of several units at the same time: whole ports of those each may use, as even as can be."""
    limits = {unit: (room.region.start // width, room.region.end // width) for unit, room in rooms.items()}
    for share in range(multipliers // width // len(rooms), 0, -1):
        taken, at = dict[Unit, Range](), 0
        waiting = sorted(limits, key=lambda unit: (limits[unit][1], limits[unit][0], unit))
        for unit in waiting:
            low = max(at, limits[unit][0])
            if (low + share) > limits[unit][1]:
                break
            taken[unit] = Range(low * width, share * width)
            at = low + share
        if len(taken) == len(rooms) and (share * width > 1 or multipliers == 1):
            return taken
    names = "the multipliers they are pinned to do not hold all that begin together"
    raise TargetError(names, where="rules", hint="pin them elsewhere, or leave out one of them")


def _lay(floor: _Floor, unit: Unit, room: _Room, size: int | None) -> Laid:
    """Lay out a unit: what ends first."""
    work, config = floor.network.works[unit.work], floor.config
    ways = _spread(floor, unit, room, size)
    if config.shared_ports:
        alone = replace(room, held=max(room.held, int(floor.free.max())))
        rooms = [room] if room == alone else [room, alone]
        ways = chain(*(way(floor, unit, each) for each in rooms for way in (_gangs, _side_by_side)))
    best: tuple[int, int, tuple[Item, ...]] | None = None
    for items in ways:
        ends = laid_out(items, work, config).ends
        if best is None or max(ends) < best[0]:
            slack = floor.slack(items, ends)
            if slack is not None:
                best = max(ends), slack, items
    if best is None and room.held < floor.free.max():
        return _lay(floor, unit, replace(room, held=int(floor.free.max())), size)
    if best is None:
        what = f"a sum of {work.layer.taps} products does not fit {room.region.size} multipliers"
        hint = "allow folding, take more multipliers, or let filters be divided"
        raise TargetError(what, where=work.name, hint=hint)
    return laid_out(best[2], work, config, best[1])


def _spread(floor: _Floor, unit: Unit, room: _Room, size: int | None) -> Iterable[tuple[Item, ...]]:
    """Ways to deal a unit out to virtual neurons that have ports of their own, closer ones first."""
    work = floor.network.works[unit.work]
    spacing, found = 1, False
    while not found and spacing <= 2 * room.region.size:  # further apart where the bus cannot take more sums
        for candidate in [size] if size else tried_sizes(work, floor.config, room.whole, spacing, room.region.size):
            tile = shaped(work.layer, candidate)
            least = max(_width(work, floor.config, tile), 2)
            width = max(min(least * spacing, room.region.size), least)
            for lanes in _lanes(floor, unit, width, room):
                items = _deal(work, unit, floor.config, tile, lanes, room)
                found |= floor.slack(items, laid_out(items, work, floor.config).ends) is not None
                yield items
        spacing *= 2


def _width(work: Work, config: MaeriConfig, tile: Tile) -> int:
    """Multipliers of a virtual neuron, with the one that carries sums back where there is one."""
    return timing(config, work.layer, tile, work.layer.taps).size


def _lanes(floor: _Floor, unit: Unit, width: int, room: _Room) -> list[list[Lane]]:
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
    work: Work, config: MaeriConfig, whole: bool, spacing: int = 1, multipliers: int | None = None
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


def _guess(work: Work, config: MaeriConfig, size: int) -> int:
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


def _gangs(floor: _Floor, unit: Unit, room: _Room) -> Iterable[tuple[Item, ...]]:
    """Ways to compute a unit by virtual neurons in step on whole ports, of several widths."""
    work, config = floor.network.works[unit.work], floor.config
    width, most = config.port_width if config.ports else config.multipliers, min(room.most, room.region.size)
    seen = set[Tile]()
    while most:
        found = fastest(
            _part(work, unit), config, most, room.region.size, room.whole and not work.turned, _steps(work, unit)
        )
        if found is None:
            return
        tile, _ = found
        most = min(tile.neurons, most) // 2
        if tile in seen:
            continue
        seen.add(tile)
        time = timing(config, work.layer, tile, work.layer.taps)
        ports = -(-time.size * tile.neurons // width)
        free = (
            floor.free[room.region.start : room.region.end].reshape(-1, width).max(axis=1)
            if config.ports
            else floor.free.max(keepdims=True)
        )
        windows = np.lib.stride_tricks.sliding_window_view(free, min(ports, len(free))).max(axis=1)
        for at in dict.fromkeys((int(windows.argmin()), 0)):
            place = Range(room.region.start + at * width, time.size * tile.neurons)
            begins = timing(config, work.layer, tile, work.layer.taps, place.start)
            start = _start(work, begins, max(int(windows[at]), room.held), room)
            yield (Item(unit.work, tile, place, start, _segments(work, unit, tile), (0, work.layer.taps)),)


def _side_by_side(floor: _Floor, unit: Unit, room: _Room) -> Iterable[tuple[Item, ...]]:
    """Ways to compute a unit by several gangs, each some of its positions, so that they end together."""
    work, config = floor.network.works[unit.work], floor.config
    if room.whole or room.most < config.multipliers or not config.ports or unit.end - unit.first < work.channels:
        return
    width, ports = config.port_width, room.region.size // config.port_width
    for used, single in product((ports, ports // 2), (False, True)):
        tiles, at, gangs = by_ports(work.layer, config, single)[used], room.region.start, list[Item]()
        for tile in sorted(tiles, key=lambda tile: -tile.neurons * tile.size):
            time = timing(config, work.layer, tile, work.layer.taps, at)
            end = at + -(-time.size * tile.neurons // width) * width
            start = _start(work, time, max(int(floor.free[at:end].max()), room.held), room)
            place = Range(at, time.size * tile.neurons)
            gangs.append(Item(unit.work, tile, place, start, _segments(work, unit, tile), (0, work.layer.taps)))
            at = end
        if len(gangs) > 1 and len({(gang.tile.out_rows, gang.tile.out_columns) for gang in gangs}) == 1:
            yield _dealt(work, config, gangs, False)
            yield _dealt(work, config, gangs, True)


def _dealt(work: Work, config: MaeriConfig, gangs: Sequence[Item], by_filters: bool) -> tuple[Item, ...]:
    """Share a layer out to gangs of which each could compute all of it: positions to those of different tiles, then,
    `by_filters`, one filter after the other to those of the same."""
    rows, columns = grid(work, gangs[0].tile)
    count = rows * columns
    alike: dict[tuple[Tile, int], list[Item]] = {}
    for number, gang in enumerate(gangs):
        alike.setdefault((gang.tile, 0 if by_filters else number), []).append(gang)
    groups = [(group, timing_of(group[0], work, config)) for group in alike.values()]

    def until(group: Sequence[Item], time: Timing, positions: int) -> int:
        """When gangs of a tile have done so many positions of all filters."""
        each = -(-positions * len(group[0].segments) // len(group))
        loads, left = divmod(each, positions)
        cycles = loads * time.positions(columns, columns - 1, positions) + time.positions(columns, columns - 1, left)
        return max(gang.start for gang in group) + (loads + (left > 0)) * time.load_after(1) + cycles + 2 * time.tail

    def fitting(group: Sequence[Item], time: Timing, limit: int) -> int:
        """Positions gangs of a tile do until a cycle."""
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
            parts.append(Segment(segments[which].channel, first + done, size))
            low += size
        if parts:
            yield replace(gang, segments=tuple(parts))


def _part(work: Work, unit: Unit) -> OrderLayer:
    """A unit as a layer of its own."""
    layer, count = work.layer, unit.end - unit.first
    if count == work.channels:
        return layer
    if work.turned:
        return replace(layer, in_rows=count)
    if layer.groups == 1:
        return replace(layer, filters=count)
    return replace(layer, groups=count, filters=1) if layer.filters == 1 else replace(layer, groups=1, filters=1)


def _steps(work: Work, unit: Unit) -> int:
    """What sizes of tiles along the channels must divide, so that they end where the unit does; 0 for any."""
    return (
        0
        if unit.end - unit.first == work.channels
        else gcd(unit.first, unit.end)
        if work.turned
        else unit.end - unit.first
    )


def _segments(work: Work, unit: Unit, tile: Tile) -> tuple[Segment, ...]:
    """A unit's filters, as many at a time as a tile has."""
    rows, columns = grid(work, tile)
    if work.turned:
        return (Segment(0, unit.first // tile.out_rows, -(-(unit.end - unit.first) // tile.out_rows)),)
    whole = unit.end - unit.first == work.channels
    if whole:
        groups, filters = range(0, work.layer.groups, tile.groups), range(0, work.layer.filters, tile.filters)
        firsts = [group * work.layer.filters + filter_ for group in groups for filter_ in filters]
    else:
        firsts = list(range(unit.first, unit.end, tile.filters * tile.groups))
    return tuple(Segment(first, 0, rows * columns) for first in firsts)
