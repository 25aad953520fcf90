"""Operators that exporters write out in several: each as the one it is, so that it is rounded once."""

from __future__ import annotations

from math import sqrt

import numpy as np

from dovetail.ir.graph import Node
from dovetail.ir.operators.activation import Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.reduction import Normalise, Reduce, ReduceKind
from dovetail.ir.rewrite import Draft

_NEAR = 1e-4
"""Relative difference of a constant from the one it stands for: exporters write few digits."""


def gather_gelu(draft: Draft, node: Node) -> str | None:
    """x * (1 + erf(x / sqrt(2))) / 2, its products in any order, as a Gelu."""
    if not _is(node, BinaryKind.MULTIPLY):
        return None
    numbers, values = _factors(draft, node)
    factor = float(np.prod([float(draft.constants[name].reshape(-1)[0]) for name in numbers]))
    if len(values) != 2 or not np.isclose(factor, 0.5, rtol=_NEAR):
        return None
    for x, other in (values, values[::-1]):
        raised = draft.made_by(other, Add)
        total = _constant_and_value(draft, raised) if raised is not None else None
        curve = draft.made_by(total[1], Unary) if total is not None else None
        if total is None or curve is None or not np.isclose(total[0], 1.0, rtol=_NEAR):
            continue
        if curve.operator == Unary(UnaryKind.ERROR_FUNCTION) and _scale_of(draft, curve.inputs[0], x) is not None:
            return draft.add(Unary(UnaryKind.GELU), [x], node)
    return None


def _scale_of(draft: Draft, value: str, x: str) -> str | None:
    """x where the value is x / sqrt(2)."""
    scaled = draft.made_by(value, Binary)
    scaling = _constant_and_value(draft, scaled) if scaled is not None else None
    if scaled is None or scaling is None or scaling[1] != x:
        return None
    number = (
        scaling[0] if _is(scaled, BinaryKind.MULTIPLY) else 1 / scaling[0] if _is(scaled, BinaryKind.DIVIDE) else 0.0
    )
    return x if np.isclose(number, 1 / sqrt(2), rtol=_NEAR) else None


def _factors(draft: Draft, node: Node) -> tuple[list[str], list[str]]:
    """The constant numbers and the values a product of products is made of; values read elsewhere are not taken
    apart."""
    numbers, values = list[str](), list[str]()
    for name in node.inputs:
        inner = draft.made_by(name, Binary)
        if name in draft.constants and draft.constants[name].size == 1:
            numbers.append(name)
        elif inner is not None and _is(inner, BinaryKind.MULTIPLY) and draft.users(name) == 1:
            more = _factors(draft, inner)
            numbers, values = numbers + more[0], values + more[1]
        else:
            values.append(name)
    return numbers, values


def _is(node: Node, kind: BinaryKind) -> bool:
    return node.operator == Binary(kind)


def _constant_and_value(draft: Draft, node: Node) -> tuple[float, str] | None:
    """The number and the value an operator of two has; of what does not commute, the number second."""
    pairs = (node.inputs, node.inputs[::-1])
    for value, number in pairs[:1] if _is(node, BinaryKind.DIVIDE) or _is(node, BinaryKind.SUBTRACT) else pairs:
        array = draft.constants.get(number)
        if array is not None and array.size == 1 and value not in draft.constants:
            return float(array.reshape(-1)[0]), value
    return None


def gather_normalisation(draft: Draft, node: Node) -> str | None:
    """(x - mean x) / sqrt(mean (x - mean x)**2 + epsilon) over the last axis, and the same without means, as a
    Normalise."""
    root = draft.made_by(node.inputs[1], Unary) if _is(node, BinaryKind.DIVIDE) else None
    if root is None or root.operator != Unary(UnaryKind.SQUARE_ROOT):
        return None
    raised = draft.made_by(root.inputs[0], Add)
    total = _constant_and_value(draft, raised) if raised is not None else None
    mean = _mean_of(draft, total[1]) if total is not None else None
    square = draft.made_by(mean, Unary, Binary) if mean is not None else None
    if square is None or total is None or set(square.inputs) != {node.inputs[0]}:
        return None
    if square.operator not in (Unary(UnaryKind.SQUARE), Binary(BinaryKind.MULTIPLY)):
        return None
    less = draft.made_by(node.inputs[0], Binary)
    if less is not None and _is(less, BinaryKind.SUBTRACT) and _mean_of(draft, less.inputs[1]) == less.inputs[0]:
        return draft.add(Normalise(total[0]), [less.inputs[0]], node)
    return draft.add(Normalise(total[0], centred=False), [node.inputs[0]], node)


def _mean_of(draft: Draft, value: str) -> str | None:
    """The operand of a mean along the last axis; None for other values."""
    mean = draft.made_by(value, Reduce)
    last = len(draft.types[value].shape) - 1
    return mean.inputs[0] if mean is not None and mean.operator == Reduce(ReduceKind.MEAN, (last,)) else None
