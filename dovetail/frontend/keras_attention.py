"""Keras layers that multiply matrices: einsum, attention, dot products."""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

from dovetail.frontend.keras_activation import activated
from dovetail.frontend.keras_context import KerasContext
from dovetail.frontend.keras_layer import AGAIN, Call, Layer, Tensor
from dovetail.frontend.keras_normalisation import unit_length
from dovetail.frontend.keras_weights import children
from dovetail.graph.types import Array
from dovetail.operators.activation import Softmax
from dovetail.operators.arithmetic import Add
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.linear import FullyConnected, MatrixProduct

MASKED = -1e9
"""Added to the scores of what is not attended to; their softmax is 0."""


def _labels(layer: Layer, equation: str, rank: int) -> tuple[str, str, str]:
    """The three terms of an einsum "x,kernel->result", the ellipsis written out in capital letters."""
    found = equation.replace(" ", "").replace("->", ",").split(",")
    if len(found) != 3:
        raise layer.refuse(f"the equation {equation[:80]!r} is not of the form x,kernel->result")
    free = rank - len(found[0].replace("...", ""))
    if free and "..." in found[0]:
        found = [term.replace("...", "ABCDEFGH"[: max(free, 0)]) for term in found]
    found = [term.replace("...", "") for term in found]
    x, kernel, result = found
    proper = all(term.isalpha() and len(set(term)) == len(term) for term in found)
    batch = set(x) & set(kernel) & set(result)
    if not proper or len(x) != rank or batch or set(result) != set(x) ^ set(kernel):
        raise layer.refuse(f"the equation {equation[:80]!r} is no product of a matrix and a kernel", AGAIN)
    return x, kernel, result


def product(ctx: KerasContext, layer: Layer, x: str, equation: str, kernel: Array, bias: Array | None) -> str:
    """An einsum of a value and a kernel as a dense layer between transposes.

    Args:
        ctx: the import.
        layer: the layer.
        x: float value.
        equation: terms of x, of the kernel and of the result.
        kernel: float32, its axes as the equation says.
        bias: float32, broadcast to the result; None without one.
    """
    one, two, result = _labels(layer, equation, len(ctx.shape(x)))
    summed = [label for label in one if label in two]
    kept, made = [label for label in one if label not in two], [label for label in two if label not in one]
    sizes = dict(zip(one, ctx.shape(x), strict=True)) | dict(zip(made, _sizes(kernel, two, made), strict=True))
    if _sizes(kernel, two, summed) != [sizes[label] for label in summed]:
        raise layer.refuse(f"the kernel {list(kernel.shape)} does not fit {ctx.type_of(x)} in {equation[:80]!r}", AGAIN)
    moved = ctx.transposed(layer, x, [one.index(label) for label in (*kept, *summed)], "moved")
    depth, count = prod(sizes[label] for label in summed), prod(sizes[label] for label in made)
    rows = ctx.reshaped(layer, moved, (*(sizes[label] for label in kept), depth), "rows")
    matrix = kernel.transpose([two.index(label) for label in (*made, *summed)]).reshape(count, depth)
    dense_ = ctx.add(layer, FullyConnected(), [rows, ctx.constant(layer, "matrix", matrix)], "product")
    order = [*kept, *made]
    whole = ctx.reshaped(layer, dense_, tuple(sizes[label] for label in order), "whole")
    found = ctx.transposed(layer, whole, [order.index(label) for label in result], "ordered")
    if bias is None:
        return found
    try:
        np.broadcast_shapes(bias.shape, ctx.shape(found))
    except ValueError:
        raise layer.refuse(f"the bias {list(bias.shape)} does not fit {ctx.type_of(found)}", AGAIN) from None
    return ctx.add(layer, Add(), [found, ctx.constant(layer, "bias", bias)], "biased")


def _sizes(kernel: Array, labels: str, wanted: list[str]) -> list[int]:
    return [kernel.shape[labels.index(label)] for label in wanted] if kernel.ndim == len(labels) else [-1]


