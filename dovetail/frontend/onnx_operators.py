"""The table of ONNX operators: (domain, operator) -> importer. Adding an operator is one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, prod

import numpy as np

from dovetail.frontend import onnx_linear as linear
from dovetail.frontend import onnx_movement as movement
from dovetail.frontend import onnx_pooling as pooling
from dovetail.frontend.onnx_context import OnnxContext
from dovetail.frontend.onnx_file import OnnxNode, element_type, wrap
from dovetail.graph.types import DType
from dovetail.operators import arithmetic
from dovetail.operators.activation import Clamp, Softmax, Unary, UnaryKind
from dovetail.operators.base import Operator
from dovetail.operators.movement import Reshape, Transpose

Importer = Callable[[OnnxContext, OnnxNode], None]
"""Adds an operator's nodes; raises ModelError for what it cannot honour."""

QUANTISED_TYPES = (DType.INT4, DType.UINT4, DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)
"""Integers QuantizeLinear may give."""


def quantize_linear(ctx: OnnxContext, op: OnnxNode) -> None:
    """QuantizeLinear, per tensor or per axis."""
    scaling_attributes(ctx, op)
    ctx.only(op, "saturate", 1)  # concerns float8 only
    ctx.only(op, "precision", 0)
    named = int(ctx.attribute(op, "output_dtype", 0))
    default = element_type(named) or DType.UINT8
    x = ctx.value(op, 0)
    rank = len(ctx.type_of(x).shape)
    scaling = ctx.scaling(op, 1, 2, int(ctx.attribute(op, "axis", 1)), default, rank)
    if scaling.dtype not in QUANTISED_TYPES or (named and scaling.dtype is not element_type(named)):
        raise ctx.refuse(op, f"quantising to {scaling.dtype.text} is not supported")
    ctx.values[op.outputs[0]] = ctx.quantized(op, x, scaling)


def dequantize_linear(ctx: OnnxContext, op: OnnxNode) -> None:
    """DequantizeLinear, per tensor or per axis; constants stay integers."""
    scaling_attributes(ctx, op)
    if element_type(int(ctx.attribute(op, "output_dtype", 0))) not in (None, DType.FLOAT32):
        raise ctx.refuse(op, "only float32 results are supported")
    x = ctx.value(op, 0)
    kind = ctx.type_of(x)
    if not kind.dtype.is_integer:
        raise ctx.refuse(op, f"dequantises {kind}; only integers are supported")
    scaling = ctx.scaling(op, 1, 2, int(ctx.attribute(op, "axis", 1)), kind.dtype, len(kind.shape))
    ctx.values[op.outputs[0]] = ctx.dequantized(op, x, scaling, op.outputs[0])


def scaling_attributes(ctx: OnnxContext, op: OnnxNode) -> None:
    """Refuse blocked quantisation."""
    if ctx.attribute(op, "block_size", 0):
        raise ctx.refuse(
            op,
            f"the attribute block_size = {op.attributes['block_size']} is not supported",
            "quantise per tensor or per axis",
        )


def add(ctx: OnnxContext, op: OnnxNode) -> None:
    """Add with broadcasting."""
    ctx.emit(op, arithmetic.Add(), [ctx.value(op, 0), ctx.value(op, 1)])


def qlinear_add(ctx: OnnxContext, op: OnnxNode) -> None:
    """com.microsoft QLinearAdd."""
    a = ctx.dequantized(op, ctx.value(op, 0), ctx.scaling(op, 1, 2, -1, DType.UINT8))
    b = ctx.dequantized(op, ctx.value(op, 3), ctx.scaling(op, 4, 5, -1, DType.UINT8))
    total = ctx.add(op, arithmetic.Add(), [a, b], f"{op.outputs[0]}_sum")
    ctx.values[op.outputs[0]] = ctx.quantized(op, total, ctx.scaling(op, 6, 7, -1, DType.UINT8))


def _float(ctx: OnnxContext, op: OnnxNode) -> str:
    """Operand 0, which must be float."""
    x = ctx.value(op, 0)
    if ctx.type_of(x).dtype is not DType.FLOAT32:
        raise ctx.refuse(op, f"works on float32 here, its operand is {ctx.type_of(x)}")
    return x


def relu(ctx: OnnxContext, op: OnnxNode) -> None:
    """Relu."""
    ctx.emit(op, Clamp(0.0, inf), [_float(ctx, op)])


