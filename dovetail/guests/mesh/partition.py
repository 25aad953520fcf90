"""Cuts a network into pieces, one for each element, so that all of it is resident: a cut for each layer, for the least
time, or in slabs of rows that share chips.

Slabs: layers stand in groups, their images in slabs of rows, and a slab of all layers of a group shares chips. Chips
then exchange little more than the borders of slabs, at the price of weights held once per slab. How many slabs, on how
many chips each, is chosen for all groups together by dynamic programming over chips.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.guests.mesh.cuts import (
    Cut,
    CutCosts,
    Frontier,
    PieceSizes,
    bounds,
    costs_of,
    frontier,
    grain,
    part_counts,
)
from dovetail.guests.mesh.layers import INPUT, Ints, MeshLayer, OperandRead, box_of
from dovetail.guests.mesh.topology import Topology
from dovetail.ir.types import Array, Box, TensorType, box_shape, box_slices
from dovetail.records import Record, field
from dovetail.target.mesh import Mesh


class Objective(enum.StrEnum):
    """The time that cuts are chosen for."""

    LATENCY = "latency"
    """The time one input takes."""
    THROUGHPUT = "throughput"
    """The time between inputs of a stream."""


def choose(frontiers: Sequence[Frontier], elements: int, objective: Objective) -> list[Cut] | None:
    """A cut for each layer; None where even the fewest pieces are too many.

    The time between inputs is that of the slowest piece: the least time for which enough elements are there, by
    bisection. The time of one input is the sum over layers: the least sum of clocks and a price for each piece, by
    bisection of the price.
    """

    def fits(picks: Sequence[int]) -> bool:
        return sum(int(one.pieces[pick]) for one, pick in zip(frontiers, picks, strict=True)) <= elements

    def within(clocks: int) -> list[int]:
        """Per layer the cut of fewest pieces that takes no longer."""
        return [int(np.searchsorted(-one.clocks, -clocks)) for one in frontiers]

    def cheapest(price: float) -> list[int]:
        return [int(np.argmin(one.clocks + price * one.pieces)) for one in frontiers]

    if any(not one.cuts for one in frontiers) or not fits([0] * len(frontiers)):
        return None
    if objective is Objective.THROUGHPUT:
        times = np.unique(np.concatenate([one.clocks for one in frontiers]))
        times = times[times >= max(int(one.clocks[-1]) for one in frontiers)].tolist()
        picks = within(times[bisect_left(times, True, hi=len(times) - 1, key=lambda clocks: fits(within(clocks)))])
    else:
        low, high = 0.0, float(max(one.clocks[0] for one in frontiers)) + 1
        for _ in range(40):
            price = (low + high) / 2
            low, high = (low, price) if fits(cheapest(price)) else (price, high)
        picks = cheapest(high)
    return [one.cuts[pick] for one, pick in zip(frontiers, picks, strict=True)]


def clocks_of(frontiers: Sequence[Frontier], cuts: Sequence[Cut], objective: Objective) -> float:
    """Clocks of a choice: of the slowest piece, or of all layers one after the other."""
    clocks = [int(one.clocks[one.cuts.index(cut)]) for one, cut in zip(frontiers, cuts, strict=True)]
    return float(max(clocks) if objective is Objective.THROUGHPUT else sum(clocks))


_OWN_SHARE = 0.5
"""Share of a link its neighbours' exchange is given when slabs are chosen: routes of others pass it too."""


class SlabGroup(Record):
    """Consecutive layers whose images are cut into the same slabs."""

    first: int
    last: int
    """One beyond."""
    slabs: int
    chips: int
    """Chips of each slab."""


def _height(layer: MeshLayer) -> int:
    """Rows it can be cut into."""
    return layer.image[0] if layer.cuttable[0] else 1


