"""TFLite models as graphs in QDQ form: the table of operators, and what computes one value of others elementwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph
from dovetail.ir.operators.activation import Clamp, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind, Select
from dovetail.ir.operators.reduction import ArgExtreme, AveragePool2d, CumSum, MaxPool2d, Normalise, Reduce, ReduceKind
from dovetail.ir.operators.user import Said, SaidOperand, UserOperator
from dovetail.ir.types import DType
from dovetail.notes import Kind, Note, Tell, silent
from dovetail.read.tflite import linear, movement, recurrent
from dovetail.read.tflite.file import OperatorEntry, TfliteFile, TfliteTensor, read_map, read_tflite
from dovetail.read.tflite.values import ACTIVATION_TYPES, SHAPE_TYPES, TfliteValues, same_quantisation
from dovetail.read.user import ADVICE, add_user, by_custom_code
from dovetail.read.values import Value, words

UNSIGNED = (DType.UINT16, DType.UINT32)
"""Element types only operators of one's own and bundled ones compute with."""

COMPARES = "compares elements, but the quantisation of"

Build = Callable[[TfliteValues], Value | None]
"""Adds an operator's nodes and gives its result, None where it binds its results itself; raises ModelError."""


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
    tell: Tell = silent,
    faults: list[ModelError] | None = None,
) -> Graph:
    """Import a TFLite model as the graph `name`, in QDQ form: images NHWC, quantised values named after the model's
    tensors, each arithmetic operator in float between Dequantize and Quantize. `operators` are known beside the
    standard ones, and asked for where the file has custom ones; `tell` is told what was left out.

    Raises:
        ModelError: the file is damaged, or says something Dovetail cannot honour.
    """
    file = read_tflite(file_name, data)
    files = (file, *(one for one in file.further if one is not None))
    has_custom = any(op.opcode == "CUSTOM" for one in files for op in one.operators)
    v = TfliteValues(file, name, by_custom_code(operators if has_custom else ()))
    v.tell, v.faults = tell, faults
    _check_ends(file)
    if file.left_out:
        what = f"{file_name}: only its first signature is compiled, without {', '.join(file.left_out)}"
        tell(Note(Kind.LEFT_OUT, what))
    for index in file.inputs:
        v.add_input(index)
    _walk(v)
    if count := sum(_is_hybrid(file, op) for op in file.operators):
        what = f"{count} layers with 8-bit weights at float operands compute on real values"
        how = "LiteRT rounds the operands to 8 bits, so its results differ, as a rule by 0.1 %"
        tell(Note(Kind.APPROXIMATE, f"{file_name}: {what}; {how}"))
    return v.finished([v.value(file.tensors[index], where=file.name) for index in file.outputs])


def _is_hybrid(file: TfliteFile, op: OperatorEntry) -> bool:
    """Whether an operator multiplies floats with integer weights."""
    pair = [file.tensors[index] for index in op.inputs[:2] if index >= 0]
    return op.opcode in HYBRID and [one.dtype.is_integer for one in pair] == [False, True]


HYBRID = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "BATCH_MATMUL", "SVDF", "UNIDIRECTIONAL_SEQUENCE_LSTM")
"""Operators that LiteRT computes in 8 bits where their weights have 8 bits and their operands are floats."""


def _walk(v: TfliteValues) -> None:
    """Import all operators of a subgraph."""
    for op in v.file.operators:
        found = v.again(op=op)
        v.steps.append(op)
        found.check_steps(len(v.steps))
        with found.refusing():
            if op.opcode == "CUSTOM":
                _import_custom(found)
            else:
                _import(found)


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


def _import(v: TfliteValues) -> None:
    """Import one operator."""
    importer = v.entry(v.op.opcode, IMPORTERS, "this operator is not supported")
    what = f"version {v.op.version} of this operator is not supported, only up to {importer.version}"
    hint = "convert the model with an older converter, or without the newer feature"
    v.refuse_if(v.op.version > importer.version, what, hint)
    value = importer.build(v)
    if value is not None:
        v.bind(value)


