"""Keras's convolutions, pools, normalisations, and layers that move or join elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import numpy as np

from dovetail.ir.operators.activation import UnaryKind
from dovetail.ir.operators.base import Padding2d, SlidingWindow
from dovetail.ir.operators.elementwise import BinaryKind
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.operators.movement import Gather
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Normalise, Reduce, ReduceKind
from dovetail.ir.types import Array, DType, Shape
from dovetail.read.geometry import Pair, ResizeAxis
from dovetail.read.keras.layer import KerasLayer, listed
from dovetail.read.keras.operations import activated
from dovetail.read.keras.values import Importer, KerasValues
from dovetail.read.values import Value, words

EPSILON = 1e-12
"""Smallest length UnitNormalization divides by."""


def dense(v: KerasValues) -> Value:
    """Dense: over the last axis."""
    x, units = v.one(), v.layer.whole("units")
    v.refuse_if(v.layer.get("lora_rank") is not None, "LoRA weights are not supported", "merge them, and save again")
    kernel = v.weight("kernel", [x.shape[-1], units])
    return activated(v, v.dense(x, v.constant(kernel.T, "kernel"), *v.bias(units), suffix="product"))


def _ohwi(kernel: Array) -> Array:
    """A kernel [(KH,) KW, I, O] as OHWI."""
    return (kernel[None] if kernel.ndim == 3 else kernel).transpose(3, 0, 1, 2)


def _window(v: KerasValues) -> SlidingWindow:
    return SlidingWindow(v.pair("kernel_size"), v.pair("strides"), v.pair("dilation_rate"))


Convolution = type[Conv2d] | type[DepthwiseConv2d]


def _convolved(v: KerasValues, kind: Convolution, image: Value, window: SlidingWindow, *constants: Value) -> Value:
    """The convolution in the layer's own order, activated."""
    operands = [v.bordered(image, window.padding), *constants]
    return activated(v, v.restored(v.add(kind(window.stride, window.dilation), operands, "sum")))


