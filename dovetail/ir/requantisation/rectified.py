"""Sums in memory that are requantised and cut off at what stands for 0: one product and one shift for most of them.

Sums up to 0 give the least result, those above a channel's limit the greatest. For a sum between them both roundings
of `Rounding.DOUBLE` are one: halves go up twice, and a floor of a floor is one floor. With r the shift to the right
that is (2 sum * 2 multiplier / 2^32 + 1 + 2^r) / 2^(r + 1).
"""

from __future__ import annotations

import numpy as np

from dovetail.ir.operators.arithmetic import Requantize, Rounding, fixed_point
from dovetail.ir.requantisation.bounds import Range, last_where
from dovetail.ir.types import Array, DType
from dovetail.records import Record


class RectifiedSum(Record):
    """Arrays of one element or one per channel."""

    multiplier: Array
    """uint32: doubled."""
    limit: Array
    """int32: the greatest sum whose result is below the greatest."""
    shift: Array
    """int8: r + 1."""


def rectified_sum(operator: Requantize, limits: Range, multiplier: Array, shift: Array) -> RectifiedSum | None:
    """The numbers of an int32 that is requantised and limited; None where it is not cut off at the zero point, or its
    product leaves 32 bits.

    Args:
        operator: the requantisation.
        limits: of its results.
        multiplier: int32 [1 or channels], and shift: its operands.
    """
    if (operator.rounding, operator.input_zero_point, operator.left_shift) != (Rounding.DOUBLE, 0, 0):
        return None
    multiplier, shift = multiplier.astype(np.int64), np.where(multiplier == 0, -1, shift.astype(np.int64))
    if shift.max() >= 0 or shift.min() < -30 or multiplier.min() < 0:
        return None
    below = limits[1] - limits[0]
    multiplier, shift = np.broadcast_arrays(multiplier, shift)
    limit = last_where(lambda x: fixed_point(x, multiplier, shift, Rounding.DOUBLE) < below, 0, DType.INT32.high, 32)
    if (((limit * multiplier) >> 30) + 1 + (1 << -shift)).max() >= 1 << 32:
        return None
    if not limits[0] == operator.output_zero_point < limits[1]:
        return None
    return RectifiedSum((2 * multiplier).astype(np.uint32), limit.astype(np.int32), (1 - shift).astype(np.int8))
