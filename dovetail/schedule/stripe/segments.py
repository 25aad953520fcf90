"""Segments: stretches of a network between two places where only one value is alive, and their costs in stripes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from dovetail import kernels
from dovetail.ir.crop import ALIGNMENT, is_stretch, part, parts, reads_in_place
from dovetail.ir.graph import Graph
from dovetail.ir.types import Box, Shape, TensorType, full_box, with_span
from dovetail.records import Record
from dovetail.schedule.region import Region

Rows = tuple[int, int]
"""First row and one past the last."""
RowsByValue = dict[str, Rows]


class Band(Record):
    """Some rows of a region's result."""

    reads: tuple[tuple[str, Rows], ...]
    """The rows of each operand."""
    macs: int
    plain: bool
    """Whether these are whole rows, which lie where they are."""


def rows_box(shape: Shape, rows: Rows) -> Box:
    """Some rows of an image."""
    return with_span(full_box(shape), 1, rows)


def can_be_cut(kind: TensorType) -> bool:
    """True for one image, whose rows lie one behind the other."""
    return len(kind.shape) == 4 and kind.shape[0] == 1 and kind.shape[1] > 1 and kind.dtype.bits >= 8


def row_bytes(kind: TensorType) -> int:
    """Bytes of one row of an image."""
    return kind.nbytes // kind.shape[1]


def _band(graph: Graph, rows: Rows) -> Band | None:
    """Some rows of a region's result, propagated to the operands; None where it cannot be computed so."""
    (output,), types = graph.outputs, graph.types
    if any(not can_be_cut(types[name]) for name in (*graph.inputs, output)):
        return None
    wanted = {output: rows_box(types[output].shape, rows)}
    try:
        nodes, boxes = parts(graph, wanted)
    except ValueError:
        return None
    if any(start >= stop for name in graph.inputs for start, stop in boxes[name]):
        return None
    plain = rows != (0, types[output].shape[1])
    plain |= all(boxes[name] == full_box(types[name].shape) for name in graph.inputs)
    if any(not is_stretch(boxes[name], types[name].shape) for name in graph.inputs):
        cut = part(graph, wanted)
        reads = [(node.operator.box_read, node.inputs[0]) for node in cut.nodes if node.inputs[0] in graph.inputs]
        plain &= all(box is None or is_stretch(box, types[name].shape) for box, name in reads)
    rows_read = tuple((name, boxes[name][1]) for name in graph.inputs)
    return Band(rows_read, sum(one.macs(graph) for one in nodes.values()), plain)


class CutPoint(Record):
    """A place in the order of regions where one value is all that later regions read."""

    after: int
    """Number of regions before it."""
    value: str
    """Empty at the start of a network that reads several inputs."""
    held: int
    """Bytes of the network's outputs computed before."""


class Segment(Record):
    """The regions between two cuts, computed in stripes of some height; whole with one stripe."""

    first: int
    """Index of the cut it starts from."""
    last: int
    bands: tuple[Rows, ...]
    """The rows of the last value each stripe computes, in the order of computation; empty for one that is not cut."""
    macs: int
    """Multiply-accumulates, what is computed in several stripes counted in each."""
    keeps: bool = False
    """Whether rows that later stripes read too are kept for them; else these compute them again."""
    copied: int = 0
    """Bytes of all rows that are kept, of each stripe anew."""

    @property
    def direction(self) -> int:
        """1 for stripes from the top to the bottom, -1 for the other way, 0 without stripes.

        From the top, the first value's rows become free at its lower addresses first, so that the result, which grows
        there, is best placed below it; from the bottom, above it. Segments one behind the other therefore alternate,
        else each result would need room beyond the one before.
        """
        return 0 if not self.bands else 1 if self.bands[0][0] == 0 else -1


class RowBuffer(Record):
    """Rows of a value that lie together."""

    value: str
    stripe: int
    """The stripe they are put together in; -1 for the first and the last value of a segment, which there are once."""
    rows: Rows

    def at(self, rows: Rows) -> Rows:
        """Rows of the value, counted from the first that lies here."""
        return rows[0] - self.rows[0], rows[1] - self.rows[0]


class StripeStep(Record):
    """Some rows of a region's result, computed in one stripe."""

    index: int
    """Index of the region."""
    stripe: int
    rows: Rows
    """The rows computed."""
    place: RowBuffer
    """The buffer they are computed to."""
    before: RowBuffer | None
    """The buffer from which rows that are kept are first copied to `place`; None where none are."""
    reads: tuple[tuple[RowBuffer, Rows], ...]
    """The buffers of the operands, and the rows read."""
    macs: int

    @property
    def kept(self) -> Rows:
        """The rows copied."""
        first, last = self.place.rows
        return (first, self.rows[0]) if self.rows[0] > first else (self.rows[1], last)


