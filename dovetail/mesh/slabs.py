"""Layers in groups, their images in slabs of rows: a slab of all layers of a group shares chips.

Chips then exchange little more than the borders of slabs, at the price of weights held once per slab. How many slabs,
on how many chips each, is chosen for all groups together by dynamic programming over chips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.mesh.choice import Objective, choose, worth
from dovetail.mesh.cuts import Cut, Frontier, frontier
from dovetail.mesh.layers import Layer
from dovetail.target.mesh import Mesh

_OWN = 0.5
"""Share of a link its neighbours' exchange is given when slabs are chosen: routes of others pass it too."""


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive layers whose images are cut into the same slabs."""

    first: int
    last: int
    """One beyond."""
    slabs: int
    chips: int
    """Of each slab."""


@dataclass(frozen=True)
class Slabs:
    """A choice for all layers."""

    groups: tuple[Group, ...]
    cuts: tuple[Cut, ...]
    clocks: float
    """By the objective."""


@dataclass(frozen=True)
class _Option:
    """One way to compute a run of layers."""

    group: Group
    clocks: float


def choose_slabs(
    layers: Sequence[Layer], slots: Sequence[tuple[int, ...]], mesh: Mesh, chips: int, capacity: int,
    objective: Objective,
) -> Slabs | None:  # fmt: skip
    """Groups, slabs and cuts of a network; None where there is no such choice.

    Args:
        layers: the network.
        slots: per layer, inputs' worth of each operand a piece holds.
        mesh: its elements.
        chips: how many there are.
        capacity: elements each of them has at least.
        objective: what for.
    """
    known: dict[tuple[int, int], Frontier | None] = {}

    def frontier_of(index: int, slabs: int) -> Frontier | None:
        """The cuts of a slab of a layer, None where none fits."""
        if (index, slabs) not in known:
            layer = layers[index]
            height, width, channels = layer.image
            part = replace(layer, image=(-(-height // slabs), width, channels))
            try:
                known[index, slabs] = frontier(part, mesh, slots[index], capacity * chips)
            except PlanError:
                known[index, slabs] = None
        return known[index, slabs]

    runs = _runs(layers)
    best = _best(runs, layers, chips, objective, lambda a, b: _options(a, b, layers, mesh, chips, capacity,
                                                                       objective, frontier_of))  # fmt: skip
    if best is None:
        return None
    cuts: list[Cut] = []
    for option in best:
        group = option.group
        found = [frontier_of(index, group.slabs) for index in range(group.first, group.last)]
        chosen = choose([one for one in found if one], capacity * group.chips, objective) or ()
        for layer, cut in zip(layers[group.first : group.last], chosen, strict=True):
            height = layer.image[0] if layer.cuttable[0] else 1
            cuts.append(replace(cut, rows=min(cut.rows * group.slabs, height)))
    total = _joined([option.clocks for option in best], objective)
    return Slabs(tuple(option.group for option in best), tuple(cuts), total)


def _runs(layers: Sequence[Layer]) -> list[int]:
    """Where runs of layers of equal height begin, the end included."""
    heights = [layer.image[0] if layer.cuttable[0] else 1 for layer in layers]
    starts = [index for index in range(len(layers)) if index == 0 or heights[index] != heights[index - 1]]
    return [*starts, len(layers)]


def _options(
    first: int, last: int, layers: Sequence[Layer], mesh: Mesh, chips: int, capacity: int, objective: Objective,
    frontier_of: Callable[[int, int], Frontier | None],
) -> list[_Option]:  # fmt: skip
    """Ways to compute some layers together: numbers of slabs, and of chips for each."""
    height = min(layer.image[0] if layer.cuttable[0] else 1 for layer in layers[first:last])
    counts = np.unique(-(-height // np.unique(-(-height // np.arange(1, height + 1)))))
    found = []
    crossing = _Crossing(layers, first, last, mesh)
    for slabs in counts[counts <= chips].tolist():
        frontiers = [frontier_of(index, slabs) for index in range(first, last)]
        if any(one is None or not one.cuts for one in frontiers):
            continue
        for each in _numbers(chips // slabs):
            cuts = choose([one for one in frontiers if one], capacity * each, objective)
            if cuts is not None:
                clocks = worth([one for one in frontiers if one], cuts, objective)
                links = crossing.clocks(slabs, each, chips)
                clocks = max(clocks, links) if objective is Objective.THROUGHPUT else clocks + links
                found.append(_Option(Group(first, last, slabs, each), clocks))
    return found


class _Crossing:
    """About how long the links between chips are held for some layers, before anything is placed.

    Three things cross: what the layers take from layers before (over two links per slab), the rows that windows read
    across the borders of slabs, and, where a slab has several chips, what is alive between two layers.
    """

    def __init__(self, layers: Sequence[Layer], first: int, last: int, mesh: Mesh) -> None:
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
            image = layers[producer].image
            alive[producer - first : user - first] += image[0] * image[1] * image[2] * layers[producer].itemsize
        self._alive = float(alive.max(initial=0.0))

    def clocks(self, slabs: int, chips: int, all_chips: int) -> float:
        """Of the busiest link."""
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


def _best(
    runs: Sequence[int], layers: Sequence[Layer], chips: int, objective: Objective,
    options: Callable[[int, int], list[_Option]],
) -> list[_Option] | None:  # fmt: skip
    """The best options for all runs in order, on no more than so many chips.

    For each number of runs and of chips the least time is known; another group of runs goes behind.
    """
    count = len(runs) - 1
    times: NDArray[np.float64] = np.full((count + 1, chips + 1), np.inf)
    times[0] = 0
    back: dict[tuple[int, int], tuple[int, _Option]] = {}
    for end in range(1, count + 1):
        for begin in range(end):
            for option in options(runs[begin], runs[end]):
                used = option.group.slabs * option.group.chips
                before = times[begin, : chips + 1 - used]
                after = np.maximum(before, option.clocks) if objective is Objective.THROUGHPUT \
                    else before + option.clocks
                better = np.nonzero(after < times[end, used:])[0]
                times[end, used + better] = after[better]
                back.update(((end, used + int(place)), (begin, option)) for place in better)
    if not np.isfinite(times[count, chips]):
        return None
    place, left, found = count, int(times[count].argmin()), []
    while place:
        begin, option = back[place, left]
        found.append(option)
        left -= option.group.slabs * option.group.chips
        place = begin
    return found[::-1]


def _joined(clocks: Sequence[float], objective: Objective) -> float:
    return max(clocks) if objective is Objective.THROUGHPUT else sum(clocks)
