"""ONNX pools and means over images."""

from __future__ import annotations

from dovetail.frontend.onnx_context import OnnxContext, Scaling, image_padding, pair
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.graph.types import DType
from dovetail.operators.base import Operator
from dovetail.operators.movement import Pad, Reshape, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, Padding2d

UNPADDED: Padding2d = ((0, 0), (0, 0))
"""No border."""


def _ceiling(size: int, kernel: int, stride: int, padding: tuple[int, int]) -> tuple[int, int]:
    """The padding that gives a last, partial window its elements (ceil_mode); one that starts in it is left out."""
    windows = -(-(size + sum(padding) - kernel) // stride) + 1
    if (windows - 1) * stride >= size + padding[0]:
        windows -= 1
    return padding[0], max((windows - 1) * stride + kernel - size - padding[0], padding[1])


def _geometry(
    ctx: OnnxContext, op: OnnxNode, sizes: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int], Padding2d, Padding2d]:
    """Kernel, stride, padding, and the padding with ceil_mode's addition, of a pool over rows and columns `sizes`."""
    kernel = pair(ctx, op, ctx.attribute(op, "kernel_shape", ()), "kernel_shape")
    stride = pair(ctx, op, ctx.attribute(op, "strides", (1, 1)), "strides")
    if tuple(ctx.attribute(op, "dilations", (1, 1))) != (1, 1):
        raise ctx.refuse(op, f"dilations = {list(op.attributes['dilations'])} are not supported for pools")
    padding = image_padding(ctx, op, sizes, kernel, stride)
    if not ctx.attribute(op, "ceil_mode", 0):
        return kernel, stride, padding, padding
    extended = [_ceiling(sizes[axis], kernel[axis], stride[axis], padding[axis]) for axis in (0, 1)]
    return kernel, stride, padding, (extended[0], extended[1])


def max_pool(ctx: OnnxContext, op: OnnxNode) -> None:
    """MaxPool, of floats or of the integers themselves."""
    if sum(name != "" for name in op.outputs) != 1:
        raise ctx.refuse(op, "the result with indices is not supported")
    ctx.attribute(op, "storage_order", 0)  # concerns the indices only
    image = ctx.image(op, ctx.value(op, 0))
    shape = ctx.type_of(image).shape
    kernel, stride, _, padding = _geometry(ctx, op, (shape[1], shape[2]))
    ctx.emit_image(op, MaxPool2d(kernel, stride, padding), [image])


def _average(ctx: OnnxContext, op: OnnxNode, image: str) -> str:
    """The average pool of an NHWC float value."""
    shape = ctx.type_of(image).shape
    kernel, stride, padding, extended = _geometry(ctx, op, (shape[1], shape[2]))
    if ctx.attribute(op, "count_include_pad", 0) and padding != UNPADDED:
        if extended != padding:
            raise ctx.refuse(op, "ceil_mode = 1 with count_include_pad = 1 and a partial window is not supported")
        (top, bottom), (left, right) = padding
        pad = Pad((0, top, left, 0), (0, bottom, right, 0), 0.0)
        image, extended = ctx.add(op, pad, [image], f"{op.outputs[0]}_padded"), UNPADDED
    return ctx.add(op, AveragePool2d(kernel, stride, extended), [image], f"{op.outputs[0]}_nhwc")


def average_pool(ctx: OnnxContext, op: OnnxNode) -> None:
    """AveragePool."""
    image = _average(ctx, op, ctx.image(op, ctx.value(op, 0)))
    ctx.emit(op, Transpose((0, 3, 1, 2)), [image])


def _whole(ctx: OnnxContext, image: str) -> Operator:
    """The mean over all rows and columns of an NHWC value."""
    shape = ctx.type_of(image).shape
    return AveragePool2d((shape[1], shape[2]), (shape[1], shape[2]), UNPADDED)


def global_average_pool(ctx: OnnxContext, op: OnnxNode) -> None:
    """GlobalAveragePool."""
    image = ctx.image(op, ctx.value(op, 0))
    ctx.emit_image(op, _whole(ctx, image), [image])


def reduce_mean(ctx: OnnxContext, op: OnnxNode) -> None:
    """ReduceMean over the two image axes: [2, 3], or [1, 2] in a model that is NHWC itself."""
    x = ctx.value(op, 0)
    shape = ctx.type_of(x).shape
    listed = ctx.attribute(op, "axes", None)
    if listed is None:
        listed = ctx.integers(op, 1, "axes") if ctx.has(op, 1) else ()
    if ctx.attribute(op, "noop_with_empty_axes", 0) and not listed:
        ctx.alias(op, x)
        return
    axes = tuple(sorted({ctx.positive_axis(op, axis, len(shape)) for axis in listed}))
    if len(shape) != 4 or axes not in ((1, 2), (2, 3)):
        raise ctx.refuse(
            op,
            f"the mean of {ctx.type_of(x)} over the axes {list(axes)} is not supported",
            "only over the rows and columns of a 4-D tensor: [2, 3] or [1, 2]",
        )
    keep = bool(ctx.attribute(op, "keepdims", 1))
    image = ctx.image(op, x) if axes == (2, 3) else x
    pooled = ctx.add(op, _whole(ctx, image), [image], f"{op.outputs[0]}_image")
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes)
    ctx.emit(op, Reshape(kept), [pooled])


def _channels_last(ctx: OnnxContext, op: OnnxNode) -> str:
    """Operand 0 as NHWC: com.microsoft pools may have it in that order already."""
    x = ctx.value(op, 0)
    return x if ctx.attribute(op, "channels_last", 0) else ctx.image(op, x)


def _emit_quantised(ctx: OnnxContext, op: OnnxNode, image: str, result: Scaling) -> None:
    """Quantise an NHWC float value, and put it in the order the operator promises."""
    if op.attributes.get("channels_last", 0):
        ctx.values[op.outputs[0]] = ctx.quantized(op, image, result)
        return
    quantised = ctx.quantized(op, image, result, f"{op.outputs[0]}_nhwc")
    ctx.emit(op, Transpose((0, 3, 1, 2)), [quantised])


def qlinear_global_average_pool(ctx: OnnxContext, op: OnnxNode) -> None:
    """com.microsoft QLinearGlobalAveragePool."""
    source, result = ctx.scaling(op, 1, 2, -1, DType.UINT8), ctx.scaling(op, 3, 4, -1, DType.UINT8)
    image = ctx.dequantized(op, _channels_last(ctx, op), source)
    pooled = ctx.add(op, _whole(ctx, image), [image], f"{op.outputs[0]}_mean")
    _emit_quantised(ctx, op, pooled, result)


def qlinear_average_pool(ctx: OnnxContext, op: OnnxNode) -> None:
    """com.microsoft QLinearAveragePool."""
    source, result = ctx.scaling(op, 1, 2, -1, DType.UINT8), ctx.scaling(op, 3, 4, -1, DType.UINT8)
    image = ctx.dequantized(op, _channels_last(ctx, op), source)
    _emit_quantised(ctx, op, _average(ctx, op, image), result)
