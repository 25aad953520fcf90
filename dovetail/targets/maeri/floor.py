"""A floor plan: units laid out one after the other, with the place, the time and the lines that are left for the
next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

import numpy as np

from dovetail.errors import TargetError
from dovetail.targets.maeri.clashes import allowed, region
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork, Times, exists_from
from dovetail.targets.maeri.order import ChannelSegment, Item, LayerItems, laid_out, neurons, timing_of
from dovetail.targets.maeri.rules import ChannelRange, UnitRules
from dovetail.targets.maeri.tile import tile_of
from dovetail.targets.maeri.timing import ItemTiming, timing
from dovetail.targets.maeri.tree import Range, configure, leaving

MOST_WAYS = 3000
"""Places of a single virtual neuron that are tried for a unit."""
_STEPS = 20_000
"""Choices that are looked at for several units that begin together."""


@dataclass(frozen=True)
class UnitRoom:
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


def start_of(work: MultiplierLayer, time: ItemTiming, free: int, room: UnitRoom) -> int:
    """The cycle in which the first weight can be sent; the vector of a turned layer is its weights."""
    return max(free, room.ready - (0 if work.turned else time.lead))


def segments_of(work: MultiplierLayer, unit: ChannelRange) -> list[ChannelSegment]:
    """The sums of a unit, filter after filter."""
    if work.turned:
        return [ChannelSegment(0, unit.first, unit.end - unit.first)]
    return [ChannelSegment(channel, 0, work.positions) for channel in range(unit.first, unit.end)]


class Floorplan:
    """The units that are laid out so far."""

    def __init__(self, network: OrderNetwork, config: MaeriConfig, rules: UnitRules) -> None:
        self.network, self.config, self.rules = network, config, rules
        self.free = np.zeros(config.multipliers, np.int64)
        """The cycle from which each multiplier is free."""
        self.done: dict[ChannelRange, LayerItems] = {}
        self._of_work: dict[int, list[ChannelRange]] = {}
        for unit in rules.units:
            self._of_work.setdefault(unit.work, []).append(unit)

    def times(self, work: int) -> Times | None:
        """Times of a layer's results; None while not all of it is laid out."""
        units = self._of_work[work]
        if any(unit not in self.done for unit in units):
            return None
        return np.asarray(np.max([self.done[unit].times for unit in units], axis=0), np.int64)

    def ready(self, unit: ChannelRange) -> int:
        """The cycle from which all inputs of a unit exist."""
        works = self.network.works
        results = {
            works[number].node.output: times for number in self._of_work if (times := self.times(number)) is not None
        }
        return int(exists_from(self.network.graph, works[unit.work].node.inputs[0], results).max(initial=0))

    def earliest(self, unit: ChannelRange) -> int:
        """The cycle from which no rule keeps a unit from beginning."""
        earliest = max((pin.begin for other, pin, _ in self.rules.pins if other == unit), default=0)
        for other, laid in self.done.items():
            if (other, unit) in self.rules.rules_before:
                earliest = max(earliest, laid.exists)
            if (other, unit) in self.rules.no_later:
                earliest = max(earliest, min(item.start for item in laid.items))
            is_limited = any({other.work, unit.work} <= works for works, _, _ in self.rules.limits)
            if (other, unit) in self.rules.apart or is_limited:
                earliest = max(earliest, laid.finish)
        return earliest

    def room(self, unit: ChannelRange) -> UnitRoom:
        """Place and time that a unit may use."""
        most = self.rules.limit(unit.work) or self.config.multipliers
        ports, within = region(self.rules, unit, self.config), allowed(self.rules, unit, self.config)
        return UnitRoom(self.ready(unit), self.earliest(unit), ports, within, most, unit.work in self.rules.whole)

    def neurons(self, item: Item) -> list[Range]:
        """The places of an item's virtual neurons."""
        return neurons(item, self.timing(item))

    def timing(self, item: Item) -> ItemTiming:
        """Times of an item's virtual neurons."""
        return timing_of(item, self.network.works[item.work], self.config)

    def slack(self, items: Sequence[Item], ends: Sequence[int]) -> int | None:
        """Cycles that sums of items may wait for others' on their lines.

        Returns:
            None where lines get more sums than they take, where sums of units that are laid out would have to wait, or
            where the tree cannot be set up.
        """
        first, users = min(item.start for item in items), dict[int, list[tuple[int, int, float, bool, int]]]()
        earlier = [pair for laid in self.done.values() for pair in zip(laid.items, laid.ends, strict=True)]
        for own, pairs in (
            (True, zip(items, ends, strict=True)),
            (False, (pair for pair in earlier if pair[1] > first)),
        ):
            for item, end in pairs:
                lines, later = (
                    [leaving(self.config, place).line for place in self.neurons(item)],
                    self.timing(item).later,
                )
                for line in set(lines):
                    sums = lines.count(line)
                    users.setdefault(line, []).append((item.start, end, sums / later, own, sums))
        most = 0
        for each in users.values():
            for start, end, _, own, sums in each if len(each) > 1 else ():
                meeting = [other for other in each if other[0] < end and other[1] > start]
                if sum(rate for _, _, rate, _, _ in meeting) > 1.0 + 1e-9 or any(other[3] != own for other in meeting):
                    return None
                most = max(most, sum(other[4] for other in meeting) - sums)
        return 2 * most if self._fits_tree(items, ends) else None

    def _fits_tree(self, items: Sequence[Item], ends: Sequence[int]) -> bool:
        """Whether the tree can be set up for items, and for them beside each item that is laid out."""
        first, last = min(item.start for item in items), max(ends)
        own = [place for item in items for place in self.neurons(item)]
        try:
            configure(self.config.multipliers, own)
            for laid in self.done.values():
                for item, end in zip(laid.items, laid.ends, strict=True):
                    if item.start < last and end > first:
                        others = self.neurons(item)
                        beside = [p for p in own if all(p.end <= o.start or o.end <= p.start for o in others)]
                        configure(self.config.multipliers, [*beside, *others])
        except TargetError:
            return False
        return True

    def add(self, unit: ChannelRange, laid: LayerItems) -> None:
        """Take a unit's multipliers, or whole ports where these are shared."""
        width = self.config.feed_width if self.config.shared_ports else 1
        for item, finish in zip(laid.items, laid.ends, strict=True):
            first, end = item.place.start // width * width, -(-item.place.end // width) * width
            np.maximum(self.free[first:end], finish, out=self.free[first:end])
        self.done[unit] = laid


