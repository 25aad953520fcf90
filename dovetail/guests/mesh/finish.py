"""The work of an element's core behind the MAC array's sums: a row's graph, and lines for its requantisation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.requantisation.bounds import weight_sums
from dovetail.ir.requantisation.lines import ChannelLines, lines_of
from dovetail.ir.types import Array, DType, TensorType

SUMS, FOLDED = "row_of_sums", "folded_bias"


def _weight_sums(graph: Graph, anchor: Node) -> tuple[Array, Array]:
    return weight_sums(np.moveaxis(graph.constants[anchor.inputs[1]], anchor.operator.weight_axis or 0, 0))


def tail_of(graph: Graph, anchor: Node) -> Graph | None:
    """The operators behind the sums, for one row of them; None where there are none."""
    positive, negative = _weight_sums(graph, anchor)
    folded = -anchor.operator.input_zero_point * (positive - negative)  # type: ignore[attr-defined]
    if len(anchor.inputs) > 2:
        folded = folded + graph.constants[anchor.inputs[2]]
    behind = graph.nodes[[node.output for node in graph.nodes].index(anchor.output) + 1 :]
    if not behind and not folded.any():
        return None
    shape = graph.types[anchor.output].shape
    row = (1, 1, *shape[2:]) if len(shape) == 4 else shape

    def narrowed(kind: TensorType) -> TensorType:
        return TensorType(row, kind.dtype) if kind.shape == shape else kind

    nodes = (Node(Add(), (SUMS, FOLDED), anchor.output), *behind)
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    constants = {name: graph.constants[name] for name in read if name in graph.constants}
    names = {*read, *(node.output for node in nodes)}
    types = {n: kind if n in constants else narrowed(kind) for n, kind in graph.types.items() if n in names}
    types |= {SUMS: TensorType(row, DType.INT32), FOLDED: TensorType(folded.shape, DType.INT32)}
    constants[FOLDED] = folded.astype(np.int32)
    inputs = (SUMS, *(name for name in graph.inputs if name in read))
    return Graph("row", inputs, graph.outputs, nodes, types, constants)


def requantisation_of(tail: Graph) -> Requantize | None:
    """The requantisation to int8 a tail consists of behind its first addition, or begins with; None for others."""
    first, users = tail.nodes[:3], tail.users()
    links = pairwise(first)
    if len(first) < 3 or first[2].operator != Clip(-128, 127, DType.INT8):
        return None
    if any(after.inputs[0] != node.output or len(users[node.output]) > 1 for node, after in links):
        return None
    operator = first[1].operator
    return operator if isinstance(operator, Requantize) else None


def lines_behind(
    tail: Graph, graph: Graph, anchor: Node, first: int = 0, last: int | None = None
) -> ChannelLines | None:
    """The lines of a tail, or of its channels from `first` to before `last`; None if there are none."""
    operator = requantisation_of(tail)
    if operator is None:
        return None
    most = 128 if graph.types[anchor.inputs[0]].dtype.signed else 255
    folded, reach = tail.constants[FOLDED], most * np.add(*_weight_sums(graph, anchor))
    parameters = (np.broadcast_to(tail.constants[name], folded.shape) for name in tail.nodes[1].inputs[1:])
    return lines_of(operator, *(one[first:last] for one in (*parameters, folded, reach)))
