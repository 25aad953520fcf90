"""ONNX convolutions and matrix products: float, QDQ, QLinear and integer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.frontend.onnx_context import AGAIN, FOLD, TO_NHWC, OnnxContext, Scaling, image_padding, over_axes, pair
from dovetail.frontend.onnx_elementwise import batch_affine, number
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.graph.types import DType, Shape
from dovetail.operators.arithmetic import Add
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.operators.movement import Pad, Reshape, Transpose

DEPTHWISE_ORDER = (1, 2, 3, 0)
"""ONNX's depthwise weights [C*M, 1, KH, KW] to ours, [1, KH, KW, C*M]."""


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution."""

    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    groups: int
    depthwise: bool


def _window(ctx: OnnxContext, op: OnnxNode, x: Shape, w: Shape) -> Window:
    """Read a convolution's attributes; x is NCHW, w OIHW."""
    if len(x) != 4 or len(w) != 4:
        raise ctx.refuse(op, f"only 2-D convolutions are supported, the operands have {len(x)} and {len(w)} axes")
    kernel = pair(ctx, op, ctx.attribute(op, "kernel_shape", w[2:]), "kernel_shape")
    if kernel != w[2:]:
        raise ctx.refuse(op, f"kernel_shape is {list(kernel)}, the weights have {list(w[2:])}", AGAIN)
    stride = pair(ctx, op, ctx.attribute(op, "strides", (1, 1)), "strides")
    dilation = pair(ctx, op, ctx.attribute(op, "dilations", (1, 1)), "dilations")
    groups = int(ctx.attribute(op, "group", 1))
    if groups < 1 or x[1] != groups * w[1] or w[0] % groups != 0:
        raise ctx.refuse(op, f"{groups} groups do not fit {x[1]} channels and the weights {list(w)}", AGAIN)
    span = ((w[2] - 1) * dilation[0] + 1, (w[3] - 1) * dilation[1] + 1)
    padding = image_padding(ctx, op, x[2:], span, stride)
    return Window(stride, dilation, padding, groups, depthwise=groups > 1 and w[1] == 1)


def _padded(ctx: OnnxContext, op: OnnxNode, image: str, window: Window, filler: float) -> str:
    """The NHWC image with its border."""
    (top, bottom), (left, right) = window.padding
    if not any((top, bottom, left, right)):
        return image
    return ctx.add(op, Pad((0, top, left, 0), (0, bottom, right, 0), filler), [image], f"{op.outputs[0]}_padded")


def _kernel(ctx: OnnxContext, op: OnnxNode, w: str, window: Window) -> str:
    """Constant OIHW weights in our order."""
    if w not in ctx.static:
        raise ctx.refuse(op, f"the weights {w!r} must be constant", FOLD)
    return ctx.add(op, Transpose(DEPTHWISE_ORDER if window.depthwise else TO_NHWC), [w], f"{w}_ohwi")


def _row_bias(ctx: OnnxContext, op: OnnxNode, bias: str, channels: int) -> str:
    """A constant bias of any shape with `channels` elements as [channels]."""
    kind = ctx.type_of(bias)
    if bias not in ctx.static or kind.elements != channels:
        raise ctx.refuse(op, f"the bias {bias!r} {kind} must be constant, with {channels} elements", FOLD)
    return bias if len(kind.shape) == 1 else ctx.add(op, Reshape((channels,)), [bias], f"{bias}_row")


def _convolve(ctx: OnnxContext, op: OnnxNode, x: str, w: str, bias: list[str]) -> str:
    """The NHWC result of a float convolution of the NCHW value x."""
    shape = ctx.type_of(w).shape
    window = _window(ctx, op, ctx.type_of(x).shape, shape)
    image = _padded(ctx, op, ctx.image(op, x), window, 0.0)
    operator: Operator = (DepthwiseConv2d if window.depthwise else Conv2d)(window.stride, window.dilation)
    operands = [image, _kernel(ctx, op, w, window), *(_row_bias(ctx, op, name, shape[0]) for name in bias)]
    return ctx.add(op, operator, operands, f"{op.outputs[0]}_nhwc")


def _with_rows(ctx: OnnxContext, op: OnnxNode, value: str) -> str:
    """A value [N, C, W] as an image one row high."""
    batch, channels, width = ctx.type_of(value).shape
    return ctx.add(op, Reshape((batch, channels, 1, width)), [value], f"{value}_image")


