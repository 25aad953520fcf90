"""TFLite operators of two values, and the place of the largest element."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import AGAIN, ALIKE, OperatorEntry
from dovetail.frontend.tflite_movement import SHAPE_TYPES
from dovetail.graph.types import DType
from dovetail.operators.activation import Unary, UnaryKind
from dovetail.operators.arithmetic import Add
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.movement import Reshape
from dovetail.operators.reduction import ArgExtreme

Build = Callable[[TfliteContext, OperatorEntry], None]


def arithmetic(kind: BinaryKind, options: str = "") -> Build:
    """The importer of an operator with broadcasting, and a fused activation if it has options; of integers without
    quantisation on these, of known ones now."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        found = ctx.options(op, options) if options else {}
        a, b, result = ctx.input(op, 0), ctx.input(op, 1), ctx.output(op)
        activation = int(found.get("FusedActivationFunction", 0))
        if a.dtype in SHAPE_TYPES and a.quantisation is None and activation == 0:
            _plain(ctx, op, Binary(kind))
            return
        mixed = kind is BinaryKind.PRELU and a.dtype is DType.INT16  # TFLite's slopes have 8 bits then
        ctx.same_type(op, a, result, *([] if mixed else [b]))
        operator: Operator = Add() if kind is BinaryKind.ADD else Binary(kind)
        ctx.emit_real(op, operator, [ctx.real(op, a), ctx.real(op, b)], activation)

    return build


def _plain(ctx: TfliteContext, op: OperatorEntry, operator: Binary) -> None:
    """An operator of integers that stand for themselves."""
    tensors = [ctx.input(op, 0), ctx.input(op, 1)]
    known = [array for array in map(ctx.known, tensors) if array is not None]
    if len(known) == len(tensors):
        ctx.bind_known(op, operator.evaluate(known))
        return
    ctx.emit(op, operator, [ctx.value(op, tensor) for tensor in tensors])


def add_n(ctx: TfliteContext, op: OperatorEntry) -> None:
    """ADD_N: a sum of sums, which is rounded once."""
    tensors = [ctx.input(op, position) for position in range(len(op.inputs))]
    ctx.same_type(op, ctx.output(op), *tensors)
    value, *rest = (ctx.real(op, tensor) for tensor in tensors)
    for term in rest[:-1]:
        value = ctx.add(op, Add(), [value, term], "partial")
    if not rest:
        raise ctx.refuse(op, "has one operand, expected several", AGAIN)
    ctx.emit_real(op, Add(), [value, rest[-1]])


def pointwise(operator: Operator) -> Build:
    """The importer of a function of each element that has no options."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        x = ctx.input(op, 0)
        ctx.same_type(op, x, ctx.output(op))
        ctx.emit_real(op, operator, [ctx.real(op, x)])

    return build


def gelu(ctx: TfliteContext, op: OperatorEntry) -> None:
    """GELU, exact or by tanh."""
    approximate = bool(ctx.options(op, "GeluOptions")["Approximate"])
    pointwise(Unary(UnaryKind.GELU_TANH if approximate else UnaryKind.GELU))(ctx, op)


def floor_divide(ctx: TfliteContext, op: OperatorEntry) -> None:
    """FLOOR_DIV of floats."""
    a, b = ctx.input(op, 0), ctx.input(op, 1)
    ctx.same_type(op, a, b, ctx.output(op))
    quotient = ctx.add(op, Binary(BinaryKind.DIVIDE), [ctx.real(op, a), ctx.real(op, b)], "quotient")
    ctx.emit_real(op, Unary(UnaryKind.FLOOR), [quotient])


UNARY: dict[str, UnaryKind] = {
    "ABS": UnaryKind.ABSOLUTE,
    "CEIL": UnaryKind.CEILING,
    "COS": UnaryKind.COSINE,
    "EXP": UnaryKind.EXPONENTIAL,
    "FLOOR": UnaryKind.FLOOR,
    "HARD_SWISH": UnaryKind.HARD_SWISH,
    "LOG": UnaryKind.LOGARITHM,
    "LOGISTIC": UnaryKind.SIGMOID,
    "NEG": UnaryKind.NEGATIVE,
    "ROUND": UnaryKind.ROUND,
    "RSQRT": UnaryKind.RECIPROCAL_ROOT,
    "SIGN": UnaryKind.SIGN,
    "SIN": UnaryKind.SINE,
    "SQRT": UnaryKind.SQUARE_ROOT,
    "SQUARE": UnaryKind.SQUARE,
    "TANH": UnaryKind.TANH,
}
"""Functions of one value."""


def extreme(kind: BinaryKind) -> Build:
    """The importer of MAXIMUM or MINIMUM, which compare stored integers and so must keep the quantisation."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        a, b, result = ctx.input(op, 0), ctx.input(op, 1), ctx.output(op)
        ctx.same_type(op, a, b, result)
        if not (ctx.same_quantisation(a, result) and ctx.same_quantisation(b, result)):
            raise ctx.refuse(op, f"compares elements, but the quantisation of {a}, {b} and {result} differ", ALIKE)
        ctx.emit(op, Binary(kind), [ctx.value(op, a), ctx.value(op, b)])

    return build


def arg_extreme(largest: bool) -> Build:
    """The importer of ARG_MAX or ARG_MIN: of equal elements the first."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        x, result = ctx.input(op, 0), ctx.output(op)
        ctx.same_type(op, x)
        axes = ctx.integers(op, 1, "axis")
        rank = len(x.shape)
        if len(axes) != 1 or not -rank <= axes[0] < rank or result.dtype not in (DType.INT32, DType.INT64):
            raise ctx.refuse(op, f"finds the place along {list(axes)} of {x} as {result}, which is not supported")
        operator = ArgExtreme(axes[0] % rank, largest, dtype=result.dtype)
        places = ctx.builder.add(operator, [ctx.value(op, x)], f"{result.name}_places", ctx.origin(op))
        ctx.emit(op, Reshape(result.shape), [places])

    return build
