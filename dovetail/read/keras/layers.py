"""Keras's convolutions, pools, normalisations, and layers that move or join elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from dovetail.ir.operators.activation import UnaryKind
from dovetail.ir.operators.base import Operator, Padding2d
from dovetail.ir.operators.elementwise import BinaryKind
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Gather, Resample
from dovetail.ir.operators.reduction import Normalise, Reduce, ReduceKind
from dovetail.ir.types import Array, DType, Shape
from dovetail.read.geometry import Pair, ResizeAxis, same_border, spans
from dovetail.read.keras.layer import AGAIN, SMALLER, KerasLayer
from dovetail.read.keras.operations import activated
from dovetail.read.keras.values import Importer, KerasValues
from dovetail.read.values import MAX_PLACES

EPSILON = 1e-12
"""Smallest length UnitNormalization divides by."""


def _pair(layer: KerasLayer, key: str, rank: int, default: int = 1) -> Pair:
    """A setting of one positive number per image axis, as rows and columns."""
    found = layer.wholes(key, rank, default, low=1)
    return (1, found[0]) if rank == 1 else (found[0], found[1])


def _padding(layer: KerasLayer, sizes: Shape, span: Shape, stride: Shape, causal: bool = False) -> Padding2d:
    """The border that the setting `padding` adds around rows and columns `sizes`."""
    mode = layer.choice("padding", "valid", ("valid", "same", "causal") if causal else ("valid", "same"))
    if mode == "valid":
        return (0, 0), (0, 0)
    if mode == "causal":
        return (0, 0), (span[1] - 1, 0)
    rows, columns = map(same_border, sizes, span, stride)
    return rows, columns


def _bias(v: KerasValues, channels: int) -> list[str]:
    bias = v.optional("bias", [channels])
    return [] if bias is None else [v.constant(bias, "bias")]


def dense(v: KerasValues) -> str:
    """Dense: over the last axis."""
    x, units = v.one(), v.layer.whole("units", low=1)
    if v.layer.get("lora_rank") is not None:
        raise v.refuse("LoRA weights are not supported", "merge them, and save again")
    kernel = v.weight("kernel", [v.shape(x)[-1], units])
    operands = [x, v.constant(kernel.T, "kernel"), *_bias(v, units)]
    return activated(v, v.add(FullyConnected(), operands, "product"))


def _ohwi(kernel: Array) -> Array:
    """A kernel [(KH,) KW, I, O] as OHWI."""
    return (kernel[None] if kernel.ndim == 3 else kernel).transpose(3, 0, 1, 2)


def _rank(layer: KerasLayer) -> int:
    """How many image axes a layer works on, as its name says."""
    return 1 if "1D" in layer.kind else 2


def _windows(layer: KerasLayer, rank: int) -> list[Pair]:
    """Taps, stride and dilation."""
    return [_pair(layer, key, rank) for key in ("kernel_size", "strides", "dilation_rate")]


def _convolved(v: KerasValues, operator: Operator, operands: list[str], rank: int) -> str:
    """The convolution in the layer's own order, activated."""
    return activated(v, v.restored(v.add(operator, operands, "sum"), rank))


