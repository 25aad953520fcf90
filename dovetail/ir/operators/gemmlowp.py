"""The fixed-point functions of gemmlowp that TFLite Micro's kernels are made of, on int64 arrays of int32 values.
Only the functions of numpy that `OnnxBody.traced` knows are used, so that the same text gives ONNX nodes.

Qm.n: m integer bits, n = 31 - m fraction bits. Facts from gemmlowp's fixedpoint/fixedpoint.h and TFLite's
kernels/internal/common.h.
"""

from __future__ import annotations

import numpy as np

from dovetail.ir.types import Array

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
    own = getattr(x, "shifted_to_nearest", None)
    if own is not None:
        followed: Array = own(exponent)
        return followed
    mask = (np.int64(1) << exponent) - 1
    result: Array = (x >> exponent) + ((x & mask) > (mask >> 1) + (x < 0))
    return result


def power_of_two(exponent: Array) -> Array:
    """2**exponent."""
    own = getattr(exponent, "as_power", None)
    result: Array = np.int64(1) << exponent if own is None else own()
    return result


def look_up(table: Array, index: Array) -> Array:
    """table[index]; a followed index knows its own way, since numpy does not ask it."""
    found = getattr(index, "taken_from", None)
    result: Array = table[index] if found is None else found(table)
    return result


def leading_zeros(x: Array) -> Array:
    """Zero bits before the first one of positive 32-bit values (those above 1 beyond bit 31 are not looked at)."""
    count: Array = x * 0 + 31
    for bit in range(1, 32):
        count = count - (x >= (1 << bit))
    return count


def _saturating_left(x: Array, bits: int) -> Array:
    result: Array = np.clip(x << bits, -(1 << 31), ONE)
    return result


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
    return estimate


def reciprocal(x: Array, integer_bits: int) -> tuple[Array, Array]:
    """1/x of positive Qm.n x as (Q0.31 r, shift b): 1/x is about r * 2**-b."""
    headroom = leading_zeros(x)
    fraction = (x << headroom) - (1 << 31)
    return _saturating_left(_newton(fraction), 1), integer_bits - headroom


ROOT_OF_HALF = 1518500250
"""2**(-1/2) in Q0.31."""
FOURTH_ROOT_OF_HALF = 1805811301
"""2**(-1/4) in Q0.31."""
LOG_OF_TWO = 1488522236
"""log(2) in Q0.31."""
LOG_SERIES = (117049297, 127690142, 1057819769, 638450708)
"""Constants of the quotient of polynomials below: 11/240 and 1/20 of 2**(1/4), 2**(5/4) - 2**(1/2), 2**(1/4)/4."""


def logarithm(x: Array, integer_bits: int) -> Array:
    """log(x) in Q5.26 of x >= 1 in Qm.n, m = `integer_bits`: log_x_for_x_greater_than_or_equal_to_1."""
    quarter, step = 1 << 23, 1 << 25  # in Q6.25
    zeros = leading_zeros(x)
    first = _saturating_left(high_product(x << (zeros - 1), ROOT_OF_HALF), 1)
    headroom = leading_zeros(high_product(x, ROOT_OF_HALF)) - 1
    second = np.minimum(x << headroom, ONE)
    fraction = np.minimum(first, second)
    power = np.maximum((integer_bits - zeros) * step + quarter, (integer_bits - headroom) * step - quarter)
    over_numerator, over_denominator, one, slope = LOG_SERIES
    half_sum = (fraction + FOURTH_ROOT_OF_HALF + 1) >> 1
    q = (fraction - FOURTH_ROOT_OF_HALF) * 2
    square = high_product(q, q)
    numerator = high_product(q, fraction) + high_product(high_product(q, square), over_numerator)
    inner = high_product(square, over_denominator) + one + q
    denominator = high_product(half_sum, inner) + high_product(q, slope)
    inverse = _saturating_left(_newton(denominator), 1)
    total = high_product(power, LOG_OF_TWO) + high_product(rounding_shift(numerator, 6), inverse)
    return _saturating_left(total, 1)


def inverse_root(value: Array) -> tuple[Array, Array]:
    """1 / sqrt(value) of positive integers as (multiplier, shift): GetInvSqrtQuantizedMultiplierExp, shifts to the
    left."""
    known = np.maximum(value, 2)
    large = (known >= 1 << 29) * 1
    known = known >> (large * 2)
    pairs = ((leading_zeros(known) - 1) >> 1) - 1
    shift = large + 11 - pairs
    half = rounding_shift((known << (pairs * 2)) >> 1, 1)
    x = value * 0 + (1 << 28)  # in Q3.28, as all below after a shift
    for _ in range(5):
        cube = _saturating_left(high_product(high_product(x, x), x), 6)
        x = _saturating_left(high_product(x, 3 << 27) - high_product(half, cube), 3)
    multiplier = high_product(x, ROOT_OF_HALF) << np.maximum(-shift, 0)
    return np.where(value <= 1, ONE, multiplier), np.where(value <= 1, 0, np.minimum(-shift, 0))


def sigmoid(a: Array) -> Array:
    """1 / (1 + exp(-a)) in Q0.31 for Q4.27 a."""
    positive = _saturating_left(_newton(exponential(-np.abs(a), 4)), 1)
    return np.where(a == 0, 1 << 30, np.where(a > 0, positive, ONE - positive))


def tanh(a: Array) -> Array:
    """The hyperbolic tangent in Q0.31 for Q4.27 a; 2a is the same number as Q5.26."""
    size = _saturating_left(_newton(exponential(-np.abs(a), 5)) - (1 << 29), 2)
    return np.asarray(np.sign(a) * size)
