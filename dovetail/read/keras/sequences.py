"""Keras layers over sequences: attention, products of matrices, recurrent layers forward, backward and both."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt

import numpy as np

from dovetail.ir.operators.activation import Softmax
from dovetail.ir.operators.elementwise import BinaryKind
from dovetail.ir.operators.recurrent import DEFAULT_CURVES, Curve, Line, Recurrent, RecurrentKind
from dovetail.ir.types import Array
from dovetail.read.einsum import einsum
from dovetail.read.keras.layer import KerasLayer, children, listed
from dovetail.read.keras.layers import unit_length
from dovetail.read.keras.operations import activated
from dovetail.read.keras.values import Importer, KerasValues
from dovetail.read.values import GATE_ORDER, Value

MASKED = -1e9
"""Added to the scores of what is not attended to; their softmax is 0."""

KINDS = {"LSTMCell": RecurrentKind.LSTM, "GRUCell": RecurrentKind.GRU, "SimpleRNNCell": RecurrentKind.RNN}

CURVES = {
    "sigmoid": Curve.SIGMOID,
    "tanh": Curve.TANH,
    "relu": Curve.RELU,
    "softsign": Curve.SOFTSIGN,
    "hard_sigmoid": Curve.HARD_SIGMOID,
    "linear": Curve.AFFINE,
}
"""Activations inside a cell, by their Keras names."""


def _product(v: KerasValues, x: Value, equation: str, kernel: Array, bias: Array | None) -> Value:
    """An einsum of a value and a kernel, and the bias, which is broadcast to the result."""
    product = einsum(v, equation, [x, v.constant(kernel, "kernel")])
    return product if bias is None else v.plus(product, v.constant(bias, "bias"), "biased")


def einsum_dense(v: KerasValues) -> Value:
    """EinsumDense."""
    x, equation = v.one(), v.layer.get("equation")
    v.wrong_if(not isinstance(equation, str), "has no equation")
    v.layer.ignore("output_shape", "bias_axes")  # follow from the weights
    return activated(v, _product(v, x, equation, v.weight("kernel"), v.optional("bias")))


def _operands(v: KerasValues) -> dict[str, Value]:
    """The values of an attention's call by the names of their parameters."""
    call, names = v.call, ("query", "value", "key")
    listed = list(call.arguments[0]) if call.arguments and isinstance(call.arguments[0], list) else call.arguments
    pairs = [*zip(names, listed, strict=False), *((name, call.named.get(name)) for name in names)]
    found = {name: value for name, value in pairs if isinstance(value, Value)}
    if len(found) != len(call.all(Value)) or "query" not in found or "value" not in found:
        raise v.refuse("is called with other values than query, value and key; masks are not supported")
    v.check_named(*names, "use_causal_mask")
    real = {name: v.real(value) for name, value in found.items()}
    return real | {"key": real.get("key", real["value"])}


def _attended(v: KerasValues, query: Value, key: Value, value: Value, causal: bool) -> Value:
    """softmax(query key^T) value, over [..., steps, features]."""
    scores = v.product(query, v.matrix_turned(key, "key_turned"), "scores")
    if causal:
        rows, columns = scores.shape[-2:]
        mask = np.where(np.arange(columns)[None, :] <= np.arange(rows)[:, None], 0.0, MASKED).astype(np.float32)
        scores = v.plus(scores, v.constant(mask, "mask"), "masked")
    return v.product(v.add(Softmax(), [scores], "shares"), value, "attended")


def multi_head_attention(v: KerasValues) -> Value:
    """MultiHeadAttention of sequences [N, T, C]."""
    layer, given = v.layer, _operands(v)
    heads, size = layer.whole("num_heads"), layer.whole("key_dim")
    if layer.get("attention_axes", [1]) not in ([1], 1) or any(value.rank != 3 for value in given.values()):
        raise v.refuse("attends over the one inner axis of [batch, steps, features] only")
    depth = layer.whole("value_dim", size)
    layer.flag("use_bias", True)
    layer.ignore("output_shape", "query_shape", "key_shape", "value_shape", "flash_attention")
    parts, sides = {name: v.again(layer=part) for name, part in children(layer)}, {}
    for name in ("query", "key", "value"):
        part, x, width = parts[f"{name}_dense"], given[name], depth if name == "value" else size
        kernel, bias = part.weight("kernel", [x.shape[-1], heads, width]), part.optional("bias", [heads, width])
        if name == "query":
            factor = np.float32(1.0 / sqrt(size))
            kernel, bias = kernel * factor, None if bias is None else bias * factor
        sides[name] = v.ordered(_product(part, x, "abc,cde->abde", kernel, bias), (0, 2, 1, 3), f"{name}_heads")
    found = v.ordered(_attended(v, **sides, causal=v.call.named.get("use_causal_mask") is True), (0, 2, 1, 3), "joined")
    part = parts["output_dense"]
    kernel = part.weight("kernel", [heads, depth, None])
    return _product(part, found, "abcd,cde->abe", kernel, part.optional("bias", [kernel.shape[2]]))


