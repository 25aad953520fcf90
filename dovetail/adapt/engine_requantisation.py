"""Requantisation in an engine's own arithmetic: y = (x * scale + offset) >> shift with a small scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.graph.graph import Graph, Node
from dovetail.graph.rewrite import Draft, run
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.arithmetic import Add, Clip, Requantize, ScaleShift
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected

_LEAST_SCALE = 16
"""A smaller scale would be wrong by more than 1 part in 32, if it is not exact; such a layer is left to the core."""

Linear = (Conv2d, DepthwiseConv2d, FullyConnected)

Accepts = Callable[[Mapping[str, TensorType], Node], bool]
"""Whether the engine computes a linear node; told the types of all values."""


@dataclass(frozen=True)
class RequantisationLimits:
    """What an engine's scale and shift can hold."""

    scale_bits: int
    """Bits of the unsigned scale."""
    most_shift: int
    """The largest right shift."""
    activations: DType = DType.UINT8
    """Type of the engine's operands."""
    bias_first: bool = False
    """Whether what is added is added before the product: a whole number of scales."""


def scale_and_shift(
    real: NDArray[np.float64],
    bias: NDArray[np.float64],
    correction: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    zero_point: int,
    limits: RequantisationLimits,
) -> tuple[Array, Array, Array] | None:
    """Scale, offset and shift per channel that bring a sum to its result in one product, one sum and one shift.

    (acc * scale + offset) >> shift is round((acc + correction + bias) * real) + zero_point, within the scale's bits.

    Args:
        real: the factor, at least 0.
        bias: constant part of the sum; scaled by the exact factor.
        correction: what takes the input zero point off the accumulator; scaled as the accumulator is, so that their
            errors cancel.
        low: smallest accumulator.
        high: largest accumulator.
        zero_point: of the result.
        limits: of the engine.

    Returns:
        Three int32 arrays; None when some channel cannot be kept within int32. The shift is the largest for which
        neither product nor sum leaves int32.
    """
    scales, offsets, shifts = (np.zeros(real.shape, np.int64) for _ in range(3))
    reach = np.maximum(np.abs(low), np.abs(high))
    for channel, factor in enumerate(real):
        if limits.bias_first and reach[channel] == 0:  # a scale of 0 would take the bias away
            scales[channel], offsets[channel] = 1, int(np.rint(bias[channel] * factor)) + zero_point
            continue
        found = False
        for shift in range(limits.most_shift, -1, -1):
            scale = int(np.rint(factor * 2.0**shift))
            if scale >= 1 << limits.scale_bits:
                continue
            inexact = scale < _LEAST_SCALE and scale != factor * 2.0**shift
            if inexact and reach[channel] * factor >= 0.5:
                break
            exact = int(np.rint(bias[channel] * factor * 2.0**shift))
            offset = int(correction[channel]) * scale + exact + (zero_point << shift) + ((1 << shift) >> 1)
            if limits.bias_first and scale:
                offset = int(np.rint(offset / scale)) * scale
            edges = (int(low[channel]) * scale + offset, int(high[channel]) * scale + offset)
            if int(reach[channel]) * scale < 1 << 31 and max(abs(offset), *map(abs, edges)) < 1 << 31:
                scales[channel], offsets[channel], shifts[channel] = scale, offset, shift
                found = True
                break
        if not found:
            return None
    return scales.astype(np.int32), offsets.astype(np.int32), shifts.astype(np.int32)


def channel_sums(operator: object, weights: Array) -> Array:
    """Per output channel the weights that meet it, as [C, taps] int64."""
    if isinstance(operator, DepthwiseConv2d):
        return weights.astype(np.int64).reshape(-1, weights.shape[-1]).T
    return weights.astype(np.int64).reshape(weights.shape[0], -1)


