"""Matrices for engines of convolutions: a dense layer of many rows is a 1x1 convolution of as many pixels, and so is a
product of two computed matrices where an engine reads bits that the core took apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, Requantize, ScaleShift
from dovetail.ir.operators.bits import BitProduct, ToBitPlanes
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Convert
from dovetail.ir.operators.fixed import FixedSoftmax16
from dovetail.ir.operators.linear import Conv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Concat, Gather, Reshape, Slice, Transpose
from dovetail.ir.operators.reduction import Reduce, ReduceKind
from dovetail.ir.operators.sequence import AttentionEnd
from dovetail.ir.pattern import apply, constant, occurrence, operand, rest
from dovetail.ir.rules import Rule, RuleMatch, rewriting, run
from dovetail.ir.types import DType, Shape
from dovetail.legalize.requantisation import Accepts, accepted, scale_shifted
from dovetail.records import Record

_X, _WEIGHTS = operand("x"), constant("weights")
_DENSE = apply(FullyConnected, _X, _WEIGHTS, rest("bias"))
_MOVE = apply((Reshape, Slice, Transpose), _X, alone=True)
_BEHIND = apply((Requantize, Clip), _MOVE, rest("parameters"))


def _moves_pixels(at: RuleMatch) -> bool:
    """Channels stay the last axis, whole, and parameters are of them."""
    before, after = at.type(_X).shape, at.type(_MOVE).shape
    if not before or before[-1:] != after[-1:] or at[_MOVE].axis_after(-1, [at.type(_X)]) != len(after) - 1:
        return False
    return all(at.type(name).shape in ((1,), after[-1:]) for name in at.others(_BEHIND))


REQUANTISED_FIRST = Rule(
    _BEHIND,
    lambda at: at.add(at[_MOVE], at.add(at[_BEHIND], _X, *at.others(_BEHIND))),
    (_moves_pixels,),
)
"""The requantisation of sums that are moved by whole pixels, or its limits, goes before the movement."""


def dense_as_convolution(chooses: Accepts) -> Callable[[Graph], Graph]:
    """A rewrite: a dense layer of many rows becomes a convolution of 1x1 over a column of pixels. Reshapes around it
    move nothing.

    Args:
        chooses: of types and layer.
    """

    def as_pixels(at: RuleMatch) -> str:
        x, weights = at.type(_X), at.array(_WEIGHTS)
        image = at.add(Reshape((1, x.elements // x.shape[-1], 1, x.shape[-1])), _X)
        taps = at.constant(weights[:, None, None], at.type(_WEIGHTS).dtype, _WEIGHTS)
        layer = Conv2d().with_zero_points(*at[_DENSE].zero_points)
        return at.add(Reshape(at.type(_DENSE).shape), at.add(layer, image, taps, *at.others(_DENSE)))

    def has_rows(at: RuleMatch) -> bool:
        return prod(at.type(_X).shape[:-1]) != 1

    return rewriting(Rule(_DENSE, as_pixels, (has_rows, accepted(chooses, _DENSE))), REQUANTISED_FIRST)


_POINT = apply((Requantize, Clip, Add, Offset), _X, rest("parameters"), alone=True)
_SEEN = apply(Reshape, _POINT)
_INNER = apply(Offset, _X)
_OUTER = apply(Offset, _INNER)
_SCALED = apply(ScaleShift, operand("sums"), rest("parameters"))
_SOURCES = apply(Conv2d, operand("image"), rest("weights")), apply(Gather, operand("table"), operand("places"))
_PARTS = apply(Concat, rest("parts"), alone=True)
_JOINED = apply((Requantize, Clip), _PARTS, rest("numbers"))
_ENDED = apply(AttentionEnd, operand("sums"), operand("totals"), alone=True)
_ENDED_THEN = apply(Requantize, _ENDED, rest("factors"), alone=True)


def _stays_whole(at: RuleMatch) -> bool:
    """Parameters are constants of one element, or of channels that stay the last axis; no engine requantises. What is
    computed before, from one value, begins with sums of an engine or with a table: another kernel of the core would
    go on with it."""
    before, after, others = at.type(_X).shape, at.type(_SEEN).shape, at.others(_POINT)
    shapes, node = {(1,), after[-1:]} if before[-1:] == after[-1:] else {(1,)}, at.draft.producer(at[_X])
    is_known = all(name in at.draft.constants and at.type(name).shape in shapes for name in others)
    while node is not None and node.operator.pointwise:
        if occurrence(_SCALED, at.draft, node) or any(name not in at.draft.constants for name in node.inputs[1:]):
            return False
        node = at.draft.producer(node.inputs[0])
    return is_known and node is not None and any(occurrence(one, at.draft, node) is not None for one in _SOURCES)


def _offset_once(at: RuleMatch) -> str | None:
    """Both offsets as one; nothing where they are 0 together."""
    x, dtype, total = at.type(_X).dtype, at[_OUTER].dtype, at[_OUTER].offset + at[_INNER].offset
    if not total and x is dtype:
        return at[_X]
    fits = x.is_integer and dtype.low <= x.low + total and x.high + total <= dtype.high
    return at.add(Offset(total, dtype), _X) if fits else None


def _of_attention(at: RuleMatch) -> bool:
    """The parts are of attention, requantised or not, and all channels have the same numbers."""
    parts = [occurrence(one, at.draft, name) for name in at.nodes[_PARTS].inputs for one in (_ENDED, _ENDED_THEN)]
    found = sum(one is not None for one in parts)
    return found == len(at.nodes[_PARTS].inputs) and all(at.type(name).elements == 1 for name in at.others(_JOINED))


def _joined_last(at: RuleMatch) -> str:
    """Each part requantised or limited by itself."""
    others = at.others(_JOINED)
    return at.add(at[_PARTS], *(at.add(at[_JOINED], name, *others) for name in at.nodes[_PARTS].inputs))


def views_first(graph: Graph) -> Graph:
    """The graph in which one kernel of the core computes what follows an engine's sums element by element. Reshapes go
    before requantisations, offsets and limits. Offsets of offsets are one. Parts of attention are joined as bytes.
    Exact."""
    seen = Rule(
        _SEEN,
        lambda at: at.add(at[_POINT], at.add(at[_SEEN], _X), *at.others(_POINT)),
        (_stays_whole,),
    )
    return run(graph, (seen, Rule(_OUTER, _offset_once), Rule(_JOINED, _joined_last, (_of_attention,))))


_LEFT, _RIGHT = operand("left"), operand("right")
_PRODUCT = apply(MatrixProduct, _LEFT, _RIGHT)
_SHARES = apply(FixedSoftmax16)


def products_of_bits(pays: Accepts, packs: int) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen product of computed matrices, uint8 or the left one int16, becomes products of a column of
    pixels with bits that the core takes apart (`ToBitPlanes`, `BitProduct`), one for each pair of matrices. What the
    left zero point takes off each column is the same for all rows: it is added to the sums. Of 16 bits the upper and
    the lower eight are multiplied on their own. Exact.

    Args:
        pays: of types and product.
        packs: inputs whose bits lie together.
    """

    def fits(at: RuleMatch) -> bool:
        left, right = at.type(_LEFT).dtype, at.type(_RIGHT).dtype
        kinds = (DType.UINT8, DType.INT16) if not at[_PRODUCT].left_zero_point else (DType.UINT8,)
        computed = not any(value in at.draft.constants for value in at.root.inputs)
        return computed and left in kinds and right is DType.UINT8 and at.type(_PRODUCT).dtype is DType.INT32

    def of_bits(at: RuleMatch) -> str:
        result, terms = at.type(_PRODUCT).shape, _terms(at)
        packed = [_packed(at, name, packs) for name in _matrices(at, at[_RIGHT], result[:-2])]
        sums = [
            [_product(at, pair, term) for pair in zip(images, packed, strict=True)]
            for term in terms
            for images in (_matrices(at, term.value, result[:-2]),)
        ]
        parts = [_raised(at, terms, of_one) for of_one in zip(*sums, strict=True)]
        return at.add(Reshape(result), at.add(Concat(0), *parts) if len(parts) > 1 else parts[0])

    return rewriting(Rule(_PRODUCT, of_bits, (fits, accepted(pays, _PRODUCT))))


