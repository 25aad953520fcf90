"""Runs a float graph on many samples at once, in float32, and measures ranges and histograms of its values.

Every value computed at run time has a sample axis before its own axes: [N, *shape]. Operators that are expensive (sums
of products) or frequent compute all samples together; every other one computes one sample after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from math import prod

import numpy as np

from dovetail.errors import DovetailError
from dovetail.guests.ptq.settings import Told
from dovetail.guests.ptq.steps import BINS, Data, Histogram
from dovetail.ir.graph import Graph, Node, in_turn
from dovetail.ir.operators.base import Operator, SlidingWindow
from dovetail.ir.types import Array, DType, TensorType

MOST_COLUMNS = 1 << 23
"""Most elements of the windows of a convolution that are laid out at a time."""

Values = dict[str, Array]
"""Arrays by value name: [N, *shape] at run time, [*shape] of constants."""

Visit = Callable[[str, Array], None]
"""Told each value once it is computed."""


def run(graph: Graph, inputs: Data, keep: Collection[str] = (), visit: Visit = lambda name, array: None) -> Values:
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
    for node in in_turn(graph, {*graph.outputs, *keep}, values):
        values[node.output] = compute(graph, node, values)
        if sampled(graph, values, node.output):
            visit(node.output, values[node.output])
    return {name: values[name] for name in (*graph.outputs, *keep)}


def sampled(graph: Graph, values: Data, name: str) -> bool:
    """True for a value with a sample axis."""
    return name not in graph.constants and values[name].ndim == len(graph.types[name].shape) + 1


def compute(graph: Graph, node: Node, values: Data) -> Array:
    """The result of one node on samples; without run-time operands it has no sample axis."""
    operands = [graph.constants[name] if name in graph.constants else values[name] for name in node.inputs]
    batched = [name not in graph.constants and sampled(graph, values, name) for name in node.inputs]
    if not any(batched):
        return node.operator.evaluate(operands)
    together = _together(node.operator, [graph.types[name] for name in node.inputs], batched)
    if together is not None:
        return together(operands)
    pairs = list(zip(operands, batched, strict=True))
    count = next(len(array) for array, many in pairs if many)
    return np.stack([node.operator.evaluate([a[i] if many else a for a, many in pairs]) for i in range(count)])


Compute = Callable[[Sequence[Array]], Array]


def _together(operator: Operator, types: Sequence[TensorType], batched: Sequence[bool]) -> Compute | None:
    """The function that takes the sample axis as one more leading axis; None where there is none."""
    count = operator.pointwise or (len(types) if operator.joins else 1)
    if any(batched[count:]):
        return None
    if operator.pointwise:
        rank = max(len(kind.shape) for kind in types[:count])
        whole = all(len(kind.shape) == rank for kind, many in zip(types, batched, strict=True) if many)
        return operator.evaluate if whole and all(kind.elements == 1 for kind in types[count:]) else None
    if not all(batched[:count]):
        return None
    if operator.is_rowwise:
        return operator.evaluate
    if operator.is_view:
        return lambda operands: operands[0].reshape(len(operands[0]), *operator.infer(types).shape)
    window = operator.window(types)
    if operator.weight_axis is None:
        return partial(_as_images, operator) if _keeps_images(operator, types, window) else None
    if window is None:
        return _dense
    return partial(_on_images, partial(_depthwise if operator.is_channelwise else _convolution, window))


def _keeps_images(operator: Operator, types: Sequence[TensorType], window: SlidingWindow | None) -> bool:
    """Whether movement or a pool treats every index of the first axis, which is 1 long, alike."""
    if not (operator.moves_only or window is not None) or any(kind.shape[:1] != (1,) for kind in types):
        return False
    try:
        several = operator.infer([TensorType((2, *kind.shape[1:]), kind.dtype) for kind in types])
    except ValueError:
        return False
    return several.shape == (2, *operator.infer(types).shape[1:])


def _as_images(operator: Operator, operands: Sequence[Array]) -> Array:
    """The result with the samples along the first axis of every operand."""
    result = operator.evaluate([array.reshape(-1, *array.shape[2:]) for array in operands])
    return result.reshape(len(operands[0]), 1, *result.shape[1:])


def window_of(operator: Operator, weights: Array) -> SlidingWindow | None:
    """The window of a layer with these weights; None for a dense layer."""
    kind = TensorType(tuple(weights.shape), DType.FLOAT32)
    return operator.window([kind, kind])


def _on_images(compute: Callable[[Array, Sequence[Array]], Array], operands: Sequence[Array]) -> Array:
    """A result on images [N, H, W, C], in place of samples of some images each."""
    x, *others = operands
    result = compute(x.reshape(-1, *x.shape[-3:]), others)
    return result.reshape(*x.shape[:-3], *result.shape[1:])


def _convolution(window: SlidingWindow, images: Array, others: Sequence[Array]) -> Array:
    w, *bias = others
    groups, depth = images.shape[3] // w.shape[3], w.shape[3]
    outputs = w.shape[0] // groups
    probe = window.view(images[:1]).shape
    result = np.empty((len(images), *probe[1:3], w.shape[0]), np.float32)
    step = max(1, MOST_COLUMNS // (prod(probe[1:3]) * prod(w.shape[1:])))
    matrices = [w[g * outputs : (g + 1) * outputs].reshape(outputs, -1).T for g in range(groups)]
    for start in range(0, len(images), step):
        windows = window.view(images[start : start + step])
        for g, matrix in enumerate(matrices):
            part = windows[:, :, :, g * depth : (g + 1) * depth].transpose(0, 1, 2, 4, 5, 3)
            rows = part.reshape(-1, matrix.shape[0]) @ matrix
            place = slice(g * outputs, (g + 1) * outputs)
            result[start : start + step, :, :, place] = rows.reshape(*part.shape[:3], outputs)
    return _biased(result, bias)


def _depthwise(window: SlidingWindow, images: Array, others: Sequence[Array]) -> Array:
    (w,), *bias = others
    if w.shape[2] != images.shape[3]:
        images = np.repeat(images, w.shape[2] // images.shape[3], axis=3)
    windows = window.view(images)
    total = np.zeros(windows.shape[:4], np.float32)
    for row, column in np.ndindex(*w.shape[:2]):
        total += windows[..., row, column] * w[row, column]
    return _biased(total, bias)


def _dense(operands: Sequence[Array]) -> Array:
    x, weights, *bias = operands
    return _biased((x.reshape(-1, x.shape[-1]) @ weights.T).reshape(*x.shape[:-1], weights.shape[0]), bias)


def _biased(sums: Array, bias: Sequence[Array]) -> Array:
    return sums + bias[0] if bias else sums


MOST_BYTES = 32 << 20
"""Bytes of the largest value of a batch."""


def batches(graph: Graph, data: Data) -> Iterator[Values]:
    """The samples in parts that fit memory: the largest value of a part has at most `MOST_BYTES`."""
    size = int(max(1, min(64, MOST_BYTES // max(value_bytes(graph)))))
    for start in range(0, count_of(data), size):
        yield part_of(data, slice(start, start + size))


def value_bytes(graph: Graph) -> list[int]:
    """Bytes of a sample of every value but constants, as floats."""
    return [4 * kind.elements for name, kind in graph.types.items() if name not in graph.constants]


def count_of(data: Data) -> int:
    """How many samples there are."""
    return len(next(iter(data.values())))


def part_of(data: Data, place: int | slice) -> Values:
    """One sample, or several."""
    return {name: array[place] for name, array in data.items()}


def observe(graph: Graph, data: Data, points: Collection[str], histograms: bool, report: Told) -> dict[str, Histogram]:
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


def _pass(graph: Graph, data: Data, visit: Visit, report: Told, text: str) -> None:
    total, count = count_of(data), 0
    for part in batches(graph, data):
        report(f"{text}: sample {count} of {total}")
        run(graph, part, visit=visit)
        count += count_of(part)
