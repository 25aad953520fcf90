"""Normalisation of rows recognised in what exporters write: means, squares, a root and a quotient."""

from __future__ import annotations

from dataclasses import replace

from dovetail.ir.operators.activation import Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.operators.reduction import Normalise, Reduce, ReduceKind
from dovetail.ir.pattern import Apply, Pattern, apply, constant, either, maybe
from dovetail.ir.rewrite import X
from dovetail.ir.rules import Rule, RuleMatch

_EPSILON = constant("epsilon")
_MEAN = apply(Reduce, X)
_CENTRED = apply(Binary(BinaryKind.SUBTRACT), X, _MEAN)


def _normalised(row: Pattern) -> tuple[tuple[Apply[Binary], ...], Apply[Reduce]]:
    """A row over the root of its mean square, and that mean."""
    square = either(apply(Unary(UnaryKind.SQUARE), row), apply(Binary(BinaryKind.MULTIPLY), row, row))
    mean = apply(Reduce, square)
    root = apply(Unary(UnaryKind.SQUARE_ROOT), apply(Add(), maybe(Reshape, mean), _EPSILON, commutes=True))
    inverse = apply(Unary(UnaryKind.RECIPROCAL), root)
    return (
        apply(Binary(BinaryKind.DIVIDE), row, root),
        apply(Binary(BinaryKind.MULTIPLY), row, inverse, commutes=True),
    ), mean


def _rules(row: Pattern, centred: bool) -> tuple[Rule, ...]:
    patterns, mean = _normalised(row)

    def averages_rows(at: RuleMatch) -> bool:
        last = Reduce(ReduceKind.MEAN, (len(at.type(X).shape) - 1,))
        means = [at[part] for part in (mean, _MEAN) if part in at.nodes]
        return at.type(_EPSILON).elements == 1 and all(one == last for one in means)

    def replacement(at: RuleMatch) -> str:
        return at.add(Normalise(float(at.array(_EPSILON).reshape(-1)[0]), centred), X)

    return tuple(Rule(pattern, replacement, (averages_rows,)) for pattern in patterns)


_LESS = apply(Binary(BinaryKind.SUBTRACT))


def _is_stream(at: RuleMatch) -> bool:
    """Whether a row is no difference: one from its mean is left to a normalisation that takes the mean off."""
    node = at.draft.producer(at[X])
    return node is None or not _LESS.fits(node)


ROOT_MEAN_SQUARE = tuple(replace(rule, conditions=(*rule.conditions, _is_stream)) for rule in _rules(X, False))
"""x / sqrt(mean x**2 + epsilon) over the last axis is a Normalise that is not centred."""
NORMALISATION = (*_rules(_CENTRED, True), *_rules(X, False))
"""(x - mean x) / sqrt(mean (x - mean x)**2 + epsilon) over the last axis is a Normalise, and so is the same without
means."""
