"""How each layer is cut: one cut for each of some layers, slabs of rows that share chips, or streamed through DRAM.

Slabs: layers stand in groups, their images in slabs of rows, and a slab of all layers of a group shares chips. Chips
then exchange little more than the borders of slabs, at the price of weights held once per slab. How many slabs, on how
many chips each, is chosen for all groups together by dynamic programming over chips.

Streaming: a layer alone on one chip; operands, weights and results pass through DRAM in rounds, two of each held. A
piece goes through its box in bands of rows, slices of channels (the outermost) and slices of what is summed over. What
several pieces read is read once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.guests.mesh.cuts import (
    Cut,
    Frontier,
    PieceSizes,
    costs_of,
    frontier_or_empty,
    grains,
    largest,
    part_counts,
    spatial_counts,
)
from dovetail.guests.mesh.layers import Ints, MeshLayer
from dovetail.target.mesh import Mesh


class Objective(enum.StrEnum):
    """The time that cuts are chosen for."""

    LATENCY = "latency"
    """The time one input takes."""
    THROUGHPUT = "throughput"
    """The time between inputs of a stream."""


def choose(found: Sequence[Frontier], elements: int, objective: Objective) -> list[Cut] | None:
    """A cut for each layer; None where even the fewest pieces are too many.

    The time between inputs is that of the slowest piece: the least time for which enough elements are there, by
    bisection. The time of one input is the sum over layers: the least sum of clocks and a price for each piece, by
    bisection of the price.
    """
    if any(not one.cuts for one in found) or sum(int(one.pieces[0]) for one in found) > elements:
        return None
    if objective is Objective.THROUGHPUT:
        return _fastest(found, elements)
    low, high = 0.0, float(max(one.clocks[0] for one in found)) + 1
    for _ in range(40):
        price = (low + high) / 2
        if _total(found, _cheapest(found, price)) <= elements:
            high = price
        else:
            low = price
    return _cuts(found, _cheapest(found, high))


def worth(found: Sequence[Frontier], cuts: Sequence[Cut], objective: Objective) -> float:
    """Clocks of a choice: of the slowest piece, or of all layers one after the other."""
    clocks = [int(one.clocks[one.cuts.index(cut)]) for one, cut in zip(found, cuts, strict=True)]
    return float(max(clocks) if objective is Objective.THROUGHPUT else sum(clocks))


def _fastest(found: Sequence[Frontier], elements: int) -> list[Cut]:
    times = np.unique(np.concatenate([one.clocks for one in found]))
    low, high = int(np.searchsorted(times, max(int(one.clocks[-1]) for one in found))), len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _total(found, _within(found, int(times[middle]))) <= elements:
            high = middle
        else:
            low = middle + 1
    return _cuts(found, _within(found, int(times[low])))


def _within(found: Sequence[Frontier], clocks: int) -> list[int]:
    """Per layer the cut of fewest pieces that takes no longer."""
    return [int(np.searchsorted(-one.clocks, -clocks, side="left")) for one in found]


def _cheapest(found: Sequence[Frontier], price: float) -> list[int]:
    return [int(np.argmin(one.clocks + price * one.pieces)) for one in found]


def _total(found: Sequence[Frontier], picks: Sequence[int]) -> int:
    return sum(int(one.pieces[pick]) for one, pick in zip(found, picks, strict=True))


def _cuts(found: Sequence[Frontier], picks: Sequence[int]) -> list[Cut]:
    return [one.cuts[pick] for one, pick in zip(found, picks, strict=True)]


_OWN = 0.5
"""Share of a link its neighbours' exchange is given when slabs are chosen: routes of others pass it too."""


@dataclass(frozen=True, slots=True)
class SlabGroup:
    """Consecutive layers whose images are cut into the same slabs."""

    first: int
    last: int
    """One beyond."""
    slabs: int
    chips: int
    """Of each slab."""


_Option = tuple[SlabGroup, float]
"""One way to compute a run of layers, and its clocks."""


def choose_slabs(
    layers: Sequence[MeshLayer],
    slots: Sequence[tuple[int, ...]],
    mesh: Mesh,
    chips: int,
    capacity: int,
    objective: Objective,
) -> tuple[tuple[SlabGroup, ...], list[Cut]] | None:
    """The groups of a network's layers and a cut for each layer; None where there is no such choice.

    Args:
        layers: the network.
        slots: per layer, inputs' worth of each operand a piece holds.
        mesh: its elements.
        chips: how many there are.
        capacity: elements each of them has at least.
        objective: what for.
    """
    return _SlabSearch(layers, slots, mesh, chips, capacity, objective).run()


def _height(layer: MeshLayer) -> int:
    """Rows it can be cut into."""
    return layer.image[0] if layer.cuttable[0] else 1


