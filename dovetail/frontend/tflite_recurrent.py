"""TFLite's recurrent operators; those on integers are read as the fixed-point arithmetic of TensorFlow Lite Micro.

Facts from tflite-micro's micro/kernels/{svdf_common,lstm_eval_common,unidirectional_sequence_lstm}.cc: all factors are
quotients of doubles, and no fused activation is applied to an integer SVDF.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp

import numpy as np

from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import AGAIN, ALIKE, FOLD, OperatorEntry, Tensor
from dovetail.frontend.tflite_state import cleared, own_variable
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.arithmetic import Clip, Lookup, Requantize
from dovetail.operators.base import Operator
from dovetail.operators.linear import FullyConnected
from dovetail.operators.movement import Concat, Reshape, Slice, Transpose
from dovetail.operators.recurrent import FixedLstm, RowProducts, Scaling
from dovetail.operators.recurrent_float import Recurrent, RecurrentKind
from dovetail.quantize.multiplier import multiplier_arrays, quantize_multiplier

_ONNX_ORDER = (0, 3, 1, 2)
"""TFLite's gates (input, forget, candidate, output) in ONNX's order."""
_GATE_STEP = 2.0**-12
_UNIT = 2.0**-15
"""Step of what sigmoid and tanh give."""


def svdf(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SVDF of int8 values with a state of int16 or int8, or of floats."""
    options = ctx.options(op, "SVDFOptions")
    rank, activation = int(options["Rank"]), int(options["FusedActivationFunction"])
    x, times, result = ctx.input(op, 0), ctx.input(op, 2), ctx.output(op)
    real = x.dtype is DType.FLOAT32
    if (not real and activation not in (0, 1)) or x.dtype not in (DType.INT8, DType.FLOAT32):
        raise ctx.refuse(op, f"{x} with activation {activation}: only float32, and int8 without or with RELU, are")
    if len(x.shape) != 2:
        raise ctx.refuse(op, f"the input {x} must have two axes")
    kinds = (DType.FLOAT32,) if real else (DType.INT8, DType.INT16)
    if times.dtype not in kinds or len(times.shape) != 2 or rank < 1 or times.shape[0] % rank:
        raise ctx.refuse(op, f"weights in time {times} of rank {rank} are not supported")
    (filters, steps), batch = times.shape, x.shape[0]
    state = own_variable(ctx, op, 4, TensorType((batch, filters * steps), times.dtype))
    weights = _weights(ctx, op, 1, x.dtype)
    zero = 0 if real else _zero_point(ctx, op, state)
    feature = FullyConnected(0 if real else _zero_point(ctx, op, x))
    newest = _add(ctx, op, feature, [ctx.value(op, x), ctx.value(op, weights)], "feature")
    if not real:
        factor = _step(ctx, op, x) * _step(ctx, op, weights) / _step(ctx, op, state)
        newest = _in_state(ctx, op, _requantized(ctx, op, newest, 0, factor), state)
    history = _add(ctx, op, Reshape((batch, filters, 1)), [newest], "newest")
    if steps > 1:
        before = ctx.builder.state(state.name, cleared(state).reshape(batch, filters, steps), state.dtype)
        older = _add(ctx, op, Slice((0, 0, 1), (batch, filters, steps), (1, 1, 1)), [before], "older")
        history = _add(ctx, op, Concat(2), [older, history], "history")
        ctx.builder.replace_state(before, history)
    units = filters // rank
    rows = _add(ctx, op, Reshape((batch, units, rank * steps)), [history], "rows")
    held = ctx.array(op, times, "weights in time").reshape(units, rank * steps)
    operands = [rows, ctx.builder.constant(times.name, held), _bias(ctx, op, 3, units, x.dtype)]
    if real:
        ctx.emit_real(op, RowProducts(), operands, activation)
        return
    total = _add(ctx, op, RowProducts(zero), operands, "products")
    factor = _step(ctx, op, state) * _step(ctx, op, times) / _step(ctx, op, result)
    ctx.emit(op, Clip(-128, 127, DType.INT8), [_requantized(ctx, op, total, _zero_point(ctx, op, result), factor)])


