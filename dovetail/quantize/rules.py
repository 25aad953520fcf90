"""How each arithmetic operator is computed on integers: `RULES`, a table.

The factors and their rounding are TFLite Micro's, whose sources the comments name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Node
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
from dovetail.ir.operators.linear import FullyConnected, Linear, MatrixProduct
from dovetail.ir.operators.movement import Resample
from dovetail.ir.operators.recurrent import Recurrent
from dovetail.ir.operators.reduction import ArgExtreme, AveragePool2d, Normalise, Reduce, SumPool2d
from dovetail.ir.operators.sequence import DISTANCE_STEPS, FRACTION, Attention, FixedAttention
from dovetail.ir.pattern import Apply, apply
from dovetail.ir.scaling import ROWS
from dovetail.ir.types import Array, DType
from dovetail.quantize.context import QuantisationRequest, QuantisedValue, QuantParameters
from dovetail.quantize.linear import linear
from dovetail.quantize.recurrent import recurrent
from dovetail.quantize.tables import unary_table
from dovetail.records import Record

BYTES = (DType.INT8, DType.UINT8)
_UPTO_16 = tuple(dtype for dtype in DType if dtype.is_integer and dtype.bits <= 16)
_Q15 = QuantParameters(DType.INT16, 2.0**-15, 0)


def _add(ask: QuantisationRequest[Operator], *values: QuantisedValue) -> str:
    """Both operands raised, scaled to twice the larger scale, added, requantised (micro/kernels/add_common.cc).

    A difference is computed alike (sub_common.cc). Integers of 16 bits with the same steps are added as they are, to
    the same result.
    """
    if ask.target.dtype.bits > 8 and not ask.target.zero_point and all(v.form == ask.target for v in values):
        total, *others = (_centred(ask, value, "term") for value in values)
        for other in others:
            total = ask.add(ask.operator, [total, other], "sum")
        return ask.clip(total)
    left_shift = 15 if any(kind.bits > 8 for kind in (ask.target.dtype, *(v.kind.dtype for v in values))) else 20
    terms, twice_larger = _with_one_scale(ask, values, left_shift)
    total = terms[0]
    for term in terms[1:]:
        total = ask.add(ask.operator, [total, term], "accumulator")
    return ask.finish(total, [twice_larger / ((1 << left_shift) * ask.target.scale)])


def _with_one_scale(
    ask: QuantisationRequest[Any], values: Sequence[QuantisedValue], left_shift: int
) -> tuple[list[str], float]:
    """The values without zero points, raised by some bits, in steps of twice the larger scale; and that scale."""
    twice_larger = 2.0 * max(value.form.scale for value in values)
    sides = ("left", "right", *map(str, range(2, len(values))))
    terms = [
        ask.scaled(value.name, [value.form.scale / twice_larger], side, (value.form.zero_point, 0), left_shift)
        for side, value in zip(sides, values, strict=False)
    ]
    return terms, twice_larger


def _product(ask: QuantisationRequest[Binary], *values: QuantisedValue) -> str:
    """A product of the centred integers, scaled once (micro/kernels/mul_common.cc)."""
    if all(value.kind.dtype.bits > 8 and value.form.zero_point for value in values):
        hint = "quantise one of the two symmetrically, with the zero point 0"
        raise ModelError("a product of two 16-bit values with zero points may leave 32 bits", hint=hint)
    terms = [_centred(ask, value, side) for side, value in zip(("left", "right"), values, strict=True)]
    product = ask.add(ask.operator, terms, "product")
    return ask.finish(product, [values[0].form.scale * values[1].form.scale / ask.target.scale])


_EVEN = 12
"""Bits to which the scales of products that are summed are brought to one."""


def sum_of_products(ask: QuantisationRequest[Operator], products: Sequence[Sequence[QuantisedValue]]) -> str:
    """Products of two 8-bit values each, added or taken from each other, and scaled once."""
    scales = [prod(value.form.scale for value in product) for product in products]
    unit, terms = 1 if len(set(scales)) == 1 else 1 << _EVEN, []
    for number, (product, scale) in enumerate(zip(products, scales, strict=True)):
        factors = [_centred(ask, value, f"factor_{number}_{at}") for at, value in enumerate(product)]
        terms.append(ask.add(Binary(BinaryKind.MULTIPLY), factors, f"product_{number}"))
        if unit > 1:
            share = ask.constant(f"share_{number}", np.array([round(scale / max(scales) * unit)], np.int32))
            terms[-1] = ask.add(Binary(BinaryKind.MULTIPLY), [terms[-1], share], f"term_{number}")
    return ask.finish(ask.add(ask.operator, terms, "accumulator"), [max(scales) / unit / ask.target.scale])


def _refused(ask: QuantisationRequest[Any], x: QuantisedValue, *_: QuantisedValue) -> str:
    raise ask.refuse(x)


def _centred(ask: QuantisationRequest[Any], x: QuantisedValue, word: str) -> str:
    """x less its zero point, int32."""
    return ask.add(Offset(-x.form.zero_point, DType.INT32), [x.name], word)


def _divide(ask: QuantisationRequest[Binary], a: QuantisedValue, b: QuantisedValue) -> str:
    """A quotient of 8-bit values (micro/kernels/div.cc: the factor in float32)."""
    factor = np.float32(a.form.scale) / (np.float32(b.form.scale) * np.float32(ask.target.scale))
    zero_points = (a.form.zero_point, b.form.zero_point, ask.target.zero_point)
    return ask.clip(
        ask.add(FixedDivide(*zero_points, *quantize_multiplier(float(factor))), [a.name, b.name], "quotient")
    )


def _squared_difference(ask: QuantisationRequest[Binary], *values: QuantisedValue) -> str:
    """Both operands scaled to twice the larger scale, 7 bits of head-room (micro/kernels/squared_difference.cc)."""
    left_shift = 0 if any(value.kind.dtype.bits > 8 for value in values) else 7
    terms, twice_larger = _with_one_scale(ask, values, left_shift)
    square = ask.add(ask.operator, terms, "square")
    return ask.finish(square, [twice_larger * twice_larger / ((1 << 2 * left_shift) * ask.target.scale)])


def _slope_per_channel(ask: QuantisationRequest[Binary], x: QuantisedValue) -> str:
    """PRelu (micro/kernels/prelu_common.cc): one product for each sign. A float slope is taken in 16 bits."""
    given = ask.operands[1]
    (slope,) = ask.activations([given if isinstance(given, QuantisedValue) else _quantised_slope(ask, given)])
    if slope.kind.dtype.bits > 8 and isinstance(given, QuantisedValue):
        raise ask.refuse(slope)
    terms = [_negative_part(ask, x), _centred(ask, slope, "slope")]
    falling = ask.add(Binary(BinaryKind.MULTIPLY), terms, "product")
    scale = x.form.scale
    return _two_slopes(ask, x, falling, (scale / ask.target.scale, scale * slope.form.scale / ask.target.scale))


def _quantised_slope(ask: QuantisationRequest[Any], slope: Array) -> QuantisedValue:
    """Float slopes as int16 without a zero point."""
    scale = np.array([max(float(np.abs(slope).max()), 1e-6) / DType.INT16.high], np.float32)
    name = ask.constant("slopes", np.rint(slope / scale[0]).astype(np.int16))
    return QuantisedValue(name, ask.emitter.builder.type_of(name), scale, np.zeros(1, np.int64), 0, None)


def _negative_part(ask: QuantisationRequest[Any], x: QuantisedValue) -> str:
    """x less its zero point where that is negative, else 0."""
    terms = [_centred(ask, x, "lowered"), ask.constant("none", np.zeros(1, np.int32))]
    return ask.emitter.add(Binary(BinaryKind.MINIMUM), terms, f"{ask.stem}_falling")


def _two_slopes(ask: QuantisationRequest[Any], x: QuantisedValue, falling: str, factors: tuple[float, float]) -> str:
    """Positive values scaled by the first factor, plus `falling`, which is 0 where they are positive, by the second."""
    terms = [_centred(ask, x, "centred"), ask.constant("zero", np.zeros(1, np.int32))]
    rising = ask.emitter.add(Binary(BinaryKind.MAXIMUM), terms, f"{ask.stem}_rising")
    above = ask.scaled(rising, [factors[0]], "above", (0, ask.target.zero_point))
    below = ask.scaled(falling, [factors[1]], "below")
    return ask.clip(ask.add(Add(), [above, below], "sum"))


def _sum(ask: QuantisationRequest[Operator], x: QuantisedValue) -> str:
    """The sum of the centred integers, scaled once; a mean's count is part of the factor, as for an average pool."""
    form = ask.operator.summing(x.form.zero_point, x.kind)
    try:
        total = ask.add(form.operator, [x.name], "accumulator")
    except ValueError as error:
        raise ModelError(str(error), hint="reduce fewer elements at a time") from None
    factor = _mean_multiplier(x.form.scale / ask.target.scale / (1 << form.headroom), form.count)
    return ask.finish(total, factor, left_shift=form.headroom)


