"""Requantisation in an engine's own arithmetic: small scales and shifts, a bias apart, converters of few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, FullyConnected, Linear
from dovetail.ir.operators.movement import Pad
from dovetail.ir.requantisation.engine import RequantisationLimits, SumOffsets, with_product, without_product
from dovetail.ir.rewrite import Draft, run
from dovetail.ir.types import Array, DType, TensorType

Accepts = Callable[[Mapping[str, TensorType], Node], bool]
"""Whether the engine computes a linear node; told the types of all values."""


def _of_channels(operator: Linear, weights: Array) -> Array:
    """Per output channel the weights that meet it, as [C, taps] int64."""
    first = np.moveaxis(weights.astype(np.int64), operator.weight_axis, 0)
    return first.reshape(len(first), -1)


def scaled_layer(
    draft: Draft, clip: Node, scaling: type[Operator], *kinds: type[Operator]
) -> tuple[Node, Node] | tuple[None, None]:
    """The requantisation before a clip and the operator of some kinds before that, neither read by anything else."""
    scaled = draft.made_by(clip.inputs[0], scaling) if isinstance(clip.operator, Clip) else None
    layer = draft.made_by(scaled.inputs[0], *kinds) if scaled is not None else None
    if scaled is None or layer is None or max(draft.users(scaled.output), draft.users(layer.output)) > 1:
        return None, None
    return scaled, layer


def engine_requantisation(
    accepts: Accepts, limits: RequantisationLimits, digits_pay: Accepts | None = None
) -> Callable[[Graph], Graph]:
    """A rewrite: clip(requantize(linear)) of accepted layers becomes clip(scale-shift(linear)).

    Bias and input zero point move into the offset. A scale of 8 bits is right to 1 part in 256, so a result of 8 bits
    is within 2 of the original.
    """
    least, most = float(limits.activations.low), float(limits.activations.high)

    def rule(draft: Draft, node: Node) -> str | None:
        scaled, linear = scaled_layer(draft, node, Requantize, Linear)
        if scaled is None or linear is None or draft.types[node.output].dtype.bits > 8:
            return None
        requantize, operator = scaled.operator, linear.operator
        assert isinstance(requantize, Requantize) and isinstance(operator, Linear)
        if reason := _unfit(draft, scaled, linear, limits, accepts):
            return draft.leave(node, reason)
        filters = draft.constants[linear.inputs[1]]
        weights = _of_channels(operator, filters)
        channels = weights.shape[0]
        bias = draft.constants[linear.inputs[2]].astype(np.int64) if len(linear.inputs) > 2 else np.zeros(channels, int)
        multiplier, shift = (
            np.broadcast_to(draft.constants[v].astype(np.float64), channels) for v in scaled.inputs[1:]
        )
        factor = multiplier * 2.0 ** (shift - 31)
        sums = SumOffsets(operator.input_zero_point, bias, requantize.output_zero_point)
        if limits.multiplies:
            if limits.bias_first:
                idle = factor * np.abs(weights).sum(axis=1) * max(-least, most) < 0.5
                weights, filters = weights * ~idle[:, None], _without(operator, filters, idle)
            found = with_product(factor, weights, sums, limits)
        else:
            pays = digits_pay is not None and digits_pay(draft.types, linear)
            found, weights = without_product(factor, weights, sums, limits, pays)
            filters = _to_channels(operator, weights, filters)
        if found is None:
            return draft.leave(node, _unscalable(factor, limits))
        bare = operator.with_zero_points(0)
        kept = linear.inputs[1]
        if filters is not draft.constants[kept]:
            kept = draft.constant(filters, draft.types[kept].dtype, kept)
        accumulator = draft.add(bare, [linear.inputs[0], kept], linear, f"{linear.output}_bare")
        shifted = scale_shifted(draft, accumulator, found, scaled, linear.inputs[1], f"{node.output}_by_engine")
        return draft.add(node.operator, [shifted], node)

    return lambda graph: run(graph, [rule])


def _unfit(draft: Draft, scaled: Node, linear: Node, limits: RequantisationLimits, accepts: Accepts) -> str:
    """Why a requantised layer is none for `engine_requantisation`; empty where it is one."""
    requantize, operator = scaled.operator, linear.operator
    assert isinstance(requantize, Requantize) and isinstance(operator, Linear)
    kind = draft.types[linear.inputs[0]].dtype  # an input of the network may be narrower
    taken = kind.bits <= 8 and kind is limits.activations.narrowed(kind.bits)
    tests = (
        (not taken, f"activations are {kind.text}, not {limits.activations.text}"),
        (operator.weight_zero_point, f"the weights have the zero point {operator.weight_zero_point}, not 0"),
        (
            any(value not in draft.constants for value in (*scaled.inputs[1:], *linear.inputs[1:])),
            "weights, bias or multipliers are not known at compile time",
        ),
        (requantize.input_zero_point or requantize.left_shift, "the sum is no plain one of products"),
    )
    found = next((sentence for wrong, sentence in tests if wrong), "")
    return found or ("" if accepts(draft.types, linear) else "the engine has no layer of this shape or window")


def _unscalable(factor: NDArray[np.float64], limits: RequantisationLimits) -> str:
    """Why sums with these factors cannot be brought to their results by an engine."""
    exponents = np.log2(np.maximum(factor, 2.0**-60))
    crooked = np.flatnonzero(exponents != np.rint(exponents))
    if limits.scale_bits == 1 and limits.multiplies and crooked.size:
        what = f"the multiplier of channel {crooked[0]} is no power of two ({factor[crooked[0]]:.6g})"
        return f"{what}; dovetail quantize makes networks of shifts"
    channel = int(factor.argmax())
    what = f"the multiplier of channel {channel} is {factor[channel]:.6g}: "
    if not limits.multiplies:
        return what + "weights that hold it have more than 8 bits, or a sum leaves 32 bits"
    return what + f"no scale of {limits.scale_bits} bits and shift of at most {limits.most_shift} keep sums in 32 bits"


def _to_channels(operator: Linear, weights: Array, like: Array) -> Array:
    """Filters of [C, taps], laid out as `like`."""
    moved = np.moveaxis(like, operator.weight_axis, 0)
    return np.moveaxis(weights.reshape(moved.shape), 0, operator.weight_axis).astype(like.dtype)


def scale_shifted(
    draft: Draft, value: str, parameters: Sequence[int | Array], like: Node, named: str, stem: str = ""
) -> str:
    """(value * scale + offset) >> shift by three parameters, each a number or one per channel; they are named so."""
    arrays = (np.atleast_1d(np.asarray(parameter)).astype(np.int32) for parameter in parameters)
    names = [draft.constant(array, DType.INT32, named) for array in arrays]
    return draft.add(ScaleShift(), [value, *names], like, stem)


def _without(operator: Linear, filters: Array, idle: Array) -> Array:
    """The filters with those of idle channels, which can never move the result, set to zero."""
    if not idle.any():
        return filters
    shape = [1] * filters.ndim
    shape[operator.weight_axis] = -1
    return np.where(idle.reshape(shape), filters.dtype.type(0), filters)


def split_bias(accepts: Accepts) -> Callable[[Graph], Graph]:
    """A rewrite: accepted linear layers lose bias and input zero point to an addition behind them. Exact."""

    def rule(draft: Draft, node: Node) -> str | None:
        operator = node.operator
        if not isinstance(operator, Linear) or not accepts(draft.types, node):
            return None
        if draft.types[node.inputs[0]].dtype is not DType.UINT8 or operator.weight_zero_point:
            return draft.leave(node, "activations are not uint8, or the weights have a zero point")
        if any(value not in draft.constants for value in node.inputs[1:]):
            return draft.leave(node, "weights or bias are not known at compile time")
        if len(node.inputs) == 2 and operator.input_zero_point == 0:
            return None
        weights = _of_channels(operator, draft.constants[node.inputs[1]])
        bias = draft.constants[node.inputs[2]].astype(np.int64) if len(node.inputs) > 2 else 0
        addend = (bias - operator.input_zero_point * weights.sum(axis=1)).astype(np.int32)
        bare = draft.add(operator.with_zero_points(0), node.inputs[:2], node)
        return draft.add(Add(), [bare, draft.constant(addend, DType.INT32, node.inputs[1])], node)

    return lambda graph: run(graph, [rule])


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
        scaled, layer = scaled_layer(draft, node, ScaleShift, Conv2d, FullyConnected)
        constants = draft.constants
        if scaled is None or layer is None or len(layer.inputs) > 2:
            return None
        if any(name not in constants for name in (layer.inputs[1], *scaled.inputs[1:])):
            return None
        weights = constants[layer.inputs[1]]
        scale, offset, shift = (constants[name].astype(np.int64) for name in scaled.inputs[1:])
        if np.abs(weights).max() > 1:
            return draft.leave(
                node, f"weights reach from {weights.min()} to {weights.max()}; the array has -1, 0 and 1"
            )
        if (scale != 1).any() or len(set(shift.reshape(-1).tolist())) > 1:
            return draft.leave(node, "the requantisation is not one shift for the whole layer")
        assert isinstance(node.operator, Clip)
        if (node.operator.low, node.operator.high) == limits.code:
            return None  # a converter's already
        fitted = _fit(weights, offset, int(shift.flat[0]), node.operator, limits)
        if fitted is None:
            return draft.leave(node, "no gain of the converter holds its sums")
        if not accepts(draft.types, layer):
            return draft.leave(node, "the array has no room for it")
        gain, after = fitted
        pad = draft.made_by(layer.inputs[0], Pad)
        value = pad.inputs[0] if pad is not None else layer.inputs[0]
        value = draft.add(Clip(*limits.operand, DType.INT8), [value], node)
        value = draft.add(pad.operator, [value], node) if pad is not None else value
        total = draft.add(layer.operator, [value, layer.inputs[1]], layer)
        gained = scale_shifted(draft, total, (1, 0, gain), node, node.output)
        code = draft.add(Clip(*limits.code, DType.INT8), [gained], node)
        return draft.add(node.operator, [scale_shifted(draft, code, after, scaled, node.output)], node)

    return lambda graph: run(graph, [rule])


def _fit(
    weights: Array, offset: Array, shift: int, clip: Clip, limits: ConverterLimits
) -> tuple[int, tuple[int, Array, int]] | None:
    """The gain, and scale, offset and shift that bring its codes to the results of (sum + offset) >> shift; None where
    it does not fit."""
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
            return (gain, (int(scale), added, after)) if gain <= limits.most_shift else None
    return None
