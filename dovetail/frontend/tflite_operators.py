"""The table of TFLite operators: opcode -> importer. Adding an operator is one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from dovetail.frontend import tflite_elementwise as elementwise
from dovetail.frontend import tflite_linear as linear
from dovetail.frontend import tflite_logic as logic
from dovetail.frontend import tflite_movement as movement
from dovetail.frontend import tflite_products as products
from dovetail.frontend import tflite_recurrent as recurrent
from dovetail.frontend import tflite_reduction as reduction
from dovetail.frontend import tflite_selection as selection
from dovetail.frontend import tflite_state as state
from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_elementwise import pointwise
from dovetail.frontend.tflite_file import AGAIN, ALIKE, OperatorEntry
from dovetail.graph.types import DType
from dovetail.operators.activation import Clamp, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.operators.elementwise import BinaryKind
from dovetail.operators.logic import CompareKind
from dovetail.operators.quantization import Quantize
from dovetail.operators.reduction import ReduceKind

_UNARY_VERSIONS = {"ABS": 5, "LOGISTIC": 3, "RSQRT": 3, "TANH": 3}
"""Newest versions of functions of one value, where that is not at most 2."""


@dataclass(frozen=True)
class Importer:
    """How one TFLite operator is read."""

    build: Callable[[TfliteContext, OperatorEntry], None]
    """Adds the operator's nodes; raises ModelError for what it cannot honour."""
    version: int
    """The newest version whose meaning is implemented (tensorflow/lite/tools/versioning/op_version.cc says
    what each one added)."""


def leaky_relu(ctx: TfliteContext, op: OperatorEntry) -> None:
    """LEAKY_RELU."""
    alpha = float(ctx.options(op, "LeakyReluOptions")["Alpha"])
    pointwise(Unary(UnaryKind.LEAKY_RELU, alpha))(ctx, op)


