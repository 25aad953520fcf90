"""ONNX operators that make one element of many: pools, reductions, softmax and normalisations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf, prod

import numpy as np

from dovetail.ir.operators.activation import UnaryKind
from dovetail.ir.operators.base import Padding2d, SlidingWindow
from dovetail.ir.operators.elementwise import BinaryKind
from dovetail.ir.operators.linear import DepthwiseConv2d
from dovetail.ir.operators.movement import Reshape, Slice
from dovetail.ir.operators.reduction import ArgExtreme, AveragePool2d, MaxPool2d, Normalise, Reduce, ReduceKind
from dovetail.ir.types import DType, Shape
from dovetail.read.geometry import Pair, spans
from dovetail.read.onnx.values import AGAIN, Importer, OnnxValues
from dovetail.read.values import kept_shape

UNPADDED: Padding2d = ((0, 0), (0, 0))
"""No border."""


def _ceiling(size: int, span: int, stride: int, padding: Pair) -> Pair:
    """The padding that gives a last, partial window its elements (ceil_mode); one that starts in it is left out."""
    windows = -(-(size + sum(padding) - span) // stride) + 1
    if (windows - 1) * stride >= size + padding[0]:
        windows -= 1
    return padding[0], max((windows - 1) * stride + span - size - padding[0], padding[1])


def _windows(v: OnnxValues, image: str) -> tuple[SlidingWindow, Padding2d]:
    """The windows of a pool over an NHWC image, and their padding without what ceil_mode adds to it."""
    sizes = v.shape(image)[1:3]
    kernel, stride, dilation = v.pair("kernel_shape", ()), v.pair("strides"), v.pair("dilations")
    span = spans(kernel, dilation)
    padding = v.padding(sizes, span, stride)
    if not v.attribute("ceil_mode", 0):
        return SlidingWindow(kernel, stride, dilation, padding), padding
    rows, columns = map(_ceiling, sizes, span, stride, padding)
    return SlidingWindow(kernel, stride, dilation, (rows, columns)), padding


def _taps(v: OnnxValues, image: str, window: SlidingWindow, filler: float) -> list[str]:
    """For each tap of the window the elements it takes, over all windows: slices of the image with its border."""
    kind = v.type_of(image)
    image = v.bordered(image, window.padding, filler, "bordered")
    sizes = zip(kind.shape[1:3], window.padding, window.span, window.stride, strict=True)
    rows, columns = ((size + sum(sides) - span) // step * step + 1 for size, sides, span, step in sizes)
    taps = []
    for row, column in product(range(window.kernel[0]), range(window.kernel[1])):
        top, left = row * window.dilation[0], column * window.dilation[1]
        stop = (kind.shape[0], top + rows, left + columns, kind.shape[3])
        taps.append(v.add(Slice((0, top, left, 0), stop, (1, *window.stride, 1)), [image], "tap"))
    return taps


def _largest(v: OnnxValues, image: str) -> str:
    """The maximum pool of an NHWC value."""
    dtype, (window, _) = v.type_of(image).dtype, _windows(v, image)
    if window.dilation == (1, 1):
        return v.add(MaxPool2d(window.kernel, window.stride, window.padding), [image], "nhwc")
    taps = _taps(v, image, window, dtype.low if dtype.is_integer else -inf)
    return v.folded(BinaryKind.MAXIMUM, taps, False, "nhwc")


def average(v: OnnxValues, image: str) -> str:
    """The average pool of an NHWC float value."""
    window, padding = _windows(v, image)
    with_border = bool(v.attribute("count_include_pad", 0)) and padding != UNPADDED
    if window.dilation == (1, 1) and (not with_border or window.padding == padding):
        if with_border:
            image, window = v.bordered(image, padding), replace(window, padding=UNPADDED)
        return v.add(AveragePool2d(window.kernel, window.stride, window.padding), [image], "nhwc")
    # A sum of taps, divided by how many of them count.
    total = v.folded(BinaryKind.ADD, _taps(v, image, window, 0.0), False, "sum")
    counted = np.ones((1, *v.shape(image)[1:3], 1), np.float32)
    if with_border:  # all but what ceil_mode adds
        counted = np.pad(counted, ((0, 0), *padding, (0, 0)), constant_values=1)
        bottom, right = (whole[1] - own[1] for whole, own in zip(window.padding, padding, strict=True))
        window = replace(window, padding=((0, bottom), (0, right)))
    return v.over(total, v.constant(window.view(counted).sum(axis=(4, 5)), "counts"), "nhwc")


def _pooled(v: OnnxValues, pool: Callable[[OnnxValues, str], str]) -> str:
    """A pool of an NHWC image as the operator's result, over one, two or three axes; over three it is two pools, one
    behind the other: of rows and columns, then along the first axis."""
    x = v.value(0)
    shape = v.shape(x)
    if len(shape) == 3:
        image = v.add(Reshape((shape[0] * shape[1], 1, shape[2], 1)), [x], "image")
        result = pool(v.over_axes((None, 0)), image)
        return v.add(Reshape((*shape[:2], v.shape(result)[2])), [result])
    if len(shape) == 5:
        planes = v.add(Reshape((prod(shape[:3]), *shape[3:], 1)), [x], "planes")
        flat = pool(v.over_axes((1, 2)), planes)
        height, width = v.shape(flat)[1:3]
        deep = v.add(Reshape((shape[0] * shape[1], shape[2], height * width, 1)), [flat], "deep")
        result = pool(v.over_axes((0, None)), deep)
        return v.add(Reshape((*shape[:2], v.shape(result)[1], height, width)), [result])
    return v.of_image(pool(v, v.image(x)))


def max_pool(v: OnnxValues) -> str:
    """MaxPool, of floats or of the integers themselves."""
    v.one_result("the result with indices is not supported")
    v.attribute("storage_order", 0)  # concerns the indices only
    return _pooled(v, _largest)


def average_pool(v: OnnxValues) -> str:
    """AveragePool."""
    return _pooled(v, average)


def whole(v: OnnxValues, image: str, suffix: str) -> str:
    """The mean over all rows and columns of an NHWC value."""
    size = (v.shape(image)[1], v.shape(image)[2])
    return v.add(AveragePool2d(size, size, UNPADDED), [image], suffix)


def global_average_pool(v: OnnxValues) -> str | None:
    """GlobalAveragePool."""
    if len(v.shape(v.value(0))) != 4:
        return global_pool(ReduceKind.MEAN)(v)
    return v.of_image(whole(v, v.image(v.value(0)), "nhwc"))


def global_pool(kind: ReduceKind) -> Importer:
    """The importer of a pool over everything behind the channels."""

    def build(v: OnnxValues) -> str:
        x = v.value(0)
        rank = len(v.shape(x))
        if rank < 3 or v.type_of(x).dtype is DType.BOOL:
            raise v.refuse(f"pools {v.type_of(x)}, which has no image axes", AGAIN)
        return v.add(Reduce(kind, tuple(range(2, rank))), [x])

    return build


def _reduced_axes(v: OnnxValues, rank: int) -> tuple[int, ...] | None:
    """The axes a reduction names, in rising order; all where it names none; None where it shall then do nothing."""
    listed = v.listed("axes", 1, "axes")
    noop = v.attribute("noop_with_empty_axes", 0)
    if not listed:
        return None if noop else tuple(range(rank))
    return tuple(sorted({v.axis(axis, rank) for axis in listed}))


def _kept(v: OnnxValues, x: str, axes: tuple[int, ...]) -> Reshape:
    """To the shape of x after a reduction over `axes`, as the attribute keepdims has it."""
    return Reshape(kept_shape(v.shape(x), axes, bool(v.attribute("keepdims", 1))))


def reduction(kind: ReduceKind, before: UnaryKind | None = None, after: UnaryKind | None = None) -> Importer:
    """The importer of a reduction of floats, of function `before` of them; `after` is applied to the result.

    Without either, integers have a maximum and a minimum too.
    """

    def build(v: OnnxValues) -> str:
        x = v.value(0) if before is not UnaryKind.SQUARE else v.real()
        axes = _reduced_axes(v, len(v.shape(x)))
        if before is not None:
            x = v.unary(before, x, "before")
        keep = bool(v.attribute("keepdims", 1))
        x = x if axes is None else v.reduce(kind, x, axes, keep)
        return x if after is None else v.unary(after, x, "after")

    return build


def reduce_mean(v: OnnxValues) -> str | None:
    """ReduceMean; over the two image axes it is a pool: [2, 3], or [1, 2] in a model that is NHWC itself."""
    x = v.value(0)
    shape = v.shape(x)
    axes = _reduced_axes(v, len(shape))
    if len(shape) != 4 or axes not in ((1, 2), (2, 3)):
        return reduction(ReduceKind.MEAN)(v)
    pooled = whole(v, v.image(x) if axes == (2, 3) else x, "image")
    return v.add(_kept(v, x, axes), [pooled])


def log_sum_exp(v: OnnxValues) -> str:
    """ReduceLogSumExp: the largest element is taken off first, and put back."""
    x = v.real()
    axes = _reduced_axes(v, len(v.shape(x)))
    if axes is None:
        return x
    most = v.reduce(ReduceKind.MAXIMUM, x, axes, True)
    powers = v.unary(UnaryKind.EXPONENTIAL, v.minus(x, most, "centred"), "powers")
    logarithm = v.unary(UnaryKind.LOGARITHM, v.reduce(ReduceKind.SUM, powers, axes, True), "log")
    result = v.plus(logarithm, most, "whole")
    return v.add(_kept(v, x, axes), [result])


def arg_extreme(largest: bool) -> Importer:
    """The importer of ArgMax or ArgMin."""

    def build(v: OnnxValues) -> str:
        x = v.value(0)
        axis = v.axis_of(x, 0)
        places = v.add(ArgExtreme(axis, largest, bool(v.attribute("select_last_index", 0))), [x], "places")
        return v.add(_kept(v, x, (axis,)), [places])

    return build


def softmax_of(v: OnnxValues, x: str, opset: int, suffix: str = "", logarithm: bool = False) -> str:
    """The softmax of a float value over the operator's axis; before opset 13 over all axes from it on."""
    axis = v.axis_of(x, -1 if opset >= 13 else 1)
    axes = (axis,) if opset >= 13 else range(axis, len(v.shape(x)))
    return v.softmax(x, axes, suffix, logarithm)


