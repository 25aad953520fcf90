"""Operators that only move elements, as copies that the DMA, or the core without one, can do."""

from __future__ import annotations

from dovetail.graph.graph import Graph
from dovetail.graph.types import TensorType
from dovetail.operators.movement import Concat, Pad, Patches, Relayout, Reshape, Slice, Transpose
from dovetail.program.ir import Copy, View, dense_view


def copies(layer: int, graph: Graph, operands: dict[str, View], result: View) -> tuple[Copy, ...] | None:
    """The copies that compute a one-node graph, None when copying cannot.

    Args:
        layer: index of the layer the copies belong to.
        graph: the region.
        operands: where each runtime operand lies; row-major but for pads, concatenations and relayouts.
        result: where the result goes, dense.
    """
    if len(graph.nodes) != 1 or any(name in graph.constants for name in graph.nodes[0].inputs):
        return None
    node = graph.nodes[0]
    source = operands[node.inputs[0]]
    operator = node.operator
    if isinstance(operator, Pad):
        sides = (operator.before[0], operator.after[0], operator.before[-1], operator.after[-1])
        one_byte = source.type.dtype.numpy.itemsize == 1
        if len(operator.before) != 4 or any(sides) or source.type.shape[0] != 1 or not one_byte:
            return None
        return (Copy(layer, source, result, operator.before, int(operator.value)),)
    if isinstance(operator, Relayout):
        return (Copy(layer, source, result),)
    if isinstance(operator, Patches):
        return _patches(layer, operator, source, result)
    if isinstance(operator, Reshape):
        return (Copy(layer, dense_view(source.buffer, result.type, source.offset), result),)
    if isinstance(operator, Transpose):
        strides = tuple(source.strides[axis] for axis in operator.permutation)
        return (Copy(layer, View(source.buffer, result.type, strides, source.offset), result),)
    if isinstance(operator, Slice):
        start = sum(a * stride for a, stride in zip(operator.start, source.strides, strict=True))
        strides = tuple(step * stride for step, stride in zip(operator.step, source.strides, strict=True))
        return (Copy(layer, View(source.buffer, result.type, strides, source.offset + start), result),)
    if isinstance(operator, Concat):
        return _concat(layer, operator, [operands[name] for name in node.inputs], result)
    return None


def _patches(layer: int, operator: Patches, source: View, result: View) -> tuple[Copy, ...] | None:
    """One copy per window row: its columns and channels lie side by side in the image."""
    if operator.dilation[1] != 1 or source.type.shape[0] != 1:
        return None
    _, height, width, _ = result.type.shape
    depth = operator.kernel[1] * source.type.shape[3]
    kind = TensorType((1, height, width, depth), source.type.dtype)
    strides = (
        source.strides[0],
        source.strides[1] * operator.stride[0],
        source.strides[2] * operator.stride[1],
        source.strides[3],
    )
    size = source.type.dtype.numpy.itemsize
    made = []
    for row in range(operator.kernel[0]):
        start = source.offset + row * operator.dilation[0] * source.strides[1]
        window = View(source.buffer, kind, strides, start)
        target = View(result.buffer, kind, result.strides, result.offset + row * depth * size)
        made.append(Copy(layer, window, target))
    return tuple(made)


def _concat(layer: int, operator: Concat, sources: list[View], result: View) -> tuple[Copy, ...]:
    made, start = [], 0
    for source in sources:
        size = source.type.shape[operator.axis]
        box = tuple(
            (start, start + size) if axis == operator.axis else (0, length)
            for axis, length in enumerate(result.type.shape)
        )
        made.append(Copy(layer, source, result.part(box)))
        start += size
    return tuple(made)
