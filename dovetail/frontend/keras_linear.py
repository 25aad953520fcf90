"""Keras's dense layers and convolutions."""

from __future__ import annotations

from dovetail.frontend.keras_activation import activated
from dovetail.frontend.keras_context import KerasContext, images, restored
from dovetail.frontend.keras_layer import AGAIN, Call, Layer
from dovetail.graph.types import Array, Shape
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad, Slice

Pairs = tuple[tuple[int, int], tuple[int, int]]
"""Rows before and after, columns before and after."""


def pair(layer: Layer, key: str, rank: int, default: int = 1) -> tuple[int, int]:
    """A setting of one positive number per image axis, as rows and columns."""
    found = layer.wholes(key, rank, default, low=1)
    return (1, found[0]) if rank == 1 else (found[0], found[1])


def same_border(size: int, span: int, stride: int) -> tuple[int, int]:
    """Elements before and after an axis with padding "same" (TensorFlow's: the odd one behind)."""
    total = max((-(-size // stride) - 1) * stride + span - size, 0)
    return total // 2, total - total // 2


def borders(layer: Layer, sizes: Shape, span: Shape, stride: Shape, causal: bool = False) -> Pairs:
    """What the setting `padding` adds around rows and columns `sizes`."""
    mode = layer.choice("padding", "valid", ("valid", "same", "causal") if causal else ("valid", "same"))
    if mode == "valid":
        return (0, 0), (0, 0)
    if mode == "causal":
        return (0, 0), (span[1] - 1, 0)
    found = [same_border(size, reach, step) for size, reach, step in zip(sizes, span, stride, strict=True)]
    return found[0], found[1]


def bordered(ctx: KerasContext, layer: Layer, image: str, border: Pairs) -> str:
    """The NHWC image with zeros around it; where a number is negative, cut."""
    shape = ctx.shape(image)
    cut = [(max(-lead, 0), max(-trail, 0)) for lead, trail in border]
    if any(any(sides) for sides in cut):
        start = (0, cut[0][0], cut[1][0], 0)
        stop = (shape[0], shape[1] - cut[0][1], shape[2] - cut[1][1], shape[3])
        image = ctx.add(layer, Slice(start, stop, (1,) * 4), [image], "cut")
    (top, bottom), (left, right) = ((max(lead, 0), max(trail, 0)) for lead, trail in border)
    if not any((top, bottom, left, right)):
        return image
    rows, columns = (size + sum(sides) for size, sides in zip(shape[1:3], border, strict=True))
    ctx.check_shape(layer, (shape[0], rows, columns, shape[3]))
    return ctx.add(layer, Pad((0, top, left, 0), (0, bottom, right, 0), 0.0), [image], "padded")


def _bias(ctx: KerasContext, layer: Layer, channels: int) -> list[str]:
    bias = ctx.optional(layer, "bias", [channels])
    return [] if bias is None else [ctx.constant(layer, "bias", bias)]


def dense(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Dense: over the last axis."""
    x, units = ctx.one(layer, call), layer.whole("units", low=1)
    if layer.get("lora_rank") is not None:
        raise layer.refuse("LoRA weights are not supported", "merge them, and save again")
    kernel = ctx.weight(layer, "kernel", [ctx.shape(x)[-1], units])
    operands = [x, ctx.constant(layer, "kernel", kernel.T), *_bias(ctx, layer, units)]
    return activated(ctx, layer, ctx.add(layer, FullyConnected(), operands, "product"))


def _ohwi(kernel: Array) -> Array:
    """A kernel [(KH,) KW, I, O] as OHWI."""
    return (kernel[None] if kernel.ndim == 3 else kernel).transpose(3, 0, 1, 2)


def _span(taps: Shape, dilation: Shape) -> tuple[int, int]:
    """Rows and columns a window covers."""
    return (taps[0] - 1) * dilation[0] + 1, (taps[1] - 1) * dilation[1] + 1


def convolution(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Conv1D, Conv2D; as many groups as channels make it depthwise."""
    rank = 1 if layer.kind == "Conv1D" else 2
    image = images(ctx, layer, ctx.one(layer, call), rank)
    channels, filters, groups = ctx.shape(image)[3], layer.whole("filters", low=1), layer.whole("groups", 1, low=1)
    if channels % groups or filters % groups:
        raise layer.refuse(f"{groups} groups do not divide {channels} channels and {filters} filters", AGAIN)
    taps, stride, dilation = (pair(layer, key, rank) for key in ("kernel_size", "strides", "dilation_rate"))
    kernel = ctx.weight(layer, "kernel", [*taps[2 - rank :], channels // groups, filters])
    border = borders(layer, ctx.shape(image)[1:3], _span(taps, dilation), stride, causal=rank == 1)
    operator: Operator = Conv2d(stride, dilation)
    weights = _ohwi(kernel)
    if groups == channels > 1:
        operator, weights = DepthwiseConv2d(stride, dilation), kernel.reshape(1, *taps, filters)
    padded = bordered(ctx, layer, image, border)
    operands = [padded, ctx.constant(layer, "kernel", weights), *_bias(ctx, layer, filters)]
    return _finished(ctx, layer, operator, operands, rank)


def _finished(ctx: KerasContext, layer: Layer, operator: Operator, operands: list[str], rank: int) -> str:
    """The convolution in the layer's own order, activated."""
    result = restored(ctx, layer, ctx.add(layer, operator, operands, "sum"), rank)
    return activated(ctx, layer, result)


def _depthwise(ctx: KerasContext, layer: Layer, image: str, name: str, rank: int) -> tuple[Operator, list[str]]:
    """A depthwise convolution and its operands without bias."""
    channels, multiplier = ctx.shape(image)[3], layer.whole("depth_multiplier", 1, low=1)
    taps, stride, dilation = (pair(layer, key, rank) for key in ("kernel_size", "strides", "dilation_rate"))
    kernel = ctx.weight(layer, name, [*taps[2 - rank :], channels, multiplier])
    border = borders(layer, ctx.shape(image)[1:3], _span(taps, dilation), stride, causal=rank == 1)
    weights = kernel.reshape(1, *taps, channels * multiplier)
    operands = [bordered(ctx, layer, image, border), ctx.constant(layer, name, weights)]
    return DepthwiseConv2d(stride, dilation), operands


def depthwise(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """DepthwiseConv1D, DepthwiseConv2D."""
    rank = 1 if layer.kind == "DepthwiseConv1D" else 2
    image = images(ctx, layer, ctx.one(layer, call), rank)
    layer.read.update(("groups", "filters"))  # follow from the channels
    operator, operands = _depthwise(ctx, layer, image, "kernel", rank)
    bias = _bias(ctx, layer, ctx.shape(operands[1])[3])
    return _finished(ctx, layer, operator, [*operands, *bias], rank)


def separable(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """SeparableConv1D, SeparableConv2D: depthwise, then 1x1."""
    rank = 1 if layer.kind == "SeparableConv1D" else 2
    image = images(ctx, layer, ctx.one(layer, call), rank)
    layer.read.add("groups")
    filters = layer.whole("filters", low=1)
    operator, operands = _depthwise(ctx, layer, image, "depthwise_kernel", rank)
    deep = ctx.add(layer, operator, operands, "depthwise")
    kernel = ctx.weight(layer, "pointwise_kernel", [*(1,) * rank, ctx.shape(deep)[3], filters])
    weights = [ctx.constant(layer, "pointwise_kernel", _ohwi(kernel)), *_bias(ctx, layer, filters)]
    return _finished(ctx, layer, Conv2d(), [deep, *weights], rank)


def _stretched(ctx: KerasContext, layer: Layer, image: str, stride: tuple[int, int]) -> str:
    """The NHWC image with stride - 1 zeros between rows and between columns."""
    if stride == (1, 1):
        return image
    batch, height, width, channels = ctx.shape(image)
    ctx.check_shape(layer, (batch, height * stride[0], width * stride[1], channels))
    apart = ctx.reshaped(layer, image, (batch, height, 1, width, 1, channels), "apart")
    after = (0, 0, stride[0] - 1, 0, stride[1] - 1, 0)
    zeros = ctx.add(layer, Pad((0,) * 6, after, 0.0), [apart], "zeros")
    wide = ctx.reshaped(layer, zeros, (batch, height * stride[0], width * stride[1], channels), "wide")
    stop = (batch, (height - 1) * stride[0] + 1, (width - 1) * stride[1] + 1, channels)
    return ctx.add(layer, Slice((0,) * 4, stop, (1,) * 4), [wide], "stretched")


def _transposed_border(layer: Layer, span: int, stride: int, extra: int | None) -> tuple[int, int]:
    """Zeros before and after a stretched axis, so that a window of `span` gives the transposed convolution
    (keras/src/backend/common/backend_utils.py)."""
    if layer.choice("padding", "valid", ("valid", "same")) == "valid":
        return span - 1, span - 1 + (max(span, stride) - span if extra is None else extra)
    total = stride + span - 2 if extra is None else span + span % 2 - 2 + extra
    lead = min(total // 2 + total % 2, span - 1)
    return lead, total - lead


def transposed(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Conv1DTranspose, Conv2DTranspose: a convolution of the image with zeros between its elements."""
    rank = 1 if layer.kind == "Conv1DTranspose" else 2
    image = images(ctx, layer, ctx.one(layer, call), rank)
    channels, filters = ctx.shape(image)[3], layer.whole("filters", low=1)
    taps, stride, dilation = (pair(layer, key, rank) for key in ("kernel_size", "strides", "dilation_rate"))
    kernel = ctx.weight(layer, "kernel", [*taps[2 - rank :], filters, channels])
    given = layer.get("output_padding")
    extra = [None, None] if given is None else [None] * (2 - rank) + list(layer.wholes("output_padding", rank))
    sides = zip(_span(taps, dilation), stride, extra, strict=True)
    top, left = (_transposed_border(layer, reach, step, more) for reach, step, more in sides)
    border = ((0, 0), left) if rank == 1 else (top, left)
    padded = bordered(ctx, layer, _stretched(ctx, layer, image, stride), border)
    turned = (kernel[None] if rank == 1 else kernel)[::-1, ::-1].transpose(2, 0, 1, 3)
    operands = [padded, ctx.constant(layer, "kernel", turned), *_bias(ctx, layer, filters)]
    return _finished(ctx, layer, Conv2d((1, 1), dilation), operands, rank)
