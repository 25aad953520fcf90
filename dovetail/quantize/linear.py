"""Convolutions and fully connected layers on integers: weights, bias and the factors of the requantisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dovetail.errors import ModelError
from dovetail.graph.types import Array, DType
from dovetail.operators.arithmetic import Add, Requantize, Rounding
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, accumulator_type
from dovetail.operators.movement import Pad
from dovetail.quantize.multiplier import multiplier_arrays
from dovetail.quantize.steps import Bounds, Emitter, Quantised, Target

Linear = Conv2d | DepthwiseConv2d | FullyConnected

_SAME_SCALE = 1e-3
"""Relative difference below which a bias counts as quantised with input scale * weight scale, as TFLite does."""


def lower_linear(
    emitter: Emitter,
    operator: Linear,
    x: Quantised,
    weights: Quantised,
    bias: Quantised | Array | None,
    target: Target,
    bounds: Bounds,
    stem: str,
) -> str:
    """Pad-free convolution or matrix product -> Requantize -> Clip; returns the name of the integers."""
    axis = 3 if isinstance(operator, DepthwiseConv2d) else 0
    if not weights.per_tensor and weights.axis != axis:
        what = f"{weights.name} is quantised along axis {weights.axis}, only output channels (axis {axis}) may be"
        raise ModelError(what, hint="quantise the weights per output channel or per tensor")
    weights = _without_zero_point(emitter, operator, weights)
    on_integers = replace(operator, input_zero_point=x.target.zero_point, weight_zero_point=int(weights.zero_point[0]))
    operands = [x.name, weights.name]
    if bias is not None:
        scale = x.scale.astype(np.float64) * weights.scale
        array = _integer_bias(bias, scale, weights.kind.shape[axis], accumulator_type(x.kind.dtype))
        stem_of_bias = bias.name if isinstance(bias, Quantised) else f"{stem}_bias"
        operands.append(_bias_constant(emitter, bias, array, stem_of_bias))
    total = emitter.add(on_integers, operands, emitter.fresh(f"{stem}_accumulator"))
    scaling = Requantize(_rounding(emitter, x, bias), 0, target.zero_point)
    # All in double: kernel_util.cc's PopulateConvolutionQuantizationParams for convolutions. For dense layers older
    # sources multiply in float32; what TensorFlow Lite Micro computes today fits the double product alone.
    factors = multiplier_arrays(x.target.scale * float(scale) / target.scale for scale in weights.scale)
    scaled = emitter.requantize(total, factors, scaling, emitter.fresh(f"{stem}_scaled"))
    return emitter.clip(scaled, target, bounds, stem)


def _rounding(emitter: Emitter, x: Quantised, bias: Quantised | Array | None) -> Rounding:
    """WIDE where TFLite sums in 64 bits: int16 activations, unless the bias has 32 bits."""
    narrow = isinstance(bias, Quantised) and bias.kind.dtype is DType.INT32
    return Rounding.WIDE if x.kind.dtype is DType.INT16 and not narrow else emitter.rounding


def _without_zero_point(emitter: Emitter, operator: Linear, weights: Quantised) -> Quantised:
    """The weights with their zero points taken off where the result fits int8."""
    if not weights.zero_point.any():
        return weights
    kind = type(operator).__name__
    if weights.array is None:
        if weights.per_tensor:
            return weights
        raise ModelError(f"{kind} has weights computed at run time with a zero point per channel ({weights.name})",
                         hint="quantise them per tensor, or symmetrically")
    shape = [1] * weights.array.ndim
    shape[weights.axis] = weights.zero_point.size
    centred = weights.array.astype(np.int64) - weights.zero_point.reshape(shape)
    low, high = int(centred.min()), int(centred.max())
    if DType.INT8.low <= low and high <= DType.INT8.high:
        name = emitter.constant(f"{weights.name}_centred", centred.astype(np.int8))
        zeros = np.zeros_like(weights.zero_point)
        return replace(
            weights, name=name, kind=emitter.builder.type_of(name), zero_point=zeros, array=centred.astype(np.int8)
        )
    if np.all(weights.zero_point == weights.zero_point[0]):
        return replace(weights, zero_point=weights.zero_point[:1])
    raise ModelError(
        f"{kind} has weights {weights.name} with a zero point per channel that do not fit int8 "
        f"without it: they span {low} to {high}",
        hint="quantise the weights symmetrically",
    )


def _bias_constant(emitter: Emitter, bias: Quantised | Array, array: Array, stem: str) -> str:
    """The bias of the model where it can stay as it is, else a new constant."""
    kept = isinstance(bias, Quantised) and bias.array is not None
    if isinstance(bias, Quantised) and kept and bias.array is not None:
        if bias.array.dtype == array.dtype and np.array_equal(bias.array, array):
            return bias.name
        stem = f"{stem}_rescaled"
    return emitter.constant(stem, array)


def _integer_bias(bias: Quantised | Array, scale: Array, channels: int, dtype: DType) -> Array:
    """The bias [channels] in steps of input scale * weight scale, as the accumulator's type."""
    if isinstance(bias, Quantised):
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
    return np.asarray(np.clip(steps, -limit, limit).astype(dtype.numpy))


def moved_constant(emitter: Emitter, operator: Operator, weights: Quantised, stem: str) -> Quantised | None:
    """Constant weights quantised per channel after a movement, whose scales are moved alike; None where these then run
    along no axis."""
    assert weights.array is not None
    if weights.zero_point.any() or (isinstance(operator, Pad) and operator.value != 0.0):
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
            return Quantised(name, kind, largest.reshape(-1).astype(np.float32), zeros, axis, array)
    return None


def scaled_afterwards(
    emitter: Emitter, operator: Operator, operands: Sequence[str], weights: Quantised, stem: str
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
