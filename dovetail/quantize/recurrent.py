"""Recurrent layers on integers: operands and weights of 8 bits (a scale for each gate), gates and cells of 16; what a
GRU and a plain layer read may have 16 bits, too.

An LSTM is TensorFlow Lite Micro's (int8 hidden values, cells in steps of 2**-11); of a GRU and a plain layer hidden
values have 16 bits, since a GRU moves them by small shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.operators.arithmetic import Clip, Offset, quantize_multiplier
from dovetail.ir.operators.gated import FixedRecurrent
from dovetail.ir.operators.movement import Pick
from dovetail.ir.operators.recurrent import DEFAULT_CURVES, FixedLstm, Recurrent, RecurrentKind, Scaling
from dovetail.ir.types import Array, DType
from dovetail.quantize.context import Operand, QuantisationRequest, QuantisedValue, QuantParameters

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


def recurrent(ask: QuantisationRequest[Recurrent]) -> str:
    """The hidden values as integers; raises ModelError for layers without an integer form."""
    operator, (given, *others) = ask.operator, ask.operands
    (x,) = ask.activations([given])
    if operator.functions != DEFAULT_CURVES[operator.kind] or len(others) > 4:
        raise _refused(operator, "has peepholes or activations of its own")
    wide = x.kind.dtype is DType.INT16 and operator.kind is not RecurrentKind.LSTM and not x.form.zero_point
    if x.kind.dtype not in (DType.INT8, DType.UINT8) and not wide:
        raise _refused(operator, f"reads {x.kind.dtype.text}")
    weights, again = (_weights(operator, one) for one in others[:2])
    bias, memory = _real(others[2]), _real(others[3])
    name, zero_point = x.name, x.form.zero_point
    if x.kind.dtype is DType.UINT8:
        name, zero_point = ask.add(Offset(-128, DType.INT8), [name], "signed"), zero_point - 128
    if operator.reverse:
        name = ask.add(Pick(_reversed(x.kind.shape, x.kind.shape[0])), [name], "reversed")
    layer = _lstm if operator.kind is RecurrentKind.LSTM else _gated
    return layer(ask, name, (x.form.scale, zero_point), (weights, again), (bias, memory))


_Parts = tuple[tuple[Array, Array], tuple[Array, Array]]
"""Weights and recurrent weights, each with the scale of every gate."""


def _lstm(
    ask: QuantisationRequest[Recurrent], x: str, form: tuple[float, int], parts: _Parts, rest: tuple[Array, Array]
) -> str:
    hidden = ask.target if ask.target.dtype is DType.INT8 else _HIDDEN
    (scale, zero_point), (bias, memory) = form, rest
    arrays, scales = [], []
    for array, own in parts:
        gates = array.reshape(4, -1, array.shape[1])
        arrays.append(gates[list(_LSTM_ORDER)].reshape(array.shape))
        scales.append(own[list(_LSTM_ORDER)])
    sums = bias.reshape(2, 4, -1).sum(axis=0)[list(_LSTM_ORDER)]
    steps = np.rint(sums / (scale * scales[0][:, None])).reshape(-1)
    cells = np.rint(memory[1:] * 2.0**_CELL_BITS)
    first = np.concatenate([hidden.quantize(memory[:1].astype(np.float32)).astype(np.float64), cells])
    step = 2.0**-_CELL_BITS
    kept, added, shown = map(quantize_multiplier, (_UNIT, _UNIT * _UNIT / step, _UNIT * _UNIT / hidden.scale))
    fixed = FixedLstm(
        zero_point,
        hidden.zero_point,
        _scalings(scale * scales[0] / _GATE),
        _scalings(hidden.scale * scales[1] / _GATE),
        kept,
        added,
        shown,
        _CELL_BITS,
    )
    constants = [*_constants(ask, arrays, _int32(steps)), ask.constant("memory", _int16(first))]
    found = ask.add(fixed, [x, *constants], "steps")
    shape = ask.emitter.builder.type_of(found).shape
    if ask.operator.reverse:
        found = ask.add(Pick(_reversed(shape, shape[0] - 1)), [found], "ordered")
    if hidden == ask.target:
        return ask.clip(found)
    narrow = ask.add(Clip(-128, 127, DType.INT8), [found], "hidden")
    return ask.finish(narrow, [hidden.scale / ask.target.scale], hidden.zero_point)


def _gated(
    ask: QuantisationRequest[Recurrent], x: str, form: tuple[float, int], parts: _Parts, rest: tuple[Array, Array]
) -> str:
    operator, wide = ask.operator, ask.emitter.builder.type_of(x).dtype is DType.INT16
    ((weights, scales), (again, scales_again)), (scale, zero_point), (bias, memory) = parts, form, rest
    gates = operator.kind.gates
    of_x, of_hidden = bias.reshape(2, gates, -1)
    steps = [of_x / (scale * scales[:, None]), of_hidden / (_UNIT * scales_again[:, None])]
    biases = np.concatenate([np.rint(one).reshape(-1) for one in steps])
    reach = np.abs(again.astype(np.int64)).sum(axis=1) * 32768 + np.abs(biases[again.shape[0] :])
    most = np.abs(weights.astype(np.int64)).sum(axis=1) * 32768 + np.abs(biases[: again.shape[0]])
    if max(reach.max(initial=0), most.max(initial=0) if wide else 0) >= 1 << 31:
        raise _refused(operator, "has sums of values beyond 32 bits")
    fixed = FixedRecurrent(
        operator.kind,
        zero_point,
        _scalings(scale * scales / _GATE),
        _scalings(_UNIT * scales_again / _GATE),
        operator.reset_after,
    )
    first = _int16(np.rint(memory / _UNIT))
    constants = [*_constants(ask, [weights, again], _int32(biases)), ask.constant("memory", first)]
    found = ask.add(fixed, [x, *constants], "steps")
    if operator.reverse:
        shape = ask.emitter.builder.type_of(found).shape
        found = ask.add(Pick(_reversed(shape, shape[0])), [found], "ordered")
    return ask.finish(found, [_UNIT / ask.target.scale])


def _constants(ask: QuantisationRequest[Recurrent], weights: Sequence[Array], bias: Array) -> list[str]:
    names = zip(("weights", "recurrent_weights", "bias"), (*weights, bias), strict=True)
    return [ask.constant(stem, np.ascontiguousarray(array)) for stem, array in names]


def _scalings(factors: Array) -> tuple[Scaling, ...]:
    return tuple(quantize_multiplier(float(factor)) for factor in factors)


def _int32(values: Array) -> Array:
    limit = float(DType.INT32.high >> 1)
    return np.asarray(np.clip(values, -limit, limit), dtype=np.int32)


def _int16(values: Array) -> Array:
    return np.asarray(np.clip(values, DType.INT16.low, DType.INT16.high), dtype=np.int16)


def _reversed(shape: Sequence[int], steps: int) -> tuple[tuple[int, ...], ...]:
    """Places that turn the first axis' first steps around."""
    turned = (*range(steps)[::-1], *range(steps, shape[0]))
    return (turned, *(tuple(range(size)) for size in shape[1:]))


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
