"""int8 activations as uint8, for engines that read nothing else. Exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.ir.graph import Node
from dovetail.ir.operators.arithmetic import Clip, Offset, Requantize
from dovetail.ir.operators.base import Operator
from dovetail.ir.pattern import apply, occurrence, operand, rest
from dovetail.ir.rules import Rule, RuleMatch, rewriting
from dovetail.ir.types import DType

_SHIFT = 128
_UP, _DOWN = Offset(_SHIFT, DType.UINT8), Offset(-_SHIFT, DType.INT8)
_X = operand("x")
_BACK = apply(_DOWN, _X)
_REQUANTIZE = apply(Requantize, _X, rest("parameters"), alone=True)
_CLIP = apply(Clip, _REQUANTIZE, having=lambda clip: clip.dtype is DType.INT8)


def _by(at: RuleMatch, values: Sequence[str]) -> list[int]:
    """How much higher values can be: int8 ones that are computed at run time."""
    return [_SHIFT if at.type(x).dtype is DType.INT8 and x not in at.draft.constants else 0 for x in values]


def _higher(at: RuleMatch, values: Sequence[str], by: Sequence[int]) -> list[str]:
    """The values, those of int8 as uint8 where `by` says so."""
    return [_unsigned(at, value) if raised else value for value, raised in zip(values, by, strict=True)]


def _unsigned(at: RuleMatch, value: str) -> str:
    if back := occurrence(_BACK, at.draft, value):
        return back[_X]
    there = (node.output for node in at.draft.nodes if node.inputs == (value,) and node.operator == _UP)
    return next(there, "") or at.add(_UP, value, like=replace(at.root, origin=""), stem=f"{value}_unsigned")


def _signed(at: RuleMatch, operator: Operator, operands: Sequence[str]) -> str:
    """The int8 that a result which is higher stands for."""
    higher = at.add(operator, *operands, stem=f"{at.root.output}_unsigned")
    return at.add(_DOWN, higher, like=replace(at.root, origin=""))


def _limited(at: RuleMatch) -> str:
    clip, scaled = at[_CLIP], at.node(_REQUANTIZE)
    by = [*_by(at, scaled.inputs[:1]), 0, 0]
    more = at[_REQUANTIZE].raised(by)
    more = replace(more, output_zero_point=more.output_zero_point + _SHIFT)
    total = at.add(more, *_higher(at, scaled.inputs, by), like=_REQUANTIZE, stem=f"{scaled.output}_unsigned")
    return _signed(at, Clip(clip.low + _SHIFT, clip.high + _SHIFT, DType.UINT8), [total])


def _is_buffer(at: RuleMatch, node: Node | None) -> bool:
    """Whether a node's result is a buffer that is changed in place, which would be copied."""
    while node is not None and node.operator.is_view:
        node = at.draft.producer(node.inputs[0])
    return node is not None and node.operator.in_place


def _raised(at: RuleMatch) -> str | None:
    """The operator for values that are higher, where it can be."""
    values, operator = at.root.inputs, at.root.operator
    whole, chooses = _by(at, values), bool(operator.chosen_from(values))
    if chooses and (not all(whole) or at.root.output in at.draft.graph.outputs or _is_buffer(at, at.root)):
        return None
    for by in (whole, [*whole[:1], *(0 for _ in values[1:])]):
        higher = operator.raised(by) if any(by) else None
        if higher is not None:
            operands = _higher(at, values, by)
            return _signed(at, higher, operands) if chooses else at.add(higher, *operands)
    return None


unsigned_activations = rewriting(Rule(_CLIP, _limited), Rule(apply(Operator), _raised))
"""The rewrite that replaces int8 activations by uint8 ones; inputs and outputs keep their types.

Every int8 value v is stored as v + 128, and every zero point moves with it."""