def _mean_multiplier(real: float, count: int) -> tuple[Array, Array]:
    """real / count as TFLite's MEAN has it: the multiplier of `real` divided by the count, rounded down.

    Not in the sources at hand; found by comparing forms with what TensorFlow Lite Micro computes.
    """
    multiplier, shift = quantize_multiplier(real)
    raised = min(count.bit_length() - 1, 32, 31 + shift)
    divided = (multiplier << raised) // count
    return np.array([divided], np.int32), np.array([shift - raised], np.int32)


def _average_pool(ask: QuantisationRequest[AveragePool2d], x: QuantisedValue) -> str:
    """Equal quantisation: TFLite's integer average. Else its MEAN: the sum, scaled by the scales and 1/count."""
    operator, inner = ask.operator, ask.fresh("accumulator")
    if x.form == ask.target and not operator.scaled_sum:
        return ask.clip(ask.emitter.add(operator, [x.name], inner))
    factor, pool = x.form.scale / ask.target.scale, replace(operator, input_zero_point=x.form.zero_point)
    sums = SumPool2d(operator.kernel, operator.stride, operator.padding, x.form.zero_point)
    if not any(map(any, operator.padding)):
        return ask.finish(ask.emitter.add(sums, [x.name], inner), _mean_multiplier(factor, prod(operator.kernel)))
    whole, shares = _shares(operator, x)
    if not shares:
        return ask.finish(ask.emitter.add(pool, [x.name], inner), [factor])
    total = ask.emitter.add(sums, [x.name], inner)
    for share in shares:
        total = ask.add(Binary(BinaryKind.MULTIPLY), [total, ask.constant("shares", share)], "raised")
    return ask.finish(total, [factor / whole])