def batch_normalization(v: OnnxValues) -> str:
    """BatchNormalization at inference: a 1x1 depthwise convolution with constant scale and offset."""
    v.only("training_mode", 0)
    v.only("spatial", 1)
    v.attribute("momentum", 0.9)  # used in training only
    v.one_result("the running mean and variance are results of training, which is not supported")
    epsilon = float(v.attribute("epsilon", 1e-5))
    names = ("scale", "offset", "mean", "variance")
    scale, offset, mean, variance = (
        v.constant_operand(position, name).array.astype(np.float64) for position, name in enumerate(names, 1)
    )
    if scale.ndim != 1 or not scale.shape == offset.shape == mean.shape == variance.shape:
        raise v.refuse("scale, offset, mean and variance must be vectors of one length", AGAIN)
    factor, x = scale / np.sqrt(variance + epsilon), v.value(0)
    offset = (offset - mean * factor).astype(np.float32)
    factor = factor.astype(np.float32)
    if len(v.shape(x)) != 4:
        return _affine(v, x, v.constant(factor, "factor"), v.constant(offset, "offset"))
    operands = [v.image(x), v.constant(factor.reshape(1, 1, 1, -1), "factor"), v.constant(offset, "offset")]
    return v.of_image(v.add(DepthwiseConv2d(), operands, "nhwc"))