def cuts(graph: Graph, regions: Sequence[Region]) -> list[CutPoint]:
    """All cuts, in order; the last, behind all regions, stands for the network's end."""
    places: list[CutPoint] = []
    held, known = 0, set(graph.inputs)
    for place, region in enumerate(regions):
        read = {value for later in regions[place:] for value in later.graph.inputs if value in known}
        if len(read) == 1 and read.isdisjoint(graph.outputs):
            places.append(CutPoint(place, min(read), held))
        known.add(region.output)
        held += graph.types[region.output].nbytes if region.output in graph.outputs else 0
    if not places or places[0].after:
        places.insert(0, CutPoint(0, "", 0))
    return [*places, CutPoint(len(regions), regions[-1].output, held)]


class SegmentCosts:
    """Segments and their costs, each worked out once."""

    def __init__(self, graph: Graph, regions: Sequence[Region], cuts: Sequence[CutPoint]) -> None:
        self.graph, self.regions, self.cuts = graph, regions, cuts
        self.band = cache(lambda index, rows: _band(regions[index].graph, rows))
        self.replaced = cache(lambda index: _replaced(regions[index]))
        self._peaks: dict[tuple[int, int, tuple[Rows, ...]], int] = {}
        """By the ends of a segment and its bands, whether rows are kept or not."""

    def whole(self, first: int) -> Segment:
        """The segment from a cut to the next one, not cut."""
        return Segment(first, first + 1, (), sum(region.macs for region in self._between(first, first + 1)))

    def striped(self, first: int, last: int) -> Iterator[Segment]:
        """The segment between two cuts in every number of stripes that differs, from the top and from the bottom; none
        where it cannot be cut."""
        types = self.graph.types
        if not self.cuts[first].value:
            return
        start, end = types[self.cuts[first].value], types[self.cuts[last].value]
        regions = self._between(first, last)
        inner = {region.output for region in regions}
        if not can_be_cut(start) or not can_be_cut(end) or not inner.isdisjoint(self.graph.outputs):
            return
        rows, once = end.shape[1], sum(region.macs for region in regions)
        for height in dict.fromkeys(-(-rows // count) for count in range(2, rows + 1)):
            down = tuple((top, min(top + height, rows)) for top in range(0, rows, height))
            up = tuple((max(bottom - height, 0), bottom) for bottom in range(rows, 0, -height))
            for bands in (down, up):
                again = self._counted(Segment(first, last, bands, 0))
                if again is None:
                    continue
                yield again
                if again.macs > once and (kept := self._counted(replace(again, keeps=True))) is not None:
                    yield kept

    def _counted(self, segment: Segment) -> Segment | None:
        """The segment with its multiply-accumulates; None where it cannot be cut so."""
        steps = self.steps(segment)
        if not steps:
            return None
        for step in steps:
            for place, rows in ((step.place, step.rows), (step.place, step.kept), *step.reads):
                is_fixed = segment.keeps or place.stripe < 0
                if is_fixed and place.at(rows)[0] * self._row_bytes(place) % ALIGNMENT:
                    return None
        kept = ((step.kept[1] - step.kept[0]) * self._row_bytes(step.place) for step in steps if step.before)
        return replace(segment, macs=sum(step.macs for step in steps), copied=sum(kept))

    def _row_bytes(self, place: RowBuffer) -> int:
        return row_bytes(self.graph.types[place.value])

    def steps(self, segment: Segment) -> tuple[StripeStep, ...] | None:
        """A segment in stripes, one region after the other; None where it cannot be cut so."""
        stripes = self._stripes(segment)
        if stripes is None:
            return None
        steps: list[StripeStep] = []
        ends = {self.cuts[place].value for place in (segment.first, segment.last)}
        places = {value: RowBuffer(value, -1, (0, self.graph.types[value].shape[1])) for value in ends}
        for number, (computed, needed) in enumerate(stripes):
            for index in self._indices(segment):
                value = self.regions[index].output
                if value not in computed:
                    continue
                rows, before = computed[value], None
                band = self.band(index, rows)
                assert band is not None
                reads = tuple((places[name], read) for name, read in band.reads)
                if value not in ends:
                    held = _hull(rows, needed[value]) if segment.keeps else rows
                    held = (held[0], rows[1]) if segment.direction > 0 else (rows[0], held[1])
                    before = places[value] if held != rows else None
                    places[value] = RowBuffer(value, number, held)
                steps.append(StripeStep(index, number, rows, places[value], before, reads, band.macs))
        return tuple(steps)

    def _stripes(self, segment: Segment) -> list[tuple[RowsByValue, RowsByValue]] | None:
        """For each stripe the rows of every value that are computed in it, and the rows that it and later ones read;
        None where it cannot be cut so."""
        stripes: list[tuple[RowsByValue, RowsByValue]] = []
        done: RowsByValue = {}
        for band in segment.bands:
            stripe = self._stripe(segment, band, done)
            if stripe is None:
                return None
            stripes.append(stripe)
            if segment.keeps:
                done |= {value: _hull(rows, done.get(value, rows)) for value, rows in stripe[0].items()}
        later: RowsByValue = {}
        for _, needed in reversed(stripes):
            later |= {value: _hull(rows, later.get(value, rows)) for value, rows in needed.items()}
            needed.update(later)
        return stripes

    def _stripe(self, segment: Segment, band: Rows, done: Mapping[str, Rows]) -> tuple[RowsByValue, RowsByValue] | None:
        """The rows of every value that a band of the last one needs computed, and the rows it reads; None where it
        cannot be cut.

        Args:
            done: rows of values that are there already, up to where this stripe goes on.
        """
        needed: RowsByValue = {self.cuts[segment.last].value: band}
        computed: RowsByValue = {}
        for index in reversed(self._indices(segment)):
            value = self.regions[index].output
            rows = needed.get(value, (0, 0))
            if value in done:
                first, last = done[value]
                if (rows[0] < first if segment.direction > 0 else rows[1] > last) and rows[0] < rows[1]:
                    return None  # rows that were not computed when it was their turn
                rows = (last, rows[1]) if segment.direction > 0 else (rows[0], first)
            if rows[0] >= rows[1]:
                continue
            own = self.band(index, rows)
            if own is None or (segment.keeps and not own.plain):
                return None
            computed[value] = rows
            for name, read in own.reads:
                needed[name] = _hull(read, needed.get(name, read))
        return computed, needed

    def peak(self, segment: Segment) -> int:
        """Bytes alive together at most while a segment is computed, as if memory were never in pieces."""
        key = (segment.first, segment.last, segment.bands)
        if key not in self._peaks:
            self._peaks[key] = self._striped_peak(segment) if segment.bands else self._whole_peak(segment)
        return self._peaks[key] + self.cuts[segment.first].held

    def _whole_peak(self, segment: Segment) -> int:
        types, place = self.graph.types, self.cuts[segment.first]
        regions = self._between(segment.first, segment.last)
        last = {value: index for index, region in enumerate(regions) for value in region.graph.inputs}
        names = {region.output: region.graph.inputs[0] for region in regions if region.is_view}
        for value, source in reversed(names.items()):
            last[source] = max(last[source], last.get(value, -1))
        alive = dict.fromkeys([place.value] if place.value else [])
        alive.update(dict.fromkeys(self.graph.inputs if segment.first == 0 else ()))
        most = sum(types[value].nbytes for value in alive)
        for index, region in enumerate(regions):
            if region.is_view:
                continue
            over = self.replaced(place.after + index)
            total = sum(types[value].nbytes for value in (*alive, region.output))
            most = max(most, total - (types[region.output].nbytes if over and last[over] == index else 0))
            alive[region.output] = None
            alive = {value: None for value in alive if last.get(value, -1) > index or value in self.graph.outputs}
        return most

    def _striped_peak(self, segment: Segment) -> int:
        """From the end: rows are alive from when they are computed to when they are read for the last time; those of
        the first value from the beginning, those of the last one to the end."""
        types, steps = self.graph.types, self.steps(segment)
        assert steps is not None
        source, result = (types[self.cuts[place].value] for place in (segment.first, segment.last))
        joints = {step.place for step in steps if step.before is not None}
        wanted: dict[RowBuffer, int] = defaultdict(int)
        wanted[steps[-1].place] = _bits((0, result.shape[1]))
        held, most = result.nbytes, source.nbytes
        for step in reversed(steps):
            reads = {place: _bits(rows) for place, rows in step.reads}
            takes = any(
                place.value == self.replaced(step.index) and read == _bits(place.rows) and not wanted[place]
                for place, read in reads.items()
                if min(place.stripe, step.place.stripe) >= 0 and joints.isdisjoint((place, step.place))
            )
            copied, size = _bits(step.kept), self._row_bytes(step.place)
            moves = [(reads, _bits(step.rows), takes)]
            moves += [({step.before: copied}, copied, False)] if step.before is not None else []
            for read, computed, saves in moves:
                fresh = computed & ~wanted[step.place]
                more = {place: rows & ~wanted[place] for place, rows in read.items()}
                held += sum(rows.bit_count() * self._row_bytes(place) for place, rows in more.items())
                most = max(most, held + fresh.bit_count() * size - (computed.bit_count() * size if saves else 0))
                for place, rows in more.items():
                    wanted[place] |= rows
                held -= (wanted[step.place] & computed).bit_count() * size
                wanted[step.place] &= ~computed
        return most

    def _indices(self, segment: Segment) -> range:
        return range(self.cuts[segment.first].after, self.cuts[segment.last].after)

    def _between(self, first: int, last: int) -> Sequence[Region]:
        return self.regions[self.cuts[first].after : self.cuts[last].after]


def _replaced(region: Region) -> str | None:
    """The operand whose place a region's result could take."""
    graph = region.graph
    if region.is_view or not kernels.may_overwrite(graph):
        return None
    return next((value for value in graph.inputs if reads_in_place(graph, value)), None)


def _hull(a: Rows, b: Rows) -> Rows:
    return min(a[0], b[0]), max(a[1], b[1])


def _bits(rows: Rows) -> int:
    """Rows as bits."""
    return (1 << rows[1]) - (1 << rows[0])
