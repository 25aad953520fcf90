"""Scale, offset and shift of each channel within an engine's few bits: (sum * scale + offset) >> shift, to within a
stated error, or weights that hold the scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.operators.arithmetic import digit_scales
from dovetail.ir.requantisation.bounds import sum_bounds
from dovetail.ir.types import Array, DType
from dovetail.records import Record

MOST_WEIGHT = 127
"""Greatest magnitude of a weight that holds a part of the scale."""
_LEAST_SCALE = 16
"""A smaller scale would be wrong by more than 1 part in 32, if it is not exact; such a layer is left to the core."""
_LEAST_PRECISION = 44
"""A scale of digits may miss a factor by one part in so many, which three digits always reach."""
_MOST_LOST = 1.5
"""Steps of the result, root mean square, that rounding weights may cost where a scale of digits costs little."""
Parameters = tuple[Array, Array, Array]
"""Scale, offset and shift, int32 per channel."""


Reals = NDArray[np.float64]


class RequantisationLimits(Record):
    """The numbers an engine's scale and shift can hold."""

    scale_bits: int
    """Bits of the unsigned scale."""
    most_shift: int
    """The largest right shift."""
    activations: DType = DType.UINT8
    """Type of the engine's operands."""
    bias_first: bool = False
    """Whether what is added is added before the product: a whole number of scales."""
    multiplies: bool = True
    """Whether there is a product at all. If not, the factor but for a power of two goes into the weights."""
    digits: int = 0
    """Most shifts and additions that make up the factor, for engines without a multiplier. It applies to the layers
    the rewrite names."""


def scale_and_shift(
    real: Reals,
    bias: Reals,
    correction: Reals,
    low: Reals,
    high: Reals,
    zero_point: int,
    limits: RequantisationLimits,
) -> Parameters | None:
    """Scale, offset and shift per channel that bring a sum to its result in one product, one sum and one shift.

    (acc * scale + offset) >> shift is round((acc + correction + bias) * real) + zero_point, within the scale's bits.

    Args:
        real: the factor, at least 0.
        bias: constant part of the sum; scaled by the exact factor.
        correction: what takes the input zero point off the accumulator; scaled as the accumulator is, so that their
            errors cancel.
        low: smallest accumulator.
        high: largest accumulator.
        zero_point: of the result.
        limits: of the engine.

    Returns:
        Three int32 arrays; None when some channel cannot be kept within int32. The shift is the largest for which
        neither product nor sum leaves int32.
    """
    scales, offsets, shifts = (np.zeros(real.shape, np.int64) for _ in range(3))
    reach = np.maximum(np.abs(low), np.abs(high))
    for channel, factor in enumerate(real):
        if limits.bias_first and reach[channel] == 0:  # a scale of 0 would take the bias away
            scales[channel], offsets[channel] = 1, int(np.rint(bias[channel] * factor)) + zero_point
            continue
        for shift in range(limits.most_shift, -1, -1):
            scale = int(np.rint(factor * 2.0**shift))
            if scale >= 1 << limits.scale_bits:
                continue
            inexact = scale < _LEAST_SCALE and scale != factor * 2.0**shift
            if inexact and reach[channel] * factor >= 0.5:
                return None
            exact = int(np.rint(bias[channel] * factor * 2.0**shift))
            offset = int(correction[channel]) * scale + exact + (zero_point << shift) + ((1 << shift) >> 1)
            if limits.bias_first and scale:
                offset = int(np.rint(offset / scale)) * scale
            edges = (int(low[channel]) * scale + offset, int(high[channel]) * scale + offset)
            if int(reach[channel]) * scale < 1 << 31 and max(abs(offset), *map(abs, edges)) < 1 << 31:
                scales[channel], offsets[channel], shifts[channel] = scale, offset, shift
                break
        else:
            return None
    return scales.astype(np.int32), offsets.astype(np.int32), shifts.astype(np.int32)


def folded(real: Reals, weights: NDArray[Any], most_shift: int, keeps_sum: bool = True) -> tuple[Array, Array] | None:
    """Weights that hold a factor but for a power of two, per channel: sum(w * x) * real is sum(folded * x) >> shift.

    The shift is the largest with which no weight exceeds 127, so that as little as can be is lost.

    Args:
        real: the factors, at least 0.
        weights: [C, taps], whole numbers or not.
        most_shift: of the engine.
        keeps_sum: whether rounding keeps each channel's sum of weights to within half a unit: operands of layers mostly
            lie on one side of their zero point, and an error that all of them share would add up.

    Returns:
        Weights, int64 [C, taps], and shifts, int64 [C]; None where a factor is too large for any shift.
    """
    wanted = weights.astype(np.float64) * real[:, None]
    reach = np.abs(wanted).max(axis=1, initial=0)
    if (reach >= MOST_WEIGHT + 0.5).any():
        return None
    exponents = np.floor(np.log2((MOST_WEIGHT + 0.49) / np.maximum(reach, 2.0**-60)))
    shifts = np.where(reach > 0, np.minimum(exponents, most_shift), 0).astype(np.int64)
    wanted = wanted * 2.0 ** shifts[:, None]
    whole = np.rint(wanted).astype(np.int64)
    for channel, exact in enumerate(wanted if keeps_sum else ()):
        missing = int(np.rint(exact.sum() - whole[channel].sum()))
        step = int(np.sign(missing))
        # those whose rounding went the other way farthest
        order = np.argsort(-(exact - whole[channel]) * step, kind="stable")
        chosen = [tap for tap in order if abs(whole[channel, tap] + step) <= MOST_WEIGHT][: abs(missing)]
        whole[channel, chosen] += step
    return whole, shifts


