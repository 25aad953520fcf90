"""Fixed-point arithmetic as standard ONNX nodes on int64, exact in every runtime.

ONNX shifts only unsigned integers and divides towards zero, so shifts are written as divisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import DType
from dovetail.operators import gemmlowp
from dovetail.operators.activation import FixedSoftmax
from dovetail.operators.arithmetic import Requantize, Rounding

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


def _number(body: OnnxBody, value: int) -> str:
    return body.scalar(value, DType.INT64)


def _power(body: OnnxBody, exponent: str) -> str:
    """2**exponent for int64 0 <= exponent <= 62."""
    powers = np.int64(1) << np.arange(63, dtype=np.int64)
    return body.add("Gather", [body.tensor(powers), exponent])


def shift_right(body: OnnxBody, total: str, shift: str) -> str:
    """total / 2**shift rounded down, both int64."""
    divisor = _power(body, shift)
    rest = body.add("Mod", [total, divisor])
    return body.add("Div", [body.add("Sub", [total, rest]), divisor])


def with_sign(body: OnnxBody, size: str, x: str) -> str:
    """size where x is not negative, -size elsewhere. (ONNX Runtime 1.31's Sign of int64 looks at 32 bits only.)"""
    positive = body.add("GreaterOrEqual", [x, _number(body, 0)])
    return body.add("Where", [positive, size, body.add("Neg", [size])])


def high_product(body: OnnxBody, a: str, b: str) -> str:
    """a * b / 2**31, halves up (`gemmlowp.high_product`)."""
    raised = body.add("Add", [body.add("Mul", [a, b]), _number(body, 1 << 30)])
    return shift_right(body, raised, _number(body, 31))


def rounding_shift(body: OnnxBody, x: str, exponent: str) -> str:
    """x / 2**exponent, halves away from zero (`gemmlowp.rounding_shift`)."""
    divisor = _power(body, exponent)
    half = body.add("Div", [divisor, _number(body, 2)])
    size = body.add("Div", [body.add("Add", [body.add("Abs", [x]), half]), divisor])
    return with_sign(body, size, x)


def _single(body: OnnxBody, x: str, multiplier: str, total_shift: str) -> str:
    """(x * multiplier + 2**(total_shift - 1)) >> total_shift."""
    half = _power(body, body.add("Sub", [total_shift, _number(body, 1)]))
    product = body.add("Add", [body.add("Mul", [x, multiplier]), half])
    return shift_right(body, product, total_shift)


def fixed_point(body: OnnxBody, x: str, multiplier: str, shift: str, rounding: Rounding) -> str:
    """`dovetail.operators.arithmetic.fixed_point` on int64 values."""
    if rounding is Rounding.SINGLE:
        return _single(body, x, multiplier, body.add("Sub", [_number(body, 31), shift]))
    if rounding is Rounding.WIDE:
        fits = body.add("Less", [multiplier, _number(body, 0x7FFF0000)])
        raised = body.add("Add", [multiplier, _number(body, 1 << 15)])
        cut = body.add("Div", [raised, _number(body, 1 << 16)])
        reduced = body.add("Where", [fits, cut, _number(body, 0x7FFF)])
        return _single(body, x, reduced, body.add("Sub", [_number(body, 15), shift]))
    zero = _number(body, 0)
    left = body.add("Max", [shift, zero])
    right = body.add("Max", [body.add("Neg", [shift]), zero])
    raised = body.cast(body.add("Mul", [x, _power(body, left)]), DType.INT32)
    return rounding_shift(body, high_product(body, body.cast(raised, DType.INT64), multiplier), right)


def requantize(body: OnnxBody, operator: Requantize, inputs: Sequence[str]) -> str:
    """The meaning of `Requantize`: operands x, multiplier, shift."""
    x, multiplier, shift = (body.cast(name, DType.INT64) for name in inputs)
    if operator.input_zero_point:
        x = body.add("Sub", [x, _number(body, operator.input_zero_point)])
    if operator.left_shift:
        x = body.add("Mul", [x, _number(body, 1 << operator.left_shift)])
    y = fixed_point(body, x, multiplier, shift, operator.rounding)
    if operator.output_zero_point:
        y = body.add("Add", [y, _number(body, operator.output_zero_point)])
    return body.cast(y, DType.INT32)


def _saturating_double(body: OnnxBody, x: str, factor: int) -> str:
    bounds = [_number(body, -(1 << 31)), _number(body, gemmlowp.ONE)]
    return body.add("Clip", [body.add("Mul", [x, _number(body, factor)]), *bounds])


def _reciprocal(body: OnnxBody, x: str, integer_bits: int) -> tuple[str, str]:
    """`gemmlowp.reciprocal` of an int64 value whose last axis is 1."""
    powers = body.tensor(np.int64(1) << np.arange(1, 31, dtype=np.int64))
    reached = body.cast(body.add("GreaterOrEqual", [x, powers]), DType.INT64)
    bits = body.add("ReduceSum", [reached, body.integers((-1,))], keepdims=1)
    headroom = body.add("Sub", [_number(body, 31), bits])
    raised = body.add("Mul", [x, _power(body, headroom)])
    # (raised - 2**31) is the fraction; adding 1 as (2**31 - 1) and 1 to round up leaves raised itself
    half = body.add("Div", [raised, _number(body, 2)])
    slope = high_product(body, half, _number(body, gemmlowp.START_32_17))
    estimate = body.add("Add", [slope, _number(body, gemmlowp.START_48_17)])
    for _ in range(3):
        error = body.add("Sub", [_number(body, 1 << 29), high_product(body, half, estimate)])
        step = _saturating_double(body, high_product(body, estimate, error), 4)
        estimate = body.add("Add", [estimate, step])
    over_unit = body.add("Sub", [_number(body, integer_bits), headroom])
    return _saturating_double(body, estimate, 2), over_unit


def softmax(body: OnnxBody, operator: FixedSoftmax, x: str) -> str:
    """The meaning of `FixedSoftmax`: exp by its table, the sum, its reciprocal, the products."""
    wide = body.cast(x, DType.INT32)
    largest = body.add("ReduceMax", [wide, body.integers((-1,))], keepdims=1)
    table = body.tensor(operator.table().astype(np.int64))
    powers = body.add("Gather", [table, body.add("Sub", [largest, wide])])
    terms = rounding_shift(body, powers, _number(body, 12))
    total = body.add("ReduceSum", [terms, body.integers((-1,))], keepdims=1)
    reciprocal, over_unit = _reciprocal(body, total, 12)
    exponent = body.add("Add", [over_unit, _number(body, 31 - operator.dtype.bits)])
    scaled = rounding_shift(body, high_product(body, reciprocal, powers), exponent)
    result = body.add("Add", [scaled, _number(body, operator.dtype.low)])
    bounds = [_number(body, operator.dtype.low), _number(body, operator.dtype.high)]
    return body.cast(body.add("Clip", [result, *bounds]), operator.dtype)