def convolution(v: KerasValues) -> Value:
    """Conv1D, Conv2D; as many groups as channels make it depthwise."""
    image, filters, groups = v.image(), v.layer.whole("filters"), v.layer.whole("groups", 1)
    channels = image.shape[3]
    odd = channels % groups or filters % groups
    v.wrong_if(odd, f"{groups} groups do not divide {channels} channels and {filters} filters")
    window = _window(v)
    kernel = v.weight("kernel", [*window.kernel[2 - v.image_axes :], channels // groups, filters])
    window, depthwise = v.padded(window, image, v.image_axes == 1), groups == channels > 1
    weights = v.constant(kernel.reshape(1, *window.kernel, filters) if depthwise else _ohwi(kernel), "kernel")
    return _convolved(v, DepthwiseConv2d if depthwise else Conv2d, image, window, weights, *v.bias(filters))


def _depthwise(v: KerasValues, image: Value, name: str) -> tuple[SlidingWindow, Value]:
    """The window of a depthwise convolution, and its weights."""
    channels, multiplier, window = image.shape[3], v.layer.whole("depth_multiplier", 1), _window(v)
    kernel = v.weight(name, [*window.kernel[2 - v.image_axes :], channels, multiplier])
    weights = kernel.reshape(1, *window.kernel, channels * multiplier)
    return v.padded(window, image, v.image_axes == 1), v.constant(weights, name)


def depthwise(v: KerasValues) -> Value:
    """DepthwiseConv1D, DepthwiseConv2D."""
    image = v.image()
    v.layer.ignore("groups", "filters")  # follow from the channels
    window, weights = _depthwise(v, image, "kernel")
    return _convolved(v, DepthwiseConv2d, image, window, weights, *v.bias(weights.shape[3]))


def separable(v: KerasValues) -> Value:
    """SeparableConv1D, SeparableConv2D: depthwise, then 1x1."""
    image, filters = v.image(), v.layer.whole("filters")
    v.layer.ignore("groups")
    window, weights = _depthwise(v, image, "depthwise_kernel")
    operator = DepthwiseConv2d(window.stride, window.dilation)
    deep = v.add(operator, [v.bordered(image, window.padding), weights], "depthwise")
    kernel = v.weight("pointwise_kernel", [*(1,) * v.image_axes, deep.shape[3], filters])
    pointwise = v.constant(_ohwi(kernel), "pointwise_kernel")
    return _convolved(v, Conv2d, deep, SlidingWindow((1, 1)), pointwise, *v.bias(filters))


def _transposed_border(layer: KerasLayer, span: int, stride: int, extra: int | None) -> Pair:
    """Zeros before and after a stretched axis, so that a window of `span` gives the transposed convolution
    (keras/src/backend/common/backend_utils.py)."""
    if layer.choice("padding", "valid", "valid", "same") == "valid":
        return span - 1, span - 1 + (max(span, stride) - span if extra is None else extra)
    total = stride + span - 2 if extra is None else span + span % 2 - 2 + extra
    lead = min(total // 2 + total % 2, span - 1)
    return lead, total - lead


def transposed(v: KerasValues) -> Value:
    """Conv1DTranspose, Conv2DTranspose: a convolution of the image with zeros between its elements. Unlike one that
    gives all phases of the stride, it stays one layer that a normalisation behind it is folded into."""
    layer, rank, image = v.layer, v.image_axes, v.image()
    filters, window = layer.whole("filters"), _window(v)
    kernel = v.weight("kernel", [*window.kernel[2 - rank :], filters, image.shape[3]])
    extra: list[int | None] = [None, None]
    if layer.get("output_padding") is not None:
        extra[2 - rank :] = layer.wholes("output_padding", rank, low=0)
    top, left = (_transposed_border(layer, *side) for side in zip(window.span, window.stride, extra, strict=True))
    stretched = v.stretched(image, window.stride)
    turned = _ohwi(kernel)[:, ::-1, ::-1].transpose(3, 1, 2, 0)
    window = SlidingWindow(window.kernel, dilation=window.dilation, padding=((0, 0) if rank == 1 else top, left))
    return _convolved(v, Conv2d, stretched, window, v.constant(turned, "kernel"), *v.bias(filters))


Pool = type[AveragePool2d] | type[MaxPool2d]


def pool(v: KerasValues, kind: Pool) -> Value:
    """Pools over windows; border elements of padding "same" take no part, as in Keras."""
    image, kernel = v.image(), v.pair("pool_size", 2)
    stride = v.pair("strides") if v.layer.get("strides") is not None else kernel
    window = v.padded(SlidingWindow(kernel, stride), image)
    return v.restored(v.add(kind(kernel, stride, window.padding), [image], "pool"))


def whole_pool(v: KerasValues, kind: Pool) -> Value:
    """Pools over everything; keepdims leaves the image axes with size 1."""
    image = v.image()
    batch, height, width, channels = image.shape
    pooled = v.add(kind((height, width), (height, width)), [image], "pool")
    return v.restored(pooled) if v.layer.flag("keepdims") else v.shaped(pooled, (batch, channels), "row")


def merge(v: KerasValues, kind: BinaryKind, mean: bool = False) -> Value:
    """A function of several values, taken from the left; `mean` divides by their number. They broadcast as in numpy,
    but axes of size 1 come behind the batch where one has fewer."""
    v.check_named()
    values = v.call.all(Value)
    v.wrong_if(not values or (kind is BinaryKind.SUBTRACT and len(values) != 2), f"is called with {len(values)} values")
    values = [*map(v.real, values)]
    rank = max(value.rank for value in values)
    wide = [(*value.shape[:1], *(1,) * (rank - value.rank), *value.shape[1:]) for value in values]
    aligned = [v.shaped(value, shape, "aligned") for value, shape in zip(values, wide, strict=True)]
    return v.folded(kind, aligned, mean, "merged")


def concatenate(v: KerasValues) -> Value:
    """Concatenate."""
    v.check_named()
    values = v.several(real=False)
    (axis,) = v.layer.axes("axis", values[0].rank)
    return v.concat(values, axis, "joined")


def embedding(v: KerasValues) -> Value:
    """Embedding: rows of a table by integers."""
    x = v.one(real=False)
    v.refuse_if(v.layer.flag("mask_zero"), "mask_zero is set: masks are not supported", "make the model without a mask")
    if x.dtype not in (DType.INT32, DType.INT64):
        raise v.refuse(f"looks up {x.type}", "give the model an Input of dtype='int32'")
    table = v.weight("embeddings", [v.layer.get("input_dim"), v.layer.whole("output_dim")])
    return v.add(Gather(0), [v.constant(table, "embeddings"), x], "rows")


def identity(v: KerasValues) -> Value:
    """Layers that do nothing at inference, whatever their settings: dropout, noise, augmentation, regularisation."""
    v.layer.ignore(*(key for key in v.layer.config if v.layer.kind.startswith("Random") or key == "data_format"))
    return v.one(real=False)


def flatten(v: KerasValues) -> Value:
    """Flatten; channels_first puts the channels last before."""
    x = v.one(real=False)
    if v.layer.channels_first and x.rank > 2:
        x = v.channels_last(x)
    batch, *sizes = x.shape
    return v.shaped(x, (batch, prod(sizes)), "flat")


def reshape(v: KerasValues) -> Value:
    """Reshape of everything but the batch."""
    x = v.one(real=False)
    wanted, (batch, *sizes) = v.layer.get("target_shape", ()), x.shape
    v.wrong_if(not isinstance(wanted, list | tuple), "target_shape is no list")
    return v.shaped(x, (batch, *v.full_shape(wanted, prod(sizes))), "shaped")


def permute(v: KerasValues) -> Value:
    """Permute: axes counted from 1, the batch stays."""
    x = v.one(real=False)
    return v.ordered(x, (0, *v.layer.wholes("dims", x.rank - 1)), "permuted")


def repeat_vector(v: KerasValues) -> Value:
    """RepeatVector: [N, C] to [N, n, C]."""
    x, times = v.one(real=False), v.layer.whole("n")
    v.refuse_if(x.rank != 2, f"repeats vectors, its operand is {x.type}")
    v.check_places(times)
    batch, channels = x.shape
    row = v.shaped(x, (batch, 1, channels), "row")
    return v.pick(row, [range(batch), [0] * times, range(channels)], "repeated")


def _sides(layer: KerasLayer, key: str, rank: int) -> Padding2d:
    """A border: one number, one for each axis, or two for each axis."""
    found = layer.get(key, 1)
    sides = [listed(entry, 2) for entry in (listed(found, 2) if rank == 2 else [found])]
    layer.unfit(len(sides) != rank or any(len(entry) != 2 for entry in sides), key, found, "is no border")
    odd = any(type(size) is not int or not 0 <= size < 1 << 20 for entry in sides for size in entry)
    layer.unfit(odd, key, found, "must be integers of at least 0")
    (top, bottom), (left, right) = sides if rank == 2 else ([0, 0], sides[0])
    return (top, bottom), (left, right)


def bordered(v: KerasValues, key: str, sign: int) -> Value:
    """ZeroPadding and Cropping: a border, which is added or cut."""
    image, ((top, bottom), (left, right)) = v.image(), _sides(v.layer, key, v.image_axes)
    return v.restored(v.bordered(image, ((sign * top, sign * bottom), (sign * left, sign * right))))


def up_sampling(v: KerasValues) -> Value:
    """UpSampling1D, UpSampling2D: elements repeated, or weighted sums of neighbours."""
    image, layer = v.image(), v.layer
    down, right = (1, layer.whole("size", 2)) if v.image_axes == 1 else layer.wholes("size", 2, 2)
    _, height, width, _ = image.shape
    return _resized(v, image, (height * down, width * right), "nearest")


def resizing(v: KerasValues) -> Value:
    """Resizing to a fixed size."""
    image = v.image()
    for key in ("crop_to_aspect_ratio", "pad_to_aspect_ratio", "antialias"):
        v.refuse_if(v.layer.flag(key), f"the setting {key} is not supported")
    v.layer.ignore("fill_mode", "fill_value")  # concern pad_to_aspect_ratio only
    return _resized(v, image, None, "bilinear")


def _resized(v: KerasValues, image: Value, sizes: Pair | None, default: str) -> Value:
    """An image of another size, by default what the layer says; pixels are taken at their centres."""
    mode = v.layer.choice("interpolation", default, "nearest", "bilinear")
    sizes = sizes or (v.layer.whole("height"), v.layer.whole("width"))
    batch, height, width, channels = image.shape
    v.check_places(max(sizes))
    pairs = zip((height, width), sizes, strict=True)
    axes = [ResizeAxis(have, want, want / have, "half_pixel") for have, want in pairs]
    if mode == "nearest":
        places = [axis.nearest("round_prefer_ceil") for axis in axes]
        return v.restored(v.pick(image, [range(batch), *places, range(channels)], "resized"))
    changed = {number: axis for number, axis in enumerate(axes, 1) if axis.result != axis.size}
    taps = {number: axis.taps(False, 0.0, False, False) for number, axis in changed.items()}
    return v.restored(v.resampled(image, taps, "resized"))


def center_crop(v: KerasValues) -> Value:
    """CenterCrop of an image that is large enough."""
    image, sizes = v.image(), [v.layer.whole("height"), v.layer.whole("width")]
    border = []
    for have, want in zip(image.shape[1:3], sizes, strict=True):
        v.wrong_if(have < want, f"crops {image.type} to {sizes}, which is larger")
        lead = (have - want) // 2
        border.append((-lead, want + lead - have))
    return v.restored(v.bordered(image, (border[0], border[1])))


def rescaling(v: KerasValues) -> Value:
    """Rescaling: x * scale + offset, of integers too; each one number or one for each channel."""
    x = v.one()
    scale, offset = _vector(v, "scale", 1.0), _vector(v, "offset", 0.0)
    if (scale != 1.0).any():
        x = v.times(x, v.constant(scale, "scale"), "scaled")
    return v.plus(x, v.constant(offset, "offset"), "moved") if (offset != 0.0).any() else x


def _vector(v: KerasValues, key: str, default: float) -> Array:
    found = v.layer.get(key, default)
    if isinstance(found, dict):
        found = found.get("value")
    array = v.numbers(found)
    v.layer.unfit(array.ndim > 1, key, found, "must be one number, or one for each channel")
    return array


def _one_axis(v: KerasValues, x: Value) -> int:
    """The one axis of the channels."""
    axes = v.layer.axes("axis", x.rank)
    v.wrong_if(len(axes) != 1 or axes[0] == 0, f"the axis must be one, and not that of the batch, got {list(axes)}")
    return axes[0]


def batch_normalization(v: KerasValues) -> Value:
    """BatchNormalization at inference: a 1x1 depthwise convolution with constant scale and offset."""
    x = v.one()
    axis = _one_axis(v, x)
    channels = x.shape[axis]
    gamma, beta = (v.optional(name, [channels]) for name in ("gamma", "beta"))
    mean, variance = (v.weight(name, [channels]) for name in ("moving_mean", "moving_variance"))
    v.layer.ignore("scale", "center")
    epsilon = v.layer.number("epsilon", 1e-3)
    v.wrong_if(not (variance + epsilon > 0).all(), "the moving_variance holds negative numbers")
    factor = (1.0 if gamma is None else gamma.astype(np.float64)) / np.sqrt(variance.astype(np.float64) + epsilon)
    offset = np.asarray((0.0 if beta is None else beta) - mean * factor, np.float32)
    order = [*(place for place in range(x.rank) if place != axis), axis]
    last = v.ordered(x, order, "last")
    batch, *sizes, _ = shape = last.shape
    image = last if len(sizes) == 2 else v.shaped(last, (batch, 1, prod(sizes), channels), "image")
    weights = v.constant(factor.astype(np.float32).reshape(1, 1, 1, channels), "factor")
    operands = [image, weights, v.constant(offset, "offset")]
    result = v.shaped(v.add(DepthwiseConv2d(), operands, "normalised"), shape, "shaped")
    return v.ordered(result, [order.index(place) for place in range(len(order))], "restored")


def _scaled(v: KerasValues, x: Value, axes: Sequence[int], gamma: str = "gamma") -> Value:
    """x * gamma + beta along some axes, either of which may be missing."""
    shape = x.shape
    v.layer.ignore("scale", "center")
    for name, kind in ((gamma, BinaryKind.MULTIPLY), ("beta", BinaryKind.ADD)):
        array = v.optional(name, [shape[place] for place in axes])
        if array is not None:
            x = v.binary(kind, x, v.constant(_along(shape, axes, array), name), name)
    return x


def _along(shape: Sequence[int], axes: Sequence[int], array: Array) -> Array:
    """A weight with an axis for each of `axes`, to be broadcast to `shape`."""
    return array.reshape([size if place in axes else 1 for place, size in enumerate(shape)])


def layer_normalization(v: KerasValues) -> Value:
    """LayerNormalization, RMSNormalization."""
    x, centred = v.one(), v.layer.kind == "LayerNormalization"
    axes = v.layer.axes("axis", x.rank)
    v.refuse_if(v.layer.flag("rms_scaling"), "rms_scaling is not supported", "use RMSNormalization")
    result = v.normalise(x, axes, Normalise(v.layer.number("epsilon", 1e-3 if centred else 1e-6), centred))
    return _scaled(v, result, axes, "gamma" if centred else "scale")


def group_normalization(v: KerasValues) -> Value:
    """GroupNormalization: over everything of a group of channels."""
    x = v.one()
    shape, axis = x.shape, _one_axis(v, x)
    channels, groups = shape[axis], v.layer.whole("groups", 32, low=-1)
    groups = channels if groups == -1 else groups
    v.wrong_if(groups < 1 or channels % groups, f"{groups} groups do not divide {channels} channels")
    apart = (*shape[:axis], groups, channels // groups, *shape[axis + 1 :])
    inner = [place for place in range(1, len(apart)) if place != axis]
    done = v.normalise(v.shaped(x, apart, "groups"), inner, Normalise(v.layer.number("epsilon", 1e-3)))
    return _scaled(v, v.shaped(done, shape, "joined"), (axis,))


def unit_length(v: KerasValues, x: Value, axes: Shape) -> Value:
    """x divided by its length along some axes, which is at least EPSILON."""
    total = v.add(Reduce(ReduceKind.SUM, axes), [v.square(x, "squares")], "sum")
    length = v.unary(UnaryKind.SQUARE_ROOT, total, "length")
    return v.over(x, v.binary(BinaryKind.MAXIMUM, length, v.number(EPSILON, "floor"), "limited"), "unit")


def unit_normalization(v: KerasValues) -> Value:
    """UnitNormalization."""
    x = v.one()
    return unit_length(v, x, v.layer.axes("axis", x.rank))


def normalization(v: KerasValues) -> Value:
    """Normalization: (x - mean) / deviation, given or learnt from data."""
    x = v.one()
    shape = x.shape
    axes = v.layer.axes("axis", len(shape)) if v.layer.get("axis", -1) is not None else ()
    sizes = [shape[place] for place in axes]
    v.refuse_if(v.layer.flag("invert"), "invert is not supported")
    found = {}
    for name in ("mean", "variance"):
        given = v.layer.get(name)
        array = v.weight(name, sizes) if given is None else v.numbers(given)
        odd = array.size not in (1, prod(sizes)) or (name == "variance" and (array < 0).any())
        v.wrong_if(odd, f"the {name} {list(array.shape)} does not fit {x.type}")
        found[name] = array if array.size == 1 else _along(shape, axes, array)
    deviation = np.asarray(np.maximum(np.sqrt(found["variance"]), 1e-7), np.float32)
    centred = v.minus(x, v.constant(found["mean"], "mean"), "centred")
    return v.over(centred, v.constant(deviation, "deviation"), "normalised")


def _of_dimensions(stem: str, build: Importer) -> dict[str, Importer]:
    """A layer of one and of two image axes."""
    return {stem.format(rank): build for rank in (1, 2)}


LAYERS: Mapping[str, Importer] = {
    **dict.fromkeys(
        words(
            "ActivityRegularization AlphaDropout Dropout GaussianDropout GaussianNoise Identity SpatialDropout1D "
            "SpatialDropout2D RandomBrightness RandomContrast RandomFlip RandomRotation RandomTranslation RandomZoom"
        ),
        identity,
    ),
    **_of_dimensions("AveragePooling{}D", partial(pool, kind=AveragePool2d)),
    **_of_dimensions("Conv{}D", convolution),
    **_of_dimensions("Conv{}DTranspose", transposed),
    **_of_dimensions("Cropping{}D", partial(bordered, key="cropping", sign=-1)),
    **_of_dimensions("DepthwiseConv{}D", depthwise),
    **_of_dimensions("GlobalAveragePooling{}D", partial(whole_pool, kind=AveragePool2d)),
    **_of_dimensions("GlobalMaxPooling{}D", partial(whole_pool, kind=MaxPool2d)),
    **_of_dimensions("MaxPooling{}D", partial(pool, kind=MaxPool2d)),
    **_of_dimensions("SeparableConv{}D", separable),
    **_of_dimensions("UpSampling{}D", up_sampling),
    **_of_dimensions("ZeroPadding{}D", partial(bordered, key="padding", sign=1)),
    **{kind.name.capitalize(): partial(merge, kind=kind) for kind in (BinaryKind.MAXIMUM, BinaryKind.MINIMUM)},
    "Add": partial(merge, kind=BinaryKind.ADD),
    "Average": partial(merge, kind=BinaryKind.ADD, mean=True),
    "BatchNormalization": batch_normalization,
    "CenterCrop": center_crop,
    "Concatenate": concatenate,
    "Dense": dense,
    "Embedding": embedding,
    "Flatten": flatten,
    "GroupNormalization": group_normalization,
    "LayerNormalization": layer_normalization,
    "Multiply": partial(merge, kind=BinaryKind.MULTIPLY),
    "Normalization": normalization,
    "Permute": permute,
    "RMSNormalization": layer_normalization,
    "RepeatVector": repeat_vector,
    "Rescaling": rescaling,
    "Reshape": reshape,
    "Resizing": resizing,
    "Subtract": partial(merge, kind=BinaryKind.SUBTRACT),
    "UnitNormalization": unit_normalization,
}
"""Importers of these layers."""
