"""Sums of int8 products that end in one product and one shift, on cores whose kernels hold weights as 16 bits.

A requantisation rounds, shifts, rounds again and adds the zero point. Weights of 8 bits have room in 16: those of a
channel, and the start of its sum, are taken times a power of two, such that the last shift is the same for all
channels and both roundings are part of one number that is added. Then an element is
(upper half of sum * multiplier + offset) >> shift, the same integer as before.
"""

from __future__ import annotations

import numpy as np

from dovetail.ir.operators.arithmetic import Requantize, Rounding, fixed_point
from dovetail.ir.requantisation.bounds import Range, weight_sums
from dovetail.ir.types import Array
from dovetail.records import Record

_MOST_RAISED = 8
"""Bits by which an int8 may be raised within 16."""
_SHIFTS = (9, 12, 15)
"""Shifts that are preferred: layers of one text share a function."""
_LOWEST, _HIGHEST = -128, 127
"""Range of the operand."""
_EXACT = 1 << 30
"""Multipliers from here on have all their bits; no upper half of a product reaches it."""


class RaisedSum(Record):
    """The end of the sums of a layer, of channels or of all alike: arrays of one element or one per channel."""

    powers: Array
    """Bits by which weights and starts are raised."""
    multiplier: Array
    offset: Array
    """Both int32."""
    shift: int
    reach: int
    """No element is larger than this before it is limited."""


def raised_sum(
    operator: Requantize, limits: Range, multiplier: Array, shift: Array, start: Array, weights: Array
) -> RaisedSum | None:
    """How the sums of a layer of int8 are raised; None where that is not exact.

    With r the shift to the right, m the multiplier and z the zero point, a sum v >= 0 rounded twice is
    floor((v * m / 2^31 + 1/2 + 2^(r - 1)) / 2^r) + z, as floors of floors are one. Raised by k >= 2 bits, with
    s = r + k - 1, that is floor((2^k * v * m / 2^32 + 2^(k - 2) + 2^(s - 1) + z * 2^s) / 2^s), whose three last terms
    are integers. Sums below 0 give z or less, in both. Rounded once, 1/2 and its term are not there, and v may have
    any sign.

    Args:
        operator: the requantisation.
        limits: of its results.
        multiplier: [1 or channels], and shift: its operands.
        start: [channels] what each sum begins with.
        weights: [channels, ...], int8.
    """
    zero_point, twice = operator.output_zero_point, operator.rounding is Rounding.DOUBLE
    if operator.input_zero_point or operator.left_shift or operator.rounding not in (Rounding.DOUBLE, Rounding.SINGLE):
        return None
    if twice and limits[0] < zero_point:
        return None
    multiplier, shift = np.broadcast_arrays(multiplier.astype(np.int64), shift.astype(np.int64))
    low, high, reach = _bounds(weights, start.astype(np.int64), len(multiplier))
    ends = [fixed_point(bound, multiplier, shift, operator.rounding) for bound in (low, high)]
    first, last = (np.clip(end + zero_point, *limits) for end in ends)
    constant, right = first == last, -shift
    if constant.all() or (multiplier[~constant] < _EXACT).any() or right[~constant].min() < 1:
        return None
    room = np.minimum(_MOST_RAISED, 31 - np.array([int(most).bit_length() for most in reach]))
    least, most = int(right[~constant].max()) + (1 if twice else 0), int((right - 1 + room)[~constant].min())
    total = next((one for one in _SHIFTS if least <= one <= most), least)
    if total > most:
        return None
    powers = np.where(constant, 0, total + 1 - right)
    half = np.where(constant, 0, (1 << powers >> 2 if twice else 0) + (1 << total - 1))
    offset = half + (np.where(constant, first, zero_point) << total)
    farthest = int(np.abs(offset).max())
    if farthest >= _EXACT:
        return None
    factors = np.where(constant, 0, multiplier).astype(np.int32)
    return RaisedSum(powers, factors, offset.astype(np.int32), total, ((_EXACT + farthest) >> total) + 1)


def _bounds(weights: Array, start: Array, count: int) -> tuple[Array, Array, Array]:
    """The least and the largest value of the sums, and what no partial sum is larger than; of each channel, or of all
    where `count` is 1."""
    positive, negative = weight_sums(weights)
    low = start + _LOWEST * positive - _HIGHEST * negative
    high = start + _HIGHEST * positive - _LOWEST * negative
    reach = np.abs(start) - _LOWEST * (positive + negative)
    if count > 1:
        return low, high, reach
    return low.min(keepdims=True), high.max(keepdims=True), reach.max(keepdims=True)