def attention(v: KerasValues) -> Value:
    """Attention by dot products."""
    given = _operands(v)
    v.layer.choice("score_mode", "dot", "dot")
    scale = v.optional("scale", [])
    if scale is not None:
        given["query"] = v.times(given["query"], v.constant(scale, "scale"), "scaled")
    return _attended(v, **given, causal=v.call.named.get("use_causal_mask") is True or v.layer.flag("causal"))


def dot(v: KerasValues) -> Value:
    """Dot: sums of products along one axis of each of two values, for each element of the batch."""
    values = [*map(v.real, v.call.all(Value))]
    v.wrong_if(len(values) != 2 or any(value.rank < 2 for value in values), "needs two values of at least two axes")
    v.check_named()
    axes = v.layer.get("axes", -1)
    pair = listed(axes, 2)
    rows, kept = [], list[int]()
    for value, axis in zip(values, [*pair, None, None], strict=False):
        batch, *sizes = value.shape
        odd = len(pair) != 2 or not isinstance(axis, int) or not 0 < abs(axis) <= len(sizes)
        v.layer.unfit(odd, "axes", axes, "must name an axis of each value, not the batch")
        place = axis % (len(sizes) + 1)
        if v.layer.flag("normalize"):
            value = unit_length(v, value, (place,))
        moved = v.ordered(value, [0, *[other for other in range(1, len(sizes) + 1) if other != place], place], "last")
        outer = moved.shape[1:-1]
        rows.append(v.shaped(moved, (batch, prod(outer), sizes[place - 1]), "rows"))
        kept += outer
    found = v.product(rows[0], v.matrix_turned(rows[1]), "product")
    return v.shaped(found, (found.shape[0], *(kept or (1,))), "shaped")


def _curves(cell: KerasLayer, kind: RecurrentKind) -> tuple[tuple[Curve, ...], tuple[Line, ...]]:
    """The activations of a cell and their lines; () for ONNX's defaults, and where none is a line."""
    outer = cell.get("activation", "tanh")
    inner = cell.get("recurrent_activation", "sigmoid" if cell.version >= 2 else "hard_sigmoid")
    names = (inner, outer, outer) if kind is RecurrentKind.LSTM else (inner, outer)[-len(DEFAULT_CURVES[kind]) :]
    for name in names:
        what = f"the activation {name!s:.80} inside a cell is not supported, only {', '.join(CURVES)}"
        cell.refuse_if(not isinstance(name, str) or name not in CURVES, what)
    found, hard = tuple(CURVES[name] for name in names), (1 / 6 if cell.version >= 3 else 0.2, 0.5)
    lines = tuple(hard if curve is Curve.HARD_SIGMOID else (1.0, 0.0) for curve in found)
    is_plain, has_lines = found == DEFAULT_CURVES[kind], any(curve.is_line for curve in found)
    return () if is_plain else found, lines if has_lines else ()


def _weights(v: KerasValues, kind: RecurrentKind, inputs: int) -> tuple[list[Value], bool]:
    """A cell's weights [G*H, I], recurrent ones [G*H, H] and both biases [2*G*H]; whether a GRU resets after."""
    cell, size = v.layer, v.layer.whole("units")
    rows = kind.gates * size
    after = kind is RecurrentKind.GRU and cell.flag("reset_after", cell.version >= 3)
    cell.flag("use_bias", True)
    bias = v.optional("bias", [2, rows] if after else [rows])
    both = np.zeros((2, rows), np.float32)
    if bias is not None:
        both[: 2 if after else 1] = bias

    def ordered(array: Array) -> Array:
        """[..., G*H] with the gates in ONNX's order."""
        gates = array.reshape(*array.shape[:-1], kind.gates, size)
        return gates[..., list(GATE_ORDER[kind]), :].reshape(array.shape)

    arrays = {
        "kernel": ordered(v.weight("kernel", [inputs, rows])).T,
        "recurrent_kernel": ordered(v.weight("recurrent_kernel", [size, rows])).T,
        "bias": ordered(both).reshape(-1),
    }
    return [v.constant(array, name) for name, array in arrays.items()], after