def clip(ctx: OnnxContext, op: OnnxNode) -> None:
    """Clip: attributes before opset 11, operands since; of integers too."""
    low = float(ctx.attribute(op, "min", -inf)) if "min" in op.attributes else ctx.number(op, 1, -inf, "lower limit")
    high = float(ctx.attribute(op, "max", inf)) if "max" in op.attributes else ctx.number(op, 2, inf, "upper limit")
    x = ctx.value(op, 0)
    kind = ctx.type_of(x).dtype
    if kind is DType.FLOAT32:
        ctx.emit(op, Clamp(low, high), [x])
        return
    limits = int(max(low, kind.low)), int(min(high, kind.high))
    ctx.emit(op, arithmetic.Clip(*limits, kind), [x])


def _unary(kind: UnaryKind, **defaults: float) -> Importer:
    """The importer of a float function; attributes other than alpha must have the given value."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        alpha = float(ctx.attribute(op, "alpha", defaults["alpha"])) if "alpha" in defaults else 0.0
        ctx.emit(op, Unary(kind, alpha), [_float(ctx, op)])

    return build


def hard_sigmoid(ctx: OnnxContext, op: OnnxNode) -> None:
    """HardSigmoid with the slope 1/6 and the offset 1/2 of Keras and PyTorch."""
    alpha, beta = float(ctx.attribute(op, "alpha", 0.2)), float(ctx.attribute(op, "beta", 0.5))
    if not np.isclose(alpha, 1 / 6, rtol=1e-6) or beta != 0.5:
        raise ctx.refuse(op, f"alpha = {alpha}, beta = {beta} are not supported, only 1/6 and 0.5")
    ctx.emit(op, Unary(UnaryKind.HARD_SIGMOID), [_float(ctx, op)])


def gelu(ctx: OnnxContext, op: OnnxNode) -> None:
    """Gelu, exact."""
    ctx.only(op, "approximate", "none")
    ctx.emit(op, Unary(UnaryKind.GELU), [_float(ctx, op)])


def _normalised(ctx: OnnxContext, op: OnnxNode, x: str, opset: int, stem: str) -> str:
    """The softmax of a float value over the operator's axis; before opset 13 over all axes from it on."""
    shape = ctx.type_of(x).shape
    axis = ctx.positive_axis(op, int(ctx.attribute(op, "axis", -1 if opset >= 13 else 1)), len(shape))
    if axis == len(shape) - 1:
        return ctx.add(op, Softmax(), [x], stem)
    if opset < 13:
        rows = ctx.add(op, Reshape((prod(shape[:axis]), prod(shape[axis:]))), [x], f"{stem}_rows")
        return ctx.add(op, Reshape(shape), [ctx.add(op, Softmax(), [rows], f"{stem}_normalised")], stem)
    order = (*(place for place in range(len(shape)) if place != axis), axis)
    back = tuple(order.index(place) for place in range(len(shape)))
    last = ctx.add(op, Transpose(order), [x], f"{stem}_last")
    return ctx.add(op, Transpose(back), [ctx.add(op, Softmax(), [last], f"{stem}_normalised")], stem)


def softmax(ctx: OnnxContext, op: OnnxNode) -> None:
    """Softmax."""
    ctx.values[op.outputs[0]] = _normalised(ctx, op, _float(ctx, op), ctx.opset, op.outputs[0])


def qlinear_softmax(ctx: OnnxContext, op: OnnxNode) -> None:
    """com.microsoft QLinearSoftmax; its attribute `opset` says which meaning of `axis` holds."""
    x = ctx.dequantized(op, ctx.value(op, 0), ctx.scaling(op, 1, 2, -1, DType.UINT8))
    opset = int(ctx.attribute(op, "opset", 13))
    real = _normalised(ctx, op, x, opset, f"{op.outputs[0]}_real")
    ctx.values[op.outputs[0]] = ctx.quantized(op, real, ctx.scaling(op, 3, 4, -1, DType.UINT8))


