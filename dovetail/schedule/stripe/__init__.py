"""Stripe: depth-first (patch-based) execution, so that activations fit a memory budget.

A value larger than what there is room for never exists whole: of a segment of the network, from one value that is all
later layers read to another, a band of rows of the result is computed at a time, from the rows of the first value it
needs. What neighbouring bands both need of the values between (the halo) is kept for the next one: the rows are copied
to where the new ones are computed beside them. Or it is computed again, where that takes less memory. The bands lie
inside the result and are read from inside the first value, whose rows are free as soon as no band still to come reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, TypeVar

from dovetail.errors import PlanError, TargetError
from dovetail.ir.crop import part, total_macs
from dovetail.ir.graph import Graph, Node, prune
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Concat, Slice
from dovetail.ir.types import Array, Box, TensorType, full_box
from dovetail.records import Record
from dovetail.schedule.partition import partition
from dovetail.schedule.region import Region
from dovetail.schedule.stripe.segments import RowBuffer, Rows, Segment, SegmentCosts, StripeStep, cuts, rows_box
from dovetail.schedule.tiles.tiling import Progress
from dovetail.target.description import Target


def striped(graph: Graph, regions: Sequence[Region], segment: Segment, steps: Sequence[StripeStep]) -> Graph:
    """The graph with a segment computed in stripes.

    Args:
        graph: the whole graph.
        regions: of the segment, as they were before anything was in stripes; its nodes are neighbours in `graph`.
        segment: which bands are computed, in which order, and whether rows are kept between them.
        steps: of the segment.
    """
    result = steps[-1].place.value
    nodes = tuple(node for region in regions for node in region.graph.nodes)
    draft = _StripeGraph(dict(graph.types), dict(graph.constants), [], {})
    if segment.keeps:
        first = min(step.index for step in steps)
        done = [(step, draft.compute(regions[step.index - first].graph, step)) for step in steps]
        joined = {step.rows: output for step, output in done if step.place.value == result}
    else:
        read = {name for node in nodes for name in node.inputs}
        (source,) = {place.value for step in steps for place, _ in step.reads if place.stripe < 0}
        constants = {name: array for name, array in graph.constants.items() if name in read}
        inner = Graph(graph.name, (source,), (result,), nodes, graph.types, constants)
        joined = {band: draft.add_part(inner, band, f" stripe {number}") for number, band in enumerate(segment.bands)}
    draft.nodes.append(Node(Concat(1), tuple(joined[band] for band in sorted(joined)), result))
    place = graph.nodes.index(nodes[0])
    rest = graph.nodes[place + len(nodes) :]
    return replace(
        graph, nodes=(*graph.nodes[:place], *draft.nodes, *rest), types=draft.types, constants=draft.constants
    )


class _StripeGraph(Record):
    """The graph of a segment in stripes, while it is made."""

    types: dict[str, TensorType]
    constants: dict[str, Array]
    nodes: list[Node]
    names: dict[RowBuffer, str]
    """The value of rows that lie together."""

    def add_part(self, graph: Graph, rows: Rows, end: str) -> str:
        """Add what computes some rows of a result from the inputs; returns their value."""
        cut = self._cut(graph, rows, end)
        self.nodes.extend(cut.nodes)
        return cut.outputs[0]

    def _cut(self, graph: Graph, rows: Rows, end: str) -> Graph:
        (result,) = graph.outputs
        cut = part(graph, {result: rows_box(graph.types[result].shape, rows)}, end)
        self.types.update({name: kind for name, kind in cut.types.items() if name not in cut.inputs})
        self.constants.update(cut.constants)
        return cut

    def compute(self, graph: Graph, step: StripeStep) -> str:
        """Add what computes a step of a region, and what keeps rows for it; returns the value of what is computed."""
        end = f" stripe {step.stripe} {step.index}"
        cut = self._cut(graph, step.rows, end)
        (output,) = cut.outputs
        places = {place.value: place for place, _ in step.reads}
        names = {value: self._name(place) for value, place in places.items()}
        kept = self._kept(step, end) if step.before is not None else None
        for node in cut.nodes:
            operator, source = node.operator, places.get(node.inputs[0])
            if source is not None and operator.box_read is not None:
                operator = operator.within(rows_box(self.types[source.value].shape, source.rows))
                if node.output != output and operator == _slice_of(full_box(self.types[self._name(source)].shape)):
                    names[node.output] = self._name(source)
                    continue
            self._add(operator, tuple(names.get(name, name) for name in node.inputs), node.output, node.origin)
        self.names[step.place] = output
        if kept is not None:
            operands = (kept, output) if step.kept < step.rows else (output, kept)
            self.names[step.place] = self._add(Concat(1), operands, f"{output} joined")
        return output

    def _kept(self, step: StripeStep, end: str) -> str:
        """Add a copy of the rows that are kept for a step; returns its value."""
        assert step.before is not None
        source = self._name(step.before)
        some = _slice_of(rows_box(self.types[source].shape, step.before.at(step.kept)))
        taken = self._add(some, (source,), f"{step.place.value}{end} before")
        return self._add(_slice_of(full_box(self.types[taken].shape)), (taken,), f"{step.place.value}{end} kept")

    def _name(self, place: RowBuffer) -> str:
        return self.names.get(place, place.value)

    def _add(self, operator: Operator, inputs: tuple[str, ...], output: str, origin: str = "") -> str:
        self.types[output] = operator.infer([self.types[name] for name in inputs])
        self.nodes.append(Node(operator, inputs, output, origin))
        return output


def _slice_of(box: Box) -> Slice:
    """The slice that takes a box of a value: a copy where that is all of it and it becomes part of another one."""
    return Slice(tuple(start for start, _ in box), tuple(stop for _, stop in box), (1,) * len(box))


class Segmentation(Record):
    """A network as segments, one behind the other."""

    segments: tuple[Segment, ...]
    macs: int
    peak: int
    """Bytes alive together at most, by estimate."""

    @property
    def order(self) -> tuple[int, int, int]:
        """The better choice has the lower one: fewer multiply-accumulates, then bytes kept, then stripes."""
        segments = self.segments
        return self.macs, sum(segment.copied for segment in segments), sum(len(segment.bands) for segment in segments)


@dataclass
class StripeSearch:
    """All ways to cut a network, searched exactly: what a segment costs does not depend on the others."""

    graph: Graph
    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        self.cuts = cuts(self.graph, self.regions)
        self._costs = SegmentCosts(self.graph, self.regions, self.cuts)
        self._segments = cache(self._every_segment)

    def within(self, budget: int, keeps: bool = True) -> Segmentation | None:
        """The fewest multiply-accumulates of all choices that need no more bytes than a budget; None if none does.
        Without `keeps`, of those that compute what stripes share in each of them."""
        best: list[dict[int, Segmentation]] = [{0: Segmentation((), 0, 0)}, *({} for _ in self.cuts[1:])]
        for first, starts in enumerate(best):
            for direction, before in starts.items():
                for last in range(first + 1, len(self.cuts)):
                    settled = {direction} if direction else set()
                    for segment in self._segments(first, last):
                        longer = Segmentation((*before.segments, segment), before.macs + segment.macs, before.peak)
                        known = best[last].get(segment.direction)
                        if segment.direction in settled or (known is not None and longer.order >= known.order):
                            continue
                        peak = budget + 1 if segment.keeps > keeps else self._costs.peak(segment)
                        if peak <= budget:
                            best[last][segment.direction] = replace(longer, peak=max(before.peak, peak))
                            settled.add(segment.direction)
        return min(best[-1].values(), key=lambda choice: choice.order, default=None)

    def smallest(self) -> Segmentation:
        """The choice of the fewest bytes, and of those with as few the one with the fewest multiply-accumulates."""
        least: list[dict[int, int]] = [{0: 0}, *({} for _ in self.cuts[1:])]
        for first, starts in enumerate(least):
            for direction, before in starts.items():
                for last in range(first + 1, len(self.cuts)):
                    ends = (self.cuts[place].value for place in (first, last))  # each is whole in its turn
                    most = max(self.graph.types[name].nbytes if name else 0 for name in ends)
                    for segment in self._segments(first, last):
                        known = least[last].get(segment.direction, 1 << 62)
                        if most < known and not (direction and segment.direction == direction):
                            peak = max(before, self._costs.peak(segment))
                            least[last][segment.direction] = min(known, peak)
        smallest = self.within(min(least[-1].values()))
        assert smallest is not None
        return smallest

    def steps(self, segment: Segment) -> tuple[StripeStep, ...]:
        """A segment in stripes, one region after the other."""
        return self._costs.steps(segment) or ()

    def _every_segment(self, first: int, last: int) -> Sequence[Segment]:
        """The ways to compute the regions between two cuts, the cheapest first."""
        segments = [*self._costs.striped(first, last), *([self._costs.whole(first)] if last == first + 1 else [])]
        return sorted(segments, key=lambda segment: (segment.macs, segment.copied, len(segment.bands)))


T = TypeVar("T")
_CLOSE = 4
"""Plans tried with a little less each, before less by half of what is missing."""


class Stripes(Record):
    """One segment computed in stripes."""

    layers: tuple[str, ...]
    """Names of the layers, as without stripes."""
    count: int
    """Number of stripes."""
    rows: int
    """Rows of the largest stripe of the last layer's result."""
    extra_macs: int
    """Multiply-accumulates more than without stripes."""
    keeps: bool
    """Whether rows that later stripes read too are kept, and not computed again."""


