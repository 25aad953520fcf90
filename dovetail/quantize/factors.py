"""Factors of an attention's queries, keys and scores, which its softmax can have instead."""

from __future__ import annotations

import numpy as np

from dovetail.ir.graph import Node
from dovetail.ir.operators.activation import Softmax
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import MatrixProduct
from dovetail.ir.operators.movement import Reshape, Transpose
from dovetail.ir.rewrite import Draft
from dovetail.ir.types import DType


def factor_behind(draft: Draft, node: Node) -> str | None:
    """A number that an operand of a product of matrices is multiplied with, or its movement: behind that."""
    if not isinstance(node.operator, MatrixProduct | Transpose | Reshape):
        return None
    for place, name in enumerate(node.inputs):
        found = _factor(draft, name)
        if found is not None:
            inputs = [found[0] if at == place else other for at, other in enumerate(node.inputs)]
            bare = draft.add(node.operator, inputs, node)
            return draft.add(Binary(BinaryKind.MULTIPLY), [bare, _number(draft, found[1], name)], node)
    return None


def factor_into_softmax(draft: Draft, node: Node) -> str | None:
    """A positive number that a softmax' operand is multiplied with: part of its own factor."""
    found = _factor(draft, node.inputs[0]) if isinstance(node.operator, Softmax) else None
    if found is None or found[1] <= 0 or not isinstance(node.operator, Softmax):
        return None
    return draft.add(Softmax(node.operator.beta * found[1]), [found[0]], node)


def _number(draft: Draft, value: float, like: str) -> str:
    return draft.constant(np.array([value], np.float32), DType.FLOAT32, f"{like}_factor")


def _factor(draft: Draft, value: str) -> tuple[str, float] | None:
    """The value that another one is a multiple of, and the number, where nothing else reads it."""
    made = draft.made_by(value, Binary)
    if made is None or made.operator != Binary(BinaryKind.MULTIPLY) or draft.users(value) > 1:
        return None
    for x, number in (made.inputs, made.inputs[::-1]):
        array = draft.constants.get(number)
        if array is not None and array.size == 1 and draft.types[x].shape == draft.types[value].shape:
            return x, float(array.reshape(-1)[0])
    return None
