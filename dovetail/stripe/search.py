"""Which segments to compute in how many stripes: the fewest multiply-accumulates within a number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
        best: list[Choice | None] = [Choice((), 0, 0), *([None] * (len(self.cuts) - 1))]
        for first, before in enumerate(best[:-1]):
            before = best[first]
            if before is None:
                continue
            for last in range(first + 1, len(self.cuts)):
                for segment in self._segments(first, last):
                    made, known = self._extended(before, segment), best[last]
                    if known is not None and made.order >= known.order:
                        break
                    if self._costs.peak(segment) <= budget:
                        best[last] = self._measured(made)
                        break
        return best[-1]

    def smallest(self) -> Choice:
        """The choice of the fewest bytes, and of those with as few the one with the fewest multiply-accumulates."""
        peak: list[int] = [0, *([1 << 62] * (len(self.cuts) - 1))]
        for first in range(len(self.cuts) - 1):
            for last in range(first + 1, len(self.cuts)):
                for segment in self._segments(first, last):
                    least = max(peak[first], self._least(segment))
                    if least < peak[last]:
                        peak[last] = min(peak[last], max(peak[first], self._costs.peak(segment)))
        found = self.within(peak[-1])
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

    @staticmethod
    def _extended(before: Choice, segment: Segment) -> Choice:
        return Choice((*before.segments, segment), before.macs + segment.macs, before.peak)

    def _measured(self, choice: Choice) -> Choice:
        peak = max(choice.peak, self._costs.peak(choice.segments[-1]))
        return Choice(choice.segments, choice.macs, peak)
