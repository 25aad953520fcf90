"""Additions of two images, requantised, as an engine does them: a convolution of both, or a shift."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, Requantize
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat
from dovetail.ir.pattern import Apply, apply, operand
from dovetail.ir.requantisation.engine import (
    MOST_WEIGHT,
    Parameters,
    RequantisationLimits,
    edges,
    folded,
    scale_and_shift,
)
from dovetail.ir.rules import Condition, Left, Predicate, Rule, RuleMatch, rewriting
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize.requantisation import PARAMETERS, scale_shifted

_A, _B = operand("a"), operand("b")
_SIDES = apply(Requantize, _A, PARAMETERS), apply(Requantize, _B, PARAMETERS)
_SCALED = apply(Requantize, apply(Add, *_SIDES, alone=True), PARAMETERS, alone=True)
_SUM = apply(Clip, _SCALED)
"""clip(requantize(add(requantize(a), requantize(b))))."""


def _factors(at: RuleMatch) -> list[float]:
    """Factor of each operand on its way to the result; 0 if channels differ."""
    return [_factor(at, side) * _factor(at, _SCALED) for side in _SIDES]


def _factor(at: RuleMatch, part: Apply[Requantize]) -> float:
    return at[part].slope_of([at.draft.constants.get(value) for value in at.node(part).inputs]) or 0.0


def _zeros(at: RuleMatch) -> list[int]:
    """Zero points of the operands, and of the result."""
    return [*(at[side].input_zero_point for side in _SIDES), at[_SCALED].output_zero_point]


def _of_images(dtype: DType) -> Predicate:
    """Two different images of one shape and of this type."""

    def holds(at: RuleMatch) -> bool:
        kind = at.type(_A)
        alike = kind.dtype is dtype and kind == at.type(_B) and len(kind.shape) == 4 and at[_A] != at[_B]
        return alike and min(_factors(at)) > 0

    return holds


def addition_as_convolution(
    limits: RequantisationLimits, pays: Callable[[TensorType], bool] = lambda image: True
) -> Callable[[Graph], Graph]:
    """A rewrite: requantize(add(requantize(a), requantize(b))) of two 8-bit images of one shape becomes a 1x1
    convolution of both, channels side by side, with a diagonal per operand, requantised as the engine does.

    `limits` are those of the engine's requantisation.
    The products and weights are as many as of any such convolution: `pays` says for which images that is worth it.
    The weights hold the ratio of the two scales to about 1 part in 200; the result is within 2 of the original.
    """

    def as_convolution(at: RuleMatch) -> str | Left:
        channels, chosen = at.type(_SUM).shape[3], _of_two(at, limits)
        if chosen is None:
            ratio = " and ".join(f"{factor:.6g}" for factor in _factors(at))
            return Left(f"the operands are multiplied by {ratio}, which no small weights and a shift hold")
        weights, parameters = chosen
        both = at.add(Concat(3), _A, _B)
        diagonal = np.concatenate([np.eye(channels) * weight for weight in weights], axis=1)
        table = at.constant(diagonal.astype(np.int8).reshape(channels, 1, 1, 2 * channels), DType.INT8)
        stem = f"{at.root.output}_by_engine"
        return at.add(at[_SUM], scale_shifted(at, at.add(Conv2d(), both, table), parameters, stem=stem))

    return rewriting(Rule(_SUM, as_convolution, (_of_images(limits.activations), lambda at: pays(at.type(_SUM)))))


def _of_two(at: RuleMatch, limits: RequantisationLimits) -> tuple[Array, Parameters] | None:
    """The weights of two operands, int64 [2], and the parameters behind them, the same for every channel; None where
    there are none."""
    factors, zeros = np.array(_factors(at)), _zeros(at)
    if limits.multiplies:
        weights = np.array(_weights(*factors))
        real = np.array([factors.max() / weights.max()])
    else:
        fit = folded(np.ones(1), factors[None], limits.most_shift, keeps_sum=False)
        if fit is None:
            return None
        weights, real = fit[0][0], 2.0 ** -fit[1].astype(np.float64)
    at_zero = np.array([-(weights[0] * zeros[0] + weights[1] * zeros[1])], np.float64)
    parameters = scale_and_shift(real, np.zeros(1), at_zero, *edges(weights[None], limits), zeros[2], limits)
    return None if parameters is None else (weights, parameters)


def _weights(left: float, right: float) -> tuple[int, int]:
    """Two small whole numbers in the ratio of two factors, as near as can be."""
    large, small = max(left, right), min(left, right)
    candidates = range(MOST_WEIGHT // 2, MOST_WEIGHT + 1)
    best = min(candidates, key=lambda weight: (abs(round(weight * small / large) / weight - small / large), -weight))
    other = round(best * small / large)
    return (best, other) if left >= right else (other, best)


def addition_by_shift(most_shift: int) -> Callable[[Graph], Graph]:
    """A rewrite: requantize(add(requantize(a), requantize(b))) of two int8 images of one shape and one scale, a power
    of two apart from the result's, becomes (a + b) >> shift, rounded down, shift at most `most_shift`. The result is
    within 1 of the original."""

    def shift_of(at: RuleMatch) -> float:
        return float(-np.log2(_factors(at)[0]))

    def by_shift(at: RuleMatch) -> str:
        total = at.add(Add(), *(at.add(Offset(0, DType.INT32), side) for side in (_A, _B)))
        return at.add(at[_SUM], scale_shifted(at, total, (1, 0, int(shift_of(at)))))

    def scales_differ(at: RuleMatch) -> str:
        left, right = _factors(at)
        return f"the operands have different scales ({left / right:.6g} to 1)"

    def has_zero_points(at: RuleMatch) -> str:
        return f"operands and result have the zero points {', '.join(map(str, _zeros(at)))}, not 0"

    def is_no_power(at: RuleMatch) -> str:
        return f"the scale of the result is no power of two times the operands' ({2.0 ** shift_of(at):.6g})"

    conditions: tuple[Condition, ...] = (
        _of_images(DType.INT8),
        (scales_differ, lambda at: len(set(_factors(at))) == 1),
        (has_zero_points, lambda at: not any(_zeros(at))),
        (is_no_power, lambda at: shift_of(at).is_integer() and 0 <= shift_of(at) <= most_shift),
    )
    return rewriting(Rule(_SUM, by_shift, conditions))
