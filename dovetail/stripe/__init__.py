"""Stripe: parts of the network computed in overlapping bands of rows, so that activations fit a memory budget.

A value larger than what there is room for never exists whole: of a segment of the network, from one value that is all
later layers read to another, a band of rows of the result is computed at a time, from the rows of the first value it
needs. What neighbouring bands both need of the values between is computed twice. The bands lie inside the result and
are read from inside the first value, whose rows are free as soon as no band still to come reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from dovetail.errors import PlanError, TargetError
from dovetail.graph.graph import Graph, prune
from dovetail.graph.trim import total_macs
from dovetail.partition import partition
from dovetail.stripe.rewrite import striped
from dovetail.stripe.search import Choice, Search
from dovetail.target.description import Target


@dataclass(frozen=True)
class Stripes:
    """One segment computed in stripes."""

    layers: tuple[str, ...]
    """Names of the layers, as without stripes."""
    count: int
    """How many stripes."""
    rows: int
    """Rows of the largest stripe of the last layer's result."""
    extra_macs: int
    """Multiply-accumulates more than without stripes."""


@dataclass(frozen=True)
class Striped:
    """A network in stripes."""

    graph: Graph
    stripes: tuple[Stripes, ...]
    peak: int
    """Bytes of activations at most, by estimate: the plan has the last word."""

    @property
    def extra_macs(self) -> int:
        """Multiply-accumulates more than without stripes."""
        return sum(segment.extra_macs for segment in self.stripes)

    def describe(self) -> str:
        """Words for what is done and what it costs."""
        if not self.stripes:
            return "no stripes"
        names = (" to ".join(dict.fromkeys((s.layers[0], s.layers[-1]))) for s in self.stripes)
        parts = (f"{name} in {s.count} stripes" for name, s in zip(names, self.stripes, strict=True))
        return f"{'; '.join(parts)}; {self.extra_macs:,} MACs more"

    def to_json(self) -> list[dict[str, Any]]:
        """The segments as plain values, keys as the fields of `Stripes`."""
        return [asdict(segment) for segment in self.stripes]


class Striping:
    """The ways to compute a network in stripes on a core alone.

    Raises:
        TargetError: the target has engines or a DMA.
    """

    def __init__(self, graph: Graph, target: Target) -> None:
        if target.engines or target.dma:
            raise TargetError("a memory budget is for the activations of a core alone; it has "
                              f"{'engines' if target.engines else 'a DMA'}, whose layers are cut into tiles instead",
                              where=target.name,
                              hint="leave --memory-budget out, or give the target's memories smaller sizes")
        regions = partition(graph, target)
        nodes = [node for region in regions for node in region.graph.nodes]
        self._graph = replace(graph, nodes=tuple(nodes))
        self._regions = regions
        self._search = Search(self._graph, regions)

    def within(self, budget: int) -> Striped | None:
        """The stripes with the fewest multiply-accumulates whose activations take no more than `budget` bytes, by
        estimate; None where none do."""
        found = self._search.within(budget)
        return None if found is None else self._striped(found)

    def whole(self) -> Striped:
        """The network without stripes."""
        found = self.within(1 << 62)
        assert found is not None
        return found

    def smallest(self) -> Striped:
        """The stripes with the smallest activations, by estimate."""
        return self._striped(self._search.smallest())

    def frontier(self) -> Iterator[Striped]:
        """From the network without stripes, with ever smaller activations and ever more to compute."""
        found: Striped | None = self.whole()
        while found is not None:
            yield found
            found = self.within(found.peak - 1)

    def _striped(self, choice: Choice) -> Striped:
        graph, made = self._graph, []
        for segment in choice.segments:
            if not segment.bands:
                continue
            start, end = (self._search.cuts[place] for place in (segment.first, segment.last))
            regions = self._regions[start.after : end.after]
            nodes = [node for region in regions for node in region.graph.nodes]
            before, graph = total_macs(graph), striped(graph, nodes, start.value, end.value, segment.bands)
            extra = total_macs(graph) - before
            rows = max(stop - first for first, stop in segment.bands)
            made.append(Stripes(tuple(region.name for region in regions), len(segment.bands), rows, extra))
        return Striped(prune(graph), tuple(made), choice.peak)


def refuse(budget: int, peak: int, smallest: Striped) -> PlanError:
    """The error of a budget that cannot be met.

    Args:
        budget: bytes.
        peak: the fewest bytes of any plan made.
        smallest: the stripes of that plan.
    """
    how = f"with {smallest.describe()}" if smallest.stripes else "no stretch of this network can be cut into stripes"
    return PlanError(
        f"the activations need at least {peak} bytes, {peak - budget} more than the memory budget of {budget}",
        where=how,
        hint=f"a budget of {peak} bytes, a smaller input, or fewer channels in the largest layers",
    )


__all__ = ["Striped", "Stripes", "Striping", "refuse"]
