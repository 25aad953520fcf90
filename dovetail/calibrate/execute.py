"""Runs a float graph on many samples at once, in float32.

Every value computed at run time has a sample axis before its own axes: [N, *shape]. What is expensive (sums of
products) or frequent has a rule that takes all samples together; every other operator computes one after the other
by its own meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

import numpy as np

from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Array, TensorType
from dovetail.operators.activation import Clamp, LogSoftmax, Softmax, Unary
from dovetail.operators.arithmetic import Add
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Concat, Pad, Reshape, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d
from dovetail.operators.quantization import Dequantize, Quantize

MOST_COLUMNS = 1 << 23
"""Most elements of the windows of a convolution that are laid out at a time."""

Values = dict[str, Array]
"""Arrays by value name: [N, *shape] at run time, [*shape] of constants."""

Visit = Callable[[str, Array], None]
"""Told each value once it is computed."""

_Rule = Callable[[Operator, Sequence[Array]], Array]


def run(
    graph: Graph,
    inputs: Mapping[str, Array],
    keep: Collection[str] = (),
    visit: Visit = lambda name, array: None,
) -> Values:
    """Compute a graph on samples.

    Args:
        graph: float operators; Quantize and Dequantize may stand among them.
        inputs: [N, *shape] for each input of the graph.
        keep: values to return beside the outputs.
        visit: told every input and computed value, [N, *shape].
    """
    values: Values = dict(inputs)
    for name in graph.inputs:
        visit(name, inputs[name])
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
    wanted = {*graph.outputs, *keep}
    for index, node in enumerate(graph.nodes):
        values[node.output] = compute(graph, node, values)
        if sampled(graph, values, node.output):
            visit(node.output, values[node.output])
        for name in node.inputs:
            if last[name] == index and name not in wanted:
                values.pop(name, None)
    return {name: values[name] for name in (*graph.outputs, *keep)}


def sampled(graph: Graph, values: Mapping[str, Array], name: str) -> bool:
    """True for a value with a sample axis."""
    return name not in graph.constants and values[name].ndim == len(graph.types[name].shape) + 1


def compute(graph: Graph, node: Node, values: Mapping[str, Array]) -> Array:
    """The result of one node on samples; without run-time operands it has no sample axis."""
    operands = [graph.constants[name] if name in graph.constants else values[name] for name in node.inputs]
    batched = [name not in graph.constants and sampled(graph, values, name) for name in node.inputs]
    if not any(batched):
        return node.operator.evaluate(operands)
    rule = _RULES.get(type(node.operator))
    if rule is not None and _together(node.operator, [graph.types[name] for name in node.inputs], batched):
        return rule(node.operator, operands)
    count = next(len(array) for array, many in zip(operands, batched, strict=True) if many)
    each = [
        node.operator.evaluate([a[i] if many else a for a, many in zip(operands, batched, strict=True)])
        for i in range(count)
    ]
    return np.stack(each)


def _together(operator: Operator, types: Sequence[TensorType], batched: Sequence[bool]) -> bool:
    """Whether the operator's rule may take the sample axis as one more leading axis."""
    if isinstance(operator, Concat):
        return all(batched)
    ranks = [len(kind.shape) for kind in types]
    if isinstance(operator, Add | Binary):
        top = max(ranks)
        return all(rank == top for rank, many in zip(ranks, batched, strict=True) if many)
    return batched[0] and not any(batched[1:])


def columns(operator: Conv2d | DepthwiseConv2d, x: Array, kernel: tuple[int, int]) -> Array:
    """Every window of images x [N, H, W, C], a view: [N, OH, OW, C, KH, KW]."""
    span = tuple((k - 1) * d + 1 for k, d in zip(kernel, operator.dilation, strict=True))
    view = np.lib.stride_tricks.sliding_window_view(x, span, axis=(1, 2))
    (down, right), (rows, cols) = operator.stride, operator.dilation
    return view[:, ::down, ::right, :, ::rows, ::cols]


def _flat_images(x: Array) -> Array:
    return x.reshape(-1, *x.shape[-3:])


