"""Scales as fixed-point multipliers and bounds, computed as TFLite Micro computes them.

Facts from tflite-micro's kernels/internal/quantization_util.cc and kernels/kernel_util.cc.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from dovetail.graph.types import Array, DType


def quantize_multiplier(real: float) -> tuple[int, int]:
    """A positive factor as (multiplier, shift): real is about multiplier * 2**(shift - 31).

    The multiplier is in [2**30, 2**31), or 0 for factors below 2**-32.
    """
    if real == 0.0:
        return 0, 0
    fraction, shift = math.frexp(real)
    multiplier = math.floor(fraction * (1 << 31) + 0.5)
    if multiplier == 1 << 31:
        multiplier, shift = 1 << 30, shift + 1
    if shift < -31:
        return 0, 0
    return ((1 << 31) - 1, 30) if shift > 30 else (multiplier, shift)


def multiplier_arrays(reals: Iterable[float]) -> tuple[Array, Array]:
    """Multipliers and shifts of several factors, int32 each."""
    pairs = [quantize_multiplier(real) for real in reals]
    return np.array([m for m, _ in pairs], np.int32), np.array([s for _, s in pairs], np.int32)


def mean_multiplier(real: float, count: int) -> tuple[Array, Array]:
    """real / count as TFLite's MEAN has it: the multiplier of `real` divided by the count, rounded down.

    Not in the sources at hand; found by comparing forms with what TensorFlow Lite Micro computes.
    """
    multiplier, shift = quantize_multiplier(real)
    raised = min(count.bit_length() - 1, 32, 31 + shift)
    divided = (multiplier << raised) // count
    return np.array([divided], np.int32), np.array([shift - raised], np.int32)


def round_half_away(value: float) -> int:
    """The nearest integer, halves away from zero (C's round)."""
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def quantized_bound(value: float, scale: float, zero_point: int, dtype: DType) -> int:
    """A bound of an activation function as an integer of `dtype`; infinite bounds are the type's own.

    The quotient is a float32, as in TFLite's CalculateActivationRangeQuantized.
    """
    if math.isinf(value):
        return dtype.high if value > 0 else dtype.low
    steps = float(np.float32(value) / np.float32(scale))
    return min(max(zero_point + round_half_away(steps), dtype.low), dtype.high)


def softmax_parameters(scale: float, beta: float) -> tuple[int, int, int]:
    """(multiplier, shift, diff_min) of `FixedSoftmax` for 8-bit inputs of this scale."""
    real = min(beta * scale * (1 << 26), float((1 << 31) - 1))
    multiplier, shift = quantize_multiplier(real)
    return multiplier, shift, -math.floor(31 * (1 << 26) / 2**shift)
