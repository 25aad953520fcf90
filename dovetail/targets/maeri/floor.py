"""What is known while units are laid out one after the other: where and when each may work, and who is in its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.errors import TargetError
from dovetail.targets.maeri.clashes import allowed, region
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork, Times, exists_from
from dovetail.targets.maeri.order import Item, LayerItems, neurons, timing_of
from dovetail.targets.maeri.rules import ChannelRange, UnitRules
from dovetail.targets.maeri.timing import ItemTiming
from dovetail.targets.maeri.tree import Range, configure, line_of


@dataclass(frozen=True)
class UnitRoom:
    """Where and when a unit may work."""

    ready: int
    """From when all its inputs exist."""
    held: int
    """From when its first weight may be sent."""
    region: Range
    """The multipliers it may use, whole ports."""
    within: Range
    """All it may use; of the last port not all, perhaps."""
    most: int
    """Virtual neurons at the same time."""
    whole: bool
    """Whether an output channel stays on one of them."""


def start_of(work: MultiplierLayer, time: ItemTiming, free: int, room: UnitRoom) -> int:
    """When the first weight can be sent; the vector of a turned layer is its weights."""
    return max(free, room.ready - (0 if work.turned else time.lead))


class Floorplan:
    """What is known while units are laid out one after the other."""

    def __init__(self, network: OrderNetwork, config: MaeriConfig, asked: UnitRules) -> None:
        self.network, self.config, self.asked = network, config, asked
        self.free = np.zeros(config.multipliers, np.int64)
        self.done: dict[ChannelRange, LayerItems] = {}
        self.of_work: dict[int, list[ChannelRange]] = {}
        for unit in asked.units:
            self.of_work.setdefault(unit.work, []).append(unit)

    def times(self, work: int) -> Times | None:
        """When a layer's results exist; None where not all of it is laid out."""
        laid = [self.done[unit].times for unit in self.of_work[work] if unit in self.done]
        return np.asarray(np.max(laid, axis=0), np.int64) if len(laid) == len(self.of_work[work]) else None

    def ready(self, unit: ChannelRange) -> int:
        """From when all inputs of a unit exist."""
        works = self.network.works
        known = {works[work].node.output: times for work in self.of_work if (times := self.times(work)) is not None}
        return int(exists_from(self.network.graph, works[unit.work].node.inputs[0], known).max(initial=0))

    def held(self, unit: ChannelRange) -> int:
        """From when no rule keeps a unit from beginning."""
        latest = max((pin.begin for other, pin, _ in self.asked.pins if other == unit), default=0)
        for x, laid in self.done.items():
            if (x, unit) in self.asked.rules_before:
                latest = max(latest, laid.exists)
            if (x, unit) in self.asked.no_later:
                latest = max(latest, min(item.start for item in laid.items))
            limited = any({x.work, unit.work} <= works for works, _, _ in self.asked.limits)
            if (x, unit) in self.asked.apart or limited:
                latest = max(latest, laid.finish)
        return latest

    def room(self, unit: ChannelRange) -> UnitRoom:
        """Where and when a unit may work."""
        most = self.asked.limit(unit.work) or self.config.multipliers
        whole = unit.work in self.asked.whole
        ports, within = region(self.asked, unit, self.config), allowed(self.asked, unit, self.config)
        return UnitRoom(self.ready(unit), self.held(unit), ports, within, most, whole)

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

    def add(self, unit: ChannelRange, laid: LayerItems) -> None:
        """Take a unit's multipliers, or whole ports where these are shared."""
        width = self.config.port_width if self.config.ports else self.config.multipliers
        for item, finish in zip(laid.items, laid.ends, strict=True):
            first, end = item.place.start, item.place.end
            if self.config.shared_ports:
                first, end = first // width * width, -(-end // width) * width
            np.maximum(self.free[first:end], finish, out=self.free[first:end])
        self.done[unit] = laid