def convolution(v: KerasValues) -> str:
    """Conv1D, Conv2D; as many groups as channels make it depthwise."""
    layer, rank = v.layer, _rank(v.layer)
    image = v.image(rank)
    channels, filters, groups = v.shape(image)[3], layer.whole("filters", low=1), layer.whole("groups", 1, low=1)
    if channels % groups or filters % groups:
        raise v.refuse(f"{groups} groups do not divide {channels} channels and {filters} filters", AGAIN)
    taps, stride, dilation = _windows(layer, rank)
    kernel = v.weight("kernel", [*taps[2 - rank :], channels // groups, filters])
    border = _padding(layer, v.shape(image)[1:3], spans(taps, dilation), stride, causal=rank == 1)
    operator: Operator = Conv2d(stride, dilation)
    weights = _ohwi(kernel)
    if groups == channels > 1:
        operator, weights = DepthwiseConv2d(stride, dilation), kernel.reshape(1, *taps, filters)
    operands = [v.bordered(image, border), v.constant(weights, "kernel"), *_bias(v, filters)]
    return _convolved(v, operator, operands, rank)


def _depthwise(v: KerasValues, image: str, name: str, rank: int) -> tuple[Operator, list[str]]:
    """A depthwise convolution and its operands without bias."""
    channels, multiplier = v.shape(image)[3], v.layer.whole("depth_multiplier", 1, low=1)
    taps, stride, dilation = _windows(v.layer, rank)
    kernel = v.weight(name, [*taps[2 - rank :], channels, multiplier])
    border = _padding(v.layer, v.shape(image)[1:3], spans(taps, dilation), stride, causal=rank == 1)
    weights = kernel.reshape(1, *taps, channels * multiplier)
    return DepthwiseConv2d(stride, dilation), [v.bordered(image, border), v.constant(weights, name)]


def depthwise(v: KerasValues) -> str:
    """DepthwiseConv1D, DepthwiseConv2D."""
    rank = _rank(v.layer)
    image = v.image(rank)
    v.layer.read.update(("groups", "filters"))  # follow from the channels
    operator, operands = _depthwise(v, image, "kernel", rank)
    return _convolved(v, operator, [*operands, *_bias(v, v.shape(operands[1])[3])], rank)


def separable(v: KerasValues) -> str:
    """SeparableConv1D, SeparableConv2D: depthwise, then 1x1."""
    rank = _rank(v.layer)
    image = v.image(rank)
    v.layer.read.add("groups")
    filters = v.layer.whole("filters", low=1)
    operator, operands = _depthwise(v, image, "depthwise_kernel", rank)
    deep = v.add(operator, operands, "depthwise")
    kernel = v.weight("pointwise_kernel", [*(1,) * rank, v.shape(deep)[3], filters])
    weights = [v.constant(_ohwi(kernel), "pointwise_kernel"), *_bias(v, filters)]
    return _convolved(v, Conv2d(), [deep, *weights], rank)


def _transposed_border(layer: KerasLayer, span: int, stride: int, extra: int | None) -> Pair:
    """Zeros before and after a stretched axis, so that a window of `span` gives the transposed convolution
    (keras/src/backend/common/backend_utils.py)."""
    if layer.choice("padding", "valid", ("valid", "same")) == "valid":
        return span - 1, span - 1 + (max(span, stride) - span if extra is None else extra)
    total = stride + span - 2 if extra is None else span + span % 2 - 2 + extra
    lead = min(total // 2 + total % 2, span - 1)
    return lead, total - lead


def transposed(v: KerasValues) -> str:
    """Conv1DTranspose, Conv2DTranspose: a convolution of the image with zeros between its elements. Unlike one that
    gives all phases of the stride, it stays one layer that a normalisation behind it is folded into."""
    layer, rank = v.layer, _rank(v.layer)
    image = v.image(rank)
    (batch, height, width, channels), filters = v.shape(image), layer.whole("filters", low=1)
    taps, stride, dilation = _windows(layer, rank)
    kernel = v.weight("kernel", [*taps[2 - rank :], filters, channels])
    given = layer.get("output_padding")
    extra = [None, None] if given is None else [None] * (2 - rank) + list(layer.wholes("output_padding", rank))
    top, left = (_transposed_border(layer, *sides) for sides in zip(spans(taps, dilation), stride, extra, strict=True))
    v.check_shape((batch, height * stride[0], width * stride[1], channels))
    padded = v.bordered(v.stretched(image, stride), ((0, 0), left) if rank == 1 else (top, left))
    turned = (kernel[None] if rank == 1 else kernel)[::-1, ::-1].transpose(2, 0, 1, 3)
    operands = [padded, v.constant(turned, "kernel"), *_bias(v, filters)]
    return _convolved(v, Conv2d((1, 1), dilation), operands, rank)


Pool = Callable[..., Operator]


def pool(kind: Pool, rank: int) -> Importer:
    """The importer of a pool over windows; border elements of padding "same" take no part, as in Keras."""

    def build(v: KerasValues) -> str:
        image = v.image(rank)
        kernel = _pair(v.layer, "pool_size", rank, 2)
        stride = _pair(v.layer, "strides", rank) if v.layer.get("strides") is not None else kernel
        border = _padding(v.layer, v.shape(image)[1:3], kernel, stride)
        return v.restored(v.add(kind(kernel, stride, border), [image], "pool"), rank)

    return build


def whole_pool(kind: Pool, rank: int) -> Importer:
    """The importer of a pool over everything; keepdims leaves the image axes with size 1."""

    def build(v: KerasValues) -> str:
        image = v.image(rank)
        batch, height, width, channels = v.shape(image)
        pooled = v.add(kind((height, width), (height, width)), [image], "pool")
        keep = v.layer.flag("keepdims", False)
        return v.restored(pooled, rank) if keep else v.reshape(pooled, (batch, channels), "row")

    return build


def merge(kind: BinaryKind, mean: bool = False) -> Importer:
    """The importer of a function of several values, taken from the left; `mean` divides by their number. They broadcast
    as in numpy, but axes of size 1 come behind the batch where one has fewer."""

    def build(v: KerasValues) -> str:
        v.check_named()
        values = v.call.tensors()
        if not values or (kind is BinaryKind.SUBTRACT and len(values) != 2):
            raise v.refuse(f"is called with {len(values)} values", AGAIN)
        values = [v.real(value) for value in values]
        shapes = [v.shape(value) for value in values]
        rank = max(map(len, shapes))
        whole = [(*shape[:1], *(1,) * (rank - len(shape)), *shape[1:]) for shape in shapes]
        aligned = [v.reshape(value, shape, "aligned") for value, shape in zip(values, whole, strict=True)]
        return v.folded(kind, aligned, mean, "merged")

    return build


def concatenate(v: KerasValues) -> str:
    """Concatenate."""
    values = v.call.tensors()
    v.check_named()
    if not values:
        raise v.refuse("is called without values", AGAIN)
    if len({v.type_of(value).dtype for value in values}) > 1:
        values = [v.real(value) for value in values]
    (axis,) = v.layer.axes("axis", len(v.shape(values[0])), -1)
    return v.joined(values, axis)


def embedding(v: KerasValues) -> str:
    """Embedding: rows of a table by integers."""
    x = v.one(real=False)
    if v.layer.flag("mask_zero", False):
        raise v.refuse("mask_zero is set: masks are not supported", "make the model without a mask")
    if v.type_of(x).dtype not in (DType.INT32, DType.INT64):
        raise v.refuse(f"looks up {v.type_of(x)}", "give the model an Input of dtype='int32'")
    table = v.weight("embeddings", [v.layer.get("input_dim"), v.layer.whole("output_dim", low=1)])
    return v.add(Gather(0), [v.constant(table, "embeddings"), x], "rows")


def identity(v: KerasValues) -> str:
    """Layers that do nothing at inference, whatever their settings: dropout, noise, augmentation, regularisation."""
    v.layer.read.update(key for key in v.layer.config if v.layer.kind.startswith("Random") or key == "data_format")
    return v.one(real=False)


def flatten(v: KerasValues) -> str:
    """Flatten; channels_first puts the channels last before."""
    x = v.one(real=False)
    if v.layer.first_channels() and len(v.shape(x)) > 2:
        x = v.channels_last(x)
    shape = v.shape(x)
    return v.reshape(x, (shape[0], prod(shape[1:])), "flat")


def reshape(v: KerasValues) -> str:
    """Reshape of everything but the batch."""
    x = v.one(real=False)
    wanted, (batch, *sizes) = v.layer.get("target_shape", ()), v.shape(x)
    if not isinstance(wanted, list | tuple):
        raise v.refuse("target_shape is no list", AGAIN)
    return v.reshape(x, (batch, *v.layer.full_shape(wanted, prod(sizes))), "shaped")


def permute(v: KerasValues) -> str:
    """Permute: axes counted from 1, the batch stays."""
    x = v.one(real=False)
    return v.transpose(x, (0, *v.layer.wholes("dims", len(v.shape(x)) - 1, low=1)), "permuted")


def repeat_vector(v: KerasValues) -> str:
    """RepeatVector: [N, C] to [N, n, C]."""
    x, count = v.one(real=False), v.layer.whole("n", low=1)
    shape = v.shape(x)
    if len(shape) != 2:
        raise v.refuse(f"repeats vectors, its operand is {v.type_of(x)}")
    v.check_shape((*shape, count))
    row = v.reshape(x, (shape[0], 1, shape[1]), "row")
    return v.pick(row, [range(shape[0]), [0] * min(count, MAX_PLACES + 1), range(shape[1])], "repeated")


def _sides(layer: KerasLayer, key: str, rank: int) -> Padding2d:
    """A border: one number, one for each axis, or two for each axis."""
    found = layer.get(key, 1)
    listed = list(found) if isinstance(found, list | tuple) else [found] * rank
    if rank == 1:
        listed = [listed if isinstance(found, list | tuple) else [found, found]]
    sides = [list(entry) if isinstance(entry, list | tuple) else [entry, entry] for entry in listed]
    if len(sides) != rank or any(len(entry) != 2 for entry in sides):
        raise layer.refuse(f"the setting {key} = {str(found)[:80]} is no border", AGAIN)
    if any(type(size) is not int or not 0 <= size < 1 << 20 for entry in sides for size in entry):
        raise layer.refuse(f"the setting {key} = {str(found)[:80]} must be integers of at least 0", AGAIN)
    (top, bottom), (left, right) = sides if rank == 2 else ([0, 0], sides[0])
    return (top, bottom), (left, right)


def zero_padding(v: KerasValues) -> str:
    """ZeroPadding1D, ZeroPadding2D."""
    rank = _rank(v.layer)
    return v.restored(v.bordered(v.image(rank), _sides(v.layer, "padding", rank)), rank)


def cropping(v: KerasValues) -> str:
    """Cropping1D, Cropping2D."""
    rank = _rank(v.layer)
    image = v.image(rank)
    (top, bottom), (left, right) = _sides(v.layer, "cropping", rank)
    if top + bottom >= v.shape(image)[1] or left + right >= v.shape(image)[2]:
        raise v.refuse(f"crops everything of {v.type_of(image)}", AGAIN)
    return v.restored(v.bordered(image, ((-top, -bottom), (-left, -right))), rank)


def up_sampling(v: KerasValues) -> str:
    """UpSampling1D, UpSampling2D: elements repeated, or weighted sums of neighbours."""
    rank, layer = _rank(v.layer), v.layer
    image = v.image(rank)
    factors = (1, layer.whole("size", 2, low=1)) if rank == 1 else layer.wholes("size", 2, 2, low=1)
    mode = layer.choice("interpolation", "nearest", ("nearest", "bilinear"))
    (_, height, width, _) = v.shape(image)
    return v.restored(_resized(v, image, (height * factors[0], width * factors[1]), mode), rank)


def resizing(v: KerasValues) -> str:
    """Resizing to a fixed size."""
    image = v.image(2)
    for key in ("crop_to_aspect_ratio", "pad_to_aspect_ratio", "antialias"):
        if v.layer.flag(key, False):
            raise v.refuse(f"the setting {key} is not supported")
    v.layer.read.update(("fill_mode", "fill_value"))  # concern pad_to_aspect_ratio only
    mode = v.layer.choice("interpolation", "bilinear", ("nearest", "bilinear"))
    return v.restored(_resized(v, image, (v.layer.whole("height", low=1), v.layer.whole("width", low=1)), mode), 2)


def _resized(v: KerasValues, image: str, sizes: Pair, mode: str) -> str:
    """An NHWC image of another size; pixels are taken at their centres."""
    batch, height, width, channels = v.shape(image)
    if max(sizes) > MAX_PLACES:
        raise v.refuse(f"gives {max(sizes)} rows or columns; the limit is {MAX_PLACES}", SMALLER)
    v.check_shape((batch, *sizes, channels))
    axes = [
        ResizeAxis(have, want, want / have, "half_pixel") for have, want in zip((height, width), sizes, strict=True)
    ]
    if mode == "nearest":
        rows, columns = (axis.nearest("round_prefer_ceil") for axis in axes)
        return v.pick(image, [range(batch), rows, columns, range(channels)], "resized")
    changed = {number: axis for number, axis in enumerate(axes, 1) if axis.result != axis.size}
    operands = [image]
    for axis in changed.values():
        places, weights = axis.taps(False, 0.0, False, False)
        operands += [v.constant(places, "places"), v.constant(weights, "weights")]
    return v.add(Resample(tuple(changed)), operands, "resized") if changed else image


def center_crop(v: KerasValues) -> str:
    """CenterCrop of an image that is large enough."""
    image = v.image(2)
    sizes = v.layer.whole("height", low=1), v.layer.whole("width", low=1)
    border = []
    for have, want in zip(v.shape(image)[1:3], sizes, strict=True):
        if have < want:
            raise v.refuse(f"crops {v.type_of(image)} to {list(sizes)}, which is larger", AGAIN)
        lead = (have - want) // 2
        border.append((-lead, want + lead - have))
    return v.restored(v.bordered(image, (border[0], border[1])), 2)


def rescaling(v: KerasValues) -> str:
    """Rescaling: x * scale + offset, of integers too; each one number or one for each channel."""
    x = v.one()
    scale, offset = (_vector(v, key, default) for key, default in (("scale", 1.0), ("offset", 0.0)))
    for array in (scale, offset):
        if array.ndim and array.shape != (1,) * array.ndim and array.shape[-1] != v.shape(x)[-1]:
            raise v.refuse(f"{list(array.shape)} numbers do not fit {v.type_of(x)}", AGAIN)
    if (scale != 1.0).any():
        x = v.times(x, v.constant(scale, "scale"), "scaled")
    return v.plus(x, v.constant(offset, "offset"), "moved") if (offset != 0.0).any() else x


def _vector(v: KerasValues, key: str, default: float) -> Array:
    found = v.layer.get(key, default)
    if isinstance(found, dict):
        found = found.get("value")
    array = v.numbers(found)
    if array.ndim > 1:
        raise v.refuse(f"the setting {key} = {str(found)[:80]} must be one number, or one for each channel", AGAIN)
    return array


def _one_axis(v: KerasValues, x: str) -> int:
    """The one axis of the channels."""
    axes = v.layer.axes("axis", len(v.shape(x)), -1)
    if len(axes) != 1 or axes[0] == 0:
        raise v.refuse(f"the axis must be one, and not that of the batch, got {list(axes)}", AGAIN)
    return axes[0]


def batch_normalization(v: KerasValues) -> str:
    """BatchNormalization at inference: a 1x1 depthwise convolution with constant scale and offset."""
    x = v.one()
    axis = _one_axis(v, x)
    channels = v.shape(x)[axis]
    gamma, beta = (v.optional(name, [channels]) for name in ("gamma", "beta"))
    mean, variance = (v.weight(name, [channels]) for name in ("moving_mean", "moving_variance"))
    v.layer.read.update(("scale", "center"))
    epsilon = v.layer.number("epsilon", 1e-3)
    if not (variance + epsilon > 0).all():
        raise v.refuse("the moving_variance holds negative numbers", AGAIN)
    factor = (1.0 if gamma is None else gamma.astype(np.float64)) / np.sqrt(variance.astype(np.float64) + epsilon)
    offset = (0.0 if beta is None else beta) - mean * factor
    order = [*(place for place in range(len(v.shape(x))) if place != axis), axis]
    last = v.transpose(x, order, "last")
    shape = v.shape(last)
    image = last if len(shape) == 4 else v.reshape(last, (shape[0], 1, prod(shape[1:-1]), channels), "image")
    weights = v.constant(factor.astype(np.float32).reshape(1, 1, 1, channels), "factor")
    operands = [image, weights, v.constant(np.asarray(offset, np.float32), "offset")]
    result = v.reshape(v.add(DepthwiseConv2d(), operands, "normalised"), shape, "shaped")
    return v.transpose(result, [order.index(place) for place in range(len(order))], "restored")


def _scaled(v: KerasValues, x: str, axes: Sequence[int], gamma: str = "gamma") -> str:
    """x * gamma + beta along some axes, either of which may be missing."""
    shape = v.shape(x)
    v.layer.read.update(("scale", "center"))
    for name, kind in ((gamma, BinaryKind.MULTIPLY), ("beta", BinaryKind.ADD)):
        array = v.optional(name, [shape[place] for place in axes])
        if array is not None:
            x = v.binary(kind, x, v.constant(_along(shape, axes, array), name), name)
    return x


def _along(shape: Sequence[int], axes: Sequence[int], array: Array) -> Array:
    """A weight with an axis for each of `axes`, to be broadcast to `shape`."""
    return array.reshape([size if place in axes else 1 for place, size in enumerate(shape)])


def layer_normalization(v: KerasValues) -> str:
    """LayerNormalization, RMSNormalization."""
    x, centred = v.one(), v.layer.kind == "LayerNormalization"
    axes = v.layer.axes("axis", len(v.shape(x)), -1)
    if v.layer.flag("rms_scaling", False):
        raise v.refuse("rms_scaling is not supported", "use RMSNormalization")
    result = v.normalise(x, axes, Normalise(v.layer.number("epsilon", 1e-3 if centred else 1e-6), centred))
    return _scaled(v, result, axes, "gamma" if centred else "scale")


def group_normalization(v: KerasValues) -> str:
    """GroupNormalization: over everything of a group of channels."""
    x = v.one()
    shape, axis = v.shape(x), _one_axis(v, x)
    channels, groups = shape[axis], v.layer.whole("groups", 32, low=-1)
    groups = channels if groups == -1 else groups
    if groups < 1 or channels % groups:
        raise v.refuse(f"{groups} groups do not divide {channels} channels", AGAIN)
    apart = (*shape[:axis], groups, channels // groups, *shape[axis + 1 :])
    inner = [place for place in range(1, len(apart)) if place != axis]
    operator = Normalise(v.layer.number("epsilon", 1e-3))
    done = v.normalise(v.reshape(x, apart, "groups"), inner, operator)
    return _scaled(v, v.reshape(done, shape, "joined"), (axis,))


def unit_length(v: KerasValues, x: str, axes: tuple[int, ...]) -> str:
    """x divided by its length along some axes, which is at least EPSILON."""
    total = v.add(Reduce(ReduceKind.SUM, axes), [v.square(x, "squares")], "sum")
    length = v.unary(UnaryKind.SQUARE_ROOT, total, "length")
    return v.over(x, v.binary(BinaryKind.MAXIMUM, length, v.number(EPSILON, "floor"), "limited"), "unit")


def unit_normalization(v: KerasValues) -> str:
    """UnitNormalization."""
    x = v.one()
    return unit_length(v, x, v.layer.axes("axis", len(v.shape(x)), -1))


def normalization(v: KerasValues) -> str:
    """Normalization: (x - mean) / deviation, given or learnt from data."""
    x = v.one()
    shape = v.shape(x)
    axes = v.layer.axes("axis", len(shape), -1) if v.layer.get("axis", -1) is not None else ()
    sizes = [shape[place] for place in axes]
    if v.layer.flag("invert", False):
        raise v.refuse("invert is not supported")
    found = {}
    for name in ("mean", "variance"):
        given = v.layer.get(name)
        array = v.weight(name, sizes) if given is None else v.numbers(given)
        if array.size not in (1, prod(sizes)) or (name == "variance" and (array < 0).any()):
            raise v.refuse(f"the {name} {list(array.shape)} does not fit {v.type_of(x)}", AGAIN)
        found[name] = array if array.size == 1 else _along(shape, axes, array)
    deviation = np.asarray(np.maximum(np.sqrt(found["variance"]), 1e-7), np.float32)
    centred = v.minus(x, v.constant(found["mean"], "mean"), "centred")
    return v.over(centred, v.constant(deviation, "deviation"), "normalised")
