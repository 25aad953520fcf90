"""Segments: stretches of a network between two places where only one value is alive, and their costs in stripes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dovetail import kernels
from dovetail.ir.crop import ALIGNMENT, parts, reads_in_place
from dovetail.ir.graph import Graph
from dovetail.ir.types import TensorType, full_box
from dovetail.schedule.partition import Region

Rows = tuple[int, int]
"""First row and one past the last."""


@dataclass(frozen=True)
class Band:
    """Some rows of a region's result."""

    reads: tuple[tuple[str, Rows], ...]
    """The rows of each operand."""
    macs: int


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
    return Band(tuple((name, boxes[name][1]) for name in graph.inputs), sum(one.macs(graph) for one in found.values()))


@dataclass(frozen=True)
class Cut:
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

    @property
    def direction(self) -> int:
        """1 for stripes from the top to the bottom, -1 for the other way, 0 without stripes.

        From the top, the first value's rows become free at its lower addresses first, so that the result, which grows
        there, is best placed below it; from the bottom, above it. Segments one behind the other therefore alternate,
        else each result would need room beyond the one before.
        """
        return 0 if not self.bands else 1 if self.bands[0][0] == 0 else -1


def cuts(graph: Graph, regions: Sequence[Region]) -> list[Cut]:
    """All of them, in order; the last, behind all regions, stands for the network's end."""
    found: list[Cut] = []
    held = 0
    known = set(graph.inputs)
    for place, region in enumerate(regions):
        read = {value for later in regions[place:] for value in later.graph.inputs if value in known}
        if len(read) == 1 and read.isdisjoint(graph.outputs):
            found.append(Cut(place, min(read), held))
        known.add(region.output)
        held += graph.types[region.output].nbytes if region.output in graph.outputs else 0
    if not found or found[0].after:
        found.insert(0, Cut(0, "", 0))
    return [*found, Cut(len(regions), regions[-1].output, held)]


@dataclass
class Costs:
    """Segments and what they cost, each worked out once."""

    bands: Bands
    cuts: list[Cut]
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
        for height in heights:
            down = tuple((top, min(top + height, rows)) for top in range(0, rows, height))
            up = tuple((max(bottom - height, 0), bottom) for bottom in range(rows, 0, -height))
            for bands in (down, up):
                total = self._macs(first, last, bands)
                if total is not None:
                    yield Segment(first, last, bands, total)

    def _macs(self, first: int, last: int, bands: Sequence[Rows]) -> int | None:
        """Multiply-accumulates of a segment in stripes; None where it cannot be cut so."""
        source, result = (self.cuts[place].value for place in (first, last))
        start, end = (row_bytes(self.bands.graph.types[value]) for value in (source, result))
        total = 0
        for band in bands:
            needs = self.needs(first, last, band)
            if needs is None or needs[source][0] * start % ALIGNMENT or band[0] * end % ALIGNMENT:
                return None
            for region in range(self.cuts[first].after, self.cuts[last].after):
                found = self.bands.band(region, needs[self.bands.regions[region].output])
                assert found is not None
                total += found.macs
        return total

    def needs(self, first: int, last: int, band: Rows) -> dict[str, Rows] | None:
        """The rows of every value of a segment that a band of its result needs; None where it cannot be cut."""
        needs: dict[str, Rows] = {self.cuts[last].value: band}
        for index in reversed(range(self.cuts[first].after, self.cuts[last].after)):
            found = self.bands.band(index, needs[self.bands.regions[index].output])
            if found is None:
                return None
            for name, rows in found.reads:
                known = needs.get(name, rows)
                needs[name] = (min(known[0], rows[0]), max(known[1], rows[1]))
        return needs

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
        """Rows of the first value die when their last stripe has read them, those of the last one are born in turn."""
        types, source = self.bands.graph.types, self.cuts[segment.first].value
        result, start = self.cuts[segment.last].value, self.cuts[segment.first].after
        regions = self._between(segment.first, segment.last)
        size = {region.output: row_bytes(types[region.output]) for region in regions}
        readers = {value: index for index, region in enumerate(regions) for value in region.graph.inputs}
        steps: list[tuple[int, Rows | None]] = []
        done = 0
        for band in segment.bands:
            needs = self.needs(segment.first, segment.last, band)
            assert needs is not None
            alive: dict[str, int] = {}
            for index, region in enumerate(regions):
                rows = needs[region.output]
                made = size[region.output] * (rows[1] - rows[0])
                over, own = self.bands.replaced(start + index), self.bands.band(start + index, rows)
                dies = over is not None and readers[over] == index and alive.get(over) == made
                saved = made if dies and region.output != result else 0
                assert own is not None
                held = sum(alive.values()) + size[result] * done + made - saved
                steps.append((held, dict(own.reads).get(source)))
                alive[region.output] = made
                alive = {value: most for value, most in alive.items() if readers.get(value, -1) > index}
            done += band[1] - band[0]
        return _most(steps, types[source].shape[1], row_bytes(types[source]))

    def _between(self, first: int, last: int) -> tuple[Region, ...]:
        return self.bands.regions[self.cuts[first].after : self.cuts[last].after]


def _most(steps: Sequence[tuple[int, Rows | None]], rows: int, size: int) -> int:
    """The most bytes in use: each step's own and the rows of the source some later step reads, or it itself.

    Args:
        steps: bytes of everything else, and the rows of the source read.
        rows: of the source.
        size: bytes of one of them.
    """
    most, wanted = 0, [False] * rows
    for held, read in reversed(steps):
        if read is not None:
            wanted[read[0] : read[1]] = [True] * (read[1] - read[0])
        most = max(most, held + size * sum(wanted))
    return max(most, size * rows)
