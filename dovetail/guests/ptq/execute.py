"""Runs a float graph on many samples at once, in float32, and tells what its values were: ranges, then histograms.

Every value computed at run time has a sample axis before its own axes: [N, *shape]. What is expensive (sums of
products) or frequent has a rule that takes all samples together; every other operator computes one after the other
by its own meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from dovetail.errors import DovetailError
from dovetail.guests.ptq.steps import BINS, Histogram
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.activation import Clamp, LogSoftmax, Softmax, Unary
from dovetail.ir.operators.arithmetic import Add, Dequantize, Quantize
from dovetail.ir.operators.base import Operator, SlidingWindow
from dovetail.ir.operators.elementwise import Binary
from dovetail.ir.operators.linear import Conv2d, Convolution, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Reshape, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.types import Array, TensorType

MOST_COLUMNS = 1 << 23
"""Most elements of the windows of a convolution that are laid out at a time."""

Values = dict[str, Array]
"""Arrays by value name: [N, *shape] at run time, [*shape] of constants."""

Visit = Callable[[str, Array], None]
"""Told each value once it is computed."""

BATCHED = (
    *(Conv2d, DepthwiseConv2d, FullyConnected, MaxPool2d, AveragePool2d, Pad, Reshape, Transpose, Concat),
    *(Clamp, Unary, Softmax, LogSoftmax, Add, Binary, Quantize, Dequantize),
)
"""Operators that are computed for all samples together: what is expensive or frequent."""


def run(
    graph: Graph, inputs: Mapping[str, Array], keep: Collection[str] = (), visit: Visit = lambda name, array: None
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
    if _together(node.operator, [graph.types[name] for name in node.inputs], batched):
        return _batch(node.operator, operands)
    pairs = list(zip(operands, batched, strict=True))
    count = next(len(array) for array, many in pairs if many)
    return np.stack([node.operator.evaluate([a[i] if many else a for a, many in pairs]) for i in range(count)])


def _together(operator: Operator, types: Sequence[TensorType], batched: Sequence[bool]) -> bool:
    """Whether `_batch` may take the sample axis as one more leading axis."""
    if not isinstance(operator, BATCHED):
        return False
    if isinstance(operator, Concat):
        return all(batched)
    if isinstance(operator, Quantize | Dequantize) and types[1].elements > 1:
        return False
    ranks = [len(kind.shape) for kind in types]
    if isinstance(operator, Add | Binary):
        top = max(ranks)
        return all(rank == top for rank, many in zip(ranks, batched, strict=True) if many)
    return batched[0] and not any(batched[1:])


def _batch(operator: Operator, operands: Sequence[Array]) -> Array:
    x = operands[0]
    match operator:
        case Conv2d() | DepthwiseConv2d() | MaxPool2d() | AveragePool2d():
            images = x.reshape(-1, *x.shape[-3:])
            if isinstance(operator, Conv2d):
                result = _convolution(operator, images, operands[1])
            elif isinstance(operator, DepthwiseConv2d):
                result = _depthwise(operator, images, operands[1])
            else:
                result = operator.evaluate([images])
            if len(operands) > 2:
                result += operands[2]
            return result.reshape(*x.shape[:-3], *result.shape[1:])
        case FullyConnected():
            total = (x.reshape(-1, x.shape[-1]) @ operands[1].T).reshape(*x.shape[:-1], operands[1].shape[0])
            return total + operands[2] if len(operands) > 2 else total

        case Pad():
            widths = [(0, 0), *zip(operator.before, operator.after, strict=True)]
            return np.pad(x, widths, constant_values=np.array(operator.value, x.dtype))
        case Reshape():
            return x.reshape(len(x), *operator.shape)
        case Transpose():
            return np.ascontiguousarray(x.transpose(0, *(axis + 1 for axis in operator.permutation)))
        case Concat():
            return np.concatenate(operands, axis=operator.axis if operator.axis < 0 else operator.axis + 1)
        case _:
            return operator.evaluate(operands)


def windows_of(operator: Convolution, x: Array, weights: Array) -> Array:
    """Every window of images x [N, H, W, C], a view: [N, OH, OW, C, KH, KW]."""
    return SlidingWindow((weights.shape[1], weights.shape[2]), operator.stride, operator.dilation).view(x)


def _convolution(operator: Conv2d, images: Array, w: Array) -> Array:
    groups = images.shape[3] // w.shape[3]
    depth, outputs = w.shape[3], w.shape[0] // groups
    probe = windows_of(operator, images[:1], w).shape
    result = np.empty((len(images), *probe[1:3], w.shape[0]), np.float32)
    step = max(1, MOST_COLUMNS // (prod(probe[1:3]) * prod(w.shape[1:])))
    matrices = [w[g * outputs : (g + 1) * outputs].reshape(outputs, -1).T for g in range(groups)]
    for start in range(0, len(images), step):
        windows = windows_of(operator, images[start : start + step], w)
        for g, matrix in enumerate(matrices):
            part = windows[:, :, :, g * depth : (g + 1) * depth].transpose(0, 1, 2, 4, 5, 3)
            rows = part.reshape(-1, matrix.shape[0]) @ matrix
            place = slice(g * outputs, (g + 1) * outputs)
            result[start : start + step, :, :, place] = rows.reshape(*part.shape[:3], outputs)
    return result


def _depthwise(operator: DepthwiseConv2d, images: Array, weights: Array) -> Array:
    w = weights[0]
    if w.shape[2] != images.shape[3]:
        images = np.repeat(images, w.shape[2] // images.shape[3], axis=3)
    windows = windows_of(operator, images, weights)
    total = np.zeros(windows.shape[:4], np.float32)
    for row in range(w.shape[0]):
        for column in range(w.shape[1]):
            total += windows[..., row, column] * w[row, column]
    return total


MOST_BYTES = 32 << 20
"""Bytes of the largest value of a batch."""

Told = Callable[[str], None]
"""Told what is being done now."""


def silent(text: str) -> None:
    """A report that nobody reads."""


def batches(graph: Graph, data: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """The samples in parts that fit memory: the largest value of a part has at most `MOST_BYTES`."""
    largest = max(4 * kind.elements for name, kind in graph.types.items() if name not in graph.constants)
    size = int(max(1, min(64, MOST_BYTES // largest)))
    count = len(next(iter(data.values())))
    for start in range(0, count, size):
        yield {name: array[start : start + size] for name, array in data.items()}


def observe(
    graph: Graph, data: Mapping[str, Array], points: Collection[str], histograms: bool, report: Told
) -> dict[str, Histogram]:
    """Histograms of the values `points` on the samples.

    Args:
        graph: the float graph.
        data: [N, *shape] by input.
        points: the values wanted.
        histograms: whether elements are counted; without, the histograms have one bin.
        report: told the progress.

    Raises:
        DovetailError: the network computes NaN or infinity on the data.
    """
    low = dict.fromkeys(points, np.inf)
    high = dict.fromkeys(points, -np.inf)

    def limits(name: str, array: Array) -> None:
        if name not in low:
            return
        least, most = float(array.min()), float(array.max())
        if not np.isfinite([least, most]).all():
            what = f"the network computes NaN or infinity at '{name}'"
            hint = "look for samples of extreme values in the data, or a damaged weight before that layer"
            raise DovetailError(what, where="calibration data", hint=hint)
        low[name], high[name] = min(low[name], least), max(high[name], most)

    _pass(graph, data, limits, report, "measuring ranges")
    if not histograms:
        return {name: Histogram(low[name], high[name], np.ones(1, np.int64)) for name in low}
    counts = {name: np.zeros(BINS, np.int64) for name in low}

    def count(name: str, array: Array) -> None:
        if name in counts and low[name] < high[name]:
            counts[name] += np.histogram(array, BINS, (low[name], high[name]))[0]

    _pass(graph, data, count, report, "counting values")
    return {name: Histogram(low[name], high[name], counts[name]) for name in low}


def _pass(
    graph: Graph, data: Mapping[str, Array], visit: Callable[[str, Array], None], report: Told, text: str
) -> None:
    total, done = len(next(iter(data.values()))), 0
    for part in batches(graph, data):
        report(f"{text}: sample {done} of {total}")
        run(graph, part, visit=visit)
        done += len(next(iter(part.values())))
