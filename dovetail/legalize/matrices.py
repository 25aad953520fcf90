"""Matrices for engines of convolutions: a dense layer of many rows is a 1x1 convolution of as many pixels, and so is a
product of two computed matrices where an engine reads bits that the core took apart."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.bits import BitProduct, ToBitPlanes
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import Conv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Concat, Reshape, Slice, Transpose
from dovetail.ir.operators.reduction import Reduce, ReduceKind
from dovetail.ir.rewrite import Draft, run
from dovetail.ir.types import DType, Shape
from dovetail.legalize.requantisation import Accepts


def dense_as_convolution(chooses: Accepts) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen dense layer of many rows becomes a 1x1 convolution of a column of pixels, between reshapes
    that move nothing; the one behind it goes behind the requantisation. Exact.

    Args:
        chooses: of types and layer.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        operator = node.operator
        if not isinstance(operator, FullyConnected) or node.inputs[1] not in draft.constants:
            return None
        x, weights = (draft.types[value] for value in node.inputs[:2])
        rows = prod(x.shape[:-1])
        if rows == 1 or not chooses(draft.types, node):
            return None
        image = draft.add(Reshape((1, rows, 1, x.shape[-1])), node.inputs[:1], node)
        taps = draft.constants[node.inputs[1]].reshape(weights.shape[0], 1, 1, weights.shape[1])
        name = draft.constant(taps, weights.dtype, node.inputs[1])
        layer = Conv2d().with_zero_points(*operator.zero_points)
        made = draft.add(layer, [image, name, *node.inputs[2:]], node)
        return draft.add(Reshape(draft.types[node.output].shape), [made], node)

    return lambda graph: run(graph, [rule, requantised_first])


def requantised_first(draft: Draft, node: Node) -> str | None:
    """The requantisation of a reshaped sum, or its limits: before the reshape."""
    move = draft.made_by(node.inputs[0], Reshape) if isinstance(node.operator, Requantize | Clip) else None
    if move is None or draft.users(move.output) > 1:
        return None
    before, after = draft.types[move.inputs[0]].shape, draft.types[move.output].shape
    if before[-1:] != after[-1:] or any(draft.types[name].shape not in ((1,), after[-1:]) for name in node.inputs[1:]):
        return None
    made = draft.add(node.operator, [*move.inputs, *node.inputs[1:]], node)
    return draft.add(Reshape(after), [made], node)


def products_of_bits(pays: Accepts, packs: int) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen product of two computed uint8 matrices becomes products of a column of pixels with bits that
    the core takes apart (`ToBitPlanes`, `BitProduct`), one for each pair of matrices. What the left zero point takes off
    each column is the same for all rows: it is added to the sums. Exact.

    Args:
        pays: of types and product.
        packs: inputs whose bits lie together.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        operator = node.operator
        if not isinstance(operator, MatrixProduct) or any(name in draft.constants for name in node.inputs):
            return None
        if any(draft.types[name].dtype is not DType.UINT8 for name in node.inputs) or not pays(draft.types, node):
            return None
        result = draft.types[node.output].shape
        left, right = (_matrices(draft, node, name, result[:-2]) for name in node.inputs)
        parts = [_product(draft, node, pair, packs) for pair in zip(left, right, strict=True)]
        whole = draft.add(Concat(0), parts, node) if len(parts) > 1 else parts[0]
        return draft.add(Reshape(result), [whole], node)

    return lambda graph: run(graph, [rule])


def _matrices(draft: Draft, node: Node, value: str, lead: Shape) -> list[str]:
    """The matrices of a value in the order of the product's leading axes, those it is broadcast along repeated."""
    shape = draft.types[value].shape
    count = prod(shape[:-2])
    flat = draft.add(Reshape((count, *shape[-2:])), [value], node, value)
    parts = [flat]
    if count > 1:
        spans = [((at, 0, 0), (at + 1, *shape[-2:])) for at in range(count)]
        parts = [draft.add(Slice(start, stop, (1, 1, 1)), [flat], node, value) for start, stop in spans]
    known = np.arange(count).reshape(shape[:-2])
    return [parts[at] for at in np.broadcast_to(known, lead).reshape(-1)]


def _product(draft: Draft, node: Node, pair: tuple[str, str], packs: int) -> str:
    """One matrix times another, int32 [1, rows, 1, columns]."""
    assert isinstance(node.operator, MatrixProduct)
    left_zero, right_zero = node.operator.zero_points
    (_, rows, depth), (_, _, columns) = (draft.types[name].shape for name in pair)
    image = draft.add(Reshape((1, rows, 1, depth)), pair[:1], node)
    turned = draft.add(Transpose((0, 2, 1)), pair[1:], node)
    weights = draft.add(Reshape((columns, depth)), [turned], node)
    planes = draft.add(ToBitPlanes(packs), [weights], node)
    total = draft.add(BitProduct(right_zero), [image, planes], node)
    if not left_zero:
        return total
    sums = draft.add(Reduce(ReduceKind.SUM, (1,), right_zero), [weights], node)
    less = draft.constant(np.array([-left_zero], np.int32), DType.INT32, node.output)
    row = draft.add(Reshape((1, 1, 1, columns)), [draft.add(Binary(BinaryKind.MULTIPLY), [sums, less], node)], node)
    return draft.add(Add(), [total, row], node)
