"""Requantisation in an engine's own arithmetic: small scales and shifts, converters of few bits, sums of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, Requantize, ScaleShift, digit_scales
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, FullyConnected, Linear
from dovetail.ir.operators.movement import Concat, Pad
from dovetail.ir.rewrite import Draft, run
from dovetail.ir.types import Array, DType, TensorType

_MOST_WEIGHT = 127
_LEAST_SCALE = 16
"""A smaller scale would be wrong by more than 1 part in 32, if it is not exact; such a layer is left to the core."""

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
    multiplies: bool = True
    """Whether there is a product at all. If not, the factor but for a power of two goes into the weights."""
    digits: int = 0
    """Without a product, the most shifts and additions that make one; of layers the rewrite is told of."""


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


def folded(
    real: NDArray[np.float64], weights: NDArray[Any], most_shift: int, keeps_sum: bool = True
) -> tuple[Array, Array] | None:
    """Weights that hold a factor but for a power of two, per channel: sum(w * x) * real is sum(folded * x) >> shift.

    The shift is the largest with which no weight exceeds 127, so that as little as can be is lost.

    Args:
        real: the factors, at least 0.
        weights: [C, taps], whole numbers or not.
        most_shift: of the engine.
        keeps_sum: whether rounding keeps each channel's sum of weights to within half a unit: operands of layers mostly
            lie on one side of their zero point, and an error that all of them share would add up.

    Returns:
        Weights, int64 [C, taps], and shifts, int64 [C]; None where a factor is too large for any shift.
    """
    wanted = weights.astype(np.float64) * real[:, None]
    reach = np.abs(wanted).max(axis=1, initial=0)
    if (reach >= _MOST_WEIGHT + 0.5).any():
        return None
    exponents = np.floor(np.log2((_MOST_WEIGHT + 0.49) / np.maximum(reach, 2.0**-60)))
    shifts = np.where(reach > 0, np.minimum(exponents, most_shift), 0).astype(np.int64)
    wanted = wanted * 2.0 ** shifts[:, None]
    whole = np.rint(wanted).astype(np.int64)
    for channel, exact in enumerate(wanted if keeps_sum else ()):
        missing = int(np.rint(exact.sum() - whole[channel].sum()))
        step = int(np.sign(missing))
        # those whose rounding went the other way farthest
        order = np.argsort(-(exact - whole[channel]) * step, kind="stable")
        chosen = [tap for tap in order if abs(whole[channel, tap] + step) <= _MOST_WEIGHT][: abs(missing)]
        whole[channel, chosen] += step
    return whole, shifts


def scale_of_digits(
    real: NDArray[np.float64], most: NDArray[np.float64], count: int, most_shift: int
) -> tuple[Array, Array]:
    """Per channel a scale of `count` digits (`digit_scales`), none above `most`, and a shift:
    scale >> shift is as near to `real` as can be. A factor of 0 gets the least scale."""
    known: NDArray[np.float64] = np.array(sorted(digit_scales(count)), np.float64)
    shift = np.rint(np.log2(known / np.maximum(real, 2.0**-60)[:, None]))
    error = np.abs(known / 2.0**shift / np.maximum(real, 2.0**-60)[:, None] - 1)
    error[(shift < 0) | (shift > most_shift) | (known > most[:, None])] = np.inf
    best = error.argmin(axis=1)
    every = np.arange(len(real))
    fits = np.isfinite(error[every, best])
    scale = np.where(fits, known[best], known[0]).astype(np.int64)
    return scale, np.where(fits, shift[every, best], 0).astype(np.int64)


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
        sums = _Sums(operator.input_zero_point, bias, requantize.output_zero_point)
        if limits.multiplies:
            if limits.bias_first:
                idle = factor * np.abs(weights).sum(axis=1) * max(-least, most) < 0.5
                weights, filters = weights * ~idle[:, None], _without(operator, filters, idle)
            found = _scaled(factor, weights, sums, limits)
        else:
            pays = digits_pay is not None and digits_pay(draft.types, linear)
            found, weights = _without_product(factor, weights, sums, limits, pays)
            filters = _to_channels(operator, weights, filters)
        if found is None:
            return draft.leave(node, _unscalable(factor, limits))
        bare = operator.with_zero_points(0)
        kept = linear.inputs[1]
        if filters is not draft.constants[kept]:
            kept = draft.constant(filters, draft.types[kept].dtype, kept)
        accumulator = draft.add(bare, [linear.inputs[0], kept], linear, f"{linear.output}_bare")
        shifted = _scale_shifted(draft, accumulator, found, scaled, linear.inputs[1], f"{node.output}_by_engine")
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


Parameters = tuple[Array, Array, Array]
"""Scale, offset and shift, int32 per channel."""


@dataclass(frozen=True)
class _Sums:
    """What is added to a sum of products on its way to the result."""

    zero_point: int
    """Of the operand."""
    bias: Array
    result_zero_point: int


def _edges(weights: Array, limits: RequantisationLimits) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least and the greatest sum of products per channel."""
    low, high = float(limits.activations.low), float(limits.activations.high)
    return np.minimum(weights * low, weights * high).sum(axis=1), np.maximum(weights * low, weights * high).sum(axis=1)


