"""Keras's normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from dovetail.frontend.keras_context import KerasContext
from dovetail.frontend.keras_layer import AGAIN, Call, Layer
from dovetail.frontend.keras_merging import numbers
from dovetail.graph.types import Array
from dovetail.operators.activation import Unary, UnaryKind
from dovetail.operators.arithmetic import Add
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.linear import DepthwiseConv2d
from dovetail.operators.reduction import Normalise, Reduce, ReduceKind

EPSILON = 1e-12
"""Smallest length UnitNormalization divides by."""


def _one_axis(ctx: KerasContext, layer: Layer, x: str) -> int:
    """The one axis of the channels."""
    axes = layer.axes("axis", len(ctx.shape(x)), -1)
    if len(axes) != 1 or axes[0] == 0:
        raise layer.refuse(f"the axis must be one, and not that of the batch, got {list(axes)}", AGAIN)
    return axes[0]


def batch_normalization(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """BatchNormalization at inference: a 1x1 depthwise convolution with constant scale and offset."""
    x = ctx.one(layer, call)
    axis = _one_axis(ctx, layer, x)
    channels = ctx.shape(x)[axis]
    gamma, beta = (ctx.optional(layer, name, [channels]) for name in ("gamma", "beta"))
    mean, variance = (ctx.weight(layer, name, [channels]) for name in ("moving_mean", "moving_variance"))
    layer.read.update(("scale", "center"))
    epsilon = layer.number("epsilon", 1e-3)
    if not (variance + epsilon > 0).all():
        raise layer.refuse("the moving_variance holds negative numbers", AGAIN)
    factor = (1.0 if gamma is None else gamma.astype(np.float64)) / np.sqrt(variance.astype(np.float64) + epsilon)
    offset = (0.0 if beta is None else beta) - mean * factor
    order = [*(place for place in range(len(ctx.shape(x))) if place != axis), axis]
    last = ctx.transposed(layer, x, order, "last")
    shape = ctx.shape(last)
    image = last if len(shape) == 4 else ctx.reshaped(layer, last, (shape[0], 1, prod(shape[1:-1]), channels), "image")
    operands = [
        image,
        ctx.constant(layer, "factor", factor.astype(np.float32).reshape(1, 1, 1, channels)),
        ctx.constant(layer, "offset", np.asarray(offset, np.float32)),
    ]
    result = ctx.reshaped(layer, ctx.add(layer, DepthwiseConv2d(), operands, "normalised"), shape, "shaped")
    return ctx.transposed(layer, result, [order.index(place) for place in range(len(order))], "restored")


def _over(ctx: KerasContext, layer: Layer, x: str, axes: Sequence[int], operator: Normalise) -> str:
    """A value normalised over some axes together."""
    shape = ctx.shape(x)
    order = [*(place for place in range(len(shape)) if place not in axes), *axes]
    moved = ctx.transposed(layer, x, order, "last")
    count = prod(shape[place] for place in axes)
    rows = ctx.reshaped(layer, moved, (prod(shape) // count, count), "rows")
    done = ctx.reshaped(layer, ctx.add(layer, operator, [rows], "normalised"), ctx.shape(moved), "whole")
    return ctx.transposed(layer, done, [order.index(place) for place in range(len(shape))], "restored")


def _scaled(ctx: KerasContext, layer: Layer, x: str, axes: Sequence[int], gamma: str = "gamma") -> str:
    """x * gamma + beta along some axes, either of which may be missing."""
    shape = ctx.shape(x)
    sizes = [shape[place] for place in axes]
    layer.read.update(("scale", "center"))
    for name, operator in ((gamma, Binary(BinaryKind.MULTIPLY)), ("beta", Add())):
        array = ctx.optional(layer, name, sizes)
        if array is not None:
            x = ctx.add(layer, operator, [x, ctx.constant(layer, name, _along(shape, axes, array))], name)
    return x


def _along(shape: Sequence[int], axes: Sequence[int], array: Array) -> Array:
    """A weight with an axis for each of `axes`, to be broadcast to `shape`."""
    return array.reshape([size if place in axes else 1 for place, size in enumerate(shape)])


def layer_normalization(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """LayerNormalization, RMSNormalization."""
    x = ctx.one(layer, call)
    shape = ctx.shape(x)
    axes = layer.axes("axis", len(shape), -1)
    centred = layer.kind == "LayerNormalization"
    if layer.flag("rms_scaling", False):
        raise layer.refuse("rms_scaling is not supported", "use RMSNormalization")
    result = _over(ctx, layer, x, axes, Normalise(layer.number("epsilon", 1e-3 if centred else 1e-6), centred))
    return _scaled(ctx, layer, result, axes, "gamma" if centred else "scale")


def group_normalization(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """GroupNormalization: over everything of a group of channels."""
    x = ctx.one(layer, call)
    shape, axis = ctx.shape(x), _one_axis(ctx, layer, x)
    channels, groups = shape[axis], layer.whole("groups", 32, low=-1)
    groups = channels if groups == -1 else groups
    if groups < 1 or channels % groups:
        raise layer.refuse(f"{groups} groups do not divide {channels} channels", AGAIN)
    apart = (*shape[:axis], groups, channels // groups, *shape[axis + 1 :])
    inner = [place for place in range(1, len(apart)) if place != axis]
    operator = Normalise(layer.number("epsilon", 1e-3))
    done = _over(ctx, layer, ctx.reshaped(layer, x, apart, "groups"), inner, operator)
    return _scaled(ctx, layer, ctx.reshaped(layer, done, shape, "joined"), (axis,))


def unit_length(ctx: KerasContext, layer: Layer, x: str, axes: tuple[int, ...]) -> str:
    """x divided by its length along some axes, which is at least EPSILON."""
    squares = ctx.add(layer, Binary(BinaryKind.MULTIPLY), [x, x], "squares")
    total = ctx.add(layer, Reduce(ReduceKind.SUM, axes), [squares], "sum")
    length = ctx.add(layer, Unary(UnaryKind.SQUARE_ROOT), [total], "length")
    floor = ctx.number(layer, EPSILON, "floor")
    limited = ctx.add(layer, Binary(BinaryKind.MAXIMUM), [length, floor], "limited")
    return ctx.add(layer, Binary(BinaryKind.DIVIDE), [x, limited], "unit")


def unit_normalization(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """UnitNormalization."""
    x = ctx.one(layer, call)
    return unit_length(ctx, layer, x, layer.axes("axis", len(ctx.shape(x)), -1))


def normalization(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Normalization: (x - mean) / deviation, given or learnt from data."""
    x = ctx.one(layer, call)
    shape = ctx.shape(x)
    axes = layer.axes("axis", len(shape), -1) if layer.get("axis", -1) is not None else ()
    sizes = [shape[place] for place in axes]
    if layer.flag("invert", False):
        raise layer.refuse("invert is not supported")
    found = {}
    for name in ("mean", "variance"):
        given = layer.get(name)
        array = ctx.weight(layer, name, sizes) if given is None else numbers(layer, given)
        if array.size not in (1, prod(sizes)) or (name == "variance" and (array < 0).any()):
            raise layer.refuse(f"the {name} {list(array.shape)} does not fit {ctx.type_of(x)}", AGAIN)
        found[name] = array if array.size == 1 else _along(shape, axes, array)
    deviation = np.maximum(np.sqrt(found["variance"]), 1e-7)
    centred = ctx.add(layer, Binary(BinaryKind.SUBTRACT), [x, ctx.constant(layer, "mean", found["mean"])], "centred")
    divisor = ctx.constant(layer, "deviation", np.asarray(deviation, np.float32))
    return ctx.add(layer, Binary(BinaryKind.DIVIDE), [centred, divisor], "normalised")
