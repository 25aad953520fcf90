"""Which regions an engine computes side by side, where it can (`Engine.joint`): those that read nothing of each other.

Looked for are the turns that end first, by the engine's own cycles and the core's for handing over. Only regions change
places between which the core does nothing, that wait for the same work of the core, and that the same work of the core
waits for: then nothing else can end later. (A copy of the core's waits for its own operand only.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby

from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.layout.choose import ValueSlice
from dovetail.schedule.partition import Region
from dovetail.schedule.tiles.tile import tile_match
from dovetail.target.description import Target
from dovetail.target.engine import Engine, Joint, Launched
from dovetail.user_file import asking

MOST_ASKED = 32
"""Sets of regions of a network an engine is asked about; further ones are not tried."""
_READY = 8
"""Regions of which sets are made, of those whose operands exist; the first ones."""
_KEPT = 32
"""Ways to have come to a number of regions that are followed up, the best of them."""

_Turn = tuple[int, ...]
"""Regions computed side by side, by index."""


@dataclass(frozen=True)
class _TurnSequence:
    """Turns one after the other, and when they end."""

    turns: tuple[_Turn, ...]
    ends: tuple[int, ...]
    """Cycle each turn ends in."""
    core: int
    """Cycle in which the last of them was handed over."""

    @property
    def rank(self) -> tuple[int, int, tuple[_Turn, ...]]:
        """What is better comes first; of equal ones more turns."""
        return self.ends[-1] if self.ends else 0, -len(self.turns), self.turns

    @property
    def free(self) -> int:
        """Cycle from which the core may hand over the next: the engine holds a turn that runs and one that waits."""
        return max(self.core, self.ends[-2] if len(self.ends) > 1 else 0)


def _undominated(ways: Sequence[_TurnSequence]) -> list[_TurnSequence]:
    """Those of the same regions than which none ends sooner and leaves the core free as soon; one of equals."""
    kept: list[_TurnSequence] = []
    for way in sorted(ways, key=lambda way: way.rank):
        if all(way.free < other.free for other in kept):
            kept.append(way)
    return kept


def side_by_side(laid: LayoutPlan, target: Target) -> LayoutPlan:
    """The network with regions that are computed side by side one behind the other, all but the last of them held.

    Args:
        laid: the network; what has regions in pieces stays as it is.
        target: the machine; so does what is for several engines.
    """
    regions = laid.regions
    engine = target.engines[0] if len(target.engines) == 1 else None
    if engine is None or engine.joint is None or not target.works_in_place(engine):
        return laid
    search = _TurnSearch(regions, engine, engine.joint, laid.inside)
    mine = [index for index, region in enumerate(regions) if region.engine is not None and not region.shares]
    turns: list[_Turn] = []
    for _, run in groupby(mine, key=lambda index: (search.kin(index), sum(n < index for n in search.others))):
        turns += search.turns(tuple(run))
    return replace(laid, regions=_in_turn(regions, turns, mine, search))


def _in_turn(
    regions: Sequence[Region], turns: Sequence[_Turn], mine: Sequence[int], search: _TurnSearch
) -> tuple[Region, ...]:
    """The regions, the engine's (`mine`) turn after turn at the places they had, later only where operands are
    missing."""
    places: dict[_Turn, int] = {(index,): index for index in range(len(regions)) if index not in mine}
    taken = 0
    for turn in turns:
        places[turn], taken = mine[taken], taken + len(turn)
    waiting, done, found = sorted(places, key=places.__getitem__), set[int](), list[Region]()
    while waiting:
        turn = next(turn for turn in waiting if all(search.makers[index] <= done for index in turn))
        waiting.remove(turn)
        done |= set(turn)
        found += [replace(regions[index], held=index != turn[-1]) for index in turn]
    return tuple(found)


@dataclass
class _TurnSearch:
    """What is known of a network while turns are looked for."""

    regions: Sequence[Region]
    engine: Engine
    joint: Joint
    inside: Mapping[str, ValueSlice]
    """The values that lie inside others: where they are joined, nothing is done for them."""
    cycles: dict[_Turn, int | None] = field(default_factory=dict)
    """Of sets of regions the engine was asked about."""
    asked: int = 0
    """Sets of several."""

    def __post_init__(self) -> None:
        """Follow values from maker to reader."""
        made = {region.output: index for index, region in enumerate(self.regions)}
        inputs = [region.graph.inputs for region in self.regions]
        self.of_operand = [{value: made[value] for value in values if value in made} for values in inputs]
        self.makers = [set(operands.values()) for operands in self.of_operand]
        self.waits = [
            {value for value in one.graph.inputs if value not in self.inside or self.inside[value].outer != one.output}
            for one in self.regions
        ]
        """What a region waits for until it does something."""
        self.others = [
            n
            for n, one in enumerate(self.regions)
            if one.engine is None and not (one.is_view or one.still) and (self.waits[n] or not one.mover)
        ]
        """What the core, or a DMA, does."""
        self.before: list[set[int]] = []
        """What a region is computed from, directly or not."""
        for makers in self.makers:
            self.before.append(makers.union(*(self.before[maker] for maker in makers)))

    def kin(self, index: int) -> tuple[frozenset[int], frozenset[tuple[int, str]]]:
        """What the core, or a DMA, does before a region and after it; what of it waits for each operand by itself, for
        which."""
        after: set[tuple[int, str]] = set()
        for other in self.others:
            made, moves = self.of_operand[other], self.regions[other].mover
            read = ((value, maker) for value, maker in made.items() if value in self.waits[other])
            waited = (value for value, maker in read if index == maker or index in self.before[maker])
            after |= {(other, value if moves else "") for value in waited}
        return frozenset(self.before[index].intersection(self.others)), frozenset(after)

    def turns(self, run: _Turn) -> tuple[_Turn, ...]:
        """The turns of regions that may change places that end first; one at a time where nothing is better."""
        alone = _TurnSequence((), (), 0)
        for index in run:
            following = self.then(alone, (index,))
            if following is None:
                return tuple((one,) for one in run)
            alone = following
        ways: list[dict[frozenset[int], list[_TurnSequence]]] = [{} for _ in range(len(run) + 1)]
        ways[0][frozenset()] = [_TurnSequence((), (), 0)]
        for count in range(len(run)):
            every = ((way, done) for done, some in ways[count].items() for way in some)
            for way, done in sorted(every, key=lambda each: (each[0].rank, sorted(each[1])))[:_KEPT]:
                for turn in self.following(run, done):
                    if (longer := self.then(way, turn)) is not None:
                        after = done | set(turn)
                        ways[len(after)][after] = _undominated([*ways[len(after)].get(after, []), longer])
        found = min(ways[-1].get(frozenset(run), [alone]), key=lambda way: way.rank)
        return found.turns if found.ends[-1] < alone.ends[-1] else alone.turns

    def following(self, run: _Turn, done: frozenset[int]) -> Iterator[_Turn]:
        """What may be computed next: a region whose operands exist, or several."""
        own = set(run) - done
        ready = [index for index in run if index in own and not self.before[index] & own][:_READY]
        for size in range(1, min(self.joint.most, len(ready)) + 1):
            yield from combinations(ready, size)

    def then(self, way: _TurnSequence, turn: _Turn) -> _TurnSequence | None:
        """A way with a turn more; None where the engine cannot."""
        cycles = self.asked_for(turn)
        if cycles is None:
            return None
        core = way.free + self.joint.handing * len(turn)
        begin = max(core, way.ends[-1] if way.ends else 0)
        return _TurnSequence((*way.turns, turn), (*way.ends, begin + cycles), core)

    def asked_for(self, turn: _Turn) -> int | None:
        """The engine's cycles for regions side by side."""
        if turn not in self.cycles:
            if len(turn) > 1 and self.asked >= MOST_ASKED:
                return None
            self.asked += len(turn) > 1
            own = [self.launched(index) for index in turn]
            known = [one for one in own if one is not None]
            names = ", ".join(self.regions[index].name for index in turn)
            with asking(f"the cycles of {self.engine.name} for {names} side by side"):
                self.cycles[turn] = self.joint.cycles(known) if len(known) == len(own) else None
        return self.cycles[turn]

    def launched(self, index: int) -> Launched | None:
        """A region as it is launched: as a whole; None where it cannot be."""
        region = self.regions[index]
        assert region.offload is not None
        try:
            return Launched(region.offload.name, tile_match(region, region.extent)[1])
        except ValueError:
            return None
