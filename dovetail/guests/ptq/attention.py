"""Remedies for losses of attention in integers: one dense layer for queries, keys and values whose ranges differ, and
8 bits where 16 cost no engine anything."""

from __future__ import annotations

import numpy as np

from dovetail.guests.ptq.steps import RECURRENT, carries, of_table, row_source
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.activation import Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import MatrixProduct
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.operators.recurrent import Recurrent, RecurrentKind
from dovetail.ir.operators.reduction import Normalise
from dovetail.ir.pattern import apply
from dovetail.ir.rules import Draft, run
from dovetail.ir.scaling import ROWS
from dovetail.ir.types import Array
from dovetail.records import Record

_PRODUCT = apply(MatrixProduct)
_STREAM, _SUM = apply((Normalise, Add)), apply(Add)
_TIMES, _LESS = (apply(Binary(kind)) for kind in (BinaryKind.MULTIPLY, BinaryKind.SUBTRACT))
_SIGMOID = apply(Unary(UnaryKind.SIGMOID))
_GATED = apply(Recurrent, having=lambda layer: layer.kind is not RecurrentKind.LSTM)
_LARGEST = 1 << 22
"""Elements of the largest result of a layer that is looked at."""


class _ChannelSlice(Record):
    """A value that consists of some of a layer's channels, all rows of each, in the layer's order."""

    layer: Node
    number: int
    channels: tuple[int, ...]


def part_layers(graph: Graph) -> Graph:
    """Every dense layer that is only read in parts, of some channels each, as one layer for each part: each part then
    has steps of its own. No channel is computed twice."""
    parts = {name: part for node in graph.nodes for name, part in _parts(graph, node).items()}

    def apart(draft: Draft, node: Node) -> str | None:
        part = parts.get(node.output)
        if part is None or node.operator.is_view:
            return None
        names = [part.layer.inputs[0]]
        for name in part.layer.inputs[1:]:
            array: Array = np.ascontiguousarray(draft.constants[name][list(part.channels)])
            names.append(draft.constant(array, draft.types[name].dtype, f"{name}_part_{part.number}"))
        inner = draft.add(part.layer.operator, names, part.layer, f"{part.layer.output}_part_{part.number}")
        return draft.add(Reshape(draft.types[node.output].shape), [inner], node)

    return run(graph, (apart,)) if parts else graph


