"""From what was seen of a value to the range its integers span: min-max, percentile, least square error, entropy."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from dovetail.graph.types import Array, DType

BINS = 2048
"""Bins of a histogram."""
PERCENTILE = 99.99
"""Percent of the elements the percentile method keeps."""
CANDIDATES = 80
"""Limits tried along one side."""
SMALLEST = 0.2
"""The smallest share of a side that is tried."""


ENOUGH = 32
"""Elements per bin on average below which a distribution is not known well enough for its entropy."""


class Method(enum.StrEnum):
    """How a range is chosen."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    MSE = "mse"
    ENTROPY = "entropy"
    """For values with few elements least square error instead."""


@dataclass(frozen=True)
class Steps:
    """A quantisation per tensor: q stands for (q - zero_point) * scale."""

    dtype: DType
    scale: float
    """A float32 value, greater than 0."""
    zero_point: int

    def rounded(self, array: Array) -> Array:
        """The array as its integers stand for it, float64."""
        steps = np.clip(np.rint(array / self.scale) + self.zero_point, self.dtype.low, self.dtype.high)
        return np.asarray((steps - self.zero_point) * self.scale)


@dataclass(frozen=True)
class Histogram:
    """The elements of a value, counted in equal bins from low to high."""

    low: float
    high: float
    counts: Array
    """int64 [BINS]"""

    @property
    def centres(self) -> Array:
        """The middle of each bin; of the bin that holds 0, which every quantisation has exactly, 0."""
        width = (self.high - self.low) / len(self.counts)
        centres = self.low + width * (np.arange(len(self.counts)) + 0.5)
        return np.where(np.abs(centres) <= width / 2, 0.0, centres)


def spanning(low: float, high: float, dtype: DType, symmetric: bool) -> Steps:
    """The finest steps whose integers reach from `low` to `high`, with 0.0 exact; symmetric ones have zero point 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    if symmetric and dtype.signed:
        return Steps(dtype, float(np.float32(max(-low, high, 2.0**-40) / dtype.high)), 0)
    if symmetric:
        return Steps(dtype, float(np.float32(max(high, 2.0**-40) / dtype.high)), 0)
    scale = float(np.float32(max(high - low, 2.0**-40) / (dtype.high - dtype.low)))
    return Steps(dtype, scale, int(np.clip(np.rint(dtype.low - low / scale), dtype.low, dtype.high)))


def choose(seen: Histogram, method: Method, dtype: DType, symmetric: bool) -> Steps:
    """The steps for a value of which this was seen."""
    if method is Method.MINMAX or seen.low == seen.high:
        return spanning(seen.low, seen.high, dtype, symmetric)
    if method is Method.PERCENTILE:
        return spanning(*percentile(seen), dtype, symmetric)
    few = seen.counts.sum() < ENOUGH * len(seen.counts)
    return _search(seen, dtype, symmetric, square_error if method is Method.MSE or few else divergence)


def percentile(seen: Histogram, share: float = PERCENTILE) -> tuple[float, float]:
    """The limits outside which (100 - share) / 2 percent of the elements lie on either side."""
    total = np.cumsum(seen.counts)
    width = (seen.high - seen.low) / len(seen.counts)
    tail = (1 - share / 100) / 2 * total[-1]
    first, last = int(np.searchsorted(total, tail, "right")), int(np.searchsorted(total, total[-1] - tail))
    return seen.low + width * first, seen.low + width * (last + 1)


def _search(seen: Histogram, dtype: DType, symmetric: bool, measure: object) -> Steps:
    """The limits of least error: each side in turn, while the other stays, until neither moves."""
    assert callable(measure)
    low, high = min(seen.low, 0.0), max(seen.high, 0.0)
    shares = np.linspace(SMALLEST, 1.0, CANDIDATES)[::-1]

    def cost(a: float, b: float) -> float:
        return float(measure(seen, spanning(low * a, high * b, dtype, symmetric)))

    if symmetric:
        best = min(shares, key=lambda share: cost(share, share))
        return spanning(low * best, high * best, dtype, symmetric)
    down = up = float(min(shares, key=lambda share: cost(share, share)))
    for _ in range(4):
        before = down, up
        up = float(min(shares, key=lambda share: cost(down, share))) if high > 0 else up
        down = float(min(shares, key=lambda share: cost(share, up))) if low < 0 else down
        if (down, up) == before:
            break
    return spanning(low * down, high * up, dtype, symmetric)


def square_error(seen: Histogram, steps: Steps) -> float:
    """The mean square of what rounding and saturation change."""
    centres = seen.centres
    error = centres - steps.rounded(centres)
    return float((error * error * seen.counts).sum() / seen.counts.sum())


def divergence(seen: Histogram, steps: Steps) -> float:
    """The Kullback-Leibler divergence of the quantised distribution from the one seen, in nats.

    As "8-bit inference with TensorRT" (Migacz, GTC 2017) has it: what lies outside the range counts for the outermost
    bins of the reference; the elements of an integer are spread evenly over the bins of its step that hold any.
    """
    centres, counts = seen.centres, seen.counts.astype(np.float64)
    integers = np.rint(centres / steps.scale) + steps.zero_point
    inside = (integers >= steps.dtype.low) & (integers <= steps.dtype.high)
    places = np.flatnonzero(inside)
    if len(places) == 0:
        return float("inf")
    reference = counts[inside].copy()
    reference[0] += counts[: places[0]].sum()
    reference[-1] += counts[places[-1] + 1 :].sum()
    levels = (integers[inside] - steps.dtype.low).astype(np.int64)
    held = (counts[inside] > 0).astype(np.float64)
    size = steps.dtype.high - steps.dtype.low + 1
    total, used = (np.bincount(levels, values, size) for values in (counts[inside], held))
    spread = held * (total / np.maximum(used, 1))[levels]
    p, q = reference / reference.sum(), spread / max(spread.sum(), 1e-30)
    with_mass = p > 0
    return float((p[with_mass] * np.log(p[with_mass] / np.maximum(q[with_mass], 1e-12))).sum())
