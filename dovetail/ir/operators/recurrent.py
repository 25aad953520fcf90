"""Recurrent layers: ONNX's LSTM, GRU and RNN on floats, one direction of each; on integers TensorFlow Lite Micro's LSTM
and the second half of its SVDF, bit for bit.

Facts from tflite-micro's micro/kernels/lstm_eval.h, lstm_eval_common.cc and svdf_common.cc, and TFLite's
kernels/internal/reference/integer_ops/{logistic,tanh}.h.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.ir.operators.arithmetic import Requantize, Rounding, fixed_point
from dovetail.ir.operators.base import Operator, require
from dovetail.ir.operators.fixed import between_sigmoids, sigmoid_table
from dovetail.ir.types import Array, Box, DType, TensorType

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody

Scaling = tuple[int, int]
"""A factor as a Q0.31 multiplier and a power of two (see `fixed_point`)."""


def sigmoid16(x: Array) -> Array:
    """1 / (1 + exp(-x)) in Q0.15 for Q3.12 x, int64."""
    return between_sigmoids(x * 3, tangent=False)


def tanh16(x: Array, fraction_bits: int = 12) -> Array:
    """The hyperbolic tangent in Q0.15 for x with so many fraction bits, int64."""
    right = max(fraction_bits - 12, 0)
    raised = (x * 3 << max(12 - fraction_bits, 0)) + ((1 << right) >> 1) >> right
    return between_sigmoids(raised, tangent=True)


def saturated(x: Array) -> Array:
    """Limited to int16."""
    return np.clip(x, DType.INT16.low, DType.INT16.high)


class RecurrentLayer(Operator):
    """A recurrent layer: x [T, B, I], weights and recurrent weights come first."""

    def macs(self, inputs: Sequence[TensorType]) -> int:
        x, w, r = inputs[:3]
        return x.shape[0] * x.shape[1] * (w.elements + r.elements)


@dataclass(frozen=True)
class FixedLstm(RecurrentLayer):
    """A layer of LSTM cells on int8 values with 16-bit gates and cells, over all steps of a sequence.

    Operands: x int8 [T, B, I], weights int8 [4H, I], recurrent weights int8 [4H, H], bias int32 [4H], memory int16
    [2, B, H]: the hidden values (of int8 range) and cells before the first step. The rows of weights belong to the
    input gates, forget gates, candidates and output gates, H of each.

    The result is int16 [T + 1, B, H]: the hidden values after each step, then the cells after the last, so that its
    last two parts are the memory that a continuing sequence begins with.
    """

    input_zero_point: int
    hidden_zero_point: int
    input_scaling: tuple[Scaling, ...]
    """Factors of products with x, for each of the four kinds of gate: to Q3.12."""
    hidden_scaling: tuple[Scaling, ...]
    """Factors of products with hidden values, the same."""
    forget_scaling: Scaling
    """Factor of forget gate times cell: to the cell's step."""
    update_scaling: Scaling
    """Factor of input gate times candidate: to the cell's step."""
    output_scaling: Scaling
    """Factor of output gate times tanh(cell): to the hidden values' step."""
    cell_bits: int
    """Fraction bits of the cell: its step is 2**-cell_bits."""
    cell_clip: int = 1 << 15
    """Largest magnitude of a cell; beyond 32767 there is no limit but the type's."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, w, r, bias, memory = inputs
        require(len(x.shape) == 3 and len(memory.shape) == 3, f"expects [T, B, I] and [2, B, H], got {x} and {memory}")
        batch, hidden = memory.shape[1:]
        shapes = ((4 * hidden, x.shape[2]), (4 * hidden, hidden), (4 * hidden,), (2, x.shape[1], hidden))
        kinds = (DType.INT8, DType.INT8, DType.INT32, DType.INT16)
        for kind, shape, dtype in zip((w, r, bias, memory), shapes, kinds, strict=True):
            require(kind == TensorType(shape, dtype), f"expects {TensorType(shape, dtype)}, got {kind}")
        require(x.dtype is DType.INT8, f"expects int8, got {x}")
        return TensorType((x.shape[0] + 1, batch, hidden), DType.INT16)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, w, r, bias, memory = (array.astype(np.int64) for array in inputs)
        hidden, cell = memory
        count = hidden.shape[-1]
        of_input, of_hidden = (np.repeat(four, count, axis=0).T for four in (self.input_scaling, self.hidden_scaling))
        found = []
        for step in x:
            given = fixed_point((step - self.input_zero_point) @ w.T + bias, of_input[0], of_input[1], Rounding.DOUBLE)
            sums = (hidden - self.hidden_zero_point) @ r.T
            again = fixed_point(sums, of_hidden[0], of_hidden[1], Rounding.DOUBLE)
            gates = np.split(saturated(saturated(given) + saturated(again)), 4, axis=-1)
            kept = saturated(fixed_point(sigmoid16(gates[1]) * cell, *self.forget_scaling, Rounding.DOUBLE))
            added = fixed_point(sigmoid16(gates[0]) * tanh16(gates[2]), *self.update_scaling, Rounding.DOUBLE)
            cell = np.clip(saturated(kept + saturated(added)), -self.cell_clip, self.cell_clip)
            shown = sigmoid16(gates[3]) * tanh16(cell, self.cell_bits)
            scaled = fixed_point(shown, *self.output_scaling, Rounding.DOUBLE) + self.hidden_zero_point
            hidden = np.clip(scaled, DType.INT8.low, DType.INT8.high)
            found.append(hidden)
        return np.stack([*found, cell]).astype(np.int16)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        x, w, r, bias, memory = (body.cast(name, DType.INT64) for name in inputs)
        size, first = types[4].shape[2], body.integers([0])
        w, r = (body.add("Transpose", [name], perm=[1, 0]) for name in (w, r))
        hidden, cell = (body.add("Squeeze", [one_step(body, memory, place), first]) for place in (0, 1))
        found = []
        for place in range(types[0].shape[0]):
            step = body.add("Squeeze", [one_step(body, x, place), first])
            given = body.add("Add", [products(body, step, self.input_zero_point, w), bias])
            again = products(body, hidden, self.hidden_zero_point, r)
            wide = [np.repeat(np.array(four), size, axis=0) for four in (self.input_scaling, self.hidden_scaling)]
            total = body.add("Add", [scaled(body, given, wide[0]), scaled(body, again, wide[1])])
            gates = body.add_several("Split", [limited(body, total)], 4, axis=-1, num_outputs=4)
            cell = _cell(body, self, gates, cell)
            shown = body.add("Mul", [sigmoid_nodes(body, gates[3]), tanh_nodes(body, cell, self.cell_bits)])
            hidden = _once(body, shown, self.output_scaling, self.hidden_zero_point, DType.INT8)
            found.append(body.add("Unsqueeze", [hidden, first]))
        whole = body.add("Concat", [*found, body.add("Unsqueeze", [cell, first])], axis=0)
        return body.cast(whole, DType.INT16)


def _cell(body: OnnxBody, operator: FixedLstm, gates: Sequence[str], cell: str) -> str:
    kept = _once(body, body.add("Mul", [sigmoid_nodes(body, gates[1]), cell]), operator.forget_scaling)
    candidate = body.add("Mul", [sigmoid_nodes(body, gates[0]), tanh_nodes(body, gates[2], 12)])
    added = _once(body, candidate, operator.update_scaling)
    total = limited(body, body.add("Add", [kept, added]))
    return body.limited(total, -operator.cell_clip, operator.cell_clip)


def products(body: OnnxBody, x: str, zero_point: int, weights: str) -> str:
    """Sums of products, exact in float64."""
    centred = body.add("Sub", [x, body.number(zero_point)])
    total = body.add("MatMul", [body.real64(centred), body.real64(weights)])
    return body.cast(total, DType.INT64)


def limited(body: OnnxBody, x: str, dtype: DType = DType.INT16) -> str:
    """Limited to a type, as nodes."""
    return body.limited(x, dtype.low, dtype.high)


def scaled(body: OnnxBody, x: str, factors: Array, zero_point: int = 0, dtype: DType = DType.INT16) -> str:
    """Sums times factors [N, 2] (multiplier and shift), limited to a type, as nodes."""
    parameters = [body.tensor(np.ascontiguousarray(factors[:, part], np.int32)) for part in (0, 1)]
    scaled = Requantize(output_zero_point=zero_point).onnx(body, [x, *parameters], ())
    return limited(body, body.cast(scaled, DType.INT64), dtype)


def _once(body: OnnxBody, x: str, scaling: Scaling, zero_point: int = 0, dtype: DType = DType.INT16) -> str:
    return scaled(body, x, np.array([scaling], np.int64), zero_point, dtype)


def _interpolated(body: OnnxBody, size: str, bits: int, most: int) -> str:
    """The table of sigmoids at size / 2**bits, with so many bits more; `most` where it ends."""
    unit = body.number(1 << bits)
    place, rest = body.add("Div", [size, unit]), body.add("Mod", [size, unit])
    inside = body.add("Min", [place, body.number(254)])
    table = body.tensor(sigmoid_table().astype(np.int64))
    below = body.add("Gather", [table, inside])
    above = body.add("Gather", [table, body.add("Add", [inside, body.number(1)])])
    raised = body.add("Mul", [below, unit])
    inner = body.add("Add", [raised, body.add("Mul", [rest, body.add("Sub", [above, below])])])
    beyond = body.add("GreaterOrEqual", [place, body.number(255)])
    return body.add("Where", [beyond, body.number(most), inner])


def sigmoid_nodes(body: OnnxBody, x: str) -> str:
    """`sigmoid16`."""
    raised = body.add("Mul", [x, body.number(3)])
    found = _interpolated(body, body.add("Abs", [raised]), 9, 0x7FFF << 10)
    positive = body.add("Add", [found, body.number(1 << 9)])
    negative = body.add("Sub", [body.number((1 << 25) + (1 << 9) - 1), found])
    return _selected(body, raised, positive, negative, 10)


def tanh_nodes(body: OnnxBody, x: str, fraction_bits: int) -> str:
    """`tanh16`."""
    right = max(fraction_bits - 12, 0)
    raised = body.add("Mul", [x, body.number(3 << max(12 - fraction_bits, 0))])
    half = body.add("Add", [raised, body.number((1 << right) >> 1)])
    raised = body.shift_right(half, body.number(right))
    found = _interpolated(body, body.add("Abs", [raised]), 8, 0xFFFF << 8)
    positive = body.add("Add", [found, body.number((1 << 7) - (1 << 23))])
    negative = body.add("Sub", [body.number((1 << 23) + (1 << 7) - 1), found])
    return _selected(body, raised, positive, negative, 8)


def _selected(body: OnnxBody, sign: str, positive: str, negative: str, shift: int) -> str:
    at_least = body.add("GreaterOrEqual", [sign, body.number(0)])
    chosen = body.add("Where", [at_least, positive, negative])
    return body.shift_right(chosen, body.number(shift))


@dataclass(frozen=True)
class RowProducts(Operator):
    """A sum of products per row. Operands: x [..., N, K], w [N, K], optional bias [N] of the result's type.

    y[..., n] = bias[n] + sum over k of (x[..., n, k] - input_zero_point) * w[n, k]: int32 modulo 2**32 of int8 and
    int16 values, or float32.
    """

    input_zero_point: int = 0

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, w, *bias = inputs
        require(len(w.shape) == 2 and x.shape[-2:] == w.shape, f"expects [..., N, K] and [N, K], got {x} and {w}")
        real = x.dtype is DType.FLOAT32 and w.dtype is DType.FLOAT32
        narrow = x.dtype in (DType.INT8, DType.INT16) and w.dtype in (DType.INT8, DType.INT16)
        require(narrow or (real and not self.input_zero_point), f"expects int8, int16 or float32, got {x} and {w}")
        held = TensorType((w.shape[0],), DType.FLOAT32 if real else DType.INT32)
        for b in bias:
            require(b == held, f"expects {held}, got {b}")
        return TensorType(x.shape[:-1], held.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        real = inputs[0].dtype == np.float32
        x, w, *bias = (array.astype(np.float64 if real else np.int64) for array in inputs)
        total = ((x - self.input_zero_point) * w).sum(axis=-1)
        return np.asarray(total + bias[0] if bias else total).astype(np.float32 if real else np.int32)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        x, _, *bias = inputs
        depth = (0, x.shape[-1])
        return self, ((*box, depth), (box[-1], depth), *((box[-1],) for _ in bias))

    def macs(self, inputs: Sequence[TensorType]) -> int:
        return inputs[0].elements

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        kind = self.infer(types).dtype
        wide = DType.FLOAT32 if kind is DType.FLOAT32 else DType.INT64
        x, w, *bias = (body.cast(name, wide) for name in inputs)
        centred = body.add("Sub", [x, body.scalar(self.input_zero_point, wide)])
        total = body.add("ReduceSum", [body.add("Mul", [centred, w]), body.integers([-1])], keepdims=0)
        total = body.add("Add", [total, *bias]) if bias else total
        return body.cast(total, kind)


def one_step(body: OnnxBody, name: str, place: int) -> str:
    """[1, ...] at a place of the first axis."""
    return body.add("Slice", [name, body.integers([place]), body.integers([place + 1]), body.integers([0])])


class RecurrentKind(enum.Enum):
    """Kind of a cell."""

    LSTM = "LSTM"
    GRU = "GRU"
    RNN = "RNN"

    @property
    def gates(self) -> int:
        """Rows of weights per hidden value."""
        return {RecurrentKind.LSTM: 4, RecurrentKind.GRU: 3, RecurrentKind.RNN: 1}[self]

    @property
    def kept(self) -> int:
        """Values kept per hidden value: an LSTM has a cell beside."""
        return 2 if self is RecurrentKind.LSTM else 1


class Curve(enum.Enum):
    """An activation of a gate or of a hidden value."""

    SIGMOID = "Sigmoid"
    TANH = "Tanh"
    RELU = "Relu"


CURVES: dict[Curve, Callable[[Array], Array]] = {
    Curve.SIGMOID: lambda x: np.asarray(0.5 * (1.0 + np.tanh(0.5 * x))),
    Curve.TANH: lambda x: np.asarray(np.tanh(x)),
    Curve.RELU: lambda x: np.maximum(x, 0.0),
}
"""Each curve on float64 arrays."""

DEFAULT_CURVES = {
    RecurrentKind.LSTM: (Curve.SIGMOID, Curve.TANH, Curve.TANH),
    RecurrentKind.GRU: (Curve.SIGMOID, Curve.TANH),
    RecurrentKind.RNN: (Curve.TANH,),
}
"""ONNX's f, g and h of each kind."""