def _in_state(ctx: TfliteContext, op: OperatorEntry, scaled: str, state: Tensor) -> str:
    """What an integer SVDF puts into its state: limited first, then the zero point added modulo 256."""
    newest = _add(ctx, op, Clip(state.dtype.low, state.dtype.high, state.dtype), [scaled], "newest")
    zero_point = _zero_point(ctx, op, state)
    if not zero_point:
        return newest
    table = (np.arange(-128, 128) + zero_point).astype(np.uint8).view(np.int8)
    return _add(ctx, op, Lookup(), [newest, ctx.builder.constant(f"{state.name}_table", table)], "newest")


@dataclass(frozen=True)
class _Lstm:
    """The operands of an LSTM, checked."""

    x: Tensor
    weights: tuple[Tensor, ...]
    """Of input gate, forget gate, candidate and output gate, as the next."""
    recurrent: tuple[Tensor, ...]
    biases: tuple[Array, ...]
    shown: Tensor
    """The variable of hidden values."""
    cell: Tensor
    order: tuple[int, int, int]
    """The axes of x as steps, batch, inputs."""
    steps: int
    cell_clip: float


def lstm(ctx: TfliteContext, op: OperatorEntry) -> None:
    """UNIDIRECTIONAL_SEQUENCE_LSTM of int8 values with cells of int16, or of floats."""
    layer, result = _read_lstm(ctx, op), ctx.output(op)
    batch, hidden = layer.shown.shape
    real = layer.x.dtype is DType.FLOAT32
    gates = _ONNX_ORDER if real else range(4)
    operator: Operator = Recurrent(RecurrentKind.LSTM) if real else _fixed_lstm(ctx, op, layer)
    constants = [
        ctx.builder.constant(f"{result.name}_{what}", np.concatenate([tensors[gate].array() for gate in gates]))
        for what, tensors in (("weights", layer.weights), ("recurrent_weights", layer.recurrent))
    ]
    biases = [layer.biases[gate] for gate in gates]
    none = [np.zeros_like(bias) for bias in biases] if real else []
    bias = ctx.builder.constant(f"{result.name}_bias", np.concatenate([*biases, *none]))
    first = np.stack([cleared(layer.shown), cleared(layer.cell)])
    memory = ctx.builder.state(f"{result.name}_memory", first if real else first.astype(np.int16))
    ordered = _add(ctx, op, Transpose(layer.order), [ctx.value(op, layer.x)], "ordered")
    found = _add(ctx, op, operator, [ordered, *constants, bias, memory], "steps")
    whole, once = (batch, hidden), (1, 1, 1)
    last = _add(ctx, op, Slice((layer.steps - 1, 0, 0), (layer.steps + 1, *whole), once), [found], "memory_next")
    ctx.builder.replace_state(memory, last)
    shown = _add(ctx, op, Slice((0, 0, 0), (layer.steps, *whole), once), [found], "hidden")
    if not real:
        shown = _add(ctx, op, Clip(-128, 127, DType.INT8), [shown], "hidden")
    ctx.emit(op, Transpose(layer.order), [shown])