class _Term(Record):
    """Bytes of a left matrix: what counts `1 << raised` times as much as its value less the zero point."""

    value: str
    zero_point: int
    raised: int


def _terms(at: RuleMatch) -> tuple[_Term, ...]:
    """The left matrix, or of 16 bits its upper and its lower bytes."""
    name = at[_LEFT]
    if at.type(_LEFT).dtype is DType.UINT8:
        return (_Term(name, at[_PRODUCT].left_zero_point, 0),)
    zero_point = 0 if occurrence(_SHARES, at.draft, name) else 128  # no share is negative
    shifted = scale_shifted(at, name, (1, zero_point << 8, 8), named=name, stem=name)
    upper = at.add(Clip(0, 255, DType.UINT8), shifted, stem=name)
    return _Term(upper, zero_point, 8), _Term(at.add(Convert(DType.UINT8), name, stem=name), 0, 0)


def _raised(at: RuleMatch, terms: Sequence[_Term], sums: Sequence[str]) -> str:
    """The sum of the terms' products, each as often as it counts."""
    total = ""
    for term, value in zip(terms, sums, strict=True):
        if term.raised:
            factor = at.constant(np.array([1 << term.raised], np.int32), DType.INT32)
            value = at.add(Binary(BinaryKind.MULTIPLY), value, factor)
        total = at.add(Add(), total, value) if total else value
    return total


