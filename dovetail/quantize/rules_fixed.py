"""Rules for quotients, slopes, squared differences, products of two activations, comparisons and the like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.errors import ModelError
from dovetail.graph.types import Array, DType
from dovetail.operators.activation import LogSoftmax
from dovetail.operators.arithmetic import Add, Offset, Requantize, Rounding
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.fixed import FixedDivide, FixedLogSoftmax, FixedNormalise, FixedSoftmax16, Sigmoid16
from dovetail.operators.linear import FullyConnected, MatrixProduct
from dovetail.operators.logic import Compare
from dovetail.operators.reduction import Normalise
from dovetail.operators.selection import Resample
from dovetail.quantize.multiplier import multiplier_arrays, quantize_multiplier, softmax_parameters
from dovetail.quantize.steps import Bounds, Emitter, Operand, Quantised, Target, activations

BYTES = (DType.INT8, DType.UINT8)


def refusal(operator: Operator, x: Quantised) -> ModelError:
    """The error for integers an operator has no form for."""
    kind = getattr(operator, "kind", None)
    name = kind.value if kind is not None else type(operator).__name__
    return ModelError(
        f"{name} of {x.kind.dtype.text} has no integer form in Dovetail",
        hint="take this operator out of the quantised part of the network, or compile it with --float",
    )


def centred(emitter: Emitter, x: Quantised, stem: str) -> str:
    """x less its zero point, int32."""
    return emitter.add(Offset(-x.target.zero_point, DType.INT32), [x.name], emitter.fresh(stem))


def divide(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """A quotient of 8-bit values (micro/kernels/div.cc: the factor in float32)."""
    a, b = activations(operator, operands)
    if any(value.kind.dtype not in BYTES for value in (a, b)):
        raise refusal(operator, a)
    factor = np.float32(a.target.scale) / (np.float32(b.target.scale) * np.float32(target.scale))
    multiplier, shift = quantize_multiplier(float(factor))
    fixed = FixedDivide(a.target.zero_point, b.target.zero_point, target.zero_point, multiplier, shift)
    return emitter.clip(emitter.add(fixed, [a.name, b.name], emitter.fresh(f"{stem}_quotient")), target, bounds, stem)


def two_slopes(
    emitter: Emitter,
    x: Quantised,
    falling: str,
    factors: tuple[float, float],
    target: Target,
    bounds: Bounds,
    stem: str,
) -> str:
    """Positive values scaled by the first factor, plus `falling`, which is 0 where they are positive, by the second."""
    zero = emitter.constant(f"{stem}_zero", np.zeros(1, np.int32))
    rising = emitter.add(Binary(BinaryKind.MAXIMUM), [centred(emitter, x, f"{stem}_centred"), zero], f"{stem}_rising")
    terms = []
    parts = ((rising, factors[0], target.zero_point, "above"), (falling, factors[1], 0, "below"))
    for value, factor, offset, side in parts:
        scaling = Requantize(emitter.rounding, 0, offset)
        name = emitter.fresh(f"{stem}_{side}")
        terms.append(emitter.requantize(value, multiplier_arrays([factor]), scaling, name))
    return emitter.clip(emitter.add(Add(), terms, emitter.fresh(f"{stem}_sum")), target, bounds, stem)


def negative_part(emitter: Emitter, x: Quantised, stem: str) -> str:
    """x less its zero point where that is negative, else 0."""
    zero = emitter.constant(f"{stem}_none", np.zeros(1, np.int32))
    return emitter.add(Binary(BinaryKind.MINIMUM), [centred(emitter, x, f"{stem}_lowered"), zero], f"{stem}_falling")


def slope_per_channel(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """PRelu (micro/kernels/prelu_common.cc): one product for each sign. A float slope is taken in 8 bits."""
    (x,) = activations(operator, operands[:1])
    slope = operands[1] if isinstance(operands[1], Quantised) else _quantised_slope(emitter, operands[1], stem)
    (slope,) = activations(operator, [slope])
    if x.kind.dtype.bits > 16 or slope.kind.dtype.bits > 8:
        raise refusal(operator, x)
    terms = [negative_part(emitter, x, stem), centred(emitter, slope, f"{stem}_slope")]
    falling = emitter.add(Binary(BinaryKind.MULTIPLY), terms, emitter.fresh(f"{stem}_product"))
    scale = x.target.scale
    factors = (scale / target.scale, scale * slope.target.scale / target.scale)
    return two_slopes(emitter, x, falling, factors, target, bounds, stem)


def _quantised_slope(emitter: Emitter, slope: Array, stem: str) -> Quantised:
    """Float slopes as int8 without a zero point."""
    scale = np.array([max(float(np.abs(slope).max()), 1e-6) / 127], np.float32)
    name = emitter.constant(f"{stem}_slopes", np.rint(slope / scale[0]).astype(np.int8))
    return Quantised(name, emitter.builder.type_of(name), scale, np.zeros(1, np.int64), 0, None)


def squared_difference(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """Both operands scaled to twice the larger scale, 7 bits of head-room (micro/kernels/squared_difference.cc)."""
    values = activations(operator, operands)
    if any(value.kind.dtype.bits > 16 for value in values):
        raise refusal(operator, values[0])
    left_shift = 0 if any(value.kind.dtype.bits > 8 for value in values) else 7
    twice_larger = 2.0 * max(value.target.scale for value in values)
    terms = []
    for side, value in zip(("left", "right"), values, strict=True):
        scaling = Requantize(emitter.rounding, value.target.zero_point, 0, left_shift)
        factors = multiplier_arrays([value.target.scale / twice_larger])
        terms.append(emitter.requantize(value.name, factors, scaling, emitter.fresh(f"{stem}_{side}")))
    square = emitter.add(operator, terms, emitter.fresh(f"{stem}_square"))
    factor = twice_larger * twice_larger / ((1 << 2 * left_shift) * target.scale)
    return emitter.scale_to(square, [factor], target, bounds, stem)


def matrix_product(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """Sums of products of two activations (micro/kernels/batch_matmul.cc); of a constant matrix as a dense layer."""
    a, b = activations(operator, operands)
    if any(value.kind.dtype not in (*BYTES, DType.INT16) for value in (a, b)):
        raise refusal(operator, a)
    wide = a.kind.dtype is DType.INT16
    name = emitter.fresh(f"{stem}_accumulator")
    zero_points = (a.target.zero_point, b.target.zero_point)
    if b.array is not None and b.array.ndim == 2 and not wide:
        rows = emitter.constant(f"{b.name}_rows", np.ascontiguousarray(b.array.T), b.kind.dtype)
        total = emitter.add(FullyConnected(*zero_points), [a.name, rows], name)
    else:
        total = emitter.add(MatrixProduct(*zero_points), [a.name, b.name], name)
    scaling = Requantize(Rounding.WIDE if wide else emitter.rounding, 0, target.zero_point)
    factors = multiplier_arrays([a.target.scale * b.target.scale / target.scale])
    scaled = emitter.requantize(total, factors, scaling, emitter.fresh(f"{stem}_scaled"))
    return emitter.clip(scaled, target, bounds, stem)


def log_softmax(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """TFLite's fixed-point log-softmax, requantised where the result has another scale than its 1/16."""
    assert isinstance(operator, LogSoftmax)
    (x,) = activations(operator, operands)
    if x.kind.dtype is not DType.INT8:
        raise refusal(operator, x)
    multiplier, shift, diff_min = softmax_parameters(x.target.scale, 1.0)
    back = quantize_multiplier(2.0 ** (31 - shift) / multiplier)
    fixed = FixedLogSoftmax(multiplier, shift, diff_min, *back)
    if target == Target(DType.INT8, 1 / 16, 127) and bounds.open:
        return emitter.add(fixed, [x.name], stem)
    fine = emitter.add(fixed, [x.name], emitter.fresh(f"{stem}_native"))
    return emitter.scale_to(fine, [1 / 16 / target.scale], target, bounds, stem, 127)


