"""Attention for engines that multiply with the bits of computed matrices: scores and weighted values are the engine's.

Keys lie as pixels of all heads' channels, a place each, and values as bits, to each of which a place adds its own: what
a step writes is what the engine reads. The queries of all heads are one matrix, with nothing in the channels of other
heads, so a launch gives the scores of all. The engine computes all places, live or not; the core weighs the live ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder, Node, prune
from dovetail.ir.operators.arithmetic import Offset
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.bits import BitProduct, SpreadBits, ToBitPlanes, WriteBits
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat, Reshape, Slice, Transpose
from dovetail.ir.operators.sequence import AttentionEnd, AttentionWeights, FixedAttention, WriteRow
from dovetail.ir.pattern import apply, occurrence, operand
from dovetail.ir.types import Array, DType, Shape, TensorType
from dovetail.records import Record

_SHIFT = 128
_TURN = Transpose((1, 0, 2))
_OLD, _ROW, _PLACE = operand("old"), operand("row"), operand("place")
_WRITTEN = apply(WriteRow, _OLD, _ROW, _PLACE)
_ATTENTION = apply(FixedAttention, *map(operand, ("queries", "keys", "values", "live")))


class _Written(Record):
    """A state that one attention reads, and nothing else but what writes a row of it."""

    node: Node
    shape: Shape
    """Heads, places and elements of each."""
    turned: bool
    """Whether its places lie first."""


class _CachedAttention(Record):
    """An attention whose keys and values are such states."""

    operator: FixedAttention
    caches: tuple[_Written, ...]


def attention_of_bits(packs: int, pays: Callable[[int], bool]) -> Callable[[Graph], Graph]:
    """A rewrite: attention to states becomes products of uint8 with bits (`ToBitPlanes`, `BitProduct`), of some rows at
    a time, and the states lie as these are read. Exact.

    Args:
        packs: inputs whose bits lie together.
        pays: whether the engine shall compute so many multiply-accumulates.
    """

    def rewrite(graph: Graph) -> Graph:
        found = dict[str, _CachedAttention]()
        for node in graph.nodes:
            types = [graph.types[name] for name in node.inputs]
            match = occurrence(_ATTENTION, graph, node)
            if match is None or types[1].shape[1] % packs:
                continue
            both = tuple(one for value in node.inputs[1:3] if (one := _written(graph, value)))
            if len(both) == 2 and pays(node.operator.macs(types)):
                found[node.output] = _CachedAttention(match[_ATTENTION], both)
        return _rebuilt(graph, found, packs) if found else graph

    return rewrite


def _written(graph: Graph, value: str) -> _Written | None:
    """The state that keys or values are; None where they are none, or something else reads it."""
    whole, turned = graph.types[value].shape, False
    while (node := graph.producer(value)) is not None and graph.readers(value) == 1:
        if node.operator == _TURN and not turned and graph.types[node.output].shape == whole:
            turned = True
        elif not node.operator.is_view:
            break
        value = node.inputs[0]
    match = occurrence(_WRITTEN, graph, node) if node is not None else None
    if node is None or match is None or graph.readers(value) != 2 or graph.readers(match[_OLD]) > 1:
        return None
    shape, axis = graph.types[value].shape, match[_WRITTEN].axis
    is_state = any((read, after) == (match[_OLD], value) for read, after, _ in graph.kept)
    lies = (prod(shape[:axis]), shape[axis]) == (1 if turned else whole[0], whole[1])
    return _Written(node, whole, turned) if is_state and lies else None


def _rebuilt(graph: Graph, found: Mapping[str, _CachedAttention], packs: int) -> Graph:
    """The graph with some attention as products, and other states."""
    builder, names = GraphBuilder(graph.name), dict[str, str]()
    for name in graph.given:
        builder.input(name, graph.types[name])
    for name, array in graph.constants.items():
        builder.constant(name, array, graph.types[name].dtype)
    states = {one.node.inputs[0]: (one, side) for both in found.values() for side, one in enumerate(both.caches)}
    for read, _, first in graph.kept:
        array, dtype = first, graph.types[read].dtype
        if read in states:
            one, side = states[read]
            held = first.astype(np.int16) + _SHIFT
            held = held if one.turned else held.reshape(one.shape).transpose(1, 0, 2)
            rows, dtype = held.astype(np.uint8).reshape(one.shape[1], -1), DType.UINT8
            array = ToBitPlanes(packs).evaluate([rows.T]) if side else rows[None, :, None]
        builder.state(read, array, dtype)
    gone = {one.node.output for one, _ in states.values()}
    for node in graph.nodes:
        if node.output in found:
            _attend(builder, node, found[node.output], packs, names)
        elif gone.isdisjoint((node.output, *node.inputs)):
            inputs = [names.get(name, name) for name in node.inputs]
            names[node.output] = builder.add(node.operator, inputs, node.output, node.origin)
        else:
            gone.add(node.output)
    for read, after, _ in graph.kept:
        builder.replace_state(read, names[after])
    return prune(replace(builder.finish([names[name] for name in graph.results]), left=graph.left))


_MOST_SCORES = 1 << 13
"""Scores that are computed at a time: they and their weights lie beside the caches."""


class _Parts(Record):
    """A graph to which the nodes of an attention are added."""

    builder: GraphBuilder
    node: Node
    names: Mapping[str, str]
    """Values of the graph before, by name."""

    def add(self, operator: Operator, *inputs: str) -> str:
        """Add a node."""
        names = [self.names.get(name, name) for name in inputs]
        return self.builder.add(operator, names, f"{self.node.output}_part", self.node.origin)

    def kind(self, value: str) -> TensorType:
        """The type of a value."""
        return self.builder.type_of(self.names.get(value, value))

    def constant(self, stem: str, array: Array) -> str:
        """Add a constant."""
        return self.builder.constant(self.builder.fresh(f"{self.node.output}_{stem}"), array)

    def raised(self, value: str, shape: Shape, one: _Written, count: int) -> str:
        """`count` rows of int8 for each of the heads as rows of uint8 for all heads, of a shape."""
        raised = self.add(Offset(_SHIFT, DType.UINT8), value)
        if count > 1 and not one.turned:
            raised = self.add(_TURN, self.add(Reshape((one.shape[0], count, one.shape[2])), raised))
        return self.add(Reshape(shape), raised)

    def rows(self, value: str, axis: int, first: int, stop: int) -> str:
        """Some of the rows of a value."""
        shape = self.kind(value).shape
        if stop - first == shape[axis]:
            return value
        start, end = (
            tuple(at if place == axis else other for place, other in enumerate(whole))
            for at, whole in ((first, (0,) * len(shape)), (stop, shape))
        )
        return self.add(Slice(start, end, (1,) * len(shape)), value)


def _attend(builder: GraphBuilder, node: Node, one: _CachedAttention, packs: int, names: dict[str, str]) -> None:
    """Add the nodes of an attention; `names` learns what they give."""
    draft, both = _Parts(builder, node, names), one.caches
    (groups, places, depth), (_, _, width) = (one.shape for one in both)
    (past, key, place), (before, value, at) = (one.node.inputs for one in both)
    count = draft.kind(place).elements
    row_of_keys = draft.raised(key, (1, count, 1, groups * depth), both[0], count)
    keys = draft.add(WriteRow(1), past, row_of_keys, place)
    row_of_values = draft.raised(value, (count, groups * width), both[1], count)
    values = draft.add(WriteBits(), before, row_of_values, at)
    heads, rows, _ = draft.kind(node.inputs[0]).shape
    each = max(1, _MOST_SCORES // (heads * places))
    zero = one.operator.query_zero_point + _SHIFT
    ones = draft.constant("ones", np.ones((1, 1, 1, places), np.int8))
    spans = [(first, min(first + each, rows)) for first in range(0, rows, each)]
    scores, sums, parts = list[str](), list[tuple[str, str]](), list[str]()
    for turn in range(len(spans) + 2):  # the engine computes scores while the core weighs those before
        if turn < len(spans):
            queries = draft.add(
                SpreadBits(packs, groups, heads // groups, zero), draft.rows(node.inputs[0], 1, *spans[turn])
            )
            scores.append(draft.add(BitProduct(zero), keys, queries))
        if 0 < turn <= len(spans):
            live = draft.rows(node.inputs[3], 0, *spans[turn - 1])
            weights = draft.add(AttentionWeights(one.operator.multiplier, one.operator.shift), scores[turn - 1], live)
            total = draft.add(BitProduct(one.operator.value_zero_point + _SHIFT), weights, values)
            sums.append((total, draft.add(Conv2d(), weights, ones)))
        if turn > 1:
            first, stop = spans[turn - 2]
            end, inputs = AttentionEnd(groups, heads // groups, stop - first), sums[turn - 2]
            whole = len(spans) == 1
            parts.append(builder.add(end, inputs, node.output, node.origin) if whole else draft.add(end, *inputs))
    found = parts[0] if len(parts) == 1 else builder.add(Concat(1), parts, node.output, node.origin)
    names |= {node.output: found, both[0].node.output: keys, both[1].node.output: values}