def _affine(v: OnnxValues, x: str, factor: str, offset: str) -> str:
    """x * factor + offset with one element of each per channel, axis 1."""
    shape = (v.type_of(factor).elements,) + (1,) * (len(v.shape(x)) - 2)
    factor, offset = (v.add(Reshape(shape), [name], name=f"{name}_column") for name in (factor, offset))
    return v.plus(v.times(x, factor, "scaled"), offset)


def _over_rows(v: OnnxValues, x: str, rows: Shape, operator: Normalise) -> str:
    """A float value normalised over the last axis of `rows`, in its own shape again."""
    flat = v.add(operator, [v.add(Reshape(rows), [x], "rows")], "normalised")
    return v.add(Reshape(v.shape(x)), [flat], "shaped")


def _moments(v: OnnxValues, x: str, rows: Shape, kept: Shape) -> None:
    """The other results of LayerNormalization: each row's mean, and 1 / its deviation."""
    flat = v.add(Reshape(rows), [x], "rows")
    mean = v.add(Reduce(ReduceKind.MEAN, (1,)), [flat], "mean")
    found = [mean]
    if len(v.op.outputs) > 2 and v.op.outputs[2]:
        squares = v.square(v.minus(flat, mean, "centred"), "squares")
        spread = v.add(Reduce(ReduceKind.MEAN, (1,)), [squares], "variance")
        raised = v.plus(spread, v.number(float(v.attribute("epsilon", 1e-5))), "raised")
        root = v.unary(UnaryKind.SQUARE_ROOT, raised, "deviation")
        found.append(v.unary(UnaryKind.RECIPROCAL, root, "inverse"))
    for name, value in zip(v.op.outputs[1:], found, strict=False):
        if name:
            v.values[name] = v.add(Reshape(kept), [value], name=name)