@dataclass(frozen=True)
class _SlabSearch:
    """Fields as of `choose_slabs`."""

    layers: Sequence[MeshLayer]
    slots: Sequence[tuple[int, ...]]
    mesh: Mesh
    chips: int
    capacity: int
    objective: Objective
    known: dict[tuple[int, int], Frontier] = field(default_factory=dict)

    def run(self) -> tuple[tuple[SlabGroup, ...], list[Cut]] | None:
        """The best groups for all runs of layers of equal height, and the cuts of each layer in them."""
        heights = [_height(layer) for layer in self.layers]
        starts = [index for index, height in enumerate(heights) if index == 0 or height != heights[index - 1]]
        best = self.best([*starts, len(heights)])
        if best is None:
            return None
        cuts: list[Cut] = []
        for group in best:
            frontiers = self.frontiers(group.first, group.last, group.slabs) or []
            chosen = choose(frontiers, self.capacity * group.chips, self.objective) or ()
            for layer, cut in zip(self.layers[group.first : group.last], chosen, strict=True):
                cuts.append(replace(cut, rows=min(cut.rows * group.slabs, _height(layer))))
        return tuple(best), cuts

    def frontiers(self, first: int, last: int, slabs: int) -> list[Frontier] | None:
        """The cuts of a slab of each of some layers; None where one has none that fits."""
        found = []
        for index in range(first, last):
            if (index, slabs) not in self.known:
                height, width, channels = self.layers[index].image
                part = replace(self.layers[index], image=(-(-height // slabs), width, channels))
                most = self.capacity * self.chips
                self.known[index, slabs] = frontier_or_empty(part, self.mesh, self.slots[index], most)
            found.append(self.known[index, slabs])
            if not found[-1].cuts:
                return None
        return found

    def options(self, first: int, last: int) -> list[_Option]:
        """Ways to compute some layers together: numbers of slabs, and of chips for each."""
        counts = part_counts(min(map(_height, self.layers[first:last])))
        crossing, found = _Crossing(self.layers, first, last, self.mesh), []
        for slabs in counts[counts <= self.chips].tolist():
            frontiers = self.frontiers(first, last, slabs) or []
            for each in _numbers(self.chips // slabs) if frontiers else ():
                cuts = choose(frontiers, self.capacity * each, self.objective)
                if cuts is not None:
                    clocks = worth(frontiers, cuts, self.objective)
                    links = crossing.clocks(slabs, each, self.chips)
                    clocks = max(clocks, links) if self.objective is Objective.THROUGHPUT else clocks + links
                    found.append((SlabGroup(first, last, slabs, each), clocks))
        return found

    def best(self, runs: Sequence[int]) -> list[SlabGroup] | None:
        """The best groups for all runs in order, on no more than all chips.

        For each number of runs and of chips the least time is known; another group of runs goes behind.
        """
        count, chips = len(runs) - 1, self.chips
        times: NDArray[np.float64] = np.full((count + 1, chips + 1), np.inf)
        times[0] = 0
        back: dict[tuple[int, int], tuple[int, SlabGroup]] = {}
        join = np.maximum if self.objective is Objective.THROUGHPUT else np.add
        for end in range(1, count + 1):
            for begin in range(end):
                for group, clocks in self.options(runs[begin], runs[end]):
                    used = group.slabs * group.chips
                    after = join(times[begin, : chips + 1 - used], clocks)
                    better = np.nonzero(after < times[end, used:])[0]
                    times[end, used + better] = after[better]
                    back.update(((end, used + int(place)), (begin, group)) for place in better)
        if not np.isfinite(times[count, chips]):
            return None
        place, left, found = count, int(times[count].argmin()), []
        while place:
            place, group = back[place, left]
            found.append(group)
            left -= group.slabs * group.chips
        return found[::-1]


class _Crossing:
    """About how long the links between chips are held for some layers, before anything is placed.

    Three things cross: what the layers take from layers before (over two links per slab), the rows that windows read
    across the borders of slabs, and, where a slab has several chips, what is alive between two layers.
    """

    def __init__(self, layers: Sequence[MeshLayer], first: int, last: int, mesh: Mesh) -> None:
        self._rate = mesh.rates.link * _OWN
        inside = range(first, last)
        used: dict[int, int] = {}
        self._entering, self._borders = 0, 0
        taken: set[str] = set()
        for index in inside:
            for reading in layers[index].readings:
                row = reading.image[1] * reading.image[2] * reading.itemsize
                self._borders += max(0, reading.span[0] - reading.step[0]) * row
                if reading.producer in inside:
                    used[reading.producer] = index
                elif reading.value not in taken:
                    taken.add(reading.value)
                    self._entering += reading.image[0] * row if reading.producer >= 0 else 0
        alive = np.zeros(last - first)
        for producer, user in used.items():
            alive[producer - first : user - first] += layers[producer].result_bytes
        self._alive = float(alive.max(initial=0.0))

    def clocks(self, slabs: int, chips: int, all_chips: int) -> float:
        if all_chips == 1:
            return 0.0
        inner = self._alive / slabs / 2 if chips > 1 else 0.0
        borders = self._borders / chips if slabs > 1 else 0.0
        return max(self._entering / slabs / 2, borders + inner) / self._rate


def _numbers(most: int) -> list[int]:
    """1 to `most`, ever farther apart."""
    found, number = [], 1
    while number <= most:
        found.append(number)
        number += max(1, number // 6)
    return found


@dataclass(frozen=True)
class Streaming:
    """How a layer is streamed."""

    cut: Cut
    bands: int
    slices: int
    """Of channels."""
    depths: int
    """Slices of what is summed over."""
    clocks: int
    """Of a round on the largest piece."""
    band_bytes: int
    """Read per round for the pieces of one part of the image."""
    weight_bytes: int
    """Read per round (with `depths`) or per slice for the pieces of one part of the channels."""
    result_bytes: int
    """Written by the largest piece per band and slice."""
    memory: int
    """Bytes of the largest piece's element."""
    estimate: float
    """Clocks in all, before it is simulated."""
    floor: float
    """Clocks of the MAC array, spread perfectly over all elements."""
    dram_clocks: float
    """Clocks DRAM is held."""

    @property
    def rounds(self) -> int:
        """Rounds of a piece."""
        return self.bands * self.slices * self.depths


def stream_layer(layer: MeshLayer, mesh: Mesh, elements: int) -> Streaming:
    """The best way to stream a layer, by an estimate.

    Raises:
        PlanError: not even a round of the smallest piece fits an element.
    """
    parts, sizes = _rounds(layer, mesh, elements)
    rows, columns, channels, bands, slices, depths = parts.T
    slots = (1,) * len(layer.readings)
    costs, box = costs_of(layer, sizes, mesh, slots), sizes.rows * sizes.columns * sizes.channels
    memory = costs.fixed + np.where((slices > 1) | (depths > 1), costs.constants, 0) + 2 * costs.slot + 2 * costs.others
    memory = memory + np.where(depths > 1, 4 * box, 0)
    clocks = costs.clocks + np.where(depths > 1, box, 0)
    whole = PieceSizes(*(np.array([size]) for size in (*layer.image, layer.summed, 1)))
    floor = costs_of(layer, whole, mesh, slots).floor[0]
    band, result = costs.received, box * layer.itemsize
    weight = costs.constants if layer.on_array else np.zeros_like(costs.constants)
    fits = memory <= mesh.usable
    if not fits.any():
        what = f"a round of the smallest piece takes {int(memory.min())} bytes, an element has {mesh.usable}"
        hint = "use elements with more memory (Mesh.usable), or keep less for code (Mesh.code)"
        raise PlanError(what, where=layer.name, hint=hint)
    rounds = bands * slices * depths
    loaded = weight * channels * slices * np.where(depths > 1, bands * depths, 1)
    read = band * rows * columns * rounds + loaded
    written = result * rows * columns * channels * bands * slices
    dram = (read + written) / mesh.rates.dram
    first = (band * rows * columns + weight * channels) / mesh.rates.dram
    last = result * rows * columns * channels / mesh.rates.dram
    total = np.maximum(clocks * rounds + first + last, dram + clocks)
    total = np.where(fits, total, np.inf)
    best = int(np.lexsort((memory, read + written, total))[0])
    cut = Cut(int(rows[best]), int(columns[best]), int(channels[best]))
    numbers = [int(one[best]) for one in (bands, slices, depths, clocks, band, weight, result, memory)]
    times = [float(total[best]), float(floor) / elements, float(dram[best])]
    return Streaming(cut, *numbers, *times)


def _rounds(layer: MeshLayer, mesh: Mesh, elements: int) -> tuple[Ints, PieceSizes]:
    """Candidates: parts along each axis, bands, slices and depths; and the largest piece of a round of each."""
    quads = -(-layer.summed // 4)
    sums = part_counts(quads)
    sums = sums[:40] if layer.kind == "dense" else sums[sums <= (8 if layer.kind == "convolution" else 1)]
    spatial = np.stack(np.meshgrid(*spatial_counts(layer, mesh), indexing="ij"), -1).reshape(-1, 3)
    spatial = spatial[spatial.prod(axis=1) <= elements]
    left = [-(-total // spatial[:, axis]) for axis, total in enumerate(grains(layer, mesh))]
    tries = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64])
    index, bands, slices, depths = (
        axis.reshape(-1) for axis in np.meshgrid(np.arange(len(spatial)), tries, tries, sums, indexing="ij")
    )
    may = (bands <= left[0][index]) & (slices <= left[2][index])
    index, bands, slices, depths = (axis[may] for axis in (index, bands, slices, depths))
    parts = np.column_stack((spatial[index], bands, slices, depths))
    times = (bands, np.ones_like(bands), slices)
    rows, columns, channels = (largest(layer, mesh, axis, spatial[index, axis] * times[axis]) for axis in range(3))
    sums = np.minimum(-(-quads // depths) * 4, layer.summed)
    return parts, PieceSizes(rows, columns, channels, sums, np.ones_like(rows))