def _import_custom(v: TfliteValues) -> None:
    """Import a CUSTOM operator; its operands and results are as stored."""
    op, kind = v.op, v.custom.get(v.op.custom_code)
    if kind is None:
        what = f"the custom operator {op.custom_code!r} is not known; known are {', '.join(sorted(v.custom))}"
        raise v.refuse(what, ADVICE)
    results = v.results(len(op.outputs))
    count = len(op.inputs) if kind.taken is None else kind.taken
    attributes, fault = dict[str, Any](), ""
    try:
        attributes |= read_map(op.custom_options) if op.custom_options else {}
    except ValueError as error:
        fault = str(error)
    operands = tuple(_said(v, v.optional(position)) for position in range(len(op.inputs)))
    said = Said(attributes, operands, tuple(map(_stated, results)), op.custom_options, fault)
    given = [v.real(x) if kind.real and x.quantisation else v.value(x) for x in map(v.input, range(count))]
    for value, tensor in zip(add_user(v, kind, said, given, [tensor.name for tensor in results]), results, strict=True):
        # The model may leave a shape open: without axes, or with sizes of 0.
        free = tensor.dtype is value.dtype and (not tensor.shape or tensor.is_empty)
        v.bind(value, replace(tensor, shape=value.shape) if free else tensor)


def _said(v: TfliteValues, tensor: TfliteTensor | None) -> SaidOperand | None:
    """The file's facts about an operand."""
    return None if tensor is None else replace(_stated(tensor), array=v.known_of(tensor))


def _stated(tensor: TfliteTensor) -> SaidOperand:
    """A tensor's type and quantisation."""
    held = tensor.quantisation
    parameters = (tuple(held.scale.tolist()), tuple(held.zero_point.tolist())) if held is not None else ((), ())
    return SaidOperand(tensor.type, *parameters)


def pointwise(operator: Operator) -> Build:
    """The importer of a function of each element."""

    def build(v: TfliteValues) -> Value:
        v.same_type(v.x, v.output)
        return v.finish(operator, [v.real(v.x)])

    return build


def unary(kind: UnaryKind, alpha: float = 0.0) -> Build:
    """The importer of a function of one float."""
    return pointwise(Unary(kind, alpha))


def arithmetic(kind: BinaryKind) -> Build:
    """The importer of an operator with broadcasting, and a fused activation if it has options; of integers without
    quantisation on these, of known ones now."""

    def build(v: TfliteValues) -> Value | None:
        a, b = v.x, v.input(1)
        if a.dtype in SHAPE_TYPES and a.quantisation is None and v.activation == 0:
            known = v.all_known(a, b)
            if known is None:
                return v.add(Binary(kind), [v.value(a), v.value(b)])
            v.bind_known(Binary(kind).evaluate(known))
            return None
        mixed = kind is BinaryKind.PRELU and a.dtype is DType.INT16  # TFLite's slopes have 8 bits then
        v.same_type(a, v.output, *([] if mixed else [b]))
        return v.finish(Add() if kind is BinaryKind.ADD else Binary(kind), [v.real(a), v.real(b)])

    return build


def add_n(v: TfliteValues) -> Value:
    """ADD_N: a sum of sums, which is rounded once."""
    v.same_type(v.output, *v.inputs)
    *terms, last = map(v.real, v.inputs)
    v.wrong_if(not terms, "has one operand, expected several")
    v.tell_of_zero(v.output, "leaves the zero point of this sum out")
    return v.finish(Add(), [v.folded(BinaryKind.ADD, terms, False, "partial"), last])