@dataclass(frozen=True)
class Recurrent(RecurrentLayer):
    """A recurrent layer over all steps of a sequence, computed in float64 and rounded to float32.

    Operands, all float32: x [T, B, I], weights [G*H, I], recurrent weights [G*H, H], bias [2*G*H] (of both, in that
    order), memory [S, B, H] (hidden values, an LSTM's cells) before the first step, optional peepholes [3*H]. Gates
    stand in ONNX's order: input, output, forget, candidate of an LSTM; update, reset, candidate of a GRU.

    The result is [T + S - 1, B, H]: the hidden values after each step, at the step's place in x, then an LSTM's cells.
    """

    kind: RecurrentKind
    reverse: bool = False
    """True where the last step comes first."""
    reset_after: bool = False
    """A GRU's linear_before_reset: the reset gate multiplies products, not hidden values."""
    curves: tuple[Curve, ...] = ()
    """f, g and h; ONNX's defaults when empty."""

    @property
    def functions(self) -> tuple[Curve, ...]:
        """f, g and h."""
        return self.curves or DEFAULT_CURVES[self.kind]

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, *others = inputs
        memory = others[3]
        require(len(x.shape) == 3 and len(memory.shape) == 3, f"expects [T, B, I] and [S, B, H], got {x} and {memory}")
        hidden, rows = memory.shape[2], self.kind.gates * memory.shape[2]
        shapes = [(rows, x.shape[2]), (rows, hidden), (2 * rows,), (self.kind.kept, x.shape[1], hidden), (3 * hidden,)]
        for kind, shape in zip(others, shapes[: len(others)], strict=True):
            require(kind == TensorType(shape, DType.FLOAT32), f"expects {TensorType(shape, DType.FLOAT32)}, got {kind}")
        require(x.dtype is DType.FLOAT32, f"expects float32, got {x}")
        require(len(self.functions) == len(DEFAULT_CURVES[self.kind]), f"{len(self.curves)} activations do not fit")
        require(len(others) < 5 or self.kind is RecurrentKind.LSTM, "only an LSTM has peepholes")
        return TensorType((x.shape[0] + self.kind.kept - 1, x.shape[1], hidden), DType.FLOAT32)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, w, r, bias, memory, *peepholes = (array.astype(np.float64) for array in inputs)
        step = {RecurrentKind.LSTM: self._lstm, RecurrentKind.GRU: self._gru, RecurrentKind.RNN: self._rnn}[self.kind]
        size = len(bias) // 2
        peephole = peepholes[0] if peepholes else np.zeros(3 * memory.shape[2])
        found = np.zeros((x.shape[0], *memory.shape[1:]))
        for place in reversed(range(len(x))) if self.reverse else range(len(x)):
            memory = step(x[place] @ w.T + bias[:size], memory, r, bias[size:], peephole)
            found[place] = memory[0]
        return np.concatenate([found, memory[1:]]).astype(np.float32)

    def _lstm(self, given: Array, memory: Array, r: Array, bias: Array, peephole: Array) -> Array:
        f, g, h = (CURVES[curve] for curve in self.functions)
        hidden, cell = memory
        i, o, forget, c = np.split(given + hidden @ r.T + bias, 4, axis=-1)
        of_input, of_output, of_forget = np.split(peephole, 3)
        kept = f(forget + of_forget * cell) * cell + f(i + of_input * cell) * g(c)
        return np.stack([f(o + of_output * kept) * h(kept), kept])

    def _gru(self, given: Array, memory: Array, r: Array, bias: Array, _peephole: Array) -> Array:
        f, g = (CURVES[curve] for curve in self.functions)
        (hidden,) = memory
        size = 2 * hidden.shape[-1]
        update, reset = np.split(f(given[:, :size] + hidden @ r[:size].T + bias[:size]), 2, axis=-1)
        if self.reset_after:
            again = reset * (hidden @ r[size:].T + bias[size:])
        else:
            again = (reset * hidden) @ r[size:].T + bias[size:]
        return np.stack([(1.0 - update) * g(given[:, size:] + again) + update * hidden])

    def _rnn(self, given: Array, memory: Array, r: Array, bias: Array, _peephole: Array) -> Array:
        return np.stack([CURVES[self.functions[0]](given + memory[0] @ r.T + bias)])

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        x, w, r, bias, memory, *peepholes = inputs
        axis = body.integers([0])
        w, r, bias = (body.add("Unsqueeze", [name, axis]) for name in (w, r, bias))
        states = [one_step(body, memory, place) for place in range(self.kind.kept)]
        operands = [x, w, r, bias, "", *states, *(body.add("Unsqueeze", [name, axis]) for name in peepholes)]
        attributes = {"linear_before_reset": 1} if self.reset_after else {}
        shown, *others = body.add_several(
            self.kind.value,
            operands,
            self.kind.kept + 1,
            hidden_size=types[4].shape[2],
            direction="reverse" if self.reverse else "forward",
            activations=[curve.value for curve in self.functions],
            **attributes,
        )
        hidden = body.add("Squeeze", [shown, body.integers([1])])
        cells = others[1:] if self.kind is RecurrentKind.LSTM else []
        return body.add("Concat", [hidden, *cells], axis=0) if cells else hidden
