"""Neighbouring pixels computed as one of as many times the channels, for engines that compute many channels at once.
Exact: the other weights are zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, ScaleShift
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.operators.movement import Concat, Im2col, Pad, Reshape
from dovetail.ir.pattern import Apply, apply, maybe, occurrence, operand
from dovetail.ir.rules import Rule, RuleMatch, rewriting
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize.requantisation import PARAMETERS, WEIGHTS

Together = Callable[[TensorType, Callable[[int], int]], int]
"""How many pixels of a 1x1 convolution are computed as one; told its result, and the inputs of so many together."""
_PIXEL = Im2col((1, 1))
_JOINT = apply(Concat)
_SOURCE = operand("source")
_PATCHES = maybe(Im2col, _SOURCE, alone=True)
_POINT = apply(Conv2d(), _PATCHES, WEIGHTS, alone=True)
_SCALED_POINT = apply(ScaleShift, _POINT, PARAMETERS, alone=True)
_POINTS = apply(Clip, _SCALED_POINT)


def pixels_as_one(counts: Together) -> Callable[[Graph], Graph]:
    """A rewrite: a 1x1 convolution, scale-shifted, computes several neighbouring pixels as one of as many times the
    channels, from all their inputs or from patches that hold what all of them read. Exact: other weights are zero.

    Args:
        counts: how many pixels, a divisor of the columns.
    """

    def window_of(at: RuleMatch) -> Im2col:
        return at[_PATCHES] if at.has(_PATCHES) else _PIXEL

    def together(at: RuleMatch) -> str | None:
        window, weights, x = window_of(at), at.array(WEIGHTS), at.type(_SOURCE).shape
        (rows, columns), step = window.kernel, window.stride[1]
        each = weights.shape[3] // (rows * columns)
        count = counts(at.type(at.root.output), lambda pixels: rows * (columns + (pixels - 1) * step) * each)
        if count == 1:
            return None
        if window is _PIXEL:
            source = at.add(Reshape((1, x[1], x[2] // count, x[3] * count)), _SOURCE, like=_POINT)
        else:
            wide = Im2col((rows, columns + (count - 1) * step), (window.stride[0], count * step), window.dilation)
            source = at.add(wide, _SOURCE, like=_PATCHES)
        repeated = at.constant(_repeated(weights, window, count), at.type(WEIGHTS).dtype, WEIGHTS)
        return _apart(at, at.add(Conv2d(), source, repeated, like=_POINT), count, _SCALED_POINT)

    def fits(at: RuleMatch) -> bool:
        known = at.knows(_POINT) and at.knows(_SCALED_POINT)
        return known and at.array(WEIGHTS).shape[1:3] == (1, 1) and at.type(at.root.output).shape[0] == 1

    return rewriting(
        Rule(
            _POINTS,
            together,
            (
                fits,
                # the parts of a concatenation would have to be copied
                lambda at: at.has(_PATCHES) or not occurrence(_JOINT, at.draft, at[_SOURCE]),
                lambda at: window_of(at).dilation[1] == 1,
            ),
        )
    )


def _repeated(weights: Array, window: Im2col, count: int) -> Array:
    """Weights [C, 1, 1, taps] of a window as those of `count` windows: each copy its stride further right."""
    (rows, columns), outputs, step = window.kernel, weights.shape[0], window.stride[1]
    taps = weights.reshape(outputs, rows, columns, -1)
    wide = np.zeros((count, outputs, rows, columns + (count - 1) * step, taps.shape[-1]), weights.dtype)
    for number in range(count):
        wide[number, :, :, number * step : number * step + columns] = taps
    return wide.reshape(count * outputs, 1, 1, -1)


def _apart(at: RuleMatch, sums: str, count: int, scaled: Apply[ScaleShift]) -> str:
    """The results of sums of so many pixels as one, the pixels apart again."""
    parameters = [
        at.constant(np.tile(at.array(value), count), DType.INT32, value) if at.array(value).size > 1 else value
        for value in at.others(scaled)
    ]
    clipped = at.add(at.root.operator, at.add(ScaleShift(), sums, *parameters, like=scaled))
    return at.add(Reshape(at.type(at.root.output).shape), clipped)


WindowsTogether = Callable[[Mapping[str, TensorType], Node], int]
"""How many pixels of a layer with a window are computed as one; told all types and the layer. 0: it stays as it is."""
_IMAGE = operand("image")
_PAD = maybe(Pad, _IMAGE)
_LAYER = apply((Conv2d, DepthwiseConv2d), _PAD, WEIGHTS, alone=True)
_SCALED = apply(ScaleShift, _LAYER, PARAMETERS, alone=True)
_WINDOWS = apply(Clip, _SCALED)


def windows_as_one(counts: WindowsTogether) -> Callable[[Graph], Graph]:
    """A rewrite: a convolution or a depthwise one of stride 1, scale-shifted, computes several neighbouring pixels of a
    row as one of as many times the channels, by a convolution with a window as wide, in such pixels. Depthwise layers
    of any stride become convolutions where one pixel is computed as one. Exact: other weights are zero.

    Args:
        counts: how many pixels; where the columns are no multiple of it, or the window would be wider, nothing is done.
    """

    def together(at: RuleMatch) -> str | None:
        operator, layer = at[_LAYER], at.node(_LAYER)
        dense = operator.dense_weights(at.array(WEIGHTS))
        alike = dense.shape[3] == at.type(layer.inputs[0]).shape[3] and operator.zero_points == (0, 0)
        count = counts(at.draft.types, layer) if alike else 0
        if count == 0 or (count == 1 and operator.weight_axis == 0) or (count > 1 and operator.stride != (1, 1)):
            return None
        source = layer.inputs[0] if count == 1 else _in_pixels(at, dense.shape[2], count)
        if source is None:
            return None
        left = at[_PAD].before[2] if at.has(_PAD) else 0
        wide = at.constant(_neighbours(dense, left, count), at.type(WEIGHTS).dtype, WEIGHTS)
        return _apart(at, at.add(Conv2d(operator.stride), source, wide, like=_LAYER), count, _SCALED)

    def fits(at: RuleMatch) -> bool:
        return at.knows(_LAYER) and at.knows(_SCALED) and at[_LAYER].dilation == (1, 1)

    return rewriting(Rule(_WINDOWS, together, (fits,)))


def _in_pixels(at: RuleMatch, columns: int, count: int) -> str | None:
    """The image a layer with so many columns of taps reads, so many of its pixels as one, padded by whole ones; None
    where the columns cannot be taken together, or more than so many of them would be read."""
    border = at[_PAD] if at.has(_PAD) else Pad((0,) * 4, (0,) * 4)
    batch, height, width, channels = at.type(_IMAGE).shape
    first, last = (tap // count for tap in (-border.before[2], count - 1 - border.before[2] + columns - 1))
    results = at.type(_LAYER).shape[2]
    if width % count or results % count or last - first + 1 > columns or border.before[3] or border.after[3]:
        return None
    behind = results // count + first + columns - 1 - width // count
    if behind < 0:
        return None
    joined = at.add(Reshape((batch, height, width // count, channels * count)), _IMAGE, like=_LAYER)
    before, after = (*border.before[:2], -first, 0), (*border.after[:2], behind, 0)
    return at.add(Pad(before, after, border.value), joined, like=_LAYER) if any((*before, *after)) else joined


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