def _memory(v: KerasValues, given: list[Value], kept: int, batch: int, size: int) -> Value:
    """A layer's memory before the first step, [kept, N, H]: zeros, or values of the call."""
    if not given:
        return v.constant(np.zeros((kept, batch, size), np.float32), "memory")
    odd = len(given) != kept or any(value.shape != (batch, size) for value in given)
    v.wrong_if(odd, f"is called with {len(given)} states, expected {kept} of [{batch}, {size}]")
    return v.concat([v.shaped(v.real(value), (1, batch, size), "state") for value in given], 0, "memory")


def _run(v: KerasValues, x: Value, states: list[Value]) -> tuple[Value, tuple[Value, ...]]:
    """One direction of a layer over a sequence [N, T, I]: the hidden values after each step, at the step's place in the
    sequence, [N, T, H]; and these, and the cells of an LSTM, after the last step, [N, H] each."""
    layer, cell = v.layer, dict(children(v.layer)).get("cell")
    if cell is None:
        raise v.refuse("the cell it names is not supported", f"supported are {', '.join(KINDS)}")
    kind = v.entry(cell.kind, KINDS, f"the cell {cell.kind} is not supported")
    v.refuse_if(x.rank != 3, f"reads sequences [batch, steps, features], its operand is {x.type}")
    if layer.flag("stateful"):
        raise v.refuse("stateful is set: a state between calls is not supported", "return the state instead")
    batch, count, inputs = x.shape
    size, reverse = cell.whole("units"), layer.flag("go_backwards")
    operands, after = _weights(v.again(layer=cell), kind, inputs)
    memory = _memory(v, states, kind.kept, batch, size)
    first = v.ordered(x, (1, 0, 2), "steps_first")
    found = v.add(Recurrent(kind, reverse, after, *_curves(cell, kind)), [first, *operands, memory], "run")
    layer.ignore(*cell.read, "cell", "zero_output_for_mask", "reset_after")
    if "cell" in layer.parts:
        cell.check_settings()
    spans = [(0, 1) if reverse else (count - 1, count), (count, count + 1)][: kind.kept]
    last = [v.part(found, 0, *span, "part") for span in spans]
    steps = v.part(found, 0, 0, count, "part") if kind is RecurrentKind.LSTM else found
    return v.ordered(steps, (1, 0, 2), "steps"), tuple(v.shaped(value, (batch, size), "last") for value in last)


def _arguments(v: KerasValues) -> tuple[Value, list[Value]]:
    """The sequence and the states a layer is called with."""
    v.check_named("initial_state", "sequences", "inputs")
    first, *states = v.several(real=False)
    return v.real(first), states


def recurrent(v: KerasValues) -> tuple[Value, ...]:
    """LSTM, GRU, SimpleRNN, and RNN of one of their cells. Backward, the last step's result comes first."""
    (steps, last), layer = _run(v, *_arguments(v)), v.layer
    result = last[0]
    if layer.flag("return_sequences"):
        result = steps
        if layer.flag("go_backwards"):
            batch, count, size = result.shape
            result = v.pick(result, [range(batch), range(count)[::-1], range(size)], "reversed")
    return (result, *last) if layer.flag("return_state") else (result,)


def bidirectional(v: KerasValues) -> tuple[Value, ...]:
    """Bidirectional: two layers over one sequence, each step's results side by side or combined."""
    (x, states), sides = _arguments(v), [part for _, part in children(v.layer)]
    v.wrong_if(len(sides) != 2 or len(states) % 2, "needs a layer, and as many states for each direction")
    half = len(states) // 2
    runs = [_run(v.again(layer=side), x, states[place * half :][:half]) for place, side in enumerate(sides)]
    keys = ("return_sequences", "return_state", "go_backwards")
    sequences, state, turned = ([side.flag(key) for side in sides] for key in keys)
    odd = len(set(sequences)) > 1 or len(set(state)) > 1 or turned != [False, True]
    v.wrong_if(odd, "the two layers must return alike, the first forward and the second backward")
    values = [steps if sequences[0] else last[0] for steps, last in runs]
    v.layer.ignore("layer", "backward_layer")
    for side in sides:
        side.check_settings()
    mode = v.layer.choice("merge_mode", "concat", "concat", "sum", "mul", "ave")
    if mode == "concat":
        result = v.concat(values, values[0].rank - 1, "joined")
    else:
        result = v.folded(BinaryKind.MULTIPLY if mode == "mul" else BinaryKind.ADD, values, mode == "ave", "merged")
    return (result, *runs[0][1], *runs[1][1]) if state[0] else (result,)


SEQUENCES: Mapping[str, Importer] = {
    **dict.fromkeys(("GRU", "LSTM", "RNN", "SimpleRNN"), recurrent),
    "Attention": attention,
    "Bidirectional": bidirectional,
    "Dot": dot,
    "EinsumDense": einsum_dense,
    "MultiHeadAttention": multi_head_attention,
}
"""Importers of these layers."""
