"""Segments: stretches of a network between two places where only one value is alive, and their costs in stripes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dovetail import kernels
from dovetail.ir.crop import ALIGNMENT, is_stretch, part, parts, reads_in_place
from dovetail.ir.graph import Graph
from dovetail.ir.types import TensorType, full_box
from dovetail.schedule.region import Region

Rows = tuple[int, int]
"""First row and one past the last."""


@dataclass(frozen=True)
class Band:
    """Some rows of a region's result."""

    reads: tuple[tuple[str, Rows], ...]
    """The rows of each operand."""
    macs: int
    plain: bool
    """Whether these are whole rows, which lie where they are."""


@dataclass
class Bands:
    """The bands of a network's regions, each worked out once."""

    graph: Graph
    regions: tuple[Region, ...]
    _known: dict[tuple[int, Rows], Band | None] = field(default_factory=dict)
    _replaced: dict[int, str | None] = field(default_factory=dict)

    def band(self, index: int, rows: Rows) -> Band | None:
        """Some rows of what a region computes; None where it cannot be computed so."""
        if (index, rows) not in self._known:
            self._known[index, rows] = _band(self.regions[index].graph, rows)
        return self._known[index, rows]

    def replaced(self, index: int) -> str | None:
        """The operand whose place a region's result could take."""
        if index not in self._replaced:
            graph = self.regions[index].graph
            free = self.regions[index].is_view is False and kernels.may_overwrite(graph)
            found = (value for value in graph.inputs if free and reads_in_place(graph, value))
            self._replaced[index] = next(found, None)
        return self._replaced[index]


def can_be_cut(kind: TensorType) -> bool:
    """True for one image, whose rows lie one behind the other."""
    return len(kind.shape) == 4 and kind.shape[0] == 1 and kind.shape[1] > 1 and kind.dtype.bits >= 8


def row_bytes(kind: TensorType) -> int:
    """Bytes of one row of an image."""
    return kind.nbytes // kind.shape[1]


def _band(graph: Graph, rows: Rows) -> Band | None:
    """Propagate a box of whole rows from the result to the operands; None where a rule refuses."""
    (output,) = graph.outputs
    if any(not can_be_cut(graph.types[name]) for name in (*graph.inputs, output)):
        return None
    whole = full_box(graph.types[output].shape)
    try:
        found, boxes = parts(graph, {output: (whole[0], rows, *whole[2:])})
    except ValueError:
        return None
    if any(start >= stop for name in graph.inputs for start, stop in boxes[name]):
        return None
    plain = all(boxes[name] == full_box(graph.types[name].shape) for name in graph.inputs) or rows != whole[1]
    if any(not is_stretch(boxes[name], graph.types[name].shape) for name in graph.inputs):
        cut = part(graph, {output: (whole[0], rows, *whole[2:])})
        reads = [(node.operator.box_read, node.inputs[0]) for node in cut.nodes if node.inputs[0] in graph.inputs]
        plain &= all(box is None or is_stretch(box, graph.types[name].shape) for box, name in reads)
    rows_read = tuple((name, boxes[name][1]) for name in graph.inputs)
    return Band(rows_read, sum(one.macs(graph) for one in found.values()), plain)


@dataclass(frozen=True)
class CutPoint:
    """A place in the order of regions where one value is all that later regions read."""

    after: int
    """How many regions come before."""
    value: str
    """Empty at the start of a network that reads several inputs."""
    held: int
    """Bytes of the network's outputs computed before."""


@dataclass(frozen=True)
class Segment:
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


@dataclass(frozen=True)
class RowBuffer:
    """Rows of a value that lie together."""

    value: str
    stripe: int
    """The stripe they are put together in; -1 for the first and the last value of a segment, which there are once."""
    rows: Rows

    def at(self, rows: Rows) -> Rows:
        """Rows of the value, counted from the first that lies here."""
        return rows[0] - self.rows[0], rows[1] - self.rows[0]


@dataclass(frozen=True)
class StripeStep:
    """Some rows of a region's result, computed in one stripe."""

    index: int
    """Of the region."""
    stripe: int
    rows: Rows
    """Those computed."""
    place: RowBuffer
    """Where they lie."""
    before: RowBuffer | None
    """Where rows that are kept have lain, which are first copied to `place`; None where none are."""
    reads: tuple[tuple[RowBuffer, Rows], ...]
    """Where the operands lie, and the rows of them."""
    macs: int

    @property
    def kept(self) -> Rows:
        """The rows copied."""
        first, last = self.place.rows
        return (first, self.rows[0]) if self.rows[0] > first else (self.rows[1], last)


