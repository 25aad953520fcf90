"""Tables of 256 entries for functions of one 8-bit value, equal to TFLite Micro's int8 kernels where it has one.

Facts from tflite-micro's reference/integer_ops/{logistic,tanh}.h, reference/{hard_swish,leaky_relu}.h and the
Prepare functions of its micro kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dovetail.ir.graph import Node
from dovetail.ir.operators import gemmlowp
from dovetail.ir.operators.activation import UNARY_FUNCTIONS, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Clip, Lookup, Rounding, fixed_point, quantize_multiplier
from dovetail.ir.pattern import apply, operand
from dovetail.ir.rules import Draft, Rule, RuleMatch
from dovetail.ir.types import Array, DType
from dovetail.quantize.context import QuantParameters

_LOOKUP, _END = apply(Lookup), apply(Clip, operand("x"))


def unary_table(operator: Unary, x: QuantParameters, y: QuantParameters) -> Array:
    """The result for every value of x's type, lowest first, in y's type.

    TFLite Micro's values for int8 SIGMOID and TANH with their fixed output scale, HARD_SWISH and LEAKY_RELU;
    otherwise the real function, rounded to the nearest step (halves to even); 0 where the function is not defined.
    """
    exact = _EXACT.get(operator.kind)
    centred = np.arange(x.dtype.low, x.dtype.high + 1, dtype=np.int64) - x.zero_point
    found = exact(operator, centred, x, y) if exact and x.dtype is y.dtype is DType.INT8 else None
    if found is None:
        operand = (centred.astype(np.float32) * np.float32(x.scale)).astype(np.float64)
        with np.errstate(all="ignore"):
            real = np.nan_to_num(UNARY_FUNCTIONS[operator.kind].compute(operand, operator.alpha), nan=0.0)
            limit = float(1 << 20)  # beyond every type; infinities become it too
            found = np.rint(np.clip(real / y.scale, -limit, limit)).astype(np.int64) + y.zero_point
    return np.asarray(np.clip(found, y.dtype.low, y.dtype.high).astype(y.dtype.numpy))


def _logistic(operator: Unary, centred: Array, x: QuantParameters, y: QuantParameters) -> Array | None:
    """Sigmoid and tanh: in Q4.27, saturated beyond a radius of steps."""
    tangent = operator.kind is UnaryKind.TANH
    if (y.scale, y.zero_point) != ((1 / 128, 0) if tangent else (1 / 256, -128)):
        return None
    multiplier, shift = quantize_multiplier(x.scale * (1 << 27))
    exponent = max(shift, math.frexp(x.scale * (1 << 27))[1])  # beyond 30 no step but 0 is in reach, and that saturates
    radius = math.floor(15 * (1 << 27) / 2**exponent)
    raw = fixed_point(np.clip(centred, -radius, radius), multiplier, shift, Rounding.DOUBLE)
    fine = (
        gemmlowp.rounding_shift(gemmlowp.tanh(raw), 24)
        if tangent
        else gemmlowp.rounding_shift(gemmlowp.sigmoid(raw), 23)
    )
    return np.where(centred <= -radius, -128, np.where(centred >= radius, 127, fine + y.zero_point))


def _high_product16(a: Array, b: int) -> Array:
    """a * b / 2**15 of int16 values, halves up."""
    return np.asarray((a * b + (1 << 14)) >> 15)


def _saturate16(a: Array) -> Array:
    return np.asarray(np.clip(a, -32768, 32767))


def _multiplier16(real: float) -> tuple[int, int]:
    """A factor as a 16-bit multiplier and a shift."""
    multiplier, shift = quantize_multiplier(real)
    return min((multiplier + (1 << 15)) >> 16, 32767), shift


def _hard_swish(_operator: Unary, centred: Array, x: QuantParameters, y: QuantParameters) -> Array | None:
    fine = np.float32(1 / 128) * np.float32(x.scale)
    output_multiplier, output_shift = _multiplier16(float(fine / np.float32(y.scale)))
    relu_multiplier, relu_shift = _multiplier16(float(fine / (np.float32(3.0) / np.float32(32768.0))))
    if output_shift > 0:
        return None
    raised = centred * 128
    relu = _saturate16(raised << (relu_shift - 1)) if relu_shift > 0 else raised
    relu = _high_product16(relu, relu_multiplier)
    if relu_shift > 0:
        relu = _saturate16(relu << 1)
    elif relu_shift < 0:
        relu = gemmlowp.rounding_shift(relu, -relu_shift)
    product = ((relu + (1 << 15)) >> 1) * _high_product16(raised, output_multiplier)
    towards_zero = np.sign(product) * (np.abs(product) >> 15)
    return gemmlowp.rounding_shift(towards_zero, -output_shift) + y.zero_point


def _leaky_relu(operator: Unary, centred: Array, x: QuantParameters, y: QuantParameters) -> Array:
    alpha = np.float32(x.scale) * np.float32(operator.alpha) / np.float32(y.scale)
    identity = np.float32(x.scale) / np.float32(y.scale)
    pairs = [quantize_multiplier(abs(float(factor))) for factor in (identity, alpha)]
    sides = (centred, -centred if alpha < 0 else centred)
    above, below = (fixed_point(side, m, s, Rounding.DOUBLE) for side, (m, s) in zip(sides, pairs, strict=True))
    return np.asarray(np.where(centred >= 0, above, below) + y.zero_point)


def _absolute(_operator: Unary, centred: Array, x: QuantParameters, y: QuantParameters) -> Array | None:
    if x.scale == y.scale:
        return np.asarray(np.abs(centred) + y.zero_point)
    multiplier, shift = quantize_multiplier(x.scale / y.scale)
    return np.asarray(fixed_point(np.abs(centred), multiplier, shift, Rounding.DOUBLE) + y.zero_point)


def _reciprocal_root(_operator: Unary, centred: Array, x: QuantParameters, y: QuantParameters) -> Array | None:
    """micro/kernels/elementwise.cc, with 20 bits more in between; from 0 down the largest value."""
    multiplier, shift = quantize_multiplier(1.0 / (math.sqrt(x.scale) * y.scale))
    inverse, inverse_shift = gemmlowp.inverse_root(np.maximum(centred, 1))
    fine = fixed_point(np.ones_like(centred), inverse, inverse_shift + 20, Rounding.DOUBLE)
    scaled = fixed_point(fine, multiplier, shift - 20, Rounding.DOUBLE) + y.zero_point
    return np.where(centred > 0, scaled, y.dtype.high)


def _looked_up(operator: Unary, centred: Array, x: QuantParameters, y: QuantParameters) -> Array | None:
    """The function in float32, rounded with halves away from zero (kernels/internal/common.h: LUTPopulateInt8)."""
    operand = (np.float32(x.scale) * centred.astype(np.float32)).astype(np.float32)
    with np.errstate(all="ignore"):
        real = UNARY_FUNCTIONS[operator.kind].compute(operand.astype(np.float64), operator.alpha).astype(np.float32)
    if not np.isfinite(real).all():
        return None
    scaled = (real * (np.float32(1) / np.float32(y.scale))).astype(np.float64)
    away = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
    return np.asarray(np.clip(away, -(1 << 20), 1 << 20).astype(np.int64) + y.zero_point)


_EXACT: dict[UnaryKind, Callable[[Unary, Array, QuantParameters, QuantParameters], Array | None]] = {
    UnaryKind.SIGMOID: _logistic,
    UnaryKind.TANH: _logistic,
    UnaryKind.HARD_SWISH: _hard_swish,
    UnaryKind.LEAKY_RELU: _leaky_relu,
    UnaryKind.ABSOLUTE: _absolute,
    UnaryKind.RECIPROCAL_ROOT: _reciprocal_root,
    **dict.fromkeys((UnaryKind.ELU, UnaryKind.GELU, UnaryKind.GELU_TANH, UnaryKind.EXPONENTIAL), _looked_up),
}


def _cone(draft: Draft, root: Node) -> tuple[set[str], int] | None:
    """The bytes a value is computed from element by element, and how many tables are between; None where it is not."""
    leaves, tables, frontier, seen = set[str](), 0, [root.output], set[str]()
    while frontier:
        value = frontier.pop()
        node = root if value == root.output else draft.producer(value)
        looked_up = node is not None and _LOOKUP.fits(node)
        if draft.types[value].shape != draft.types[root.output].shape:
            return None
        if node != root and draft.types[value].dtype.bits == 8 and not looked_up:
            leaves.add(value)
        elif node is None or not node.operator.pointwise:
            return None
        elif value not in seen:
            seen.add(value)
            tables += looked_up
            frontier += [name for name in node.inputs if name not in draft.constants]
            if not looked_up and any(draft.constants[name].size > 1 for name in node.inputs if name in draft.constants):
                return None
    return leaves, tables


def _table_of(at: RuleMatch) -> str | None:
    draft, kind = at.draft, at.type(at.root.output).dtype
    cone = _cone(draft, at.root)
    if cone is None or len(cone[0]) != 1 or not cone[1] or kind.bits > 16:
        return None
    (leaf,) = cone[0]
    held = at.type(leaf).dtype

    def computed(value: str) -> Array:
        if value in draft.constants:
            return draft.constants[value]
        if value == leaf:
            return np.arange(held.low, held.high + 1).astype(held.numpy)
        node = draft.producer(value)
        assert node is not None
        return of(node)

    def of(node: Node) -> Array:
        return node.operator.evaluate([computed(name) for name in node.inputs])

    return at.add(Lookup(), leaf, at.constant(of(at.root), kind))


one_table = Rule(_END, _table_of)
"""A table of a byte, computed on element by element with other functions of the same byte, is one table (as in x times
sigmoid(x))."""
