"""The last resort where rules leave little room: one virtual neuron for a unit, wherever there is one that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from dovetail.errors import TargetError
from dovetail.targets.maeri.floor import Floor, Room, start_of
from dovetail.targets.maeri.order import Item, Segment, laid_out
from dovetail.targets.maeri.rules import Unit
from dovetail.targets.maeri.timing import shaped, timing

MOST_WAYS = 3000
"""To place a unit, or several, that are tried."""


def singly(floor: Floor, unit: Unit, room: Room) -> Iterator[Item]:
    """Ways to compute a unit by one virtual neuron, large ones first, from the left."""
    work, config, within = floor.network.works[unit.work], floor.config, room.within
    step = config.port_width if config.ports else 1
    if work.turned:
        parts: tuple[Segment, ...] = (Segment(0, unit.first, unit.end - unit.first),)
    else:
        parts = tuple(Segment(channel, 0, work.positions) for channel in range(unit.first, unit.end))
    for size in range(min(work.layer.taps, within.size), 0, -1):
        tile = shaped(work.layer, size)
        try:
            width = timing(config, work.layer, tile, work.layer.taps).size
        except TargetError:  # more steps than a multiplier holds weights, or no folds
            continue
        for at in range(-(-within.start // step) * step, within.end - width + 1, step):
            time = timing(config, work.layer, tile, work.layer.taps, at)
            place = replace(within, start=at, size=width)
            start = start_of(work, time, max(int(floor.free[at : at + width].max()), room.held), room)
            yield Item(unit.work, tile, place, start, parts, (0, work.layer.taps))


def alongside(floor: Floor, rooms: Mapping[Unit, Room]) -> bool:
    """Lay out units that begin in the same cycle, each on one virtual neuron; whether there is a way."""
    works = floor.network.works
    for items in islice(_disjoint(floor, list(rooms.items())), MOST_WAYS):
        laid = [laid_out((item,), works[item.work], floor.config) for item in items]
        slack = floor.slack(items, [each.finish for each in laid])
        if slack is not None:
            for unit, item in zip(rooms, items, strict=True):
                floor.add(unit, laid_out((item,), works[item.work], floor.config, slack))
            return True
    return False


def _disjoint(floor: Floor, rooms: Sequence[tuple[Unit, Room]]) -> Iterator[tuple[Item, ...]]:
    """One item for each unit, on ports of their own, that begin together."""
    if not rooms:
        yield ()
        return
    (unit, room), *others = rooms
    width = floor.config.port_width if floor.config.ports else 1
    for item in singly(floor, unit, room):
        first, end = item.place.start // width, -(-item.place.end // width)
        for further in _disjoint(floor, others) if item.start == room.held else ():
            ports = [(each.place.start // width, -(-each.place.end // width)) for each in further]
            if all(end <= low or high <= first for low, high in ports):
                yield (item, *further)
