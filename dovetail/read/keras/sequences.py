"""Keras layers over sequences: attention, products of matrices, recurrent layers forward, backward and both."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt

import numpy as np

from dovetail.ir.operators.activation import Softmax
from dovetail.ir.operators.elementwise import BinaryKind
from dovetail.ir.operators.linear import MatrixProduct
from dovetail.ir.operators.recurrent import DEFAULT_CURVES, Curve, Recurrent, RecurrentKind
from dovetail.ir.types import Array
from dovetail.read.keras.layer import AGAIN, KerasLayer, KerasTensor, children
from dovetail.read.keras.layers import unit_length
from dovetail.read.keras.operations import activated
from dovetail.read.keras.values import Importer, KerasValues
from dovetail.read.values import GATE_ORDER

MASKED = -1e9
"""Added to the scores of what is not attended to; their softmax is 0."""

KINDS = {"LSTMCell": RecurrentKind.LSTM, "GRUCell": RecurrentKind.GRU, "SimpleRNNCell": RecurrentKind.RNN}

CURVES = {"sigmoid": Curve.SIGMOID, "tanh": Curve.TANH, "relu": Curve.RELU}
"""Activations inside a cell, by their Keras names."""


def _product(v: KerasValues, x: str, equation: str, kernel: Array, bias: Array | None) -> str:
    """An einsum "x,kernel->result" of a value and a kernel, without an axis of the batch in both, and the bias, which
    is broadcast to the result."""
    found = equation.replace(" ", "").replace("->", ",").split(",")
    if len(found) != 3:
        raise v.refuse(f"the equation {equation[:80]!r} is not of the form x,kernel->result")
    rank = len(v.shape(x))
    free = max(rank - len(found[0].replace("...", "")), 0) if "..." in found[0] else 0
    one, two, result = (term.replace("...", "ABCDEFGH"[:free]) for term in found)
    proper = all(term.isalpha() and len(set(term)) == len(term) for term in (one, two, result))
    if not proper or len(one) != rank or set(one) & set(two) & set(result) or set(result) != set(one) ^ set(two):
        raise v.refuse(f"the equation {equation[:80]!r} is no product of a matrix and a kernel", AGAIN)
    sizes = dict(zip(one, v.shape(x), strict=True))
    if len(two) != kernel.ndim or any(sizes.get(a, size) != size for a, size in zip(two, kernel.shape, strict=True)):
        raise v.refuse(f"the kernel {list(kernel.shape)} does not fit {v.type_of(x)} in {equation[:80]!r}", AGAIN)
    product = v.einsum(f"{one},{two}->{result}", [x, v.constant(kernel, "kernel")])
    if bias is None:
        return product
    try:
        np.broadcast_shapes(bias.shape, v.shape(product))
    except ValueError:
        raise v.refuse(f"the bias {list(bias.shape)} does not fit {v.type_of(product)}", AGAIN) from None
    return v.plus(product, v.constant(bias, "bias"), "biased")


def einsum_dense(v: KerasValues) -> str:
    """EinsumDense."""
    x, equation = v.one(), v.layer.get("equation")
    if not isinstance(equation, str):
        raise v.refuse("has no equation", AGAIN)
    v.layer.read.update(("output_shape", "bias_axes"))  # follow from the weights
    weights = v.weights.of(v.layer)
    return activated(v, _product(v, x, equation, weights["kernel"], weights.get("bias")))


def _operands(v: KerasValues, names: tuple[str, ...] = ("query", "value", "key")) -> dict[str, str]:
    """The values of an attention's call by the names of their parameters."""
    call = v.call
    listed = list(call.arguments[0]) if call.arguments and isinstance(call.arguments[0], list) else call.arguments
    found = {name: value.name for name, value in zip(names, listed, strict=False) if isinstance(value, KerasTensor)}
    found |= {
        name: value.name for name, value in call.named.items() if name in names and isinstance(value, KerasTensor)
    }
    if len(found) != len(call.tensors()) or "query" not in found or "value" not in found:
        raise v.refuse("is called with other values than query, value and key; masks are not supported")
    v.check_named((*names, "use_causal_mask"))
    real = {name: v.real(value) for name, value in found.items()}
    return real | {"key": real.get("key", real["value"])}


def _attended(v: KerasValues, query: str, key: str, value: str, causal: bool) -> str:
    """softmax(query key^T) value, over [..., steps, features]."""
    scores = v.add(MatrixProduct(), [query, v.matrix_turned(key, "key_turned")], "scores")
    if causal:
        rows, columns = v.shape(scores)[-2:]
        mask = np.where(np.arange(columns)[None, :] <= np.arange(rows)[:, None], 0.0, MASKED).astype(np.float32)
        scores = v.plus(scores, v.constant(mask, "mask"), "masked")
    return v.add(MatrixProduct(), [v.add(Softmax(), [scores], "shares"), value], "attended")


