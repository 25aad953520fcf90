"""Convolutions and fully connected layers on integers: weights, bias and the factors of the requantisation.

A batch normalisation behind a layer whose weights are quantised already goes into the weights' scales. The integers
stay, so the layer is what was trained; networks trained with quantisation (QONNX, PyTorch) have it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.operators.arithmetic import Add, Dequantize, Rounding, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import Linear, accumulator_type
from dovetail.ir.pattern import apply, constant, operand, rest
from dovetail.ir.requantisation.bounds import sum_bounds
from dovetail.ir.rules import Rule, RuleMatch
from dovetail.ir.scaling import rows_of_line
from dovetail.ir.types import Array, DType
from dovetail.notes import Kind, Note
from dovetail.quantize.context import Emitter, QuantisationRequest, QuantisedValue

_SAME_SCALE = 1e-3
"""Relative difference below which a bias counts as quantised with input scale * weight scale, as TFLite does."""
_WIDER = {DType.INT2: DType.INT4, DType.INT4: DType.INT8}


def linear(ask: QuantisationRequest[Linear], x: QuantisedValue) -> str:
    """Sums of products without padding, bias, requantisation, clip."""
    x, weights, operator = ask.signed(x), ask.operands[1], ask.operator
    if not isinstance(weights, QuantisedValue):
        raise ModelError(f"the weights of {operator.class_name} are float", hint="quantise the weights too")
    bias, axis = ask.operands[2] if len(ask.operands) > 2 else None, operator.weight_axis
    if not weights.per_tensor and weights.axis != axis:
        what = f"{weights.name} is quantised along axis {weights.axis}, only output channels (axis {axis}) may be"
        raise ModelError(what, hint="quantise the weights per output channel or per tensor")
    weights = _without_zero_point(ask.emitter, operator, weights)
    on_integers = operator.with_zero_points(x.form.zero_point, int(weights.zero_point[0]))
    operands = [x.name, weights.name]
    scale = x.scale.astype(np.float64) * weights.scale
    if bias is not None and (fine := _with_fine_bias(ask, x, weights, bias, on_integers)):
        return fine
    if bias is not None:
        array = _integer_bias(ask, bias, scale, weights.kind.shape[axis], accumulator_type(x.kind.dtype))
        operands.append(_bias_constant(ask, bias, _within_32_bits(ask, x, weights, array)))
    total = ask.add(on_integers, operands, "accumulator")
    # All in double: kernel_util.cc's PopulateConvolutionQuantizationParams for convolutions. For dense layers older
    # sources multiply in float32; what TensorFlow Lite Micro computes today fits the double product alone.
    # Of uint8 the product of the scales is a float32 (GetQuantizedConvolutionMultipler, found in LiteRT's results).
    old = x.kind.dtype is DType.UINT8 and ask.emitter.rounding is Rounding.DOUBLE
    own = x.form.scale
    products = [float(x.scale[0] * scale) if old else own * float(scale) for scale in weights.scale]
    factors = [product / ask.target.scale for product in products]
    # WIDE where TFLite sums in 64 bits: int16 activations, unless the bias has 32 bits.
    narrow = isinstance(bias, QuantisedValue) and bias.kind.dtype is DType.INT32
    rounding = Rounding.WIDE if x.kind.dtype is DType.INT16 and not narrow else None
    return ask.finish(total, factors, rounding=rounding)


_COARSE = 1 / 64
"""Share of a step of the result: where a bias rounded to whole sums may be as far off, it is kept finer."""


def _with_fine_bias(
    ask: QuantisationRequest[Linear],
    x: QuantisedValue,
    weights: QuantisedValue,
    bias: QuantisedValue | Array,
    operator: Linear,
) -> str | None:
    """The layer with its bias added behind the scale, in fractions of a sum: where operands have few bits, a sum is a
    large step. None where a bias of whole sums is fine enough, or scaled sums would leave 32 bits."""
    if isinstance(bias, QuantisedValue) or weights.array is None or x.kind.dtype.bits > 8:
        return None
    axis, target = ask.operator.weight_axis or 0, ask.target
    count = weights.kind.shape[axis]
    factor = np.broadcast_to(x.form.scale * weights.scale.astype(np.float64) / target.scale, (count,))
    offset = np.broadcast_to(bias.astype(np.float64), (count,)) / target.scale
    sums = offset / factor
    if (np.abs(sums - np.rint(sums)) * factor).max() <= _COARSE:
        return None
    flat = np.moveaxis(weights.array, axis, 0).reshape(count, -1).astype(np.int64) - int(weights.zero_point[0])
    farthest = max(x.kind.dtype.high - x.form.zero_point, x.form.zero_point - x.kind.dtype.low)
    reach = farthest * np.abs(flat).sum(axis=1) * factor + np.abs(offset) + abs(target.zero_point) + 1
    shift = np.clip(np.floor(np.log2(2.0**30 / reach)), 0, 30).astype(np.int64)
    scale = np.rint(factor * 2.0**shift)
    farthest_result = np.minimum(reach, target.dtype.high - target.dtype.low)
    if (scale < 1 << 8).any() or (farthest_result > factor * scale).any():  # the rounded factor is further off
        return None
    moved = np.rint((offset + target.zero_point + 0.5) * 2.0**shift)
    total = ask.add(operator, [x.name, weights.name], "accumulator")
    rows = zip(("scale", "offset", "shift"), (scale, moved, shift), strict=True)
    parameters = [ask.constant(word, row.astype(np.int32)) for word, row in rows]
    return ask.clip(ask.add(ScaleShift(), [total, *parameters], "scaled"))


def _without_zero_point(emitter: Emitter, operator: Linear, weights: QuantisedValue) -> QuantisedValue:
    """The weights with their zero points taken off where the result fits int8."""
    if not weights.zero_point.any():
        return weights
    if weights.array is None:
        if weights.per_tensor:
            return weights
        what = f"{operator.class_name} has weights computed at run time with a zero point per channel ({weights.name})"
        raise ModelError(what, hint="quantise them per tensor, or symmetrically")
    shape = [1] * weights.array.ndim
    shape[weights.axis] = weights.zero_point.size
    centred = weights.array.astype(np.int64) - weights.zero_point.reshape(shape)
    low, high = int(centred.min()), int(centred.max())
    if DType.INT8.low <= low and high <= DType.INT8.high:
        array, zeros = centred.astype(np.int8), np.zeros_like(weights.zero_point)
        name = emitter.constant(f"{weights.name}_centred", array)
        return replace(weights, name=name, kind=emitter.builder.type_of(name), zero_point=zeros, array=array)
    if np.all(weights.zero_point == weights.zero_point[0]):
        return replace(weights, zero_point=weights.zero_point[:1])
    raise ModelError(
        f"{operator.class_name} has weights {weights.name} with a zero point per channel that do not fit int8 "
        f"without it: they span {low} to {high}",
        hint="quantise the weights symmetrically",
    )


def _bias_constant(ask: QuantisationRequest[Linear], bias: QuantisedValue | Array, array: Array) -> str:
    """The bias of the model where it can stay as it is, else a new constant."""
    stem = bias.name if isinstance(bias, QuantisedValue) else f"{ask.stem}_bias"
    if isinstance(bias, QuantisedValue) and bias.array is not None:
        if bias.array.dtype == array.dtype and np.array_equal(bias.array, array):
            return bias.name
        stem = f"{stem}_rescaled"
    return ask.emitter.constant(stem, array)


def _integer_bias(
    ask: QuantisationRequest[Linear], bias: QuantisedValue | Array, scale: Array, channels: int, dtype: DType
) -> Array:
    """The bias [channels] in steps of input scale * weight scale, as the accumulator's type."""
    if isinstance(bias, QuantisedValue):
        if bias.array is None:
            raise ModelError(f"the bias {bias.name} is computed at run time", hint="give the layer a constant bias")
        same = np.all(np.abs(bias.scale - scale) <= _SAME_SCALE * scale) and not bias.zero_point.any()
        if same:
            return bias.array.astype(dtype.numpy)
        real = (bias.array.astype(np.float64) - bias.zero_point) * bias.scale
    else:
        real = bias.astype(np.float64)
    steps = np.rint(np.broadcast_to(real, (channels,)) / scale)
    limit = float(DType.INT32.high)  # also for int64: larger biases cannot be meant
    if (np.abs(steps) > limit).any():
        what = f"{ask.emitter.origin or ask.stem}: biases beyond 32 bits are cut off there"
        ask.emitter.tell(Note(Kind.APPROXIMATE, what))
    return np.asarray(np.clip(steps, -limit, limit).astype(dtype.numpy))


