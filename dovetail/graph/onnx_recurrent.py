"""Recurrent layers as standard ONNX nodes: ONNX's own for floats, unrolled over the steps for integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph import onnx_fixed_point
from dovetail.graph.types import DType, TensorType
from dovetail.operators.arithmetic import Requantize
from dovetail.operators.fixed import sigmoid_table
from dovetail.operators.recurrent import FixedLstm, Scaling
from dovetail.operators.recurrent_float import Recurrent, RecurrentKind

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody

_GATE_BITS = 12
"""Fraction bits of what the gates' functions are given."""


def recurrent(body: OnnxBody, operator: Recurrent, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
    """The meaning of `Recurrent`: ONNX's LSTM, GRU or RNN."""
    x, w, r, bias, memory, *peepholes = inputs
    axis = body.integers([0])
    w, r, bias = (body.add("Unsqueeze", [name, axis]) for name in (w, r, bias))
    states = [_part(body, memory, place) for place in range(operator.kind.kept)]
    operands = [x, w, r, bias, "", *states, *(body.add("Unsqueeze", [name, axis]) for name in peepholes)]
    attributes = {"linear_before_reset": 1} if operator.reset_after else {}
    shown, *others = body.add_several(
        operator.kind.value, operands, operator.kind.kept + 1, hidden_size=types[4].shape[2],
        direction="reverse" if operator.reverse else "forward",
        activations=[curve.value for curve in operator.functions], **attributes,
    )  # fmt: skip
    hidden = body.add("Squeeze", [shown, body.integers([1])])
    cells = others[1:] if operator.kind is RecurrentKind.LSTM else []
    return body.add("Concat", [hidden, *cells], axis=0) if cells else hidden


def _part(body: OnnxBody, name: str, place: int) -> str:
    """[1, ...] at a place of the first axis."""
    return body.add("Slice", [name, body.integers([place]), body.integers([place + 1]), body.integers([0])])


def fixed_lstm(body: OnnxBody, operator: FixedLstm, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
    """The meaning of `FixedLstm` in 64-bit integers, step after step."""
    x, w, r, bias, memory = (body.cast(name, DType.INT64) for name in inputs)
    size, first = types[4].shape[2], body.integers([0])
    w, r = (body.add("Transpose", [name], perm=[1, 0]) for name in (w, r))
    hidden, cell = (body.add("Squeeze", [_part(body, memory, place), first]) for place in (0, 1))
    found = []
    for place in range(types[0].shape[0]):
        step = body.add("Squeeze", [_part(body, x, place), first])
        given = body.add("Add", [_products(body, step, operator.input_zero_point, w), bias])
        again = _products(body, hidden, operator.hidden_zero_point, r)
        wide = [np.repeat(np.array(four), size, axis=0) for four in (operator.input_scaling, operator.hidden_scaling)]
        total = body.add("Add", [_scaled(body, given, wide[0]), _scaled(body, again, wide[1])])
        gates = body.add_several("Split", [_limited(body, total)], 4, axis=-1, num_outputs=4)
        cell = _cell(body, operator, gates, cell)
        shown = body.add("Mul", [_sigmoid(body, gates[3]), _tanh(body, cell, operator.cell_bits)])
        hidden = _once(body, shown, operator.output_scaling, operator.hidden_zero_point, DType.INT8)
        found.append(body.add("Unsqueeze", [hidden, first]))
    whole = body.add("Concat", [*found, body.add("Unsqueeze", [cell, first])], axis=0)
    return body.cast(whole, DType.INT16)


def _cell(body: OnnxBody, operator: FixedLstm, gates: Sequence[str], cell: str) -> str:
    kept = _once(body, body.add("Mul", [_sigmoid(body, gates[1]), cell]), operator.forget_scaling)
    candidate = body.add("Mul", [_sigmoid(body, gates[0]), _tanh(body, gates[2], _GATE_BITS)])
    added = _once(body, candidate, operator.update_scaling)
    total = _limited(body, body.add("Add", [kept, added]))
    bounds = [body.scalar(sign * operator.cell_clip, DType.INT64) for sign in (-1, 1)]
    return body.add("Clip", [total, *bounds])


def _products(body: OnnxBody, x: str, zero_point: int, weights: str) -> str:
    """Sums of products, exact in float64."""
    centred = body.add("Sub", [x, body.scalar(zero_point, DType.INT64)])
    total = body.add("MatMul", [body.real64(centred), body.real64(weights)])
    return body.cast(total, DType.INT64)


def _limited(body: OnnxBody, x: str, dtype: DType = DType.INT16) -> str:
    return body.add("Clip", [x, body.scalar(dtype.low, DType.INT64), body.scalar(dtype.high, DType.INT64)])


def _scaled(
    body: OnnxBody, x: str, factors: np.ndarray[tuple[int, ...], np.dtype[np.int64]], zero_point: int = 0,
    dtype: DType = DType.INT16,
) -> str:
    parameters = [body.tensor(np.ascontiguousarray(factors[:, part], np.int32)) for part in (0, 1)]
    scaled = body.requantize(Requantize(output_zero_point=zero_point), [x, *parameters])
    return _limited(body, body.cast(scaled, DType.INT64), dtype)


def _once(body: OnnxBody, x: str, scaling: Scaling, zero_point: int = 0, dtype: DType = DType.INT16) -> str:
    return _scaled(body, x, np.array([scaling], np.int64), zero_point, dtype)


def _interpolated(body: OnnxBody, size: str, bits: int, most: int) -> str:
    """The table of sigmoids at size / 2**bits, with so many bits more; `most` where it ends."""
    unit = body.scalar(1 << bits, DType.INT64)
    place, rest = body.add("Div", [size, unit]), body.add("Mod", [size, unit])
    inside = body.add("Min", [place, body.scalar(254, DType.INT64)])
    table = body.tensor(sigmoid_table().astype(np.int64))
    below = body.add("Gather", [table, inside])
    above = body.add("Gather", [table, body.add("Add", [inside, body.scalar(1, DType.INT64)])])
    raised = body.add("Mul", [below, unit])
    inner = body.add("Add", [raised, body.add("Mul", [rest, body.add("Sub", [above, below])])])
    beyond = body.add("GreaterOrEqual", [place, body.scalar(255, DType.INT64)])
    return body.add("Where", [beyond, body.scalar(most, DType.INT64), inner])


def _sigmoid(body: OnnxBody, x: str) -> str:
    """`sigmoid16`."""
    raised = body.add("Mul", [x, body.scalar(3, DType.INT64)])
    found = _interpolated(body, body.add("Abs", [raised]), 9, 0x7FFF << 10)
    positive = body.add("Add", [found, body.scalar(1 << 9, DType.INT64)])
    negative = body.add("Sub", [body.scalar((1 << 25) + (1 << 9) - 1, DType.INT64), found])
    return _selected(body, raised, positive, negative, 10)


def _tanh(body: OnnxBody, x: str, fraction_bits: int) -> str:
    """`tanh16`."""
    right = max(fraction_bits - 12, 0)
    raised = body.add("Mul", [x, body.scalar(3 << max(12 - fraction_bits, 0), DType.INT64)])
    half = body.add("Add", [raised, body.scalar((1 << right) >> 1, DType.INT64)])
    raised = onnx_fixed_point.shift_right(body, half, body.scalar(right, DType.INT64))
    found = _interpolated(body, body.add("Abs", [raised]), 8, 0xFFFF << 8)
    positive = body.add("Add", [found, body.scalar((1 << 7) - (1 << 23), DType.INT64)])
    negative = body.add("Sub", [body.scalar((1 << 23) + (1 << 7) - 1, DType.INT64), found])
    return _selected(body, raised, positive, negative, 8)


def _selected(body: OnnxBody, sign: str, positive: str, negative: str, shift: int) -> str:
    at_least = body.add("GreaterOrEqual", [sign, body.scalar(0, DType.INT64)])
    chosen = body.add("Where", [at_least, positive, negative])
    return onnx_fixed_point.shift_right(body, chosen, body.scalar(shift, DType.INT64))