def _qlinear_unary(kind: UnaryKind, alpha: float = 0.0) -> Importer:
    """The importer of a quantised function of com.microsoft."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        operator: Operator = Unary(kind, float(ctx.attribute(op, "alpha", alpha)) if alpha else 0.0)
        x = ctx.dequantized(op, ctx.value(op, 0), ctx.scaling(op, 1, 2, -1, DType.UINT8))
        real = ctx.add(op, operator, [x], f"{op.outputs[0]}_real")
        ctx.values[op.outputs[0]] = ctx.quantized(op, real, ctx.scaling(op, 3, 4, -1, DType.UINT8))

    return build


def identity(ctx: OnnxContext, op: OnnxNode) -> None:
    """Identity."""
    ctx.alias(op, ctx.value(op, 0))


def dropout(ctx: OnnxContext, op: OnnxNode) -> None:
    """Dropout at inference: nothing."""
    ctx.attribute(op, "ratio", 0.5)  # no meaning at inference
    ctx.attribute(op, "seed", 0)
    if ctx.has(op, 2) and ctx.constant(op, 2, "training mode").array.any():
        raise ctx.refuse(op, "training_mode is set", "export the model for inference")
    if sum(name != "" for name in op.outputs) != 1:
        raise ctx.refuse(op, "the result with the mask is not supported")
    ctx.alias(op, ctx.value(op, 0))


def cast(ctx: OnnxContext, op: OnnxNode) -> None:
    """Cast between equal types, and of an integer to float32 (its value with the scale 1)."""
    ctx.attribute(op, "saturate", 1)  # concerns float8 only
    ctx.attribute(op, "round_mode", "up")  # concerns float8 only
    x = ctx.value(op, 0)
    source, target = ctx.type_of(x).dtype, element_type(int(ctx.attribute(op, "to", 0)))
    if target is source:
        ctx.alias(op, x)
        return
    if target is not DType.FLOAT32 or not source.is_integer:
        raise ctx.refuse(op, f"from {source.text} to {target.text if target else 'that type'} is not supported")
    unit = ctx.scaling_of(op.outputs[0], np.ones(1, np.float32), np.zeros(1, np.int32), -1, source)
    ctx.values[op.outputs[0]] = ctx.dequantized(op, x, unit, op.outputs[0])


def shape(ctx: OnnxContext, op: OnnxNode) -> None:
    """Shape: known, since every size is fixed."""
    sizes = ctx.type_of(ctx.value(op, 0)).shape
    part = sizes[int(ctx.attribute(op, "start", 0)) : ctx.attribute(op, "end", None)]
    ctx.constants[op.outputs[0]] = wrap(np.array(part, np.int64), DType.INT64)


STANDARD: Mapping[str, Importer] = {
    "Add": add,
    "AveragePool": pooling.average_pool,
    "BatchNormalization": linear.batch_normalization,
    "Cast": cast,
    "Clip": clip,
    "Concat": movement.concat,
    "Conv": linear.conv,
    "ConvInteger": linear.conv_integer,
    "DequantizeLinear": dequantize_linear,
    "Dropout": dropout,
    "Elu": _unary(UnaryKind.ELU, alpha=1.0),
    "Flatten": movement.flatten,
    "Gelu": gelu,
    "Gemm": linear.gemm,
    "GlobalAveragePool": pooling.global_average_pool,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": _unary(UnaryKind.HARD_SWISH),
    "Identity": identity,
    "LeakyRelu": _unary(UnaryKind.LEAKY_RELU, alpha=0.01),
    "MatMul": linear.matmul,
    "MatMulInteger": linear.matmul_integer,
    "MaxPool": pooling.max_pool,
    "Pad": movement.pad,
    "QLinearConv": linear.qlinear_conv,
    "QLinearMatMul": linear.qlinear_matmul,
    "QuantizeLinear": quantize_linear,
    "ReduceMean": pooling.reduce_mean,
    "Relu": relu,
    "Reshape": movement.reshape,
    "Shape": shape,
    "Sigmoid": _unary(UnaryKind.SIGMOID),
    "Slice": movement.slice_,
    "Softmax": softmax,
    "Squeeze": movement.squeeze,
    "Tanh": _unary(UnaryKind.TANH),
    "Transpose": movement.transpose,
    "Unsqueeze": movement.unsqueeze,
}
"""Operators of the domain ai.onnx."""

MICROSOFT: Mapping[str, Importer] = {
    "DequantizeLinear": dequantize_linear,
    "Gelu": gelu,
    "QGemm": linear.qgemm,
    "QLinearAdd": qlinear_add,
    "QLinearAveragePool": pooling.qlinear_average_pool,
    "QLinearConcat": movement.qlinear_concat,
    "QLinearGlobalAveragePool": pooling.qlinear_global_average_pool,
    "QLinearLeakyRelu": _qlinear_unary(UnaryKind.LEAKY_RELU, 0.01),
    "QLinearSigmoid": _qlinear_unary(UnaryKind.SIGMOID),
    "QLinearSoftmax": qlinear_softmax,
    "QuantizeLinear": quantize_linear,
}
"""ONNX Runtime's own operators (domain com.microsoft)."""

IMPORTERS: Mapping[tuple[str, str], Importer] = {
    **{("", name): build for name, build in STANDARD.items()},
    **{("com.microsoft", name): build for name, build in MICROSOFT.items()},
}
"""Every ONNX operator Dovetail reads."""
