"""How each arithmetic operator is computed on integers: one rule per operator, in `RULES` by its type.

The factors and their rounding are TFLite Micro's, whose sources the comments name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.operators.activation import FixedSoftmax, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add, Lookup, Offset, Rounding, quantize_multiplier
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare
from dovetail.ir.operators.fixed import (
    FixedDivide,
    FixedLogSoftmax,
    FixedNormalise,
    FixedSoftmax16,
    FixedStandard,
    Sigmoid16,
)
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Resample
from dovetail.ir.operators.recurrent import Recurrent
from dovetail.ir.operators.reduction import AveragePool2d, Normalise, Reduce, ReduceKind, SumPool2d
from dovetail.ir.types import Array, DType
from dovetail.quantize.context import QuantisationRequest, QuantisedValue, QuantParameters
from dovetail.quantize.linear import linear
from dovetail.quantize.recurrent import recurrent
from dovetail.quantize.tables import unary_table

BYTES = (DType.INT8, DType.UINT8)
_Q15 = QuantParameters(DType.INT16, 2.0**-15, 0)

Rule = Callable[[QuantisationRequest[Any]], str]
"""Gives the name of the integers; raises ModelError for operands it has no integer form for."""

RULES: dict[type[Operator], Rule] = dict.fromkeys((Conv2d, DepthwiseConv2d, FullyConnected), linear)
"""The rule of each operator that computes. What chooses elements (`Operator.chosen_from`) and Clamp need none."""

RULES[Recurrent] = recurrent

_BINARY: dict[BinaryKind, Rule] = {}
"""Rules of functions of two values, the product's aside."""


def _rule(*kinds: type[Operator] | BinaryKind) -> Callable[[Rule], Rule]:
    """Make a function the rule of some operators, or of some functions of two values."""

    def register(rule: Rule) -> Rule:
        for kind in kinds:
            if isinstance(kind, BinaryKind):
                _BINARY[kind] = rule
            else:
                RULES[kind] = rule
        return rule

    return register


@_rule(Add, BinaryKind.SUBTRACT)
def _add(ask: QuantisationRequest[Operator]) -> str:
    """Both operands raised, scaled to twice the larger scale, added, requantised (micro/kernels/add_common.cc).

    A difference is computed alike (sub_common.cc).
    """
    values = ask.activations()
    left_shift = 15 if any(kind.bits > 8 for kind in (ask.target.dtype, *(v.kind.dtype for v in values))) else 20
    terms, twice_larger = _with_one_scale(ask, values, left_shift)
    total = terms[0]
    for term in terms[1:]:
        total = ask.add(ask.operator, [total, term], "accumulator")
    return ask.finish(total, [twice_larger / ((1 << left_shift) * ask.target.scale)])


def _with_one_scale(
    ask: QuantisationRequest[Any], values: list[QuantisedValue], left_shift: int
) -> tuple[list[str], float]:
    """The values without zero points, raised by some bits, in steps of twice the larger scale; and that scale."""
    twice_larger = 2.0 * max(value.form.scale for value in values)
    sides = ("left", "right", *map(str, range(2, len(values))))
    terms = [
        ask.scaled(value.name, [value.form.scale / twice_larger], side, (value.form.zero_point, 0), left_shift)
        for side, value in zip(sides, values, strict=False)
    ]
    return terms, twice_larger


@_rule(Binary)
def _binary(ask: QuantisationRequest[Binary]) -> str:
    """A product of the centred integers, scaled once (micro/kernels/mul_common.cc); others have rules of their own."""
    if ask.operator.kind in _BINARY:
        return _BINARY[ask.operator.kind](ask)
    values = ask.activations()
    if ask.operator.kind is not BinaryKind.MULTIPLY or any(value.kind.dtype.bits > 16 for value in values):
        raise ask.refuse(values[0])
    if all(value.kind.dtype.bits > 8 and value.form.zero_point for value in values):
        hint = "quantise one of the two symmetrically, with the zero point 0"
        raise ModelError("a product of two 16-bit values with zero points may leave 32 bits", hint=hint)
    terms = [_centred(ask, value, side) for side, value in zip(("left", "right"), values, strict=True)]
    product = ask.add(ask.operator, terms, "product")
    return ask.finish(product, [values[0].form.scale * values[1].form.scale / ask.target.scale])


def _centred(ask: QuantisationRequest[Any], x: QuantisedValue, word: str) -> str:
    """x less its zero point, int32."""
    return ask.add(Offset(-x.form.zero_point, DType.INT32), [x.name], word)


