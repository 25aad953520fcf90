"""TFLite's recurrent operators on integers: they are read as the fixed-point arithmetic of TensorFlow Lite Micro.

Facts from tflite-micro's micro/kernels/{svdf_common,lstm_eval_common,unidirectional_sequence_lstm}.cc: all factors are
quotients of doubles, and no fused activation is applied to an integer SVDF.
"""

from __future__ import annotations

from math import frexp

import numpy as np

from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import OperatorEntry, Tensor
from dovetail.frontend.tflite_state import cleared, own_variable
from dovetail.graph.types import DType, TensorType
from dovetail.operators.arithmetic import Clip, Lookup, Requantize
from dovetail.operators.base import Operator
from dovetail.operators.linear import FullyConnected
from dovetail.operators.movement import Concat, Reshape, Slice, Transpose
from dovetail.operators.recurrent import FixedLstm, RowProducts, Scaling
from dovetail.quantize.multiplier import multiplier_arrays, quantize_multiplier

_GATES = ("input", "forget", "cell", "output")
_GATE_STEP = 2.0**-12
_UNIT = 2.0**-15
"""Step of what sigmoid and tanh give."""


def svdf(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SVDF of int8 values with a state of int16 or int8."""
    options = ctx.options(op, "SVDFOptions")
    rank, activation = int(options["Rank"]), int(options["FusedActivationFunction"])
    x, weights, times, result = ctx.input(op, 0), _int8(ctx, op, 1), ctx.input(op, 2), ctx.output(op)
    if activation not in (0, 1) or x.dtype is not DType.INT8 or result.dtype is not DType.INT8:
        raise ctx.refuse(op, f"from {x} to {result} with activation {activation}; only int8 without, or with RELU, is")
    if times.dtype not in (DType.INT8, DType.INT16) or len(times.shape) != 2 or rank < 1 or times.shape[0] % rank:
        raise ctx.refuse(op, f"weights in time {times} of rank {rank} are not supported")
    (filters, steps), batch = times.shape, x.shape[0]
    state = own_variable(ctx, op, 4, TensorType((batch, filters * steps), times.dtype))
    zero = _zero_point(ctx, op, state)
    feature = _add(ctx, op, FullyConnected(_zero_point(ctx, op, x)), [ctx.value(op, x), ctx.value(op, weights)], "sum")
    scaled = _requantized(ctx, op, feature, 0, _step(ctx, op, x) * _step(ctx, op, weights) / _step(ctx, op, state))
    newest = _add(ctx, op, Clip(state.dtype.low, state.dtype.high, state.dtype), [scaled], "newest")
    if zero:  # the zero point is added modulo 256
        table = (np.arange(-128, 128) + zero).astype(np.uint8).view(np.int8)
        newest = _add(ctx, op, Lookup(), [newest, ctx.builder.constant(f"{result.name}_table", table)], "newest")
    history = _add(ctx, op, Reshape((batch, filters, 1)), [newest], "newest")
    if steps > 1:
        first = cleared(state).reshape(batch, filters, steps)
        before = ctx.builder.state(state.name, first, state.dtype)
        older = _add(ctx, op, Slice((0, 0, 1), (batch, filters, steps), (1, 1, 1)), [before], "older")
        history = _add(ctx, op, Concat(2), [older, history], "history")
        ctx.builder.replace_state(before, history)
    units = filters // rank
    rows = _add(ctx, op, Reshape((batch, units, rank * steps)), [history], "rows")
    held = ctx.array(op, times, "weights in time").reshape(units, rank * steps)
    operands = [rows, ctx.builder.constant(times.name, held), *_bias(ctx, op, 3, units)]
    total = _add(ctx, op, RowProducts(zero), operands, "products")
    factor = _step(ctx, op, state) * _step(ctx, op, times) / _step(ctx, op, result)
    ctx.emit(op, Clip(-128, 127, DType.INT8), [_requantized(ctx, op, total, _zero_point(ctx, op, result), factor)])


def lstm(ctx: TfliteContext, op: OperatorEntry) -> None:
    """UNIDIRECTIONAL_SEQUENCE_LSTM of int8 values with cells of int16."""
    options = ctx.options(op, "UnidirectionalSequenceLSTMOptions")
    x, result = ctx.input(op, 0), ctx.output(op)
    if x.dtype is not DType.INT8 or len(x.shape) != 3 or int(options["FusedActivationFunction"]) != 4:
        raise ctx.refuse(op, f"{x}: only int8 with three axes and the activation TANH is supported")
    for position, what in ((9, "peepholes"), (10, "peepholes"), (11, "peepholes"), (16, "a projection"),
                           (17, "a projection"), *((place, "layer normalisation") for place in range(20, 24))):
        if ctx.optional(op, position) is not None:
            raise ctx.refuse(op, f"{what} (operand {position}) is not supported for int8")
    if options["ProjClip"] or options["DiagonalRecurrentTensors"]:
        raise ctx.refuse(op, "a clipped projection or diagonal recurrent weights are not supported")
    order = (0, 1, 2) if options["TimeMajor"] else (1, 0, 2)
    steps, batch, depth = (x.shape[axis] for axis in order)
    weights, again = ([_int8(ctx, op, start + gate) for gate in range(4)] for start in (1, 5))
    hidden = weights[0].shape[0]
    if any(w.shape != (hidden, depth) for w in weights) or any(r.shape != (hidden, hidden) for r in again):
        raise ctx.refuse(op, f"the weights {weights[0]} and {again[0]} do not fit {x}")
    shown = own_variable(ctx, op, 18, TensorType((batch, hidden), DType.INT8))
    cell = own_variable(ctx, op, 19, TensorType((batch, hidden), DType.INT16))
    if not ctx.same_quantisation(shown, result):
        raise ctx.refuse(op, f"the result {result} must be quantised as the variable {shown}")
    operator = _operator(ctx, op, (x, shown, cell), (weights, again), float(options["CellClip"]))
    first = np.stack([cleared(shown), cleared(cell)]).astype(np.int16)
    memory = ctx.builder.state(f"{result.name}_memory", first)
    constants = [
        ctx.builder.constant(f"{result.name}_{what}", np.concatenate([t.array() for t in tensors]))
        for what, tensors in (("weights", weights), ("recurrent_weights", again))
    ]
    biases = [ctx.builder.constant_of(_bias(ctx, op, 12 + gate, hidden)[0]) for gate in range(4)]
    bias = ctx.builder.constant(f"{result.name}_bias", np.concatenate([b for b in biases if b is not None]))
    ordered = _add(ctx, op, Transpose(order), [ctx.value(op, x)], "ordered")
    found = _add(ctx, op, operator, [ordered, *constants, bias, memory], "steps")
    whole = (batch, hidden)
    last = _add(ctx, op, Slice((steps - 1, 0, 0), (steps + 1, *whole), (1, 1, 1)), [found], "memory_next")
    ctx.builder.replace_state(memory, last)
    part = _add(ctx, op, Slice((0, 0, 0), (steps, *whole), (1, 1, 1)), [found], "hidden")
    narrow = _add(ctx, op, Clip(-128, 127, DType.INT8), [part], "hidden")
    ctx.emit(op, Transpose(order), [narrow])


def _operator(
    ctx: TfliteContext, op: OperatorEntry, values: tuple[Tensor, Tensor, Tensor],
    weights: tuple[list[Tensor], list[Tensor]], cell_clip: float,
) -> FixedLstm:
    """The layer of an LSTM with its factors. `values`: input, hidden values, cells."""
    x, shown, cell = values
    fraction, exponent = frexp(_step(ctx, op, cell))
    bits = 1 - exponent
    if fraction != 0.5 or not 9 <= bits <= 15 or _zero_point(ctx, op, cell):
        raise ctx.refuse(op, f"the cells {cell} must have a step of 2**-9 to 2**-15 and the zero point 0")
    step = 2.0**-bits
    scalings: list[tuple[Scaling, ...]] = []
    for tensor, four in ((x, weights[0]), (shown, weights[1])):
        factors = (_step(ctx, op, tensor) * _step(ctx, op, w) / _GATE_STEP for w in four)
        scalings.append(tuple(quantize_multiplier(factor) for factor in factors))
    clip = int(min(cell_clip / step, 32767.0)) if cell_clip > 0 else 1 << 15
    return FixedLstm(
        _zero_point(ctx, op, x), _zero_point(ctx, op, shown), scalings[0], scalings[1],
        quantize_multiplier(_UNIT), quantize_multiplier(_UNIT * _UNIT / step),
        quantize_multiplier(_UNIT * _UNIT / _step(ctx, op, shown)), bits, clip,
    )  # fmt: skip


def _add(ctx: TfliteContext, op: OperatorEntry, operator: Operator, operands: list[str], suffix: str) -> str:
    return ctx.builder.add(operator, operands, f"{ctx.output(op).name}_{suffix}", ctx.origin(op))


def _requantized(ctx: TfliteContext, op: OperatorEntry, value: str, zero_point: int, factor: float) -> str:
    pairs = zip(("multiplier", "shift"), multiplier_arrays([factor]), strict=True)
    parameters = [ctx.builder.constant(f"{value}_{what}", array) for what, array in pairs]
    return _add(ctx, op, Requantize(output_zero_point=zero_point), [value, *parameters], "scaled")


def _int8(ctx: TfliteContext, op: OperatorEntry, position: int) -> Tensor:
    """Constant weights of int8, quantised per tensor around 0."""
    w = ctx.input(op, position)
    if not w.is_constant or w.dtype is not DType.INT8 or len(w.shape) != 2 or _zero_point(ctx, op, w):
        raise ctx.refuse(op, f"the weights {w} must be constant int8 with two axes, quantised around 0")
    return w


def _bias(ctx: TfliteContext, op: OperatorEntry, position: int, size: int) -> list[str]:
    """The bias, zeros for an absent one."""
    bias = ctx.optional(op, position)
    if bias is None:
        return [ctx.builder.constant(f"{ctx.output(op).name}_no_bias", np.zeros(size, np.int32))]
    if not bias.is_constant or bias.dtype is not DType.INT32 or bias.shape != (size,):
        raise ctx.refuse(op, f"the bias {bias} must be constant int32 [{size}]")
    return [ctx.value(op, bias)]


def _step(ctx: TfliteContext, op: OperatorEntry, tensor: Tensor) -> float:
    ctx.parameters(op, tensor)
    assert tensor.quantisation is not None
    if len(tensor.quantisation.scale) != 1:
        raise ctx.refuse(op, f"{tensor} is quantised per channel, which is not supported here")
    return float(tensor.quantisation.scale[0])


def _zero_point(ctx: TfliteContext, op: OperatorEntry, tensor: Tensor) -> int:
    _step(ctx, op, tensor)
    assert tensor.quantisation is not None
    return int(tensor.quantisation.zero_point[0])
