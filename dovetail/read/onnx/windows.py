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
from dovetail.ir.operators.movement import Slice
from dovetail.ir.operators.reduction import ArgExtreme, AveragePool2d, MaxPool2d, Normalise, Reduce, ReduceKind
from dovetail.ir.types import DType, Shape
from dovetail.notes import Kind, Note
from dovetail.read.geometry import Pair
from dovetail.read.onnx.values import QONNX_DOMAINS, UNPADDED, Importer, OnnxValues
from dovetail.read.values import Value, kept_shape


def _ceiling(size: int, span: int, stride: int, padding: Pair) -> Pair:
    """The padding that gives a last, partial window its elements (ceil_mode); one that starts in it is left out."""
    windows = -(-(size + sum(padding) - span) // stride) + 1
    if (windows - 1) * stride >= size + padding[0]:
        windows -= 1
    return padding[0], max((windows - 1) * stride + span - size - padding[0], padding[1])


def _windows(v: OnnxValues, image: Value) -> tuple[SlidingWindow, Padding2d]:
    """The windows of a pool over an NHWC image, and their padding without what ceil_mode adds to it."""
    sizes = image.shape[1:3]
    window = v.window(sizes)
    if not v.attribute("ceil_mode", False):
        return window, window.padding
    rows, columns = map(_ceiling, sizes, window.span, window.stride, window.padding)
    return replace(window, padding=(rows, columns)), window.padding


def _taps(v: OnnxValues, image: Value, window: SlidingWindow, filler: float) -> list[Value]:
    """For each tap of the window the elements it takes, over all windows: slices of the image with its border."""
    kind = image.type
    image = v.bordered(image, window.padding, filler, "bordered")
    sizes = zip(kind.shape[1:3], window.padding, window.span, window.stride, strict=True)
    rows, columns = ((size + sum(sides) - span) // step * step + 1 for size, sides, span, step in sizes)
    taps = []
    for row, column in product(range(window.kernel[0]), range(window.kernel[1])):
        top, left = row * window.dilation[0], column * window.dilation[1]
        stop = (kind.shape[0], top + rows, left + columns, kind.shape[3])
        taps.append(v.add(Slice((0, top, left, 0), stop, (1, *window.stride, 1)), [image], "tap"))
    return taps


def _largest(v: OnnxValues, image: Value) -> Value:
    """The maximum pool of an NHWC value."""
    dtype, (window, _) = image.dtype, _windows(v, image)
    if window.dilation == (1, 1):
        return v.add(MaxPool2d(window.kernel, window.stride, window.padding), [image], "nhwc")
    return v.folded(BinaryKind.MAXIMUM, _taps(v, image, window, dtype.low if dtype.is_integer else -inf), False, "nhwc")


def average(v: OnnxValues, image: Value) -> Value:
    """The average pool of an NHWC float value."""
    window, padding = _windows(v, image)
    with_border = v.attribute("count_include_pad", False) and padding != UNPADDED
    if window.dilation == (1, 1) and (not with_border or window.padding == padding):
        if with_border:
            image, window = v.bordered(image, padding), replace(window, padding=UNPADDED)
        return v.add(AveragePool2d(window.kernel, window.stride, window.padding), [image], "nhwc")
    # A sum of taps, divided by how many of them count.
    total = v.folded(BinaryKind.ADD, _taps(v, image, window, 0.0), False, "sum")
    counted = np.ones((1, *image.shape[1:3], 1), np.float32)
    if with_border:  # all but what ceil_mode adds
        counted = np.pad(counted, ((0, 0), *padding, (0, 0)), constant_values=1)
        bottom, right = (whole[1] - own[1] for whole, own in zip(window.padding, padding, strict=True))
        window = replace(window, padding=((0, bottom), (0, right)))
    return v.over(total, v.constant(window.view(counted).sum(axis=(4, 5)), "counts"), "nhwc")


def pooled(v: OnnxValues, pool: Callable[[OnnxValues, Value], Value]) -> Value:
    """A pool of an NHWC image as the operator's result, over one, two or three axes; over three it is two pools, one
    behind the other: of rows and columns, then along the first axis."""
    x = v.x
    shape = x.shape
    if len(shape) == 3:
        result = pool(v.over_axes((None, 0)), v.reshape(x, (shape[0] * shape[1], 1, shape[2], 1), "image"))
        return v.reshape(result, (*shape[:2], result.shape[2]))
    if len(shape) == 5:
        flat = pool(v.over_axes((1, 2)), v.reshape(x, (prod(shape[:3]), *shape[3:], 1), "planes"))
        height, width = flat.shape[1:3]
        deep = v.reshape(flat, (shape[0] * shape[1], shape[2], height * width, 1), "deep")
        result = pool(v.over_axes((0, None)), deep)
        return v.reshape(result, (*shape[:2], result.shape[1], height, width))
    return v.of_image(pool(v, v.image(x)))


def max_pool(v: OnnxValues) -> Value:
    """MaxPool, of floats or of the integers themselves."""
    v.one_result("the result with indices is not supported")
    v.given("storage_order")  # concerns the indices only
    return pooled(v, _largest)


def whole(v: OnnxValues, image: Value, suffix: str) -> Value:
    """The mean over all rows and columns of an NHWC value."""
    _, height, width, _ = image.shape
    return v.add(AveragePool2d((height, width), (height, width)), [image], suffix)


def global_pool(v: OnnxValues, kind: ReduceKind) -> Value:
    """GlobalAveragePool and GlobalMaxPool: over everything behind the channels."""
    x = v.x
    rank = x.rank
    if kind is ReduceKind.MEAN and rank == 4:
        return v.of_image(whole(v, v.image(x), "nhwc"))
    v.wrong_if(rank < 3 or x.dtype is DType.BOOL, f"pools {x.type}, which has no image axes")
    return v.add(Reduce(kind, tuple(range(2, rank))), [x])


def _reduced_axes(v: OnnxValues, x: Value) -> Shape | None:
    """The axes a reduction of x names, in rising order; all where it names none, or None if it then does nothing."""
    listed, noop = v.integers(1, "axes", (), "axes"), v.attribute("noop_with_empty_axes", False)
    return None if noop and not listed else v.axes(listed or range(x.rank), x.rank)


def _kept(v: OnnxValues, reduced: Value, x: Value, axes: Shape) -> Value:
    """A reduction of x over `axes` under the shape that the attribute keepdims says."""
    return v.reshape(reduced, kept_shape(x.shape, axes, v.attribute("keepdims", True)))


def reduction(kind: ReduceKind, before: UnaryKind | None = None, after: UnaryKind | None = None) -> Importer:
    """The importer of a reduction of floats, between two functions; without these, of integers' extremes too."""

    def build(v: OnnxValues) -> Value:
        x = v.x if before is not UnaryKind.SQUARE else v.real()
        axes, keep = _reduced_axes(v, x), v.attribute("keepdims", True)
        x = x if before is None else v.unary(before, x, "before")
        x = x if axes is None else v.reduce(kind, x, axes, keep)
        return x if after is None else v.unary(after, x, "after")

    return build


def reduce_mean(v: OnnxValues) -> Value | None:
    """ReduceMean; over the two image axes it is a pool: [2, 3], or [1, 2] in a model that is NHWC itself."""
    x = v.x
    axes = _reduced_axes(v, x)
    if x.rank != 4 or axes not in ((1, 2), (2, 3)):
        return reduction(ReduceKind.MEAN)(v)
    return _kept(v, whole(v, v.image(x) if axes == (2, 3) else x, "image"), x, axes)


def log_sum_exp(v: OnnxValues) -> Value:
    """ReduceLogSumExp: the largest element is taken off first, and put back."""
    x = v.real()
    axes = _reduced_axes(v, x)
    v.given("keepdims")  # without axes there is none to keep
    if axes is None:
        return x
    most = v.reduce(ReduceKind.MAXIMUM, x, axes, True)
    powers = v.unary(UnaryKind.EXPONENTIAL, v.minus(x, most, "centred"), "powers")
    logarithm = v.unary(UnaryKind.LOGARITHM, v.reduce(ReduceKind.SUM, powers, axes, True), "log")
    return _kept(v, v.plus(logarithm, most, "whole"), x, axes)


def arg_extreme(v: OnnxValues, largest: bool) -> Value:
    """ArgMax or ArgMin."""
    x = v.x
    axis = v.axis_of(x, 0)
    places = v.add(ArgExtreme(axis, largest, v.attribute("select_last_index", False)), [x], "places")
    return _kept(v, places, x, (axis,))


def softmax_of(v: OnnxValues, x: Value, opset: int, suffix: str = "", logarithm: bool = False) -> Value:
    """The softmax of a float value over the operator's axis; before opset 13 over all axes from it on."""
    axis = v.axis_of(x, -1 if opset >= 13 else 1)
    return v.softmax(x, (axis,) if opset >= 13 else range(axis, x.rank), suffix, logarithm)


def batch_normalization(v: OnnxValues) -> Value:
    """BatchNormalization at inference: a 1x1 depthwise convolution with constant scale and offset."""
    v.only("training_mode", 0)
    v.only("spatial", 1)
    v.given("momentum")  # used in training only
    v.one_result("the running mean and variance are results of training, which is not supported")
    names = ("scale", "offset", "mean", "variance")
    scale, offset, mean, variance = (v.array(place, name).astype(np.float64) for place, name in enumerate(names, 1))
    odd = scale.ndim != 1 or not scale.shape == offset.shape == mean.shape == variance.shape
    v.wrong_if(odd, "scale, offset, mean and variance must be vectors of one length")
    if any(node.domain in QONNX_DOMAINS for node in v.file.nodes):
        what = "goes into the layer before it, with an offset in whole sums: results within 1/64 of a step of a half"
        v.tell(Note(Kind.APPROXIMATE, f"{v.where}: {what} may be rounded the other way than by qonnx"))
    factor, x = scale / np.sqrt(variance + v.attribute("epsilon", 1e-5)), v.x
    offset = (offset - mean * factor).astype(np.float32)
    factor = factor.astype(np.float32)
    if x.rank != 4:
        return _affine(v, x, v.constant(factor, "factor"), v.constant(offset, "offset"))
    operands = [v.image(x), v.constant(factor.reshape(1, 1, 1, -1), "factor"), v.constant(offset, "offset")]
    return v.of_image(v.add(DepthwiseConv2d(), operands, "nhwc"))


def _affine(v: OnnxValues, x: Value, factor: Value, offset: Value) -> Value:
    """x * factor + offset with one element of each per channel, axis 1."""
    shape = (factor.elements,) + (1,) * (x.rank - 2)
    factor, offset = (v.reshape(name, shape, name=f"{name}_column") for name in (factor, offset))
    return v.plus(v.times(x, factor, "scaled"), offset)


def _over_rows(v: OnnxValues, x: Value, rows: Shape, centred: bool = True) -> Value:
    """A float value normalised over the last axis of `rows`, in its own shape again."""
    operator = Normalise(v.attribute("epsilon", 1e-5), centred)
    return v.reshape(v.add(operator, [v.reshape(x, rows, "rows")], "normalised"), x.shape, "shaped")


def standardised(v: OnnxValues) -> Value:
    """MeanVarianceNormalization."""
    x = v.real()
    return v.normalise(x, v.axes(v.attribute("axes", (0, 2, 3)), x.rank), Normalise(1e-9))


def unit_rows(v: OnnxValues) -> Value:
    """LpNormalization: rows of length 1, by the root of the squares or the sum of the sizes."""
    x, axis = v.real(), (v.axis_of(v.real(), -1),)
    if v.attribute("p", 2) == 2:
        return v.normalise(x, axis, Normalise(1e-30, centred=False, summed=True))
    v.only("p", 1)
    length = v.reduce(ReduceKind.SUM, v.unary(UnaryKind.ABSOLUTE, x, "sizes"), axis, keep=True)
    return v.over(x, v.clamp(length, 1e-30, inf, "length"))


def _moments(v: OnnxValues, x: Value, rows: Shape, kept: Shape) -> None:
    """The other results of LayerNormalization: each row's mean, and 1 / its deviation."""
    flat = v.reshape(x, rows, "rows")
    mean = v.add(Reduce(ReduceKind.MEAN, (1,)), [flat], "mean")
    found = [mean]
    if any(v.op.outputs[2:]):
        spread = v.add(Reduce(ReduceKind.MEAN, (1,)), [v.square(v.minus(flat, mean, "centred"), "squares")], "variance")
        raised = v.plus(spread, v.number(v.attribute("epsilon", 1e-5)), "raised")
        found.append(v.unary(UnaryKind.RECIPROCAL, v.unary(UnaryKind.SQUARE_ROOT, raised, "deviation"), "inverse"))
    v.bind_further(found, kept)


def layer_normalisation(v: OnnxValues, centred: bool) -> Value:
    """LayerNormalization, or RMSNormalization, which takes no mean off."""
    v.only("stash_type", 1)
    x = v.real()
    shape, axis = x.shape, v.axis_of(x, -1)
    rows = (prod(shape[:axis]), prod(shape[axis:]))
    result = _over_rows(v, x, rows, centred)
    if centred and any(v.op.outputs[1:]):
        _moments(v, x, rows, (*shape[:axis], *(1,) * (len(shape) - axis)))
    scaled = v.times(result, v.real(1), "scaled")
    return v.plus(scaled, v.real(2), "offset") if v.has(2) else scaled


def instance_normalisation(v: OnnxValues) -> Value:
    """InstanceNormalization: every channel of every image by itself."""
    x = v.real()
    shape = x.shape
    return _affine(v, _over_rows(v, x, (shape[0] * shape[1], prod(shape[2:]))), v.real(1), v.real(2))


def group_normalisation(v: OnnxValues) -> Value:
    """GroupNormalization with a scale and an offset per channel (opset 21)."""
    v.only("stash_type", 1)
    x = v.real()
    shape, groups = x.shape, v.attribute("num_groups", 1)
    v.wrong_if(groups < 1 or shape[1] % groups, f"{groups} groups do not divide {shape[1]} channels")
    scale, offset = v.real(1), v.real(2)
    what = f"the scale is {scale.type}, expected one element for each of {shape[1]} channels"
    v.wrong_if(scale.shape != (shape[1],), what)
    return _affine(v, _over_rows(v, x, (shape[0] * groups, prod(shape[1:]) // groups)), scale, offset)


def skip_normalisation(v: OnnxValues, centred: bool) -> Value:
    """SkipLayerNormalization and SkipSimplifiedLayerNormalization: of a sum, which may be a result too."""
    v.refuse_if(any(v.op.outputs[1:3]), "gives means and deviations, which is not supported")
    total, bias = v.plus(v.real(0), v.real(1), "total"), 4 if centred else 3
    total = v.plus(total, v.real(bias), "biased") if v.has(bias) else total
    v.values |= {name: total for name in v.op.outputs[3:4] if name}
    rows = v.normalise(total, (total.rank - 1,), Normalise(v.attribute("epsilon", 1e-12), centred))
    scaled = v.times(rows, v.real(2), "scaled")
    return v.plus(scaled, v.real(3), "offset") if centred and v.has(3) else scaled
