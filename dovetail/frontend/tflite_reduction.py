"""TFLite reductions and what is made of them."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import ALIKE, OperatorEntry
from dovetail.frontend.tflite_linear import pool_options
from dovetail.graph.types import DType
from dovetail.operators.activation import Unary, UnaryKind
from dovetail.operators.base import Operator
from dovetail.operators.movement import Reshape
from dovetail.operators.pooling import AveragePool2d
from dovetail.operators.reduction import Normalise, Reduce, ReduceKind

Build = Callable[[TfliteContext, OperatorEntry], None]


def _axes(ctx: TfliteContext, op: OperatorEntry) -> tuple[int, ...]:
    rank = len(ctx.input(op, 0).shape)
    return tuple(sorted({ctx.axis(op, axis, rank) for axis in ctx.integers(op, 1, "axes")}))


def reduction(kind: ReduceKind) -> Build:
    """The importer of SUM, MEAN or REDUCE_PROD: in float, whose integer form is the quantize stage's."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        ctx.options(op, "ReducerOptions")
        x, result = ctx.input(op, 0), ctx.output(op)
        ctx.same_type(op, x, result)
        axes = _axes(ctx, op)
        operator: Operator = Reduce(kind, axes)
        if kind is ReduceKind.MEAN and len(x.shape) == 4 and axes == (1, 2):
            size = (x.shape[1], x.shape[2])
            operator = AveragePool2d(size, size, scaled_sum=True)
        kept = ctx.finish(op, operator, [ctx.real(op, x)], 0, f"{result.name}_image")
        ctx.emit(op, Reshape(result.shape), [kept])

    return build


def extreme(kind: ReduceKind) -> Build:
    """The importer of REDUCE_MAX and REDUCE_MIN, and of REDUCE_ANY and REDUCE_ALL, on stored elements."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        x, result = ctx.input(op, 0), ctx.output(op)
        if not ctx.same_quantisation(x, result):
            raise ctx.refuse(op, f"compares elements, but the quantisation of {x} and {result} differ", ALIKE)
        kept = ctx.add(op, Reduce(kind, _axes(ctx, op)), [ctx.value(op, x)], "kept")
        ctx.emit(op, Reshape(result.shape), [kept])

    return build


def l2_normalization(ctx: TfliteContext, op: OperatorEntry) -> None:
    """L2_NORMALIZATION over the last axis."""
    options, x = ctx.options(op, "L2NormOptions"), ctx.input(op, 0)
    ctx.same_type(op, x, ctx.output(op))
    operator = Normalise(1e-12, centred=False, summed=True)
    ctx.emit_real(op, operator, [ctx.real(op, x)], int(options["FusedActivationFunction"]))


def l2_pool(ctx: TfliteContext, op: OperatorEntry) -> None:
    """L2_POOL_2D: the root of the mean of squares, float."""
    kernel, stride, padding = pool_options(ctx, op)
    x = ctx.input(op, 0)
    if x.dtype is not DType.FLOAT32:
        raise ctx.refuse(op, f"pools float32 only, got {x}")
    squares = ctx.add(op, Unary(UnaryKind.SQUARE), [ctx.value(op, x)], "squares")
    mean = ctx.add(op, AveragePool2d(kernel, stride, padding), [squares], "mean")
    ctx.emit_real(op, Unary(UnaryKind.SQUARE_ROOT), [mean], int(op.options["FusedActivationFunction"]))
