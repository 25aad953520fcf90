"""Neighbouring pixels computed as one of as many times the channels, for engines that compute many channels at once.
Exact: the other weights are zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import ScaleShift
from dovetail.ir.operators.linear import Conv2d, Convolution, DepthwiseConv2d
from dovetail.ir.operators.movement import Concat, Im2col, Pad, Reshape
from dovetail.ir.rewrite import Draft, run
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize.requantisation import scaled_layer

Together = Callable[[TensorType, Callable[[int], int]], int]
"""How many pixels of a 1x1 convolution are computed as one; told its result, and the inputs of so many together."""
_PIXEL = Im2col((1, 1))


def pixels_as_one(counts: Together) -> Callable[[Graph], Graph]:
    """A rewrite: a 1x1 convolution, scale-shifted, computes several neighbouring pixels as one of as many times the
    channels, from all their inputs or from patches that hold what all of them read. Exact: other weights are zero.

    Args:
        counts: how many pixels, a divisor of the columns.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        scaled, layer = scaled_layer(draft, node, ScaleShift, Conv2d)
        if scaled is None or layer is None or len(layer.inputs) > 2 or layer.operator != Conv2d():
            return None
        name, known, result = layer.inputs[1], draft.constants, draft.types[node.output]
        if any(value not in known for value in (name, *scaled.inputs[1:])) or known[name].shape[1:3] != (1, 1):
            return None
        if draft.made_by(layer.inputs[0], Concat):  # whose parts would then have to be copied
            return None
        patches = draft.made_by(layer.inputs[0], Im2col)
        window = patches.operator if patches is not None and draft.users(patches.output) == 1 else _PIXEL
        assert isinstance(window, Im2col)
        if window.dilation[1] != 1 or result.shape[0] != 1:
            return None
        (rows, columns), step = window.kernel, window.stride[1]
        each = known[name].shape[3] // (rows * columns)
        count = counts(result, lambda pixels: rows * (columns + (pixels - 1) * step) * each)
        if count == 1:
            return None
        if window is _PIXEL:
            x = draft.types[layer.inputs[0]].shape
            source = draft.add(Reshape((1, x[1], x[2] // count, x[3] * count)), layer.inputs[:1], layer)
        else:
            assert patches is not None
            wide = (rows, columns + (count - 1) * step)
            source = draft.add(Im2col(wide, (window.stride[0], count * step), window.dilation), patches.inputs, patches)
        weights = draft.constant(_repeated(known[name], window, count), draft.types[name].dtype, name)
        return _scaled_apart(draft, draft.add(layer.operator, [source, weights], layer), count, scaled, node)

    return lambda graph: run(graph, [rule])


def _repeated(weights: Array, window: Im2col, count: int) -> Array:
    """Weights [C, 1, 1, taps] of a window as those of `count` windows: each copy its stride further right."""
    (rows, columns), outputs, step = window.kernel, weights.shape[0], window.stride[1]
    taps = weights.reshape(outputs, rows, columns, -1)
    wide = np.zeros((count, outputs, rows, columns + (count - 1) * step, taps.shape[-1]), weights.dtype)
    for number in range(count):
        wide[number, :, :, number * step : number * step + columns] = taps
    return wide.reshape(count * outputs, 1, 1, -1)


def _scaled_apart(draft: Draft, sums: str, count: int, scaled: Node, clip: Node) -> str:
    """What a scaling and a clip make of the sums of so many pixels as one, the pixels apart again."""
    known = draft.constants
    parameters = [
        draft.constant(np.tile(known[value], count), DType.INT32, value) if known[value].size > 1 else value
        for value in scaled.inputs[1:]
    ]
    clipped = draft.add(clip.operator, [draft.add(ScaleShift(), [sums, *parameters], scaled)], clip)
    return draft.add(Reshape(draft.types[clip.output].shape), [clipped], clip)


WindowsTogether = Callable[[Mapping[str, TensorType], Node], int]
"""How many pixels of a layer with a window are computed as one; told all types and the layer. 0: it stays as it is."""


def windows_as_one(counts: WindowsTogether) -> Callable[[Graph], Graph]:
    """A rewrite: a convolution or a depthwise one of stride 1, scale-shifted, computes several neighbouring pixels of a
    row as one of as many times the channels, by a convolution with a window as wide, in such pixels. Depthwise layers
    of any stride become convolutions where one pixel is computed as one. Exact: other weights are zero.

    Args:
        counts: how many pixels; where the columns are no multiple of it, or the window would be wider, nothing is done.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        scaled, layer = scaled_layer(draft, node, ScaleShift, Conv2d, DepthwiseConv2d)
        if scaled is None or layer is None or len(layer.inputs) > 2:
            return None
        name, known, operator = layer.inputs[1], draft.constants, layer.operator
        assert isinstance(operator, Convolution)
        if any(value not in known for value in (name, *scaled.inputs[1:])) or operator.dilation != (1, 1):
            return None
        dense = _dense(known[name], isinstance(operator, DepthwiseConv2d))
        alike = dense.shape[3] == draft.types[layer.inputs[0]].shape[3] and operator.zero_points == (0, 0)
        count = counts(draft.types, layer) if alike else 0
        if count == 0 or (count == 1 and isinstance(operator, Conv2d)) or (count > 1 and operator.stride != (1, 1)):
            return None
        source = layer.inputs[0] if count == 1 else _in_pixels(draft, layer, dense.shape[2], count)
        if source is None:
            return None
        before = draft.made_by(layer.inputs[0], Pad)
        left = before.operator.before[2] if before is not None and isinstance(before.operator, Pad) else 0
        wide = draft.constant(_neighbours(dense, left, count), draft.types[name].dtype, name)
        sums = draft.add(Conv2d(operator.stride), [source, wide], layer)
        return _scaled_apart(draft, sums, count, scaled, node)

    return lambda graph: run(graph, [rule])


def _dense(weights: Array, depthwise: bool) -> Array:
    """Weights of a convolution [O, KH, KW, I]: a depthwise layer's with zeros between its channels."""
    return np.eye(weights.shape[3], dtype=weights.dtype)[:, None, None] * weights if depthwise else weights


def _in_pixels(draft: Draft, layer: Node, columns: int, count: int) -> str | None:
    """The image a layer with so many columns of taps reads, so many of its pixels as one, padded by whole ones; None
    where the columns cannot be taken together, or more than so many of them would be read."""
    pad = draft.made_by(layer.inputs[0], Pad)
    border = pad.operator if pad is not None else Pad((0,) * 4, (0,) * 4)
    assert isinstance(border, Pad)
    image = pad.inputs[0] if pad is not None else layer.inputs[0]
    batch, height, width, channels = draft.types[image].shape
    first, last = (tap // count for tap in (-border.before[2], count - 1 - border.before[2] + columns - 1))
    results = draft.types[layer.output].shape[2]
    if width % count or results % count or last - first + 1 > columns or border.before[3] or border.after[3]:
        return None
    behind = results // count + first + columns - 1 - width // count
    if behind < 0:
        return None
    joined = draft.add(Reshape((batch, height, width // count, channels * count)), [image], layer)
    before, after = (*border.before[:2], -first, 0), (*border.after[:2], behind, 0)
    return draft.add(Pad(before, after, border.value), [joined], layer) if any((*before, *after)) else joined


def _neighbours(weights: Array, left: int, count: int) -> Array:
    """Weights [O, KH, KW, I] of a window that begins so many pixels left of its own as those of `count` neighbours in
    pixels of `count`, as many columns: [count * O, KH, KW, count * I]."""
    outputs, rows, columns, inputs = weights.shape
    first = -left // count
    wide = np.zeros((count, outputs, rows, columns, count, inputs), weights.dtype)
    for number in range(count):
        for tap in range(columns):
            place, within = divmod(number - left + tap, count)
            wide[number, :, :, place - first, within] = weights[:, :, tap]
    return wide.reshape(count * outputs, rows, columns, count * inputs)