def multi_head_attention(v: KerasValues) -> str:
    """MultiHeadAttention of sequences [N, T, C]."""
    layer, given = v.layer, _operands(v)
    heads, size = layer.whole("num_heads", low=1), layer.whole("key_dim", low=1)
    axes = layer.get("attention_axes", [1])
    if axes not in ([1], 1) or any(len(v.shape(value)) != 3 for value in given.values()):
        raise v.refuse("attends over the one inner axis of [batch, steps, features] only")
    depth = layer.whole("value_dim", size, low=1)
    layer.flag("use_bias", True)
    layer.read.update(("output_shape", "query_shape", "key_shape", "value_shape", "flash_attention"))
    parts, sides = dict(children(layer)), {}
    for name in ("query", "key", "value"):
        part, x = v.again(layer=parts[f"{name}_dense"]), given[name]
        width = depth if name == "value" else size
        kernel, bias = part.weight("kernel", [v.shape(x)[-1], heads, width]), part.optional("bias", [heads, width])
        if name == "query":
            factor = np.float32(1.0 / sqrt(size))
            kernel, bias = kernel * factor, None if bias is None else bias * factor
        projected = _product(part, x, "abc,cde->abde", kernel, bias)
        sides[name] = v.transpose(projected, (0, 2, 1, 3), f"{name}_heads")
    causal = v.call.named.get("use_causal_mask") is True
    found = v.transpose(_attended(v, sides["query"], sides["key"], sides["value"], causal), (0, 2, 1, 3), "joined")
    part = v.again(layer=parts["output_dense"])
    kernel = part.weight("kernel", [heads, depth, None])
    return _product(part, found, "abcd,cde->abe", kernel, part.optional("bias", [kernel.shape[2]]))


def attention(v: KerasValues) -> str:
    """Attention by dot products."""
    given = _operands(v)
    v.layer.choice("score_mode", "dot", ("dot",))
    query, scale = given["query"], v.optional("scale", [])
    if scale is not None:
        query = v.times(query, v.constant(scale, "scale"), "scaled")
    causal = v.call.named.get("use_causal_mask") is True or v.layer.flag("causal", False)
    return _attended(v, query, given["key"], given["value"], causal)


def dot(v: KerasValues) -> str:
    """Dot: sums of products along one axis of each of two values, for each element of the batch."""
    values = [v.real(value) for value in v.call.tensors()]
    if len(values) != 2 or any(len(v.shape(value)) < 2 for value in values):
        raise v.refuse("needs two values of at least two axes", AGAIN)
    v.check_named()
    axes = v.layer.get("axes", -1)
    pair = list(axes) if isinstance(axes, list | tuple) else [axes, axes]
    sides = []
    for value, axis in zip(values, [*pair, None, None], strict=False):
        shape = v.shape(value)
        if len(pair) != 2 or not isinstance(axis, int) or axis % len(shape) == 0 or not -len(shape) < axis < len(shape):
            raise v.refuse(f"the setting axes = {str(axes)[:80]} must name an axis of each value, not the batch", AGAIN)
        place = axis % len(shape)
        if v.layer.flag("normalize", False):
            value = unit_length(v, value, (place,))
        order = [0, *(other for other in range(1, len(shape)) if other != place), place]
        moved = v.transpose(value, order, "last")
        kept = v.shape(moved)[1:-1]
        sides.append((v.reshape(moved, (shape[0], prod(kept), shape[place]), "rows"), kept))
    (left, first), (right, second) = sides
    found = v.add(MatrixProduct(), [left, v.matrix_turned(right)], "product")
    return v.reshape(found, (v.shape(found)[0], *((*first, *second) or (1,))), "shaped")


def _curves(cell: KerasLayer, kind: RecurrentKind) -> tuple[Curve, ...]:
    """The activations of a cell; () for ONNX's defaults."""
    outer = cell.get("activation", "tanh")
    inner = cell.get("recurrent_activation", "sigmoid" if cell.version >= 2 else "hard_sigmoid")
    names = (inner, outer, outer) if kind is RecurrentKind.LSTM else (inner, outer)[-len(DEFAULT_CURVES[kind]) :]
    for name in names:
        if not isinstance(name, str) or name not in CURVES:
            known = ", ".join(CURVES)
            raise cell.refuse(f"the activation {str(name)[:80]} inside a cell is not supported, only {known}")
    found = tuple(CURVES[name] for name in names)
    return () if found == DEFAULT_CURVES[kind] else found


def _weights(v: KerasValues, kind: RecurrentKind, inputs: int) -> tuple[list[str], bool]:
    """A cell's weights [G*H, I], recurrent weights [G*H, H] and both biases [2*G*H]; whether a GRU resets after
    products."""
    cell = v.layer
    size = cell.whole("units", low=1)
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


def _memory(v: KerasValues, given: list[str], kept: int, batch: int, size: int) -> str:
    """A layer's memory before the first step, [kept, N, H]: zeros, or values of the call."""
    if not given:
        return v.constant(np.zeros((kept, batch, size), np.float32), "memory")
    if len(given) != kept or any(v.shape(value) != (batch, size) for value in given):
        raise v.refuse(f"is called with {len(given)} states, expected {kept} of [{batch}, {size}]", AGAIN)
    return v.concat([v.reshape(v.real(value), (1, batch, size), "state") for value in given], 0, "memory")


