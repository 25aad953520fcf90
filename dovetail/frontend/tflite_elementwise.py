"""TFLite operators of two values, and the place of the largest element."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import OperatorEntry
from dovetail.graph.types import DType
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.movement import Reshape
from dovetail.operators.reduction import ArgExtreme

Build = Callable[[TfliteContext, OperatorEntry], None]


def arithmetic(kind: BinaryKind, options: str) -> Build:
    """The importer of an operator with broadcasting and a fused activation."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        found = ctx.options(op, options)
        a, b = ctx.input(op, 0), ctx.input(op, 1)
        ctx.same_type(op, a, b, ctx.output(op))
        operands = [ctx.real(op, a), ctx.real(op, b)]
        ctx.emit_real(op, Binary(kind), operands, int(found["FusedActivationFunction"]))

    return build


def extreme(kind: BinaryKind) -> Build:
    """The importer of MAXIMUM or MINIMUM, which compare stored integers and so must keep the quantisation."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        a, b, result = ctx.input(op, 0), ctx.input(op, 1), ctx.output(op)
        ctx.same_type(op, a, b, result)
        if not (ctx.same_quantisation(a, result) and ctx.same_quantisation(b, result)):
            raise ctx.refuse(op, f"compares elements, but the quantisation of {a}, {b} and {result} differ")
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
