"""Keras layers that make one value of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.frontend.keras_context import Importer, KerasContext
from dovetail.frontend.keras_layer import AGAIN, Call, Layer
from dovetail.operators.arithmetic import Add
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.movement import Concat


def operator_of(kind: BinaryKind) -> Operator:
    """The function of two floats; the addition the quantize stage knows."""
    return Add() if kind is BinaryKind.ADD else Binary(kind)


def _aligned(ctx: KerasContext, layer: Layer, values: Sequence[str]) -> list[str]:
    """Values of equal rank: axes of size 1 come behind the batch, as Keras puts them."""
    rank = max(len(ctx.shape(value)) for value in values)
    found = []
    for value in values:
        shape = ctx.shape(value)
        found.append(ctx.reshaped(layer, value, (*shape[:1], *(1,) * (rank - len(shape)), *shape[1:]), "aligned"))
    return found


def merge(kind: BinaryKind, mean: bool = False) -> Importer:
    """The importer of a function of several values, taken from the left; `mean` divides by their number."""

    def build(ctx: KerasContext, layer: Layer, call: Call) -> str:
        """Values broadcast as in numpy."""
        ctx.check_named(layer, call)
        values = call.tensors()
        if not values or (kind is BinaryKind.SUBTRACT and len(values) != 2):
            raise layer.refuse(f"is called with {len(values)} values", AGAIN)
        first, *others = _aligned(ctx, layer, [ctx.real(layer, value) for value in values])
        for other in others:
            first = ctx.add(layer, operator_of(kind), [first, other], "merged")
        if not mean:
            return first
        share = ctx.number(layer, 1.0 / len(values), "share")
        return ctx.add(layer, Binary(BinaryKind.MULTIPLY), [first, share], "mean")

    return build


def concatenate(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Concatenate."""
    values = call.tensors()
    ctx.check_named(layer, call)
    if not values:
        raise layer.refuse("is called without values", AGAIN)
    if len({ctx.type_of(value).dtype for value in values}) > 1:
        values = [ctx.real(layer, value) for value in values]
    rank = len(ctx.shape(values[0]))
    (axis,) = layer.axes("axis", rank, -1)
    return joined(ctx, layer, values, axis)


def joined(ctx: KerasContext, layer: Layer, values: Sequence[str], axis: int) -> str:
    """Values one behind the other along an axis counted from the front."""
    if len({len(ctx.shape(value)) for value in values}) != 1:
        raise layer.refuse(f"joins values of different ranks: {', '.join(str(ctx.type_of(v)) for v in values)}", AGAIN)
    return ctx.add(layer, Concat(axis), values, "joined") if len(values) > 1 else values[0]


def numbers(layer: Layer, value: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A constant argument as float32."""
    try:
        array = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError):
        raise layer.refuse(f"the argument {str(value)[:80]} is no number", AGAIN) from None
    if not np.isfinite(array).all():
        raise layer.refuse("an argument is NaN or infinite", AGAIN)
    return array
