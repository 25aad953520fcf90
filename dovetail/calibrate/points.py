"""Which values of a float graph are quantised, and which of them share their steps."""

from __future__ import annotations

from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import DType
from dovetail.operators.activation import Clamp, Softmax
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.movement import Concat, Pad, Reshape, Slice, Transpose
from dovetail.operators.pooling import MaxPool2d
from dovetail.operators.reduction import Reduce, ReduceKind
from dovetail.operators.selection import Gather, Pick

_MOVES = (Reshape, Transpose, Slice, Pad, Pick, Gather, MaxPool2d)


def carries(node: Node) -> bool:
    """True where the result has the integers of the one float operand, so that it needs no quantisation of its own."""
    if isinstance(node.operator, Reduce):
        return node.operator.kind in (ReduceKind.MAXIMUM, ReduceKind.MINIMUM)
    return isinstance(node.operator, _MOVES)


def joins(node: Node) -> bool:
    """True where the result has the elements of several operands, which should share their steps."""
    if isinstance(node.operator, Binary):
        return node.operator.kind in (BinaryKind.MAXIMUM, BinaryKind.MINIMUM)
    return isinstance(node.operator, Concat)


def quantised_values(graph: Graph) -> tuple[str, ...]:
    """The float values that get integers: inputs and whatever is computed, after its limits (a ReLU) are applied."""
    users = graph.users()
    found = [name for name in graph.inputs if graph.types[name].dtype is DType.FLOAT32]
    for node in graph.nodes:
        moved = carries(node) and node.inputs[0] not in graph.constants  # what is picked from a table is not
        if graph.types[node.output].dtype is not DType.FLOAT32 or moved:
            continue
        readers = users[node.output]
        clamped = len(readers) == 1 and isinstance(readers[0].operator, Clamp) and node.output not in graph.outputs
        if not clamped:
            found.append(node.output)
    return tuple(found)


def fixed_ranges(graph: Graph) -> dict[str, tuple[float, float]]:
    """Ranges that are known without data: shares of a softmax."""
    return {node.output: (0.0, 1.0) for node in graph.nodes if isinstance(node.operator, Softmax)}


def shared(graph: Graph, points: tuple[str, ...]) -> dict[str, str]:
    """For each quantised value the one whose steps it takes: operands of a concatenation those of the result.

    A value read elsewhere too keeps its own.
    """
    producers, users = graph.producers(), graph.users()
    owner = {name: name for name in points}
    for node in reversed(graph.nodes):
        if not joins(node):
            continue
        whole = node.output
        while whole not in owner and len(users[whole]) == 1:
            whole = users[whole][0].output  # limits that are applied to it
        if whole not in owner:
            continue
        for value in node.inputs:
            name = value
            while name in producers and carries(producers[name]) and len(users[name]) == 1:
                name = producers[name].inputs[0]
            if name in owner and len(users[name]) == 1 and name not in graph.inputs:
                owner[name] = owner[whole]
    return owner
