"""Resource variables and recurrent operators of TFLite: what a model keeps from one inference to the next.

Recurrent operators on integers are read as the fixed-point arithmetic of TensorFlow Lite Micro.
Facts from tflite-micro's micro/kernels/{svdf_common,lstm_eval_common,unidirectional_sequence_lstm}.cc: all factors are
quotients of doubles, and no fused activation is applied to an integer SVDF.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp

import numpy as np

from dovetail.ir.operators.arithmetic import Clip, Lookup, Requantize, multiplier_arrays, quantize_multiplier
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.movement import Concat, Reshape, Transpose
from dovetail.ir.operators.recurrent import FixedLstm, Recurrent, RecurrentKind, RowProducts
from dovetail.ir.types import Array, DType, TensorType
from dovetail.read.tflite.file import AGAIN, ALIKE, FOLD, OperatorEntry, TfliteFile, TfliteTensor
from dovetail.read.tflite.values import ACTIVATION_TYPES, Key, TfliteValues, same_quantisation
from dovetail.read.values import GATE_ORDER

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
    v.options("VarHandleOptions")
    v.variables.handles[v.output.index] = _key_of(v.op)


def read_variable(v: TfliteValues) -> str:
    """READ_VARIABLE: what was assigned last, in this inference or the one before."""
    key, result, known = _variable(v), v.output, v.variables
    if result.dtype not in ACTIVATION_TYPES:
        raise v.refuse(f"a variable of {result.dtype.text} is not supported")
    if key not in known.current:
        first = known.first.get(key, _cleared(result))
        if key in _assigned(v.file):
            known.states[key] = known.current[key] = v.builder.state(v.named("variable"), first, result.dtype)
        else:
            known.current[key] = v.builder.constant(v.named("variable"), first, result.dtype)
    return known.current[key]


def assign_variable(v: TfliteValues) -> None:
    """ASSIGN_VARIABLE."""
    key, known = _variable(v), v.variables
    value = v.value(v.input(1))
    if key in known.states:
        v.builder.replace_state(known.states[key], value)
    known.current[key] = value


def call_once(v: TfliteValues) -> None:
    """CALL_ONCE: a subgraph that assigns constants to variables before they are used."""
    number = int(v.options("CallOnceOptions")["InitSubgraphIndex"])
    graph = v.file.further[number - 1] if 1 <= number <= len(v.file.further) else None
    if graph is None:
        raise v.refuse(f"runs subgraph {number}, which the model does not have", AGAIN)
    handles: dict[int, Key] = {}
    for step in graph.operators:
        if step.opcode == "VAR_HANDLE" and len(step.outputs) == 1:
            handles[step.outputs[0]] = _key_of(step)
            continue
        arguments = step.inputs if step.opcode == "ASSIGN_VARIABLE" else ()
        if len(arguments) != 2 or arguments[0] not in handles or arguments[1] < 0:
            raise v.refuse(f"runs {step.opcode} in subgraph {number}; only constants may be assigned there")
        tensor, key = graph.tensors[arguments[1]], handles[arguments[0]]
        if key in v.variables.current:
            raise v.refuse(f"sets a variable of subgraph {number} after it was used", AGAIN)
        if not tensor.is_constant:
            raise v.refuse(f"assigns {tensor}, which is no constant, in subgraph {number}", FOLD)
        v.variables.first[key] = tensor.array()


def _cleared(tensor: TfliteTensor) -> Array:
    """First contents of a variable nothing is said of, as TFLite Micro has them: int8 at its zero point, else 0."""
    at_zero = tensor.dtype is DType.INT8 and tensor.quantisation is not None
    value = int(tensor.quantisation.zero_point[0]) if at_zero and tensor.quantisation else 0
    return np.full(tensor.shape, value, tensor.dtype.numpy)


def _own_variable(v: TfliteValues, position: int, kind: TensorType) -> TfliteTensor:
    """The variable tensor an operator keeps by itself; it must be of a type."""
    tensor = v.input(position)
    if not tensor.is_variable or tensor.is_constant or tensor.index in v.variables.taken:
        raise v.refuse(f"operand {position} ({tensor}) must be a variable of its own", AGAIN)
    if TensorType(tensor.shape, tensor.dtype) != kind:
        raise v.refuse(f"operand {position} ({tensor}) must be {kind}", AGAIN)
    v.variables.taken.add(tensor.index)
    return tensor


def _variable(v: TfliteValues) -> Key:
    tensor = v.input(0)
    if tensor.index not in v.variables.handles:
        raise v.refuse(f"operand {tensor} is not the result of a VAR_HANDLE before it", AGAIN)
    return v.variables.handles[tensor.index]


def svdf(v: TfliteValues) -> str:
    """SVDF of int8 values with a state of int16 or int8, or of floats."""
    rank = int(v.options("SVDFOptions")["Rank"])
    x, times = v.input(0), v.input(2)
    real = x.dtype is DType.FLOAT32
    if (not real and v.activation not in (0, 1)) or x.dtype not in (DType.INT8, DType.FLOAT32):
        raise v.refuse(f"{x} with activation {v.activation}: only float32, and int8 without or with RELU, are")
    if len(x.shape) != 2:
        raise v.refuse(f"the input {x} must have two axes")
    kinds = (DType.FLOAT32,) if real else (DType.INT8, DType.INT16)
    if times.dtype not in kinds or len(times.shape) != 2 or rank < 1 or times.shape[0] % rank:
        raise v.refuse(f"weights in time {times} of rank {rank} are not supported")
    (filters, steps), batch = times.shape, x.shape[0]
    state = _own_variable(v, 4, TensorType((batch, filters * steps), times.dtype))
    weights = _weights(v, 1, x.dtype)
    zero = 0 if real else _zero_point(v, state)
    feature = FullyConnected(0 if real else _zero_point(v, x))
    newest = v.add(feature, [v.value(x), v.value(weights)], "feature")
    if not real:
        factor = _step(v, x) * _step(v, weights) / _step(v, state)
        newest = _in_state(v, _requantized(v, newest, 0, factor), state)
    history = v.add(Reshape((batch, filters, 1)), [newest], "newest")
    if steps > 1:
        before = v.builder.state(state.name, _cleared(state).reshape(batch, filters, steps), state.dtype)
        history = v.add(Concat(2), [v.part(before, 2, 1, steps, "older"), history], "history")
        v.builder.replace_state(before, history)
    units = filters // rank
    rows = v.add(Reshape((batch, units, rank * steps)), [history], "rows")
    held = v.array(times, "weights in time").reshape(units, rank * steps)
    operands = [rows, v.builder.constant(times.name, held), _bias(v, 3, units, x.dtype)]
    if real:
        return v.finish(RowProducts(), operands, v.activation)
    total = v.add(RowProducts(zero), operands, "products")
    factor = _step(v, state) * _step(v, times) / _step(v, v.output)
    return v.add(Clip(-128, 127, DType.INT8), [_requantized(v, total, _zero_point(v, v.output), factor)])


def _in_state(v: TfliteValues, scaled: str, state: TfliteTensor) -> str:
    """The values an integer SVDF puts into its state: limited first, then the zero point added modulo 256."""
    newest = v.add(Clip(state.dtype.low, state.dtype.high, state.dtype), [scaled], "newest")
    zero_point = _zero_point(v, state)
    if not zero_point:
        return newest
    table = (np.arange(-128, 128) + zero_point).astype(np.uint8).view(np.int8)
    return v.add(Lookup(), [newest, v.builder.constant(f"{state.name}_table", table)], "newest")


def lstm(v: TfliteValues) -> str:
    """UNIDIRECTIONAL_SEQUENCE_LSTM of int8 values with cells of int16, or of floats.

    Its weights are those of the input gate, the forget gate, the candidate and the output gate.
    """
    options, x = v.options("UnidirectionalSequenceLSTMOptions"), v.input(0)
    kinds = {DType.INT8: DType.INT16, DType.FLOAT32: DType.FLOAT32}
    if x.dtype not in kinds or len(x.shape) != 3 or v.activation != 4:
        raise v.refuse(f"{x}: only int8 or float32 with three axes and the activation TANH are supported")
    refused = dict.fromkeys((9, 10, 11), "peepholes") | dict.fromkeys((16, 17), "a projection")
    for position, what in (refused | dict.fromkeys(range(20, 24), "layer normalisation")).items():
        if v.optional(position) is not None:
            raise v.refuse(f"{what} (operand {position}) is not supported")
    if options["ProjClip"] or options["DiagonalRecurrentTensors"]:
        raise v.refuse("a clipped projection or diagonal recurrent weights are not supported")
    if options["CellClip"] and x.dtype is DType.FLOAT32:
        raise v.refuse(f"cells limited to {options['CellClip']} are supported for int8 only")
    order = (0, 1, 2) if options["TimeMajor"] else (1, 0, 2)
    steps, batch, depth = (x.shape[axis] for axis in order)
    weights, again = ([_weights(v, start + gate, x.dtype) for gate in range(4)] for start in (1, 5))
    hidden = weights[0].shape[0]
    if any(w.shape != (hidden, depth) for w in weights) or any(r.shape != (hidden, hidden) for r in again):
        raise v.refuse(f"the weights {weights[0]} and {again[0]} do not fit {x}", AGAIN)
    shown = _own_variable(v, 18, TensorType((batch, hidden), x.dtype))
    cell = _own_variable(v, 19, TensorType((batch, hidden), kinds[x.dtype]))
    if not same_quantisation(shown, v.output):
        raise v.refuse(f"the result {v.output} must be quantised as the variable {shown}", ALIKE)
    known = [v.known(_bias(v, 12 + gate, hidden, x.dtype)) for gate in range(4)]
    biases = [bias for bias in known if bias is not None]
    operator: Operator = Recurrent(RecurrentKind.LSTM)
    if x.dtype is DType.FLOAT32:
        gates = GATE_ORDER[RecurrentKind.LSTM]
        weights, again = ([four[gate] for gate in gates] for four in (weights, again))
        biases = [*(biases[gate] for gate in gates), *map(np.zeros_like, biases)]
    else:
        operator = _fixed_lstm(v, x, weights, again, shown, cell)
    constants = [
        v.constant(np.concatenate([tensor.array() for tensor in four]), what)
        for what, four in (("weights", weights), ("recurrent_weights", again))
    ]
    bias = v.constant(np.concatenate(biases), "bias")
    first = np.stack([_cleared(shown), _cleared(cell)])
    memory = v.builder.state(v.named("memory"), first if x.dtype is DType.FLOAT32 else first.astype(np.int16))
    ordered = v.add(Transpose(order), [v.value(x)], "ordered")
    found = v.add(operator, [ordered, *constants, bias, memory], "steps")
    v.builder.replace_state(memory, v.part(found, 0, steps - 1, steps + 1, "memory_next"))
    result = v.part(found, 0, 0, steps, "hidden")
    if x.dtype is not DType.FLOAT32:
        result = v.add(Clip(-128, 127, DType.INT8), [result], "hidden")
    return v.add(Transpose(order), [result])


def _fixed_lstm(
    v: TfliteValues,
    x: TfliteTensor,
    weights: Sequence[TfliteTensor],
    again: Sequence[TfliteTensor],
    shown: TfliteTensor,
    cell: TfliteTensor,
) -> FixedLstm:
    """The layer on integers, with its factors."""
    cell_clip = float(v.op.options["CellClip"])
    fraction, exponent = frexp(_step(v, cell))
    bits = 1 - exponent
    if fraction != 0.5 or not 9 <= bits <= 15 or _zero_point(v, cell):
        raise v.refuse(f"the cells {cell} must have a step of 2**-9 to 2**-15 and the zero point 0", ALIKE)
    step = 2.0**-bits
    scalings = [
        tuple(quantize_multiplier(_step(v, tensor) * _step(v, w) / _GATE_STEP) for w in four)
        for tensor, four in ((x, weights), (shown, again))
    ]
    factors = (_UNIT, _UNIT * _UNIT / step, _UNIT * _UNIT / _step(v, shown))
    gates, cells, results = (quantize_multiplier(factor) for factor in factors)
    clip = int(min(cell_clip / step, 32767.0)) if cell_clip > 0 else 1 << 15
    zero_points = _zero_point(v, x), _zero_point(v, shown)
    return FixedLstm(*zero_points, scalings[0], scalings[1], gates, cells, results, bits, clip)


def _requantized(v: TfliteValues, value: str, zero_point: int, factor: float) -> str:
    pairs = zip(("multiplier", "shift"), multiplier_arrays([factor]), strict=True)
    parameters = [v.builder.constant(f"{value}_{what}", array) for what, array in pairs]
    return v.add(Requantize(output_zero_point=zero_point), [value, *parameters], "scaled")


def _weights(v: TfliteValues, position: int, dtype: DType) -> TfliteTensor:
    """Constant weights of a type; int8 ones are quantised per tensor around 0."""
    w = v.input(position)
    around = dtype is DType.FLOAT32 or (w.dtype is dtype and not _zero_point(v, w))
    if not w.is_constant or w.dtype is not dtype or len(w.shape) != 2 or not around:
        raise v.refuse(f"the weights {w} must be constant {dtype.text} with two axes, integers around 0", FOLD)
    return w


def _bias(v: TfliteValues, position: int, size: int, dtype: DType) -> str:
    """The bias of a layer of such values, zeros for an absent one."""
    bias, held = v.optional(position), DType.FLOAT32 if dtype is DType.FLOAT32 else DType.INT32
    if bias is None:
        return v.constant(np.zeros(size, held.numpy), "no_bias")
    if not bias.is_constant or bias.dtype is not held or bias.shape != (size,):
        raise v.refuse(f"the bias {bias} must be constant {held.text} [{size}]", FOLD)
    return v.value(bias)


def _step(v: TfliteValues, tensor: TfliteTensor) -> float:
    v.parameters(tensor)
    assert tensor.quantisation is not None
    if len(tensor.quantisation.scale) != 1:
        raise v.refuse(f"{tensor} is quantised per channel, which is not supported here", ALIKE)
    return float(tensor.quantisation.scale[0])


def _zero_point(v: TfliteValues, tensor: TfliteTensor) -> int:
    _step(v, tensor)
    assert tensor.quantisation is not None
    return int(tensor.quantisation.zero_point[0])