def einsum_dense(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """EinsumDense."""
    x, equation = ctx.one(layer, call), layer.get("equation")
    if not isinstance(equation, str):
        raise layer.refuse("has no equation", AGAIN)
    layer.read.update(("output_shape", "bias_axes"))  # follow from the weights
    weights = ctx.weights.of(layer)
    return activated(ctx, layer, product(ctx, layer, x, equation, weights["kernel"], weights.get("bias")))


def _operands(ctx: KerasContext, layer: Layer, call: Call, names: tuple[str, ...]) -> dict[str, str]:
    """The values of a call by the names of their parameters."""
    listed = list(call.arguments[0]) if call.arguments and isinstance(call.arguments[0], list) else call.arguments
    found = {name: value.name for name, value in zip(names, listed, strict=False) if isinstance(value, Tensor)}
    found |= {name: value.name for name, value in call.named.items() if name in names and isinstance(value, Tensor)}
    if len(found) != len(call.tensors()) or "query" not in found or "value" not in found:
        raise layer.refuse("is called with other values than query, value and key; masks are not supported")
    ctx.check_named(layer, call, (*names, "use_causal_mask"))
    real = {name: ctx.real(layer, value) for name, value in found.items()}
    return real | {"key": real.get("key", real["value"])}


def _attended(ctx: KerasContext, layer: Layer, query: str, key: str, value: str, causal: bool) -> str:
    """softmax(query key^T) value, over [..., steps, features]."""
    rank = len(ctx.shape(key))
    turned = ctx.transposed(layer, key, (*range(rank - 2), rank - 1, rank - 2), "key_turned")
    scores = ctx.add(layer, MatrixProduct(), [query, turned], "scores")
    if causal:
        rows, columns = ctx.shape(scores)[-2:]
        mask = np.where(np.arange(columns)[None, :] <= np.arange(rows)[:, None], 0.0, MASKED).astype(np.float32)
        scores = ctx.add(layer, Add(), [scores, ctx.constant(layer, "mask", mask)], "masked")
    return ctx.add(layer, MatrixProduct(), [ctx.add(layer, Softmax(), [scores], "shares"), value], "attended")


def multi_head_attention(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """MultiHeadAttention of sequences [N, T, C]."""
    given = _operands(ctx, layer, call, ("query", "value", "key"))
    heads, size = layer.whole("num_heads", low=1), layer.whole("key_dim", low=1)
    axes = layer.get("attention_axes", [1])
    if axes not in ([1], 1) or any(len(ctx.shape(value)) != 3 for value in given.values()):
        raise layer.refuse("attends over the one inner axis of [batch, steps, features] only")
    depth = layer.whole("value_dim", size, low=1)
    layer.flag("use_bias", True)
    layer.read.update(("output_shape", "query_shape", "key_shape", "value_shape", "flash_attention"))
    parts = dict(children(layer))
    sides = {}
    for name in ("query", "key", "value"):
        part, x = parts[f"{name}_dense"], given[name]
        width = depth if name == "value" else size
        kernel = ctx.weight(part, "kernel", [ctx.shape(x)[-1], heads, width])
        bias = ctx.optional(part, "bias", [heads, width])
        if name == "query":
            factor = np.float32(1.0 / sqrt(size))
            kernel, bias = kernel * factor, None if bias is None else bias * factor
        projected = product(ctx, part, x, "abc,cde->abde", kernel, bias)
        sides[name] = ctx.transposed(layer, projected, (0, 2, 1, 3), f"{name}_heads")
    causal = call.named.get("use_causal_mask") is True
    found = ctx.transposed(
        layer, _attended(ctx, layer, sides["query"], sides["key"], sides["value"], causal), (0, 2, 1, 3), "joined"
    )
    part = parts["output_dense"]
    kernel = ctx.weight(part, "kernel", [heads, depth, None])
    return product(ctx, part, found, "abcd,cde->abe", kernel, ctx.optional(part, "bias", [kernel.shape[2]]))


def attention(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Attention by dot products."""
    given = _operands(ctx, layer, call, ("query", "value", "key"))
    layer.choice("score_mode", "dot", ("dot",))
    query = given["query"]
    scale = ctx.optional(layer, "scale", [])
    if scale is not None:
        query = ctx.add(layer, Binary(BinaryKind.MULTIPLY), [query, ctx.constant(layer, "scale", scale)], "scaled")
    causal = call.named.get("use_causal_mask") is True or layer.flag("causal", False)
    return _attended(ctx, layer, query, given["key"], given["value"], causal)


def dot(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """Dot: sums of products along one axis of each of two values, for each element of the batch."""
    values = [ctx.real(layer, value) for value in call.tensors()]
    if len(values) != 2 or any(len(ctx.shape(value)) < 2 for value in values):
        raise layer.refuse("needs two values of at least two axes", AGAIN)
    ctx.check_named(layer, call)
    axes = layer.get("axes", -1)
    pair = list(axes) if isinstance(axes, list | tuple) else [axes, axes]
    sides = []
    for value, axis in zip(values, [*pair, None, None], strict=False):
        shape = ctx.shape(value)
        if len(pair) != 2 or not isinstance(axis, int) or axis % len(shape) == 0 or not -len(shape) < axis < len(shape):
            raise layer.refuse(f"the setting axes = {str(axes)[:80]} must name an axis of each value, not the batch",
                               AGAIN)
        place = axis % len(shape)
        if layer.flag("normalize", False):
            value = unit_length(ctx, layer, value, (place,))
        order = [0, *(other for other in range(1, len(shape)) if other != place), place]
        moved = ctx.transposed(layer, value, order, "last")
        kept = ctx.shape(moved)[1:-1]
        sides.append((ctx.reshaped(layer, moved, (shape[0], prod(kept), shape[place]), "rows"), kept))
    (left, first), (right, second) = sides
    turned = ctx.transposed(layer, right, (0, 2, 1), "turned")
    found = ctx.add(layer, MatrixProduct(), [left, turned], "product")
    return ctx.reshaped(layer, found, (ctx.shape(found)[0], *((*first, *second) or (1,))), "shaped")