def _within_32_bits(ask: QuantisationRequest[Linear], x: QuantisedValue, weights: QuantisedValue, bias: Array) -> Array:
    """The bias limited so that no sum leaves 32 bits, where its sign would turn; says where that changes it, and where
    sums may leave them without a bias."""
    if weights.array is None or bias.dtype != np.int32:
        return bias
    rows, zero, kind = ask.operator.filters(weights.array), int(weights.zero_point[0]), x.kind.dtype
    rows = rows.astype(np.int64) - zero if zero else rows
    lowest, highest = sum_bounds(rows, kind.low - x.form.zero_point, kind.high - x.form.zero_point)
    least, most = DType.INT32.low - lowest, DType.INT32.high - highest
    tell, where = ask.emitter.tell, ask.emitter.origin or ask.stem
    if (least > most).any():
        reach = int(np.maximum(-lowest, highest).max())
        what = f"its sums may reach {reach:,}; 32 bits hold {DType.INT32.high:,}, and larger ones wrap around"
        tell(Note(Kind.APPROXIMATE, f"{where}: {what}"))
        return bias
    limited = np.clip(bias, least, most).astype(np.int32)
    if moved := int(np.abs(limited.astype(np.int64) - bias).max(initial=0)):
        what = f"biases near the ends of 32 bits are moved, by at most {moved:,}, so that no sum wraps around"
        tell(Note(Kind.APPROXIMATE, f"{where}: {what}"))
    return limited


