"""Requantisations that round once, of channels with different shifts, as one product and one shift for all of them.

With m the multiplier, r the bits to the right and z the zero point, a value x becomes floor(x * m / 2^(32 + r) + 1/2)
+ z. Floors of floors are one, so that is (upper half of x * m + offset) >> r, with 2^(r - 1) + z * 2^r as offset. Where
channels have different r, multipliers of those with more bits to the right are shifted to the others'. That loses bits,
so the least operand of each result is compared: a result never falls as its operand grows.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dovetail.ir.operators.arithmetic import Requantize, Rounding, fixed_point
from dovetail.ir.requantisation.bounds import Range, last_where
from dovetail.ir.types import Array
from dovetail.records import Record

_NEIGHBOURS = (0, 1, -1)
_MOST = 1 << 31
_MOST_BITS = 17
"""The most bits of an operand whose results are compared."""


class LevelScale(Record):
    """(upper half of x * multiplier + offset) >> shift."""

    multiplier: Array
    """int32 [1 or channels]."""
    offset: int
    shift: int


def level_scale(
    operator: Requantize, multiplier: Array, shift: Array, operands: Range, limits: Range | None
) -> LevelScale | None:
    """The numbers of a requantisation; None where they are not exact, or leave 32 bits.

    Args:
        operator: the requantisation.
        multiplier: int32 [1 or channels], and shift: its operands.
        operands: the least and the greatest value that is requantised.
        limits: of its results; None where they are not limited.
    """
    if operator.rounding is not Rounding.SINGLE or operator.input_zero_point or operator.left_shift:
        return None
    multiplier, shift = np.broadcast_arrays(multiplier.astype(np.int64), shift.astype(np.int64))
    right = -1 - shift.max(where=multiplier > 0, initial=-(1 << 30))
    if not 1 <= right <= 30 or multiplier.min() < 0:
        return None
    lost = np.minimum(np.where(multiplier > 0, -1 - shift - right, 0), 62)
    offset = (operator.output_zero_point << right) + (1 << (right - 1))
    farthest = int(multiplier.max()) * max(-operands[0], operands[1]) >> 32
    if farthest + abs(offset) + 1 >= _MOST:
        return None
    nearest = (multiplier + (1 << lost >> 1)) >> lost
    if not lost.any():
        return LevelScale(nearest.astype(np.int32), int(offset), int(right))
    if limits is None or limits[1] - limits[0] > 255 or max(-operands[0], operands[1]) >= 1 << (_MOST_BITS - 1):
        return None
    exact = tuple(zip(multiplier.tolist(), shift.tolist(), strict=True))
    agreed = _agreeing(operator, exact, (tuple(nearest.tolist()), int(offset), int(right)), operands, limits)
    return None if agreed is None else LevelScale(np.array(agreed, np.int32), int(offset), int(right))


@lru_cache(maxsize=256)  # a region is looked at several times while the network is cut
def _agreeing(
    operator: Requantize,
    exact: tuple[tuple[int, int], ...],
    level: tuple[tuple[int, ...], int, int],
    operands: Range,
    limits: Range,
) -> tuple[int, ...] | None:
    """Multipliers near others with which all operands have the same limited results; None where one has none.

    Args:
        operator: the requantisation.
        exact: multiplier and shift of each channel.
        level: the other multipliers, and the offset and the bits to the right of all channels.
        operands: and limits: as of `level_scale`.
    """
    multiplier, shift = np.array(exact, np.int64).T[..., None]
    nearest, offset, right = np.array(level[0], np.int64)[:, None], *level[1:]
    results = np.arange(limits[0] + 1, limits[1] + 1)

    def before(x: Array) -> Array:
        """Whether the result of an operand is below each of those that are possible."""
        below: Array = fixed_point(x, multiplier, shift, operator.rounding) + operator.output_zero_point < results
        return below

    start = operands[0] - 1
    last = last_where(before, start, operands[1], (operands[1] - start).bit_length())
    found, missing = nearest.copy(), np.ones(nearest.shape, bool)
    for near in _NEIGHBOURS:
        factor = nearest + near
        below = (((last * factor >> 32) + offset >> right) < results) | (last == start)
        above = (((last + 1) * factor >> 32) + offset >> right >= results) | (last == operands[1])
        agrees = (below & above).all(-1, keepdims=True) & (factor >= 0) & (factor < _MOST)
        found[missing & agrees] += near
        missing &= ~agrees
    return None if missing.any() else tuple(found[:, 0].tolist())
