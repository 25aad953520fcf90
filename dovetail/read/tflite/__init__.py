"""TFLite models as graphs in QDQ form: the table of operators, and what computes one value of others elementwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph
from dovetail.ir.operators.activation import Clamp, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add, Dequantize, Quantize
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind, Convert, Select
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.operators.reduction import ArgExtreme, AveragePool2d, CumSum, Normalise, Reduce, ReduceKind
from dovetail.ir.operators.user import Said, SaidOperand, UserOperator
from dovetail.ir.types import DType, TensorType
from dovetail.read.tflite import control, linear, movement, recurrent
from dovetail.read.tflite.file import AGAIN, ALIKE, OperatorEntry, TfliteFile, TfliteTensor, read_tflite
from dovetail.read.tflite.flexbuffers import read_map
from dovetail.read.tflite.values import ACTIVATION_TYPES, SHAPE_TYPES, TfliteValues, same_quantisation
from dovetail.read.user import ADVICE, add_user, by_custom_code

UNSIGNED = (DType.UINT16, DType.UINT32)
"""Element types only operators of one's own and bundled ones compute with."""

COMPARES = "compares elements, but the quantisation of"

Build = Callable[[TfliteValues], str | None]
"""Adds an operator's nodes and gives its result, None where it binds its results itself; raises ModelError for what it
cannot honour."""


class Importer(NamedTuple):
    """How one TFLite operator is read, and the newest version whose meaning is implemented
    (tensorflow/lite/tools/versioning/op_version.cc says what each one added)."""

    build: Build
    version: int


def load_tflite(
    file_name: str,
    data: bytes,
    name: str,
    operators: Iterable[type[UserOperator]] = (),
    tell: Callable[[str], None] = lambda sentence: None,
) -> Graph:
    """Import a TFLite model as the graph `name`, in QDQ form: images NHWC, quantised values named after the model's
    tensors, each arithmetic operator in float between Dequantize and Quantize. `operators` are known beside the
    standard ones; `tell` is told what was left out.

    Raises:
        ModelError: the file is damaged, or says something Dovetail cannot honour.
    """
    file = read_tflite(file_name, data)
    v = TfliteValues(file, name, by_custom_code(operators))
    v.tell = tell
    _check_ends(file)
    if file.left_out:
        tell(f"{file_name}: only its first signature is compiled, without {', '.join(file.left_out)}")
    for index in file.inputs:
        v.add_input(index)
    _walk(v)
    return v.builder.finish([v.value(file.tensors[index], where=file.name) for index in file.outputs])


def _walk(v: TfliteValues) -> None:
    """Import all operators of a subgraph."""
    for op in v.file.operators:
        v.steps.append(op)
        if len(v.steps) > control.MOST_STEPS:
            raise v.again(op=op).refuse(f"makes more than {control.MOST_STEPS} operators of the loops", control.UNKNOWN)
        if op.opcode == "CUSTOM":
            _import_custom(v.again(op=op))
        else:
            _import(v.again(op=op), op)


def _check_ends(file: TfliteFile) -> None:
    """The model has inputs and outputs, of types a value may have."""
    again, allowed = "convert the model again", (*ACTIVATION_TYPES, *SHAPE_TYPES, *UNSIGNED, DType.BOOL)
    for what, indices in (("inputs", file.inputs), ("outputs", file.outputs)):
        if not indices or min(indices) < 0:
            raise ModelError(f"the model has no {what} or leaves one out", where=file.name, hint=again)
        if len(set(indices)) != len(indices):
            raise ModelError(f"the model lists one of its {what} twice", where=file.name, hint=again)
        for tensor in (file.tensors[index] for index in indices):
            if tensor.is_constant or tensor.dtype not in allowed:
                hint = f"{again}, with {what} of one of {', '.join(kind.text for kind in allowed)}"
                raise ModelError(f"{tensor} cannot be one of the model's {what}", where=file.name, hint=hint)


