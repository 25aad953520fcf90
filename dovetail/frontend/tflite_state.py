"""Resource variables of TFLite: what a streaming model keeps from one inference to the next."""

from __future__ import annotations

import numpy as np

from dovetail.frontend.tflite_context import ACTIVATION_TYPES, TfliteContext
from dovetail.frontend.tflite_file import AGAIN, FOLD, OperatorEntry, Tensor
from dovetail.frontend.tflite_variables import Key, assigned, key_of
from dovetail.graph.types import Array, DType, TensorType


def var_handle(ctx: TfliteContext, op: OperatorEntry) -> None:
    """VAR_HANDLE: a tensor that stands for a variable."""
    ctx.options(op, "VarHandleOptions")
    ctx.variables.handles[ctx.output(op).index] = key_of(op)


def read_variable(ctx: TfliteContext, op: OperatorEntry) -> None:
    """READ_VARIABLE: what was assigned last, in this inference or the one before."""
    key, result, known = _variable(ctx, op), ctx.output(op), ctx.variables
    if result.dtype not in ACTIVATION_TYPES:
        raise ctx.refuse(op, f"a variable of {result.dtype.text} is not supported")
    if key not in known.current:
        first = known.first.get(key, cleared(result))
        name = f"{result.name}_variable"
        if key in assigned(ctx.file):
            known.states[key] = known.current[key] = ctx.builder.state(name, first, result.dtype)
        else:
            known.current[key] = ctx.builder.constant(name, first, result.dtype)
    ctx.bind(op, known.current[key])


def assign_variable(ctx: TfliteContext, op: OperatorEntry) -> None:
    """ASSIGN_VARIABLE."""
    key, known = _variable(ctx, op), ctx.variables
    value = ctx.value(op, ctx.input(op, 1))
    if key in known.states:
        ctx.builder.replace_state(known.states[key], value)
    known.current[key] = value


def call_once(ctx: TfliteContext, op: OperatorEntry) -> None:
    """CALL_ONCE: a subgraph that assigns constants to variables before they are used."""
    number = int(ctx.options(op, "CallOnceOptions")["InitSubgraphIndex"])
    if not 1 <= number <= len(ctx.file.further):
        raise ctx.refuse(op, f"runs subgraph {number}, which the model does not have", AGAIN)
    graph = ctx.file.further[number - 1]
    handles: dict[int, Key] = {}
    for step in graph.operators:
        if step.opcode == "VAR_HANDLE" and len(step.outputs) == 1:
            handles[step.outputs[0]] = key_of(step)
            continue
        arguments = step.inputs if step.opcode == "ASSIGN_VARIABLE" else ()
        if len(arguments) != 2 or arguments[0] not in handles or arguments[1] < 0:
            raise ctx.refuse(op, f"runs {step.opcode} in subgraph {number}; only constants may be assigned there")
        tensor, key = graph.tensors[arguments[1]], handles[arguments[0]]
        if key in ctx.variables.current:
            raise ctx.refuse(op, f"sets a variable of subgraph {number} after it was used", AGAIN)
        if not tensor.is_constant:
            raise ctx.refuse(op, f"assigns {tensor}, which is no constant, in subgraph {number}", FOLD)
        ctx.variables.first[key] = tensor.array()


def cleared(tensor: Tensor) -> Array:
    """First contents of a variable nothing is said of, as TFLite Micro has them: int8 at its zero point, else 0."""
    at_zero = tensor.dtype is DType.INT8 and tensor.quantisation is not None
    value = int(tensor.quantisation.zero_point[0]) if at_zero and tensor.quantisation else 0
    return np.full(tensor.shape, value, tensor.dtype.numpy)


def own_variable(ctx: TfliteContext, op: OperatorEntry, position: int, kind: TensorType) -> Tensor:
    """The variable tensor an operator keeps by itself; it must be of a type."""
    tensor = ctx.input(op, position)
    if not tensor.is_variable or tensor.is_constant or tensor.index in ctx.variables.taken:
        raise ctx.refuse(op, f"operand {position} ({tensor}) must be a variable of its own", AGAIN)
    if TensorType(tensor.shape, tensor.dtype) != kind:
        raise ctx.refuse(op, f"operand {position} ({tensor}) must be {kind}", AGAIN)
    ctx.variables.taken.add(tensor.index)
    return tensor


def _variable(ctx: TfliteContext, op: OperatorEntry) -> Key:
    tensor = ctx.input(op, 0)
    if tensor.index not in ctx.variables.handles:
        raise ctx.refuse(op, f"operand {tensor} is not the result of a VAR_HANDLE before it", AGAIN)
    return ctx.variables.handles[tensor.index]
