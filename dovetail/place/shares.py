"""Splits one layer across several engines: over the rows or the channels of its result, whichever ends first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

from dovetail.graph.types import Box, full_box
from dovetail.partition.regions import Region, Share
from dovetail.place.costs import layout_of
from dovetail.plan.tiles import tile_match

_MOST_ENGINES = 4
"""Engines that may share one layer."""
_STEP_PARTS = (1, 2, 3)
"""Cuts are tried at multiples of the offloads' own step, and of these parts of it."""


def shared(alone: Sequence[Region], cycles: Sequence[int]) -> Iterator[Region]:
    """A layer shared by every set of engines that can: the best cut of each set.

    Args:
        alone: the layer as each engine takes it by itself; all compute the same nodes.
        cycles: what that takes, for each.
    """
    usable = [
        index
        for index, region in enumerate(alone)
        if region.offload is not None and region.offload.strided and _alike(region, alone[0])
    ][:_MOST_ENGINES]
    for count in range(2, len(usable) + 1):
        for chosen in combinations(usable, count):
            found = _split([alone[index] for index in chosen], [cycles[index] for index in chosen])
            if found is not None:
                yield found


def _alike(region: Region, other: Region) -> bool:
    """True when both compute the same, on operands that lie alike."""
    values = (*region.graph.inputs, region.output)
    nodes = [node.output for node in region.graph.nodes]
    same = nodes == [node.output for node in other.graph.nodes]
    return same and all(layout_of(region, value) == layout_of(other, value) for value in values)


def _split(alone: Sequence[Region], cycles: Sequence[int]) -> Region | None:
    """The cut whose slowest part is fastest; of equals the one by rows, whose parts read the same constants."""
    shape = alone[0].graph.types[alone[0].output].shape
    known: dict[tuple[int, Box], int | None] = {}
    best: tuple[int, tuple[Box, ...]] | None = None
    for axis in (*([1] if len(shape) == 4 else []), len(shape) - 1):
        for boxes in _cuts(alone, cycles, axis):
            costs = []
            for index, box in enumerate(boxes):
                if (index, box) not in known:
                    known[index, box] = _cycles(alone[index], box)
                costs.append(known[index, box])
            slowest = max((cost for cost in costs if cost is not None), default=0)
            if None not in costs and (best is None or slowest < best[0]):
                best = slowest, boxes
    if best is None:
        return None
    shares = []
    for region, box in zip(alone, best[1], strict=True):
        assert region.engine is not None and region.offload is not None
        shares.append(Share(region.engine, region.offload, box))
    return replace(alone[0], shares=tuple(shares))


def _cuts(alone: Sequence[Region], cycles: Sequence[int], axis: int) -> Iterator[tuple[Box, ...]]:
    """The result cut along an axis in proportion to the engines' speeds, at the multiples of a step near that."""
    whole = full_box(alone[0].graph.types[alone[0].output].shape)
    size = whole[axis][1]
    speeds = [1 / max(count, 1) for count in cycles]
    ideal = [size * sum(speeds[: number + 1]) / sum(speeds) for number in range(len(speeds) - 1)]
    places = [sorted({near for step in _steps(alone, axis) for near in _near(place, step)}) for place in ideal]
    for inner in product(*places):
        ends = (0, *inner, size)
        if all(begin < end for begin, end in pairwise(ends)):
            yield tuple((*whole[:axis], span, *whole[axis + 1 :]) for span in pairwise(ends))


def _steps(alone: Sequence[Region], axis: int) -> list[int]:
    offloads = [region.offload for region in alone if region.offload is not None]
    last = len(alone[0].graph.types[alone[0].output].shape) - 1
    own = max(offload.channel_step if axis == last else offload.row_step for offload in offloads)
    return sorted({max(1, own // part) for part in _STEP_PARTS}, reverse=True)


def _near(place: float, step: int) -> tuple[int, int]:
    below = int(place // step) * step
    return below, below + step


def _cycles(region: Region, box: Box) -> int | None:
    """Cycles of a part; None where the engine does not take it."""
    assert region.offload is not None
    try:
        return region.offload.cycles(tile_match(region, box)[1])
    except ValueError:
        return None