@_rule(BinaryKind.DIVIDE)
def _divide(ask: QuantisationRequest[Binary]) -> str:
    """A quotient of 8-bit values (micro/kernels/div.cc: the factor in float32)."""
    a, b = ask.activations()
    if any(value.kind.dtype not in BYTES for value in (a, b)):
        raise ask.refuse(a)
    factor = np.float32(a.form.scale) / (np.float32(b.form.scale) * np.float32(ask.target.scale))
    zero_points = (a.form.zero_point, b.form.zero_point, ask.target.zero_point)
    return ask.clip(
        ask.add(FixedDivide(*zero_points, *quantize_multiplier(float(factor))), [a.name, b.name], "quotient")
    )


@_rule(BinaryKind.SQUARED_DIFFERENCE)
def _squared_difference(ask: QuantisationRequest[Binary]) -> str:
    """Both operands scaled to twice the larger scale, 7 bits of head-room (micro/kernels/squared_difference.cc)."""
    values = ask.activations()
    if any(value.kind.dtype.bits > 16 for value in values):
        raise ask.refuse(values[0])
    left_shift = 0 if any(value.kind.dtype.bits > 8 for value in values) else 7
    terms, twice_larger = _with_one_scale(ask, values, left_shift)
    square = ask.add(ask.operator, terms, "square")
    return ask.finish(square, [twice_larger * twice_larger / ((1 << 2 * left_shift) * ask.target.scale)])


@_rule(BinaryKind.PRELU)
def _slope_per_channel(ask: QuantisationRequest[Binary]) -> str:
    """PRelu (micro/kernels/prelu_common.cc): one product for each sign. A float slope is taken in 8 bits."""
    (x,) = ask.activations(ask.operands[:1])
    given = ask.operands[1]
    (slope,) = ask.activations([given if isinstance(given, QuantisedValue) else _quantised_slope(ask, given)])
    if x.kind.dtype.bits > 16 or slope.kind.dtype.bits > 8:
        raise ask.refuse(x)
    terms = [_negative_part(ask, x), _centred(ask, slope, "slope")]
    falling = ask.add(Binary(BinaryKind.MULTIPLY), terms, "product")
    scale = x.form.scale
    return _two_slopes(ask, x, falling, (scale / ask.target.scale, scale * slope.form.scale / ask.target.scale))


def _quantised_slope(ask: QuantisationRequest[Any], slope: Array) -> QuantisedValue:
    """Float slopes as int8 without a zero point."""
    scale = np.array([max(float(np.abs(slope).max()), 1e-6) / 127], np.float32)
    name = ask.constant("slopes", np.rint(slope / scale[0]).astype(np.int8))
    return QuantisedValue(name, ask.emitter.builder.type_of(name), scale, np.zeros(1, np.int64), 0, None)


def _negative_part(ask: QuantisationRequest[Any], x: QuantisedValue) -> str:
    """x less its zero point where that is negative, else 0."""
    zero = ask.constant("none", np.zeros(1, np.int32))
    terms = [_centred(ask, x, "lowered"), zero]
    return ask.emitter.add(Binary(BinaryKind.MINIMUM), terms, f"{ask.stem}_falling")


def _two_slopes(ask: QuantisationRequest[Any], x: QuantisedValue, falling: str, factors: tuple[float, float]) -> str:
    """Positive values scaled by the first factor, plus `falling`, which is 0 where they are positive, by the second."""
    zero = ask.constant("zero", np.zeros(1, np.int32))
    terms = [_centred(ask, x, "centred"), zero]
    rising = ask.emitter.add(Binary(BinaryKind.MAXIMUM), terms, f"{ask.stem}_rising")
    above = ask.scaled(rising, [factors[0]], "above", (0, ask.target.zero_point))
    below = ask.scaled(falling, [factors[1]], "below")
    return ask.clip(ask.add(Add(), [above, below], "sum"))


@_rule(Reduce)
def _reduce(ask: QuantisationRequest[Reduce]) -> str:
    """The sum of the centred integers, scaled once; a mean's count is part of the factor, as for an average pool."""
    (x,), operator = ask.activations(), ask.operator
    if operator.kind not in (ReduceKind.SUM, ReduceKind.MEAN) or x.kind.dtype not in (*BYTES, DType.INT16):
        hint = "quantise its operand to 8 bits, or compile it with --float"
        raise ModelError(f"{operator.kind.value} of {x.kind.dtype.text} has no integer form in Dovetail", hint=hint)
    try:
        total = ask.add(Reduce(ReduceKind.SUM, operator.axes, x.form.zero_point), [x.name], "accumulator")
    except ValueError as error:
        raise ModelError(str(error), hint="reduce fewer elements at a time") from None
    count = prod(x.kind.shape[axis] for axis in operator.axes) if operator.kind is ReduceKind.MEAN else 1
    return ask.finish(total, _mean_multiplier(x.form.scale / ask.target.scale, count))