def scale_of_digits(real: Reals, most: Reals, count: int, most_shift: int) -> tuple[Array, Array]:
    """Per channel a scale of `count` digits (`digit_scales`), none above `most`, and a shift:
    scale >> shift is as near to `real` as can be. A factor of 0 gets the least scale."""
    scales: Reals = np.array(sorted(digit_scales(count)), np.float64)
    shift = np.rint(np.log2(scales / np.maximum(real, 2.0**-60)[:, None]))
    error = np.abs(scales / 2.0**shift / np.maximum(real, 2.0**-60)[:, None] - 1)
    error[(shift < 0) | (shift > most_shift) | (scales > most[:, None])] = np.inf
    best = error.argmin(axis=1)
    every = np.arange(len(real))
    fits = np.isfinite(error[every, best])
    scale = np.where(fits, scales[best], scales[0]).astype(np.int64)
    return scale, np.where(fits, shift[every, best], 0).astype(np.int64)


class SumOffsets(Record):
    """The numbers added to a sum of products on its way to the result."""

    zero_point: int
    """Zero point of the operand."""
    bias: Array
    result_zero_point: int


def edges(weights: Array, limits: RequantisationLimits) -> tuple[Reals, Reals]:
    """The least and the greatest sum of products per channel."""
    low, high = sum_bounds(weights, limits.activations.low, limits.activations.high)
    return low.astype(np.float64), high.astype(np.float64)


def with_product(real: Reals, weights: Array, sums: SumOffsets, limits: RequantisationLimits) -> Parameters | None:
    """The parameters of a layer whose weights [C, taps] stay as they are; None as `scale_and_shift`."""
    correction = -float(sums.zero_point) * weights.sum(axis=1)
    bias = sums.bias.astype(np.float64)
    return scale_and_shift(real, bias, correction, *edges(weights, limits), sums.result_zero_point, limits)


def without_product(
    real: Reals, weights: Array, sums: SumOffsets, limits: RequantisationLimits, digits_pay: bool
) -> tuple[Parameters | None, Array]:
    """The parameters of a layer and its weights: the factor in these, or where that loses much a scale of digits."""
    found, made = _shifted(real, weights, sums, limits)
    if digits_pay and (found is None or _lost(real, weights, made, found[2]) > _MOST_LOST):
        exact = _by_digits(real, weights, sums, limits)
        if exact is not None:
            return exact, weights
    return found, made


def _lost(real: Reals, weights: Array, made: Array, shift: Array) -> float:
    """Error of a result by rounded weights, root mean square in its steps, for operands of all sizes alike."""
    errors = made * 2.0 ** -shift.astype(np.float64)[:, None] - weights * real[:, None]
    return float(np.sqrt((errors**2).sum(axis=1).mean() * (256.0**2 / 12)))


def _by_digits(real: Reals, weights: Array, sums: SumOffsets, limits: RequantisationLimits) -> Parameters | None:
    """The parameters of a layer whose weights [C, taps] stay as they are, its scale one of few digits; None where a sum
    would leave int32, or the scale misses a factor by more than 1 part in 44."""
    low, high = edges(weights, limits)
    correction = -float(sums.zero_point) * weights.sum(axis=1)
    inner = np.abs(sums.bias + correction) + np.maximum(np.abs(low), np.abs(high))
    ends = (abs(sums.result_zero_point) + 1) / np.maximum(real, 2.0**-60)
    most = (2.0**31 - 1) / (inner + ends + 1)
    scale, shift = scale_of_digits(real, most, limits.digits, 2 * limits.most_shift)
    unit = 2.0**shift
    if (scale > most).any() or (
        np.abs(scale / unit - real) * inner > np.maximum(real * inner / _LEAST_PRECISION, 0.5)
    ).any():
        return None
    exact = sums.bias * real * unit + sums.result_zero_point * unit + np.floor(unit / 2)
    offset = (np.rint(exact / scale) + correction) * scale
    return scale.astype(np.int32), offset.astype(np.int32), shift.astype(np.int32)


def _shifted(
    real: Reals, weights: Array, sums: SumOffsets, limits: RequantisationLimits
) -> tuple[Parameters | None, Array]:
    """The parameters of a layer, of scale 1, and the weights [C, taps] that make it so; None where there are none."""
    found = folded(real, weights, limits.most_shift)
    if found is None:
        return None, weights
    made, shift = found
    unit = 2.0**shift
    offset = np.rint(sums.bias * real * unit) - sums.zero_point * made.sum(axis=1)
    offset += sums.result_zero_point * unit + np.floor(unit / 2)
    if max(np.abs(edge + offset).max() for edge in (*edges(made, limits), np.zeros(1))) >= 1 << 31:
        return None, weights
    ones = np.ones(shift.shape, np.int32)
    return (ones, offset.astype(np.int32), shift.astype(np.int32)), made