def _parts(graph: Graph, layer: Node) -> dict[str, _ChannelSlice]:
    """The parts a dense layer is read in, by value; none where it is read otherwise."""
    kind, types = graph.types[layer.output], [graph.types[name] for name in layer.inputs]
    static = all(name in graph.constants for name in layer.inputs[1:])
    dense = layer.operator.weight_axis is not None and layer.operator.window(types) is None
    if not (static and dense) or kind.elements > _LARGEST:
        return {}
    users, outputs, channels = graph.users(), kind.shape[-1], set[int]()
    waiting = [(layer.output, np.arange(kind.elements).reshape(kind.shape))]
    parts = dict[str, _ChannelSlice]()
    while waiting:
        value, places = waiting.pop()
        if value in graph.outputs or not users[value]:
            return {}
        for node in users[value]:
            if not node.operator.moves_only or len(node.inputs) > 1 or node.operator.filler is not None:
                return {}
            taken = node.operator.evaluate([places])
            if taken.size == places.size:
                waiting.append((node.output, taken))
                continue
            chosen = np.unique(taken % outputs)
            rows = np.arange(kind.elements // outputs)[:, None] * outputs + chosen
            if not np.array_equal(taken.reshape(-1), rows.reshape(-1)) or not channels.isdisjoint(chosen.tolist()):
                return {}
            channels.update(chosen.tolist())
            parts[node.output] = _ChannelSlice(layer, len(parts), tuple(chosen.tolist()))
    return parts if len(parts) > 1 else {}


def wide_values(graph: Graph, of_layers: bool) -> frozenset[str]:
    """The values that get 16 bits, because no layer multiplies them with weights and what is lost there stays to the
    network's end: products with rows of a table that sums read, products with a sigmoid that products read, those that
    only layer normalisations and sums read, where some normalisation does (the residual stream, and what is added to
    it), what GRUs and plain recurrent layers read, what a network gives that has normalisations or recurrent layers,
    and around the softmax of an attention the scores and the shares.

    Args:
        graph: float.
        of_layers: whether what a layer with weights gives may be among them.
    """
    wide = _streams(graph) | _of_attention(graph) | _parts_of_sums(graph)
    for node in graph.nodes:
        value = row_source(graph, node.inputs[0]) if _takes_wide(graph, node) else ""
        if value and all(_takes_wide(graph, one) for one in _readers(graph, value)):
            wide.add(value)
    if any(RECURRENT.fits(node) or ROWS.fits(node) for node in graph.nodes):
        ends = (graph.producer(name) for name in graph.outputs if not graph.users()[name])
        wide |= {node.output for node in ends if node and (_has_weights(node) or node.operator == Add())}
    return frozenset(wide - {node.output for node in graph.nodes if _has_weights(node) and not of_layers})


def _readers(graph: Graph, value: str) -> list[Node]:
    """The nodes that compute with a value."""
    nodes: list[Node] = []
    for node in graph.users()[value]:
        nodes += _readers(graph, node.output) if carries(node) else [node]
    return nodes


def _streams(graph: Graph) -> set[str]:
    """Values that only layer normalisations and sums read, from those that normalisations read on, along sums."""
    wide: set[str] = set()
    waiting = [row_source(graph, node.inputs[0]) for node in graph.nodes if ROWS.fits(node)]
    while waiting:
        value = waiting.pop()
        readers = _readers(graph, value)
        if value in wide or value in graph.constants or not all(map(_STREAM.fits, readers)):
            continue
        wide.add(value)
        waiting += [node.output for node in readers if node.operator == Add()]
        producer = graph.producer(value)
        if producer is not None and producer.operator == Add():
            waiting += [row_source(graph, name) for name in producer.inputs]
    return wide


def _parts_of_sums(graph: Graph) -> set[str]:
    """Products with rows of a table that only sums read, and products with a sigmoid that only products read."""
    wide: set[str] = set()
    for node in filter(_TIMES.fits, graph.nodes):
        sources = [graph.producer(row_source(graph, name)) for name in node.inputs]
        readers = _readers(graph, node.output)
        rotated = of_table(graph, node)
        gated = any(one is not None and _SIGMOID.fits(one) for one in sources)
        sums = rotated and all(_SUM.fits(one) or _LESS.fits(one) for one in readers)
        if node.output not in graph.outputs and (sums or (gated and all(map(_TIMES.fits, readers)))):
            wide.add(node.output)
    return wide


def _of_attention(graph: Graph) -> set[str]:
    """Scores and shares of softmaxes between two products of matrices, which nothing else reads."""
    wide: set[str] = set()
    for node in graph.nodes:
        if node.operator.gives_shares and node.output not in graph.outputs:
            scores, given = row_source(graph, node.inputs[0]), graph.producer(row_source(graph, node.inputs[0]))
            multiplied = all(_PRODUCT.fits(one) and _left(graph, one, node) for one in _readers(graph, node.output))
            if multiplied and given is not None and _PRODUCT.fits(given) and _readers(graph, scores) == [node]:
                wide |= {scores, node.output}
    return wide


_MOST_READ = 256
"""Elements of 16 bits times weights of 8 whose sum keeps within 32 bits."""


def _takes_wide(graph: Graph, node: Node) -> bool:
    """Whether a recurrent layer's integer form reads 16 bits."""
    return _GATED.fits(node) and graph.types[node.inputs[0]].shape[-1] <= _MOST_READ


def _has_weights(node: Node) -> bool:
    return node.operator.weight_axis is not None


def _left(graph: Graph, product: Node, softmax: Node) -> bool:
    """Whether a product has a softmax' shares on the left, and there only."""
    left, right = (row_source(graph, name) for name in product.inputs)
    return left == softmax.output and right != left
