"""Constant factors and offsets along the last axis of a value, such as those behind a layer normalisation."""

from __future__ import annotations

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.reduction import Normalise
from dovetail.ir.pattern import apply, occurrence
from dovetail.ir.types import Array, Shape

ROWS = apply(Normalise, having=lambda operator: not operator.summed)
"""A layer normalisation, without factor and offset."""


def rows_of_line(line: tuple[Array, Array] | None, channels: Shape) -> tuple[Array, Array] | None:
    """Factor and offset of a line (`Operator.line_of`) as rows along the last axis of its result, [1] or [C] each; None
    where they do not run along it alone."""
    fitting = [array for array in line or () if array.size in (1, *array.shape[-1:]) and array.size in (1, *channels)]
    return (fitting[0].reshape(-1), fitting[1].reshape(-1)) if len(fitting) == 2 else None


def scaled_rows(graph: Graph, node: Node) -> tuple[str, Normalise, Array, Array] | None:
    """Operand and operator of the layer normalisation whose rows a node gives scaled and moved by constants, with the
    product and the sum of these: what ONNX and Keras have as one operator. None for every other node."""
    size = graph.types[node.output].shape[-1:]
    factor, offset = np.ones(1), np.zeros(1)
    while (rows := occurrence(ROWS, graph, node)) is None:
        arrays = [known_real(graph, name) for name in node.inputs]
        line = rows_of_line(node.operator.line_of(arrays), size)
        if node.operator.is_view and graph.types[node.inputs[0]].shape[-1:] == size:
            line, arrays = (np.ones(1), np.zeros(1)), [None]
        place = next((place for place, array in enumerate(arrays) if array is None), 0)
        inner = graph.producer(node.inputs[place]) if line else None
        if line is None or inner is None:
            return None
        factor, offset, node = factor * line[0], offset + factor * line[1], inner
    return node.inputs[0], rows[ROWS], factor, offset


def known_real(graph: Graph, name: str) -> Array | None:
    """A float constant, as it is or as constant integers stand for it; None for a value computed at run time."""
    node = graph.producer(name)
    if node is None or not node.operator.dequantises or node.inputs[0] not in graph.constants:
        return graph.constants.get(name)
    return node.operator.evaluate([graph.constants[value] for value in node.inputs])
