"""Additions of two images, requantised, as an engine does them: a convolution of both, or a shift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Offset, Requantize
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat
from dovetail.ir.requantisation.engine import (
    MOST_WEIGHT,
    Parameters,
    RequantisationLimits,
    edges,
    folded,
    scale_and_shift,
)
from dovetail.ir.rewrite import Draft, run
from dovetail.ir.types import Array, DType
from dovetail.legalize.requantisation import scale_shifted, scaled_layer


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
        shifted = scale_shifted(draft, accumulator, found, node, node.output, f"{node.output}_by_engine")
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
    found = scale_and_shift(real, np.zeros(1), at_zero, *edges(weights[None], limits), zeros[2], limits)
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
    candidates = range(MOST_WEIGHT // 2, MOST_WEIGHT + 1)
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
        shifted = scale_shifted(draft, total, (1, 0, int(shift)), node, node.output)
        return draft.add(node.operator, [shifted], node)

    return lambda graph: run(graph, [rule])
