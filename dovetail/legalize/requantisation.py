"""Requantisation in an engine's own arithmetic: small scales and shifts, a bias apart, converters of few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, ScaleShift
from dovetail.ir.operators.linear import Conv2d, FullyConnected, Linear
from dovetail.ir.operators.movement import Pad
from dovetail.ir.pattern import Apply, Pattern, apply, maybe, operand, rest
from dovetail.ir.requantisation.engine import RequantisationLimits, SumOffsets, with_product, without_product
from dovetail.ir.rules import Condition, Left, Rule, RuleMatch, rewriting
from dovetail.ir.types import Array, DType, TensorType
from dovetail.records import Record

Accepts = Callable[[Mapping[str, TensorType], Node], bool]
"""Whether the engine computes a linear node; told the types of all values."""

X, WEIGHTS, BIAS, PARAMETERS = operand("x"), operand("weights"), rest("bias"), rest("parameters")


def accepted(accepts: Accepts, layer: Apply[Any], sentence: str = "") -> Condition:
    """The condition that an engine computes a layer."""
    return sentence, lambda at: accepts(at.draft.types, at.node(layer))


def scale_shifted(
    at: RuleMatch,
    value: Pattern | str,
    parameters: Sequence[int | Array],
    like: Apply[Any] | None = None,
    named: Pattern | str = "",
    stem: str = "",
) -> str:
    """(value * scale + offset) >> shift by three parameters, each a number or one per channel; they are named so."""
    arrays = (np.atleast_1d(np.asarray(parameter)).astype(np.int32) for parameter in parameters)
    names = [at.constant(array, DType.INT32, named) for array in arrays]
    return at.add(ScaleShift(), value, *names, like=like, stem=stem)


_LAYER = apply(Linear, X, WEIGHTS, BIAS, alone=True)
_SCALED = apply(Requantize, _LAYER, PARAMETERS, alone=True)
_REQUANTISED = apply(Clip, _SCALED, having=lambda clip: clip.dtype.bits <= 8)


def engine_requantisation(
    accepts: Accepts, limits: RequantisationLimits, digits_pay: Accepts | None = None
) -> Callable[[Graph], Graph]:
    """A rewrite: clip(requantize(linear)) of accepted layers becomes clip(scale-shift(linear)).

    Bias and input zero point move into the offset. A scale of 8 bits is right to 1 part in 256, so a result of 8 bits
    is within 2 of the original.

    Args:
        accepts: the layers that the engine takes.
        limits: its scales, shifts and offsets.
        digits_pay: for an engine without products, the layers for which it pays to keep the weights and take a
            scale of few binary digits; none where it is left out.
    """
    activations = limits.activations

    def fits(at: RuleMatch) -> bool:
        kind = at.type(X).dtype  # an input of the network may be narrower
        return kind.bits <= 8 and kind is activations.narrowed(kind.bits)

    def by_engine(at: RuleMatch) -> str | Left:
        operator, filters = at[_LAYER], at.array(WEIGHTS)
        weights = operator.filters(filters).astype(np.int64)
        channels = len(weights)
        bias = [at.array(value).astype(np.int64) for value in at.others(_LAYER)] or [np.zeros(channels, int)]
        multiplier, shift = (np.broadcast_to(at.array(v).astype(np.float64), channels) for v in at.others(_SCALED))
        factor = multiplier * 2.0 ** (shift - 31)
        sums = SumOffsets(operator.input_zero_point, bias[0], at[_SCALED].output_zero_point)
        kept = at.value(WEIGHTS)
        if limits.multiplies:
            reach = factor * np.abs(weights).sum(axis=1) * max(-activations.low, activations.high)
            idle = reach < 0.5 if limits.bias_first else np.zeros(channels, bool)
            weights[idle] = 0  # they never move the result
            parameters, is_new = with_product(factor, weights, sums, limits), idle.any()
        else:
            pays = digits_pay is not None and digits_pay(at.draft.types, at.node(_LAYER))
            parameters, weights = without_product(factor, weights, sums, limits, pays)
            is_new = True
        if parameters is None:
            return Left(_unscalable(factor, limits))
        if is_new:
            kept = at.constant(operator.as_weights(weights, filters), at.type(WEIGHTS).dtype, WEIGHTS)
        sums_of = at.add(operator.with_zero_points(0), X, kept, like=_LAYER, stem=f"{at.value(_LAYER)}_bare")
        stem = f"{at.root.output}_by_engine"
        return at.add(at[_REQUANTISED], scale_shifted(at, sums_of, parameters, _SCALED, WEIGHTS, stem))

    def activations_differ(at: RuleMatch) -> str:
        return f"activations are {at.type(X).dtype.text}, not {activations.text}"

    return rewriting(
        Rule(
            _REQUANTISED,
            by_engine,
            (
                (activations_differ, fits),
                *_PLAIN_SUM,
                accepted(accepts, _LAYER, "the engine has no layer of this shape or window"),
            ),
        )
    )


def _has_zero_point(at: RuleMatch) -> str:
    return f"the weights have the zero point {at[_LAYER].weight_zero_point}, not 0"


_PLAIN_SUM = (
    (_has_zero_point, lambda at: not at[_LAYER].weight_zero_point),
    ("weights, bias or multipliers are not known at compile time", lambda at: at.knows(_SCALED) and at.knows(_LAYER)),
    ("the sum is no plain one of products", lambda at: not (at[_SCALED].input_zero_point or at[_SCALED].left_shift)),
)
"""Conditions of a requantised layer whose sums an engine can requantise."""


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


_ANY_LAYER = apply(Linear, X, WEIGHTS, BIAS)


def split_bias(accepts: Accepts) -> Callable[[Graph], Graph]:
    """A rewrite: linear layers that `accepts` takes lose bias and input zero point to an addition after them."""

    def apart(at: RuleMatch) -> str:
        operator = at[_ANY_LAYER]
        filters = operator.filters(at.array(WEIGHTS).astype(np.int64))
        bias = sum(at.array(value).astype(np.int64) for value in at.others(_ANY_LAYER))
        addend = (bias - operator.input_zero_point * filters.sum(axis=1)).astype(np.int32)
        bare = at.add(operator.with_zero_points(0), X, WEIGHTS)
        return at.add(Add(), bare, at.constant(addend, DType.INT32, WEIGHTS))

    return rewriting(
        Rule(
            _ANY_LAYER,
            apart,
            (
                accepted(accepts, _ANY_LAYER),
                (
                    "activations are not uint8, or the weights have a zero point",
                    lambda at: at.type(X).dtype is DType.UINT8 and not at[_ANY_LAYER].weight_zero_point,
                ),
                ("weights or bias are not known at compile time", lambda at: at.knows(_ANY_LAYER)),
                lambda at: bool(at.others(_ANY_LAYER)) or at[_ANY_LAYER].input_zero_point != 0,
            ),
        )
    )


class ConverterLimits(Record):
    """Limits of an analog array: its operands, its converter, and the scaling after it."""

    operand: tuple[int, int]
    """Least and greatest activation; others saturate."""
    code: tuple[int, int]
    """Least and greatest result of the converter."""
    most_shift: int
    """The largest shift before and after."""
    scaled_bits: int
    """Bits that products and sums behind the converter keep within, sign included."""


_IMAGE = operand("image")
_PAD = maybe(Pad, _IMAGE)
_TERNARY = apply((Conv2d, FullyConnected), _PAD, WEIGHTS, alone=True)
_SHIFTED = apply(ScaleShift, _TERNARY, PARAMETERS, alone=True)
_LIMITED = apply(Clip, _SHIFTED)


def through_converter(accepts: Accepts, limits: ConverterLimits) -> Callable[[Graph], Graph]:
    """A rewrite for an analog array: layers that `accepts` takes, with scale 1 and weights of -1, 0 and 1, go through
    its converter.

        clip(scale-shift(conv(x))) -> clip((clip(conv(clip(x)) >> gain) * scale + offset) >> shift)

    The gain is the smallest with which no sum saturates that does not saturate in the result too. The lost bits are
    those below the gain, and operands beyond the limits.
    """

    def weights_reach(at: RuleMatch) -> str:
        weights = at.array(WEIGHTS)
        return f"weights reach from {weights.min()} to {weights.max()}; the array has -1, 0 and 1"

    def is_one_shift(at: RuleMatch) -> bool:
        scale, _, shift = (at.array(value) for value in at.others(_SHIFTED))
        return bool((scale == 1).all() and (shift == shift.flat[0]).all())

    def gain_of(at: RuleMatch) -> tuple[int, tuple[int, Array, int]] | None:
        _, offset, shift = (at.array(value).astype(np.int64) for value in at.others(_SHIFTED))
        return _fit(at.array(WEIGHTS), offset, int(shift.flat[0]), at[_LIMITED], limits)

    def converted(at: RuleMatch) -> str | Left:
        gained = gain_of(at)
        if gained is None:
            return Left("no gain of the converter holds its sums")
        if not accepts(at.draft.types, at.node(_TERNARY)):
            return Left("the array has no room for it")
        gain, after = gained
        value = at.add(Clip(*limits.operand, DType.INT8), _IMAGE)
        value = at.add(at[_PAD], value) if at.has(_PAD) else value
        total = at.add(at[_TERNARY], value, WEIGHTS, like=_TERNARY)
        code = at.add(Clip(*limits.code, DType.INT8), scale_shifted(at, total, (1, 0, gain)))
        return at.add(at[_LIMITED], scale_shifted(at, code, after, _SHIFTED))

    return rewriting(
        Rule(
            _LIMITED,
            converted,
            (
                lambda at: at.knows(_TERNARY) and at.knows(_SHIFTED),
                (weights_reach, lambda at: np.abs(at.array(WEIGHTS)).max() <= 1),
                ("the requantisation is not one shift for the whole layer", is_one_shift),
                # else it is a converter's already
                lambda at: (at[_LIMITED].low, at[_LIMITED].high) != limits.code,
            ),
        )
    )


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
