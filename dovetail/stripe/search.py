"""Which segments to compute in how many stripes: the fewest multiply-accumulates within a number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dovetail.graph.graph import Graph
from dovetail.partition.regions import Region
from dovetail.stripe.rows import Bands
from dovetail.stripe.segments import Costs, Cut, Segment, cuts


@dataclass(frozen=True)
class Choice:
    """A network as segments, one behind the other."""

    segments: tuple[Segment, ...]
    macs: int
    peak: int
    """Bytes alive together at most, by estimate."""

    @property
    def order(self) -> tuple[int, int]:
        """The better choice has the lower one: fewer multiply-accumulates, then fewer stripes."""
        return self.macs, sum(len(segment.bands) for segment in self.segments)


@dataclass
class Search:
    """All ways to cut a network, searched exactly: what a segment costs does not depend on the others."""

    graph: Graph
    regions: tuple[Region, ...]
    cuts: list[Cut] = field(default_factory=list)
    _striped: dict[tuple[int, int], list[Segment]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the cuts."""
        self.cuts = cuts(self.graph, self.regions)
        self._costs = Costs(Bands(self.graph, self.regions), self.cuts)

    def within(self, budget: int) -> Choice | None:
        """The fewest multiply-accumulates of all choices that need no more bytes than a budget; None if none does."""
        best: list[dict[int, Choice]] = [{0: Choice((), 0, 0)}, *({} for _ in self.cuts[1:])]
        for first, starts in enumerate(best):
            for direction, before in starts.items():
                for last in range(first + 1, len(self.cuts)):
                    self._go_on(best[last], before, direction, self._segments(first, last), budget)
        return min(best[-1].values(), key=lambda choice: choice.order, default=None)

    def _go_on(
        self, ends: dict[int, Choice], before: Choice, direction: int, segments: Sequence[Segment], budget: int
    ) -> None:
        """Better the choices known, by their last segment's direction, with those that go on from one."""
        settled = {direction} if direction else set()
        for segment in segments:
            made = Choice((*before.segments, segment), before.macs + segment.macs, before.peak)
            known = ends.get(segment.direction)
            if segment.direction in settled or (known is not None and made.order >= known.order):
                continue
            peak = self._costs.peak(segment)
            if peak <= budget:
                ends[segment.direction] = replace(made, peak=max(before.peak, peak))
                settled.add(segment.direction)

    def smallest(self) -> Choice:
        """The choice of the fewest bytes, and of those with as few the one with the fewest multiply-accumulates."""
        least: list[dict[int, int]] = [{0: 0}, *({} for _ in self.cuts[1:])]
        for first, starts in enumerate(least):
            for direction, before in starts.items():
                for last in range(first + 1, len(self.cuts)):
                    for segment in self._segments(first, last):
                        known = least[last].get(segment.direction, 1 << 62)
                        if (direction and segment.direction == direction) or self._least(segment) >= known:
                            continue
                        peak = max(before, self._costs.peak(segment))
                        least[last][segment.direction] = min(known, peak)
        found = self.within(min(least[-1].values()))
        assert found is not None
        return found

    def _least(self, segment: Segment) -> int:
        """Bytes no way to compute a segment can do without: its ends, whole in turn."""
        names = (self.cuts[segment.first].value, self.cuts[segment.last].value)
        return max(self.graph.types[name].nbytes if name else 0 for name in names)

    def _segments(self, first: int, last: int) -> Sequence[Segment]:
        """The ways to compute the regions between two cuts, the cheapest first."""
        if (first, last) not in self._striped:
            found = list(self._costs.striped(first, last))
            found += [self._costs.whole(first)] if last == first + 1 else []
            found.sort(key=lambda segment: (segment.macs, len(segment.bands)))
            self._striped[first, last] = found
        return self._striped[first, last]
