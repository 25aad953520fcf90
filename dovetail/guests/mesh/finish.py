"""What the core of an element does behind the MAC array's sums: a row's graph, and lines for its requantisation."""

from __future__ import annotations

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.requantisation.bounds import weight_sums
from dovetail.ir.requantisation.lines import ChannelLines, lines_of
from dovetail.ir.types import Array, DType, TensorType

SUMS, FOLDED = "row_of_sums", "folded_bias"


def _weight_sums(graph: Graph, anchor: Node) -> tuple[Array, Array]:
    """`weight_sums` of a layer."""
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
    constants[FOLDED] = folded.astype(np.int32)
    types = {
        name: graph.types[name] if name in graph.constants else narrowed(graph.types[name])
        for name in graph.types
        if name in read or any(name == node.output for node in nodes)
    }
    types |= {SUMS: TensorType(row, DType.INT32), FOLDED: TensorType(folded.shape, DType.INT32)}
    inputs = (SUMS, *(name for name in graph.inputs if name in read))
    return Graph("row", inputs, graph.outputs, nodes, types, constants)


def by_lines(tail: Graph) -> bool:
    """Whether a tail begins with a requantisation to int8, so that lines may do for its first three operators."""
    if len(tail.nodes) < 3:
        return False
    scaled, clip = (node.operator for node in tail.nodes[1:3])
    alone = tail.nodes[1].inputs[0] == tail.nodes[0].output and tail.nodes[2].inputs[0] == tail.nodes[1].output
    alone = alone and all(len(tail.users()[node.output]) == 1 for node in tail.nodes[:2])
    return alone and isinstance(scaled, Requantize) and clip == Clip(-128, 127, DType.INT8)


def lines_behind(
    tail: Graph, graph: Graph, anchor: Node, first: int = 0, last: int | None = None
) -> ChannelLines | None:
    """The lines of a tail, or of its channels from `first` to before `last`, where there are any."""
    scaled = tail.nodes[1].operator if by_lines(tail) else None
    if not isinstance(scaled, Requantize):
        return None
    most = 128 if graph.types[anchor.inputs[0]].dtype.signed else 255
    folded, reach = tail.constants[FOLDED], most * np.add(*_weight_sums(graph, anchor))
    given = (np.broadcast_to(tail.constants[name], folded.shape) for name in tail.nodes[1].inputs[1:])
    multiplier, shift, folded, reach = (one[first:last] for one in (*given, folded, reach))
    return lines_of(scaled, multiplier, shift, folded, reach)
