"""State and repetition in TFLite models: variables, recurrent operators, loops.

Recurrent operators on integers are read as the fixed-point arithmetic of TensorFlow Lite Micro.
Facts from tflite-micro's micro/kernels/{svdf_common,lstm_eval_common,unidirectional_sequence_lstm}.cc: all factors are
quotients of doubles, and no fused activation is applied to an integer SVDF.

WHILE and IF on what is known at compile time are written out, turn by turn: a condition is imported into a graph of its
own from what is known, and evaluated. An IF on a value of run time computes both ways and selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import frexp

import numpy as np

from dovetail.ir.graph import GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip, Lookup, Requantize, multiplier_arrays, quantize_multiplier
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Select
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.recurrent import FixedLstm, Recurrent, RecurrentKind, RowProducts
from dovetail.ir.types import Array, DType, TensorType
from dovetail.read.tflite.file import OperatorEntry, TfliteFile, TfliteTensor
from dovetail.read.tflite.values import ACTIVATION_TYPES, SHAPE_TYPES, Key, TfliteValues, same_quantisation
from dovetail.read.values import (
    AGAIN,
    ALIKE,
    FOLD,
    GATE_ORDER,
    MOST_DEEP,
    MOST_TURNS,
    UNKNOWN_TURNS,
    Value,
)
from dovetail.records import Record

_GATE_STEP = 2.0**-12
_UNIT = 2.0**-15
"""Step of what sigmoid and tanh give."""


def _key_of(op: OperatorEntry) -> Key:
    """The resource variable that a VAR_HANDLE names."""
    return op.options.get("Container"), op.options.get("SharedName")


def _assigned(file: TfliteFile) -> set[Key]:
    """The variables a subgraph writes."""
    handles = {op.outputs[0]: _key_of(op) for op in file.operators if op.opcode == "VAR_HANDLE" and op.outputs}
    written = {op.inputs[0] for op in file.operators if op.opcode == "ASSIGN_VARIABLE" and op.inputs}
    return {key for tensor, key in handles.items() if tensor in written}


def var_handle(v: TfliteValues) -> None:
    """VAR_HANDLE: a tensor that stands for a variable."""
    v.variables.handles[v.output.index] = _key_of(v.op)


def read_variable(v: TfliteValues) -> Value:
    """READ_VARIABLE: what was assigned last, in this inference or the one before."""
    key, result, known = _variable(v), v.output, v.variables
    v.refuse_if(result.dtype not in ACTIVATION_TYPES, f"a variable of {result.dtype.text} is not supported")
    if key not in known.current:
        first = known.first.get(key, _cleared(result))
        if key in _assigned(v.file):
            known.states[key] = known.current[key] = v.state(v.named("variable"), first, result.dtype)
        else:
            known.current[key] = v.placed(v.named("variable"), first, result.dtype)
    return known.current[key]


def assign_variable(v: TfliteValues) -> None:
    """ASSIGN_VARIABLE."""
    key, known = _variable(v), v.variables
    value = v.value(v.input(1))
    if key in known.states:
        v.replace_state(known.states[key], value)
    known.current[key] = value


def further(v: TfliteValues, number: int) -> TfliteFile:
    """A further subgraph, by its number."""
    found = v.file.further[number - 1] if 1 <= number <= len(v.file.further) else None
    if found is None:
        raise v.refuse(f"runs subgraph {number}, which the model does not have", AGAIN)
    return found


def call_once(v: TfliteValues) -> None:
    """CALL_ONCE: a subgraph that assigns constants to variables before they are used."""
    number = v.option("InitSubgraphIndex")
    graph, handles = further(v, number), dict[int, Key]()
    for step in graph.operators:
        if step.opcode == "VAR_HANDLE" and len(step.outputs) == 1:
            handles[step.outputs[0]] = _key_of(step)
            continue
        arguments = step.inputs if step.opcode == "ASSIGN_VARIABLE" else ()
        if len(arguments) != 2 or arguments[0] not in handles or arguments[1] < 0:
            raise v.refuse(f"runs {step.opcode} in subgraph {number}; only constants may be assigned there")
        tensor, key = graph.tensors[arguments[1]], handles[arguments[0]]
        v.wrong_if(key in v.variables.current, f"sets a variable of subgraph {number} after it was used")
        v.refuse_if(not tensor.is_constant, f"assigns {tensor}, which is no constant, in subgraph {number}", FOLD)
        v.variables.first[key] = tensor.array()


def _cleared(tensor: TfliteTensor) -> Array:
    """First contents of a variable nothing is said of, as TFLite Micro has them: int8 at its zero point, else 0."""
    return np.full(tensor.shape, tensor.zero if tensor.dtype is DType.INT8 else 0, tensor.dtype.numpy)


def _own_variable(v: TfliteValues, position: int, kind: TensorType) -> TfliteTensor:
    """The variable tensor an operator keeps by itself; it must be of a type."""
    tensor = v.input(position)
    odd = not tensor.is_variable or tensor.is_constant or tensor.index in v.variables.taken
    v.wrong_if(odd, f"operand {position} ({tensor}) must be a variable of its own")
    v.wrong_if(tensor.type != kind, f"operand {position} ({tensor}) must be {kind}")
    v.variables.taken.add(tensor.index)
    return tensor


def _variable(v: TfliteValues) -> Key:
    tensor, handles = v.x, v.variables.handles
    v.wrong_if(tensor.index not in handles, f"operand {tensor} is not the result of a VAR_HANDLE before it")
    return handles[tensor.index]


def svdf(v: TfliteValues) -> Value:
    """SVDF of int8 values with a state of int16 or int8, or of floats."""
    x, times, rank = v.x, v.input(2), v.option("Rank")
    real = x.dtype is DType.FLOAT32
    if (not real and v.activation not in (0, 1)) or x.dtype not in (DType.INT8, DType.FLOAT32):
        raise v.refuse(f"{x} with activation {v.activation}: only float32, and int8 without or with RELU, are")
    v.refuse_if(x.rank != 2, f"the input {x} must have two axes")
    kinds = (DType.FLOAT32,) if real else (DType.INT8, DType.INT16)
    if times.dtype not in kinds or times.rank != 2 or rank < 1 or times.shape[0] % rank:
        raise v.refuse(f"weights in time {times} of rank {rank} are not supported")
    (filters, steps), batch, units = times.shape, x.shape[0], times.shape[0] // rank
    state, weights = _own_variable(v, 4, TensorType((batch, filters * steps), times.dtype)), _weights(v, 1, x.dtype)
    newest = v.add(FullyConnected(x.zero), [v.value(x), v.value(weights)], "feature")
    if not real:
        factor = _step(v, x) * _step(v, weights) / _step(v, state)
        limits = Clip(state.dtype.low, state.dtype.high, state.dtype)
        newest = v.add(limits, [_requantized(v, newest, 0, factor)], "newest")
    if state.zero:  # it is added to what is limited, modulo 256
        table = (np.arange(-128, 128) + state.zero).astype(np.uint8).view(np.int8)
        newest = v.add(Lookup(), [newest, v.placed(f"{state.name}_table", table)], "newest")
    history = v.reshape(newest, (batch, filters, 1), "newest")
    if steps > 1:
        before = v.state(state.name, _cleared(state).reshape(batch, filters, steps), state.dtype)
        history = v.concat([v.part(before, 2, 1, steps, "older"), history], 2, "history")
        v.replace_state(before, history)
    rows = v.reshape(history, (batch, units, rank * steps), "rows")
    held = v.placed(times.name, v.array(times, "weights in time").reshape(units, rank * steps))
    operands = [rows, held, _bias(v, 3, units, x.dtype)]
    if real:
        return v.finish(RowProducts(), operands)
    total = v.add(RowProducts(state.zero), operands, "products")
    factor = _step(v, state) * _step(v, times) / _step(v, v.output)
    return v.add(Clip(-128, 127, DType.INT8), [_requantized(v, total, v.output.zero, factor)])


def lstm(v: TfliteValues) -> Value:
    """UNIDIRECTIONAL_SEQUENCE_LSTM of int8 values with cells of int16, or of floats; its weights are those of the input
    gate, the forget gate, the candidate and the output gate."""
    x, clip = v.x, v.option("CellClip")
    real, kinds = x.dtype is DType.FLOAT32, {DType.INT8: DType.INT16, DType.FLOAT32: DType.FLOAT32}
    if x.dtype not in kinds or x.rank != 3 or v.activation != 4:
        raise v.refuse(f"{x}: only int8 or float32 with three axes and the activation TANH are supported")
    refused = dict.fromkeys((9, 10, 11), "peepholes") | dict.fromkeys((16, 17), "a projection")
    for position, what in (refused | dict.fromkeys(range(20, 24), "layer normalisation")).items():
        v.refuse_if(v.optional(position), f"{what} (operand {position}) is not supported")
    odd = v.option("ProjClip") or v.option("DiagonalRecurrentTensors")
    v.refuse_if(odd, "a clipped projection or diagonal recurrent weights are not supported")
    order = (0, 1, 2) if v.option("TimeMajor") else (1, 0, 2)
    steps, batch, depth = (x.shape[axis] for axis in order)
    weights, again = ([_weights(v, start + gate, x.dtype) for gate in range(4)] for start in (1, 5))
    hidden = weights[0].shape[0]
    odd = any(w.shape != (hidden, depth) for w in weights) or any(r.shape != (hidden, hidden) for r in again)
    v.wrong_if(odd, f"the weights {weights[0]} and {again[0]} do not fit {x}")
    shown = _own_variable(v, 18, TensorType((batch, hidden), x.dtype))
    cell = _own_variable(v, 19, TensorType((batch, hidden), kinds[x.dtype]))
    what = f"the result {v.output} must be quantised as the variable {shown}"
    v.refuse_if(not same_quantisation(shown, v.output), what, ALIKE)
    biases = [bias for bias in [v.known(_bias(v, 12 + gate, hidden, x.dtype)) for gate in range(4)] if bias is not None]
    operator: Operator = Recurrent(RecurrentKind.LSTM, cell_clip=float(clip))
    if real:
        gates = GATE_ORDER[RecurrentKind.LSTM]
        weights, again = ([four[gate] for gate in gates] for four in (weights, again))
        biases = [*(biases[gate] for gate in gates), *map(np.zeros_like, biases)]
    else:
        operator = _fixed_lstm(v, ((x, weights), (shown, again)), cell)
    constants = [
        v.constant(np.concatenate([tensor.array() for tensor in four]), what)
        for what, four in (("weights", weights), ("recurrent_weights", again))
    ]
    bias, first = v.constant(np.concatenate(biases), "bias"), np.stack([_cleared(shown), _cleared(cell)])
    memory = v.state(v.named("memory"), first if real else first.astype(np.int16))
    found = v.add(operator, [v.transpose(v.value(x), order, "ordered"), *constants, bias, memory], "steps")
    v.replace_state(memory, v.part(found, 0, steps - 1, steps + 1, "memory_next"))
    result = v.part(found, 0, 0, steps, "hidden")
    return v.transpose(result if real else v.add(Clip(-128, 127, DType.INT8), [result], "hidden"), order)


Side = tuple[TfliteTensor, Sequence[TfliteTensor]]
"""A value, and the weights of the four gates for it."""


def _fixed_lstm(v: TfliteValues, sides: tuple[Side, Side], cell: TfliteTensor) -> FixedLstm:
    """The layer on integers, with its factors."""
    limit, (fraction, exponent) = v.option("CellClip"), frexp(_step(v, cell))
    if fraction != 0.5 or not -14 <= exponent <= -8 or cell.zero:
        raise v.refuse(f"the cells {cell} must have a step of 2**-9 to 2**-15 and the zero point 0", ALIKE)
    step = 2.0 ** (exponent - 1)
    own, recurrent = (
        tuple(quantize_multiplier(_step(v, tensor) * _step(v, w) / _GATE_STEP) for w in four) for tensor, four in sides
    )
    (x, _), (shown, _) = sides
    gates, cells, results = map(quantize_multiplier, (_UNIT, _UNIT * _UNIT / step, _UNIT * _UNIT / _step(v, shown)))
    clip = int(min(limit / step, 32767.0)) if limit > 0 else 1 << 15
    return FixedLstm(x.zero, shown.zero, own, recurrent, gates, cells, results, 1 - exponent, clip)


def _requantized(v: TfliteValues, value: Value, zero_point: int, factor: float) -> Value:
    pairs = zip(("multiplier", "shift"), multiplier_arrays([factor]), strict=True)
    parameters = [v.placed(f"{value}_{what}", array) for what, array in pairs]
    return v.add(Requantize(output_zero_point=zero_point), [value, *parameters], "scaled")


def _weights(v: TfliteValues, position: int, dtype: DType) -> TfliteTensor:
    """Constant weights of a type; int8 ones are quantised per tensor around 0."""
    w = v.input(position)
    if not w.is_constant or w.dtype is not dtype or w.rank != 2 or w.zero:
        raise v.refuse(f"the weights {w} must be constant {dtype.text} with two axes, integers around 0", FOLD)
    return w


def _bias(v: TfliteValues, position: int, size: int, dtype: DType) -> Value:
    """The bias of a layer of such values, zeros for an absent one."""
    bias, held = v.optional(position), DType.FLOAT32 if dtype is DType.FLOAT32 else DType.INT32
    if bias is None:
        return v.constant(np.zeros(size, held.numpy), "no_bias")
    if not bias.is_constant or bias.type != TensorType((size,), held):
        raise v.refuse(f"the bias {bias} must be constant {held.text} [{size}]", FOLD)
    return v.value(bias)


def _step(v: TfliteValues, tensor: TfliteTensor) -> float:
    """The scale of a tensor that has one."""
    scale = v.quantisation(tensor).scale
    v.refuse_if(len(scale) != 1, f"{tensor} is quantised per channel, which is not supported here", ALIKE)
    return float(scale[0])


# Loops and conditions

Walk = Callable[[TfliteValues], None]
"""Imports all operators of the file of an import."""


class SubgraphPort(Record):
    """A value that goes into a subgraph or comes out of it."""

    tensor: TfliteTensor
    """As whoever has it there declares it."""
    value: Value
    known: Array | None = None


def loop(v: TfliteValues, walk: Walk) -> None:
    """WHILE: the body once for each turn."""
    condition, body = (_subgraph(v, v.option(f"{name}SubgraphIndex")) for name in ("Cond", "Body"))
    carried = [_given(v, v.input(position)) for position in range(len(v.op.inputs))]
    for _ in range(MOST_TURNS):
        if not _holds(v, condition, carried, walk):
            break
        carried = _called(v, body, carried, walk)
    else:
        raise v.refuse(f"turns more than {MOST_TURNS} times", UNKNOWN_TURNS)
    _bind(v, carried)


def branch(v: TfliteValues, walk: Walk) -> None:
    """IF: the way that is taken, or both and a choice between their results."""
    ways = [_subgraph(v, v.option(f"{name}SubgraphIndex")) for name in ("Then", "Else")]
    chosen, *operands = (_given(v, v.input(position)) for position in range(max(len(v.op.inputs), 1)))
    if chosen.known is not None:
        _bind(v, _called(v, ways[0] if chosen.known.reshape(-1)[0] else ways[1], operands, walk))
        return
    before = dict(v.variables.current)
    both = [_called(v, way, operands, walk) for way in ways]
    v.refuse_if(v.variables.current != before, "changes what is kept between inferences on a condition of run time")
    found = []
    for one, other in zip(*both, strict=True):
        odd = one.tensor.shape != other.tensor.shape or not same_quantisation(one.tensor, other.tensor)
        v.refuse_if(odd, f"gives {one.tensor} or {other.tensor}, which differ")
        flag = v.reshape(chosen.value, (1,) * one.tensor.rank, "condition")
        found.append(SubgraphPort(one.tensor, v.add(Select(), [flag, one.value, other.value], "chosen")))
    _bind(v, found)


def _subgraph(v: TfliteValues, number: int) -> TfliteFile:
    return replace(further(v, number), further=v.file.further)


def _given(v: TfliteValues, tensor: TfliteTensor) -> SubgraphPort:
    """An operand: its value, and its elements where they are known."""
    known = v.known_of(tensor)
    return SubgraphPort(tensor, v.value(tensor) if known is None else v.placed(tensor.name, known), known)


def _called(v: TfliteValues, file: TfliteFile, given: Sequence[SubgraphPort], walk: Walk) -> list[SubgraphPort]:
    """The results of a subgraph for some values, in the graph being built."""
    v.refuse_if(v.depth >= MOST_DEEP, f"is nested more than {MOST_DEEP} deep", "call fewer subgraphs within each other")
    v.wrong_if(len(file.inputs) != len(given), f"gives {len(given)} values to a subgraph of {len(file.inputs)} inputs")
    inner = v.inside(file)
    for index, one in zip(file.inputs, given, strict=True):
        tensor = file.tensors[index]
        v.wrong_if(tensor.type != one.tensor.type, f"gives {one.tensor} where {tensor} is expected")
        inner.give(tensor, one.value, one.known)
    walk(inner)
    return [_given(inner, file.tensors[index]) for index in file.outputs]


def _holds(v: TfliteValues, file: TfliteFile, given: Sequence[SubgraphPort], walk: Walk) -> bool:
    """The condition of a loop, from what is known alone."""
    alone = v.again(builder=GraphBuilder("condition"), variables=replace(v.variables, current={}, states={}))
    held = []
    for number, one in enumerate(given):
        stem = f"given_{number}"
        value = alone.graph_input(stem, one.value.type) if one.known is None else alone.placed(stem, one.known)
        held.append(replace(one, value=value))
    found = _called(alone, file, held, walk)
    odd = len(found) != 1 or found[0].tensor.dtype is not DType.BOOL
    v.wrong_if(odd, "has a condition that is not one truth value")
    truth = found[0].known
    if truth is None:
        graph = alone.finished([found[0].value])
        read = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs)
        what = "turns until a value of run time says so, which is not supported"
        v.refuse_if(read & set(graph.inputs), what, UNKNOWN_TURNS)
        unread = {name: np.zeros(graph.types[name].shape, graph.types[name].dtype.numpy) for name in graph.inputs}
        truth = evaluate(graph, unread)[graph.outputs[0]]
    return bool(truth.reshape(-1)[0])


def _bind(v: TfliteValues, found: Sequence[SubgraphPort]) -> None:
    """Make what a subgraph gave the operator's results."""
    for one, result in zip(found, v.results(len(found)), strict=True):
        v.bind(one.value, result)
        if one.known is not None and result.dtype in (*SHAPE_TYPES, DType.BOOL):
            v.give(result, one.value, one.known)
