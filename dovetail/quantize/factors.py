"""Factors of an attention's queries, keys and scores, which its softmax can have instead."""

from __future__ import annotations

import numpy as np

from dovetail.ir.operators.activation import Softmax
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import MatrixProduct
from dovetail.ir.operators.movement import Reshape, Transpose
from dovetail.ir.pattern import apply, constant, operand, rest
from dovetail.ir.rules import Rule, RuleMatch
from dovetail.ir.types import DType

_X, _NUMBER = operand("x"), constant("number")
_TIMES = apply(Binary(BinaryKind.MULTIPLY), _X, _NUMBER, alone=True, commutes=True)
_SOFTMAX = apply(Softmax, _TIMES)


def _factor(at: RuleMatch) -> float:
    return float(at.array(_NUMBER).reshape(-1)[0])


def _is_number(at: RuleMatch) -> bool:
    return at.array(_NUMBER).size == 1 and at.type(_X).shape == at.type(_TIMES).shape


def _behind(at: RuleMatch) -> str:
    place = at.root.inputs.index(at.value(_TIMES))
    bare = at.add(at.root.operator, *at.root.inputs[:place], _X, *at.root.inputs[place + 1 :])
    number = at.constant(np.array([_factor(at)], np.float32), DType.FLOAT32, f"{at.value(_TIMES)}_factor")
    return at.add(Binary(BinaryKind.MULTIPLY), bare, number)


factors_behind = tuple(
    Rule(pattern, _behind, (_is_number,))
    for pattern in (
        apply((MatrixProduct, Transpose, Reshape), _TIMES, rest("others")),
        apply(MatrixProduct, operand("left"), _TIMES),
    )
)
"""A number that an operand of a product of matrices is multiplied with, or its movement: behind that."""

factor_into_softmax = Rule(
    _SOFTMAX,
    lambda at: at.add(Softmax(at[_SOFTMAX].beta * _factor(at)), _X),
    (_is_number, lambda at: _factor(at) > 0),
)
"""A positive number that a softmax' operand is multiplied with: part of its own factor."""
