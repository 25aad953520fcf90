"""The table of TFLite operators: opcode -> importer. Adding an operator is one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from dovetail.frontend import tflite_elementwise as elementwise
from dovetail.frontend import tflite_linear as linear
from dovetail.frontend import tflite_movement as movement
from dovetail.frontend import tflite_recurrent as recurrent
from dovetail.frontend import tflite_state as state
from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import OperatorEntry
from dovetail.graph.types import DType
from dovetail.operators.activation import Clamp, Softmax, Unary, UnaryKind
from dovetail.operators.arithmetic import Add
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import BinaryKind
from dovetail.operators.quantization import Quantize


@dataclass(frozen=True)
class Importer:
    """How one TFLite operator is read."""

    build: Callable[[TfliteContext, OperatorEntry], None]
    """Adds the operator's nodes; raises ModelError for what it cannot honour."""
    version: int
    """The newest version whose meaning is implemented (tensorflow/lite/tools/versioning/op_version.cc says
    what each one added)."""


def add(ctx: TfliteContext, op: OperatorEntry) -> None:
    """ADD with broadcasting. `pot_scale_int16` chooses a kernel, not a meaning."""
    options = ctx.options(op, "AddOptions")
    a, b = ctx.input(op, 0), ctx.input(op, 1)
    ctx.same_type(op, a, b, ctx.output(op))
    ctx.emit_real(op, Add(), [ctx.real(op, a), ctx.real(op, b)], int(options["FusedActivationFunction"]))


def _pointwise(operator: Operator) -> Callable[[TfliteContext, OperatorEntry], None]:
    """The importer of a function of each element that has no options."""

    def build(ctx: TfliteContext, op: OperatorEntry) -> None:
        x = ctx.input(op, 0)
        ctx.same_type(op, x, ctx.output(op))
        ctx.emit_real(op, operator, [ctx.real(op, x)])

    return build


def leaky_relu(ctx: TfliteContext, op: OperatorEntry) -> None:
    """LEAKY_RELU."""
    alpha = float(ctx.options(op, "LeakyReluOptions")["Alpha"])
    _pointwise(Unary(UnaryKind.LEAKY_RELU, alpha))(ctx, op)


def softmax(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SOFTMAX over the last axis."""
    beta = float(ctx.options(op, "SoftmaxOptions")["Beta"])
    if not 0.0 < beta < inf:
        raise ctx.refuse(op, f"beta is {beta}; it must be positive")
    _pointwise(Softmax(beta))(ctx, op)


def quantize(ctx: TfliteContext, op: OperatorEntry) -> None:
    """QUANTIZE: float to integer, or from one quantisation to another."""
    x, result = ctx.input(op, 0), ctx.output(op)
    if not result.dtype.is_integer:
        raise ctx.refuse(op, f"the result {result} must be an integer")
    if result.quantisation is not None and len(result.quantisation.scale) > 1:
        raise ctx.refuse(op, f"the result {result} is quantised per channel, which is not supported")
    ctx.emit(op, Quantize(result.dtype), [ctx.real(op, x), *ctx.parameters(op, result)])


def dequantize(ctx: TfliteContext, op: OperatorEntry) -> None:
    """DEQUANTIZE: the float meaning of an integer tensor."""
    x, result = ctx.input(op, 0), ctx.output(op)
    if not x.dtype.is_integer or result.dtype is not DType.FLOAT32:
        raise ctx.refuse(op, f"from {x} to {result} is not supported")
    ctx.bind(op, ctx.real(op, x))


IMPORTERS: Mapping[str, Importer] = {
    "ADD": Importer(add, 3),
    "ARG_MAX": Importer(elementwise.arg_extreme(largest=True), 2),
    "ARG_MIN": Importer(elementwise.arg_extreme(largest=False), 2),
    "ASSIGN_VARIABLE": Importer(state.assign_variable, 1),
    "AVERAGE_POOL_2D": Importer(linear.average_pool, 3),
    "CALL_ONCE": Importer(state.call_once, 1),
    "CONCATENATION": Importer(movement.concatenation, 3),
    "CONV_2D": Importer(linear.convolution, 8),
    "DEPTHWISE_CONV_2D": Importer(linear.depthwise, 7),
    "DEQUANTIZE": Importer(dequantize, 6),
    "EXPAND_DIMS": Importer(movement.expand_dims, 1),
    "FULLY_CONNECTED": Importer(linear.fully_connected, 12),
    "HARD_SWISH": Importer(_pointwise(Unary(UnaryKind.HARD_SWISH)), 1),
    "LEAKY_RELU": Importer(leaky_relu, 2),
    "LOGISTIC": Importer(_pointwise(Unary(UnaryKind.SIGMOID)), 3),
    "MAXIMUM": Importer(elementwise.extreme(BinaryKind.MAXIMUM), 4),
    "MAX_POOL_2D": Importer(linear.max_pool, 3),
    "MEAN": Importer(linear.mean, 3),
    "MINIMUM": Importer(elementwise.extreme(BinaryKind.MINIMUM), 4),
    "MUL": Importer(elementwise.arithmetic(BinaryKind.MULTIPLY, "MulOptions"), 4),
    "PACK": Importer(movement.pack, 4),
    "PAD": Importer(movement.pad, 4),
    "PADV2": Importer(movement.pad, 4),
    "QUANTIZE": Importer(quantize, 4),
    "READ_VARIABLE": Importer(state.read_variable, 1),
    "RELU": Importer(_pointwise(Clamp(0.0, inf)), 3),
    "RELU6": Importer(_pointwise(Clamp(0.0, 6.0)), 3),
    "RELU_N1_TO_1": Importer(_pointwise(Clamp(-1.0, 1.0)), 1),
    "RESHAPE": Importer(movement.reshape, 1),
    "SHAPE": Importer(movement.shape, 1),
    "SLICE": Importer(movement.slice_, 5),
    "SOFTMAX": Importer(softmax, 3),
    "SQUEEZE": Importer(movement.squeeze, 1),
    "STRIDED_SLICE": Importer(movement.strided_slice, 4),
    "SUB": Importer(elementwise.arithmetic(BinaryKind.SUBTRACT, "SubOptions"), 5),
    "SVDF": Importer(recurrent.svdf, 4),
    "TANH": Importer(_pointwise(Unary(UnaryKind.TANH)), 3),
    "TRANSPOSE": Importer(movement.transpose, 6),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": Importer(recurrent.lstm, 4),
    "VAR_HANDLE": Importer(state.var_handle, 1),
}
"""Every TFLite operator Dovetail reads."""