def _mean_multiplier(real: float, count: int) -> tuple[Array, Array]:
    """real / count as TFLite's MEAN has it: the multiplier of `real` divided by the count, rounded down.

    Not in the sources at hand; found by comparing forms with what TensorFlow Lite Micro computes.
    """
    multiplier, shift = quantize_multiplier(real)
    raised = min(count.bit_length() - 1, 32, 31 + shift)
    divided = (multiplier << raised) // count
    return np.array([divided], np.int32), np.array([shift - raised], np.int32)


@_rule(AveragePool2d)
def _average_pool(ask: QuantisationRequest[AveragePool2d]) -> str:
    """Equal quantisation: TFLite's integer average. Else its MEAN: the sum, scaled by the scales and 1/count."""
    (x,), operator = ask.activations(), ask.operator
    inner = ask.fresh("accumulator")
    if x.form == ask.target and not operator.scaled_sum:
        return ask.clip(ask.emitter.add(operator, [x.name], inner))
    factor = x.form.scale / ask.target.scale
    if any(max(pair) for pair in operator.padding):
        # The count is not the same everywhere, so the mean is taken first, with 8 more bits to round it finely.
        raised = ask.scaled(x.name, [1.0], "raised", (x.form.zero_point, 0), 8)
        return ask.finish(ask.emitter.add(operator, [raised], inner), [factor / 256])
    pool = SumPool2d(operator.kernel, operator.stride, operator.padding, x.form.zero_point)
    return ask.finish(ask.emitter.add(pool, [x.name], inner), _mean_multiplier(factor, prod(operator.kernel)))


def softmax_parameters(scale: float, beta: float) -> tuple[int, int, int]:
    """(multiplier, shift, diff_min) of `FixedSoftmax` for 8-bit inputs of this scale."""
    real = min(beta * scale * (1 << 26), float((1 << 31) - 1))
    multiplier, shift = quantize_multiplier(real)
    return multiplier, shift, -math.floor(31 * (1 << 26) / 2**shift)


@_rule(Softmax)
def _softmax(ask: QuantisationRequest[Softmax]) -> str:
    """TFLite's fixed-point softmax (of int16 micro/kernels/softmax_common.cc), requantised where the result has another
    scale than its 1/256."""
    (x,), target = ask.activations(), ask.target
    if x.kind.dtype is DType.INT16:
        fixed = FixedSoftmax16(*quantize_multiplier(x.form.scale * ask.operator.beta / (10.0 / 65535.0)))
        return ask.native(fixed, x, _Q15)
    if x.kind.dtype not in BYTES:
        raise ModelError(f"softmax of {x.kind.dtype.text} has no integer form", hint="quantise its operand to 8 bits")
    parameters = softmax_parameters(x.form.scale, ask.operator.beta)
    own = QuantParameters(target.dtype, 2.0**-target.dtype.bits, target.dtype.low)
    if target == own and target.dtype in (*BYTES, DType.INT16) and ask.bounds.open:
        return ask.emitter.add(FixedSoftmax(*parameters, target.dtype), [x.name], ask.stem)
    fine = ask.add(FixedSoftmax(*parameters, DType.INT16), [x.name], "fine")
    return ask.finish(fine, [2.0**-16 / target.scale], DType.INT16.low)


@_rule(LogSoftmax)
def _log_softmax(ask: QuantisationRequest[LogSoftmax]) -> str:
    """TFLite's fixed-point log-softmax, requantised where the result has another scale than its 1/16."""
    (x,) = ask.activations()
    if x.kind.dtype is not DType.INT8:
        raise ask.refuse(x)
    multiplier, shift, diff_min = softmax_parameters(x.form.scale, 1.0)
    if multiplier == 0:
        raise ModelError(
            f"log-softmax of values in steps of {x.form.scale:g} has no integer form", hint="quantise again"
        )
    back = quantize_multiplier(2.0 ** (31 - shift) / multiplier)
    return ask.native(FixedLogSoftmax(multiplier, shift, diff_min, *back), x, QuantParameters(DType.INT8, 1 / 16, 127))


