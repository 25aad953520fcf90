"""ONNX comparisons, logic, choice, conversion of element types, and quantisation with parameters of run time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from dovetail.frontend.onnx_context import OnnxContext
from dovetail.frontend.onnx_elementwise import number, real_value
from dovetail.frontend.onnx_file import OnnxNode, element_type
from dovetail.graph.types import DType
from dovetail.operators.activation import Clamp, Unary, UnaryKind
from dovetail.operators.arithmetic import Add
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.logic import Compare, CompareKind, Convert, Select
from dovetail.operators.movement import Reshape
from dovetail.operators.reduction import Reduce, ReduceKind

Importer = Callable[[OnnxContext, OnnxNode], None]


def _negated(ctx: OnnxContext, op: OnnxNode, value: str) -> str:
    """not value."""
    false = ctx.builder.constant(f"{op.outputs[0]}_false", np.zeros((), np.bool_))
    ctx.static.add(false)
    return ctx.add(op, Compare(CompareKind.EQUAL), [value, false])


def relation(kind: CompareKind, exchanged: bool = False, negative: bool = False) -> Importer:
    """The importer of a comparison: of the operands in turn or exchanged, or its opposite."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        operands = [ctx.value(op, 1), ctx.value(op, 0)] if exchanged else [ctx.value(op, 0), ctx.value(op, 1)]
        if not negative:
            ctx.emit(op, Compare(kind), operands)
            return
        held = ctx.add(op, Compare(kind), operands, f"{op.outputs[0]}_holds")
        ctx.values[op.outputs[0]] = _negated(ctx, op, held)

    return build


