"""In how many bands a layer is computed, and which rows each has, so that it ends soonest: numbers alone, no graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TypeAlias

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Rows from and to of each band of an image."""


def rows_of(total: int, count: int, step: int) -> list[tuple[int, int]]:
    """The rows of each band, half as many in the first and the last: what the core does first and the engine last
    nothing hides. The middle one has the rest that is no whole step; but where all have one step, the last."""
    if count * step >= total:
        return [(start, min(start + step, total)) for start in range(0, total, step)]
    shares = [1 if number in (0, count - 1) else 2 for number in range(count)]
    marks = [round(total // step * upto / sum(shares)) * step for upto in accumulate(shares, initial=0)]
    ends = [mark + (total % step if number > count // 2 else 0) for number, mark in enumerate(marks)]
    return [(start, end) for start, end in pairwise(ends) if start < end]


def soonest(total: int, most: int, before: tuple[float, float], after: tuple[float, float]) -> tuple[float, int]:
    """The earliest end of a layer in cycles, and its number of bands, if each band is prepared while the engine
    computes the band before.

    Args:
        total: rows.
        most: bands.
        before: cycles to bring about all rows, and those each band takes more.
        after: cycles the engine computes all rows, and those each band takes more.
    """

    def end(count: int) -> float:
        laid = computed = 0.0
        for start, stop in rows_of(total, count, 1):
            share = (stop - start) / total
            laid += before[0] * share + before[1]
            computed = max(laid, computed) + after[0] * share + after[1]
        return computed

    return min((end(count), count) for count in range(1, min(most, total) + 1))


_MOST_STARTS = 32
"""Places where a band may begin, so that few ways of cutting an image have to be looked at."""


def bands_behind(
    total: int, engine: Callable[[int], float], core: Callable[[int], float]
) -> tuple[tuple[int, int], ...]:
    """The rows of the fewest bands in which an image is cut so that the core, which handles each behind the engine, is
    done soonest. The engine is given one band beyond the one the core waits for; the next when the core has done that.

    Args:
        total: rows of the image.
        engine: cycles in which the engine computes a band of so many rows.
        core: cycles the core takes for such a band.
    """
    step = -(-total // _MOST_STARTS)
    # by the rows given to the engine and those of its last band: when the engine ends, when the core ends the bands
    # before the last, and where the bands end
    ways: dict[tuple[int, int], list[tuple[float, float, tuple[int, ...]]]] = {(0, 0): [(0.0, 0.0, ())]}
    for stop in (*range(step, total, step), total):
        for start in range(0, stop, step):
            rows, found = stop - start, []
            for (upto, last), known in ways.items():
                for computed, handled, ends in known if upto == start else ():
                    behind = max(handled, computed) + core(last) if last else 0.0
                    found.append((max(computed, handled) + engine(rows), behind, (*ends, stop)))
            ways[stop, rows] = _undominated(found)
    done = [
        (max(computed, handled) + core(last), len(ends), ends)
        for (upto, last), known in ways.items()
        for computed, handled, ends in known
        if upto == total
    ]
    return tuple(pairwise((0, *min(done)[2])))


def bands_ahead(
    total: int, moved: Callable[[int], float], engine: Callable[[int], float], busy: float = 0.0
) -> tuple[float, Spans]:
    """The earliest time, in cycles, at which an image is ready that is computed in bands, each while the engine
    computes earlier ones; and the rows of as few bands as that takes.

    Args:
        total: rows of the image.
        moved: cycles in which a band of so many rows is brought about.
        engine: cycles in which the engine computes it.
        busy: cycles for which the engine has other work first.
    """
    step = -(-total // _MOST_STARTS)
    moved, engine = cache(moved), cache(engine)
    # by the rows of the bands: when these lie there, when the engine has computed them, and where they end
    ways: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {0: [(0.0, busy, ())]}
    for stop in (*range(step, total, step), total):
        ways[stop] = _undominated(
            [
                (there, max(there, computed) + engine(stop - start), (*ends, stop))
                for start, known in ways.items()
                for laid, computed, ends in known
                for there in (laid + moved(stop - start),)
            ]
        )
    end, _, ends = min((computed, len(ends), ends) for _, computed, ends in ways[total])
    return end, tuple(pairwise((0, *ends)))


def _undominated(
    ways: Sequence[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """The ways that no other beats: with times as early, and as few bands."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for way in sorted(ways, key=lambda way: (way[0], way[1], len(way[2]))):
        if not any(other[1] <= way[1] and len(other[2]) <= len(way[2]) for other in kept):
            kept.append(way)
    return kept
