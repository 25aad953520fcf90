"""The last resort where rules leave little room: one virtual neuron for a unit, wherever there is one that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, repeat

from dovetail.errors import TargetError
from dovetail.targets.maeri.tile import tile_of
from dovetail.targets.maeri.floor import Floorplan, UnitRoom, start_of
from dovetail.targets.maeri.order import ChannelSegment, Item, laid_out
from dovetail.targets.maeri.rules import ChannelRange
from dovetail.targets.maeri.timing import timing

MOST_WAYS = 3000
"""To place a unit that are tried."""
_STEPS = 20_000
"""Choices looked at for several units that begin together."""


def singly(floor: Floorplan, unit: ChannelRange, room: UnitRoom) -> Iterator[Item]:
    """Ways to compute a unit by one virtual neuron, large ones first, from the left."""
    work, config, within = floor.network.works[unit.work], floor.config, room.within
    step = config.port_width if config.ports else 1
    if work.turned:
        parts: tuple[ChannelSegment, ...] = (ChannelSegment(0, unit.first, unit.end - unit.first),)
    else:
        parts = tuple(ChannelSegment(channel, 0, work.positions) for channel in range(unit.first, unit.end))
    for size in range(min(work.layer.taps, within.size), 0, -1):
        tile = tile_of(work.layer, size)
        try:
            width = timing(config, work.layer, tile, work.layer.taps).size
        except TargetError:  # more steps than a multiplier holds weights, or no folds
            continue
        for at in range(-(-within.start // step) * step, within.end - width + 1, step):
            time = timing(config, work.layer, tile, work.layer.taps, at)
            place = replace(within, start=at, size=width)
            start = start_of(work, time, max(int(floor.free[at : at + width].max()), room.held), room)
            yield Item(unit.work, tile, place, start, parts, (0, work.layer.taps))


def alongside(floor: Floorplan, rooms: Mapping[ChannelRange, UnitRoom]) -> bool:
    """Lay out units that begin in the same cycle, each on one virtual neuron; whether there is a way."""
    works = floor.network.works
    width = floor.config.port_width if floor.config.ports else 1
    choices = [
        [item for item in islice(singly(floor, unit, room), MOST_WAYS) if item.start == room.held]
        for unit, room in rooms.items()
    ]
    for items in islice(_disjoint(choices, width, repeat(None, _STEPS)), MOST_WAYS // 10):
        laid = [laid_out((item,), works[item.work], floor.config) for item in items]
        slack = floor.slack(items, [each.finish for each in laid])
        if slack is not None:
            for unit, item in zip(rooms, items, strict=True):
                floor.add(unit, laid_out((item,), works[item.work], floor.config, slack))
            return True
    return False


def _disjoint(
    choices: Sequence[Sequence[Item]], width: int, steps: Iterator[None], taken: frozenset[int] = frozenset()
) -> Iterator[tuple[Item, ...]]:
    """One item of each, on ports of their own, as long as there are `steps` left."""
    if not choices:
        yield ()
        return
    for item, _ in zip(choices[0], steps, strict=False):
        ports = frozenset(range(item.place.start // width, -(-item.place.end // width)))
        if not ports & taken:
            yield from ((item, *others) for others in _disjoint(choices[1:], width, steps, taken | ports))
