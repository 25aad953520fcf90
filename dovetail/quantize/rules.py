"""How each arithmetic operator is computed on integers: one function per operator, listed in `RULES`.

The factors and their rounding are TFLite Micro's, whose sources the comments name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from dovetail.errors import ModelError
from dovetail.graph.types import DType
from dovetail.operators.activation import FixedSoftmax, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.operators.arithmetic import Add, Lookup, Offset, Requantize
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.operators.pooling import AveragePool2d, SumPool2d
from dovetail.operators.reduction import Normalise, Reduce, ReduceKind
from dovetail.operators.selection import Resample
from dovetail.quantize.linear import lower_linear
from dovetail.quantize.multiplier import mean_multiplier, multiplier_arrays, softmax_parameters
from dovetail.quantize.rules_fixed import (
    divide,
    log_softmax,
    matrix_product,
    negative_part,
    normalise,
    refusal,
    resample,
    sixteen_bits,
    slope_per_channel,
    softmax_16,
    squared_difference,
    two_slopes,
)
from dovetail.quantize.steps import Bounds, Emitter, Operand, Quantised, Target, activations
from dovetail.quantize.tables import Step, unary_table

_SUMMED = (DType.INT8, DType.UINT8, DType.INT16)

Rule = Callable[[Emitter, Operator, Sequence[Operand], Target, Bounds, str], str]
"""(emitter, float operator, operands, quantisation and range of the result, its name) -> name of the integers.

Raises ModelError for operands it has no integer form for."""


def emit_requantized(emitter: Emitter, x: Quantised, target: Target, bounds: Bounds, stem: str) -> str:
    """x in another quantisation (micro/kernels/quantize_common.cc: the quotient of the scales in double)."""
    (x,) = activations(Requantize(), [x])
    name, source = x.name, x.target
    if source.scale == target.scale and source.zero_point != target.zero_point:
        offset = target.zero_point - source.zero_point
        if (source.dtype.low + offset, source.dtype.high + offset) == (target.dtype.low, target.dtype.high):
            shifted = stem if bounds.open else emitter.fresh(f"{stem}_offset")
            name, source = emitter.add(Offset(offset, target.dtype), [name], shifted), target
    if source != target:
        return emitter.scale_to(name, [source.scale / target.scale], target, bounds, stem, source.zero_point)
    if bounds.integers(target) == (target.dtype.low, target.dtype.high):
        return name
    return emitter.clip(name, target, bounds, stem)


def _add(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """Both operands raised, scaled to twice the larger scale, added, requantised (micro/kernels/add_common.cc).

    A difference is computed alike (sub_common.cc).
    """
    values = activations(operator, operands)
    left_shift = 15 if target.dtype is DType.INT16 else 20
    twice_larger = 2.0 * max(float(value.scale[0]) for value in values)
    terms = []
    for side, value in zip(("left", "right", *map(str, range(2, len(values)))), values, strict=False):
        scaling = Requantize(emitter.rounding, value.target.zero_point, 0, left_shift)
        factors = multiplier_arrays([value.target.scale / twice_larger])
        terms.append(emitter.requantize(value.name, factors, scaling, emitter.fresh(f"{stem}_{side}")))
    total = terms[0]
    for term in terms[1:]:
        total = emitter.add(operator, [total, term], emitter.fresh(f"{stem}_accumulator"))
    return emitter.scale_to(total, [twice_larger / ((1 << left_shift) * target.scale)], target, bounds, stem)


def _binary(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """A difference as a sum; a product of the centred integers, scaled once (micro/kernels/mul_common.cc)."""
    assert isinstance(operator, Binary)
    if operator.kind in _BINARY:
        return _BINARY[operator.kind](emitter, operator, operands, target, bounds, stem)
    values = activations(operator, operands)
    if operator.kind is not BinaryKind.MULTIPLY or any(value.kind.dtype.bits > 16 for value in values):
        raise refusal(operator, values[0])
    if all(value.kind.dtype.bits > 8 and value.target.zero_point for value in values):
        raise ModelError("a product of two 16-bit values with zero points may leave 32 bits",
                         hint="quantise one of the two symmetrically, with the zero point 0")
    terms = [
        emitter.add(Offset(-value.target.zero_point, DType.INT32), [value.name], emitter.fresh(f"{stem}_{side}"))
        for side, value in zip(("left", "right"), values, strict=True)
    ]
    product = emitter.add(operator, terms, emitter.fresh(f"{stem}_product"))
    factor = values[0].target.scale * values[1].target.scale / target.scale
    return emitter.scale_to(product, [factor], target, bounds, stem)


def _reduce(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """The sum of the centred integers, scaled once; a mean's count is part of the factor, as for an average pool."""
    assert isinstance(operator, Reduce)
    (x,) = activations(operator, operands)
    if operator.kind not in (ReduceKind.SUM, ReduceKind.MEAN) or x.kind.dtype not in _SUMMED:
        raise ModelError(f"{operator.kind.value} of {x.kind.dtype.text} has no integer form in Dovetail",
                         hint="quantise its operand to 8 bits, or compile it with --float")
    summed = Reduce(ReduceKind.SUM, operator.axes, x.target.zero_point)
    try:
        total = emitter.add(summed, [x.name], emitter.fresh(f"{stem}_accumulator"))
    except ValueError as error:
        raise ModelError(str(error), hint="reduce fewer elements at a time") from None
    factor = x.target.scale / target.scale
    count = prod(x.kind.shape[axis] for axis in operator.axes) if operator.kind is ReduceKind.MEAN else 1
    scaling = Requantize(emitter.rounding, 0, target.zero_point)
    scaled = emitter.requantize(total, mean_multiplier(factor, count), scaling, emitter.fresh(f"{stem}_scaled"))
    return emitter.clip(scaled, target, bounds, stem)


