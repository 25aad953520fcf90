"""One cut for each of some layers: for the least time, or in slabs of rows that share chips.

Slabs: layers stand in groups, their images in slabs of rows, and a slab of all layers of a group shares chips. Chips
then exchange little more than the borders of slabs, at the price of weights held once per slab. How many slabs, on how
many chips each, is chosen for all groups together by dynamic programming over chips.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.guests.mesh.cuts import Cut, Frontier, frontier, part_counts
from dovetail.guests.mesh.layers import Ints, MeshLayer
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


@dataclass(frozen=True, slots=True)
class SlabGroup:
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


@dataclass(frozen=True)
class SlabSearch:
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
