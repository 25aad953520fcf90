"""Layers of ternary weights through an analog array: few bits in, a converter of few bits out, scaled afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dovetail.adapt.engine_requantisation import Accepts
from dovetail.graph.graph import Graph, Node
from dovetail.graph.rewrite import Draft, run
from dovetail.graph.types import Array, DType
from dovetail.operators.arithmetic import Clip, ScaleShift
from dovetail.operators.linear import Conv2d, FullyConnected
from dovetail.operators.movement import Pad


@dataclass(frozen=True)
class ConverterLimits:
    """What an analog array takes and gives."""

    operand: tuple[int, int]
    """Least and greatest activation; others saturate."""
    code: tuple[int, int]
    """Least and greatest result of the converter."""
    most_shift: int
    """The largest shift before and after."""
    scaled_bits: int
    """Bits that products and sums behind the converter keep within, sign included."""


def through_converter(accepts: Accepts, limits: ConverterLimits) -> Callable[[Graph], Graph]:
    """A rewrite: clip(scale-shift(conv(x))) of an accepted layer, scale 1 and weights of -1, 0 and 1, becomes

        clip((clip(conv(clip(x)) >> gain) * scale + offset) >> shift)

    The gain is the smallest with which no sum that matters saturates: one beyond does so in the result too. What is
    lost are the bits below it, and operands beyond the limits.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        """A layer of small weights as the converter computes it; None where it would change too much."""
        scaled = draft.made_by(node.inputs[0], ScaleShift) if isinstance(node.operator, Clip) else None
        layer = draft.made_by(scaled.inputs[0], Conv2d, FullyConnected) if scaled is not None else None
        if scaled is None or layer is None or max(draft.users(scaled.output), draft.users(layer.output)) > 1:
            return None
        constants = draft.constants
        if any(name not in constants for name in (layer.inputs[1], *scaled.inputs[1:])) or len(layer.inputs) > 2:
            return None
        weights = constants[layer.inputs[1]]
        scale, offset, shift = (constants[name].astype(np.int64) for name in scaled.inputs[1:])
        if np.abs(weights).max() > 1 or (scale != 1).any() or np.unique(shift).size > 1:
            return None
        assert isinstance(node.operator, Clip)
        if (node.operator.low, node.operator.high) == limits.code:
            return None  # a converter's already
        fitted = _fit(weights, offset, int(shift.flat[0]), node.operator, limits)
        if fitted is None or not accepts(draft.types, layer):
            return None
        pad = draft.made_by(layer.inputs[0], Pad)
        value = pad.inputs[0] if pad is not None else layer.inputs[0]
        value = draft.add(Clip(*limits.operand, DType.INT8), [value], node)
        value = draft.add(pad.operator, [value], node) if pad is not None else value
        total = draft.add(layer.operator, [value, layer.inputs[1]], layer)
        gained = draft.add(ScaleShift(), [total, *_constants(draft, node, (1, 0, fitted.gain))], node)
        code = draft.add(Clip(*limits.code, DType.INT8), [gained], node)
        again = draft.add(ScaleShift(), [code, *_constants(draft, node, (fitted.scale, fitted.offset, fitted.shift))],
                          scaled)  # fmt: skip
        return draft.add(node.operator, [again], node)

    return lambda graph: run(graph, [rule])


@dataclass(frozen=True)
class _Fitted:
    gain: int
    scale: int
    offset: Array
    shift: int


def _fit(weights: Array, offset: Array, shift: int, clip: Clip, limits: ConverterLimits) -> _Fitted | None:
    """The gain, and what brings its codes to the results of (sum + offset) >> shift; None where it does not fit."""
    taps = np.abs(weights.astype(np.int64)).reshape(len(weights), -1).sum(axis=1)
    reach = taps * max(-limits.operand[0], limits.operand[1])
    low = np.maximum((clip.low << shift) - offset, -reach).min()
    high = np.minimum(((clip.high + 1) << shift) - offset, reach).max()
    gain = 0
    while limits.code[0] << gain > low or limits.code[1] + 1 << gain < high:
        gain += 1
    most = (1 << (limits.scaled_bits - 1)) - 1
    largest = max(-limits.code[0], limits.code[1])
    for after in range(min(limits.most_shift, limits.scaled_bits), -1, -1):
        scale = 2.0 ** (gain + after - shift)
        middle = ((1 << gain) - 1) / 2  # a code stands for the middle of the sums that give it
        added = np.rint((offset + middle) * 2.0 ** (after - shift)).astype(np.int64)
        if scale == int(scale) and largest * scale + np.abs(added).max() <= most:
            return _Fitted(gain, int(scale), added, after) if gain <= limits.most_shift else None
    return None


def _constants(draft: Draft, node: Node, values: tuple[int | Array, ...]) -> list[str]:
    arrays = (np.atleast_1d(np.asarray(value)).astype(np.int32) for value in values)
    return [draft.constant(array, DType.INT32, node.output) for array in arrays]
