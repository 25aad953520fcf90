"""One cut for each of some layers, so that together they have no more pieces than there are elements."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from dovetail.mesh.cuts import Cut, Frontier


class Objective(enum.StrEnum):
    """What pieces are chosen for."""

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
