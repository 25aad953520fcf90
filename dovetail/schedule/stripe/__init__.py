"""Stripe: depth-first (patch-based) execution, so that activations fit a memory budget.

A value larger than what there is room for never exists whole: of a segment of the network, from one value that is all
later layers read to another, a band of rows of the result is computed at a time, from the rows of the first value it
needs. What neighbouring bands both need of the values between (the halo) is computed twice. The bands lie inside the
result and are read from inside the first value, whose rows are free as soon as no band still to come reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from dovetail.errors import PlanError, TargetError
from dovetail.ir.crop import part, total_macs
from dovetail.ir.graph import Graph, Node, prune
from dovetail.ir.operators.movement import Concat
from dovetail.ir.types import Array, TensorType, full_box
from dovetail.schedule.partition import Region, partition
from dovetail.schedule.stripe.segments import Bands, Costs, Rows, Segment, cuts
from dovetail.target.description import Target


def striped(graph: Graph, nodes: Sequence[Node], source: str, result: str, bands: Sequence[Rows]) -> Graph:
    """The graph with some of its nodes computed in stripes.

    Args:
        graph: the whole graph.
        nodes: those between `source` and `result`, neighbours in the graph's order.
        source: the only value they read that they do not compute.
        result: the only value of them that others read, an image.
        bands: the rows of the result each stripe computes, in the order of computation.
    """
    read = {name for node in nodes for name in node.inputs}
    constants = {name: array for name, array in graph.constants.items() if name in read}
    inner = Graph(graph.name, (source,), (result,), tuple(nodes), graph.types, constants)
    whole = full_box(graph.types[result].shape)
    made: list[Node] = []
    types: dict[str, TensorType] = dict(graph.types)
    kept: dict[str, Array] = dict(graph.constants)
    joined: dict[Rows, str] = {}
    for number, band in enumerate(bands):
        stripe = part(inner, {result: (whole[0], band, *whole[2:])}, f" stripe {number}")
        joined[band] = stripe.outputs[0]
        types.update(stripe.types)
        kept.update(stripe.constants)
        made += stripe.nodes
    made.append(Node(Concat(1), tuple(joined[band] for band in sorted(joined)), result))
    place = graph.nodes.index(nodes[0])
    rest = graph.nodes[place + len(nodes) :]
    return replace(graph, nodes=(*graph.nodes[:place], *made, *rest), types=types, constants=kept)


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

    def __post_init__(self) -> None:
        self.cuts = cuts(self.graph, self.regions)
        self._costs = Costs(Bands(self.graph, self.regions), self.cuts)
        self._striped: dict[tuple[int, int], list[Segment]] = {}

    def within(self, budget: int) -> Choice | None:
        """The fewest multiply-accumulates of all choices that need no more bytes than a budget; None if none does."""
        best: list[dict[int, Choice]] = [{0: Choice((), 0, 0)}, *({} for _ in self.cuts[1:])]
        for first, starts in enumerate(best):
            for direction, before in starts.items():
                for last in range(first + 1, len(self.cuts)):
                    settled = {direction} if direction else set()
                    for segment in self._segments(first, last):
                        made = Choice((*before.segments, segment), before.macs + segment.macs, before.peak)
                        known = best[last].get(segment.direction)
                        if segment.direction in settled or (known is not None and made.order >= known.order):
                            continue
                        peak = self._costs.peak(segment)
                        if peak <= budget:
                            best[last][segment.direction] = replace(made, peak=max(before.peak, peak))
                            settled.add(segment.direction)
        return min(best[-1].values(), key=lambda choice: choice.order, default=None)

    def smallest(self) -> Choice:
        """The choice of the fewest bytes, and of those with as few the one with the fewest multiply-accumulates."""
        least: list[dict[int, int]] = [{0: 0}, *({} for _ in self.cuts[1:])]
        for first, starts in enumerate(least):
            for direction, before in starts.items():
                for last in range(first + 1, len(self.cuts)):
                    for segment in self._segments(first, last):
                        known = least[last].get(segment.direction, 1 << 62)
                        ends = (self.cuts[place].value for place in (segment.first, segment.last))  # whole in turn
                        cannot = max(self.graph.types[name].nbytes if name else 0 for name in ends) >= known
                        if (direction and segment.direction == direction) or cannot:
                            continue
                        peak = max(before, self._costs.peak(segment))
                        least[last][segment.direction] = min(known, peak)
        found = self.within(min(least[-1].values()))
        assert found is not None
        return found

    def _segments(self, first: int, last: int) -> Sequence[Segment]:
        """The ways to compute the regions between two cuts, the cheapest first."""
        if (first, last) not in self._striped:
            found = list(self._costs.striped(first, last))
            found += [self._costs.whole(first)] if last == first + 1 else []
            found.sort(key=lambda segment: (segment.macs, len(segment.bands)))
            self._striped[first, last] = found
        return self._striped[first, last]


T = TypeVar("T")
Progress = Callable[[str], None]
_CLOSE = 4
"""Plans tried with a little less each, before less by half of what is missing."""


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
    """The ways to compute a network in stripes on a core alone; `regions` is its partition, where that is known.

    Raises:
        TargetError: the target has engines or a DMA.
    """

    def __init__(self, graph: Graph, target: Target, regions: tuple[Region, ...] = ()) -> None:
        if target.engines or target.dma:
            raise TargetError(
                "a memory budget is for the activations of a core alone; it has "
                f"{'engines' if target.engines else 'a DMA'}, whose layers are cut into tiles instead",
                where=target.name,
                hint="leave --memory-budget out, or give the target's memories smaller sizes",
            )
        self._regions = regions or partition(graph, target)
        self._graph = replace(graph, nodes=tuple(node for region in self._regions for node in region.graph.nodes))
        self._search = Search(self._graph, self._regions)

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


def within(
    striping: Striping, budget: int, whole: int, attempt: Callable[[Striped], tuple[T, int]], progress: Progress
) -> tuple[T, Striped]:
    """A plan in stripes whose activations take no more than a budget.

    What the search takes to be enough may not be, where memory is in pieces: then it is asked for less.

    Args:
        striping: the network.
        budget: bytes.
        whole: bytes of the plan without stripes, which are too many.
        attempt: makes a plan, and says its bytes.
        progress: told what is tried.

    Raises:
        PlanError: there is none; says how far away it is.
    """
    best, found, tries = (whole, striping.whole()), striping.within(budget), 0
    while found is not None:
        progress(f"computing in stripes: {found.describe()}")
        made, peak = attempt(found)
        if peak <= budget:
            return made, found
        best = min(best, (peak, found), key=lambda known: known[0])
        tries += 1
        found = striping.within(found.peak - (1 if tries < _CLOSE else max(1, (peak - budget) // 2)))
    smallest = striping.smallest()
    made, peak = attempt(smallest)
    if peak <= budget:
        return made, smallest
    peak, least = min(best, (peak, smallest), key=lambda known: known[0])
    raise PlanError(
        f"the activations need at least {peak} bytes, {peak - budget} more than the memory budget of {budget}",
        where=f"with {least.describe()}" if least.stripes else "no stretch of this network can be cut into stripes",
        hint=f"a budget of {peak} bytes, a smaller input, or fewer channels in the largest layers",
    )
