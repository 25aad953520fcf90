"""Keras's recurrent layers, forward, backward and both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.frontend.keras_context import Importer, KerasContext
from dovetail.frontend.keras_layer import AGAIN, Call, Layer
from dovetail.frontend.keras_merging import joined, operator_of
from dovetail.frontend.keras_movement import picked
from dovetail.frontend.keras_weights import children
from dovetail.graph.types import Array
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.movement import Concat, Slice
from dovetail.operators.recurrent_float import DEFAULT_CURVES, Curve, Recurrent, RecurrentKind

KINDS = {"LSTMCell": RecurrentKind.LSTM, "GRUCell": RecurrentKind.GRU, "SimpleRNNCell": RecurrentKind.RNN}

ORDER = {RecurrentKind.LSTM: (0, 3, 1, 2), RecurrentKind.GRU: (0, 1, 2), RecurrentKind.RNN: (0,)}
"""Keras's gates in ONNX's order. Keras: input, forget, candidate, output of an LSTM; update, reset, candidate."""

CURVES = {"sigmoid": Curve.SIGMOID, "tanh": Curve.TANH, "relu": Curve.RELU}
"""Activations inside a cell, by their Keras names."""


@dataclass(frozen=True)
class _Run:
    """What a recurrent layer has computed."""

    steps: str
    """Hidden values after each step, at the step's place in the sequence: [N, T, H]."""
    last: tuple[str, ...]
    """Hidden values, and cells of an LSTM, after the last step: [N, H] each."""


def _curves(cell: Layer, kind: RecurrentKind) -> tuple[Curve, ...]:
    """The activations of a cell; () for ONNX's defaults."""
    outer = cell.get("activation", "tanh")
    inner = cell.get("recurrent_activation", "sigmoid" if cell.version >= 2 else "hard_sigmoid")
    names = {
        RecurrentKind.LSTM: (inner, outer, outer),
        RecurrentKind.GRU: (inner, outer),
        RecurrentKind.RNN: (outer,),
    }[kind]
    if any(not isinstance(name, str) or name not in CURVES for name in names):
        wrong = next(name for name in names if not isinstance(name, str) or name not in CURVES)
        raise cell.refuse(f"the activation {str(wrong)[:80]} inside a cell is not supported, only {', '.join(CURVES)}")
    found = tuple(CURVES[name] for name in names)
    return () if found == DEFAULT_CURVES[kind] else found


def _weights(ctx: KerasContext, cell: Layer, kind: RecurrentKind, inputs: int) -> tuple[list[str], bool]:
    """Weights [G*H, I], recurrent weights [G*H, H] and both biases [2*G*H]; whether a GRU resets after products."""
    size = cell.whole("units", low=1)
    rows = kind.gates * size
    after = kind is RecurrentKind.GRU and cell.flag("reset_after", cell.version >= 3)
    cell.flag("use_bias", True)
    bias = ctx.optional(cell, "bias", [2, rows] if after else [rows])
    both = np.zeros((2, rows), np.float32)
    if bias is not None:
        both[: 2 if after else 1] = bias

    def ordered(array: Array) -> Array:
        """[..., G*H] with the gates in ONNX's order."""
        gates = array.reshape(*array.shape[:-1], kind.gates, size)
        return gates[..., list(ORDER[kind]), :].reshape(array.shape)

    arrays = {
        "kernel": ordered(ctx.weight(cell, "kernel", [inputs, rows])).T,
        "recurrent_kernel": ordered(ctx.weight(cell, "recurrent_kernel", [size, rows])).T,
        "bias": ordered(both).reshape(-1),
    }
    return [ctx.constant(cell, name, array) for name, array in arrays.items()], after


def _memory(ctx: KerasContext, layer: Layer, given: list[str], kept: int, batch: int, size: int) -> str:
    """What a layer remembers before the first step, [kept, N, H]: zeros, or values of the call."""
    if not given:
        return ctx.constant(layer, "memory", np.zeros((kept, batch, size), np.float32))
    if len(given) != kept or any(ctx.shape(value) != (batch, size) for value in given):
        raise layer.refuse(f"is called with {len(given)} states, expected {kept} of [{batch}, {size}]", AGAIN)
    rows = [ctx.reshaped(layer, ctx.real(layer, value), (1, batch, size), "state") for value in given]
    return ctx.add(layer, Concat(0), rows, "memory") if len(rows) > 1 else rows[0]