def conv(ctx: OnnxContext, op: OnnxNode) -> None:
    """Conv over one or two image axes."""
    bias = [ctx.value(op, 2)] if ctx.has(op, 2) else []
    x, w = ctx.value(op, 0), ctx.value(op, 1)
    if len(ctx.type_of(x).shape) == 3 and len(ctx.type_of(w).shape) == 3:
        operands = [_with_rows(ctx, op, value) for value in (x, w)]
        row = _convolve(ctx, over_axes(op, (None, 0)), operands[0], operands[1], bias)
        (batch, _, width, channels) = ctx.type_of(row).shape
        flat = ctx.add(op, Reshape((batch, width, channels)), [row], f"{op.outputs[0]}_row")
        ctx.emit(op, Transpose((0, 2, 1)), [flat])
        return
    image = _convolve(ctx, op, x, w, bias)
    ctx.emit(op, Transpose((0, 3, 1, 2)), [image])


def qlinear_conv(ctx: OnnxContext, op: OnnxNode) -> None:
    """QLinearConv: its int32 bias is counted in units of input scale * weight scale."""
    source, kernel = ctx.scaling(op, 1, 2, -1, DType.UINT8), ctx.scaling(op, 4, 5, 0, DType.UINT8, 4)
    result = ctx.scaling(op, 6, 7, -1, DType.UINT8)
    x = ctx.dequantized(op, ctx.value(op, 0), source)
    w = ctx.dequantized(op, ctx.value(op, 3), kernel)
    image = _convolve(ctx, op, x, w, _integer_bias(ctx, op, 8, source, kernel))
    quantised = ctx.quantized(op, image, result, f"{op.outputs[0]}_nhwc")
    ctx.emit(op, Transpose((0, 3, 1, 2)), [quantised])


def _integer_bias(ctx: OnnxContext, op: OnnxNode, position: int, source: Scaling, kernel: Scaling) -> list[str]:
    """An optional int32 bias in float."""
    if not ctx.has(op, position):
        return []
    bias = ctx.value(op, position)
    kind = ctx.type_of(bias)
    if kind.dtype is not DType.INT32:
        raise ctx.refuse(op, f"the bias {bias!r} must be int32, got {kind.dtype.text}", AGAIN)
    row = bias if len(kind.shape) == 1 else ctx.add(op, Reshape((kind.elements,)), [bias], f"{bias}_row")
    steps = (source.steps * kernel.steps).astype(np.float32)
    unit = ctx.scaling_of(bias, steps, np.zeros(len(steps), np.int32), 0, DType.INT32)
    return [ctx.dequantized(op, row, unit)]


def _zero_point(ctx: OnnxContext, op: OnnxNode, position: int, what: str) -> int:
    """The zero point of an integer operator: one constant for the whole tensor."""
    if not ctx.has(op, position):
        return 0
    found = set(ctx.integers(op, position, what))
    if len(found) != 1:
        raise ctx.refuse(op, f"the {what} has {len(found)} different elements; one for the whole tensor is supported")
    return found.pop()


def conv_integer(ctx: OnnxContext, op: OnnxNode) -> None:
    """ConvInteger: padding is the input's zero point, the result int32."""
    x, w = ctx.value(op, 0), ctx.value(op, 1)
    zero_points = _zero_point(ctx, op, 2, "input zero point"), _zero_point(ctx, op, 3, "weight zero point")
    window = _window(ctx, op, ctx.type_of(x).shape, ctx.type_of(w).shape)
    image = _padded(ctx, op, ctx.image(op, x), window, zero_points[0])
    kind = DepthwiseConv2d if window.depthwise else Conv2d
    operator = kind(window.stride, window.dilation, *zero_points)
    ctx.emit_image(op, operator, [image, _kernel(ctx, op, w, window)])


def _matrix(ctx: OnnxContext, op: OnnxNode, w: str, rows_first: bool = True) -> str:
    """A constant [K, N] operand (already [N, K] unless `rows_first`) as the weights [N, K] of a dense layer."""
    kind = ctx.type_of(w)
    if w not in ctx.static or len(kind.shape) != 2:
        raise ctx.refuse(op, f"the right operand {w!r} {kind} must be a constant matrix", FOLD)
    return ctx.add(op, Transpose((1, 0)), [w], f"{w}_rows") if rows_first else w


