"""ONNX pools and means over images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import inf, prod

import numpy as np

from dovetail.frontend.onnx_context import TO_NCHW, OnnxContext, Scaling, image_padding, over_axes, pair
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.frontend.onnx_reduction import global_pool, kept_shape, reduced_axes, reduction
from dovetail.graph.types import DType
from dovetail.operators.arithmetic import Add
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.movement import Pad, Reshape, Slice, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, Padding2d
from dovetail.operators.reduction import ReduceKind

UNPADDED: Padding2d = ((0, 0), (0, 0))
"""No border."""


@dataclass(frozen=True)
class _Geometry:
    """The windows of a pool over the rows and columns of an NHWC image."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: Padding2d
    extended: Padding2d
    """The padding with ceil_mode's addition."""

    @property
    def dense(self) -> bool:
        """True when the elements of a window are neighbours."""
        return self.dilation == (1, 1)

    def tap_slices(self, sizes: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """For each tap of the window, start and stop of the rows and columns it reads of the extended image."""
        counts = []
        for axis in (0, 1):
            span = (self.kernel[axis] - 1) * self.dilation[axis] + 1
            counts.append((sizes[axis] + sum(self.extended[axis]) - span) // self.stride[axis] + 1)
        found = []
        for row, column in product(range(self.kernel[0]), range(self.kernel[1])):
            start = (row * self.dilation[0], column * self.dilation[1])
            rows, columns = ((count - 1) * step + 1 for count, step in zip(counts, self.stride, strict=True))
            found.append((start, (start[0] + rows, start[1] + columns)))
        return found


def _ceiling(size: int, span: int, stride: int, padding: tuple[int, int]) -> tuple[int, int]:
    """The padding that gives a last, partial window its elements (ceil_mode); one that starts in it is left out."""
    windows = -(-(size + sum(padding) - span) // stride) + 1
    if (windows - 1) * stride >= size + padding[0]:
        windows -= 1
    return padding[0], max((windows - 1) * stride + span - size - padding[0], padding[1])


def _geometry(ctx: OnnxContext, op: OnnxNode, sizes: tuple[int, int]) -> _Geometry:
    """The windows of a pool over rows and columns `sizes`."""
    kernel = pair(ctx, op, ctx.attribute(op, "kernel_shape", ()), "kernel_shape")
    stride = pair(ctx, op, ctx.attribute(op, "strides", (1, 1)), "strides")
    dilation = pair(ctx, op, ctx.attribute(op, "dilations", (1, 1)), "dilations")
    span = ((kernel[0] - 1) * dilation[0] + 1, (kernel[1] - 1) * dilation[1] + 1)
    padding = image_padding(ctx, op, sizes, span, stride)
    if not ctx.attribute(op, "ceil_mode", 0):
        return _Geometry(kernel, stride, dilation, padding, padding)
    extended = [_ceiling(sizes[axis], span[axis], stride[axis], padding[axis]) for axis in (0, 1)]
    return _Geometry(kernel, stride, dilation, padding, (extended[0], extended[1]))


def _taps(ctx: OnnxContext, op: OnnxNode, image: str, windows: _Geometry, filler: float) -> list[str]:
    """For each tap of the window the elements it takes, over all windows: slices of the image with its border."""
    shape, stem = ctx.type_of(image).shape, op.outputs[0]
    (top, bottom), (left, right) = windows.extended
    if any((top, bottom, left, right)):
        border = Pad((0, top, left, 0), (0, bottom, right, 0), filler)
        image = ctx.add(op, border, [image], f"{stem}_bordered")
    return [
        ctx.add(
            op,
            Slice((0, *start, 0), (shape[0], *stop, shape[3]), (1, *windows.stride, 1)),
            [image],
            f"{stem}_tap",
        )
        for start, stop in windows.tap_slices((shape[1], shape[2]))
    ]


def _largest(ctx: OnnxContext, op: OnnxNode, image: str) -> str:
    """The maximum pool of an NHWC value."""
    kind = ctx.type_of(image)
    windows = _geometry(ctx, op, (kind.shape[1], kind.shape[2]))
    stem = f"{op.outputs[0]}_nhwc"
    if windows.dense:
        return ctx.add(op, MaxPool2d(windows.kernel, windows.stride, windows.extended), [image], stem)
    first, *others = _taps(ctx, op, image, windows, kind.dtype.low if kind.dtype.is_integer else -inf)
    for other in others:
        first = ctx.add(op, Binary(BinaryKind.MAXIMUM), [first, other], stem)
    return first


def _average(ctx: OnnxContext, op: OnnxNode, image: str) -> str:
    """The average pool of an NHWC float value."""
    shape = ctx.type_of(image).shape
    windows = _geometry(ctx, op, (shape[1], shape[2]))
    padding, extended, stem = windows.padding, windows.extended, f"{op.outputs[0]}_nhwc"
    with_border = bool(ctx.attribute(op, "count_include_pad", 0)) and padding != UNPADDED
    if not windows.dense or (with_border and extended != padding):
        return _weighed(ctx, op, image, windows, with_border)
    if with_border:
        (top, bottom), (left, right) = padding
        pad = Pad((0, top, left, 0), (0, bottom, right, 0), 0.0)
        image, extended = ctx.add(op, pad, [image], f"{op.outputs[0]}_padded"), UNPADDED
    return ctx.add(op, AveragePool2d(windows.kernel, windows.stride, extended), [image], stem)


def _weighed(ctx: OnnxContext, op: OnnxNode, image: str, windows: _Geometry, with_border: bool) -> str:
    """The average pool as a sum of taps, divided by how many of them count."""
    (_, height, width, _), stem = ctx.type_of(image).shape, op.outputs[0]
    first, *others = _taps(ctx, op, image, windows, 0.0)
    for other in others:
        first = ctx.add(op, Add(), [first, other], f"{stem}_sum")
    counted = np.ones((height, width), np.float32)
    if with_border:
        counted = np.pad(counted, windows.padding, constant_values=1)
        outer = [(0, e[1] - p[1]) for p, e in zip(windows.padding, windows.extended, strict=True)]
    else:
        outer = list(windows.extended)
    counted = np.pad(counted, outer)
    rows, columns = windows.stride
    taps = [
        counted[start[0] : stop[0] : rows, start[1] : stop[1] : columns]
        for start, stop in windows.tap_slices((height, width))
    ]
    total = np.sum(taps, axis=0, dtype=np.float32)
    counts = ctx.builder.constant(f"{stem}_counts", np.asarray(total)[None, :, :, None])
    return ctx.add(op, Binary(BinaryKind.DIVIDE), [first, counts], f"{stem}_nhwc")


def _pooled(ctx: OnnxContext, op: OnnxNode, pool: Callable[[OnnxContext, OnnxNode, str], str]) -> None:
    """A pool of an NHWC image as the operator's result, over one, two or three axes.

    Over three it is two pools, one behind the other: of rows and columns, then along the first axis.
    """
    x, stem = ctx.value(op, 0), op.outputs[0]
    shape = ctx.type_of(x).shape
    if len(shape) == 3:
        image = ctx.add(op, Reshape((shape[0] * shape[1], 1, shape[2], 1)), [x], f"{stem}_image")
        result = pool(ctx, over_axes(op, (None, 0)), image)
        ctx.emit(op, Reshape((*shape[:2], ctx.type_of(result).shape[2])), [result])
        return
    if len(shape) == 5:
        planes = ctx.add(op, Reshape((prod(shape[:3]), *shape[3:], 1)), [x], f"{stem}_planes")
        flat = pool(ctx, over_axes(op, (1, 2)), planes)
        height, width = ctx.type_of(flat).shape[1:3]
        deep = ctx.add(op, Reshape((shape[0] * shape[1], shape[2], height * width, 1)), [flat], f"{stem}_deep")
        result = pool(ctx, over_axes(op, (0, None)), deep)
        ctx.emit(op, Reshape((*shape[:2], ctx.type_of(result).shape[1], height, width)), [result])
        return
    ctx.emit(op, Transpose(TO_NCHW), [pool(ctx, op, ctx.image(op, x))])


def max_pool(ctx: OnnxContext, op: OnnxNode) -> None:
    """MaxPool, of floats or of the integers themselves."""
    if sum(name != "" for name in op.outputs) != 1:
        raise ctx.refuse(op, "the result with indices is not supported")
    ctx.attribute(op, "storage_order", 0)  # concerns the indices only
    _pooled(ctx, op, _largest)


def average_pool(ctx: OnnxContext, op: OnnxNode) -> None:
    """AveragePool."""
    _pooled(ctx, op, _average)


def _whole(ctx: OnnxContext, image: str) -> Operator:
    """The mean over all rows and columns of an NHWC value."""
    shape = ctx.type_of(image).shape
    return AveragePool2d((shape[1], shape[2]), (shape[1], shape[2]), UNPADDED)


def global_average_pool(ctx: OnnxContext, op: OnnxNode) -> None:
    """GlobalAveragePool."""
    if len(ctx.type_of(ctx.value(op, 0)).shape) != 4:
        global_pool(ReduceKind.MEAN)(ctx, op)
        return
    image = ctx.image(op, ctx.value(op, 0))
    ctx.emit_image(op, _whole(ctx, image), [image])


def reduce_mean(ctx: OnnxContext, op: OnnxNode) -> None:
    """ReduceMean; over the two image axes it is a pool: [2, 3], or [1, 2] in a model that is NHWC itself."""
    x = ctx.value(op, 0)
    shape = ctx.type_of(x).shape
    axes = reduced_axes(ctx, op, len(shape))
    if len(shape) != 4 or axes not in ((1, 2), (2, 3)):
        reduction(ReduceKind.MEAN)(ctx, op)
        return
    keep = bool(ctx.attribute(op, "keepdims", 1))
    image = ctx.image(op, x) if axes == (2, 3) else x
    pooled = ctx.add(op, _whole(ctx, image), [image], f"{op.outputs[0]}_image")
    ctx.emit(op, Reshape(kept_shape(shape, axes, keep)), [pooled])


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