def logic(kind: BinaryKind) -> Importer:
    """The importer of And (the smaller) or Or (the larger)."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        ctx.emit(op, Binary(kind), [ctx.value(op, 0), ctx.value(op, 1)])

    return build


def logical_not(ctx: OnnxContext, op: OnnxNode) -> None:
    """Not."""
    ctx.values[op.outputs[0]] = _negated(ctx, op, ctx.value(op, 0))


def where(ctx: OnnxContext, op: OnnxNode) -> None:
    """Where."""
    ctx.emit(op, Select(), [ctx.value(op, position) for position in range(3)])


def is_nan(ctx: OnnxContext, op: OnnxNode) -> None:
    """IsNaN: not equal to itself."""
    x = real_value(ctx, op)
    same = ctx.add(op, Compare(CompareKind.EQUAL), [x, x], f"{op.outputs[0]}_same")
    ctx.values[op.outputs[0]] = _negated(ctx, op, same)


def is_inf(ctx: OnnxContext, op: OnnxNode) -> None:
    """IsInf, of either sign or of both."""
    x = real_value(ctx, op)
    signs = [sign for sign in (1, -1) if ctx.attribute(op, "detect_positive" if sign > 0 else "detect_negative", 1)]
    if not signs:
        raise ctx.refuse(op, "finds infinities of neither sign")
    found = [ctx.add(op, Compare(CompareKind.EQUAL), [x, number(ctx, op, sign * inf)]) for sign in signs]
    whole = found[0] if len(found) == 1 else ctx.add(op, Binary(BinaryKind.MAXIMUM), found, f"{op.outputs[0]}_any")
    ctx.alias(op, whole)


def cast(ctx: OnnxContext, op: OnnxNode) -> None:
    """Cast: of an integer to float32 its value with the scale 1, else a conversion."""
    ctx.attribute(op, "saturate", 1)  # concerns float8 only
    ctx.attribute(op, "round_mode", "up")  # concerns float8 only
    x = ctx.value(op, 0)
    source, target = ctx.type_of(x).dtype, element_type(int(ctx.attribute(op, "to", 0)))
    if target is source:
        ctx.alias(op, x)
        return
    if target is None or min(target.bits, source.bits) < 8:
        raise ctx.refuse(op, f"from {source.text} to {target.text if target else 'that type'} is not supported")
    if target is not DType.FLOAT32 or not source.is_integer:
        ctx.emit(op, Convert(target), [x])
        return
    unit = ctx.scaling_of(op.outputs[0], np.ones(1, np.float32), np.zeros(1, np.int32), -1, source)
    ctx.values[op.outputs[0]] = ctx.dequantized(op, x, unit, op.outputs[0])


def modulo(ctx: OnnxContext, op: OnnxNode) -> None:
    """Mod with the sign of the divisor, or (`fmod`) with that of the dividend."""
    operands = [ctx.value(op, 0), ctx.value(op, 1)]
    if not ctx.attribute(op, "fmod", 0):
        ctx.emit(op, Binary(BinaryKind.MODULO), operands)
        return
    stem = op.outputs[0]
    if ctx.type_of(operands[0]).dtype is DType.FLOAT32:  # of the sizes, and the sign put back
        sizes = [ctx.add(op, Unary(UnaryKind.ABSOLUTE), [value], f"{stem}_size") for value in operands]
        rest = ctx.add(op, Binary(BinaryKind.MODULO), sizes, f"{stem}_rest")
        sign = ctx.add(op, Unary(UnaryKind.SIGN), operands[:1], f"{stem}_sign")
        ctx.emit(op, Binary(BinaryKind.MULTIPLY), [rest, sign])
        return
    quotient = ctx.add(op, Binary(BinaryKind.DIVIDE), operands, f"{stem}_quotient")
    whole = ctx.add(op, Binary(BinaryKind.MULTIPLY), [quotient, operands[1]], f"{stem}_whole")
    ctx.emit(op, Binary(BinaryKind.SUBTRACT), [operands[0], whole])


def dynamic_quantize(ctx: OnnxContext, op: OnnxNode) -> None:
    """DynamicQuantizeLinear: uint8 with the scale and zero point that the operand's range asks for."""
    x = real_value(ctx, op)
    stem, axes = op.outputs[0], tuple(range(len(ctx.type_of(x).shape)))
    zero, steps = number(ctx, op, 0.0), number(ctx, op, 255.0)
    ends = []
    for kind, limit in ((ReduceKind.MINIMUM, BinaryKind.MINIMUM), (ReduceKind.MAXIMUM, BinaryKind.MAXIMUM)):
        end = ctx.add(op, Reshape(()), [ctx.add(op, Reduce(kind, axes), [x], f"{stem}_end")], f"{stem}_end")
        ends.append(ctx.add(op, Binary(limit), [end, zero], f"{stem}_limit"))
    span = ctx.add(op, Binary(BinaryKind.SUBTRACT), [ends[1], ends[0]], f"{stem}_span")
    scale = ctx.add(op, Binary(BinaryKind.DIVIDE), [span, steps], f"{stem}_scale")
    below = ctx.add(op, Binary(BinaryKind.SUBTRACT), [zero, ends[0]], f"{stem}_below")
    place = ctx.add(op, Binary(BinaryKind.DIVIDE), [below, scale], f"{stem}_place")
    offset = ctx.add(op, Clamp(0.0, 255.0), [ctx.add(op, Unary(UnaryKind.ROUND), [place])], f"{stem}_offset")
    _quantized(ctx, op, x, scale, offset, DType.UINT8)
    for name, value in zip(op.outputs[1:], (scale, ctx.add(op, Convert(DType.UINT8), [offset])), strict=False):
        if name:
            ctx.values[name] = ctx.add(op, Reshape(()), [value], name)


def _quantized(ctx: OnnxContext, op: OnnxNode, x: str, scale: str, offset: str, dtype: DType) -> None:
    """Emit round(x / scale) + offset, limited to the type; all of them computed floats."""
    stem = op.outputs[0]
    counted = ctx.add(op, Binary(BinaryKind.DIVIDE), [x, scale], f"{stem}_counted")
    rounded = ctx.add(op, Unary(UnaryKind.ROUND), [counted], f"{stem}_rounded")
    raised = ctx.add(op, Add(), [rounded, offset], f"{stem}_raised")
    limited = ctx.add(op, Clamp(float(dtype.low), float(dtype.high)), [raised], f"{stem}_limited")
    ctx.emit(op, Convert(dtype), [limited])


def quantize_at_run_time(ctx: OnnxContext, op: OnnxNode, default: DType) -> None:
    """QuantizeLinear with a scale that is computed, for the whole tensor."""
    x, scale = real_value(ctx, op), real_value(ctx, op, 1)
    offset = ctx.value(op, 2) if ctx.has(op, 2) else number(ctx, op, 0.0)
    dtype = ctx.type_of(offset).dtype if ctx.has(op, 2) else default
    if ctx.type_of(scale).elements != 1 or dtype not in (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16):
        raise ctx.refuse(op, f"quantising to {dtype.text} by the computed scale {ctx.type_of(scale)} is not supported")
    real = ctx.add(op, Convert(DType.FLOAT32), [offset], f"{op.outputs[0]}_offset")
    _quantized(ctx, op, x, scale, real, dtype)