def _convolution(operator: Operator, operands: Sequence[Array]) -> Array:
    assert isinstance(operator, Conv2d)
    images, w = _flat_images(operands[0]), operands[1]
    groups = images.shape[3] // w.shape[3]
    depth, outputs = w.shape[3], w.shape[0] // groups
    probe = columns(operator, images[:1], (w.shape[1], w.shape[2])).shape
    result = np.empty((len(images), *probe[1:3], w.shape[0]), np.float32)
    step = max(1, MOST_COLUMNS // (prod(probe[1:3]) * prod(w.shape[1:])))
    matrices = [w[g * outputs : (g + 1) * outputs].reshape(outputs, -1).T for g in range(groups)]
    for start in range(0, len(images), step):
        windows = columns(operator, images[start : start + step], (w.shape[1], w.shape[2]))
        for g, matrix in enumerate(matrices):
            part = windows[:, :, :, g * depth : (g + 1) * depth].transpose(0, 1, 2, 4, 5, 3)
            rows = part.reshape(-1, matrix.shape[0]) @ matrix
            place = slice(g * outputs, (g + 1) * outputs)
            result[start : start + step, :, :, place] = rows.reshape(*part.shape[:3], outputs)
    if len(operands) > 2:
        result += operands[2]
    return result.reshape(*operands[0].shape[:-3], *result.shape[1:])


def _depthwise(operator: Operator, operands: Sequence[Array]) -> Array:
    assert isinstance(operator, DepthwiseConv2d)
    x, w = _flat_images(operands[0]), operands[1][0]
    if w.shape[2] != x.shape[3]:
        x = np.repeat(x, w.shape[2] // x.shape[3], axis=3)
    windows = columns(operator, x, (w.shape[0], w.shape[1]))
    total = np.zeros(windows.shape[:4], np.float32)
    for row in range(w.shape[0]):
        for column in range(w.shape[1]):
            total += windows[..., row, column] * w[row, column]
    if len(operands) > 2:
        total += operands[2]
    return total.reshape(*operands[0].shape[:-3], *total.shape[1:])


def _dense(operator: Operator, operands: Sequence[Array]) -> Array:
    x, w = operands[0], operands[1]
    total = (x.reshape(-1, x.shape[-1]) @ w.T).reshape(*x.shape[:-1], w.shape[0])
    return total + operands[2] if len(operands) > 2 else total


def _images(operator: Operator, operands: Sequence[Array]) -> Array:
    x = operands[0]
    result = operator.evaluate([_flat_images(x)])
    return result.reshape(*x.shape[:-3], *result.shape[1:])


def _same(operator: Operator, operands: Sequence[Array]) -> Array:
    return operator.evaluate(operands)


def _pad(operator: Operator, operands: Sequence[Array]) -> Array:
    assert isinstance(operator, Pad)
    widths = [(0, 0), *zip(operator.before, operator.after, strict=True)]
    return np.pad(operands[0], widths, constant_values=np.array(operator.value, operands[0].dtype))


def _reshape(operator: Operator, operands: Sequence[Array]) -> Array:
    assert isinstance(operator, Reshape)
    return operands[0].reshape(len(operands[0]), *operator.shape)


def _transpose(operator: Operator, operands: Sequence[Array]) -> Array:
    assert isinstance(operator, Transpose)
    return np.ascontiguousarray(operands[0].transpose(0, *(axis + 1 for axis in operator.permutation)))


def _concat(operator: Operator, operands: Sequence[Array]) -> Array:
    assert isinstance(operator, Concat)
    axis = operator.axis if operator.axis < 0 else operator.axis + 1
    return np.concatenate(operands, axis=axis)


def _quantize(operator: Operator, operands: Sequence[Array]) -> Array:
    assert isinstance(operator, Quantize)
    x, scale, zero_point = operands
    if scale.size != 1:
        return np.stack([operator.evaluate([one, scale, zero_point]) for one in x])
    steps = np.rint(x / scale)
    steps += np.float32(zero_point[0])
    return np.clip(steps, operator.dtype.low, operator.dtype.high).astype(operator.dtype.numpy)


def _dequantize(operator: Operator, operands: Sequence[Array]) -> Array:
    assert isinstance(operator, Dequantize)
    x, scale, zero_point = operands
    if scale.size != 1:
        return np.stack([operator.evaluate([one, scale, zero_point]) for one in x])
    return np.asarray((x.astype(np.float32) - np.float32(zero_point[0])) * scale[0], dtype=np.float32)


_RULES: Mapping[type[Operator], _Rule] = {
    Conv2d: _convolution,
    DepthwiseConv2d: _depthwise,
    FullyConnected: _dense,
    MaxPool2d: _images,
    AveragePool2d: _images,
    Clamp: _same,
    Unary: _same,
    Softmax: _same,
    LogSoftmax: _same,
    Add: _same,
    Binary: _same,
    Pad: _pad,
    Reshape: _reshape,
    Transpose: _transpose,
    Concat: _concat,
    Quantize: _quantize,
    Dequantize: _dequantize,
}