def softmax(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SOFTMAX over the last axis."""
    beta = float(ctx.options(op, "SoftmaxOptions")["Beta"])
    if not 0.0 < beta < inf:
        raise ctx.refuse(op, f"beta is {beta}; it must be positive", AGAIN)
    pointwise(Softmax(beta))(ctx, op)


def quantize(ctx: TfliteContext, op: OperatorEntry) -> None:
    """QUANTIZE: float to integer, or from one quantisation to another."""
    x, result = ctx.input(op, 0), ctx.output(op)
    if not result.dtype.is_integer:
        raise ctx.refuse(op, f"the result {result} must be an integer", AGAIN)
    if result.quantisation is not None and len(result.quantisation.scale) > 1:
        raise ctx.refuse(op, f"the result {result} is quantised per channel, which is not supported", ALIKE)
    ctx.emit(op, Quantize(result.dtype), [ctx.real(op, x), *ctx.parameters(op, result)])


def dequantize(ctx: TfliteContext, op: OperatorEntry) -> None:
    """DEQUANTIZE: the float meaning of an integer tensor."""
    x, result = ctx.input(op, 0), ctx.output(op)
    if not x.dtype.is_integer or result.dtype is not DType.FLOAT32:
        raise ctx.refuse(op, f"from {x} to {result} is not supported")
    ctx.bind(op, ctx.real(op, x))


IMPORTERS: Mapping[str, Importer] = {
    **{
        name: Importer(pointwise(Unary(kind)), _UNARY_VERSIONS.get(name, 2))
        for name, kind in elementwise.UNARY.items()
    },
    "ADD": Importer(elementwise.arithmetic(BinaryKind.ADD, "AddOptions"), 5),
    "ADD_N": Importer(elementwise.add_n, 1),
    "ARG_MAX": Importer(elementwise.arg_extreme(largest=True), 2),
    "ARG_MIN": Importer(elementwise.arg_extreme(largest=False), 2),
    "ASSIGN_VARIABLE": Importer(state.assign_variable, 1),
    "AVERAGE_POOL_2D": Importer(linear.average_pool, 3),
    "BATCH_MATMUL": Importer(products.batch_matmul, 4),
    "BATCH_TO_SPACE_ND": Importer(selection.batch_to_space, 4),
    "BROADCAST_TO": Importer(selection.broadcast_to, 3),
    "CALL_ONCE": Importer(state.call_once, 1),
    "CAST": Importer(logic.cast, 7),
    "CONCATENATION": Importer(movement.concatenation, 3),
    "CONV_2D": Importer(linear.convolution, 8),
    "DEPTHWISE_CONV_2D": Importer(linear.depthwise, 7),
    "DEPTH_TO_SPACE": Importer(selection.depth_to_space, 2),
    "DEQUANTIZE": Importer(dequantize, 6),
    "DIV": Importer(elementwise.arithmetic(BinaryKind.DIVIDE, "DivOptions"), 3),
    "ELU": Importer(pointwise(Unary(UnaryKind.ELU, 1.0)), 1),
    "EMBEDDING_LOOKUP": Importer(selection.embedding_lookup, 4),
    "EQUAL": Importer(logic.comparison(CompareKind.EQUAL), 4),
    "EXPAND_DIMS": Importer(movement.expand_dims, 1),
    "FILL": Importer(selection.broadcast_to, 4),
    "FLOOR_DIV": Importer(elementwise.floor_divide, 3),
    "FLOOR_MOD": Importer(elementwise.arithmetic(BinaryKind.MODULO), 2),
    "FULLY_CONNECTED": Importer(linear.fully_connected, 12),
    "GATHER": Importer(selection.gather, 7),
    "GATHER_ND": Importer(selection.gather_nd, 5),
    "GELU": Importer(elementwise.gelu, 2),
    "GREATER": Importer(logic.comparison(CompareKind.LESS, exchanged=True), 3),
    "GREATER_EQUAL": Importer(logic.comparison(CompareKind.LESS_OR_EQUAL, exchanged=True), 3),
    "L2_NORMALIZATION": Importer(reduction.l2_normalization, 2),
    "L2_POOL_2D": Importer(reduction.l2_pool, 1),
    "LEAKY_RELU": Importer(leaky_relu, 2),
    "LESS": Importer(logic.comparison(CompareKind.LESS), 3),
    "LESS_EQUAL": Importer(logic.comparison(CompareKind.LESS_OR_EQUAL), 3),
    "LOGICAL_AND": Importer(logic.logical(BinaryKind.MINIMUM), 1),
    "LOGICAL_NOT": Importer(logic.logical_not, 1),
    "LOGICAL_OR": Importer(logic.logical(BinaryKind.MAXIMUM), 1),
    "LOG_SOFTMAX": Importer(pointwise(LogSoftmax()), 2),
    "MAXIMUM": Importer(elementwise.extreme(BinaryKind.MAXIMUM), 4),
    "MAX_POOL_2D": Importer(linear.max_pool, 3),
    "MEAN": Importer(reduction.reduction(ReduceKind.MEAN), 3),
    "MINIMUM": Importer(elementwise.extreme(BinaryKind.MINIMUM), 4),
    "MIRROR_PAD": Importer(selection.mirror_pad, 3),
    "MUL": Importer(elementwise.arithmetic(BinaryKind.MULTIPLY, "MulOptions"), 7),
    "NOT_EQUAL": Importer(logic.comparison(CompareKind.EQUAL, negative=True), 4),
    "PACK": Importer(movement.pack, 4),
    "PAD": Importer(movement.pad, 4),
    "PADV2": Importer(movement.pad, 4),
    "POW": Importer(elementwise.arithmetic(BinaryKind.POWER), 1),
    "PRELU": Importer(elementwise.arithmetic(BinaryKind.PRELU), 2),
    "QUANTIZE": Importer(quantize, 4),
    "READ_VARIABLE": Importer(state.read_variable, 1),
    "REDUCE_ALL": Importer(reduction.extreme(ReduceKind.MINIMUM), 1),
    "REDUCE_ANY": Importer(reduction.extreme(ReduceKind.MAXIMUM), 2),
    "REDUCE_MAX": Importer(reduction.extreme(ReduceKind.MAXIMUM), 3),
    "REDUCE_MIN": Importer(reduction.extreme(ReduceKind.MINIMUM), 3),
    "REDUCE_PROD": Importer(reduction.reduction(ReduceKind.PRODUCT), 2),
    "RELU": Importer(pointwise(Clamp(0.0, inf)), 3),
    "RELU6": Importer(pointwise(Clamp(0.0, 6.0)), 3),
    "RELU_N1_TO_1": Importer(pointwise(Clamp(-1.0, 1.0)), 1),
    "RESHAPE": Importer(movement.reshape, 1),
    "RESIZE_BILINEAR": Importer(products.resize_bilinear, 4),
    "RESIZE_NEAREST_NEIGHBOR": Importer(selection.nearest, 4),
    "REVERSE_V2": Importer(selection.reverse, 3),
    "SELECT": Importer(logic.select, 5),
    "SELECT_V2": Importer(logic.select, 2),
    "SHAPE": Importer(movement.shape, 1),
    "SLICE": Importer(movement.slice_, 5),
    "SOFTMAX": Importer(softmax, 3),
    "SPACE_TO_BATCH_ND": Importer(selection.space_to_batch, 4),
    "SPACE_TO_DEPTH": Importer(selection.space_to_depth, 2),
    "SPLIT": Importer(selection.split, 4),
    "SPLIT_V": Importer(selection.split_v, 2),
    "SQUARED_DIFFERENCE": Importer(elementwise.arithmetic(BinaryKind.SQUARED_DIFFERENCE), 2),
    "SQUEEZE": Importer(movement.squeeze, 1),
    "STRIDED_SLICE": Importer(movement.strided_slice, 4),
    "SUB": Importer(elementwise.arithmetic(BinaryKind.SUBTRACT, "SubOptions"), 5),
    "SUM": Importer(reduction.reduction(ReduceKind.SUM), 2),
    "SVDF": Importer(recurrent.svdf, 4),
    "TILE": Importer(selection.tile, 3),
    "TRANSPOSE": Importer(movement.transpose, 6),
    "TRANSPOSE_CONV": Importer(products.transpose_conv, 5),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": Importer(recurrent.lstm, 4),
    "UNPACK": Importer(selection.unpack, 4),
    "VAR_HANDLE": Importer(state.var_handle, 1),
    "ZEROS_LIKE": Importer(selection.zeros_like, 1),
}
"""Every TFLite operator Dovetail reads."""
