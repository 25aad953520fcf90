"""The table of ONNX operators: (domain, operator) -> importer. Adding an operator is one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dovetail.frontend import onnx_elementwise as elementwise
from dovetail.frontend import onnx_linear as linear
from dovetail.frontend import onnx_logic as logic
from dovetail.frontend import onnx_movement as movement
from dovetail.frontend import onnx_pooling as pooling
from dovetail.frontend import onnx_qonnx as qonnx
from dovetail.frontend import onnx_recurrent as recurrent
from dovetail.frontend import onnx_reduction as reduction
from dovetail.frontend import onnx_resize as resize
from dovetail.frontend import onnx_selection as selection
from dovetail.frontend import onnx_transposed as transposed
from dovetail.frontend.onnx_context import OnnxContext
from dovetail.frontend.onnx_file import OnnxNode, element_type, wrap
from dovetail.graph.types import DType
from dovetail.operators import arithmetic
from dovetail.operators.activation import Unary, UnaryKind
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import BinaryKind
from dovetail.operators.logic import CompareKind
from dovetail.operators.recurrent_float import RecurrentKind
from dovetail.operators.reduction import ReduceKind

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
    axis = int(ctx.attribute(op, "axis", 1))
    if ctx.has(op, 1) and op.inputs[1] not in ctx.constants:
        logic.quantize_at_run_time(ctx, op, default)
        return
    scaling = ctx.scaling(op, 1, 2, axis, default, rank)
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


def qlinear_add(ctx: OnnxContext, op: OnnxNode) -> None:
    """com.microsoft QLinearAdd."""
    a = ctx.dequantized(op, ctx.value(op, 0), ctx.scaling(op, 1, 2, -1, DType.UINT8))
    b = ctx.dequantized(op, ctx.value(op, 3), ctx.scaling(op, 4, 5, -1, DType.UINT8))
    total = ctx.add(op, arithmetic.Add(), [a, b], f"{op.outputs[0]}_sum")
    ctx.values[op.outputs[0]] = ctx.quantized(op, total, ctx.scaling(op, 6, 7, -1, DType.UINT8))


def qlinear_softmax(ctx: OnnxContext, op: OnnxNode) -> None:
    """com.microsoft QLinearSoftmax; its attribute `opset` says which meaning of `axis` holds."""
    x = ctx.dequantized(op, ctx.value(op, 0), ctx.scaling(op, 1, 2, -1, DType.UINT8))
    opset = int(ctx.attribute(op, "opset", 13))
    real = reduction.normalised(ctx, op, x, opset, f"{op.outputs[0]}_real")
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


def shape(ctx: OnnxContext, op: OnnxNode) -> None:
    """Shape: known, since every size is fixed."""
    sizes = ctx.type_of(ctx.value(op, 0)).shape
    part = sizes[int(ctx.attribute(op, "start", 0)) : ctx.attribute(op, "end", None)]
    ctx.constants[op.outputs[0]] = wrap(np.array(part, np.int64), DType.INT64)


STANDARD: Mapping[str, Importer] = {
    "Abs": elementwise.unary(UnaryKind.ABSOLUTE),
    "Add": elementwise.binary(BinaryKind.ADD),
    "And": logic.logic(BinaryKind.MINIMUM),
    "ArgMax": reduction.arg_extreme(largest=True),
    "ArgMin": reduction.arg_extreme(largest=False),
    "AveragePool": pooling.average_pool,
    "BatchNormalization": linear.batch_normalization,
    "Cast": logic.cast,
    "Ceil": elementwise.unary(UnaryKind.CEILING),
    "Celu": elementwise.celu,
    "Clip": elementwise.clip,
    "Concat": movement.concat,
    "Conv": linear.conv,
    "ConvInteger": linear.conv_integer,
    "ConvTranspose": transposed.conv_transpose,
    "Cos": elementwise.unary(UnaryKind.COSINE),
    "DepthToSpace": selection.depth_to_space,
    "DequantizeLinear": dequantize_linear,
    "Div": elementwise.binary(BinaryKind.DIVIDE),
    "Dropout": dropout,
    "DynamicQuantizeLinear": logic.dynamic_quantize,
    "Elu": elementwise.unary(UnaryKind.ELU, alpha=1.0),
    "Equal": logic.relation(CompareKind.EQUAL),
    "Erf": elementwise.unary(UnaryKind.ERROR_FUNCTION),
    "Exp": elementwise.unary(UnaryKind.EXPONENTIAL),
    "Expand": selection.expand,
    "Flatten": movement.flatten,
    "Floor": elementwise.unary(UnaryKind.FLOOR),
    "GRU": recurrent.recurrent(RecurrentKind.GRU),
    "Gather": selection.gather,
    "Gelu": elementwise.gelu,
    "Gemm": linear.gemm,
    "GlobalAveragePool": pooling.global_average_pool,
    "GlobalMaxPool": reduction.global_pool(ReduceKind.MAXIMUM),
    "Greater": logic.relation(CompareKind.LESS, exchanged=True),
    "GreaterOrEqual": logic.relation(CompareKind.LESS_OR_EQUAL, exchanged=True),
    "GroupNormalization": reduction.group_normalisation,
    "HardSigmoid": elementwise.hard_sigmoid,
    "HardSwish": elementwise.unary(UnaryKind.HARD_SWISH),
    "Identity": identity,
    "InstanceNormalization": reduction.instance_normalisation,
    "IsInf": logic.is_inf,
    "IsNaN": logic.is_nan,
    "LSTM": recurrent.recurrent(RecurrentKind.LSTM),
    "LayerNormalization": reduction.layer_normalisation,
    "LeakyRelu": elementwise.unary(UnaryKind.LEAKY_RELU, alpha=0.01),
    "Less": logic.relation(CompareKind.LESS),
    "LessOrEqual": logic.relation(CompareKind.LESS_OR_EQUAL),
    "Log": elementwise.unary(UnaryKind.LOGARITHM),
    "LogSoftmax": reduction.log_softmax,
    "MatMul": linear.matmul,
    "MatMulInteger": linear.matmul_integer,
    "Max": elementwise.several(BinaryKind.MAXIMUM),
    "MaxPool": pooling.max_pool,
    "Mean": elementwise.several(BinaryKind.ADD, mean=True),
    "Min": elementwise.several(BinaryKind.MINIMUM),
    "Mish": elementwise.mish,
    "Mod": logic.modulo,
    "Mul": elementwise.binary(BinaryKind.MULTIPLY),
    "Neg": elementwise.unary(UnaryKind.NEGATIVE),
    "Not": logic.logical_not,
    "Or": logic.logic(BinaryKind.MAXIMUM),
    "PRelu": elementwise.prelu,
    "Pad": movement.pad,
    "Pow": elementwise.power,
    "QLinearConv": linear.qlinear_conv,
    "QLinearMatMul": linear.qlinear_matmul,
    "QuantizeLinear": quantize_linear,
    "RNN": recurrent.recurrent(RecurrentKind.RNN),
    "RMSNormalization": reduction.rms_normalisation,
    "Reciprocal": elementwise.unary(UnaryKind.RECIPROCAL),
    "ReduceL1": reduction.reduction(ReduceKind.SUM, before=UnaryKind.ABSOLUTE),
    "ReduceL2": reduction.squares(root=True),
    "ReduceLogSum": reduction.reduction(ReduceKind.SUM, after=UnaryKind.LOGARITHM),
    "ReduceLogSumExp": reduction.log_sum_exp,
    "ReduceMax": reduction.reduction(ReduceKind.MAXIMUM),
    "ReduceMean": pooling.reduce_mean,
    "ReduceMin": reduction.reduction(ReduceKind.MINIMUM),
    "ReduceProd": reduction.reduction(ReduceKind.PRODUCT),
    "ReduceSum": reduction.reduction(ReduceKind.SUM),
    "ReduceSumSquare": reduction.squares(root=False),
    "Relu": elementwise.relu,
    "Reshape": movement.reshape,
    "Resize": resize.resize,
    "Round": elementwise.unary(UnaryKind.ROUND),
    "Selu": elementwise.selu,
    "Shape": shape,
    "Sigmoid": elementwise.unary(UnaryKind.SIGMOID),
    "Sign": elementwise.unary(UnaryKind.SIGN),
    "Sin": elementwise.unary(UnaryKind.SINE),
    "Slice": movement.slice_,
    "Softmax": reduction.softmax,
    "Softplus": elementwise.unary(UnaryKind.SOFTPLUS),
    "Softsign": elementwise.unary(UnaryKind.SOFTSIGN),
    "SpaceToDepth": selection.space_to_depth,
    "Split": selection.split,
    "Sqrt": elementwise.unary(UnaryKind.SQUARE_ROOT),
    "Squeeze": movement.squeeze,
    "Sub": elementwise.binary(BinaryKind.SUBTRACT),
    "Sum": elementwise.several(BinaryKind.ADD),
    "Swish": elementwise.swish,
    "Tanh": elementwise.unary(UnaryKind.TANH),
    "ThresholdedRelu": elementwise.unary(UnaryKind.THRESHOLDED_RELU, alpha=1.0),
    "Tile": selection.tile,
    "Transpose": movement.transpose,
    "Unsqueeze": movement.unsqueeze,
    "Where": logic.where,
    "Xor": logic.relation(CompareKind.EQUAL, negative=True),
}
"""Operators of the domain ai.onnx."""

MICROSOFT: Mapping[str, Importer] = {
    "DequantizeLinear": dequantize_linear,
    "Gelu": elementwise.gelu,
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

LATER_RESULTS = ("GRU", "LSTM", "RNN")
"""Operators whose first result may be left out."""

IMPORTERS: Mapping[tuple[str, str], Importer] = {
    **{("", name): build for name, build in STANDARD.items()},
    **{("com.microsoft", name): build for name, build in MICROSOFT.items()},
    **{(domain, name): build for domain in qonnx.DOMAINS for name, build in qonnx.QONNX.items()},
}
"""Every ONNX operator Dovetail reads."""
