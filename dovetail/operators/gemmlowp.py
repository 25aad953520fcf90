"""The fixed-point functions of gemmlowp that TFLite Micro's softmax is made of, on int64 arrays of int32 values.

Qm.n: m integer bits, n = 31 - m fraction bits. Facts from gemmlowp's fixedpoint/fixedpoint.h and TFLite's
kernels/internal/common.h.
"""

from __future__ import annotations

import numpy as np

from dovetail.graph.types import Array

ONE = (1 << 31) - 1
"""The largest Q0.31, which stands for 1."""
EXP_MINUS_EIGHTH = 1895147668
"""exp(-1/8) in Q0.31."""
THIRD = 715827883
"""1/3 in Q0.31."""
EXP_OF_POWERS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242)
"""exp(-2**k) in Q0.31 for k = -2..4."""
START_48_17 = 1515870810
"""48/17 in Q2.29: the start of Newton's division."""
START_32_17 = -1010580540
"""-32/17 in Q2.29."""


def high_product(a: Array, b: Array | int) -> Array:
    """a * b / 2**31, rounded to nearest, halves up: SaturatingRoundingDoublingHighMul, but for two -2**31."""
    raised: Array = a * b + (1 << 30)
    return raised >> 31


def rounding_shift(x: Array, exponent: Array | int) -> Array:
    """x / 2**exponent, rounded to nearest, halves away from zero: RoundingDivideByPOT."""
    mask = (np.int64(1) << exponent) - 1
    return np.asarray((x >> exponent) + ((x & mask) > (mask >> 1) + (x < 0)))


def _saturating_left(x: Array, bits: int) -> Array:
    return np.asarray(np.clip(x << bits, -(1 << 31), ONE))


def _exponential_below_quarter(a: Array) -> Array:
    """exp(a) for Q0.31 a in [-1/4, 0): the Taylor series around -1/8 to the fourth power."""
    x = a + (1 << 28)
    x2 = high_product(x, x)
    x3 = high_product(x2, x)
    x4 = high_product(x2, x2)
    quarter = rounding_shift(x4, 2)
    tail = high_product(quarter + x3, THIRD) + x2
    return EXP_MINUS_EIGHTH + high_product(x + rounding_shift(tail, 1), EXP_MINUS_EIGHTH)


def exponential(a: Array, integer_bits: int = 5) -> Array:
    """exp(a) in Q0.31 for a <= 0 of Qm.n, m = `integer_bits` at most 5."""
    quarter = 1 << (29 - integer_bits)
    rest = (a & (quarter - 1)) - quarter
    result = _exponential_below_quarter(rest << integer_bits)
    remainder = rest - a
    for place, factor in enumerate(EXP_OF_POWERS[: integer_bits + 2]):
        result = np.where(remainder & (quarter << place), high_product(result, factor), result)
    return np.where(a == 0, ONE, result)


def _newton(a: Array) -> Array:
    """2 / (1 + a) in Q2.29 for Q0.31 a in [0, 1]: Newton's division, three rounds."""
    half = (a + ONE + 1) >> 1
    estimate = START_48_17 + high_product(half, START_32_17)
    for _ in range(3):
        error = (1 << 29) - high_product(half, estimate)
        estimate = estimate + _saturating_left(high_product(estimate, error), 2)
    return np.asarray(estimate)


def reciprocal(x: Array, integer_bits: int) -> tuple[Array, Array]:
    """1/x of positive Qm.n x as (Q0.31 r, shift b): 1/x is about r * 2**-b."""
    powers = np.int64(1) << np.arange(1, 31, dtype=np.int64)
    headroom = 31 - (x[..., None] >= powers).sum(axis=-1)
    fraction = (x << headroom) - (1 << 31)
    return _saturating_left(_newton(fraction), 1), integer_bits - headroom


def sigmoid(a: Array) -> Array:
    """1 / (1 + exp(-a)) in Q0.31 for Q4.27 a."""
    positive = _saturating_left(_newton(exponential(-np.abs(a), 4)), 1)
    return np.where(a == 0, 1 << 30, np.where(a > 0, positive, ONE - positive))


def tanh(a: Array) -> Array:
    """The hyperbolic tangent in Q0.31 for Q4.27 a; 2a is the same number as Q5.26."""
    size = _saturating_left(_newton(exponential(-np.abs(a), 5)) - (1 << 29), 2)
    return np.asarray(np.sign(a) * size)
