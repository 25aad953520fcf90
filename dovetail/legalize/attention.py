"""Attention for engines that multiply with the bits of computed matrices: scores and weighted values are the engine's.

Keys lie as pixels of all heads' channels, a place each, and values as bits, to each of which a place adds its own: what
a step writes is what the engine reads. The queries of all heads are one matrix, with nothing in the channels of other
heads, so a launch gives the scores of all. The engine computes all places, live or not; the core weighs the live ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder, Node, prune
from dovetail.ir.operators.arithmetic import Add, Clip, Offset
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.bits import BitProduct, ToBitPlanes, WriteBits
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.operators.sequence import AttentionEnd, AttentionWeights, FixedAttention, WriteRow
from dovetail.ir.pattern import apply, occurrence, operand
from dovetail.ir.types import DType, Shape

_SHIFT = 128
_OLD, _ROW, _PLACE = operand("old"), operand("row"), operand("place")
_WRITTEN = apply(WriteRow, _OLD, _ROW, _PLACE)
_ATTENTION = apply(FixedAttention, *map(operand, ("queries", "keys", "values", "live")))


@dataclass(frozen=True)
class _Written:
    """A state that one attention reads, and nothing else but what writes a row of it."""

    node: Node
    shape: Shape
    """Heads, places and elements of each."""


@dataclass(frozen=True)
class _CachedAttention:
    """An attention whose keys and values are such states."""

    operator: FixedAttention
    caches: tuple[_Written, ...]


def attention_of_bits(packs: int, pays: Callable[[int], bool]) -> Callable[[Graph], Graph]:
    """A rewrite: attention of one row to states becomes products of uint8 with bits (`ToBitPlanes`, `BitProduct`), and
    the states lie as these are read. Exact.

    Args:
        packs: inputs whose bits lie together.
        pays: whether the engine shall compute so many multiply-accumulates.
    """

    def rewrite(graph: Graph) -> Graph:
        found = dict[str, _CachedAttention]()
        for node in graph.nodes:
            types = [graph.types[name] for name in node.inputs]
            match = occurrence(_ATTENTION, graph, node)
            if match is None or types[0].shape[1] > 1 or types[1].shape[1] % packs:
                continue
            both = tuple(one for value in node.inputs[1:3] if (one := _written(graph, value)))
            if len(both) == 2 and pays(node.operator.macs(types)):
                found[node.output] = _CachedAttention(match[_ATTENTION], both)
        return _rebuilt(graph, found, packs) if found else graph

    return rewrite


def _written(graph: Graph, value: str) -> _Written | None:
    """The state that keys or values are; None where they are none, or something else reads it."""
    whole = graph.types[value].shape
    while (node := graph.producer(value)) is not None and node.operator.is_view and graph.readers(value) == 1:
        value = node.inputs[0]
    match = occurrence(_WRITTEN, graph, node) if node is not None else None
    if node is None or match is None or graph.readers(value) != 2 or graph.readers(match[_OLD]) > 1:
        return None
    shape, axis = graph.types[value].shape, match[_WRITTEN].axis
    is_state = any((read, after) == (match[_OLD], value) for read, after, _ in graph.kept)
    return _Written(node, whole) if is_state and (prod(shape[:axis]), shape[axis]) == whole[:2] else None


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
            raised = (first.reshape(one.shape).astype(np.int16) + _SHIFT).astype(np.uint8).transpose(1, 0, 2)
            rows, dtype = raised.reshape(len(raised), -1), DType.UINT8
            array = ToBitPlanes(packs).evaluate([rows.T]) if side else rows[None, :, None]
        builder.state(read, array, dtype)
    gone = {one.node.output for one, _ in states.values()}
    for node in graph.nodes:
        if node.output in found:
            _attend(builder, node, found[node.output], packs, names)
        elif gone.isdisjoint((node.output, *node.inputs)):
            inputs = [names.get(name, name) for name in node.inputs]
            names[node.output] = builder.add(node.operator, inputs, node.output, node.origin)
    for read, after, _ in graph.kept:
        builder.replace_state(read, names[after])
    return prune(replace(builder.finish([names[name] for name in graph.results]), left=graph.left))


def _attend(builder: GraphBuilder, node: Node, one: _CachedAttention, packs: int, names: dict[str, str]) -> None:
    """Add the nodes of an attention; `names` learns what they give."""
    match, both = one.operator, one.caches
    (groups, places, depth), (_, _, width) = (one.shape for one in both)

    def add(operator: Operator, *inputs: str) -> str:
        return builder.add(operator, [names.get(name, name) for name in inputs], f"{node.output}_part", node.origin)

    def raised(value: str, shape: Shape) -> str:
        """int8 as uint8 of another shape."""
        return add(Reshape(shape), add(Offset(_SHIFT, DType.UINT8), value))

    (past, key, place), (before, value, at) = (one.node.inputs for one in both)
    keys = add(WriteRow(1), past, raised(key, (1, 1, 1, groups * depth)), place)
    values = add(WriteBits(), before, raised(value, (1, groups * width)), at)
    zero = match.query_zero_point + _SHIFT
    heads = builder.type_of(names.get(node.inputs[0], node.inputs[0])).shape[0]
    own = np.arange(heads)[:, None, None] // (heads // groups) == np.arange(groups)[:, None]
    factor, other = (
        builder.constant(builder.fresh(f"{node.output}_{stem}"), array.astype(np.int32))
        for stem, array in (("channels", own), ("zero", np.array([zero])))
    )
    centred = add(Offset(-match.query_zero_point, DType.INT32), node.inputs[0])
    spread = add(Add(), add(Binary(BinaryKind.MULTIPLY), centred, factor), other)
    rows = add(Reshape((heads, groups * depth)), add(Clip(0, 255, DType.UINT8), spread))
    queries = add(ToBitPlanes(packs), rows)
    scores = add(BitProduct(zero), keys, queries)
    weights = add(AttentionWeights(match.multiplier, match.shift), scores, node.inputs[3])
    ones = builder.constant(builder.fresh(f"{node.output}_ones"), np.ones((1, 1, 1, places), np.int8))
    sums = add(BitProduct(match.value_zero_point + _SHIFT), weights, values)
    end = builder.add(AttentionEnd(groups), [sums, add(Conv2d(), weights, ones)], node.output, node.origin)
    names |= {node.output: end, both[0].node.output: keys, both[1].node.output: values}