def _run(ctx: KerasContext, layer: Layer, x: str, states: list[str]) -> _Run:
    """One direction of a layer over a sequence [N, T, I]."""
    cells = dict(children(layer))
    cell = cells.get("cell")
    if cell is None or cell.kind not in KINDS:
        named = cell.kind if cell is not None else "it names"
        raise layer.refuse(f"the cell {named} is not supported", f"supported are {', '.join(KINDS)}")
    kind, shape = KINDS[cell.kind], ctx.shape(x)
    if len(shape) != 3:
        raise layer.refuse(f"reads sequences [batch, steps, features], its operand is {ctx.type_of(x)}")
    if layer.flag("stateful", False):
        raise layer.refuse("stateful is set: a state between calls is not supported", "return the state instead")
    batch, count, inputs = shape
    size, reverse = cell.whole("units", low=1), layer.flag("go_backwards", False)
    operands, after = _weights(ctx, cell, kind, inputs)
    memory = _memory(ctx, layer, states, kind.kept, batch, size)
    first = ctx.transposed(layer, x, (1, 0, 2), "steps_first")
    found = ctx.add(layer, Recurrent(kind, reverse, after, _curves(cell, kind)), [first, *operands, memory], "run")
    layer.read.update({*cell.read, "cell", "zero_output_for_mask", "reset_after"})
    if "cell" in layer.parts:
        cell.check_settings()
    spans = [(0, 1) if reverse else (count - 1, count)]
    spans += [(count, count + 1)] if kind is RecurrentKind.LSTM else []
    last = [_part(ctx, layer, found, span) for span in spans]
    steps = _part(ctx, layer, found, (0, count)) if kind is RecurrentKind.LSTM else found
    rows = tuple(ctx.reshaped(layer, value, (batch, size), "last") for value in last)
    return _Run(ctx.transposed(layer, steps, (1, 0, 2), "steps"), rows)


def _part(ctx: KerasContext, layer: Layer, value: str, span: tuple[int, int]) -> str:
    """Some steps of [T, N, H]."""
    shape = ctx.shape(value)
    return ctx.add(layer, Slice((span[0], 0, 0), (span[1], *shape[1:]), (1, 1, 1)), [value], "part")


def _arguments(ctx: KerasContext, layer: Layer, call: Call) -> tuple[str, list[str]]:
    """The sequence and the states a layer is called with."""
    ctx.check_named(layer, call, ("initial_state", "sequences", "inputs"))
    x, *states = call.tensors() or [""]
    if not x:
        raise layer.refuse("is called without a sequence", AGAIN)
    return ctx.real(layer, x), states


def _results(layer: Layer, result: str, states: tuple[str, ...]) -> tuple[str, ...]:
    return (result, *states) if layer.flag("return_state", False) else (result,)


def recurrent(ctx: KerasContext, layer: Layer, call: Call) -> tuple[str, ...]:
    """LSTM, GRU, SimpleRNN, and RNN of one of their cells. Backward, the last step's result comes first."""
    x, states = _arguments(ctx, layer, call)
    run = _run(ctx, layer, x, states)
    result = run.last[0]
    if layer.flag("return_sequences", False):
        result = _reversed(ctx, layer, run.steps) if layer.flag("go_backwards", False) else run.steps
    return _results(layer, result, run.last)


def _reversed(ctx: KerasContext, layer: Layer, x: str) -> str:
    batch, count, size = ctx.shape(x)
    return picked(ctx, layer, x, [range(batch), range(count - 1, -1, -1), range(size)], "reversed")


def bidirectional(ctx: KerasContext, layer: Layer, call: Call) -> tuple[str, ...]:
    """Bidirectional: two layers over one sequence, each step's results side by side or combined."""
    x, states = _arguments(ctx, layer, call)
    sides = [part for _, part in children(layer)]
    if len(sides) != 2 or len(states) % 2:
        raise layer.refuse("needs a layer, and as many states for each direction", AGAIN)
    half = len(states) // 2
    runs = [_run(ctx, side, x, states[place * half :][:half]) for place, side in enumerate(sides)]
    flags = [[side.flag(key, False) for side in sides] for key in ("return_sequences", "return_state")]
    turned = [side.flag("go_backwards", False) for side in sides]
    if any(pair[0] != pair[1] for pair in flags) or turned != [False, True]:
        raise layer.refuse("the two layers must return alike, the first forward and the second backward", AGAIN)
    values = [run.steps if flags[0][0] else run.last[0] for run in runs]
    layer.read.update(("layer", "backward_layer"))
    for side in sides:
        side.check_settings()
    mode = layer.choice("merge_mode", "concat", ("concat", "sum", "mul", "ave"))
    result = _merged(ctx, layer, values, mode)
    return (result, *runs[0].last, *runs[1].last) if flags[1][0] else (result,)


def _merged(ctx: KerasContext, layer: Layer, values: list[str], mode: str) -> str:
    if mode == "concat":
        return joined(ctx, layer, values, len(ctx.shape(values[0])) - 1)
    kind = BinaryKind.MULTIPLY if mode == "mul" else BinaryKind.ADD
    result = ctx.add(layer, operator_of(kind), values, "merged")
    if mode != "ave":
        return result
    return ctx.add(layer, Binary(BinaryKind.MULTIPLY), [result, ctx.number(layer, 0.5, "share")], "mean")


RECURRENT: dict[str, Importer] = {
    **dict.fromkeys(("GRU", "LSTM", "RNN", "SimpleRNN"), recurrent),
    "Bidirectional": bidirectional,
}
"""Importers of recurrent layers."""