class StripedNetwork(Record):
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
        self._search = StripeSearch(self._graph, self._regions)

    def within(self, budget: int, keeps: bool = True) -> StripedNetwork | None:
        """The stripes with the fewest multiply-accumulates whose activations take no more than `budget` bytes, by
        estimate, be rows kept or only computed again; None where none do."""
        choice = self._search.within(budget, keeps)
        return None if choice is None else self._striped(choice)

    def whole(self) -> StripedNetwork:
        """The network without stripes."""
        network = self.within(1 << 62)
        assert network is not None
        return network

    def smallest(self) -> StripedNetwork:
        """The stripes with the smallest activations, by estimate."""
        return self._striped(self._search.smallest())

    def frontier(self) -> Iterator[StripedNetwork]:
        """From the network without stripes, with ever smaller activations and ever more to compute."""
        network: StripedNetwork | None = self.whole()
        while network is not None:
            yield network
            network = self.within(network.peak - 1)

    def _striped(self, choice: Segmentation) -> StripedNetwork:
        graph, stripes = self._graph, []
        for segment in choice.segments:
            if not segment.bands:
                continue
            start, end = (self._search.cuts[place] for place in (segment.first, segment.last))
            regions = self._regions[start.after : end.after]
            before = total_macs(graph)
            graph = striped(graph, regions, segment, self._search.steps(segment))
            rows = max(stop - first for first, stop in segment.bands)
            names = tuple(region.name for region in regions)
            stripes.append(Stripes(names, len(segment.bands), rows, total_macs(graph) - before, segment.keeps))
        return StripedNetwork(prune(graph), tuple(stripes), choice.peak)