def _shares(pool: AveragePool2d, x: QuantisedValue) -> tuple[int, list[Array]]:
    """A number, and int32 factors whose product with the sum of a window gives that number times its mean: of its rows
    and columns, or of each window where these would leave 32 bits; none where 16 bits may be rounded twice instead."""
    (height, width), (above, beside) = pool.kernel, pool.padding
    rows = replace(pool, kernel=(height, 1), padding=(above, (0, 0))).counts(x.kind)[:, :, :1]
    columns = replace(pool, kernel=(1, width), padding=((0, 0), beside)).counts(x.kind)[:, :1]
    least, reach = [math.lcm(*map(int, each.flat)) for each in (rows, columns)], x.kind.dtype.high - x.kind.dtype.low
    if reach * prod(least) < 1 << 31:
        return prod(least), [(n // each).astype(np.int32) for n, each in zip(least, (rows, columns), strict=True)]
    whole = 1 << 22
    fits = reach * whole < 1 << 31
    return whole, [np.rint(whole / pool.counts(x.kind)).astype(np.int32)] if fits else []


def softmax_parameters(scale: float, beta: float) -> tuple[int, int, int]:
    """(multiplier, shift, diff_min) of `FixedSoftmax` for 8-bit inputs of this scale."""
    real = min(beta * scale * (1 << 26), float((1 << 31) - 1))
    multiplier, shift = quantize_multiplier(real)
    return multiplier, shift, -math.floor(31 * (1 << 26) / 2**shift)


def _softmax(ask: QuantisationRequest[Softmax], x: QuantisedValue) -> str:
    """TFLite's fixed-point softmax, requantised where the result has another scale than its 1/256."""
    target, parameters = ask.target, softmax_parameters(x.form.scale, ask.operator.beta)
    own = QuantParameters(target.dtype, 2.0**-target.dtype.bits, target.dtype.low)
    if target == own and target.dtype in (*BYTES, DType.INT16) and ask.bounds.open:
        return ask.emitter.add(FixedSoftmax(*parameters, target.dtype), [x.name], ask.stem)
    fine = ask.add(FixedSoftmax(*parameters, DType.INT16), [x.name], "fine")
    return ask.finish(fine, [2.0**-16 / target.scale], DType.INT16.low)


def _softmax_of_16_bits(ask: QuantisationRequest[Softmax], x: QuantisedValue) -> str:
    """micro/kernels/softmax_common.cc."""
    fixed = FixedSoftmax16(*quantize_multiplier(x.form.scale * ask.operator.beta / (10.0 / 65535.0)))
    return ask.native(fixed, x, _Q15)


def _log_softmax(ask: QuantisationRequest[LogSoftmax], x: QuantisedValue) -> str:
    """TFLite's fixed-point log-softmax, requantised where the result has another scale than its 1/16."""
    multiplier, shift, diff_min = softmax_parameters(x.form.scale, 1.0)
    target, native = ask.target, QuantParameters(DType.INT8, 1 / 16, 127)
    if (target.dtype.low - target.zero_point) * target.scale < -16.5 or target.scale < 1 / 24:
        what = f"log-softmax has an integer form in steps of 1/16 from -16 on, not in steps of {target.scale:g}"
        raise ModelError(what, hint="quantise the result so, or compile it with --float")
    if multiplier == 0:
        raise ModelError(
            f"log-softmax of values in steps of {x.form.scale:g} has no integer form", hint="quantise again"
        )
    back = quantize_multiplier(2.0 ** (31 - shift) / multiplier)
    return ask.native(FixedLogSoftmax(multiplier, shift, diff_min, *back), x, native)


def _unit_rows(ask: QuantisationRequest[Normalise], x: QuantisedValue) -> str:
    """TFLite's rows of length 1 (reference/integer_ops/l2normalization.h), requantised where not in steps of 1/128."""
    if ask.target.scale < 1 / 128:
        what = f"rows of length 1 have an integer form in steps of 1/128, not in finer ones of {ask.target.scale:g}"
        raise ModelError(what, hint="quantise the result so, or compile it with --float")
    return ask.native(FixedNormalise(x.form.zero_point), x, QuantParameters(DType.INT8, 1 / 128, 0))


_FINER = 8
"""Bits of fraction to which a normalised value is scaled before its offset is added."""


def standardise(ask: QuantisationRequest[Normalise], x: QuantisedValue, factor: Array, offset: Array) -> str:
    """Rows with mean 0 and deviation 1, times a factor and plus an offset, [1] or [C] each; the last rounding is the
    result's."""
    operator, size = ask.operator, x.kind.shape[-1]
    exact = min(operator.epsilon * (size / x.form.scale) ** 2, 2.0**58)
    epsilon = round(exact)
    if abs(epsilon - exact) > (size - 1 + exact) / 32:  # no row that is not constant spreads less than size - 1
        what = (
            f"a normalisation of rows of {size} in steps of {x.form.scale:g} has no integer form: epsilon is too small"
        )
        raise ModelError(what, hint="quantise its operand in finer steps, or compile it with --float")
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


def _table(ask: QuantisationRequest[Unary], x: QuantisedValue) -> str:
    """A table of the 256 results."""
    if x.kind.dtype not in BYTES:
        what = f"{ask.operator.kind.name} of {x.kind.dtype.text} has no table in Dovetail"
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


def _sigmoid_of_16_bits(ask: QuantisationRequest[Unary], x: QuantisedValue) -> str:
    """Sigmoid and tanh of int16 (micro/kernels/{logistic_common,tanh}.cc): a factor to steps of 1/12288."""
    tangent = ask.operator.kind is UnaryKind.TANH
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


def _matrix_product(ask: QuantisationRequest[MatrixProduct], a: QuantisedValue, b: QuantisedValue) -> str:
    """Sums of products of two activations (micro/kernels/batch_matmul.cc); of a constant matrix as a dense layer."""
    a, b = ask.signed(a), ask.signed(b)
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
    return ask.finish(total, factors, rounding=rounding)


_FINEST = 21
"""Bits of the factor of distances in attention, so that products of any distance keep within 32 bits."""


def _attention(ask: QuantisationRequest[Attention], q: QuantisedValue, k: QuantisedValue, v: QuantisedValue) -> str:
    """Attention to the live places, whose sums of weighted values are rounded last."""
    live = ask.operands[3]
    assert isinstance(live, QuantisedValue)
    real = ask.operator.scale * q.form.scale * k.form.scale * DISTANCE_STEPS
    shift = next((bits for bits in range(_FINEST, 0, -1) if real * 2.0**bits < 1 << 28), 0)
    fixed = FixedAttention(max(round(real * (1 << shift)), 1), shift, q.form.zero_point, v.form.zero_point)
    total = ask.add(fixed, [q.name, k.name, v.name, live.name], "attended")
    return ask.finish(total, [v.form.scale / ask.target.scale / (1 << FRACTION)])


_WEIGHT_BITS = 10
"""Fraction bits of TFLite's interpolation weights (reference/resize_bilinear.h)."""


def _resample(ask: QuantisationRequest[Resample], x: QuantisedValue) -> str:
    """Weights in steps of 1/1024, the sum of products rounded once, halves away from zero."""
    if ask.target.dtype.bits > 8:
        what = f"resizing gives {ask.target.dtype.text} by weights of {_WEIGHT_BITS} bits, which are too coarse for it"
        raise ModelError(what, hint="quantise the result to 8 bits, or compile it with --float")
    names = [x.name]
    for places, weights in zip(ask.operands[1::2], ask.operands[2::2], strict=True):
        assert isinstance(places, np.ndarray) and isinstance(weights, np.ndarray)
        steps = np.rint(weights.astype(np.float64) * (1 << _WEIGHT_BITS)).astype(np.int32)
        names += [ask.constant("places", places), ask.constant("weights", steps)]
    total = ask.add(ask.operator, names, "sum")
    bits = _WEIGHT_BITS * len(ask.operator.axes)
    if x.form == ask.target:
        # Doubled, then halved by the multiplier without a rounding, so that the shift alone rounds.
        factors = (np.array([1 << 30], np.int32), np.array([-bits], np.int32))
        return ask.clip(ask.scaled(total, factors, "mean", left_shift=1))
    return ask.finish(total, [x.form.scale / ask.target.scale / (1 << bits)], x.form.zero_point << bits)


def _compare(ask: QuantisationRequest[Compare], *values: QuantisedValue) -> str:
    """A comparison of quantised values, as exact as TFLite Micro's (micro/kernels/comparisons.cc): both in steps of
    1/256 of a unit, scaled by their own scales. The result is bool."""
    terms = [
        ask.scaled(value.name, [value.form.scale], side, (value.form.zero_point, 0), 8)
        for side, value in zip(("left", "right"), values, strict=True)
    ]
    return ask.emitter.add(ask.operator, terms, ask.stem)


def _as_it_is(ask: QuantisationRequest[Operator], *values: QuantisedValue) -> str:
    return ask.emitter.add(ask.operator, [value.name for value in values], ask.stem)


def requantize(ask: QuantisationRequest[Any], x: QuantisedValue) -> str:
    """The operand in another quantisation (micro/kernels/quantize_common.cc: the quotient of the scales in
    double)."""
    target, name, source = ask.target, x.name, x.form
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


class QuantisationRule(Record):
    """How an operator that computes is computed on integers."""

    pattern: Apply[Any]
    """The operator, whatever its operands."""
    answer: Callable[..., str]
    """Gives the name of the integers; told the request and its activations. Raises ModelError for those it has no
    integer form for."""
    kinds: tuple[DType, ...] = tuple(DType)
    """Element types the activations may have."""
    activations: int | None = None
    """How many operands, the first ones, are activations, which have one scale each; None for all."""


def _binary(*kinds: BinaryKind) -> Apply[Binary]:
    return apply(Binary, having=lambda operator: operator.kind in kinds)


def _unary(*kinds: UnaryKind) -> Apply[Unary]:
    return apply(Unary, having=lambda operator: operator.kind in kinds)


_SUM = apply(Operator, having=lambda operator: operator.sums)

RULES = (
    QuantisationRule(apply(Linear), linear, activations=1),
    QuantisationRule(apply(Recurrent), recurrent, activations=1),
    QuantisationRule(apply(Add), _add),
    QuantisationRule(_binary(BinaryKind.SUBTRACT), _add),
    QuantisationRule(_binary(BinaryKind.MULTIPLY), _product, _UPTO_16),
    QuantisationRule(_binary(BinaryKind.DIVIDE), _divide, BYTES),
    QuantisationRule(_binary(BinaryKind.SQUARED_DIFFERENCE), _squared_difference, _UPTO_16),
    QuantisationRule(_binary(BinaryKind.PRELU), _slope_per_channel, _UPTO_16, activations=1),
    QuantisationRule(apply(Binary), _refused),
    QuantisationRule(_SUM, _sum, (*BYTES, DType.INT16)),
    QuantisationRule(apply(Reduce), _refused),
    QuantisationRule(apply(AveragePool2d), _average_pool),
    QuantisationRule(apply(Softmax), _softmax_of_16_bits, (DType.INT16,)),
    QuantisationRule(apply(Softmax), _softmax, BYTES),
    QuantisationRule(apply(LogSoftmax), _log_softmax, (DType.INT8,)),
    QuantisationRule(apply(Normalise, having=lambda operator: operator.summed), _unit_rows, (DType.INT8,)),
    QuantisationRule(ROWS, lambda ask, x: standardise(ask, x, np.ones(1), np.zeros(1))),
    QuantisationRule(_unary(UnaryKind.SIGMOID, UnaryKind.TANH), _sigmoid_of_16_bits, (DType.INT16,)),
    QuantisationRule(_unary(UnaryKind.LEAKY_RELU, UnaryKind.ABSOLUTE), _bent, (DType.INT16,)),
    QuantisationRule(apply(Unary), _table),
    QuantisationRule(apply(Attention), _attention, (DType.INT8,), activations=3),
    QuantisationRule(apply(MatrixProduct), _matrix_product, (*BYTES, DType.INT16, DType.UINT16)),
    QuantisationRule(apply(Resample, having=lambda operator: len(operator.axes) <= 2), _resample, BYTES, activations=1),
    QuantisationRule(apply(Compare), _compare, _UPTO_16),
    QuantisationRule(apply(ArgExtreme), _as_it_is),
)
"""The first rule whose pattern is there and that takes the activations computes an operator. Operators that choose
elements (`Operator.chosen_from`) or limit them (`Operator.clamped_to`) need none."""


def rules_for(node: Node) -> list[QuantisationRule]:
    """The rules for a node's operator."""
    return [rule for rule in RULES if rule.pattern.fits(node)]


def on_integers(ask: QuantisationRequest[Any], rules: Sequence[QuantisationRule]) -> str:
    """The name of the integers that the first rule for them gives; raises ModelError where there is none."""
    values = ask.activations(ask.operands[: rules[0].activations])
    for rule in rules:
        if all(value.kind.dtype in rule.kinds for value in values):
            return rule.answer(ask, *values)
    kinds = rules[-1].kinds
    raise ask.refuse(next(value for value in values if value.kind.dtype not in kinds), kinds)
