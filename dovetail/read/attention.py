"""Attention recognised in what exporters write: scores that a computed mask limits, their softmax, a sum of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.normalisation import ROOT_MEAN_SQUARE
from dovetail.ir.operators.activation import Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind, Select
from dovetail.ir.operators.linear import MatrixProduct
from dovetail.ir.operators.movement import Concat, Reshape, Slice, Transpose, permuted
from dovetail.ir.operators.sequence import Attention, WriteRow
from dovetail.ir.pattern import Apply, Leaf, apply, occurrence, operand
from dovetail.ir.rules import Draft, Rule, RuleMatch, run
from dovetail.ir.types import DType, Shape

_SELECT, _SUM, _SOFTMAX, _PRODUCT = apply(Select), apply(Add), apply(Softmax), apply(MatrixProduct)
_TIMES, _OVER = (apply(Binary(kind)) for kind in (BinaryKind.MULTIPLY, BinaryKind.DIVIDE))
_LOW = -1e4
"""A mask adds at most this to the scores of places that are not attended to: their shares are 0 in float32."""


def _through_views(draft: Draft, value: str) -> str:
    """The value that reshapes made a value of."""
    while (node := draft.producer(value)) is not None and node.operator.is_view:
        value = node.inputs[0]
    return value


def _made(draft: Draft, value: str, pattern: Apply[Any]) -> Node | None:
    """The node that computes a value, where it is of a pattern."""
    node = draft.producer(value)
    return node if node is not None and pattern.fits(node) else None


def _number(draft: Draft, value: str) -> float | None:
    """A constant that is one number."""
    array = draft.constants.get(value)
    known = array is not None and array.dtype == np.float32 and bool((array == array.reshape(-1)[:1]).all())
    return float(array.reshape(-1)[0]) if array is not None and known and array.size else None


def _mask(draft: Draft, node: Node) -> tuple[str, bool] | None:
    """The condition of a choice between a very low number and something else, and whether it says the live places."""
    for low, live in ((2, True), (1, False)):
        number = _number(draft, node.inputs[low])
        if number is not None and number <= _LOW:
            return node.inputs[0], live
    return None


def _masked(draft: Draft, scores: str) -> tuple[str, str, bool] | None:
    """Scores as they were before a mask, the mask, and whether it says the live places."""
    source = _through_views(draft, scores)
    if (node := _made(draft, source, _SELECT)) is not None:
        found = _mask(draft, node)
        return (node.inputs[1 if found[1] else 2], *found) if found else None
    if (node := _made(draft, source, _SUM)) is None:
        return None
    for place in (0, 1):
        added = _made(draft, _through_views(draft, node.inputs[place]), _SELECT)
        found = _mask(draft, added) if added else None
        if added and found and _number(draft, added.inputs[1 if found[1] else 2]) == 0.0:
            return (node.inputs[1 - place], *found)
    return None


def _scaled(draft: Draft, scores: str) -> tuple[Node, float] | None:
    """The product of matrices that scores are, and their scale."""
    node, scale = draft.producer(scores), 1.0
    while node is not None and not _PRODUCT.fits(node):
        one, other = (_number(draft, name) for name in node.inputs[:2]) if len(node.inputs) > 1 else (None, None)
        if _TIMES.fits(node) and (one if other is None else other) is not None:
            value, factor = node.inputs[other is None], one if other is None else other
        elif _OVER.fits(node) and other:
            value, factor = node.inputs[0], 1 / other
        else:
            return None
        node, scale = draft.producer(value), scale * (factor or 0.0)
    return (node, scale) if node is not None and scale > 0 else None


def _heads(draft: Draft, value: str, shape: Shape, turned: bool) -> tuple[str, int]:
    """The earliest value that movement makes `value` of, head for head, and its number of heads K: its elements are
    [K, S, D], and those of `value` are [H, S, D] of the given shape, or `turned`, [H, D, S]. Empty where there is none.
    """
    heads, places, depth = shape
    best, at, chain = ("", 0), value, list[Node]()
    while True:
        count, rest = divmod(draft.types[at].elements, places * depth)
        if not rest and count and heads % count == 0:
            moved = np.arange(draft.types[at].elements).reshape(draft.types[at].shape)
            for step in reversed(chain):
                moved = step.operator.evaluate([moved])
            own = np.arange(heads) // (heads // count) * places * depth
            wanted = own[:, None, None] + np.arange(places * depth).reshape(places, depth)
            wanted = wanted.transpose(0, 2, 1) if turned else wanted
            best = (at, count) if np.array_equal(moved.reshape(-1), wanted.reshape(-1)) else best
        node = draft.producer(at)
        if node is None or not node.operator.moves_only or len(node.inputs) != 1:
            return best
        chain.append(node)
        at = node.inputs[0]


def _attention(draft: Draft, node: Node) -> str | None:
    if not _PRODUCT.fits(node):
        return None
    limited = _made(draft, node.inputs[0], _SELECT)  # shares of places that are not live are 0
    chosen = limited is not None and _number(draft, limited.inputs[2]) == 0.0
    shares = draft.producer(limited.inputs[1] if limited and chosen else node.inputs[0])
    softmax = occurrence(_SOFTMAX, draft, shares) if shares is not None else None
    if shares is None or softmax is None:
        return None
    masked = _masked(draft, shares.inputs[0])
    scaled = _scaled(draft, masked[0]) if masked else None
    if masked is None or scaled is None or masked[1] in draft.constants:
        return None
    product, scale = scaled
    (q, keys), values = product.inputs, node.inputs[1]
    rows, width = draft.types[node.output].shape[-2:]
    (places, depth), lead = draft.types[keys].shape[:-3:-1], draft.types[q].shape[:-2]
    heads, mask = prod(lead), draft.types[masked[1]]
    ones = {draft.types[name].elements for name in (keys, values)} == {heads * places * depth, heads * places * width}
    if not ones or mask.shape[-1:] != (places,) or mask.elements not in (places, rows * places):
        return None
    if mask.elements != places and mask.shape[-2] != rows:
        return None
    return _built(draft, node, (q, keys, values, masked[1]), scale * softmax[_SOFTMAX].beta, masked[2])


def _built(draft: Draft, node: Node, operands: tuple[str, ...], scale: float, live: bool) -> str | None:
    """Attention in place of the product with values."""
    q, keys, values, mask = operands
    rows, width = draft.types[node.output].shape[-2:]
    depth, places = draft.types[keys].shape[-2:]
    heads = prod(draft.types[q].shape[:-2])

    def shaped(value: str, shape: Shape) -> str:
        return value if draft.types[value].shape == shape else draft.add(Reshape(shape), [value], node)

    sources = []
    for value, size in ((keys, depth), (values, width)):
        source, count = _heads(draft, value, (heads, places, size), turned=value == keys)
        if not source:  # as it is, its last two axes exchanged
            source, count = shaped(value, (heads, size, places)), heads
            source = draft.add(Transpose((0, 2, 1)), [source], node)
        sources.append(shaped(source, (count, places, size)))
    if draft.types[sources[0]].shape[0] != draft.types[sources[1]].shape[0]:
        return None
    mask = _through_views(draft, mask)
    mask = shaped(mask, (draft.types[mask].elements // places, places))
    if not live:
        false = draft.constant(np.zeros((), np.bool_), DType.BOOL, mask)
        mask = draft.add(Compare(CompareKind.EQUAL), [mask, false], node)
    attended = draft.add(Attention(scale), [shaped(q, (heads, rows, depth)), *sources, mask], node)
    return shaped(attended, draft.types[node.output].shape)


_X, _ROW, _PLACE = map(operand, ("x", "row", "place"))
_BEFORE = apply(Transpose, _X)
_WRITTEN = apply(WriteRow, _BEFORE, _ROW, _PLACE, alone=True)
_BACK = apply(Transpose, _WRITTEN)


def _straight(at: RuleMatch) -> str:
    order = at[_BACK].permutation
    row = at.add(at[_BACK], _ROW)
    return at.add(WriteRow(order.index(at[_WRITTEN].axis)), _X, row, _PLACE)


_written = Rule(
    _BACK,
    _straight,
    (lambda at: permuted(at[_BEFORE].permutation, at[_BACK].permutation) == tuple(range(len(at[_BACK].permutation))),),
)
"""A transpose, a row written, the transpose back: the row written along the axis where it was."""


_COSINE, _SINE = operand("cosine"), operand("sine")
_LATER, _EARLIER = apply(Slice, _X), apply(Slice, _X)
_TURNED = apply(Concat, apply(Unary(UnaryKind.NEGATIVE), _LATER), _EARLIER)
_ROTATED = apply(
    Add(),
    apply(Binary(BinaryKind.MULTIPLY), _X, _COSINE, commutes=True),
    apply(Binary(BinaryKind.MULTIPLY), _TURNED, _SINE, commutes=True),
    commutes=True,
)


def _halves(at: RuleMatch) -> str:
    """The halves of a rotated value, each computed by itself."""

    def half(value: Leaf, later: bool) -> str:
        shape = at.type(value).shape
        start = (*(0,) * (len(shape) - 1), shape[-1] // 2 * later)
        stop = (*shape[:-1], start[-1] + shape[-1] // 2)
        return at.add(Slice(start, stop, (1,) * len(shape)), value)

    def times(one: str, other: str) -> str:
        return at.add(Binary(BinaryKind.MULTIPLY), one, other)

    x, cosine, sine = ([half(value, later) for later in (False, True)] for value in (_X, _COSINE, _SINE))
    real = at.add(Binary(BinaryKind.SUBTRACT), times(x[0], cosine[0]), times(x[1], sine[0]))
    imaginary = at.add(Add(), times(x[1], cosine[1]), times(x[0], sine[1]))
    return at.add(at[_TURNED], real, imaginary)


def _is_half(at: RuleMatch) -> bool:
    shape, widths = at.type(_X).shape, {at.type(value).shape[-1:] for value in (_X, _COSINE, _SINE)}
    middle, size = shape[-1] // 2, shape[-1]
    starts, stops = (tuple(getattr(at[part], end)[-1] for part in (_EARLIER, _LATER)) for end in ("start", "stop"))
    return (
        at[_TURNED].axis == len(shape) - 1
        and (starts, stops, len(widths)) == ((0, middle), (middle, size), 1)
        and at.type(_EARLIER).shape[:-1] == at.type(_LATER).shape[:-1] == shape[:-1]
        and set(at[_EARLIER].step + at[_LATER].step) == {1}
    )


_rotated = Rule(_ROTATED, _halves, (_is_half,))
"""x * cosine + (-later half, earlier half) * sine: the rotation of halves, each with ranges of its own."""


def with_attention(graph: Graph) -> Graph:
    """The graph with `Attention` where a mask that is computed limits scores, with transposes around a row that is
    written taken off, and with roots of mean squares as one operator."""
    known = (_WRITTEN, _SELECT, _ROOT)
    return (
        run(graph, (_attention, _written, _rotated, *ROOT_MEAN_SQUARE)) if any(map(_any(known), graph.nodes)) else graph
    )


_ROOT = apply(Unary(UnaryKind.SQUARE_ROOT))


def _any(patterns: Sequence[Apply[Any]]) -> Callable[[Node], bool]:
    """The question whether a node is of one of some patterns."""
    return lambda node: any(one.fits(node) for one in patterns)
