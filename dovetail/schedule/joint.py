"""Turns: regions that read nothing of each other, computed side by side by an engine that can (`Engine.joint`).

The search looks for the turns that end first, by the engine's own cycles and the core's for handing over. Two regions
may be reordered only if the core does nothing between them, both wait for the same core work, and the same core work
waits for both. Then no other work ends later. (A copy by the core waits for its own operand only.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby

from dovetail.records import Record
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.layout.inside import ValueSlice
from dovetail.schedule.region import LaidRegion
from dovetail.schedule.tiles.tile import tile_match
from dovetail.target.description import Target
from dovetail.target.engine import Engine, Joint, Launched
from dovetail.user_file import asking

MOST_ASKED = 32
"""Sets of regions of a network an engine is asked about; further ones are not tried."""
_READY = 8
"""The first so many regions whose operands exist are combined to sets."""
_KEPT = 32
"""The best so many sequences of a number of regions are followed up."""

_Turn = tuple[int, ...]
"""Regions computed side by side, by index."""


class _TurnSequence(Record):
    """Turns one after the other, and the cycles they end in."""

    turns: tuple[_Turn, ...]
    ends: tuple[int, ...]
    """Cycle each turn ends in."""
    core: int
    """Cycle in which the last of them was handed over."""

    @property
    def rank(self) -> tuple[int, int, tuple[_Turn, ...]]:
        """Sort key: the end, then more turns."""
        return self.ends[-1] if self.ends else 0, -len(self.turns), self.turns

    @property
    def free(self) -> int:
        """Cycle from which the core may hand over the next: the engine holds a turn that runs and one that waits."""
        return max(self.core, self.ends[-2] if len(self.ends) > 1 else 0)


def _undominated(ways: Sequence[_TurnSequence]) -> list[_TurnSequence]:
    """The sequences of the same regions that none beats with both its end and a core that is free; one of equals."""
    kept: list[_TurnSequence] = []
    for way in sorted(ways, key=lambda way: way.rank):
        if all(way.free < other.free for other in kept):
            kept.append(way)
    return kept


def side_by_side(laid: LayoutPlan, target: Target) -> LayoutPlan:
    """The network with the turns in which its engine computes regions side by side, these one behind the other.

    Args:
        laid: the network; what has regions in pieces stays as it is.
        target: the machine; so does what is for several engines.
    """
    regions = laid.regions
    engine = target.engines[0] if len(target.engines) == 1 else None
    if engine is None or engine.joint is None or not target.works_in_place(engine):
        return laid
    search = _TurnSearch(regions, engine, engine.joint, laid.inside)
    mine = [index for index, region in enumerate(regions) if len(region.shares) == 1]
    turns: list[_Turn] = []
    for _, run in groupby(mine, key=lambda index: (search.neighbours(index), sum(n < index for n in search.others))):
        turns += search.turns(tuple(run))
    names = tuple(tuple(regions[index].name for index in turn) for turn in turns if len(turn) > 1)
    return replace(laid, regions=_in_turn(regions, turns, mine, search), turns=names)


def _in_turn(
    regions: Sequence[LaidRegion], turns: Sequence[_Turn], mine: Sequence[int], search: _TurnSearch
) -> tuple[LaidRegion, ...]:
    """The regions, the engine's (`mine`) turn after turn at the places they had, later only where operands are
    missing."""
    places: dict[_Turn, int] = {(index,): index for index in range(len(regions)) if index not in mine}
    taken = 0
    for turn in turns:
        places[turn], taken = mine[taken], taken + len(turn)
    waiting, done = sorted(places, key=places.__getitem__), list[int]()
    while waiting:
        turn = next(turn for turn in waiting if all(search.makers[index].issubset(done) for index in turn))
        waiting.remove(turn)
        done += turn
    return tuple(regions[index] for index in done)


@dataclass
class _TurnSearch:
    """The search for the turns of a network."""

    regions: Sequence[LaidRegion]
    engine: Engine
    joint: Joint
    inside: Mapping[str, ValueSlice]
    """The values that lie inside others: where they are joined, nothing is done for them."""
    cycles: dict[_Turn, int | None] = field(default_factory=dict)
    """Cycles of the sets of regions the engine was asked about."""
    asked: int = 0
    """Number of sets of several regions the engine was asked about."""

    def __post_init__(self) -> None:
        maker_of = {region.output: index for index, region in enumerate(self.regions)}
        inputs = [region.graph.inputs for region in self.regions]
        self.of_operand = [{value: maker_of[value] for value in values if value in maker_of} for values in inputs]
        self.makers = [set(operands.values()) for operands in self.of_operand]
        self.waits = [
            {value for value in one.graph.inputs if value not in self.inside or self.inside[value].outer != one.output}
            for one in self.regions
        ]
        """By region, the operands it waits for until it does something."""
        self.others = [
            n
            for n, one in enumerate(self.regions)
            if not (one.shares or one.is_idle) and (self.waits[n] or not one.copied_by)
        ]
        """The regions of the core, or of a DMA."""
        self.before: list[set[int]] = []
        """By region, the regions it is computed from, directly or not."""
        for makers in self.makers:
            self.before.append(makers.union(*(self.before[maker] for maker in makers)))

    def neighbours(self, index: int) -> tuple[frozenset[int], frozenset[tuple[int, str]]]:
        """The work of the core, or a DMA, before a region and after it; of work that waits for each operand by itself,
        the operand too."""
        after: set[tuple[int, str]] = set()
        for other in self.others:
            operands, moves = self.of_operand[other], self.regions[other].copied_by
            read = ((value, maker) for value, maker in operands.items() if value in self.waits[other])
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
        best = min(ways[-1].get(frozenset(run), [alone]), key=lambda way: way.rank)
        return best.turns if best.ends[-1] < alone.ends[-1] else alone.turns

    def following(self, run: _Turn, done: frozenset[int]) -> Iterator[_Turn]:
        """The turns that may come next: a region whose operands exist, or several."""
        own = set(run) - done
        ready = [index for index in run if index in own and not self.before[index] & own][:_READY]
        for size in range(1, min(self.joint.most, len(ready)) + 1):
            yield from combinations(ready, size)

    def then(self, way: _TurnSequence, turn: _Turn) -> _TurnSequence | None:
        """A sequence with a turn more; None where the engine cannot."""
        cycles = self.cycles_of(turn)
        if cycles is None:
            return None
        core = way.free + self.joint.handing * len(turn)
        begin = max(core, way.ends[-1] if way.ends else 0)
        return _TurnSequence((*way.turns, turn), (*way.ends, begin + cycles), core)

    def cycles_of(self, turn: _Turn) -> int | None:
        """The engine's cycles for regions side by side; None where it cannot, or may not be asked any more."""
        if turn not in self.cycles:
            if len(turn) > 1 and self.asked >= MOST_ASKED:
                return None
            self.asked += len(turn) > 1
            names = ", ".join(self.regions[index].name for index in turn)
            try:
                launched = [self.launched(index) for index in turn]
            except ValueError:  # a region cannot be launched as a whole
                self.cycles[turn] = None
                return None
            with asking(f"the cycles of {self.engine.name} for {names} side by side"):
                self.cycles[turn] = self.joint.cycles(launched)
        return self.cycles[turn]

    def launched(self, index: int) -> Launched:
        """A region launched as a whole; raises ValueError where it cannot be."""
        (part,) = self.regions[index].parts
        return Launched(part.offload.name, tile_match(part, part.extent)[1])