def _import(v: TfliteValues, op: OperatorEntry) -> None:
    """Import one operator; what its type rule rejects is the model's fault."""
    importer = IMPORTERS.get(op.opcode)
    if importer is None:
        raise v.refuse("this operator is not supported", f"supported are {', '.join(sorted(IMPORTERS))}")
    if op.version > importer.version:
        what = f"version {op.version} of this operator is not supported, only up to {importer.version}"
        raise v.refuse(what, "convert the model with an older converter, or without the newer feature")
    try:
        value = importer.build(v)
        if value is not None:
            v.bind(value)
    except ValueError as error:
        raise v.refuse(str(error)) from error


def _import_custom(v: TfliteValues) -> None:
    """Import a CUSTOM operator; its operands and results are as stored."""
    op, kind = v.op, v.custom.get(v.op.custom_code)
    if kind is None:
        what = f"the custom operator {op.custom_code!r} is not known; known are {', '.join(sorted(v.custom))}"
        raise v.refuse(what, ADVICE)
    results = v.results(len(op.outputs))
    count = len(op.inputs) if kind.taken is None else kind.taken
    attributes: Mapping[str, Any] = {}
    fault = ""
    try:
        attributes = read_map(op.custom_options) if op.custom_options else {}
    except ValueError as error:
        fault = str(error)
    operands = tuple(_said(v, v.optional(position)) for position in range(len(op.inputs)))
    said = Said(attributes, operands, tuple(_stated(tensor) for tensor in results), op.custom_options, fault)
    try:
        given = [v.real(x) if kind.real and x.quantisation else v.value(x) for x in map(v.input, range(count))]
        values = add_user(v, kind, said, given, [tensor.name for tensor in results])
        for value, tensor in zip(values, results, strict=True):
            v.bind_open(value, tensor)
    except ValueError as error:
        raise v.refuse(str(error)) from error


def _said(v: TfliteValues, tensor: TfliteTensor | None) -> SaidOperand | None:
    """The file's facts about an operand."""
    return None if tensor is None else replace(_stated(tensor), array=v.known_of(tensor))


def _stated(tensor: TfliteTensor) -> SaidOperand:
    """A tensor's type and quantisation."""
    held = tensor.quantisation
    parameters = (tuple(held.scale.tolist()), tuple(held.zero_point.tolist())) if held is not None else ((), ())
    return SaidOperand(TensorType(tensor.shape, tensor.dtype), *parameters)


def pointwise(operator: Operator) -> Build:
    """The importer of a function of each element."""

    def build(v: TfliteValues) -> str:
        x = v.input(0)
        v.same_type(x, v.output)
        return v.finish(operator, [v.real(x)])

    return build


def unary(kind: UnaryKind, alpha: float = 0.0) -> Build:
    """The importer of a function of one float."""
    return pointwise(Unary(kind, alpha))


def arithmetic(kind: BinaryKind, options: str = "") -> Build:
    """The importer of an operator with broadcasting, and a fused activation if it has options; of integers without
    quantisation on these, of known ones now."""

    def build(v: TfliteValues) -> str | None:
        activation = int(v.options(options)["FusedActivationFunction"]) if options else 0
        a, b = v.input(0), v.input(1)
        if a.dtype in SHAPE_TYPES and a.quantisation is None and activation == 0:
            known = [array for array in map(v.known_of, (a, b)) if array is not None]
            if len(known) < 2:
                return v.add(Binary(kind), [v.value(a), v.value(b)])
            v.bind_known(Binary(kind).evaluate(known))
            return None
        mixed = kind is BinaryKind.PRELU and a.dtype is DType.INT16  # TFLite's slopes have 8 bits then
        v.same_type(a, v.output, *([] if mixed else [b]))
        operator: Operator = Add() if kind is BinaryKind.ADD else Binary(kind)
        return v.finish(operator, [v.real(a), v.real(b)], activation)

    return build


def add_n(v: TfliteValues) -> str:
    """ADD_N: a sum of sums, which is rounded once."""
    v.same_type(v.output, *v.inputs)
    *terms, last = (v.real(tensor) for tensor in v.inputs)
    if not terms:
        raise v.refuse("has one operand, expected several", AGAIN)
    return v.finish(Add(), [v.folded(BinaryKind.ADD, terms, False, "partial"), last])


