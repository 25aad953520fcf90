"""How far sums of products reach, and where a condition ends that holds up to some number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.ir.types import Array, blocks

Range = tuple[int, int]
"""Least and greatest value."""


def weight_sums(weights: Array) -> tuple[Array, Array]:
    """Sums of the positive weights and of the magnitudes of the negative ones, int64 [channels]; they come first."""
    positive, negative = np.empty((2, len(weights)), np.int64)
    for part in blocks(weights):
        flat = weights[part].reshape(len(weights[part]), -1)
        flat = flat if flat.dtype.kind in "iu" else flat.astype(np.int64)
        positive[part] = np.maximum(flat, 0).sum(axis=1, dtype=np.int64)
        negative[part] = positive[part] - flat.sum(axis=1, dtype=np.int64)
    return positive, negative


def sum_bounds(weights: Array, low: int, high: int) -> tuple[Array, Array]:
    """Least and greatest sum of products of a channel with operands from `low` to `high`, int64 [channels]."""
    positive, negative = weight_sums(weights)
    return low * positive - high * negative, high * positive - low * negative


def last_where(holds: Callable[[Array], Array], low: Array | int, high: Array | int, bits: int) -> Array:
    """The greatest number from `low` to `high` for which a condition holds that holds up to some number, elementwise by
    bisection; `low` where it holds for none. The range has at most 2**bits numbers."""
    low, high = np.broadcast_arrays(np.asarray(low, np.int64), np.asarray(high, np.int64))
    for _ in range(bits):
        middle = (low + high + 1) >> 1
        below = holds(middle)
        low, high = np.where(below, middle, low), np.where(below, high, middle - 1)
    return low
