"""Parts of values whose elements lie side by side: slicing them off and joining them can be left to where they lie."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Box, Shape, box_shape, full_box
from dovetail.operators.movement import Concat, Reshape, Slice

ALIGNMENT = 8
"""Bytes: where the kernels of the core take their operands and results to begin."""


def is_stretch(box: Box, shape: Shape) -> bool:
    """True when the elements of a box lie side by side in a row-major value."""
    cut = [axis for axis, (span, size) in enumerate(zip(box, shape, strict=True)) if span != (0, size)]
    return not cut or all(size == 1 for size in box_shape(box)[: cut[-1]])


def joined_boxes(graph: Graph, node: Node) -> list[Box]:
    """The part of the result each operand of a concatenation becomes."""
    assert isinstance(node.operator, Concat)
    whole, axis, start, found = full_box(graph.types[node.output].shape), node.operator.axis, 0, []
    for value in node.inputs:
        size = graph.types[value].shape[axis]
        found.append((*whole[:axis], (start, start + size), *whole[axis + 1 :]))
        start += size
    return found


def sliced_box(node: Node) -> Box:
    """The part of its operand a slice is, every step left out of account."""
    assert isinstance(node.operator, Slice)
    return tuple(zip(node.operator.start, node.operator.stop, strict=True))


def moves_nothing(graph: Graph, node: Node) -> bool:
    """True for a slice that can be where it lies in its operand, and for a concatenation whose operands can be computed
    where they lie in its result, on a core alone with every value row-major."""
    if node.output in graph.outputs or any(value in graph.constants for value in node.inputs):
        return False
    if isinstance(node.operator, Slice):
        parts = [sliced_box(node)]
        return set(node.operator.step) == {1} and _lie_apart(graph, node.inputs[0], parts)
    return (
        isinstance(node.operator, Concat)
        and all(_is_computed_for(graph, value, node) for value in node.inputs)
        and _lie_apart(graph, node.output, joined_boxes(graph, node))
    )


def _lie_apart(graph: Graph, value: str, parts: Sequence[Box]) -> bool:
    """Every part of a value is a stretch that begins at a place kernels take."""
    kind = graph.types[value]
    size = kind.dtype.numpy.itemsize
    for box in parts:
        start = 0
        for (first, _), length in zip(box, kind.shape, strict=True):
            start = start * length + first
        if kind.dtype.bits < 8 or not is_stretch(box, kind.shape) or start * size % ALIGNMENT:
            return False
    return True


def _is_computed_for(graph: Graph, value: str, node: Node) -> bool:
    """A kernel writes the value, and only this node reads it, once."""
    maker = next((other for other in graph.nodes if other.output == value), None)
    users = [other for other in graph.nodes if value in other.inputs]
    made = maker is not None and not isinstance(maker.operator, Reshape | Slice | Concat)
    return made and users == [node] and node.inputs.count(value) == 1 and value not in graph.outputs