def cuts(graph: Graph, regions: Sequence[Region]) -> list[CutPoint]:
    """All of them, in order; the last, behind all regions, stands for the network's end."""
    found: list[CutPoint] = []
    held = 0
    known = set(graph.inputs)
    for place, region in enumerate(regions):
        read = {value for later in regions[place:] for value in later.graph.inputs if value in known}
        if len(read) == 1 and read.isdisjoint(graph.outputs):
            found.append(CutPoint(place, min(read), held))
        known.add(region.output)
        held += graph.types[region.output].nbytes if region.output in graph.outputs else 0
    if not found or found[0].after:
        found.insert(0, CutPoint(0, "", 0))
    return [*found, CutPoint(len(regions), regions[-1].output, held)]


@dataclass
class SegmentCosts:
    """Segments and what they cost, each worked out once."""

    bands: Bands
    cuts: list[CutPoint]
    _peaks: dict[tuple[int, int, tuple[Rows, ...]], int] = field(default_factory=dict)

    def whole(self, first: int) -> Segment:
        """The segment from a cut to the next one, not cut."""
        return Segment(first, first + 1, (), sum(region.macs for region in self._between(first, first + 1)))

    def striped(self, first: int, last: int) -> Iterator[Segment]:
        """The segment between two cuts in every number of stripes that differs, from the top and from the bottom; none
        where it cannot be cut."""
        types = self.bands.graph.types
        if not self.cuts[first].value:
            return
        start, end = types[self.cuts[first].value], types[self.cuts[last].value]
        made = {region.output for region in self._between(first, last)}
        if not can_be_cut(start) or not can_be_cut(end) or not made.isdisjoint(self.bands.graph.outputs):
            return
        rows, heights = end.shape[1], dict.fromkeys(-(-end.shape[1] // n) for n in range(2, end.shape[1] + 1))
        once = sum(region.macs for region in self._between(first, last))
        for height in heights:
            down = tuple((top, min(top + height, rows)) for top in range(0, rows, height))
            up = tuple((max(bottom - height, 0), bottom) for bottom in range(rows, 0, -height))
            for bands in (down, up):
                again = self._counted(Segment(first, last, bands, 0))
                if again is not None:
                    yield again
                if again is not None and again.macs > once:
                    kept = self._counted(replace(again, keeps=True))
                    if kept is not None:
                        yield kept

    def _counted(self, segment: Segment) -> Segment | None:
        """The segment with its multiply-accumulates; None where it cannot be cut so."""
        steps, sizes = self.steps(segment), self._row_sizes(segment)
        for step in steps or ():
            parts = [(step.place, step.rows), (step.place, step.kept), *step.reads]
            fixed = [part for part in parts if segment.keeps or part[0].stripe < 0]
            if any(place.at(rows)[0] * sizes[place.value] % ALIGNMENT for place, rows in fixed):
                return None
        if not steps:
            return None
        kept = ((step.kept[1] - step.kept[0]) * sizes[step.place.value] for step in steps if step.before)
        return replace(segment, macs=sum(step.macs for step in steps), copied=sum(kept))

    def _row_sizes(self, segment: Segment) -> dict[str, int]:
        """Bytes of a row of each value of a segment."""
        values = [self.cuts[segment.first].value, *(r.output for r in self._between(segment.first, segment.last))]
        return {value: row_bytes(self.bands.graph.types[value]) for value in values}

    def steps(self, segment: Segment) -> tuple[StripeStep, ...] | None:
        """A segment in stripes, one region after the other; None where it cannot be cut so."""
        stripes = self._stripes(segment)
        if stripes is None:
            return None
        types, found = self.bands.graph.types, list[StripeStep]()
        ends = {self.cuts[place].value for place in (segment.first, segment.last)}
        places = {value: RowBuffer(value, -1, (0, types[value].shape[1])) for value in ends}
        for number, (made, needed) in enumerate(stripes):
            for index in range(self.cuts[segment.first].after, self.cuts[segment.last].after):
                value = self.bands.regions[index].output
                if value not in made:
                    continue
                rows, before = made[value], None
                band = self.bands.band(index, rows)
                assert band is not None
                reads = tuple((places[name], read) for name, read in band.reads)
                if value not in ends:
                    held = _hull(rows, needed[value]) if segment.keeps else rows
                    held = (held[0], rows[1]) if segment.direction > 0 else (rows[0], held[1])
                    before = places[value] if held != rows else None
                    places[value] = RowBuffer(value, number, held)
                found.append(StripeStep(index, number, rows, places[value], before, reads, band.macs))
        return tuple(found)

    def _stripes(self, segment: Segment) -> list[tuple[Mapping[str, Rows], dict[str, Rows]]] | None:
        """For each stripe the rows of every value that are computed in it, and those that it and later ones read; None
        where it cannot be cut so."""
        found: list[tuple[Mapping[str, Rows], dict[str, Rows]]] = []
        done: dict[str, Rows] = {}
        for band in segment.bands:
            stripe = self._stripe(segment, band, done)
            if stripe is None:
                return None
            found.append(stripe)
            if segment.keeps:
                done |= {value: _hull(rows, done.get(value, rows)) for value, rows in stripe[0].items()}
        later: dict[str, Rows] = {}
        for _, needed in reversed(found):
            later |= {value: _hull(rows, later.get(value, rows)) for value, rows in needed.items()}
            needed.update(later)
        return found

    def _stripe(
        self, segment: Segment, band: Rows, done: Mapping[str, Rows]
    ) -> tuple[dict[str, Rows], dict[str, Rows]] | None:
        """The rows of every value that a band of the last one needs computed, and those it reads; None where it cannot
        be cut.

        Args:
            done: rows of values that are there already, up to where this stripe goes on.
        """
        needed: dict[str, Rows] = {self.cuts[segment.last].value: band}
        made: dict[str, Rows] = {}
        for index in reversed(range(self.cuts[segment.first].after, self.cuts[segment.last].after)):
            value = self.bands.regions[index].output
            rows = needed.get(value, (0, 0))
            if value in done:
                first, last = done[value]
                if (rows[0] < first if segment.direction > 0 else rows[1] > last) and rows[0] < rows[1]:
                    return None  # rows that were not computed when it was their turn
                rows = (last, rows[1]) if segment.direction > 0 else (rows[0], first)
            if rows[0] >= rows[1]:
                continue
            found = self.bands.band(index, rows)
            if found is None or (segment.keeps and not found.plain):
                return None
            made[value] = rows
            for name, read in found.reads:
                needed[name] = _hull(read, needed.get(name, read))
        return made, needed

    def peak(self, segment: Segment) -> int:
        """Bytes alive together at most while a segment is computed, as if memory were never in pieces."""
        key = (segment.first, segment.last, segment.bands)
        if key not in self._peaks:
            found = self._striped_peak(segment) if segment.bands else self._whole_peak(segment)
            self._peaks[key] = found + self.cuts[segment.first].held
        return self._peaks[key]

    def _whole_peak(self, segment: Segment) -> int:
        types, place = self.bands.graph.types, self.cuts[segment.first]
        regions = self._between(segment.first, segment.last)
        last = {value: index for index, region in enumerate(regions) for value in region.graph.inputs}
        names = {region.output: region.graph.inputs[0] for region in regions if region.is_view}
        for value, source in reversed(names.items()):
            last[source] = max(last[source], last.get(value, -1))
        alive = dict.fromkeys([place.value] if place.value else [])
        alive.update(dict.fromkeys(self.bands.graph.inputs if segment.first == 0 else ()))
        most = sum(types[value].nbytes for value in alive)
        for index, region in enumerate(regions):
            if region.is_view:
                continue
            over = self.bands.replaced(place.after + index)
            total = sum(types[value].nbytes for value in (*alive, region.output))
            most = max(most, total - (types[region.output].nbytes if over and last[over] == index else 0))
            alive[region.output] = None
            alive = {value: None for value in alive if last.get(value, -1) > index or value in self.bands.graph.outputs}
        return most

    def _striped_peak(self, segment: Segment) -> int:
        """From the end: rows are alive from when they are computed to when they are read for the last time; those of
        the first value from the beginning, those of the last one to the end."""
        types, steps = self.bands.graph.types, self.steps(segment)
        assert steps is not None
        source, result = (types[self.cuts[place].value] for place in (segment.first, segment.last))
        size = self._row_sizes(segment)
        joints = {step.place for step in steps if step.before is not None}
        wanted: dict[RowBuffer, int] = defaultdict(int)
        wanted[steps[-1].place] = _rows((0, result.shape[1]))
        held, most = result.nbytes, source.nbytes
        for step in reversed(steps):
            reads = {place: _rows(rows) for place, rows in step.reads}
            takes = any(
                place.value == self.bands.replaced(step.index) and read == _rows(place.rows) and not wanted[place]
                for place, read in reads.items()
                if min(place.stripe, step.place.stripe) >= 0 and joints.isdisjoint((place, step.place))
            )
            copied = _rows(step.kept)
            moves = [(reads, _rows(step.rows), takes)]
            moves += [({step.before: copied}, copied, False)] if step.before is not None else []
            for read, made, saves in moves:
                fresh = made & ~wanted[step.place]
                more = {place: rows & ~wanted[place] for place, rows in read.items()}
                held += sum(rows.bit_count() * size[place.value] for place, rows in more.items())
                own = size[step.place.value]
                most = max(most, held + fresh.bit_count() * own - (made.bit_count() * own if saves else 0))
                for place, rows in more.items():
                    wanted[place] |= rows
                held -= (wanted[step.place] & made).bit_count() * own
                wanted[step.place] &= ~made
        return most

    def _between(self, first: int, last: int) -> tuple[Region, ...]:
        return self.bands.regions[self.cuts[first].after : self.cuts[last].after]


def _hull(a: Rows, b: Rows) -> Rows:
    return min(a[0], b[0]), max(a[1], b[1])


def _rows(rows: Rows) -> int:
    """Rows as bits."""
    return (1 << rows[1]) - (1 << rows[0])