def _average_pool(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """Equal quantisation: TFLite's integer average. Else its MEAN: the sum, scaled by the scales and 1/count."""
    assert isinstance(operator, AveragePool2d)
    (x,) = activations(operator, operands)
    inner = emitter.fresh(f"{stem}_accumulator")
    if x.target == target and not operator.scaled_sum:
        return emitter.clip(emitter.add(operator, [x.name], inner), target, bounds, stem)
    factor = x.target.scale / target.scale
    if any(max(pair) for pair in operator.padding):
        # The count is not the same everywhere, so the mean is taken first, with 8 more bits to round it finely.
        raising = Requantize(emitter.rounding, x.target.zero_point, 0, 8)
        raised = emitter.requantize(x.name, multiplier_arrays([1.0]), raising, emitter.fresh(f"{stem}_raised"))
        average = emitter.add(operator, [raised], inner)
        return emitter.scale_to(average, [factor / 256], target, bounds, stem)
    pool = SumPool2d(operator.kernel, operator.stride, operator.padding, x.target.zero_point)
    total = emitter.add(pool, [x.name], inner)
    scaling = Requantize(emitter.rounding, 0, target.zero_point)
    parameters = mean_multiplier(factor, prod(operator.kernel))
    scaled = emitter.requantize(total, parameters, scaling, emitter.fresh(f"{stem}_scaled"))
    return emitter.clip(scaled, target, bounds, stem)


def _softmax(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """TFLite's fixed-point softmax, requantised where the result has another scale than its 1/256."""
    assert isinstance(operator, Softmax)
    (x,) = activations(operator, operands)
    if x.kind.dtype is DType.INT16:
        return softmax_16(emitter, operator.beta, x, target, bounds, stem)
    if x.kind.dtype not in (DType.INT8, DType.UINT8):
        raise ModelError(f"softmax of {x.kind.dtype.text} has no integer form", hint="quantise its operand to 8 bits")
    parameters = softmax_parameters(x.target.scale, operator.beta)
    native = replace(target, scale=2.0**-target.dtype.bits, zero_point=target.dtype.low)
    fits = target == native and target.dtype in (DType.INT8, DType.UINT8, DType.INT16) and bounds.open
    if fits:
        return emitter.add(FixedSoftmax(*parameters, target.dtype), [x.name], stem)
    fine = emitter.add(FixedSoftmax(*parameters, DType.INT16), [x.name], emitter.fresh(f"{stem}_fine"))
    return emitter.scale_to(fine, [2.0**-16 / target.scale], target, bounds, stem, DType.INT16.low)


def _unary(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """A table of the 256 results; of 16 bits what TFLite Micro has."""
    assert isinstance(operator, Unary)
    (x,) = activations(operator, operands)
    if x.kind.dtype is DType.INT16 and operator.kind in (UnaryKind.SIGMOID, UnaryKind.TANH):
        return sixteen_bits(emitter, operator.kind is UnaryKind.TANH, x, target, bounds, stem)
    if x.kind.dtype is DType.INT16 and operator.kind in (UnaryKind.LEAKY_RELU, UnaryKind.ABSOLUTE):
        return _bent(emitter, operator, x, target, bounds, stem)
    if x.kind.dtype not in (DType.INT8, DType.UINT8):
        what = f"{operator.kind.name} of {x.kind.dtype.text} has no table in Dovetail"
        raise ModelError(what, hint="quantise its operand to 8 bits")
    source = Step(x.kind.dtype, x.target.scale, x.target.zero_point)
    table = unary_table(operator, source, Step(target.dtype, target.scale, target.zero_point))
    limited = np.clip(table, *bounds.integers(target)).astype(table.dtype)
    name = emitter.constant(f"{stem}_table", limited, target.dtype)
    return emitter.add(Lookup(), [x.name, name], stem)


def _bent(emitter: Emitter, operator: Unary, x: Quantised, target: Target, bounds: Bounds, stem: str) -> str:
    """One line for each sign, its factor in double (micro/kernels/leaky_relu_common.cc, Abs of elementwise.cc)."""
    above = x.target.scale / target.scale
    falling = negative_part(emitter, x, stem)
    if operator.kind is UnaryKind.LEAKY_RELU:
        below = x.target.scale * operator.alpha / target.scale
        return two_slopes(emitter, x, falling, (above, below), target, bounds, stem)
    zero = emitter.constant(f"{stem}_nothing", np.zeros(1, np.int32))
    rising = emitter.add(Binary(BinaryKind.SUBTRACT), [zero, falling], emitter.fresh(f"{stem}_turned"))
    return two_slopes(emitter, x, rising, (above, above), target, bounds, stem)


def _linear(
    emitter: Emitter, operator: Operator, operands: Sequence[Operand], target: Target, bounds: Bounds, stem: str
) -> str:
    """Sums of products, bias, requantisation: see `dovetail.quantize.linear`."""
    assert isinstance(operator, (Conv2d, DepthwiseConv2d, FullyConnected))
    (x,) = activations(operator, operands[:1])
    weights = operands[1]
    if not isinstance(weights, Quantised):
        raise ModelError(f"the weights of {type(operator).__name__} are float", hint="quantise the weights too")
    bias = operands[2] if len(operands) > 2 else None
    return lower_linear(emitter, operator, x, weights, bias, target, bounds, stem)


_BINARY: dict[BinaryKind, Rule] = {
    BinaryKind.SUBTRACT: _add,
    BinaryKind.DIVIDE: divide,
    BinaryKind.PRELU: slope_per_channel,
    BinaryKind.SQUARED_DIFFERENCE: squared_difference,
}
"""Rules of functions of two values, the product's aside."""

RULES: dict[type[Operator], Rule] = {
    Conv2d: _linear,
    DepthwiseConv2d: _linear,
    FullyConnected: _linear,
    Add: _add,
    Binary: _binary,
    Reduce: _reduce,
    AveragePool2d: _average_pool,
    Softmax: _softmax,
    LogSoftmax: log_softmax,
    MatrixProduct: matrix_product,
    Resample: resample,
    Normalise: normalise,
    Unary: _unary,
}
"""The rule of each operator that computes. Movement, maxima, minima and Clamp need none: `lowering` passes through."""
