"""TFLite convolutions, fully connected layers and pools."""

from __future__ import annotations

from math import prod

import numpy as np

from dovetail.frontend.tflite_context import TfliteContext, bias_scale
from dovetail.frontend.tflite_file import AGAIN, ALIKE, FOLD, OperatorEntry, Tensor
from dovetail.graph.types import DType, Shape
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad, Reshape
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, Padding2d

SAME, VALID = 0, 1
"""Padding by its number in the schema."""

WEIGHT_TYPES = {
    DType.INT8: (DType.INT8, DType.INT4),
    DType.INT16: (DType.INT8, DType.INT4),
    DType.UINT8: (DType.UINT8,),
    DType.FLOAT32: (DType.FLOAT32, DType.INT8, DType.INT4, DType.UINT8),
}
"""Weights that may meet an activation. Integers at a float activation ("hybrid") mean their real values."""

BIAS_TOLERANCE = 0.01
"""Largest relative difference of a declared bias scale from input scale * weight scale."""


def same_padding(size: int, span: int, stride: int) -> tuple[int, int]:
    """Elements before and after an axis so that ceil(size / stride) windows of `span` fit (TensorFlow's SAME)."""
    total = max((-(-size // stride) - 1) * stride + span - size, 0)
    return total // 2, total - total // 2


def _pair(ctx: TfliteContext, op: OperatorEntry, rows: int, columns: int, what: str) -> tuple[int, int]:
    if rows < 1 or columns < 1:
        raise ctx.refuse(op, f"the {what} is {rows}x{columns}; both must be at least 1", AGAIN)
    return rows, columns


def _image_padding(
    ctx: TfliteContext, op: OperatorEntry, shape: Shape, span: tuple[int, int], stride: tuple[int, int]
) -> Padding2d:
    """Rows and columns the padding option adds."""
    padding = int(op.options["Padding"])
    if padding == VALID:
        return (0, 0), (0, 0)
    if padding != SAME:
        raise ctx.refuse(op, f"the padding {padding} is not supported, only SAME ({SAME}) and VALID ({VALID})")
    return same_padding(shape[1], span[0], stride[0]), same_padding(shape[2], span[1], stride[1])


def _image(ctx: TfliteContext, op: OperatorEntry) -> Tensor:
    x = ctx.input(op, 0)
    if len(x.shape) != 4:
        raise ctx.refuse(op, f"needs an NHWC image, got {x}", AGAIN)
    return x


def weights_of(ctx: TfliteContext, op: OperatorEntry, x: Tensor, rank: int, axis: int, position: int = 1) -> Tensor:
    """The weight operand: constant, of a type that fits x, quantised per tensor or along `axis`."""
    w = ctx.input(op, position)
    if not w.is_constant or len(w.shape) != rank:
        raise ctx.refuse(op, f"the weights {w} must be a constant with {rank} axes", FOLD)
    if w.dtype not in WEIGHT_TYPES.get(x.dtype, ()):
        raise ctx.refuse(op, f"weights {w} at activations {x} are not supported")
    if w.quantisation and len(w.quantisation.scale) > 1 and w.quantisation.axis != axis:
        raise ctx.refuse(op, f"the weights {w} are quantised along axis {w.quantisation.axis}, expected {axis}", ALIKE)
    return w


def bias_of(ctx: TfliteContext, op: OperatorEntry, x: Tensor, w: Tensor, position: int = 2) -> list[str]:
    """The bias in float: none, as it is, or counted in units of input scale * weight scale."""
    bias = ctx.optional(op, position)
    if bias is None:
        return []
    ctx.array(op, bias, "bias")
    if x.dtype is DType.FLOAT32:
        if bias.dtype is not DType.FLOAT32:
            raise ctx.refuse(op, f"the bias {bias} at float activations must be float32", AGAIN)
        return [ctx.value(op, bias)]
    expected = (DType.INT32, DType.INT64) if x.dtype is DType.INT16 else (DType.INT32,)
    if bias.dtype not in expected:
        raise ctx.refuse(op, f"the bias {bias} must be {' or '.join(kind.text for kind in expected)}", AGAIN)
    ctx.parameters(op, x), ctx.parameters(op, w)
    scale = bias_scale(x, w)
    declared = bias.quantisation
    if declared is not None and not np.allclose(declared.scale, scale, rtol=BIAS_TOLERANCE, atol=0):
        raise ctx.refuse(op, f"the scale of the bias {bias} is not input scale * weight scale", "quantise it again")
    if declared is not None and declared.zero_point.any():
        raise ctx.refuse(op, f"the bias {bias} has a zero point, which must be 0", ALIKE)
    names = (f"{bias.name}_scale", f"{bias.name}_zero_point")
    parameters = [
        ctx.builder.constant(name, array)
        for name, array in zip(names, (scale, np.zeros(len(scale), np.int32)), strict=True)
    ]
    return [ctx.dequantize(op, ctx.value(op, bias), parameters[0], parameters[1], -1)]


def _padded(ctx: TfliteContext, op: OperatorEntry, x: str, padding: Padding2d) -> str:
    """x with zeros around the image, in float."""
    (top, bottom), (left, right) = padding
    if not any((top, bottom, left, right)):
        return x
    pad = Pad((0, top, left, 0), (0, bottom, right, 0), 0.0)
    return ctx.builder.add(pad, [x], f"{ctx.output(op).name}_padded", ctx.origin(op))


def convolution(ctx: TfliteContext, op: OperatorEntry) -> None:
    """CONV_2D, groups included (they show in the depth of the weights)."""
    options = ctx.options(op, "Conv2DOptions")
    x = _image(ctx, op)
    _convolve(ctx, op, x, weights_of(ctx, op, x, rank=4, axis=0), depthwise=False)
    _check_bias_type(ctx, op, int(options["QuantizedBiasType"]))


def depthwise(ctx: TfliteContext, op: OperatorEntry) -> None:
    """DEPTHWISE_CONV_2D. The depth multiplier is implied by the shapes; the option must agree unless it is 0."""
    options = ctx.options(op, "DepthwiseConv2DOptions")
    x = _image(ctx, op)
    w = weights_of(ctx, op, x, rank=4, axis=3)
    if w.shape[0] != 1 or w.shape[3] % x.shape[3] != 0:
        raise ctx.refuse(op, f"the weights {w} do not fit the input {x}", AGAIN)
    multiplier, declared = w.shape[3] // x.shape[3], int(options["DepthMultiplier"])
    if declared not in (0, multiplier):
        raise ctx.refuse(op, f"the depth multiplier is {declared}, the shapes say {multiplier}", AGAIN)
    _convolve(ctx, op, x, w, depthwise=True)


def _convolve(ctx: TfliteContext, op: OperatorEntry, x: Tensor, w: Tensor, depthwise: bool) -> None:
    options = op.options
    ctx.same_type(op, x, ctx.output(op))
    stride = _pair(ctx, op, int(options["StrideH"]), int(options["StrideW"]), "stride")
    dilation = _pair(ctx, op, int(options["DilationHFactor"]), int(options["DilationWFactor"]), "dilation")
    span = ((w.shape[1] - 1) * dilation[0] + 1, (w.shape[2] - 1) * dilation[1] + 1)
    padding = _image_padding(ctx, op, x.shape, span, stride)
    operands = [_padded(ctx, op, ctx.real(op, x), padding), ctx.real(op, w), *bias_of(ctx, op, x, w)]
    operator: Operator = DepthwiseConv2d(stride, dilation) if depthwise else Conv2d(stride, dilation)
    ctx.emit_real(op, operator, operands, int(options["FusedActivationFunction"]))


def _check_bias_type(ctx: TfliteContext, op: OperatorEntry, number: int) -> None:
    """`quantized_bias_type` must name the bias' own type; 0 (FLOAT32) means it was not set."""
    names = {2: DType.INT32, 4: DType.INT64}
    bias = ctx.optional(op, 2)
    if number == 0 or bias is None:
        return
    if names.get(number) is not bias.dtype:
        raise ctx.refuse(op, f"quantized_bias_type is {number}, the bias is {bias}", AGAIN)


def fully_connected(ctx: TfliteContext, op: OperatorEntry) -> None:
    """FULLY_CONNECTED: without keep_num_dims the input is read as rows of as many elements as a weight row has."""
    options = ctx.options(op, "FullyConnectedOptions")
    if int(options["WeightsFormat"]) != 0:
        raise ctx.refuse(
            op, "the weights are stored in the shuffled format (SHUFFLED4x16INT8)", "convert with the default format"
        )
    x, result = ctx.input(op, 0), ctx.output(op)
    w = weights_of(ctx, op, x, rank=2, axis=0)
    ctx.same_type(op, x, result)
    depth = w.shape[1]
    if prod(x.shape) % depth != 0:
        raise ctx.refuse(op, f"the weights {w} do not fit the input {x}", AGAIN)
    shape = x.shape if options["KeepNumDims"] else (prod(x.shape) // depth, depth)
    value = ctx.value(op, x)
    if shape != x.shape:
        value = ctx.builder.add(Reshape(shape), [value], f"{x.name}_rows", ctx.origin(op))
    if x.dtype is not DType.FLOAT32:
        scale, zero_point = ctx.parameters(op, x)
        value = ctx.dequantize(op, value, scale, zero_point, -1)
    activation = int(options["FusedActivationFunction"])
    ctx.emit_real(op, FullyConnected(), [value, ctx.real(op, w), *bias_of(ctx, op, x, w)], activation)
    _check_bias_type(ctx, op, int(options["QuantizedBiasType"]))


def pool_options(ctx: TfliteContext, op: OperatorEntry) -> tuple[tuple[int, int], tuple[int, int], Padding2d]:
    """Kernel, stride and padding of a pool."""
    options = ctx.options(op, "Pool2DOptions")
    x = _image(ctx, op)
    kernel = _pair(ctx, op, int(options["FilterHeight"]), int(options["FilterWidth"]), "pool window")
    stride = _pair(ctx, op, int(options["StrideH"]), int(options["StrideW"]), "stride")
    return kernel, stride, _image_padding(ctx, op, x.shape, kernel, stride)


def average_pool(ctx: TfliteContext, op: OperatorEntry) -> None:
    """AVERAGE_POOL_2D: padding does not count."""
    kernel, stride, padding = pool_options(ctx, op)
    x, result = ctx.input(op, 0), ctx.output(op)
    _check_pool_quantisation(ctx, op, x, result)
    activation = int(op.options["FusedActivationFunction"])
    ctx.emit_real(op, AveragePool2d(kernel, stride, padding), [ctx.real(op, x)], activation)


def max_pool(ctx: TfliteContext, op: OperatorEntry) -> None:
    """MAX_POOL_2D: on the integers themselves unless an activation is fused."""
    kernel, stride, padding = pool_options(ctx, op)
    x, result = ctx.input(op, 0), ctx.output(op)
    _check_pool_quantisation(ctx, op, x, result)
    activation = int(op.options["FusedActivationFunction"])
    operator = MaxPool2d(kernel, stride, padding)
    if activation == 0:
        ctx.emit(op, operator, [ctx.value(op, x)])
    else:
        ctx.emit_real(op, operator, [ctx.real(op, x)], activation)


def _check_pool_quantisation(ctx: TfliteContext, op: OperatorEntry, x: Tensor, result: Tensor) -> None:
    """TFLite's pools copy the raw values, so both sides must be quantised alike."""
    ctx.same_type(op, x, result)
    if not ctx.same_quantisation(x, result):
        raise ctx.refuse(op, f"a pool must keep the quantisation, that of {x} and {result} differ", ALIKE)