def single_neurons(floor: Floorplan, unit: ChannelRange, room: UnitRoom) -> Iterator[Item]:
    """Ways to compute a unit by one virtual neuron, large ones first, from the left: the last resort where rules leave
    little room."""
    work, config, within = floor.network.works[unit.work], floor.config, room.within
    step, parts, taps = config.port_width if config.ports else 1, tuple(segments_of(work, unit)), work.layer.taps
    for size in range(min(taps, within.size), 0, -1):
        tile = tile_of(work.layer, size)
        try:
            width = timing(config, work.layer, tile, taps).size
        except TargetError:  # more steps than a multiplier holds weights, or folding is off
            continue
        for at in range(-(-within.start // step) * step, within.end - width + 1, step):
            time = timing(config, work.layer, tile, taps, at)
            start = start_of(work, time, max(int(floor.free[at : at + width].max()), room.earliest), room)
            yield Item(unit.work, start, Range(at, width), tile, (0, taps), parts)


def lay_alongside(floor: Floorplan, rooms: Mapping[ChannelRange, UnitRoom]) -> bool:
    """Lay out units that begin in the same cycle, each on one virtual neuron; whether there is a way."""
    works, width = floor.network.works, floor.config.port_width if floor.config.ports else 1
    choices = [
        [item for item in islice(single_neurons(floor, unit, room), MOST_WAYS) if item.start == room.earliest]
        for unit, room in rooms.items()
    ]
    for items in islice(_disjoint(choices, width, repeat(None, _STEPS)), MOST_WAYS // 10):
        ends = [laid_out((item,), works[item.work], floor.config).finish for item in items]
        slack = floor.slack(items, ends)
        if slack is not None:
            for unit, item in zip(rooms, items, strict=True):
                floor.add(unit, laid_out((item,), works[item.work], floor.config, slack))
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