def floor_divide(v: TfliteValues) -> Value | None:
    """FLOOR_DIV of floats, and of integers without quantisation: what is left of the remainder, divided."""
    a, b = v.x, v.input(1)
    if a.dtype in SHAPE_TYPES and a.quantisation is None and a.dtype is b.dtype:
        known = v.all_known(a, b)
        if known is not None and known[1].all():
            v.bind_known(known[0] // known[1])
            return None
        left, right = v.value(a), v.value(b)
        return v.over(v.minus(left, v.binary(BinaryKind.MODULO, left, right, "rest"), "whole"), right)
    v.same_type(a, b, v.output)
    return v.finish(Unary(UnaryKind.FLOOR), [v.over(v.real(a), v.real(b), "quotient")])


def extreme(v: TfliteValues, kind: BinaryKind) -> Value:
    """MAXIMUM and MINIMUM, which compare stored integers and so must keep the quantisation."""
    a, b = v.x, v.input(1)
    v.same_type(a, b, v.output)
    v.keeps(a, b, v.output, what=COMPARES)
    return v.add(Binary(kind), [v.value(a), v.value(b)])


def arg_extreme(v: TfliteValues, largest: bool) -> Value:
    """ARG_MAX and ARG_MIN: of equal elements the first."""
    x, result = v.x, v.output
    v.same_type(x)
    axis = v.axis(v.integers(1, "axis", 1)[0], x.rank)
    return v.reshape(v.add(ArgExtreme(axis, largest, dtype=result.dtype), [v.value(x)], "places"), result.shape)


def softmax(v: TfliteValues) -> Value:
    """SOFTMAX over the last axis; of int8 values also as int16."""
    beta, x = v.option("Beta"), v.x
    v.wrong_if(not 0.0 < beta < inf, f"beta is {beta}; it must be positive")
    if (x.dtype, v.output.dtype) != (DType.INT8, DType.INT16):
        v.same_type(x, v.output)
    return v.finish(Softmax(beta), [v.real(x)])


def quantize(v: TfliteValues) -> Value:
    """QUANTIZE: float to integer, or from one quantisation to another."""
    v.wrong_if(not v.output.dtype.is_integer, f"the result {v.output} must be an integer")
    return v.finish(None, [v.real(v.x)])


def cast(v: TfliteValues) -> Value:
    """CAST: the stored number in another type, whatever it stands for."""
    value, dtype = v.value(v.x), v.output.dtype
    if value.dtype.is_integer and dtype is DType.FLOAT32:
        return v.as_number(value)
    return v.reshape(value, value.shape) if value.dtype is dtype else v.convert(value, dtype)


def comparison(kind: CompareKind, exchanged: bool = False, negative: bool = False) -> Build:
    """The importer of a relation, of operands exchanged, or its opposite; quantised ones are the floats they mean."""

    def build(v: TfliteValues) -> Value:
        operands = [v.value(x) if x.quantisation is None else v.real(x) for x in (v.x, v.input(1))]
        value = v.add(Compare(kind), operands[::-1] if exchanged else operands, "holds")
        return v.negation(value, "negated") if negative else value

    return build


def stored(kind: BinaryKind) -> Build:
    """The importer of a function of two stored elements: AND is the smaller, OR the larger."""
    return lambda v: v.binary(kind, v.value(v.x), v.value(v.input(1)))


def select(v: TfliteValues) -> Value:
    """SELECT and SELECT_V2; the first form's condition may choose whole rows."""
    condition, a, b = map(v.input, range(3))
    chosen = v.value(condition)
    if v.op.opcode == "SELECT" and condition.rank == 1 < a.rank:
        chosen = v.reshape(chosen, (*condition.shape, *(1,) * (a.rank - 1)), "rows")
    if same_quantisation(a, v.output) and same_quantisation(b, v.output):
        return v.add(Select(), [chosen, v.value(a), v.value(b)])
    return v.finish(Select(), [chosen, v.real(a), v.real(b)])


def reduction(kind: ReduceKind) -> Build:
    """The importer of SUM, MEAN or REDUCE_PROD: in float, whose integer form is the quantize stage's."""

    def build(v: TfliteValues) -> Value:
        x = v.x
        v.same_type(x, v.output)
        axes = v.axes(v.integers(1, "axes"), x.rank)
        operator: Operator = Reduce(kind, axes)
        if kind is ReduceKind.MEAN and x.rank == 4 and axes == (1, 2):
            size = (x.shape[1], x.shape[2])
            operator = AveragePool2d(size, size, scaled_sum=True)
        return v.reshape(v.finish(operator, [v.real(x)], "image"), v.output.shape)

    return build


def extreme_of(kind: ReduceKind) -> Build:
    """The importer of REDUCE_MAX and REDUCE_MIN, and of REDUCE_ANY and REDUCE_ALL, on stored elements."""

    def build(v: TfliteValues) -> Value:
        x = v.x
        v.keeps(x, v.output, what=COMPARES)
        axes = v.axes(v.integers(1, "axes"), x.rank)
        return v.reshape(v.add(Reduce(kind, axes), [v.value(x)], "kept"), v.output.shape)

    return build


def running_sums(v: TfliteValues) -> Value:
    """CUMSUM: in float, whose integer form is the quantize stage's, or of integers without quantisation."""
    x, (axis,) = v.x, v.integers(1, "axis", 1)
    operator = CumSum(v.axis(axis, x.rank), v.option("Exclusive"), v.option("Reverse"))
    if x.dtype in SHAPE_TYPES and x.quantisation is None:
        return v.add(operator, [v.value(x)])
    v.same_type(x, v.output)
    v.tell_of_zero(x, "takes the zero point off these sums once too often")
    return v.finish(operator, [v.real(x)])


PLAIN = words("CEIL COS EXP FLOOR LOG NEG ROUND SIGN SIN SQRT SQUARE")
"""Functions of one float, called as our kinds."""

_BY_VERSION: Mapping[int, Mapping[str, Build]] = {
    1: {
        "ADD_N": add_n,
        "ASSIGN_VARIABLE": recurrent.assign_variable,
        "CALL_ONCE": recurrent.call_once,
        "CUMSUM": running_sums,
        "ELU": unary(UnaryKind.ELU, 1.0),
        "EXPAND_DIMS": movement.expand_dims,
        "IF": partial(recurrent.branch, walk=_walk),
        "L2_POOL_2D": linear.l2_pool,
        "LOGICAL_AND": stored(BinaryKind.MINIMUM),
        "LOGICAL_NOT": lambda v: v.negation(v.value(v.x), "negated"),
        "LOGICAL_OR": stored(BinaryKind.MAXIMUM),
        "POW": arithmetic(BinaryKind.POWER),
        "READ_VARIABLE": recurrent.read_variable,
        "REDUCE_ALL": extreme_of(ReduceKind.MINIMUM),
        "RELU_N1_TO_1": pointwise(Clamp(-1.0, 1.0)),
        "RESHAPE": movement.reshape,
        "SHAPE": lambda v: v.bind_known(np.array(v.x.shape, np.int64)),
        "SQUEEZE": movement.squeeze,
        "VAR_HANDLE": recurrent.var_handle,
        "WHILE": partial(recurrent.loop, walk=_walk),
        "ZEROS_LIKE": movement.zeros_like,
    },
    2: {
        **{name: unary(UnaryKind(name.capitalize())) for name in PLAIN},
        "ARG_MAX": partial(arg_extreme, largest=True),
        "ARG_MIN": partial(arg_extreme, largest=False),
        "DEPTH_TO_SPACE": partial(movement.in_blocks, apart=False),
        "FLOOR_MOD": arithmetic(BinaryKind.MODULO),
        "GELU": lambda v: unary(UnaryKind.GELU_TANH if v.option("Approximate") else UnaryKind.GELU)(v),
        "HARD_SWISH": unary(UnaryKind.HARD_SWISH),
        "L2_NORMALIZATION": pointwise(Normalise(1e-12, centred=False, summed=True)),
        "LEAKY_RELU": lambda v: unary(UnaryKind.LEAKY_RELU, v.option("Alpha"))(v),
        "LOG_SOFTMAX": pointwise(LogSoftmax()),
        "PRELU": arithmetic(BinaryKind.PRELU),
        "REDUCE_ANY": extreme_of(ReduceKind.MAXIMUM),
        "REDUCE_PROD": reduction(ReduceKind.PRODUCT),
        "SELECT_V2": select,
        "SPACE_TO_DEPTH": partial(movement.in_blocks, apart=True),
        "SPLIT_V": movement.split_v,
        "SQUARED_DIFFERENCE": arithmetic(BinaryKind.SQUARED_DIFFERENCE),
        "SUM": reduction(ReduceKind.SUM),
    },
    3: {
        "AVERAGE_POOL_2D": partial(linear.pool, kind=AveragePool2d),
        "BROADCAST_TO": movement.broadcast_to,
        "CONCATENATION": movement.concatenation,
        "DIV": arithmetic(BinaryKind.DIVIDE),
        "FLOOR_DIV": floor_divide,
        "GREATER": comparison(CompareKind.LESS, exchanged=True),
        "GREATER_EQUAL": comparison(CompareKind.LESS_OR_EQUAL, exchanged=True),
        "LESS": comparison(CompareKind.LESS),
        "LESS_EQUAL": comparison(CompareKind.LESS_OR_EQUAL),
        "LOGISTIC": unary(UnaryKind.SIGMOID),
        "MAX_POOL_2D": partial(linear.pool, kind=MaxPool2d),
        "MEAN": reduction(ReduceKind.MEAN),
        "MIRROR_PAD": movement.mirror_pad,
        "REDUCE_MAX": extreme_of(ReduceKind.MAXIMUM),
        "REDUCE_MIN": extreme_of(ReduceKind.MINIMUM),
        "RELU": pointwise(Clamp(0.0, inf)),
        "RELU6": pointwise(Clamp(0.0, 6.0)),
        "REVERSE_V2": movement.reverse,
        "RSQRT": unary(UnaryKind.RECIPROCAL_ROOT),
        "SOFTMAX": softmax,
        "TANH": unary(UnaryKind.TANH),
        "TILE": movement.tile,
    },
    4: {
        "BATCH_MATMUL": linear.batch_matmul,
        "BATCH_TO_SPACE_ND": movement.batch_to_space,
        "EMBEDDING_LOOKUP": movement.embedding_lookup,
        "EQUAL": comparison(CompareKind.EQUAL),
        "FILL": partial(movement.broadcast_to, place=1),
        "MAXIMUM": partial(extreme, kind=BinaryKind.MAXIMUM),
        "MINIMUM": partial(extreme, kind=BinaryKind.MINIMUM),
        "NOT_EQUAL": comparison(CompareKind.EQUAL, negative=True),
        "PACK": movement.pack,
        "PAD": movement.pad,
        "PADV2": movement.pad,
        "QUANTIZE": quantize,
        "RESIZE_BILINEAR": linear.resize_bilinear,
        "RESIZE_NEAREST_NEIGHBOR": movement.nearest,
        "SPACE_TO_BATCH_ND": movement.space_to_batch,
        "SPLIT": movement.split,
        "STRIDED_SLICE": movement.strided_slice,
        "SVDF": recurrent.svdf,
        "UNIDIRECTIONAL_SEQUENCE_LSTM": recurrent.lstm,
        "UNPACK": movement.unpack,
    },
    5: {
        "ABS": unary(UnaryKind.ABSOLUTE),
        "ADD": arithmetic(BinaryKind.ADD),
        "GATHER_ND": movement.gather_nd,
        "SELECT": select,
        "SLICE": movement.slice_,
        "SUB": arithmetic(BinaryKind.SUBTRACT),
        "TRANSPOSE_CONV": linear.transpose_conv,
    },
    6: {
        "DEQUANTIZE": lambda v: v.real(v.x),
        "TRANSPOSE": movement.transpose,
    },
    7: {
        "CAST": cast,
        "DEPTHWISE_CONV_2D": linear.depthwise,
        "GATHER": movement.gather,
        "MUL": arithmetic(BinaryKind.MULTIPLY),
    },
    8: {
        "CONV_2D": linear.convolution,
    },
    12: {
        "FULLY_CONNECTED": linear.fully_connected,
    },
}

IMPORTERS = {name: Importer(build, newest) for newest, table in _BY_VERSION.items() for name, build in table.items()}
"""Every TFLite operator Dovetail reads."""
