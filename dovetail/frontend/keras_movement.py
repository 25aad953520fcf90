"""Keras layers that move elements: reshaping, borders, cropping, up-sampling, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dovetail.frontend.keras_context import KerasContext, images, restored
from dovetail.frontend.keras_layer import AGAIN, SMALLER, Call, Layer
from dovetail.frontend.keras_linear import Pairs, bordered
from dovetail.frontend.keras_merging import numbers
from dovetail.frontend.onnx_resize import Axis, nearest_places, taps
from dovetail.graph.types import Array, DType
from dovetail.operators.arithmetic import Add
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.selection import Gather, Pick, Resample

MAX_PLACES = 1 << 16
"""Most places of one axis that elements are picked from."""


def picked(ctx: KerasContext, layer: Layer, x: str, places: list[list[int] | range], stem: str = "picked") -> str:
    """Elements of x by places along each axis."""
    longest = max((len(chosen) for chosen in places), default=0)
    if longest > MAX_PLACES:
        raise layer.refuse(f"gives {longest} elements along one axis; the limit is {MAX_PLACES}", SMALLER)
    ctx.check_shape(layer, tuple(len(chosen) for chosen in places))
    return ctx.add(layer, Pick(tuple(tuple(chosen) for chosen in places)), [x], stem)


def embedding(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Embedding: rows of a table by integers."""
    x = ctx.one(layer, call, real=False)
    if layer.flag("mask_zero", False):
        raise layer.refuse("mask_zero is set: masks are not supported", "make the model without a mask")
    if ctx.type_of(x).dtype not in (DType.INT32, DType.INT64):
        raise layer.refuse(f"looks up {ctx.type_of(x)}", "give the model an Input of dtype='int32'")
    table = ctx.weight(layer, "embeddings", [layer.get("input_dim"), layer.whole("output_dim", low=1)])
    return ctx.add(layer, Gather(0), [ctx.constant(layer, "embeddings", table), x], "rows")