def layer_normalisation(centred: bool) -> Importer:
    """The importer of LayerNormalization, or of RMSNormalization, which takes no mean off."""

    def build(v: OnnxValues) -> str:
        v.only("stash_type", 1)
        x = v.real()
        shape, axis = v.shape(x), v.axis_of(x, -1)
        rows = (prod(shape[:axis]), prod(shape[axis:]))
        result = _over_rows(v, x, rows, Normalise(float(v.attribute("epsilon", 1e-5)), centred))
        if centred and any(v.op.outputs[1:]):
            _moments(v, x, rows, (*shape[:axis], *(1,) * (len(shape) - axis)))
        scaled = v.times(result, v.real(1), "scaled")
        return v.plus(scaled, v.real(2), "offset") if v.has(2) else scaled

    return build


def instance_normalisation(v: OnnxValues) -> str:
    """InstanceNormalization: every channel of every image by itself."""
    x = v.real()
    shape, operator = v.shape(x), Normalise(float(v.attribute("epsilon", 1e-5)))
    result = _over_rows(v, x, (shape[0] * shape[1], prod(shape[2:])), operator)
    return _affine(v, result, v.real(1), v.real(2))


def group_normalisation(v: OnnxValues) -> str:
    """GroupNormalization with a scale and an offset per channel (opset 21)."""
    v.only("stash_type", 1)
    x = v.real()
    shape, groups = v.shape(x), int(v.attribute("num_groups", 1))
    if groups < 1 or shape[1] % groups:
        raise v.refuse(f"{groups} groups do not divide {shape[1]} channels", AGAIN)
    scale, offset = v.real(1), v.real(2)
    if v.shape(scale) != (shape[1],):
        raise v.refuse(f"the scale is {v.type_of(scale)}, expected one element for each of {shape[1]} channels", AGAIN)
    operator = Normalise(float(v.attribute("epsilon", 1e-5)))
    return _affine(v, _over_rows(v, x, (shape[0] * groups, prod(shape[1:]) // groups), operator), scale, offset)
