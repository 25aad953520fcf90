"""Networks in Gemmini's terms: sums of two images and means as layers."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, multiplier_arrays
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.operators.movement import Concat
from dovetail.ir.operators.reduction import AveragePool2d, SumPool2d
from dovetail.ir.pattern import Apply, apply, operand, rest
from dovetail.ir.rules import Predicate, Rule, RuleMatch, rewriting
from dovetail.ir.types import DType

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