@_rule(Normalise)
def _normalise(ask: QuantisationRequest[Normalise]) -> str:
    """TFLite's rows of length 1 (reference/integer_ops/l2normalization.h), requantised where not in steps of 1/128; of
    layer normalisation the rows in finer steps."""
    (x,) = ask.activations()
    if not ask.operator.summed:
        return standardise(ask, np.ones(1), np.zeros(1))
    if x.kind.dtype is not DType.INT8:
        raise ask.refuse(x)
    return ask.native(FixedNormalise(x.form.zero_point), x, QuantParameters(DType.INT8, 1 / 128, 0))


_FINER = 8
"""Bits of fraction to which a normalised value is scaled before its offset is added."""


def standardise(ask: QuantisationRequest[Normalise], factor: Array, offset: Array) -> str:
    """Rows with mean 0 and deviation 1, times a factor and plus an offset, [1] or [C] each; the last rounding is the
    result's."""
    (x,), operator = ask.activations(), ask.operator
    size = x.kind.shape[-1]
    epsilon = round(min(operator.epsilon * (size / x.form.scale) ** 2, 2.0**58))
    fixed = FixedStandard(size, x.form.zero_point, epsilon, operator.centred)
    value = ask.add(fixed, [x.name], "standard")
    if (factor < 0).any():
        signs = ask.constant("signs", np.where(factor < 0, -1, 1).astype(np.int32))
        wide = ask.add(Offset(0, DType.INT32), [value], "wide")
        value = ask.add(Binary(BinaryKind.MULTIPLY), [wide, signs], "turned")
    steps = np.abs(factor).astype(np.float64) * fixed.scale / ask.target.scale
    if not offset.any():
        return ask.finish(value, steps.tolist())
    fine = ask.scaled(value, (steps * (1 << _FINER)).tolist(), "fine")
    limit = float(1 << 30)
    row = np.clip(np.rint(offset / ask.target.scale * (1 << _FINER)), -limit, limit).astype(np.int32)
    moved = ask.add(Add(), [fine, ask.constant("offset", row)], "moved")
    return ask.finish(moved, [2.0**-_FINER])


@_rule(Unary)
def _unary(ask: QuantisationRequest[Unary]) -> str:
    """A table of the 256 results; of 16 bits what TFLite Micro has."""
    (x,), kind = ask.activations(), ask.operator.kind
    if x.kind.dtype is DType.INT16 and kind in (UnaryKind.SIGMOID, UnaryKind.TANH):
        return _sigmoid_of_16_bits(ask, x, kind is UnaryKind.TANH)
    if x.kind.dtype is DType.INT16 and kind in (UnaryKind.LEAKY_RELU, UnaryKind.ABSOLUTE):
        return _bent(ask, x)
    if x.kind.dtype not in BYTES:
        what = f"{kind.name} of {x.kind.dtype.text} has no table in Dovetail"
        raise ModelError(what, hint="quantise its operand to 8 bits")
    table = unary_table(ask.operator, x.form, ask.target)
    limited = np.clip(table, *ask.bounds.integers(ask.target)).astype(table.dtype)
    return ask.emitter.add(Lookup(), [x.name, ask.constant("table", limited, ask.target.dtype)], ask.stem)


def _bent(ask: QuantisationRequest[Unary], x: QuantisedValue) -> str:
    """One line for each sign, its factor in double (micro/kernels/leaky_relu_common.cc, Abs of elementwise.cc)."""
    above = x.form.scale / ask.target.scale
    falling = _negative_part(ask, x)
    if ask.operator.kind is UnaryKind.LEAKY_RELU:
        return _two_slopes(ask, x, falling, (above, x.form.scale * ask.operator.alpha / ask.target.scale))
    zero = ask.constant("nothing", np.zeros(1, np.int32))
    rising = ask.add(Binary(BinaryKind.SUBTRACT), [zero, falling], "turned")
    return _two_slopes(ask, x, rising, (above, above))


def _sigmoid_of_16_bits(ask: QuantisationRequest[Unary], x: QuantisedValue, tangent: bool) -> str:
    """Sigmoid and tanh of int16 (micro/kernels/{logistic_common,tanh}.cc): a factor to steps of 1/12288."""
    power = int(np.rint(np.log2(x.form.scale)))
    shift = power + 12
    if x.form.scale == 2.0**power and 0 <= shift <= int(tangent):
        fixed = Sigmoid16(3 << shift, 0, tangent)
    else:
        factor, shift = x.form.scale * 4096.0 * 3.0, 0
        while factor <= 32767.0 / 2 and shift <= 30:
            factor, shift = factor * 2, shift + 1
        fixed = Sigmoid16(int(factor), shift, tangent)
    if x.form.zero_point or x.form.scale * 12288 > 32767:
        hint = "quantise it symmetrically, with a scale of at most 2.67"
        raise ModelError(f"a 16-bit sigmoid of {x.name} needs the zero point 0 and a smaller scale", hint=hint)
    return ask.native(fixed, x, _Q15)


