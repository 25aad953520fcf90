"""TFLite transposed convolutions, products of two activations, and bilinear resizing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import AGAIN, ALIKE, OperatorEntry, Tensor
from dovetail.frontend.tflite_linear import SAME, VALID, bias_of, weights_of
from dovetail.frontend.transposed import Transposed, transposed_convolution
from dovetail.graph.types import Array, DType
from dovetail.operators.base import Operator
from dovetail.operators.linear import MatrixProduct
from dovetail.operators.movement import Transpose
from dovetail.operators.selection import Resample


def _axis(size: int, kernel: int, stride: int, result: int, same: bool) -> Transposed:
    """One image axis: the padding is that of the convolution this one transposes (kernels/padding.h)."""
    total = max((-(-result // stride) - 1) * stride + kernel - result, 0) if same else 0
    return Transposed(size, kernel, stride, total // 2, result)


def transpose_conv(ctx: TfliteContext, op: OperatorEntry) -> None:
    """TRANSPOSE_CONV: result's shape, weights, activations, bias."""
    options, result = ctx.options(op, "TransposeConvOptions"), ctx.output(op)
    x, w = ctx.input(op, 2), weights_of(ctx, op, ctx.input(op, 2), rank=4, axis=0, position=1)
    stride = (int(options["StrideH"]), int(options["StrideW"]))
    padding = int(options["Padding"])
    fits = len(x.shape) == 4 == len(result.shape) and min(stride) >= 1 and padding in (SAME, VALID)
    if not fits or w.shape[3] != x.shape[3] or w.shape[0] != result.shape[3]:
        raise ctx.refuse(op, f"{x}, the weights {w}, stride {list(stride)} and padding {padding} do not fit {result}",
                         AGAIN)
    axes = [
        _axis(x.shape[place], w.shape[place], stride[place - 1], result.shape[place], padding == SAME)
        for place in (1, 2)
    ]

    def emit(operator: Operator, operands: Sequence[str], suffix: str) -> str:
        return ctx.add(op, operator, operands, suffix)

    operands = [ctx.real(op, x), ctx.real(op, w), *bias_of(ctx, op, x, w, position=3)]
    value, moves = transposed_convolution(emit, operands, (x.shape, w.shape), axes, 1)
    for move in moves:
        value = ctx.add(op, move, [value], "placed")
    ctx.finish_real(op, value, int(options["FusedActivationFunction"]))


def batch_matmul(ctx: TfliteContext, op: OperatorEntry) -> None:
    """BATCH_MATMUL of two activations, or of one with a constant."""
    options = ctx.options(op, "BatchMatMulOptions")
    operands = []
    for position, name in enumerate(("AdjX", "AdjY")):
        tensor = ctx.input(op, position)
        rank = len(tensor.shape)
        if rank < 2 or tensor.dtype is not ctx.output(op).dtype:
            raise ctx.refuse(op, f"multiplies {tensor} for {ctx.output(op)}, which is not supported")
        value = ctx.real(op, tensor)
        if options[name]:
            value = ctx.add(op, Transpose((*range(rank - 2), rank - 1, rank - 2)), [value], "transposed")
        operands.append(value)
    ctx.emit_real(op, MatrixProduct(), operands)


def _linear_taps(size: int, result: int, align: bool, centred: bool, exact: bool) -> tuple[Array, Array]:
    """Places and weights [result, 2]; unless `exact` in steps of 1/1024, as TFLite's integer kernel takes them
    (reference/resize_bilinear.h)."""
    corners = align and result > 1
    if exact:
        step = np.float32(size - corners) / np.float32(result - corners)
        place = np.arange(result, dtype=np.float32)
        middle = np.float32(0.5)
        at = ((place + middle) * step - middle if centred else place * step).astype(np.float64)
        low, high = np.maximum(np.floor(at), 0), np.minimum(np.ceil(at), size - 1)
    else:
        whole = result - corners
        scale = ((size - corners) * 1024 + whole // 2) // whole
        steps = np.arange(result, dtype=np.int64) * scale + (scale // 2 - 512 if centred else 0)
        towards_zero = np.where(steps < 0, -(-steps // 1024), steps // 1024)
        raised = steps + 1023
        low = np.maximum(towards_zero, 0).astype(np.float64)
        high = np.minimum(np.where(raised < 0, -(-raised // 1024), raised // 1024), size - 1).astype(np.float64)
        at = steps / 1024.0
    share = at - low
    places = np.stack([low, high], axis=1).astype(np.int32)
    return np.clip(places, 0, size - 1), np.stack([1.0 - share, share], axis=1).astype(np.float32)


def resize_bilinear(ctx: TfliteContext, op: OperatorEntry) -> None:
    """RESIZE_BILINEAR: both axes in one step."""
    options, x = ctx.options(op, "ResizeBilinearOptions"), ctx.input(op, 0)
    _same_scale(ctx, op, x)
    if len(x.shape) != 4:
        raise ctx.refuse(op, f"needs an NHWC image, got {x}", AGAIN)
    align, centred = bool(options["AlignCorners"]), bool(options["HalfPixelCenters"])
    operands, results = [ctx.real(op, x)], ctx.integers(op, 1, "size")
    ctx.expect_shape(op, (x.shape[0], *results, x.shape[3]))
    for axis, result in zip((1, 2), results, strict=True):
        arrays = _linear_taps(x.shape[axis], result, align, centred, x.dtype is DType.FLOAT32)
        operands += [ctx.constant(op, array, name) for array, name in zip(arrays, ("places", "weights"), strict=True)]
    ctx.emit_real(op, Resample((1, 2)), operands)


def _same_scale(ctx: TfliteContext, op: OperatorEntry, x: Tensor) -> None:
    if not ctx.same_quantisation(x, ctx.output(op)):
        raise ctx.refuse(op, f"resizing must keep the quantisation, that of {x} and {ctx.output(op)} differ", ALIKE)
