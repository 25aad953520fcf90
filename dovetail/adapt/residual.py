"""Quantised additions as 1x1 convolutions, so that an engine without an adder computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dovetail.adapt.engine_requantisation import RequantisationLimits, scale_and_shift
from dovetail.graph.graph import Graph, Node
from dovetail.graph.rewrite import Draft, run
from dovetail.graph.types import DType
from dovetail.operators.arithmetic import Add, Clip, Requantize, ScaleShift
from dovetail.operators.linear import Conv2d
from dovetail.operators.movement import Concat

_MOST_WEIGHT = 127


def addition_as_convolution(limits: RequantisationLimits) -> Callable[[Graph], Graph]:
    """A rewrite: requantize(add(requantize(a), requantize(b))) of two 8-bit images of one shape becomes a 1x1
    convolution of both, channels side by side, with a diagonal per operand, requantised as the engine does.

    The weights hold the ratio of the two scales to about 1 part in 200; the result is within 2 of the original.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        """The sum as a convolution of both operands; None where it is not such a sum."""
        total = sum_of_two(draft, node, limits.activations)
        if total is None:
            return None
        factors, zeros = total.factors, total.zeros
        weights = _weights(factors[0], factors[1])
        channels = draft.types[node.output].shape[3]
        every = np.ones(channels)
        found = scale_and_shift(
            every * (max(factors) / max(weights)),
            every * 0.0,
            every * -(weights[0] * zeros[0] + weights[1] * zeros[1]),
            every * limits.activations.low * sum(weights),
            every * limits.activations.high * sum(weights),
            total.zero,
            limits,
        )
        if found is None:
            return None
        both = draft.add(Concat(3), total.operands, node)
        diagonal = np.concatenate([np.eye(channels) * weights[0], np.eye(channels) * weights[1]], axis=1)
        table = diagonal.astype(np.int8).reshape(channels, 1, 1, 2 * channels)
        accumulator = draft.add(Conv2d(), [both, draft.constant(table, DType.INT8, node.output)], node)
        names = [draft.constant(array, DType.INT32, node.output) for array in found]
        shifted = draft.add(ScaleShift(), [accumulator, *names], node, f"{node.output}_by_engine")
        return draft.add(node.operator, [shifted], node)

    return lambda graph: run(graph, [rule])


@dataclass(frozen=True)
class Sum:
    """clip(requantize(add(requantize(a), requantize(b)))) of two different 8-bit images of one type."""

    operands: tuple[str, str]
    factors: tuple[float, float]
    """What each operand is multiplied with on its way to the result, greater than 0."""
    zeros: tuple[int, int]
    """Zero points of the operands."""
    zero: int
    """Of the result."""


def sum_of_two(draft: Draft, node: Node, activations: DType) -> Sum | None:
    """The sum that ends in `node`, of operands of a type; None where there is none or something else reads a part."""
    scaled = draft.made_by(node.inputs[0], Requantize) if isinstance(node.operator, Clip) else None
    added = draft.made_by(scaled.inputs[0], Add) if scaled is not None else None
    if scaled is None or added is None or max(draft.users(scaled.output), draft.users(added.output)) > 1:
        return None
    sides = [draft.made_by(value, Requantize) for value in added.inputs]
    if any(side is None or draft.types[side.inputs[0]].dtype is not activations for side in sides):
        return None
    left, right = (side for side in sides if side is not None)
    kind = draft.types[left.inputs[0]]
    if kind != draft.types[right.inputs[0]] or len(kind.shape) != 4 or left.inputs[0] == right.inputs[0]:
        return None
    factors = tuple(_factor(draft, side) * _factor(draft, scaled) for side in (left, right))
    if min(factors) <= 0:
        return None
    zeros = [part.operator for part in (left, right, scaled)]
    first, second, last = (operator for operator in zeros if isinstance(operator, Requantize))
    return Sum((left.inputs[0], right.inputs[0]), (factors[0], factors[1]),
               (first.input_zero_point, second.input_zero_point), last.output_zero_point)  # fmt: skip


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
