"""ONNX operators that treat every element alike: arithmetic with broadcasting, and functions of one float."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from dovetail.frontend.onnx_context import AGAIN, OnnxContext
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.graph.types import DType
from dovetail.operators.activation import Clamp, Unary, UnaryKind
from dovetail.operators.arithmetic import Add, Clip
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.logic import Convert
from dovetail.operators.movement import Reshape

Importer = Callable[[OnnxContext, OnnxNode], None]


def real_value(ctx: OnnxContext, op: OnnxNode, position: int = 0) -> str:
    """An operand, which must be float."""
    x = ctx.value(op, position)
    if ctx.type_of(x).dtype is not DType.FLOAT32:
        raise ctx.refuse(op, f"works on float32 here, its operand is {ctx.type_of(x)}")
    return x


def number(ctx: OnnxContext, op: OnnxNode, value: float) -> str:
    """A float constant of one element."""
    name = ctx.builder.constant(f"{op.outputs[0]}_constant", np.array(value, np.float32))
    ctx.static.add(name)
    return name


def _operator(ctx: OnnxContext, kind: BinaryKind, value: str) -> Operator:
    """The addition the quantize stage knows where it may be one, else a Binary."""
    known = ctx.type_of(value).dtype in (DType.FLOAT32, DType.INT32)
    return Add() if kind is BinaryKind.ADD and known else Binary(kind)


def binary(kind: BinaryKind) -> Importer:
    """The importer of an operator of two values."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        if len(op.inputs) != 2:
            raise ctx.refuse(op, f"has {len(op.inputs)} operands, expected 2", AGAIN)
        operands = [ctx.value(op, 0), ctx.value(op, 1)]
        ctx.emit(op, _operator(ctx, kind, operands[0]), operands)

    return build


def power(ctx: OnnxContext, op: OnnxNode) -> None:
    """Pow; the exponent may be of another type, in which a float one computes. A square is one product."""
    x, exponent, stem = ctx.value(op, 0), ctx.value(op, 1), op.outputs[0]
    result, other = ctx.type_of(x).dtype, ctx.type_of(exponent).dtype
    known = ctx.builder.constant_of(exponent)
    if result is DType.FLOAT32 and known is not None and known.size == 1 and float(known.reshape(-1)[0]) == 2.0:
        ctx.emit(op, Unary(UnaryKind.SQUARE), [x])
        return
    held = DType.FLOAT32 if DType.FLOAT32 in (result, other) else result
    x = x if held is result else ctx.add(op, Convert(held), [x], f"{stem}_base")
    exponent = exponent if held is other else ctx.add(op, Convert(held), [exponent], f"{stem}_exponent")
    raised = ctx.add(op, Binary(BinaryKind.POWER), [x, exponent], stem if held is result else f"{stem}_raised")
    ctx.values[stem] = raised if held is result else ctx.add(op, Convert(result), [raised])


def several(kind: BinaryKind, mean: bool = False) -> Importer:
    """The importer of an operator of any number of values, taken from the left; `mean` divides by their number."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        found = ctx.value(op, 0)
        for position in range(1, len(op.inputs)):
            operands = [found, ctx.value(op, position)]
            found = ctx.add(op, _operator(ctx, kind, found), operands, f"{op.outputs[0]}_part")
        if mean:
            share = number(ctx, op, 1.0 / len(op.inputs))
            found = ctx.add(op, Binary(BinaryKind.MULTIPLY), [found, share], f"{op.outputs[0]}_part")
        ctx.alias(op, found)

    return build


def prelu(ctx: OnnxContext, op: OnnxNode) -> None:
    """PRelu."""
    x, slope = real_value(ctx, op, 0), real_value(ctx, op, 1)
    ctx.emit(op, Binary(BinaryKind.PRELU), [x, slope])


def relu(ctx: OnnxContext, op: OnnxNode) -> None:
    """Relu."""
    ctx.emit(op, Clamp(0.0, inf), [real_value(ctx, op)])


def clip(ctx: OnnxContext, op: OnnxNode) -> None:
    """Clip: attributes before opset 11, operands since; of integers too. The upper limit wins where they cross."""
    low = float(ctx.attribute(op, "min", -inf)) if "min" in op.attributes else ctx.number(op, 1, -inf, "lower limit")
    high = float(ctx.attribute(op, "max", inf)) if "max" in op.attributes else ctx.number(op, 2, inf, "upper limit")
    x = ctx.value(op, 0)
    kind = ctx.type_of(x).dtype
    low = min(low, high)
    if kind is DType.FLOAT32:
        ctx.emit(op, Clamp(low, high), [x])
        return
    limits = int(max(low, kind.low)), int(min(high, kind.high))
    ctx.emit(op, Clip(*limits, kind), [x])


def unary(kind: UnaryKind, **defaults: float) -> Importer:
    """The importer of a float function; attributes other than alpha must have the given value."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        alpha = float(ctx.attribute(op, "alpha", defaults["alpha"])) if "alpha" in defaults else 0.0
        ctx.emit(op, Unary(kind, alpha), [real_value(ctx, op)])

    return build


