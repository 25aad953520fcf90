"""Matrices for engines of convolutions: a dense layer of many rows is a 1x1 convolution of as many pixels, and so is a
product of two computed matrices where an engine reads bits that the core took apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, ScaleShift
from dovetail.ir.operators.bits import BitProduct, ToBitPlanes
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Convert
from dovetail.ir.operators.fixed import FixedSoftmax16
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
    """The requantisation of sums that are moved by whole pixels, or its limits: before the movement."""
    requantises = isinstance(node.operator, Requantize | Clip)
    move = draft.made_by(node.inputs[0], Reshape, Slice, Transpose) if requantises else None
    if move is None or draft.users(move.output) > 1:
        return None
    before, after = draft.types[move.inputs[0]].shape, draft.types[move.output].shape
    turned = isinstance(move.operator, Transpose) and move.operator.permutation[-1] != len(before) - 1
    if turned or before[-1:] != after[-1:]:
        return None
    if any(draft.types[name].shape not in ((1,), after[-1:]) for name in node.inputs[1:]):
        return None
    made = draft.add(node.operator, [*move.inputs, *node.inputs[1:]], node)
    return draft.add(move.operator, [made], node)


def products_of_bits(pays: Accepts, packs: int) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen product of computed matrices, uint8 or the left one int16, becomes products of a column of
    pixels with bits that the core takes apart (`ToBitPlanes`, `BitProduct`), one for each pair of matrices. What the
    left zero point takes off each column is the same for all rows: it is added to the sums. Of 16 bits the upper and
    the lower eight are multiplied on their own. Exact.

    Args:
        pays: of types and product.
        packs: inputs whose bits lie together.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        operator = node.operator
        if not isinstance(operator, MatrixProduct) or any(name in draft.constants for name in node.inputs):
            return None
        left, right = (draft.types[name].dtype for name in node.inputs)
        kinds = (DType.UINT8, DType.INT16) if not operator.left_zero_point else (DType.UINT8,)
        fits = left in kinds and right is DType.UINT8 and draft.types[node.output].dtype is DType.INT32
        if not fits or not pays(draft.types, node):
            return None
        result = draft.types[node.output].shape
        terms = _terms(draft, node)
        others = _matrices(draft, node, node.inputs[1], result[:-2])
        packed = [_packed(draft, node, name, packs) for name in others]
        sums = [
            [_product(draft, node, pair, term) for pair in zip(images, packed, strict=True)]
            for term in terms
            for images in (_matrices(draft, node, term.value, result[:-2]),)
        ]
        parts = [_raised(draft, node, terms, of_one) for of_one in zip(*sums, strict=True)]
        whole = draft.add(Concat(0), parts, node) if len(parts) > 1 else parts[0]
        return draft.add(Reshape(result), [whole], node)

    return lambda graph: run(graph, [rule])


@dataclass(frozen=True)
class _Term:
    """Bytes of a left matrix: what counts `1 << raised` times as much as its value less the zero point."""

    value: str
    zero_point: int
    raised: int


def _terms(draft: Draft, node: Node) -> tuple[_Term, ...]:
    """The left matrix, or of 16 bits its upper and its lower bytes."""
    assert isinstance(node.operator, MatrixProduct)
    name = node.inputs[0]
    if draft.types[name].dtype is DType.UINT8:
        return (_Term(name, node.operator.left_zero_point, 0),)
    shares = draft.made_by(name, FixedSoftmax16) is not None  # none is negative
    zero_point = 0 if shares else 128
    numbers = [draft.constant(np.array([number], np.int32), DType.INT32, name) for number in (1, zero_point << 8, 8)]
    upper = draft.add(Clip(0, 255, DType.UINT8), [draft.add(ScaleShift(), [name, *numbers], node, name)], node, name)
    return _Term(upper, zero_point, 8), _Term(draft.add(Convert(DType.UINT8), [name], node, name), 0, 0)


def _raised(draft: Draft, node: Node, terms: Sequence[_Term], sums: Sequence[str]) -> str:
    """The sum of the terms' products, each as often as it counts."""
    total = ""
    for term, value in zip(terms, sums, strict=True):
        if term.raised:
            factor = draft.constant(np.array([1 << term.raised], np.int32), DType.INT32, node.output)
            value = draft.add(Binary(BinaryKind.MULTIPLY), [value, factor], node)
        total = draft.add(Add(), [total, value], node) if total else value
    return total


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


@dataclass(frozen=True)
class _RightMatrix:
    """A right matrix as an engine reads it."""

    rows: str
    """uint8 [columns, depth]"""
    planes: str


def _packed(draft: Draft, node: Node, value: str, packs: int) -> _RightMatrix:
    """The bits of a matrix, whose columns become rows."""
    _, depth, columns = draft.types[value].shape
    turned = draft.add(Transpose((0, 2, 1)), [value], node, value)
    rows = draft.add(Reshape((columns, depth)), [turned], node, value)
    return _RightMatrix(rows, draft.add(ToBitPlanes(packs), [rows], node, value))


def _product(draft: Draft, node: Node, pair: tuple[str, _RightMatrix], term: _Term) -> str:
    """One matrix less its zero point times another, int32 [1, rows, 1, columns]."""
    assert isinstance(node.operator, MatrixProduct)
    value, other = pair
    (_, rows, depth), columns = draft.types[value].shape, draft.types[other.rows].shape[0]
    image = draft.add(Reshape((1, rows, 1, depth)), [value], node, value)
    total = draft.add(BitProduct(node.operator.right_zero_point), [image, other.planes], node)
    if not term.zero_point:
        return total
    sums = draft.add(Reduce(ReduceKind.SUM, (1,), node.operator.right_zero_point), [other.rows], node)
    less = draft.constant(np.array([-term.zero_point], np.int32), DType.INT32, node.output)
    row = draft.add(Reshape((1, 1, 1, columns)), [draft.add(Binary(BinaryKind.MULTIPLY), [sums, less], node)], node)
    return draft.add(Add(), [total, row], node)