def moved_constant(emitter: Emitter, operator: Operator, weights: QuantisedValue, stem: str) -> QuantisedValue | None:
    """Constant weights quantised per channel after a movement, whose scales are moved alike; None where these then run
    along no axis."""
    assert weights.array is not None
    if weights.zero_point.any() or operator.filler:
        return None
    along = [1] * weights.array.ndim
    along[weights.axis] = weights.scale.size
    scales = operator.evaluate([np.array(np.broadcast_to(weights.scale.reshape(along), weights.array.shape))])
    array = operator.evaluate([weights.array])
    for axis in range(array.ndim):
        rest = tuple(place for place in range(array.ndim) if place != axis)
        largest = scales.max(axis=rest, keepdims=True)
        if (largest > 0).all() and ((scales == largest) | (scales == 0)).all():  # 0: zeros around the weights
            name = emitter.constant(stem or f"{weights.name}_moved", array, weights.kind.dtype)
            zeros = np.zeros(array.shape[axis], np.int64)
            kind = emitter.builder.type_of(name)
            return QuantisedValue(name, kind, largest.reshape(-1).astype(np.float32), zeros, axis, array)
    return None


def scaled_afterwards(
    emitter: Emitter, operator: Operator, operands: Sequence[str], weights: QuantisedValue, stem: str
) -> str:
    """A float layer on integer weights, which stay as small as they are: the sums times the scales, then the bias.

    Args:
        emitter: adds the nodes.
        operator: the layer.
        operands: the float activations, and the bias or none.
        weights: without zero points, one scale or one per output channel.
        stem: name of the result.
    """
    x, *bias = operands
    total = emitter.add(operator, [x, weights.name], emitter.fresh(f"{stem}_sums"))
    scale = emitter.constant(f"{stem}_steps", weights.scale.reshape(-1).astype(np.float32))
    scaled = emitter.add(Binary(BinaryKind.MULTIPLY), [total, scale], emitter.fresh(f"{stem}_scaled") if bias else stem)
    return emitter.add(Add(), [scaled, *bias], stem) if bias else scaled


_INTEGERS, _SCALES, _ZEROS = constant("integers"), constant("scales"), constant("zero points")
_WEIGHTS = apply(Dequantize, _INTEGERS, _SCALES, _ZEROS)
_X, _BIAS = operand("x"), rest("bias", known=True)
_LAYER = apply(Linear, _X, _WEIGHTS, _BIAS, alone=True)
_NORMALISED = apply(Operator, _LAYER, rest("constants", known=True))


def _line(at: RuleMatch) -> tuple[Array, Array] | None:
    """Factor and offset, [C] or [1], of a batch normalisation: the frontends give that of images as a 1x1 depthwise
    layer, that of rows as a product and a sum."""
    line = at.root.operator.line_of([None, *map(at.array, at.root.inputs[1:])])
    return rows_of_line(line, at.type(_LAYER).shape[-1:])


def _rescaled(at: RuleMatch) -> str | None:
    """(w * s) x + b, times f, plus c: (w * s * f) x + (b * f + c); a negative f turns the sign of the integers."""
    integers, scale, dtype, rows = at.array(_INTEGERS), at.array(_SCALES), at.type(_INTEGERS).dtype, _line(at)
    axis = at[_LAYER].weight_axis
    along = at[_WEIGHTS].axis % integers.ndim
    if rows is None or (scale.size > 1 and along != axis) or (rows[0] == 0).any() or at.array(_ZEROS).any():
        return None
    factor, offset = rows[0], np.broadcast_to(rows[1], at.type(_LAYER).shape[-1])
    shape = [factor.size if index == axis else 1 for index in range(integers.ndim)]
    turned = integers.astype(np.int64) * np.sign(factor).astype(np.int64).reshape(shape)
    if turned.max(initial=0) > dtype.high:
        if dtype not in _WIDER:
            return None
        dtype = _WIDER[dtype]
    steps = (scale.astype(np.float64) * np.abs(factor)).astype(np.float32)
    operands = [
        at.constant(turned.astype(dtype.numpy), dtype, _INTEGERS),
        at.constant(steps, DType.FLOAT32, _SCALES),
        at.constant(np.zeros(steps.size, np.int32), DType.INT32, _ZEROS),
    ]
    scaled = at.add(Dequantize(axis), *operands, like=_WEIGHTS)
    bias = sum((at.array(value).astype(np.float64) for value in at.others(_LAYER)), np.zeros(len(offset)))
    row = at.constant((bias * factor + offset).astype(np.float32), DType.FLOAT32, f"{at.root.output}_bias")
    return at.add(at[_LAYER], _X, scaled, row, like=_LAYER, stem=at.root.output)


fold_into_scales = Rule(_NORMALISED, _rescaled, (lambda at: at.type(_LAYER) == at.type(at.root.output),))
"""A batch normalisation behind a layer whose weights are quantised goes into their scales."""