class SlabSearch(Record):
    """Chooses the groups of a network's layers and a cut for each layer."""

    layers: Sequence[MeshLayer]
    slots: Sequence[tuple[int, ...]]
    """Per layer, inputs' worth of each operand a piece holds."""
    mesh: Mesh
    chips: int
    capacity: int
    """Elements each chip has at least."""
    objective: Objective
    _frontiers: dict[tuple[int, int], Frontier] = field(default_factory=dict)

    @property
    def _join(self) -> np.ufunc:
        """Combines the times of groups, or of a group and its links."""
        return np.maximum if self.objective is Objective.THROUGHPUT else np.add

    def run(self) -> tuple[tuple[SlabGroup, ...], list[Cut]] | None:
        """Groups and cuts of the least time; None where there are none."""
        heights = list(map(_height, self.layers))
        starts = [index for index, height in enumerate(heights) if index == 0 or height != heights[index - 1]]
        groups = self._best([*starts, len(heights)])
        if groups is None:
            return None
        cuts: list[Cut] = []
        for group in groups:
            frontiers = [self._frontier(index, group.slabs) for index in range(group.first, group.last)]
            chosen = choose(frontiers, self.capacity * group.chips, self.objective) or ()
            rows = zip(chosen, heights[group.first : group.last], strict=True)
            cuts += [replace(cut, rows=min(cut.rows * group.slabs, height)) for cut, height in rows]
        return tuple(groups), cuts

    def _frontier(self, index: int, slabs: int) -> Frontier:
        """The cuts of a slab of a layer."""
        if (index, slabs) not in self._frontiers:
            height, width, channels = self.layers[index].image
            part = replace(self.layers[index], image=(-(-height // slabs), width, channels))
            most = self.capacity * self.chips
            self._frontiers[index, slabs] = frontier(part, self.mesh, self.slots[index], most)
        return self._frontiers[index, slabs]

    def _options(self, first: int, last: int) -> list[tuple[SlabGroup, float]]:
        """Ways to compute some layers together, numbers of slabs and of chips for each, and their clocks."""
        counts = part_counts(min(map(_height, self.layers[first:last])))
        crossing, options = _Crossing(self.layers, first, last, self.mesh), []
        for slabs in counts[counts <= self.chips].tolist():
            frontiers = [self._frontier(index, slabs) for index in range(first, last)]
            for each in _spread_numbers(self.chips // slabs):
                cuts = choose(frontiers, self.capacity * each, self.objective)
                if cuts is not None:
                    clocks, links = clocks_of(frontiers, cuts, self.objective), crossing.clocks(slabs, each, self.chips)
                    options.append((SlabGroup(first, last, slabs, each), self._join(clocks, links)))
        return options

    def _best(self, runs: Sequence[int]) -> list[SlabGroup] | None:
        """The best groups for runs of layers of equal height, which begin at `runs`, on no more than all chips.

        For each number of runs and of chips the least time is known; another group of runs goes behind.
        """
        count, chips = len(runs) - 1, self.chips
        times: NDArray[np.float64] = np.full((count + 1, chips + 1), np.inf)
        times[0] = 0
        back: dict[tuple[int, int], tuple[int, SlabGroup]] = {}
        for end in range(1, count + 1):
            for begin in range(end):
                for group, clocks in self._options(runs[begin], runs[end]):
                    used = group.slabs * group.chips
                    after = self._join(times[begin, : chips + 1 - used], clocks)
                    better = np.nonzero(after < times[end, used:])[0]
                    times[end, used + better] = after[better]
                    back.update(((end, used + place), (begin, group)) for place in better.tolist())
        if not np.isfinite(times[count, chips]):
            return None
        place, left, groups = count, int(times[count].argmin()), []
        while place:
            place, group = back[place, left]
            groups.append(group)
            left -= group.slabs * group.chips
        return groups[::-1]


class _Crossing:
    """About how long the links between chips are held for some layers, before anything is placed.

    Three things cross: operands from layers before (over two links per slab), rows that windows read across the borders
    of slabs, and, where a slab has several chips, values that are alive between two layers.
    """

    def __init__(self, layers: Sequence[MeshLayer], first: int, last: int, mesh: Mesh) -> None:
        self._rate = mesh.rates.link * _OWN_SHARE
        entering: dict[str, int] = {}
        self._borders = 0
        alive: Ints = np.zeros(last - first)
        last_user: dict[int, int] = {}
        for index in range(first, last):
            for reading in layers[index].readings:
                row = reading.image[1] * reading.image[2] * reading.itemsize
                self._borders += max(0, reading.span[0] - reading.step[0]) * row
                if first <= reading.producer < last:
                    last_user[reading.producer] = index
                else:
                    entering.setdefault(reading.value, reading.image[0] * row if reading.producer >= 0 else 0)
        for producer, user in last_user.items():
            alive[producer - first : user - first] += layers[producer].result_bytes
        self._entering, self._alive = sum(entering.values()), float(alive.max(initial=0.0))

    def clocks(self, slabs: int, chips: int, all_chips: int) -> float:
        if all_chips == 1:
            return 0.0
        inner = self._alive / slabs / 2 if chips > 1 else 0.0
        borders = self._borders / chips if slabs > 1 else 0.0
        return max(self._entering / slabs / 2, borders + inner) / self._rate


def _spread_numbers(most: int) -> list[int]:
    """1 to `most`, ever farther apart."""
    numbers, number = [], 1
    while number <= most:
        numbers.append(number)
        number += max(1, number // 6)
    return numbers


class MeshStage(Record):
    """A layer cut into pieces, numbered by rows, columns, channels, sums, the last fastest."""

    layer: MeshLayer
    cut: Cut
    boxes: NDArray[np.int64]
    """[pieces, 8]: first and last + 1 of rows, columns, channels, sums."""
    slots: tuple[int, ...]
    """Inputs' worth of each operand a piece holds."""
    costs: CutCosts
    """Costs of every piece."""
    first: int
    """Number of its first piece among all of its section."""
    free: bool = False
    """True where the boxes form no grid; `cut` then counts them as rows."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.boxes)

    @property
    def memory(self) -> Ints:
        """Bytes of each piece's element that are used."""
        return self.costs.memory(self.slots)

    @property
    def last(self) -> NDArray[np.bool_]:
        """The pieces that give results: of those that sum for each other, the last."""
        return np.asarray(np.arange(self.pieces) % self.cut.sums == self.cut.sums - 1)

    @property
    def result(self) -> TensorType:
        """Type of the layer's result."""
        return self.layer.result

    def spans(self, piece: int) -> list[tuple[int, int]]:
        """First and last + 1 of a piece's rows, columns, channels and sums."""
        ends = self.boxes[piece].tolist()
        return list(zip(ends[::2], ends[1::2], strict=True))

    def result_box(self, piece: int) -> Box:
        """The part of the layer's result that a piece computes."""
        return box_of(self.result.shape, *self.spans(piece)[:3])

    def put(self, values: dict[str, Array], piece: int, content: Array) -> None:
        """Put the result of a piece into the layer's result among values; zeros where no piece has put any."""
        kind, box = self.result, self.result_box(piece)
        result = values.setdefault(self.layer.graph.outputs[0], np.zeros(kind.shape, kind.dtype.numpy))
        result[box_slices(box)] = content.reshape(box_shape(box))

    def readers(self, reading: OperandRead) -> Ints:
        """The pieces that read an operand: the first is summed over, the others are for what gives results."""
        return np.nonzero(self.last | (reading is self.layer.readings[0]))[0]


class Section(Record, dict=True):
    """Stages that are on the mesh at the same time; what comes from other sections comes through DRAM."""

    stages: tuple[MeshStage, ...]
    groups: tuple[SlabGroup, ...] = ()
    """Layers whose slabs share chips; empty where they have no chips of their own."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return sum(stage.pieces for stage in self.stages)

    @cached_property
    def layers(self) -> frozenset[int]:
        """Indices of its layers."""
        return frozenset(stage.layer.index for stage in self.stages)

    @cached_property
    def owners(self) -> list[tuple[MeshStage, int]]:
        """The stage of each piece, and its number there."""
        return [(stage, piece) for stage in self.stages for piece in range(stage.pieces)]


def resident(layers: Sequence[MeshLayer], topology: Topology, objective: Objective) -> Section | None:
    """All layers on the mesh at once; None where they do not fit. Slots are given up before that: first to two."""
    mesh, elements = topology.mesh, len(topology.elements)
    chips, capacity = len(topology.places), topology.capacity
    for slots in slot_choices(layers, objective):
        slabs = SlabSearch(layers, slots, mesh, chips, capacity, objective).run() if chips > 1 and capacity else None
        if slabs:
            return resident_section(layers, slabs[1], mesh, slots, slabs[0])
        fronts = [frontier(layer, mesh, held, elements) for layer, held in zip(layers, slots, strict=True)]
        cuts = choose(fronts, elements, objective)
        if cuts is not None:
            return resident_section(layers, cuts, mesh, slots)
    return None


def frontiers_of(layers: Sequence[MeshLayer], topology: Topology) -> list[Frontier]:
    """The cuts of each layer alone on all elements, one slot for each operand."""
    return [frontier(layer, topology.mesh, layer.one_slot, len(topology.elements)) for layer in layers]


def residents(layers: Sequence[MeshLayer], fronts: Sequence[Frontier], topology: Topology) -> list[Section]:
    """Layers on the mesh at once for latency, on all elements and on a few fewer numbers of them: more pieces send more
    messages, so that more need not be better. `fronts`: as `frontiers_of`."""
    elements = len(topology.elements)
    found = (choose(fronts, count, Objective.LATENCY) for count in range(elements, 0, -max(1, elements // _FEWER)))
    cuts = dict.fromkeys(tuple(one) for one in found if one is not None)
    return [resident_section(layers, one, topology.mesh) for one in cuts]


_FEWER = 12
"""Numbers of elements that are tried, about."""
SMALL = 64
"""Elements up to which every fewer number of them is tried for all of a network."""


def slot_choices(layers: Sequence[MeshLayer], objective: Objective) -> list[list[tuple[int, ...]]]:
    """Numbers of slots to try in turn, for each operand of each layer: ever fewer.

    One for latency. For throughput one more than there are layers on the way, so that a value that waits for others
    holds nobody up.
    """
    if objective is Objective.LATENCY:
        return [[layer.one_slot for layer in layers]]
    levels: dict[int, int] = {INPUT: 0}  # layers on the longest way from the network's inputs, 1 for the first
    for layer in layers:
        levels[layer.index] = 1 + max((levels[reading.producer] for reading in layer.readings), default=0)
    waits = [[1 + levels[layer.index] - levels[r.producer] for r in layer.readings] for layer in layers]
    choices = [[tuple(min(wait, most) for wait in each) for each in waits] for most in (max(levels.values()) + 1, 2, 1)]
    return [slots for number, slots in enumerate(choices) if slots not in choices[:number]]


def resident_section(
    layers: Sequence[MeshLayer],
    cuts: Sequence[Cut],
    mesh: Mesh,
    slots: Sequence[tuple[int, ...]] | None = None,
    groups: tuple[SlabGroup, ...] = (),
) -> Section:
    """Layers in resident pieces; `slots` of each, one of each operand if none are given."""
    stages: list[MeshStage] = []
    first = 0
    for layer, cut, held in zip(layers, cuts, slots or [layer.one_slot for layer in layers], strict=True):
        stages.append(boxed_stage(layer, cut, boxes_of(layer, cut, mesh), held, mesh, first))
        first += stages[-1].pieces
    return Section(tuple(stages), groups)


def boxed_stage(
    layer: MeshLayer,
    cut: Cut,
    boxes: NDArray[np.int64],
    slots: tuple[int, ...],
    mesh: Mesh,
    first: int,
    free: bool = False,
) -> MeshStage:
    """A layer in boxes, [pieces, 8], with their costs; arguments as the fields of `MeshStage`.

    Raises:
        PlanError: a piece does not fit its element.
    """
    costs = costs_of(layer, sizes_of(layer, cut, boxes, mesh), mesh, slots)
    stage = MeshStage(layer, cut, boxes, slots, costs, first, free)
    most = int(stage.memory.max())
    if most > mesh.usable:
        hint = "cut the layer into more pieces"
        raise PlanError(f"a piece takes {most} bytes, an element has {mesh.usable}", where=layer.name, hint=hint)
    return stage


_MOST_LINED = 16
"""Parts of a layer's channels, at most, of which each is searched for lines; others have the layer's."""


def sizes_of(layer: MeshLayer, cut: Cut, boxes: NDArray[np.int64], mesh: Mesh) -> PieceSizes:
    """The sizes of the pieces in boxes, [pieces, 8], and how their sums are requantised."""
    sizes = piece_sizes(cut, boxes)
    channels, which = np.unique(boxes[:, 4:6], axis=0, return_inverse=True)
    if mesh.pieces is not None or cut.sums > 1 or len(channels) > _MOST_LINED:
        return sizes
    lined = np.array([layer.line_use(*span) for span in channels.tolist()])
    return replace(sizes, lined=lined[which.reshape(-1)])


def piece_sizes(cut: Cut, boxes: NDArray[np.int64]) -> PieceSizes:
    """The sizes of the pieces in boxes, [pieces, 8]."""
    rows, columns, channels, sums = (boxes[:, 1::2] - boxes[:, ::2]).T
    return PieceSizes(rows, columns, channels, sums, np.full(len(boxes), cut.sums), np.arange(len(boxes)) % cut.sums)


def boxes_of(layer: MeshLayer, cut: Cut, mesh: Mesh) -> NDArray[np.int64]:
    """[pieces, 8] the boxes of a cut in equal parts, as `Stage.boxes`."""
    shape = (cut.rows, cut.columns, cut.channels, cut.sums)
    sizes = (*layer.image, layer.summed)
    steps = [
        step if parts <= -(-size // step) else 1  # more parts than the array computes side by side: a user's own
        for size, parts, step in zip(sizes, shape, (*grain(layer, mesh), layer.unit), strict=True)
    ]
    limits = [bounds(size, parts, step) for size, parts, step in zip(sizes, shape, steps, strict=True)]
    index = np.indices(shape).reshape(4, -1)
    spans = [(limit[place], limit[place + 1]) for limit, place in zip(limits, index, strict=True)]
    return np.stack([end for span in spans for end in span], axis=1)


def read_span(reading: OperandRead, layer: MeshLayer, axis: int, boxes: NDArray[np.int64]) -> tuple[Ints, Ints]:
    """First and last + 1 of what pieces read of an operand along its rows (0), columns (1) or channels (2)."""
    size = reading.image[axis]
    whole = np.zeros(len(boxes), np.int64), np.full(len(boxes), size)
    if reading.channels == "all":
        return whole
    if layer.kind == "dense" and reading.channels == "summed":
        height, width, depth = reading.image
        if height * width == 1:
            return (boxes[:, 6], boxes[:, 7]) if axis == 2 else whole
        row = width * depth
        return (boxes[:, 6] // row, -(-boxes[:, 7] // row)) if axis == 0 else whole
    if axis == 2:
        place = 6 if reading.channels == "summed" else 4
        return boxes[:, place], boxes[:, place + 1]
    start = boxes[:, 2 * axis] * reading.step[axis] - reading.lead[axis]
    stop = (boxes[:, 2 * axis + 1] - 1) * reading.step[axis] + reading.span[axis] - reading.lead[axis]
    return np.maximum(start, 0), np.minimum(stop, size)