def _scaled(real: NDArray[np.float64], weights: Array, sums: _Sums, limits: RequantisationLimits) -> Parameters | None:
    """The parameters of a layer whose weights [C, taps] stay as they are; None as `scale_and_shift`."""
    correction = -float(sums.zero_point) * weights.sum(axis=1)
    bias = sums.bias.astype(np.float64)
    return scale_and_shift(real, bias, correction, *_edges(weights, limits), sums.result_zero_point, limits)


_LEAST_PRECISION = 44
"""A scale of digits may miss a factor by one part in so many, which three digits always reach."""
_MOST_LOST = 1.5
"""Steps of the result, root mean square, that rounding weights may cost where a scale of digits costs little."""


def _without_product(
    real: NDArray[np.float64], weights: Array, sums: _Sums, limits: RequantisationLimits, digits_pay: bool
) -> tuple[Parameters | None, Array]:
    """The parameters of a layer and its weights: the factor in these, or where that loses much a scale of digits."""
    found, made = _shifted(real, weights, sums, limits)
    if digits_pay and (found is None or _lost(real, weights, made, found[2]) > _MOST_LOST):
        exact = _by_digits(real, weights, sums, limits)
        if exact is not None:
            return exact, weights
    return found, made


def _lost(real: NDArray[np.float64], weights: Array, made: Array, shift: Array) -> float:
    """What rounding the weights costs a result, root mean square in its steps, for operands of all sizes alike."""
    errors = made * 2.0 ** -shift.astype(np.float64)[:, None] - weights * real[:, None]
    return float(np.sqrt((errors**2).sum(axis=1).mean() * (256.0**2 / 12)))


def _by_digits(
    real: NDArray[np.float64], weights: Array, sums: _Sums, limits: RequantisationLimits
) -> Parameters | None:
    """The parameters of a layer whose weights [C, taps] stay as they are, its scale one of few digits; None where a sum
    would leave int32, or the scale misses a factor by more than 1 part in 44."""
    low, high = _edges(weights, limits)
    correction = -float(sums.zero_point) * weights.sum(axis=1)
    inner = np.abs(sums.bias + correction) + np.maximum(np.abs(low), np.abs(high))
    ends = (abs(sums.result_zero_point) + 1) / np.maximum(real, 2.0**-60)
    most = (2.0**31 - 1) / (inner + ends + 1)
    scale, shift = scale_of_digits(real, most, limits.digits, 2 * limits.most_shift)
    unit = 2.0**shift
    if (scale > most).any() or (
        np.abs(scale / unit - real) * inner > np.maximum(real * inner / _LEAST_PRECISION, 0.5)
    ).any():
        return None
    exact = sums.bias * real * unit + sums.result_zero_point * unit + np.floor(unit / 2)
    offset = (np.rint(exact / scale) + correction) * scale
    return scale.astype(np.int32), offset.astype(np.int32), shift.astype(np.int32)