class StripeLimit(Record):
    """The bytes that activations and stack may take."""

    nbytes: int
    stack: int
    """Bytes of these for the stacks."""
    name: str
    """Such as "the memory budget of 36864"."""
    others: int = 0
    """Bytes that something else takes in a memory whose size is the limit; 0 for a budget that was asked for."""
    memory: str = ""
    """That memory; empty for a budget that was asked for."""

    @property
    def room(self) -> int:
        """Bytes of activations."""
        return self.nbytes - self.stack

    def hint(self, need: int) -> str:
        """Words for who can give `need` bytes."""
        first = f"--set {self.memory}.size={need + self.others}" if self.memory else f"a budget of {need} bytes"
        return (
            f"{first}, less than {self.stack} bytes of stack (--set core.stack=1K), a smaller input, or fewer channels "
            "in the largest layers"
        )


def within(
    striping: Striping,
    limit: StripeLimit,
    whole: int,
    attempt: Callable[[StripedNetwork], tuple[T, int]],
    progress: Progress,
) -> tuple[T, StripedNetwork]:
    """A plan in stripes whose activations take no more than a limit, beside the stack.

    The search estimates, and a plan may need more where memory is in pieces. Then the search is given less.

    Args:
        striping: the network.
        limit: of activations and stack.
        whole: bytes of the plan without stripes, which are too many.
        attempt: makes a plan, and says its bytes.
        progress: told what is tried.

    Raises:
        PlanError: there is none; says how far away it is.
    """
    best = (whole, striping.whole())
    for keeps in (True, False):  # what is kept leaves memory in more pieces
        stripes, tries = striping.within(limit.room, keeps), 0
        while stripes is not None:
            progress(f"computing in stripes: {stripes.describe()}")
            plan, peak = attempt(stripes)
            if peak <= limit.room:
                return plan, stripes
            best = min(best, (peak, stripes), key=lambda known: known[0])
            tries += 1
            less = 1 if tries < _CLOSE else max(1, (peak - limit.room) // 2)
            stripes = striping.within(stripes.peak - less, keeps)
    smallest = striping.smallest()
    plan, peak = attempt(smallest)
    if peak <= limit.room:
        return plan, smallest
    peak, least = min(best, (peak, smallest), key=lambda known: known[0])
    need = peak + limit.stack
    raise PlanError(
        f"activations and stack need at least {need} bytes, {need - limit.nbytes} more than {limit.name}",
        where=f"the smallest plan ({least.describe()})"
        if least.stripes
        else "no stretch of this network can be cut into stripes",
        hint=limit.hint(need),
    )
