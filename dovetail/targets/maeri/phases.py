"""The phases of an order: spans of time in which the same virtual neurons work, each with its own tree."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.targets.maeri.schedule import Schedule, busy, neurons
from dovetail.targets.maeri.timing import timing
from dovetail.targets.maeri.tree import Range, Tree, configure


@dataclass(frozen=True)
class Phase:
    """A span of time without a change."""

    start: int
    """Its first cycle."""
    places: tuple[Range, ...]
    """The virtual neurons at work, from the left."""
    tree: Tree
    """How the reduction tree adds them up; outputs in the order of the places."""
    configuration: int
    """Phases with the same virtual neurons have the same number, from 0 in the order they first come."""


def phases(schedule: Schedule) -> list[Phase]:
    """The phases in order; neighbours differ. A phase without virtual neurons is idle."""
    changes: dict[int, tuple[set[Range], set[Range]]] = {}
    for item in schedule.items:
        work = schedule.network.works[item.work]
        time = timing(schedule.config, work.layer, item.tile, item.taps[1] - item.taps[0])
        end = item.start + busy(item, schedule.network, schedule.config)
        for place in neurons(item, time):
            changes.setdefault(item.start, (set(), set()))[0].add(place)
            changes.setdefault(end, (set(), set()))[1].add(place)
    found: list[Phase] = []
    trees: dict[tuple[Range, ...], Tree] = {}
    active: set[Range] = set()
    for cycle in sorted(changes):
        begun, ended = changes[cycle]
        active = (active - ended) | begun
        places = tuple(sorted(active, key=lambda place: place.start))
        if not found or places != found[-1].places:
            if places not in trees:
                trees[places] = configure(schedule.config.multipliers, places)
            found.append(Phase(cycle, places, trees[places], list(trees).index(places)))
    return found