def _read_lstm(ctx: TfliteContext, op: OperatorEntry) -> _Lstm:
    options = ctx.options(op, "UnidirectionalSequenceLSTMOptions")
    x, result = ctx.input(op, 0), ctx.output(op)
    kinds = {DType.INT8: DType.INT16, DType.FLOAT32: DType.FLOAT32}
    if x.dtype not in kinds or len(x.shape) != 3 or int(options["FusedActivationFunction"]) != 4:
        raise ctx.refuse(op, f"{x}: only int8 or float32 with three axes and the activation TANH are supported")
    for position, what in ((9, "peepholes"), (10, "peepholes"), (11, "peepholes"), (16, "a projection"),
                           (17, "a projection"), *((place, "layer normalisation") for place in range(20, 24))):
        if ctx.optional(op, position) is not None:
            raise ctx.refuse(op, f"{what} (operand {position}) is not supported")
    if options["ProjClip"] or options["DiagonalRecurrentTensors"]:
        raise ctx.refuse(op, "a clipped projection or diagonal recurrent weights are not supported")
    if options["CellClip"] and x.dtype is DType.FLOAT32:
        raise ctx.refuse(op, f"cells limited to {options['CellClip']} are supported for int8 only")
    order = (0, 1, 2) if options["TimeMajor"] else (1, 0, 2)
    steps, batch, depth = (x.shape[axis] for axis in order)
    weights, again = (tuple(_weights(ctx, op, start + gate, x.dtype) for gate in range(4)) for start in (1, 5))
    hidden = weights[0].shape[0]
    if any(w.shape != (hidden, depth) for w in weights) or any(r.shape != (hidden, hidden) for r in again):
        raise ctx.refuse(op, f"the weights {weights[0]} and {again[0]} do not fit {x}", AGAIN)
    shown = own_variable(ctx, op, 18, TensorType((batch, hidden), x.dtype))
    cell = own_variable(ctx, op, 19, TensorType((batch, hidden), kinds[x.dtype]))
    if not ctx.same_quantisation(shown, result):
        raise ctx.refuse(op, f"the result {result} must be quantised as the variable {shown}", ALIKE)
    found = [ctx.builder.constant_of(_bias(ctx, op, 12 + gate, hidden, x.dtype)) for gate in range(4)]
    biases = tuple(bias for bias in found if bias is not None)
    return _Lstm(x, weights, again, biases, shown, cell, order, steps, float(options["CellClip"]))


def _fixed_lstm(ctx: TfliteContext, op: OperatorEntry, layer: _Lstm) -> FixedLstm:
    """The layer on integers, with its factors."""
    x, shown, cell, cell_clip = layer.x, layer.shown, layer.cell, layer.cell_clip
    fraction, exponent = frexp(_step(ctx, op, cell))
    bits = 1 - exponent
    if fraction != 0.5 or not 9 <= bits <= 15 or _zero_point(ctx, op, cell):
        raise ctx.refuse(op, f"the cells {cell} must have a step of 2**-9 to 2**-15 and the zero point 0", ALIKE)
    step = 2.0**-bits
    scalings: list[tuple[Scaling, ...]] = []
    for tensor, four in ((x, layer.weights), (shown, layer.recurrent)):
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


def _weights(ctx: TfliteContext, op: OperatorEntry, position: int, dtype: DType) -> Tensor:
    """Constant weights of a type; int8 ones are quantised per tensor around 0."""
    w = ctx.input(op, position)
    around = dtype is DType.FLOAT32 or (w.dtype is dtype and not _zero_point(ctx, op, w))
    if not w.is_constant or w.dtype is not dtype or len(w.shape) != 2 or not around:
        raise ctx.refuse(op, f"the weights {w} must be constant {dtype.text} with two axes, integers around 0", FOLD)
    return w


def _bias(ctx: TfliteContext, op: OperatorEntry, position: int, size: int, dtype: DType) -> str:
    """The bias of a layer of such values, zeros for an absent one."""
    bias, held = ctx.optional(op, position), DType.FLOAT32 if dtype is DType.FLOAT32 else DType.INT32
    if bias is None:
        return ctx.builder.constant(f"{ctx.output(op).name}_no_bias", np.zeros(size, held.numpy))
    if not bias.is_constant or bias.dtype is not held or bias.shape != (size,):
        raise ctx.refuse(op, f"the bias {bias} must be constant {held.text} [{size}]", FOLD)
    return ctx.value(op, bias)


def _step(ctx: TfliteContext, op: OperatorEntry, tensor: Tensor) -> float:
    ctx.parameters(op, tensor)
    assert tensor.quantisation is not None
    if len(tensor.quantisation.scale) != 1:
        raise ctx.refuse(op, f"{tensor} is quantised per channel, which is not supported here", ALIKE)
    return float(tensor.quantisation.scale[0])


def _zero_point(ctx: TfliteContext, op: OperatorEntry, tensor: Tensor) -> int:
    _step(ctx, op, tensor)
    assert tensor.quantisation is not None
    return int(tensor.quantisation.zero_point[0])
