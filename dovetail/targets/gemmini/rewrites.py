"""Networks in Gemmini's terms: sums of two images and means as layers; results with scales per channel in two steps.

The second step rounds as the array does, in float32 with halves to the nearest even. `finer_sums` makes that exact: the
core multiplies and cuts off so finely that what TensorFlow Lite's two roundings tell apart still differs; the array
takes twice that and an odd number, so that it never meets a half.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding, fixed_point, multiplier_arrays
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat
from dovetail.ir.operators.reduction import AveragePool2d, SumPool2d
from dovetail.ir.pattern import Apply, apply, constant, operand, rest
from dovetail.ir.rules import Left, Predicate, Rule, RuleMatch, rewriting
from dovetail.ir.types import Array, DType

_A, _B, _PARAMETERS = operand("a"), operand("b"), rest("parameters")
_SIDES = apply(Requantize, _A, _PARAMETERS), apply(Requantize, _B, _PARAMETERS)
_TOTAL = apply(Requantize, apply(Add, *_SIDES, alone=True), _PARAMETERS, alone=True)
_SUM = apply(Clip, _TOTAL)
_X = operand("x")
_MEAN, _TOTALS = apply(AveragePool2d, _X), apply(SumPool2d, _X)


def _factor(at: RuleMatch, part: Apply[Requantize]) -> float:
    return at[part].slope_of([at.draft.constants.get(value) for value in at.node(part).inputs]) or 0.0


def _scaled(at: RuleMatch, value: str, factor: float) -> str:
    """A sum times a factor, as int32."""
    names = [at.constant(array, DType.INT32) for array in multiplier_arrays([factor])]
    return at.add(Requantize(), value, *names)


def _weights(left: float, right: float) -> tuple[int, int]:
    """Two weights of 7 bits in the ratio of two factors, as near as can be, the larger first."""
    best = min(range(64, 128), key=lambda weight: abs(round(weight * right / left) / weight - right / left))
    return best, round(best * right / left)


def _as_convolution(at: RuleMatch) -> str:
    """clip(requantize(conv(concat(a, b)))), with a diagonal of weights for each."""
    factors = [_factor(at, side) * _factor(at, _TOTAL) for side in _SIDES]
    large, small = _weights(max(factors), min(factors))
    weights = (large, small) if factors[0] >= factors[1] else (small, large)
    channels = at.type(_A).shape[3]
    diagonals = np.concatenate([np.eye(channels, dtype=np.int8) * np.int8(weight) for weight in weights], axis=1)
    table = at.constant(diagonals.reshape(channels, 1, 1, 2 * channels), DType.INT8)
    total = at.add(Conv2d(), at.add(Concat(3), _A, _B), table)
    return at.add(at[_SUM], _scaled(at, total, max(factors) / large))


def _of_images(at: RuleMatch) -> bool:
    kind, factors = at.type(_A), [_factor(at, side) * _factor(at, _TOTAL) for side in _SIDES]
    alike = kind.dtype is DType.INT8 and kind == at.type(_B) and len(kind.shape) == 4 and at[_A] != at[_B]
    zeros = [at[side].input_zero_point for side in _SIDES] + [at[_TOTAL].output_zero_point]
    return alike and min(factors) > 0 and not any(zeros)


def _ones(at: RuleMatch, pool: Apply[Any]) -> str:
    """The sum of a whole image, as a depthwise layer whose weights are all 1."""
    operator, channels = at[pool], at.type(_X).shape[3]
    ones = at.constant(np.ones((1, *operator.kernel, channels), np.int8), DType.INT8)
    return at.add(DepthwiseConv2d(operator.stride), _X, ones, like=pool)


def _mean(at: RuleMatch) -> str:
    scaled = _scaled(at, _ones(at, _MEAN), 1 / prod(at[_MEAN].kernel))
    return at.add(Clip(-128, 127, DType.INT8), scaled)


def _whole(pool: Apply[Any]) -> Predicate:
    """A pool of all of one image of int8, without a zero point."""

    def holds(at: RuleMatch) -> bool:
        operator, kind = at[pool], at.type(_X)
        plain = not any(map(any, operator.padding)) and not operator.input_zero_point
        return plain and operator.kernel == kind.shape[1:3] and kind.dtype is DType.INT8 and kind.shape[0] == 1

    return holds


def sums_and_means(graph: Graph) -> Graph:
    """A rewrite: sums of two images of one shape become convolutions of both, side by side, whose two weights hold the
    ratio of the scales to 1 part in 250; means of whole images become depthwise layers. Results move by at most 1."""
    rules = (
        Rule(_SUM, _as_convolution, (_of_images,)),
        Rule(_MEAN, _mean, (_whole(_MEAN),)),
        Rule(_TOTALS, lambda at: _ones(at, _TOTALS), (_whole(_TOTALS),)),
    )
    return rewriting(*rules)(graph)


_WEIGHTS, _BIAS, _MULTIPLIER, _SHIFT = constant("weights"), rest("bias", known=True), constant("m"), constant("s")
_LAYER = apply((Conv2d, DepthwiseConv2d, FullyConnected), _X, _WEIGHTS, _BIAS)
_BROUGHT = apply(Requantize, _LAYER, _MULTIPLIER, _SHIFT, alone=True)
_LIMITED = apply(Clip, _BROUGHT)
LEAST_RESULTS = 256
"""Results of a layer from which a launch of the array takes less than the core saves by it."""
_MOST_SHIFT = 15
"""So that numbers which are limited to int8 are exact in float32."""


def finer_sums(shift: Array, zero_point: int) -> tuple[Array, Array, int]:
    """How results of `Rounding.DOUBLE` from the zero point on are made in two steps: floor(sum * multiplier *
    2**(shift - 31)), then twice that and an offset, times 2**-bits, to the nearest.

    With r the shift to the right, a result is at least n above the zero point from sum * multiplier * 2**-31 >=
    (n - 1/2) 2**r - 1/2 on. In units of 2**(1 - bits), bits being more than r + 1, that is an integer.

    Args:
        shift: int64 [channels], from -15 to -1. zero_point: of the result.

    Returns:
        The first step's shift and the second's offset, int64 [channels], and bits.
    """
    bits = 2 - int(shift.min())
    return bits - 1 + shift, (zero_point << bits) + (1 << (bits - 1 + shift)) + 1, bits


def _in_two_steps(at: RuleMatch) -> str | Left:
    channels, weights = at.type(_LIMITED).shape[-1], np.abs(at.array(_WEIGHTS).astype(np.int64))
    axes = tuple(range(weights.ndim - 1)) if at[_LAYER].is_channelwise else tuple(range(1, weights.ndim))
    swing, bias = 255 * weights.sum(axis=axes), sum(at.array(one).astype(np.int64) for one in at.others(_LAYER))
    multiplier, shift = (np.broadcast_to(at.array(one).astype(np.int64), channels) for one in (_MULTIPLIER, _SHIFT))
    ends = [fixed_point(bias + one, multiplier, shift, Rounding.DOUBLE) for one in (-swing, swing)]
    least, most = (np.clip(end + at[_BROUGHT].output_zero_point, at[_LIMITED].low, 127) for end in ends)
    constant_ones = least == most  # whatever the operand
    multiplier, shift = np.where(constant_ones, 0, multiplier), np.where(constant_ones, -1, shift)
    if shift.min() < -_MOST_SHIFT or shift.max() > -1:
        return Left(f"multipliers must be shifted by 1 to {_MOST_SHIFT}; here by {-shift.max()} to {-shift.min()}")
    first, offset, bits = finer_sums(shift, at[_BROUGHT].output_zero_point)
    offset = np.where(constant_ones, (least << bits) + 1, offset)
    reach = (swing + np.abs(bias)) * multiplier >> 30 - first
    if (reach + np.abs(offset)).max() >= 1 << 31:
        return Left("sums in units fine enough for all channels leave 32 bits")
    names = [at.constant(one.astype(np.int32), DType.INT32) for one in (multiplier, first, offset)]
    fine = at.add(Requantize(Rounding.DOWN), _LAYER, *names[:2])
    moved = at.add(Add(), at.add(Add(), fine, fine), names[2])
    scale = [at.constant(array, DType.INT32) for array in multiplier_arrays([2.0**-bits])]
    return at.add(at[_LIMITED], at.add(Requantize(Rounding.FLOAT32), moved, *scale))


def _limited_apart(at: RuleMatch) -> str | None:
    """clip(requantize(layer)), limited by the array: in float32 integers up to 2**24 are themselves."""
    if prod(at.type(_LIMITED).shape) < LEAST_RESULTS or at.type(_LIMITED).dtype is not DType.INT8:
        return None
    offset = np.full(at.type(_LIMITED).shape[-1], at[_BROUGHT].output_zero_point, np.int32)
    brought = at.add(replace(at[_BROUGHT], output_zero_point=0), _LAYER, _MULTIPLIER, _SHIFT)
    one = [at.constant(array, DType.INT32) for array in multiplier_arrays([1.0])]
    moved = at.add(Add(), brought, at.constant(offset, DType.INT32))
    return at.add(at[_LIMITED], at.add(Requantize(Rounding.FLOAT32), moved, *one))


def _rounds_twice(at: RuleMatch) -> bool:
    one = at[_BROUGHT]
    own = (one.rounding, one.input_zero_point, one.left_shift) == (Rounding.DOUBLE, 0, 0)
    return own and at.array(_MULTIPLIER).min() >= 0


def in_two_steps(graph: Graph) -> Graph:
    """A rewrite, exact: of layers whose results are limited to the zero point and above, the core multiplies and shifts
    the sums; the array rounds and limits them."""
    limits = lambda at: at[_LIMITED].low in (-128, 0) and at[_LIMITED].high == 127  # noqa: E731
    conditions = (
        lambda at: at.type(_LIMITED).dtype is DType.INT8 and prod(at.type(_LIMITED).shape) >= LEAST_RESULTS,
        (
            "results below the zero point are rounded another way than those above",
            lambda at: at[_LIMITED].low >= at[_BROUGHT].output_zero_point,
        ),
        ("results must be limited to 127, and to -128 or 0", limits),
        ("requantisation must round twice", _rounds_twice),
    )
    return rewriting(Rule(_LIMITED, _in_two_steps, conditions), Rule(_LIMITED, _limited_apart))(graph)