def normalise(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """TFLite's rows of length 1 (reference/integer_ops/l2normalization.h), requantised where not in steps of 1/128."""
    assert isinstance(operator, Normalise)
    (x,) = activations(operator, operands)
    if not operator.summed or x.kind.dtype is not DType.INT8:
        raise refusal(operator, x)
    fixed = FixedNormalise(x.target.zero_point)
    if target == Target(DType.INT8, 1 / 128, 0) and bounds.open:
        return emitter.add(fixed, [x.name], stem)
    fine = emitter.add(fixed, [x.name], emitter.fresh(f"{stem}_native"))
    return emitter.scale_to(fine, [1 / 128 / target.scale], target, bounds, stem)


_WEIGHT_BITS = 10
"""Fraction bits of TFLite's interpolation weights (reference/resize_bilinear.h)."""


def resample(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """Weights in steps of 1/1024, the sum of products rounded once, halves away from zero."""
    assert isinstance(operator, Resample)
    (x,) = activations(operator, operands[:1])
    if x.kind.dtype not in BYTES or len(operator.axes) > 2:
        raise refusal(operator, x)
    names = [x.name]
    for places, weights in zip(operands[1::2], operands[2::2], strict=True):
        assert isinstance(places, np.ndarray) and isinstance(weights, np.ndarray)
        steps = np.rint(weights.astype(np.float64) * (1 << _WEIGHT_BITS)).astype(np.int32)
        names += [emitter.constant(f"{stem}_places", places), emitter.constant(f"{stem}_weights", steps)]
    total = emitter.add(operator, names, emitter.fresh(f"{stem}_sum"))
    bits = _WEIGHT_BITS * len(operator.axes)
    same = x.target == target
    unit = 1 << bits
    # Doubled, then halved by the multiplier without a rounding, so that the shift alone rounds.
    factors = (np.array([1 << 30], np.int32), np.array([-bits], np.int32))
    plain = Requantize(emitter.rounding, 0, 0, 1)
    if same:
        mean = emitter.requantize(total, factors, plain, emitter.fresh(f"{stem}_mean"))
        return emitter.clip(mean, target, bounds, stem)
    factor = x.target.scale / target.scale / unit
    return emitter.scale_to(total, [factor], target, bounds, stem, x.target.zero_point * unit)


def sixteen_bits(emitter: Emitter, tangent: bool, x: Quantised, target: Target, bounds: Bounds, stem: str) -> str:
    """Sigmoid and tanh of int16 (micro/kernels/{logistic_common,tanh}.cc): a factor to steps of 1/12288."""
    native = Target(DType.INT16, 2.0**-15, 0)
    power = int(np.rint(np.log2(x.target.scale)))
    exact = x.target.scale == 2.0**power
    shift = power + 12
    if exact and 0 <= shift <= int(tangent):
        fixed = Sigmoid16(3 << shift, 0, tangent)
    else:
        factor, shift = x.target.scale * 4096.0 * 3.0, 0
        while factor <= 32767.0 / 2 and shift <= 30:
            factor, shift = factor * 2, shift + 1
        fixed = Sigmoid16(int(factor), shift, tangent)
    if x.target.zero_point or x.target.scale * 12288 > 32767:
        raise ModelError(f"a 16-bit sigmoid of {x.name} needs the zero point 0 and a smaller scale",
                         hint="quantise it symmetrically, with a scale of at most 2.67")
    if target == native and bounds.open:
        return emitter.add(fixed, [x.name], stem)
    fine = emitter.add(fixed, [x.name], emitter.fresh(f"{stem}_native"))
    return emitter.scale_to(fine, [native.scale / target.scale], target, bounds, stem)


def softmax_16(emitter: Emitter, beta: float, x: Quantised, target: Target, bounds: Bounds, stem: str) -> str:
    """TFLite's softmax of int16 (micro/kernels/softmax_common.cc), requantised from its 1/32768 where wanted."""
    fixed = FixedSoftmax16(*quantize_multiplier(x.target.scale * beta / (10.0 / 65535.0)))
    native = Target(DType.INT16, 2.0**-15, 0)
    if target == native and bounds.open:
        return emitter.add(fixed, [x.name], stem)
    fine = emitter.add(fixed, [x.name], emitter.fresh(f"{stem}_native"))
    return emitter.scale_to(fine, [native.scale / target.scale], target, bounds, stem)


_COMPARED_BITS = 8
"""Head-room of TFLite's comparisons (micro/kernels/comparisons.cc), which scale by the operands' own scales."""


def compare(emitter: Emitter, operator: Compare, values: Sequence[Quantised], stem: str) -> str:
    """A comparison of quantised values, as exact as TFLite Micro's: both in steps of 1/256."""
    terms = []
    for side, value in zip(("left", "right"), activations(operator, values), strict=True):
        if value.kind.dtype.bits > 16:
            raise refusal(operator, value)
        scaling = Requantize(emitter.rounding, value.target.zero_point, 0, _COMPARED_BITS)
        factors = multiplier_arrays([value.target.scale])
        terms.append(emitter.requantize(value.name, factors, scaling, emitter.fresh(f"{stem}_{side}")))
    return emitter.add(operator, terms, stem)
