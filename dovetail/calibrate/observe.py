"""What values a float graph computes on calibration data: ranges in one pass, histograms in a second one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from dovetail.calibrate.execute import run
from dovetail.calibrate.ranges import BINS, Histogram
from dovetail.errors import DovetailError
from dovetail.graph.graph import Graph
from dovetail.graph.types import Array

MOST_BYTES = 32 << 20
"""Bytes of the largest value of a batch."""

Report = Callable[[str], None]
"""Told what is being done now."""


def batches(graph: Graph, data: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """The samples in parts that fit memory: the largest value of a part has at most `MOST_BYTES`."""
    largest = max(4 * kind.elements for name, kind in graph.types.items() if name not in graph.constants)
    size = int(max(1, min(64, MOST_BYTES // largest)))
    count = len(next(iter(data.values())))
    for start in range(0, count, size):
        yield {name: array[start : start + size] for name, array in data.items()}


def observe(
    graph: Graph, data: Mapping[str, Array], points: Collection[str], histograms: bool, report: Report
) -> dict[str, Histogram]:
    """What each of the values `points` was on the samples.

    Args:
        graph: the float graph.
        data: [N, *shape] by input.
        points: the values wanted.
        histograms: whether elements are counted; without, the histograms have one bin.
        report: told the progress.

    Raises:
        DovetailError: the network computes NaN or infinity on the data.
    """
    low = dict.fromkeys(points, np.inf)
    high = dict.fromkeys(points, -np.inf)

    def limits(name: str, array: Array) -> None:
        """Widen the range of a value."""
        if name not in low:
            return
        least, most = float(array.min()), float(array.max())
        if not np.isfinite([least, most]).all():
            raise DovetailError(f"the network computes NaN or infinity at '{name}'", where="calibration data",
                                hint="look for samples of extreme values in the data, or a damaged weight before "
                                     "that layer")
        low[name], high[name] = min(low[name], least), max(high[name], most)

    _pass(graph, data, limits, report, "measuring ranges")
    if not histograms:
        return {name: Histogram(low[name], high[name], np.ones(1, np.int64)) for name in low}
    counts = {name: np.zeros(BINS, np.int64) for name in low}

    def count(name: str, array: Array) -> None:
        """Count the elements of a value."""
        if name in counts and low[name] < high[name]:
            counts[name] += np.histogram(array, BINS, (low[name], high[name]))[0]

    _pass(graph, data, count, report, "counting values")
    return {name: Histogram(low[name], high[name], counts[name]) for name in low}


def _pass(
    graph: Graph, data: Mapping[str, Array], visit: Callable[[str, Array], None], report: Report, text: str
) -> None:
    total, done = len(next(iter(data.values()))), 0
    for part in batches(graph, data):
        report(f"{text}: sample {done} of {total}")
        run(graph, part, visit=visit)
        done += len(next(iter(part.values())))
