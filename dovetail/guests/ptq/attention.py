"""Remedies for losses of attention in integers: one dense layer for queries, keys and values whose ranges differ, and
8 bits where 16 cost no engine anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dovetail.guests.ptq.steps import NORMALISE, RECURRENT, carries, source_of
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.linear import FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Pick, Reshape, Slice, Transpose
from dovetail.ir.operators.recurrent import Recurrent, RecurrentKind
from dovetail.ir.operators.reduction import Normalise
from dovetail.ir.pattern import apply, occurrence
from dovetail.ir.types import Array, TensorType

_DENSE, _PRODUCT = apply(FullyConnected), apply(MatrixProduct)
_TURNED, _PART = apply((Reshape, Transpose)), apply((Pick, Slice))
_STREAM = apply((Normalise, Add))
_GATED = apply(Recurrent, having=lambda layer: layer.kind is not RecurrentKind.LSTM)
_LARGEST = 1 << 22
"""Elements of the largest result of a layer that is looked at."""


@dataclass(frozen=True)
class _ChannelSlice:
    """A value that consists of some of a layer's channels, all rows of each, in the layer's order."""

    value: str
    channels: tuple[int, ...]


def part_layers(graph: Graph) -> Graph:
    """Every dense layer that is only read in parts, of some channels each, as one layer for each part: each part then
    has steps of its own. No channel is computed twice."""
    parts = {node.output: found for node in graph.nodes if (found := _parts(graph, node))}
    nodes, types, constants = list[Node](), dict(graph.types), dict(graph.constants)
    instead = {part.value: layer for layer, found in parts.items() for part in found}
    producers = {node.output: node for node in graph.nodes}
    for node in graph.nodes:
        layer = producers.get(instead.get(node.output, ""))
        if layer is None:
            nodes.append(node)
            continue
        ((number, part),) = (one for one in enumerate(parts[layer.output]) if one[1].value == node.output)
        names = []
        for name in layer.inputs[1:]:
            array: Array = np.ascontiguousarray(graph.constants[name][list(part.channels)])
            names.append(f"{name}_part_{number}")
            constants[names[-1]], types[names[-1]] = array, TensorType(tuple(array.shape), graph.types[name].dtype)
        inner = f"{layer.output}_part_{number}"
        types[inner] = replace(types[layer.output], shape=(*types[layer.output].shape[:-1], len(part.channels)))
        nodes.append(replace(layer, inputs=(layer.inputs[0], *names), output=inner))
        nodes.append(Node(Reshape(types[node.output].shape), (inner,), node.output, node.origin))
    return replace(graph, nodes=tuple(nodes), types=types, constants=constants) if parts else graph


def _parts(graph: Graph, layer: Node) -> tuple[_ChannelSlice, ...]:
    """The parts a dense layer is read in; none where it is read otherwise."""
    kind = graph.types[layer.output]
    static = all(name in graph.constants for name in layer.inputs[1:])
    if not static or kind.elements > _LARGEST or occurrence(_DENSE, graph, layer) is None:
        return ()
    users, outputs, channels = graph.users(), kind.shape[-1], set[int]()
    waiting = [(layer.output, np.arange(kind.elements).reshape(kind.shape))]
    parts = []
    while waiting:
        value, places = waiting.pop()
        if value in graph.outputs or not users[value]:
            return ()
        for node in users[value]:
            turned = occurrence(_TURNED, graph, node) is not None
            if not turned and occurrence(_PART, graph, node) is None:
                return ()
            taken = node.operator.evaluate([places])
            if turned:
                waiting.append((node.output, taken))
                continue
            chosen = np.unique(taken % outputs)
            rows = np.arange(kind.elements // outputs)[:, None] * outputs + chosen
            if not np.array_equal(taken.reshape(-1), rows.reshape(-1)) or not channels.isdisjoint(chosen.tolist()):
                return ()
            channels.update(chosen.tolist())
            parts.append(_ChannelSlice(node.output, tuple(chosen.tolist())))
    return tuple(parts) if len(parts) > 1 else ()


def wide_values(graph: Graph, of_layers: bool) -> frozenset[str]:
    """The values that get 16 bits, because no layer multiplies them with weights and what is lost there stays to the
    network's end: those that only layer normalisations and sums read, where some normalisation does (the residual
    stream, and what is added to it), what GRUs and plain recurrent layers read, what a network gives that has
    normalisations or recurrent layers, and around the softmax of an attention the scores and the shares.

    Args:
        graph: float.
        of_layers: whether what a layer with weights gives may be among them.
    """
    users, producers = graph.users(), graph.producers()

    def readers(value: str) -> list[Node]:
        """The nodes that compute with a value."""
        nodes: list[Node] = []
        for node in users[value]:
            nodes += readers(node.output) if carries(node) else [node]
        return nodes

    def streams(value: str) -> bool:
        ends = (occurrence(_STREAM, graph, reader) for reader in readers(value))
        return value not in graph.constants and all(end is not None for end in ends)

    wide: set[str] = set()
    waiting = [source_of(graph, node.inputs[0]) for node in graph.nodes if _centres(graph, node)]
    while waiting:
        value = waiting.pop()
        if value in wide or not streams(value):
            continue
        wide.add(value)
        producer = producers.get(value)
        sums = [node.output for node in readers(value) if node.operator == Add()]
        terms = [source_of(graph, name) for name in producer.inputs] if producer and producer.operator == Add() else []
        waiting += sums + terms
    for node in graph.nodes:
        if node.operator.gives_shares and node.output not in graph.outputs:
            scores, shared = source_of(graph, node.inputs[0]), readers(node.output)
            multiplied = all(_is_product(graph, one) and _left(graph, one, node) for one in shared)
            if multiplied and _is_product(graph, producers.get(scores)) and readers(scores) == [node]:
                wide |= {scores, node.output}
    for node in graph.nodes:
        if _takes_wide(graph, node):
            value = source_of(graph, node.inputs[0])
            wide |= {value} if all(_takes_wide(graph, one) for one in readers(value)) else set()
    if any(occurrence(RECURRENT, graph, node) is not None or _centres(graph, node) for node in graph.nodes):
        wide |= {name for name in graph.outputs if name in producers and _gives(graph, producers[name])}
    layers = {node.output for node in graph.nodes if node.operator.weight_axis is not None and not of_layers}
    return frozenset(wide - layers)


def _centres(graph: Graph, node: Node) -> bool:
    return occurrence(NORMALISE, graph, node) is not None


def _is_product(graph: Graph, node: Node | None) -> bool:
    return node is not None and occurrence(_PRODUCT, graph, node) is not None


_MOST_READ = 256
"""Elements of 16 bits times weights of 8 whose sum keeps within 32 bits."""


def _takes_wide(graph: Graph, node: Node) -> bool:
    """Whether a recurrent layer's integer form reads 16 bits."""
    return occurrence(_GATED, graph, node) is not None and graph.types[node.inputs[0]].shape[-1] <= _MOST_READ


def _gives(graph: Graph, node: Node) -> bool:
    """Whether an output is a layer's or a sum, and nothing reads it."""
    computes = node.operator.weight_axis is not None or node.operator == Add()
    return computes and not graph.users()[node.output]


def _left(graph: Graph, product: Node, softmax: Node) -> bool:
    """Whether a product has a softmax' shares on the left, and there only."""
    left, right = (source_of(graph, name) for name in product.inputs)
    return left == softmax.output and right != left