def identity(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """What does nothing at inference, whatever it is set to: dropout, noise, augmentation, regularisation."""
    layer.read.update(key for key in layer.config if layer.kind.startswith("Random") or key == "data_format")
    return ctx.one(layer, call, real=False)


def flatten(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Flatten; channels_first puts the channels last before."""
    x = ctx.one(layer, call, real=False)
    rank = len(ctx.shape(x))
    if layer.first_channels() and rank > 2:
        x = ctx.transposed(layer, x, (0, *range(2, rank), 1), "last")
    shape = ctx.shape(x)
    return ctx.reshaped(layer, x, (shape[0], prod(shape[1:])), "flat")


def full_shape(layer: Layer, wanted: Sequence[object], elements: int) -> tuple[int, ...]:
    """A shape with at most one -1, which takes what is left."""
    sizes = [size for size in wanted if isinstance(size, int) and not isinstance(size, bool) and -1 <= size < 1 << 31]
    rest = prod(size for size in sizes if size != -1)
    if len(sizes) != len(wanted) or sizes.count(-1) > 1 or 0 in sizes or (-1 in sizes and elements % rest):
        raise layer.refuse(f"{elements} elements have not the shape {str(list(wanted))[:80]}", AGAIN)
    return tuple(elements // rest if size == -1 else size for size in sizes)


def reshape(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Reshape of everything but the batch."""
    x = ctx.one(layer, call, real=False)
    wanted, (batch, *sizes) = layer.get("target_shape", ()), ctx.shape(x)
    if not isinstance(wanted, list | tuple):
        raise layer.refuse("target_shape is no list", AGAIN)
    return ctx.reshaped(layer, x, (batch, *full_shape(layer, wanted, prod(sizes))), "shaped")


def permute(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Permute: axes counted from 1, the batch stays."""
    x = ctx.one(layer, call, real=False)
    order = layer.wholes("dims", len(ctx.shape(x)) - 1, low=1)
    return ctx.transposed(layer, x, (0, *order), "permuted")


def repeat_vector(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """RepeatVector: [N, C] to [N, n, C]."""
    x, count = ctx.one(layer, call, real=False), layer.whole("n", low=1)
    shape = ctx.shape(x)
    if len(shape) != 2:
        raise layer.refuse(f"repeats vectors, its operand is {ctx.type_of(x)}")
    ctx.check_shape(layer, (*shape, count))
    row = ctx.reshaped(layer, x, (shape[0], 1, shape[1]), "row")
    return picked(ctx, layer, row, [range(shape[0]), [0] * min(count, MAX_PLACES + 1), range(shape[1])], "repeated")


def _sides(layer: Layer, key: str, rank: int) -> Pairs:
    """A border: one number, one for each axis, or two for each axis."""
    found = layer.get(key, 1)
    listed = list(found) if isinstance(found, list | tuple) else [found] * rank
    if rank == 1:
        listed = [listed if isinstance(found, list | tuple) else [found, found]]
    sides = [list(entry) if isinstance(entry, list | tuple) else [entry, entry] for entry in listed]
    if len(sides) != rank or any(len(entry) != 2 for entry in sides):
        raise layer.refuse(f"the setting {key} = {str(found)[:80]} is no border", AGAIN)
    numbers = [size for entry in sides for size in entry]
    if any(isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 20 for size in numbers):
        raise layer.refuse(f"the setting {key} = {str(found)[:80]} must be integers of at least 0", AGAIN)
    pairs = [(int(entry[0]), int(entry[1])) for entry in sides]
    return ((0, 0), pairs[0]) if rank == 1 else (pairs[0], pairs[1])


def zero_padding(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """ZeroPadding1D, ZeroPadding2D."""
    rank = int(layer.kind[-2])
    image = images(ctx, layer, ctx.one(layer, call), rank)
    return restored(ctx, layer, bordered(ctx, layer, image, _sides(layer, "padding", rank)), rank)


def cropping(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Cropping1D, Cropping2D."""
    rank = int(layer.kind[-2])
    image = images(ctx, layer, ctx.one(layer, call), rank)
    (top, bottom), (left, right) = _sides(layer, "cropping", rank)
    if top + bottom >= ctx.shape(image)[1] or left + right >= ctx.shape(image)[2]:
        raise layer.refuse(f"crops everything of {ctx.type_of(image)}", AGAIN)
    return restored(ctx, layer, bordered(ctx, layer, image, ((-top, -bottom), (-left, -right))), rank)


def up_sampling(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """UpSampling1D, UpSampling2D: elements repeated, or weighted sums of neighbours."""
    rank = int(layer.kind[-2])
    image = images(ctx, layer, ctx.one(layer, call), rank)
    factors = (1, layer.whole("size", 2, low=1)) if rank == 1 else layer.wholes("size", 2, 2, low=1)
    mode = layer.choice("interpolation", "nearest", ("nearest", "bilinear"))
    (_, height, width, _) = ctx.shape(image)
    resized = resized_image(ctx, layer, image, (height * factors[0], width * factors[1]), mode)
    return restored(ctx, layer, resized, rank)


def resizing(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Resizing to a fixed size."""
    image = images(ctx, layer, ctx.one(layer, call), 2)
    for key in ("crop_to_aspect_ratio", "pad_to_aspect_ratio", "antialias"):
        if layer.flag(key, False):
            raise layer.refuse(f"the setting {key} is not supported")
    layer.read.update(("fill_mode", "fill_value"))  # concern pad_to_aspect_ratio only
    mode = layer.choice("interpolation", "bilinear", ("nearest", "bilinear"))
    sizes = layer.whole("height", low=1), layer.whole("width", low=1)
    return restored(ctx, layer, resized_image(ctx, layer, image, sizes, mode), 2)


def resized_image(ctx: KerasContext, layer: Layer, image: str, sizes: tuple[int, int], mode: str) -> str:
    """An NHWC image of another size; pixels are taken at their centres."""
    batch, height, width, channels = ctx.shape(image)
    if max(sizes) > MAX_PLACES:
        raise layer.refuse(f"gives {max(sizes)} rows or columns; the limit is {MAX_PLACES}", SMALLER)
    ctx.check_shape(layer, (batch, *sizes, channels))
    axes = [Axis(have, want, want / have, "half_pixel") for have, want in zip((height, width), sizes, strict=True)]
    if mode == "nearest":
        rows, columns = (nearest_places(axis, "round_prefer_ceil") for axis in axes)
        return picked(ctx, layer, image, [range(batch), rows, columns, range(channels)], "resized")
    changed = {number: axis for number, axis in enumerate(axes, 1) if axis.result != axis.size}
    operands = [image]
    for axis in changed.values():
        places, weights = taps(axis, False, 0.0, False, False)
        operands += [ctx.constant(layer, "places", places), ctx.constant(layer, "weights", weights)]
    return ctx.add(layer, Resample(tuple(changed)), operands, "resized") if changed else image


def center_crop(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """CenterCrop of an image that is large enough."""
    image = images(ctx, layer, ctx.one(layer, call), 2)
    sizes = layer.whole("height", low=1), layer.whole("width", low=1)
    border = []
    for have, want in zip(ctx.shape(image)[1:3], sizes, strict=True):
        if have < want:
            raise layer.refuse(f"crops {ctx.type_of(image)} to {list(sizes)}, which is larger", AGAIN)
        lead = (have - want) // 2
        border.append((-lead, want + lead - have))
    return restored(ctx, layer, bordered(ctx, layer, image, (border[0], border[1])), 2)


def rescaling(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Rescaling: x * scale + offset, of integers too; each one number or one for each channel."""
    x = ctx.one(layer, call)
    scale, offset = (_vector(layer, key, default) for key, default in (("scale", 1.0), ("offset", 0.0)))
    return affine(ctx, layer, x, scale, offset)


def _vector(layer: Layer, key: str, default: float) -> Array:
    found = layer.get(key, default)
    if isinstance(found, dict):
        found = found.get("value")
    array = numbers(layer, found)
    if array.ndim > 1:
        raise layer.refuse(f"the setting {key} = {str(found)[:80]} must be one number, or one for each channel", AGAIN)
    return array


def affine(ctx: KerasContext, layer: Layer, x: str, scale: Array, offset: Array) -> str:
    """x * scale + offset, broadcast to the last axes of x."""
    for array in (scale, offset):
        if array.ndim and array.shape != (1,) * array.ndim and array.shape[-1] != ctx.shape(x)[-1]:
            raise layer.refuse(f"{list(array.shape)} numbers do not fit {ctx.type_of(x)}", AGAIN)
    if (scale != 1.0).any():
        x = ctx.add(layer, Binary(BinaryKind.MULTIPLY), [x, ctx.constant(layer, "scale", scale)], "scaled")
    if (offset != 0.0).any():
        x = ctx.add(layer, Add(), [x, ctx.constant(layer, "offset", offset)], "moved")
    return x