def _run(v: KerasValues, x: str, states: list[str]) -> tuple[str, tuple[str, ...]]:
    """One direction of a layer over a sequence [N, T, I]: the hidden values after each step, at the step's place in the
    sequence, [N, T, H]; and these, and the cells of an LSTM, after the last step, [N, H] each."""
    layer, cell = v.layer, dict(children(v.layer)).get("cell")
    if cell is None or cell.kind not in KINDS:
        named = cell.kind if cell is not None else "it names"
        raise v.refuse(f"the cell {named} is not supported", f"supported are {', '.join(KINDS)}")
    kind, shape = KINDS[cell.kind], v.shape(x)
    if len(shape) != 3:
        raise v.refuse(f"reads sequences [batch, steps, features], its operand is {v.type_of(x)}")
    if layer.flag("stateful", False):
        raise v.refuse("stateful is set: a state between calls is not supported", "return the state instead")
    batch, count, inputs = shape
    size, reverse = cell.whole("units", low=1), layer.flag("go_backwards", False)
    operands, after = _weights(v.again(layer=cell), kind, inputs)
    memory = _memory(v, states, kind.kept, batch, size)
    first = v.transpose(x, (1, 0, 2), "steps_first")
    found = v.add(Recurrent(kind, reverse, after, _curves(cell, kind)), [first, *operands, memory], "run")
    layer.read.update({*cell.read, "cell", "zero_output_for_mask", "reset_after"})
    if "cell" in layer.parts:
        cell.check_settings()
    spans = [(0, 1) if reverse else (count - 1, count)]
    spans += [(count, count + 1)] if kind is RecurrentKind.LSTM else []
    last = [v.part(found, 0, *span, "part") for span in spans]
    steps = v.part(found, 0, 0, count, "part") if kind is RecurrentKind.LSTM else found
    rows = tuple(v.reshape(value, (batch, size), "last") for value in last)
    return v.transpose(steps, (1, 0, 2), "steps"), rows


def _arguments(v: KerasValues) -> tuple[str, list[str]]:
    """The sequence and the states a layer is called with."""
    v.check_named(("initial_state", "sequences", "inputs"))
    x, *states = v.call.tensors() or [""]
    if not x:
        raise v.refuse("is called without a sequence", AGAIN)
    return v.real(x), states


def recurrent(v: KerasValues) -> tuple[str, ...]:
    """LSTM, GRU, SimpleRNN, and RNN of one of their cells. Backward, the last step's result comes first."""
    (steps, last), layer = _run(v, *_arguments(v)), v.layer
    result = last[0]
    if layer.flag("return_sequences", False):
        result = steps
        if layer.flag("go_backwards", False):
            batch, count, size = v.shape(result)
            result = v.pick(result, [range(batch), range(count - 1, -1, -1), range(size)], "reversed")
    return (result, *last) if layer.flag("return_state", False) else (result,)


def bidirectional(v: KerasValues) -> tuple[str, ...]:
    """Bidirectional: two layers over one sequence, each step's results side by side or combined."""
    x, states = _arguments(v)
    sides = [part for _, part in children(v.layer)]
    if len(sides) != 2 or len(states) % 2:
        raise v.refuse("needs a layer, and as many states for each direction", AGAIN)
    half = len(states) // 2
    runs = [_run(v.again(layer=side), x, states[place * half :][:half]) for place, side in enumerate(sides)]
    flags = [[side.flag(key, False) for side in sides] for key in ("return_sequences", "return_state")]
    turned = [side.flag("go_backwards", False) for side in sides]
    if any(pair[0] != pair[1] for pair in flags) or turned != [False, True]:
        raise v.refuse("the two layers must return alike, the first forward and the second backward", AGAIN)
    values = [steps if flags[0][0] else last[0] for steps, last in runs]
    v.layer.read.update(("layer", "backward_layer"))
    for side in sides:
        side.check_settings()
    mode = v.layer.choice("merge_mode", "concat", ("concat", "sum", "mul", "ave"))
    if mode == "concat":
        result = v.joined(values, len(v.shape(values[0])) - 1)
    else:
        result = v.folded(BinaryKind.MULTIPLY if mode == "mul" else BinaryKind.ADD, values, mode == "ave", "merged")
    return (result, *runs[0][1], *runs[1][1]) if flags[1][0] else (result,)


SEQUENCES: Mapping[str, Importer] = {
    **dict.fromkeys(("GRU", "LSTM", "RNN", "SimpleRNN"), recurrent),
    "Attention": attention,
    "Bidirectional": bidirectional,
    "Dot": dot,
    "EinsumDense": einsum_dense,
    "MultiHeadAttention": multi_head_attention,
}
"""Importers of these layers."""
