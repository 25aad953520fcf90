"""Recurrent layers on integers: operands and weights of 8 bits (a scale for each gate), gates and cells of 16; what a
GRU and a plain layer read may have 16 bits, too.

An LSTM is TensorFlow Lite Micro's (int8 hidden values, cells in steps of 2**-11); of a GRU and a plain layer hidden
values have 16 bits, since a GRU moves them by small shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, Offset, quantize_multiplier
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Pick
from dovetail.ir.operators.recurrent import FixedLstm, FixedRecurrent, Recurrent, RecurrentKind, Scaling
from dovetail.ir.pattern import apply
from dovetail.ir.types import Array, DType
from dovetail.quantize.context import Operand, QuantisationRequest, QuantisedValue, QuantParameters

_LSTM = apply(Recurrent, having=lambda layer: layer.kind is RecurrentKind.LSTM)
_GATE = 2.0**-12
"""Step of what gates are made of."""
_UNIT = 2.0**-15
"""Step of what sigmoid and tanh give."""
_CELL_BITS = 11
"""Fraction bits of an LSTM's cells, which reach to 16."""
_HIDDEN = QuantParameters(DType.INT8, 2.0**-7, 0)
"""An LSTM's hidden values where the result is of another type than int8."""
_LSTM_ORDER = (0, 2, 3, 1)
"""Places of `FixedLstm`'s gates (input, forget, candidate, output) stand in `Recurrent`'s order."""


def reads_cells(graph: Graph, node: Node) -> bool:
    """True for an LSTM whose cells, which stand behind its hidden values in one result, may be read: they have other
    steps than hidden values, so that both together are no integers of one quantisation."""
    if not _LSTM.fits(node):
        return False
    users, steps, open_ = graph.users(), graph.types[node.inputs[0]].shape[0], [node.output]
    while open_:
        value = open_.pop()
        if value in graph.outputs:
            return True
        for reader in users[value]:
            part = reader.operator.box_read
            if reader.operator.quantises or reader.operator.dequantises:
                open_.append(reader.output)
            elif part is None or part[0][1] > steps:
                return True
    return False


def recurrent(ask: QuantisationRequest[Recurrent], x: QuantisedValue) -> str:
    """The hidden values as integers; raises ModelError for layers without an integer form."""
    operator, others = ask.operator, ask.operands[1:]
    if not operator.is_plain or len(others) > 4:
        raise _refused(operator, "has peepholes, limits or activations of its own")
    wide = x.kind.dtype is DType.INT16 and operator.kind is not RecurrentKind.LSTM and not x.form.zero_point
    if x.kind.dtype not in (DType.INT8, DType.UINT8) and not wide:
        raise _refused(operator, f"reads {x.kind.dtype.text}")
    parts = [_weights(operator, one) for one in others[:2]]
    bias, memory = _real(others[2]), _real(others[3])
    name, zero_point, size = x.name, x.form.zero_point, x.kind.shape[0]
    if x.kind.dtype is DType.UINT8:
        name, zero_point = ask.add(Offset(-128, DType.INT8), [name], "signed"), zero_point - 128
    name = _in_order(ask, name, size, "reversed")
    hidden = ask.target if ask.target.dtype is DType.INT8 else _HIDDEN
    layer, arrays = (
        _lstm(x.form.scale, zero_point, hidden, parts, bias, memory)
        if operator.kind is RecurrentKind.LSTM
        else _gated(operator, x.form.scale, zero_point, parts, bias, memory, wide)
    )
    words = ("weights", "recurrent_weights", "bias", "memory")
    constants = [ask.constant(word, np.ascontiguousarray(array)) for word, array in zip(words, arrays, strict=True)]
    steps = _in_order(ask, ask.add(layer, [name, *constants], "steps"), size, "ordered")
    if operator.kind is not RecurrentKind.LSTM:
        return ask.finish(steps, [_UNIT / ask.target.scale])
    if hidden == ask.target:
        return ask.clip(steps)
    narrow = ask.add(Clip(-128, 127, DType.INT8), [steps], "hidden")
    return ask.finish(narrow, [hidden.scale / ask.target.scale], hidden.zero_point)


def _in_order(ask: QuantisationRequest[Recurrent], value: str, steps: int, word: str) -> str:
    """The first steps of a value turned around where the layer begins with the last."""
    shape = ask.emitter.builder.type_of(value).shape
    turned = (*range(steps)[::-1], *range(steps, shape[0]))
    places = (turned, *(tuple(range(size)) for size in shape[1:]))
    return ask.add(Pick(places), [value], word) if ask.operator.reverse else value