def engine_requantisation(accepts: Accepts, limits: RequantisationLimits) -> Callable[[Graph], Graph]:
    """A rewrite: clip(requantize(linear)) of accepted layers becomes clip(scale-shift(linear)).

    Bias and input zero point move into the offset. A scale of 8 bits is right to 1 part in 256, so a result of 8 bits
    is within 2 of the original.
    """
    least, most = float(limits.activations.low), float(limits.activations.high)

    def rule(draft: Draft, node: Node) -> str | None:
        """The layer scaled by 8 bits and shifted; None where the engine or the numbers do not allow it."""
        narrow = isinstance(node.operator, Clip) and node.operator.dtype.bits <= 8
        scaled = draft.made_by(node.inputs[0], Requantize) if narrow else None
        linear = draft.made_by(scaled.inputs[0], *Linear) if scaled is not None else None
        if scaled is None or linear is None or max(draft.users(scaled.output), draft.users(linear.output)) > 1:
            return None
        requantize, operator = scaled.operator, linear.operator
        assert isinstance(requantize, Requantize) and isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected)
        if draft.types[linear.inputs[0]].dtype is not limits.activations or operator.weight_zero_point:
            return None
        if any(value not in draft.constants for value in (*scaled.inputs[1:], *linear.inputs[1:])):
            return None
        if requantize.input_zero_point or requantize.left_shift or not accepts(draft.types, linear):
            return None
        filters = draft.constants[linear.inputs[1]]
        weights = channel_sums(operator, filters)
        channels = weights.shape[0]
        bias = draft.constants[linear.inputs[2]].astype(np.int64) if len(linear.inputs) > 2 else np.zeros(channels, int)
        multiplier, shift = (
            np.broadcast_to(draft.constants[v].astype(np.float64), channels) for v in scaled.inputs[1:]
        )
        factor = multiplier * 2.0 ** (shift - 31)
        if limits.bias_first:
            idle = factor * np.abs(weights).sum(axis=1) * max(-least, most) < 0.5
            weights, filters = weights * ~idle[:, None], _without(operator, filters, idle)
        found = scale_and_shift(
            factor,
            bias.astype(np.float64),
            -float(operator.input_zero_point) * weights.sum(axis=1),
            np.minimum(weights * least, weights * most).sum(axis=1),
            np.maximum(weights * least, weights * most).sum(axis=1),
            requantize.output_zero_point,
            limits,
        )
        if found is None:
            return None
        bare = replace(operator, input_zero_point=0)
        kept = linear.inputs[1]
        if filters is not draft.constants[kept]:
            kept = draft.constant(filters, draft.types[kept].dtype, kept)
        accumulator = draft.add(bare, [linear.inputs[0], kept], linear, f"{linear.output}_bare")
        names = [draft.constant(array, DType.INT32, linear.inputs[1]) for array in found]
        shifted = draft.add(ScaleShift(), [accumulator, *names], scaled, f"{node.output}_by_engine")
        return draft.add(node.operator, [shifted], node)

    return lambda graph: run(graph, [rule])


def _without(operator: object, filters: Array, idle: Array) -> Array:
    """The filters with those of idle channels, which can never move the result, set to zero."""
    if not idle.any():
        return filters
    shape = (-1,) if isinstance(operator, DepthwiseConv2d) else (-1, *(1,) * (filters.ndim - 1))
    return np.where(idle.reshape(shape), filters.dtype.type(0), filters)


def split_bias(accepts: Accepts) -> Callable[[Graph], Graph]:
    """A rewrite: accepted linear layers lose bias and input zero point to an addition behind them. Exact."""

    def rule(draft: Draft, node: Node) -> str | None:
        """The layer without bias and zero point, and an addition; None where it has neither."""
        operator = node.operator
        if not isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected) or not accepts(draft.types, node):
            return None
        if draft.types[node.inputs[0]].dtype is not DType.UINT8 or operator.weight_zero_point:
            return None
        if any(value not in draft.constants for value in node.inputs[1:]):
            return None
        if len(node.inputs) == 2 and operator.input_zero_point == 0:
            return None
        weights = channel_sums(operator, draft.constants[node.inputs[1]])
        bias = draft.constants[node.inputs[2]].astype(np.int64) if len(node.inputs) > 2 else 0
        addend = (bias - operator.input_zero_point * weights.sum(axis=1)).astype(np.int32)
        bare = draft.add(replace(operator, input_zero_point=0), node.inputs[:2], node)
        return draft.add(Add(), [bare, draft.constant(addend, DType.INT32, node.inputs[1])], node)

    return lambda graph: run(graph, [rule])