def _matrices(at: RuleMatch, value: str, lead: Shape) -> list[str]:
    """The matrices of a value in the order of the product's leading axes, those it is broadcast along repeated."""
    shape = at.type(value).shape
    count = prod(shape[:-2])
    flat = at.add(Reshape((count, *shape[-2:])), value, stem=value)
    parts = [flat]
    if count > 1:
        spans = [((number, 0, 0), (number + 1, *shape[-2:])) for number in range(count)]
        parts = [at.add(Slice(start, stop, (1, 1, 1)), flat, stem=value) for start, stop in spans]
    numbers = np.arange(count).reshape(shape[:-2])
    return [parts[number] for number in np.broadcast_to(numbers, lead).reshape(-1)]


class _RightMatrix(Record):
    """A right matrix as an engine reads it."""

    rows: str
    """uint8 [columns, depth]"""
    planes: str


def _packed(at: RuleMatch, value: str, packs: int) -> _RightMatrix:
    """The bits of a matrix, whose columns become rows."""
    _, depth, columns = at.type(value).shape
    rows = at.add(Reshape((columns, depth)), at.add(Transpose((0, 2, 1)), value, stem=value), stem=value)
    return _RightMatrix(rows, at.add(ToBitPlanes(packs), rows, stem=value))


def _product(at: RuleMatch, pair: tuple[str, _RightMatrix], term: _Term) -> str:
    """One matrix less its zero point times another, int32 [1, rows, 1, columns]."""
    (value, other), zero_point = pair, at[_PRODUCT].right_zero_point
    (_, rows, depth), columns = at.type(value).shape, at.type(other.rows).shape[0]
    image = at.add(Reshape((1, rows, 1, depth)), value, stem=value)
    total = at.add(BitProduct(zero_point), image, other.planes)
    if not term.zero_point:
        return total
    sums = at.add(Reduce(ReduceKind.SUM, (1,), zero_point), other.rows)
    less = at.constant(np.array([-term.zero_point], np.int32), DType.INT32)
    return at.add(Add(), total, at.add(Reshape((1, 1, 1, columns)), at.add(Binary(BinaryKind.MULTIPLY), sums, less)))