def _shifted(
    real: NDArray[np.float64], weights: Array, sums: _Sums, limits: RequantisationLimits
) -> tuple[Parameters | None, Array]:
    """The parameters of a layer, of scale 1, and the weights [C, taps] that make it so; None where there are none."""
    found = folded(real, weights, limits.most_shift)
    if found is None:
        return None, weights
    made, shift = found
    unit = 2.0**shift
    offset = np.rint(sums.bias * real * unit) - sums.zero_point * made.sum(axis=1)
    offset += sums.result_zero_point * unit + np.floor(unit / 2)
    if max(np.abs(edge + offset).max() for edge in (*_edges(made, limits), np.zeros(1))) >= 1 << 31:
        return None, weights
    ones = np.ones(shift.shape, np.int32)
    return (ones, offset.astype(np.int32), shift.astype(np.int32)), made


def _to_channels(operator: Linear, weights: Array, like: Array) -> Array:
    """Filters of [C, taps], laid out as `like`."""
    moved = np.moveaxis(like, operator.weight_axis, 0)
    return np.moveaxis(weights.reshape(moved.shape), 0, operator.weight_axis).astype(like.dtype)


def _scale_shifted(
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
        gained = _scale_shifted(draft, total, (1, 0, gain), node, node.output)
        code = draft.add(Clip(*limits.code, DType.INT8), [gained], node)
        return draft.add(node.operator, [_scale_shifted(draft, code, after, scaled, node.output)], node)

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


def addition_as_convolution(limits: RequantisationLimits) -> Callable[[Graph], Graph]:
    """A rewrite: requantize(add(requantize(a), requantize(b))) of two 8-bit images of one shape becomes a 1x1
    convolution of both, channels side by side, with a diagonal per operand, requantised as the engine does.

    The weights hold the ratio of the two scales to about 1 part in 200; the result is within 2 of the original.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        total = _sum_of_two(draft, node, limits.activations)
        if total is None:
            return None
        channels = draft.types[node.output].shape[3]
        chosen = _of_two(total, limits)
        if chosen is None:
            ratio = f"{total.factors[0]:.6g} and {total.factors[1]:.6g}"
            return draft.leave(node, f"the operands are multiplied by {ratio}, which no small weights and a shift hold")
        weights, found = chosen
        both = draft.add(Concat(3), total.operands, node)
        diagonal = np.concatenate([np.eye(channels) * weights[0], np.eye(channels) * weights[1]], axis=1)
        table = diagonal.astype(np.int8).reshape(channels, 1, 1, 2 * channels)
        accumulator = draft.add(Conv2d(), [both, draft.constant(table, DType.INT8, node.output)], node)
        shifted = _scale_shifted(draft, accumulator, found, node, node.output, f"{node.output}_by_engine")
        return draft.add(node.operator, [shifted], node)

    return lambda graph: run(graph, [rule])


def _of_two(total: _Sum, limits: RequantisationLimits) -> tuple[Array, Parameters] | None:
    """The weights of two operands, int64 [2], and the parameters behind them, the same for every channel; None where
    there are none."""
    factors, zeros = np.array(total.factors), total.zeros
    if limits.multiplies:
        weights = np.array(_weights(*total.factors))
        real = np.array([factors.max() / weights.max()])
    else:
        made = folded(np.ones(1), factors[None], limits.most_shift, keeps_sum=False)
        if made is None:
            return None
        weights, real = made[0][0], 2.0 ** -made[1].astype(np.float64)
    at_zero = np.array([-(weights[0] * zeros[0] + weights[1] * zeros[1])], np.float64)
    found = scale_and_shift(real, np.zeros(1), at_zero, *_edges(weights[None], limits), zeros[2], limits)
    return None if found is None else (weights, found)


@dataclass(frozen=True)
class _Sum:
    """clip(requantize(add(requantize(a), requantize(b)))) of two different 8-bit images of one type."""

    operands: list[str]
    factors: list[float]
    """What each operand is multiplied with on its way to the result, greater than 0."""
    zeros: list[int]
    """Zero points of the operands, and of the result."""


def _sum_of_two(draft: Draft, node: Node, activations: DType) -> _Sum | None:
    """The sum that ends in `node`, of operands of a type; None where there is none or something else reads a part."""
    scaled, added = scaled_layer(draft, node, Requantize, Add)
    if scaled is None or added is None:
        return None
    sides = [draft.made_by(value, Requantize) for value in added.inputs]
    if any(side is None or draft.types[side.inputs[0]].dtype is not activations for side in sides):
        return None
    left, right = (side for side in sides if side is not None)
    kind = draft.types[left.inputs[0]]
    if kind != draft.types[right.inputs[0]] or len(kind.shape) != 4 or left.inputs[0] == right.inputs[0]:
        return None
    factors = [_factor(draft, side) * _factor(draft, scaled) for side in (left, right)]
    if min(factors) <= 0:
        return None
    scalings = [part.operator for part in (left, right, scaled) if isinstance(part.operator, Requantize)]
    zeros = [*(scaling.input_zero_point for scaling in scalings[:2]), scalings[2].output_zero_point]
    return _Sum([left.inputs[0], right.inputs[0]], factors, zeros)


def _factor(draft: Draft, node: Node) -> float:
    """The real factor of a requantisation with one multiplier; 0 when it has several."""
    operator = node.operator
    assert isinstance(operator, Requantize)
    parameters = [draft.constants.get(value) for value in node.inputs[1:]]
    if any(array is None or array.size != 1 for array in parameters):
        return 0.0
    multiplier, shift = (int(array[0]) for array in parameters if array is not None)
    return float(multiplier) * 2.0 ** (shift - 31 + operator.left_shift)


def _weights(left: float, right: float) -> tuple[int, int]:
    """Two small whole numbers in the ratio of two factors, as near as can be."""
    large, small = max(left, right), min(left, right)
    candidates = range(_MOST_WEIGHT // 2, _MOST_WEIGHT + 1)
    best = min(candidates, key=lambda weight: (abs(round(weight * small / large) / weight - small / large), -weight))
    other = round(best * small / large)
    return (best, other) if left >= right else (other, best)


def addition_by_shift(most_shift: int) -> Callable[[Graph], Graph]:
    """A rewrite: requantize(add(requantize(a), requantize(b))) of two int8 images of one shape and one scale, a power
    of two apart from the result's, becomes (a + b) >> shift, rounded down. The result is within 1 of the original."""

    def rule(draft: Draft, node: Node) -> str | None:
        found = _sum_of_two(draft, node, DType.INT8)
        if found is None:
            return None
        if found.factors[0] != found.factors[1]:
            return draft.leave(
                node, f"the operands have different scales ({found.factors[0] / found.factors[1]:.6g} to 1)"
            )
        if any(found.zeros):
            return draft.leave(
                node, f"operands and result have the zero points {', '.join(map(str, found.zeros))}, not 0"
            )
        shift = -np.log2(found.factors[0])
        if shift != int(shift) or not 0 <= shift <= most_shift:
            return draft.leave(
                node, f"the scale of the result is no power of two times the operands' ({2.0**shift:.6g})"
            )
        wide = [draft.add(Offset(0, DType.INT32), [value], node) for value in found.operands]
        total = draft.add(Add(), wide, node)
        shifted = _scale_shifted(draft, total, (1, 0, int(shift)), node, node.output)
        return draft.add(node.operator, [shifted], node)

    return lambda graph: run(graph, [rule])