def floor_divide(v: TfliteValues) -> str | None:
    """FLOOR_DIV of floats, and of integers without quantisation: what is left of the remainder, divided."""
    a, b = v.input(0), v.input(1)
    if a.dtype in SHAPE_TYPES and a.quantisation is None and a.dtype is b.dtype:
        known = [array for array in map(v.known_of, (a, b)) if array is not None]
        if len(known) == 2 and (known[1] != 0).all():
            v.bind_known(known[0] // known[1])
            return None
        left, right = v.value(a), v.value(b)
        whole = v.minus(left, v.binary(BinaryKind.MODULO, left, right, "rest"), "whole")
        return v.binary(BinaryKind.DIVIDE, whole, right)
    v.same_type(a, b, v.output)
    return v.finish(Unary(UnaryKind.FLOOR), [v.over(v.real(a), v.real(b), "quotient")])


def extreme(kind: BinaryKind) -> Build:
    """The importer of MAXIMUM or MINIMUM, which compare stored integers and so must keep the quantisation."""

    def build(v: TfliteValues) -> str:
        a, b = v.input(0), v.input(1)
        v.same_type(a, b, v.output)
        v.keeps(a, b, v.output, what=COMPARES)
        return v.add(Binary(kind), [v.value(a), v.value(b)])

    return build


def arg_extreme(largest: bool) -> Build:
    """The importer of ARG_MAX or ARG_MIN: of equal elements the first."""

    def build(v: TfliteValues) -> str:
        x, result = v.input(0), v.output
        v.same_type(x)
        axes, rank = v.integers(1, "axis"), len(x.shape)
        if len(axes) != 1 or not -rank <= axes[0] < rank or result.dtype not in SHAPE_TYPES:
            raise v.refuse(f"finds the place along {list(axes)} of {x} as {result}, which is not supported")
        places = v.add(ArgExtreme(axes[0] % rank, largest, dtype=result.dtype), [v.value(x)], "places")
        return v.add(Reshape(result.shape), [places])

    return build


def softmax(v: TfliteValues) -> str | None:
    """SOFTMAX over the last axis; of int8 values also as int16."""
    beta = float(v.options("SoftmaxOptions")["Beta"])
    if not 0.0 < beta < inf:
        raise v.refuse(f"beta is {beta}; it must be positive", AGAIN)
    x = v.input(0)
    if (x.dtype, v.output.dtype) != (DType.INT8, DType.INT16):
        v.same_type(x, v.output)
    return v.finish(Softmax(beta), [v.real(x)])


def quantize(v: TfliteValues) -> str:
    """QUANTIZE: float to integer, or from one quantisation to another."""
    result = v.output
    if not result.dtype.is_integer:
        raise v.refuse(f"the result {result} must be an integer", AGAIN)
    if result.quantisation is not None and len(result.quantisation.scale) > 1:
        raise v.refuse(f"the result {result} is quantised per channel, which is not supported", ALIKE)
    return v.add(Quantize(result.dtype), [v.real(v.input(0)), *v.parameters(result)])


def dequantize(v: TfliteValues) -> str:
    """DEQUANTIZE: the float meaning of an integer tensor."""
    x = v.input(0)
    if not x.dtype.is_integer or v.output.dtype is not DType.FLOAT32:
        raise v.refuse(f"from {x} to {v.output} is not supported")
    return v.real(x)


def cast(v: TfliteValues) -> str:
    """CAST: the stored number in another type, whatever it stands for."""
    x, result = v.input(0), v.output
    if x.dtype.is_integer and result.dtype is DType.FLOAT32:
        unit, zero = v.constant(np.ones(1, np.float32), "unit"), v.constant(np.zeros(1, np.int32), "zero")
        return v.add(Dequantize(), [v.value(x), unit, zero])
    return v.add(Reshape(x.shape) if x.dtype is result.dtype else Convert(result.dtype), [v.value(x)])


def comparison(kind: CompareKind, exchanged: bool = False, negative: bool = False) -> Build:
    """The importer of a relation: of the operands in turn or exchanged, or its opposite; quantised ones are the floats
    they stand for."""

    def build(v: TfliteValues) -> str:
        operands = [v.value(x) if x.quantisation is None else v.real(x) for x in (v.input(0), v.input(1))]
        value = v.add(Compare(kind), operands[::-1] if exchanged else operands, "holds")
        return v.negation(value, "negated") if negative else value

    return build


def logical(kind: BinaryKind) -> Build:
    """The importer of LOGICAL_AND (the smaller) or LOGICAL_OR (the larger)."""
    return lambda v: v.binary(kind, v.value(v.input(0)), v.value(v.input(1)))


def select(v: TfliteValues) -> str:
    """SELECT and SELECT_V2; the first form's condition may choose whole rows."""
    condition, a, b = (v.input(position) for position in range(3))
    chosen = v.value(condition)
    if v.op.opcode == "SELECT" and len(condition.shape) == 1 < len(a.shape):
        chosen = v.add(Reshape((*condition.shape, *(1,) * (len(a.shape) - 1))), [chosen], "rows")
    if same_quantisation(a, v.output) and same_quantisation(b, v.output):
        return v.add(Select(), [chosen, v.value(a), v.value(b)])
    return v.finish(Select(), [chosen, v.real(a), v.real(b)])


def _axes(v: TfliteValues) -> tuple[int, ...]:
    rank = len(v.input(0).shape)
    return tuple(sorted({v.axis(axis, rank) for axis in v.integers(1, "axes")}))


def reduction(kind: ReduceKind) -> Build:
    """The importer of SUM, MEAN or REDUCE_PROD: in float, whose integer form is the quantize stage's."""

    def build(v: TfliteValues) -> str:
        v.options("ReducerOptions")
        x = v.input(0)
        v.same_type(x, v.output)
        axes = _axes(v)
        operator: Operator = Reduce(kind, axes)
        if kind is ReduceKind.MEAN and len(x.shape) == 4 and axes == (1, 2):
            size = (x.shape[1], x.shape[2])
            operator = AveragePool2d(size, size, scaled_sum=True)
        return v.add(Reshape(v.output.shape), [v.finish(operator, [v.real(x)], suffix="image")])

    return build


def extreme_of(kind: ReduceKind) -> Build:
    """The importer of REDUCE_MAX and REDUCE_MIN, and of REDUCE_ANY and REDUCE_ALL, on stored elements."""

    def build(v: TfliteValues) -> str:
        x = v.input(0)
        v.keeps(x, v.output, what=COMPARES)
        return v.add(Reshape(v.output.shape), [v.add(Reduce(kind, _axes(v)), [v.value(x)], "kept")])

    return build


def running_sums(v: TfliteValues) -> str:
    """CUMSUM: in float, whose integer form is the quantize stage's, or of integers without quantisation."""
    x, options = v.input(0), v.options("CumsumOptions")
    v.same_type(x, v.output)
    (axis,) = v.integers(1, "axis")
    operator = CumSum(v.axis(axis, len(x.shape)), bool(options["Exclusive"]), bool(options["Reverse"]))
    whole = x.dtype in SHAPE_TYPES and x.quantisation is None
    if x.quantisation is not None and any(x.quantisation.zero_point):
        what = "TensorFlow Lite Micro takes the zero point off these sums once too often; Dovetail does not"
        v.tell(f"{v.file.name}, {v.origin}: {what}")
    return v.add(operator, [v.value(x)]) if whole else v.finish(operator, [v.real(x)])


def l2_normalization(v: TfliteValues) -> str:
    """L2_NORMALIZATION over the last axis."""
    v.options("L2NormOptions")
    v.same_type(v.input(0), v.output)
    return v.finish(Normalise(1e-12, centred=False, summed=True), [v.real(v.input(0))], v.activation)


PLAIN = ("CEIL", "COS", "EXP", "FLOOR", "LOG", "NEG", "ROUND", "SIGN", "SIN", "SQRT", "SQUARE")
"""Functions of one float, called as our kinds."""

IMPORTERS: Mapping[str, Importer] = {
    **{name: Importer(unary(UnaryKind(name.capitalize())), 2) for name in PLAIN},
    "ABS": Importer(unary(UnaryKind.ABSOLUTE), 5),
    "ADD": Importer(arithmetic(BinaryKind.ADD, "AddOptions"), 5),
    "ADD_N": Importer(add_n, 1),
    "ARG_MAX": Importer(arg_extreme(largest=True), 2),
    "ARG_MIN": Importer(arg_extreme(largest=False), 2),
    "ASSIGN_VARIABLE": Importer(recurrent.assign_variable, 1),
    "AVERAGE_POOL_2D": Importer(linear.average_pool, 3),
    "BATCH_MATMUL": Importer(linear.batch_matmul, 4),
    "BATCH_TO_SPACE_ND": Importer(movement.batch_to_space, 4),
    "BROADCAST_TO": Importer(movement.broadcast_to, 3),
    "CALL_ONCE": Importer(recurrent.call_once, 1),
    "CAST": Importer(cast, 7),
    "CONCATENATION": Importer(movement.concatenation, 3),
    "CONV_2D": Importer(linear.convolution, 8),
    "CUMSUM": Importer(running_sums, 1),
    "DEPTHWISE_CONV_2D": Importer(linear.depthwise, 7),
    "DEPTH_TO_SPACE": Importer(movement.depth_to_space, 2),
    "DEQUANTIZE": Importer(dequantize, 6),
    "DIV": Importer(arithmetic(BinaryKind.DIVIDE, "DivOptions"), 3),
    "ELU": Importer(unary(UnaryKind.ELU, 1.0), 1),
    "EMBEDDING_LOOKUP": Importer(movement.embedding_lookup, 4),
    "EQUAL": Importer(comparison(CompareKind.EQUAL), 4),
    "EXPAND_DIMS": Importer(movement.expand_dims, 1),
    "FILL": Importer(movement.broadcast_to, 4),
    "FLOOR_DIV": Importer(floor_divide, 3),
    "FLOOR_MOD": Importer(arithmetic(BinaryKind.MODULO), 2),
    "FULLY_CONNECTED": Importer(linear.fully_connected, 12),
    "GATHER": Importer(movement.gather, 7),
    "GATHER_ND": Importer(movement.gather_nd, 5),
    "GELU": Importer(
        lambda v: unary(UnaryKind.GELU_TANH if v.options("GeluOptions")["Approximate"] else UnaryKind.GELU)(v), 2
    ),
    "GREATER": Importer(comparison(CompareKind.LESS, exchanged=True), 3),
    "GREATER_EQUAL": Importer(comparison(CompareKind.LESS_OR_EQUAL, exchanged=True), 3),
    "HARD_SWISH": Importer(unary(UnaryKind.HARD_SWISH), 2),
    "IF": Importer(lambda v: control.branch(v, _walk), 1),
    "L2_NORMALIZATION": Importer(l2_normalization, 2),
    "L2_POOL_2D": Importer(linear.l2_pool, 1),
    "LEAKY_RELU": Importer(lambda v: unary(UnaryKind.LEAKY_RELU, float(v.options("LeakyReluOptions")["Alpha"]))(v), 2),
    "LESS": Importer(comparison(CompareKind.LESS), 3),
    "LESS_EQUAL": Importer(comparison(CompareKind.LESS_OR_EQUAL), 3),
    "LOGICAL_AND": Importer(logical(BinaryKind.MINIMUM), 1),
    "LOGICAL_NOT": Importer(lambda v: v.negation(v.value(v.input(0)), "negated"), 1),
    "LOGICAL_OR": Importer(logical(BinaryKind.MAXIMUM), 1),
    "LOGISTIC": Importer(unary(UnaryKind.SIGMOID), 3),
    "LOG_SOFTMAX": Importer(pointwise(LogSoftmax()), 2),
    "MAXIMUM": Importer(extreme(BinaryKind.MAXIMUM), 4),
    "MAX_POOL_2D": Importer(linear.max_pool, 3),
    "MEAN": Importer(reduction(ReduceKind.MEAN), 3),
    "MINIMUM": Importer(extreme(BinaryKind.MINIMUM), 4),
    "MIRROR_PAD": Importer(movement.mirror_pad, 3),
    "MUL": Importer(arithmetic(BinaryKind.MULTIPLY, "MulOptions"), 7),
    "NOT_EQUAL": Importer(comparison(CompareKind.EQUAL, negative=True), 4),
    "PACK": Importer(movement.pack, 4),
    "PAD": Importer(movement.pad, 4),
    "PADV2": Importer(movement.pad, 4),
    "POW": Importer(arithmetic(BinaryKind.POWER), 1),
    "PRELU": Importer(arithmetic(BinaryKind.PRELU), 2),
    "QUANTIZE": Importer(quantize, 4),
    "READ_VARIABLE": Importer(recurrent.read_variable, 1),
    "REDUCE_ALL": Importer(extreme_of(ReduceKind.MINIMUM), 1),
    "REDUCE_ANY": Importer(extreme_of(ReduceKind.MAXIMUM), 2),
    "REDUCE_MAX": Importer(extreme_of(ReduceKind.MAXIMUM), 3),
    "REDUCE_MIN": Importer(extreme_of(ReduceKind.MINIMUM), 3),
    "REDUCE_PROD": Importer(reduction(ReduceKind.PRODUCT), 2),
    "RELU": Importer(pointwise(Clamp(0.0, inf)), 3),
    "RELU6": Importer(pointwise(Clamp(0.0, 6.0)), 3),
    "RELU_N1_TO_1": Importer(pointwise(Clamp(-1.0, 1.0)), 1),
    "RESHAPE": Importer(movement.reshape, 1),
    "RESIZE_BILINEAR": Importer(linear.resize_bilinear, 4),
    "RESIZE_NEAREST_NEIGHBOR": Importer(movement.nearest, 4),
    "REVERSE_V2": Importer(movement.reverse, 3),
    "RSQRT": Importer(unary(UnaryKind.RECIPROCAL_ROOT), 3),
    "SELECT": Importer(select, 5),
    "SELECT_V2": Importer(select, 2),
    "SHAPE": Importer(lambda v: v.bind_known(np.array(v.input(0).shape, np.int64)), 1),
    "SLICE": Importer(movement.slice_, 5),
    "SOFTMAX": Importer(softmax, 3),
    "SPACE_TO_BATCH_ND": Importer(movement.space_to_batch, 4),
    "SPACE_TO_DEPTH": Importer(movement.space_to_depth, 2),
    "SPLIT": Importer(movement.split, 4),
    "SPLIT_V": Importer(movement.split_v, 2),
    "SQUARED_DIFFERENCE": Importer(arithmetic(BinaryKind.SQUARED_DIFFERENCE), 2),
    "SQUEEZE": Importer(movement.squeeze, 1),
    "STRIDED_SLICE": Importer(movement.strided_slice, 4),
    "SUB": Importer(arithmetic(BinaryKind.SUBTRACT, "SubOptions"), 5),
    "SUM": Importer(reduction(ReduceKind.SUM), 2),
    "SVDF": Importer(recurrent.svdf, 4),
    "TANH": Importer(unary(UnaryKind.TANH), 3),
    "TILE": Importer(movement.tile, 3),
    "TRANSPOSE": Importer(movement.transpose, 6),
    "TRANSPOSE_CONV": Importer(linear.transpose_conv, 5),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": Importer(recurrent.lstm, 4),
    "UNPACK": Importer(movement.unpack, 4),
    "VAR_HANDLE": Importer(recurrent.var_handle, 1),
    "WHILE": Importer(lambda v: control.loop(v, _walk), 1),
    "ZEROS_LIKE": Importer(movement.zeros_like, 1),
}
"""Every TFLite operator Dovetail reads."""