_Parts = Sequence[tuple[Array, Array]]
"""Weights and recurrent weights, each with the scale of every gate."""


def _lstm(
    scale: float, zero_point: int, hidden: QuantParameters, parts: _Parts, bias: Array, memory: Array
) -> tuple[Operator, tuple[Array, ...]]:
    arrays, scales, order = [], [], list(_LSTM_ORDER)
    for array, own in parts:
        arrays.append(array.reshape(4, -1, array.shape[1])[order].reshape(array.shape))
        scales.append(own[order])
    sums = bias.reshape(2, 4, -1).sum(axis=0)[order]
    cells = np.rint(memory[1:] * 2.0**_CELL_BITS)
    first = np.concatenate([hidden.quantize(memory[:1].astype(np.float32)).astype(np.float64), cells])
    step = 2.0**-_CELL_BITS
    of_x, of_hidden = _scalings(scale * scales[0] / _GATE), _scalings(hidden.scale * scales[1] / _GATE)
    kept, added, shown = map(quantize_multiplier, (_UNIT, _UNIT * _UNIT / step, _UNIT * _UNIT / hidden.scale))
    fixed = FixedLstm(zero_point, hidden.zero_point, of_x, of_hidden, kept, added, shown, _CELL_BITS)
    return fixed, (*arrays, _int32(np.rint(sums / (scale * scales[0][:, None])).reshape(-1)), _int16(first))


def _gated(
    operator: Recurrent, scale: float, zero_point: int, parts: _Parts, bias: Array, memory: Array, wide: bool
) -> tuple[Operator, tuple[Array, ...]]:
    (weights, scales), (again, scales_again) = parts
    of_x, of_hidden = bias.reshape(2, operator.kind.gates, -1)
    steps = [of_x / (scale * scales[:, None]), of_hidden / (_UNIT * scales_again[:, None])]
    with_x, with_hidden = (np.rint(one).reshape(-1) for one in steps)
    reach, most = (
        (np.abs(rows.astype(np.int64)).sum(axis=1) * 32768 + np.abs(added)).max(initial=0)
        for rows, added in ((again, with_hidden), (weights, with_x))
    )
    if max(reach, most if wide else 0) >= 1 << 31:
        raise _refused(operator, "has sums of values beyond 32 bits")
    factors = _scalings(scale * scales / _GATE), _scalings(_UNIT * scales_again / _GATE)
    fixed = FixedRecurrent(operator.kind, zero_point, factors[0], factors[1], operator.reset_after)
    biases = _int32(np.concatenate([with_x, with_hidden]))
    return fixed, (weights, again, biases, _int16(np.rint(memory / _UNIT)))


def _scalings(factors: Array) -> tuple[Scaling, ...]:
    return tuple(quantize_multiplier(float(factor)) for factor in factors)


def _int32(values: Array) -> Array:
    limit = float(DType.INT32.high >> 1)
    return np.asarray(np.clip(values, -limit, limit), dtype=np.int32)


def _int16(values: Array) -> Array:
    return np.asarray(np.clip(values, DType.INT16.low, DType.INT16.high), dtype=np.int16)


def _weights(operator: Recurrent, given: Operand) -> tuple[Array, Array]:
    """int8 weights [G*H, K], and the scale of each gate."""
    gates = operator.kind.gates
    if not isinstance(given, QuantisedValue) or given.array is None or given.zero_point.any():
        raise _refused(operator, "has weights that are not constant integers around 0")
    rows = given.array.shape[0]
    if given.kind.dtype.bits > 8 or not given.kind.dtype.signed or not (given.per_tensor or given.axis == 0):
        raise _refused(operator, f"has weights of {given.kind.dtype.text}, or with scales along another axis")
    scales = np.broadcast_to(given.scale.astype(np.float64), (rows,)).reshape(gates, -1)
    if (scales != scales[:, :1]).any():
        raise _refused(operator, "has a scale per row of weights, not per gate")
    return given.array.astype(np.int8), scales[:, 0]


def _real(given: Operand) -> Array:
    """A constant as float64."""
    if not isinstance(given, QuantisedValue):
        return given.astype(np.float64)
    if given.array is None:
        raise ModelError(f"{given.name} of a recurrent layer is computed", hint="begin sequences with constants")
    return np.asarray((given.array.astype(np.float64) - given.zero_point) * given.scale)


def _refused(operator: Recurrent, what: str) -> ModelError:
    return ModelError(
        f"a {operator.kind.value} that {what} has no integer form in Dovetail",
        hint="quantise it with dovetail quantize, or compile it with --float",
    )