def hard_sigmoid(ctx: OnnxContext, op: OnnxNode) -> None:
    """HardSigmoid; with the slope 1/6 and the offset 1/2 of Keras and PyTorch it is one operator."""
    alpha, beta = float(ctx.attribute(op, "alpha", 0.2)), float(ctx.attribute(op, "beta", 0.5))
    x = real_value(ctx, op)
    if np.isclose(alpha, 1 / 6, rtol=1e-6) and beta == 0.5:
        ctx.emit(op, Unary(UnaryKind.HARD_SIGMOID), [x])
        return
    sloped = ctx.add(op, Binary(BinaryKind.MULTIPLY), [x, number(ctx, op, alpha)], f"{op.outputs[0]}_sloped")
    raised = ctx.add(op, Add(), [sloped, number(ctx, op, beta)], f"{op.outputs[0]}_raised")
    ctx.emit(op, Clamp(0.0, 1.0), [raised])


def gelu(ctx: OnnxContext, op: OnnxNode) -> None:
    """Gelu, exact or by tanh."""
    approximate = ctx.attribute(op, "approximate", "none")
    if approximate not in ("none", "tanh"):
        raise ctx.refuse(op, f"the attribute approximate = {approximate} is not supported, only none and tanh")
    kind = UnaryKind.GELU if approximate == "none" else UnaryKind.GELU_TANH
    ctx.emit(op, Unary(kind), [real_value(ctx, op)])


def selu(ctx: OnnxContext, op: OnnxNode) -> None:
    """Selu: gamma * Elu."""
    alpha = float(ctx.attribute(op, "alpha", 1.6732631921768188))
    gamma = float(ctx.attribute(op, "gamma", 1.0507010221481323))
    inner = ctx.add(op, Unary(UnaryKind.ELU, alpha), [real_value(ctx, op)], f"{op.outputs[0]}_elu")
    ctx.emit(op, Binary(BinaryKind.MULTIPLY), [inner, number(ctx, op, gamma)])


def celu(ctx: OnnxContext, op: OnnxNode) -> None:
    """Celu: alpha * Elu(x / alpha)."""
    alpha = float(ctx.attribute(op, "alpha", 1.0))
    scale = number(ctx, op, alpha)
    inner = ctx.add(op, Binary(BinaryKind.DIVIDE), [real_value(ctx, op), scale], f"{op.outputs[0]}_scaled")
    ctx.emit(op, Binary(BinaryKind.MULTIPLY), [ctx.add(op, Unary(UnaryKind.ELU, 1.0), [inner]), scale])


def swish(ctx: OnnxContext, op: OnnxNode) -> None:
    """Swish: x * Sigmoid(alpha * x)."""
    x, alpha = real_value(ctx, op), float(ctx.attribute(op, "alpha", 1.0))
    scaled = x
    if alpha != 1.0:
        scaled = ctx.add(op, Binary(BinaryKind.MULTIPLY), [x, number(ctx, op, alpha)], f"{op.outputs[0]}_scaled")
    gate = ctx.add(op, Unary(UnaryKind.SIGMOID), [scaled], f"{op.outputs[0]}_gate")
    ctx.emit(op, Binary(BinaryKind.MULTIPLY), [x, gate])


def mish(ctx: OnnxContext, op: OnnxNode) -> None:
    """Mish: x * Tanh(Softplus(x))."""
    x = real_value(ctx, op)
    soft = ctx.add(op, Unary(UnaryKind.SOFTPLUS), [x], f"{op.outputs[0]}_soft")
    gate = ctx.add(op, Unary(UnaryKind.TANH), [soft], f"{op.outputs[0]}_gate")
    ctx.emit(op, Binary(BinaryKind.MULTIPLY), [x, gate])


def batch_affine(ctx: OnnxContext, op: OnnxNode, x: str, factor: str, offset: str) -> None:
    """x * factor + offset with one element of each per channel, axis 1; emits the operator's result."""
    rank, channels = len(ctx.type_of(x).shape), ctx.type_of(factor).elements
    shape = (channels,) + (1,) * (rank - 2)
    parts = [ctx.add(op, Reshape(shape), [name], f"{name}_column") for name in (factor, offset)]
    scaled = ctx.add(op, Binary(BinaryKind.MULTIPLY), [x, parts[0]], f"{op.outputs[0]}_scaled")
    ctx.emit(op, Add(), [scaled, parts[1]])
