"""Operators that exporters write out in several: each as the one it is, so that it is rounded once."""

from __future__ import annotations

from math import sqrt

import numpy as np

from dovetail.ir.operators.activation import Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.reduction import Normalise, Reduce, ReduceKind
from dovetail.ir.pattern import Apply, Leaf, Pattern, apply, constant, either
from dovetail.ir.rewrite import X
from dovetail.ir.rules import Rule, RuleMatch

_NEAR = 1e-4
"""Relative difference of a constant from the one it stands for: exporters write few digits."""


def _product(left: Pattern, right: Pattern, alone: bool = False) -> Apply[Binary]:
    return apply(Binary(BinaryKind.MULTIPLY), left, right, commutes=True, alone=alone)


def _is(at: RuleMatch, leaf: Leaf, number: float) -> bool:
    """Whether a constant is one number, or near it."""
    return at.type(leaf).elements == 1 and bool(np.isclose(at.array(leaf).reshape(-1)[0], number, rtol=_NEAR))


_HALF, _ONE, _ROOT, _INVERSE = map(constant, ("half", "one", "root", "inverse"))
_LESS = either(apply(Binary(BinaryKind.DIVIDE), X, _ROOT), _product(X, _INVERSE))
_RAISED = apply(Add(), apply(Unary(UnaryKind.ERROR_FUNCTION), _LESS), _ONE, commutes=True)


def _is_gelu(at: RuleMatch) -> bool:
    scaled = _is(at, _ROOT, sqrt(2)) if _ROOT in at.values else _is(at, _INVERSE, 1 / sqrt(2))
    return scaled and _is(at, _ONE, 1.0) and _is(at, _HALF, 0.5)


GELU = tuple(
    Rule(product, lambda at: at.add(Unary(UnaryKind.GELU), X), (_is_gelu,))
    for product in (
        _product(_product(X, _RAISED, alone=True), _HALF),
        _product(_product(_RAISED, _HALF, alone=True), X),
        _product(_product(X, _HALF, alone=True), _RAISED),
    )
)
"""x * (1 + erf(x / sqrt(2))) / 2, its products in any order, is a Gelu."""

_EPSILON = constant("epsilon")
_MEAN = apply(Reduce, X)
_CENTRED = apply(Binary(BinaryKind.SUBTRACT), X, _MEAN)


def _normalised(row: Pattern) -> tuple[Apply[Binary], Apply[Reduce]]:
    """A row over the root of its mean square, and that mean."""
    square = either(apply(Unary(UnaryKind.SQUARE), row), apply(Binary(BinaryKind.MULTIPLY), row, row))
    mean = apply(Reduce, square)
    root = apply(Unary(UnaryKind.SQUARE_ROOT), apply(Add(), mean, _EPSILON, commutes=True))
    return apply(Binary(BinaryKind.DIVIDE), row, root), mean


def _rule(row: Pattern, centred: bool) -> Rule:
    pattern, mean = _normalised(row)

    def averages_rows(at: RuleMatch) -> bool:
        last = Reduce(ReduceKind.MEAN, (len(at.type(X).shape) - 1,))
        means = [at[part] for part in (mean, _MEAN) if part in at.nodes]
        return at.type(_EPSILON).elements == 1 and all(one == last for one in means)

    def replacement(at: RuleMatch) -> str:
        return at.add(Normalise(float(at.array(_EPSILON).reshape(-1)[0]), centred), X)

    return Rule(pattern, replacement, (averages_rows,))


NORMALISATION = (_rule(_CENTRED, True), _rule(X, False))
"""(x - mean x) / sqrt(mean (x - mean x)**2 + epsilon) over the last axis is a Normalise, and so is the same without
means."""
