"""TFLite comparisons, logic, choice and conversion."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import OperatorEntry, Tensor
from dovetail.graph.types import DType
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.logic import Compare, CompareKind, Convert, Select
from dovetail.operators.movement import Reshape
from dovetail.operators.quantization import Dequantize

Build = Callable[[TfliteContext, OperatorEntry], None]


def meaning(ctx: TfliteContext, op: OperatorEntry, x: Tensor) -> str:
    """A tensor as comparisons read it: the float a quantised one stands for, or itself."""
    return ctx.real(op, x) if x.quantisation is not None else ctx.value(op, x)


def negated(ctx: TfliteContext, op: OperatorEntry, value: str) -> str:
    """not value."""
    false = ctx.constant(op, np.zeros(1, np.bool_), "false")
    return ctx.add(op, Compare(CompareKind.EQUAL), [value, false], "negated")


def comparison(kind: CompareKind, exchanged: bool = False, negative: bool = False) -> Build:
    """The importer of a relation: of the operands in turn or exchanged, or its opposite."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        operands = [meaning(ctx, op, ctx.input(op, position)) for position in (0, 1)]
        if exchanged:
            operands.reverse()
        value = ctx.add(op, Compare(kind), operands, "holds")
        ctx.bind(op, negated(ctx, op, value) if negative else value)

    return build


def logical(kind: BinaryKind) -> Build:
    """The importer of LOGICAL_AND (the smaller) or LOGICAL_OR (the larger)."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        ctx.emit(op, Binary(kind), [ctx.value(op, ctx.input(op, position)) for position in (0, 1)])

    return build


def logical_not(ctx: TfliteContext, op: OperatorEntry) -> None:
    """LOGICAL_NOT."""
    ctx.bind(op, negated(ctx, op, ctx.value(op, ctx.input(op, 0))))


def select(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SELECT and SELECT_V2; the first form's condition may choose whole rows."""
    condition, a, b = (ctx.input(op, position) for position in range(3))
    result, chosen = ctx.output(op), ctx.value(op, condition)
    if op.opcode == "SELECT" and len(condition.shape) == 1 < len(a.shape):
        chosen = ctx.add(op, Reshape((*condition.shape, *(1,) * (len(a.shape) - 1))), [chosen], "rows")
    if ctx.same_quantisation(a, result) and ctx.same_quantisation(b, result):
        ctx.emit(op, Select(), [chosen, ctx.value(op, a), ctx.value(op, b)])
    else:
        ctx.emit_real(op, Select(), [chosen, ctx.real(op, a), ctx.real(op, b)])


def cast(ctx: TfliteContext, op: OperatorEntry) -> None:
    """CAST: the stored number in another type, whatever it stands for."""
    x, result = ctx.input(op, 0), ctx.output(op)
    value = ctx.value(op, x)
    if x.dtype.is_integer and result.dtype is DType.FLOAT32:
        unit = [ctx.constant(op, np.ones(1, np.float32), "unit"), ctx.constant(op, np.zeros(1, np.int32), "zero")]
        ctx.emit(op, Dequantize(), [value, *unit])
        return
    operator: Operator = Convert(result.dtype) if x.dtype is not result.dtype else Reshape(x.shape)
    ctx.emit(op, operator, [value])