@_rule(MatrixProduct)
def _matrix_product(ask: QuantisationRequest[MatrixProduct]) -> str:
    """Sums of products of two activations (micro/kernels/batch_matmul.cc); of a constant matrix as a dense layer."""
    a, b = ask.activations()
    if any(value.kind.dtype not in (*BYTES, DType.INT16) for value in (a, b)):
        raise ask.refuse(a)
    if b.kind.dtype is DType.INT16 and a.kind.dtype is not DType.INT16:
        raise ask.refuse(b)
    wide = a.kind.dtype is DType.INT16
    name, zero_points = ask.fresh("accumulator"), (a.form.zero_point, b.form.zero_point)
    if b.array is not None and b.array.ndim == 2 and not wide:
        rows = ask.emitter.constant(f"{b.name}_rows", np.ascontiguousarray(b.array.T), b.kind.dtype)
        total = ask.emitter.add(FullyConnected(*zero_points), [a.name, rows], name)
    else:
        total = ask.emitter.add(MatrixProduct(*zero_points), [a.name, b.name], name)
    factors = [a.form.scale * b.form.scale / ask.target.scale]
    rounding = Rounding.WIDE if ask.emitter.builder.type_of(total).dtype is DType.INT64 else None
    return ask.clip(ask.scaled(total, factors, zero_points=(0, ask.target.zero_point), rounding=rounding))


_WEIGHT_BITS = 10
"""Fraction bits of TFLite's interpolation weights (reference/resize_bilinear.h)."""


@_rule(Resample)
def _resample(ask: QuantisationRequest[Resample]) -> str:
    """Weights in steps of 1/1024, the sum of products rounded once, halves away from zero."""
    (x,), axes = ask.activations(ask.operands[:1]), ask.operator.axes
    if x.kind.dtype not in BYTES or len(axes) > 2:
        raise ask.refuse(x)
    names = [x.name]
    for places, weights in zip(ask.operands[1::2], ask.operands[2::2], strict=True):
        assert isinstance(places, np.ndarray) and isinstance(weights, np.ndarray)
        steps = np.rint(weights.astype(np.float64) * (1 << _WEIGHT_BITS)).astype(np.int32)
        names += [ask.constant("places", places), ask.constant("weights", steps)]
    total = ask.add(ask.operator, names, "sum")
    bits = _WEIGHT_BITS * len(axes)
    if x.form == ask.target:
        # Doubled, then halved by the multiplier without a rounding, so that the shift alone rounds.
        factors = (np.array([1 << 30], np.int32), np.array([-bits], np.int32))
        return ask.clip(ask.scaled(total, factors, "mean", left_shift=1))
    return ask.finish(total, [x.form.scale / ask.target.scale / (1 << bits)], x.form.zero_point << bits)


def compare(ask: QuantisationRequest[Compare]) -> str:
    """A comparison of quantised values, as exact as TFLite Micro's (micro/kernels/comparisons.cc): both in steps of
    1/256 of a unit, scaled by their own scales. The result is bool."""
    terms = []
    for side, value in zip(("left", "right"), ask.activations(), strict=True):
        if value.kind.dtype.bits > 16:
            raise ask.refuse(value)
        terms.append(ask.scaled(value.name, [value.form.scale], side, (value.form.zero_point, 0), 8))
    return ask.emitter.add(ask.operator, terms, ask.stem)


def requantize(ask: QuantisationRequest[Operator]) -> str:
    """The one operand in another quantisation (micro/kernels/quantize_common.cc: the quotient of the scales in
    double)."""
    (x,), target = ask.activations(), ask.target
    name, source = x.name, x.form
    if source.scale == target.scale and source.zero_point != target.zero_point:
        offset = target.zero_point - source.zero_point
        if (source.dtype.low + offset, source.dtype.high + offset) == (target.dtype.low, target.dtype.high):
            shifted = ask.stem if ask.bounds.open else ask.fresh("offset")
            name, source = ask.emitter.add(Offset(offset, target.dtype), [name], shifted), target
    if source != target:
        return ask.finish(name, [source.scale / target.scale], source.zero_point)
    if ask.bounds.integers(target) == (target.dtype.low, target.dtype.high):
        return name
    return ask.clip(name)
