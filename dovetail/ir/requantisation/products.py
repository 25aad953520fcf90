"""Requantised products of a table's value and a byte as one product: `(table[x] * (y + o) + c) >> s`, proved on every
pair of operands. A gate of a feed-forward layer is such a product: the table is its activation.

The scale of the requantisation goes into the table. Of two 8-bit operands there are 65,536 pairs: all of it is computed
for each at compile time, and numbers near the real ones are sought with which the product agrees everywhere. Nothing is
assumed of how the requantisation rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import floor, log2

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, Lookup, Offset, Requantize
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.pattern import Occurrence, apply, constant, occurrence, operand
from dovetail.ir.requantisation.bounds import Range
from dovetail.ir.types import Array
from dovetail.records import Record

_X, _Y = operand("x"), operand("y")
_TABLE, _MULTIPLIER, _SHIFT = constant("table"), constant("multiplier"), constant("shift")
_LOOKUP = apply(Lookup, _X, _TABLE, alone=True)
_LEFT, _RIGHT = apply(Offset, _LOOKUP, alone=True), apply(Offset, _Y, alone=True)
_PRODUCTS = apply(Binary, _LEFT, _RIGHT, alone=True), apply(Binary, _RIGHT, _LEFT, alone=True)
_SCALED = tuple(apply(Requantize, one, _MULTIPLIER, _SHIFT, alone=True) for one in _PRODUCTS)
_LIMITED = tuple(apply(Clip, one) for one in _SCALED)
_MOST_SHIFT = 30
_NEIGHBOURS = (0, 1, -1, 2, -2, 3, -3)
"""Steps from the nearest number to those that are tried."""


class TableProduct(Record):
    """(table[x] * (y + offset) + addition) >> shift, to be limited; no part of it leaves 32 bits."""

    x: str
    y: str
    inner: frozenset[str]
    """Values between the operands and what is limited."""
    table: Array
    """int32, from the least value of x on."""
    offset: int
    addition: int
    shift: int
    low: int
    """The least value before it is limited."""
    high: int
    """The greatest."""


def table_products(graph: Graph, tree: Sequence[Node]) -> Mapping[str, TableProduct]:
    """The parts of a tree of pointwise nodes that are one such product, by the limited value."""
    return {node.output: one for node in tree if node.operator.limited_to for one in _products(graph, tree, node)}


def _products(graph: Graph, tree: Sequence[Node], clip: Node) -> Iterator[TableProduct]:
    members = {node.output for node in tree}
    for limited, scaled, product in zip(_LIMITED, _SCALED, _PRODUCTS, strict=True):
        match = occurrence(limited, graph, clip)
        if match is None or not members.issuperset(node.output for node in match.nodes.values()):
            continue
        kinds = [graph.types[match[one]] for one in (_X, _Y)]
        numbers = [graph.constants[match[one]] for one in (_MULTIPLIER, _SHIFT)]
        if any(kind.dtype.bits != 8 for kind in kinds) or kinds[0].shape != kinds[1].shape or numbers[0].size > 1:
            continue
        if match[product] != Binary(BinaryKind.MULTIPLY):
            continue
        steps = match[scaled], *(int(one[0]) for one in numbers), match[limited]
        values = graph.constants[match[_TABLE]].astype(np.int32) + match[_LEFT].offset
        others = np.arange(kinds[1].dtype.low, kinds[1].dtype.high + 1, dtype=np.int32) + match[_RIGHT].offset
        found = _numbers(steps, tuple(values.tolist()), tuple(others.tolist()))
        if found is not None:
            yield _of(match, found, others, frozenset(node.output for node in match.nodes.values()) - {clip.output})


_Numbers = tuple[tuple[int, ...], int, int]
"""Table, addition and shift."""


def _of(match: Occurrence, numbers: _Numbers, others: Array, inner: frozenset[str]) -> TableProduct:
    table, addition, shift = np.array(numbers[0], np.int32), *numbers[1:]
    ends = [int(factor) * int(other) for factor in (table.min(), table.max()) for other in (others[0], others[-1])]
    low, high = ((reach(ends) + addition) >> shift for reach in (min, max))
    return TableProduct(match[_X], match[_Y], inner, table, match[_RIGHT].offset, addition, shift, low, high)


@lru_cache(maxsize=64)
def _numbers(
    steps: tuple[Requantize, int, int, Clip], values: tuple[int, ...], others: tuple[int, ...]
) -> _Numbers | None:
    """Numbers that agree on all pairs; None where there are none near the real ones."""
    requantize, multiplier, down, clip = steps
    constants = [np.array([number], np.int32) for number in (multiplier, down)]
    slope = requantize.slope_of([None, *constants])
    left, right = np.array(values, np.int64)[:, None], np.array(others, np.int64)
    products = left * right
    if slope is None or requantize.input_zero_point or requantize.left_shift or abs(products).max() >= 1 << 31:
        return None
    wanted = clip.evaluate([requantize.evaluate([products.astype(np.int32), *constants])]).astype(np.int64)
    reach = float(abs(products).max()) * slope + abs(requantize.output_zero_point) + 2
    shift = min(_MOST_SHIFT, floor(30.9 - log2(reach)))
    if shift < 1:
        return None
    nearest = np.rint(left * slope * 2.0**shift).astype(np.int64)
    addition = (requantize.output_zero_point << shift) + (1 << (shift - 1))
    found, left_over = nearest.copy(), np.ones(len(values), bool)
    for near in _NEIGHBOURS:
        total = (nearest + near) * right + addition
        agrees = (np.clip(total >> shift, *_limits(clip)) == wanted).all(1) & (abs(total) < 1 << 31).all(1)
        found[left_over & agrees] += near
        left_over &= ~agrees
    return None if left_over.any() else (tuple(found[:, 0].tolist()), addition, shift)


def _limits(clip: Clip) -> Range:
    return clip.low, clip.high