def _rows(ctx: OnnxContext, op: OnnxNode, x: str) -> str:
    if len(ctx.type_of(x).shape) < 2:
        raise ctx.refuse(op, f"the left operand {x!r} {ctx.type_of(x)} must have at least two axes")
    return x


def matmul(ctx: OnnxContext, op: OnnxNode) -> None:
    """MatMul: of floats with a constant matrix a dense layer, otherwise with leading axes that broadcast."""
    a, b = ctx.value(op, 0), ctx.value(op, 1)
    left, right = ctx.type_of(a).shape, ctx.type_of(b).shape
    if b in ctx.static and len(right) == 2 and len(left) >= 2:
        ctx.emit(op, FullyConnected(), [a, _matrix(ctx, op, b)])
        return
    if not left or not right:
        raise ctx.refuse(op, f"multiplies {ctx.type_of(a)} and {ctx.type_of(b)}; a matrix has axes")
    stem = op.outputs[0]
    a = ctx.add(op, Reshape((1, *left)), [a], f"{stem}_left") if len(left) == 1 else a
    b = ctx.add(op, Reshape((*right, 1)), [b], f"{stem}_right") if len(right) == 1 else b
    result = ctx.add(op, MatrixProduct(), [a, b], f"{stem}_product")
    shape = list(ctx.type_of(result).shape)
    shape = shape[: len(shape) - 2] + shape[len(shape) - 2 :][len(left) == 1 : 1 if len(right) == 1 else 2]
    ctx.alias(op, result if len(left) > 1 and len(right) > 1 else ctx.add(op, Reshape(tuple(shape)), [result], stem))


def matmul_integer(ctx: OnnxContext, op: OnnxNode) -> None:
    """MatMulInteger with a constant right operand."""
    zero_points = _zero_point(ctx, op, 2, "left zero point"), _zero_point(ctx, op, 3, "right zero point")
    operands = [_rows(ctx, op, ctx.value(op, 0)), _matrix(ctx, op, ctx.value(op, 1))]
    ctx.emit(op, FullyConnected(*zero_points), operands)


def qlinear_matmul(ctx: OnnxContext, op: OnnxNode) -> None:
    """QLinearMatMul; the right operand is a constant matrix, quantised per tensor or per column, or of several."""
    rank = len(ctx.type_of(ctx.value(op, 3)).shape)
    left, right = ctx.scaling(op, 1, 2, -1, DType.UINT8), ctx.scaling(op, 4, 5, rank - 1, DType.UINT8, rank)
    x = ctx.dequantized(op, _rows(ctx, op, ctx.value(op, 0)), left)
    b = ctx.dequantized(op, ctx.value(op, 3), right)
    if len(ctx.type_of(b).shape) == 2:
        total = ctx.add(op, FullyConnected(), [x, _matrix(ctx, op, b)], f"{op.outputs[0]}_sum")
    else:
        total = ctx.add(op, MatrixProduct(), [x, b], f"{op.outputs[0]}_sum")
    result = ctx.scaling(op, 6, 7, -1, DType.UINT8)
    ctx.values[op.outputs[0]] = ctx.quantized(op, total, result)


def gemm(ctx: OnnxContext, op: OnnxNode) -> None:
    """Gemm; a constant right operand makes it a dense layer, where alpha and beta are 1."""
    alpha, beta = float(ctx.attribute(op, "alpha", 1.0)), float(ctx.attribute(op, "beta", 1.0))
    x = _rows(ctx, op, ctx.value(op, 0))
    if ctx.attribute(op, "transA", 0):
        x = ctx.add(op, Transpose((1, 0)), [x], f"{x}_columns")
    b = ctx.value(op, 1)
    if b not in ctx.static or (alpha, beta) != (1.0, 1.0):
        _scaled_product(ctx, op, x, b, (alpha, beta))
        return
    w = _matrix(ctx, op, b, rows_first=not ctx.attribute(op, "transB", 0))
    operands = [x, w]
    channels = ctx.type_of(w).shape[0]
    if not ctx.has(op, 2):
        ctx.emit(op, FullyConnected(), operands)
        return
    bias = ctx.value(op, 2)
    if bias in ctx.static and ctx.type_of(bias).elements == channels and ctx.type_of(bias).shape[-1:] == (channels,):
        ctx.emit(op, FullyConnected(), [*operands, _row_bias(ctx, op, bias, channels)])
        return
    total = ctx.add(op, FullyConnected(), operands, f"{op.outputs[0]}_sum")
    ctx.emit(op, Add(), [total, bias])


