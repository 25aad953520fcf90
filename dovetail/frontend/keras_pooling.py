"""Keras's pools."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.frontend.keras_context import Importer, KerasContext, images, restored
from dovetail.frontend.keras_layer import Call, Layer
from dovetail.frontend.keras_linear import borders, pair
from dovetail.operators.base import Operator

Pool = Callable[..., Operator]


def pool(kind: Pool, rank: int) -> Importer:
    """The importer of a pool over windows."""

    def build(ctx: KerasContext, layer: Layer, call: Call) -> str:
        """Border elements of padding "same" take no part, as in Keras."""
        image = images(ctx, layer, ctx.one(layer, call), rank)
        kernel = pair(layer, "pool_size", rank, 2)
        stride = pair(layer, "strides", rank) if layer.get("strides") is not None else kernel
        border = borders(layer, ctx.shape(image)[1:3], kernel, stride)
        return restored(ctx, layer, ctx.add(layer, kind(kernel, stride, border), [image], "pool"), rank)

    return build


def whole_pool(kind: Pool, rank: int) -> Importer:
    """The importer of a pool over everything."""

    def build(ctx: KerasContext, layer: Layer, call: Call) -> str:
        """keepdims leaves the image axes with size 1."""
        image = images(ctx, layer, ctx.one(layer, call), rank)
        batch, height, width, channels = ctx.shape(image)
        pooled = ctx.add(layer, kind((height, width), (height, width)), [image], "pool")
        if layer.flag("keepdims", False):
            return restored(ctx, layer, pooled, rank)
        return ctx.reshaped(layer, pooled, (batch, channels), "row")

    return build