def _scaled_product(ctx: OnnxContext, op: OnnxNode, x: str, b: str, factors: tuple[float, float]) -> None:
    """Gemm in its general form: alpha * x * b + beta * c, all of them computed."""
    stem = op.outputs[0]
    if ctx.attribute(op, "transB", 0):
        b = ctx.add(op, Transpose((1, 0)), [b], f"{b}_columns")
    terms = [ctx.add(op, MatrixProduct(), [x, b], f"{stem}_product")]
    terms += [ctx.value(op, 2)] if ctx.has(op, 2) else []
    for place, factor in enumerate(factors[: len(terms)]):
        if factor != 1.0:
            operands = [terms[place], number(ctx, op, factor)]
            terms[place] = ctx.add(op, Binary(BinaryKind.MULTIPLY), operands, f"{stem}_scaled")
    ctx.alias(op, terms[0] if len(terms) == 1 else ctx.add(op, Add(), terms, f"{stem}_sum"))


def qgemm(ctx: OnnxContext, op: OnnxNode) -> None:
    """com.microsoft QGemm: an int32 bias in units of the product's scale; the result is float without a scale."""
    for name, wanted in (("alpha", 1.0), ("transA", 0)):
        ctx.only(op, name, wanted)
    transposed = bool(ctx.attribute(op, "transB", 0))
    left, right = ctx.scaling(op, 1, 2, -1, DType.UINT8), ctx.scaling(op, 4, 5, 0 if transposed else 1, DType.UINT8, 2)
    x = ctx.dequantized(op, _rows(ctx, op, ctx.value(op, 0)), left)
    w = _matrix(ctx, op, ctx.dequantized(op, ctx.value(op, 3), right), rows_first=not transposed)
    operands = [x, w, *_integer_bias(ctx, op, 6, left, right)]
    if not ctx.has(op, 7):
        ctx.emit(op, FullyConnected(), operands)
        return
    total = ctx.add(op, FullyConnected(), operands, f"{op.outputs[0]}_sum")
    ctx.values[op.outputs[0]] = ctx.quantized(op, total, ctx.scaling(op, 7, 8, -1, DType.UINT8))


def batch_normalization(ctx: OnnxContext, op: OnnxNode) -> None:
    """BatchNormalization at inference: a 1x1 depthwise convolution with constant scale and offset."""
    ctx.only(op, "training_mode", 0)
    ctx.only(op, "spatial", 1)
    ctx.attribute(op, "momentum", 0.9)  # used in training only
    if sum(name != "" for name in op.outputs) != 1:
        raise ctx.refuse(op, "the running mean and variance are results of training, which is not supported")
    epsilon = float(ctx.attribute(op, "epsilon", 1e-5))
    names = ("scale", "offset", "mean", "variance")
    scale, offset, mean, variance = (
        ctx.constant(op, position, name).array.astype(np.float64) for position, name in enumerate(names, 1)
    )
    if scale.ndim != 1 or not scale.shape == offset.shape == mean.shape == variance.shape:
        raise ctx.refuse(op, "scale, offset, mean and variance must be vectors of one length", AGAIN)
    factor = scale / np.sqrt(variance + epsilon)
    stem, x = op.outputs[0], ctx.value(op, 0)
    if len(ctx.type_of(x).shape) != 4:
        vectors = [
            ctx.builder.constant(f"{stem}_{name}", array.astype(np.float32))
            for name, array in (("factor", factor), ("offset", offset - mean * factor))
        ]
        batch_affine(ctx, op, x, vectors[0], vectors[1])
        return
    image = ctx.image(op, x)
    weights = ctx.builder.constant(f"{stem}_factor", factor.astype(np.float32).reshape(1, 1, 1, -1))
    bias = ctx.builder.constant(f"{stem}_offset", (offset - mean * factor).astype(np.float32))
    ctx.emit_image(op, DepthwiseConv2d(), [image, weights, bias])
