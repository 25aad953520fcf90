"""Recurrent layers: ONNX's LSTM, GRU and RNN on floats, one direction of each; on integers TensorFlow Lite Micro's LSTM
and the second half of its SVDF, bit for bit.

Facts from tflite-micro's micro/kernels/lstm_eval.h, lstm_eval_common.cc and svdf_common.cc, and TFLite's
kernels/internal/reference/integer_ops/{logistic,tanh}.h.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.ir.operators.arithmetic import Rounding, fixed_point
from dovetail.ir.operators.base import Arrays, Cut, Int64Operator, Names, Operator, Types, require
from dovetail.ir.operators.fixed import between_sigmoids
from dovetail.ir.types import Array, Box, DType, Shape, TensorType

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody

_FIXED = (DType.INT8, DType.INT8, DType.INT32, DType.INT16)
"""Types of weights, recurrent weights, bias and memory of layers on integers."""
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

    def macs(self, inputs: Types) -> int:
        x, w, r = inputs[:3]
        return x.shape[0] * x.shape[1] * (w.elements + r.elements)


@dataclass(frozen=True)
class FixedLstm(RecurrentLayer, Int64Operator):
    """A layer of LSTM cells on int8 values with 16-bit gates and cells, over all steps of a sequence.

    Operands: x int8 [T, B, I], weights int8 [4H, I], recurrent weights int8 [4H, H], bias int32 [4H], memory int16
    [2, B, H]: the hidden values (of int8 range) and cells before the first step. The rows of weights belong to the
    input gates, forget gates, candidates and output gates, H of each.

    The result is int16 [T + 1, B, H]: the hidden values after each step, then the cells after the last, so that its
    last two parts are the memory that a continuing sequence begins with.
    """

    result = DType.INT16
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

    def infer(self, inputs: Types) -> TensorType:
        x, w, r, bias, memory = inputs
        require(len(x.shape) == 3 and len(memory.shape) == 3, f"expects [T, B, I] and [2, B, H], got {x} and {memory}")
        batch, hidden = memory.shape[1:]
        shapes = ((4 * hidden, x.shape[2]), (4 * hidden, hidden), (4 * hidden,), (2, x.shape[1], hidden))
        _check_types((w, r, bias, memory), shapes, _FIXED)
        require(x.dtype is DType.INT8, f"expects int8, got {x}")
        return TensorType((x.shape[0] + 1, batch, hidden), DType.INT16)

    def meaning(self, x: Any, w: Any, r: Any, bias: Any, memory: Any) -> Any:
        hidden, cell, w, r = memory[0], memory[1], w.T, r.T
        of_input, of_hidden = (_per_row(four, memory.shape[2]) for four in (self.input_scaling, self.hidden_scaling))
        found = []
        for step in range(x.shape[0]):
            given = fixed_point((x[step] - self.input_zero_point) @ w + bias, *of_input, Rounding.DOUBLE)
            again = fixed_point((hidden - self.hidden_zero_point) @ r, *of_hidden, Rounding.DOUBLE)
            gates = np.split(saturated(saturated(given) + saturated(again)), 4, axis=-1)
            kept = saturated(fixed_point(sigmoid16(gates[1]) * cell, *self.forget_scaling, Rounding.DOUBLE))
            added = fixed_point(sigmoid16(gates[0]) * tanh16(gates[2]), *self.update_scaling, Rounding.DOUBLE)
            cell = np.clip(saturated(kept + saturated(added)), -self.cell_clip, self.cell_clip)
            shown = sigmoid16(gates[3]) * tanh16(cell, self.cell_bits)
            scaled = fixed_point(shown, *self.output_scaling, Rounding.DOUBLE) + self.hidden_zero_point
            hidden = np.clip(scaled, DType.INT8.low, DType.INT8.high)
            found.append(hidden)
        return np.stack([*found, cell])


def _per_row(factors: Sequence[Scaling], size: int) -> tuple[Array, Array]:
    """Multipliers and shifts of so many rows of weights for each factor, [rows] each."""
    multiplier, shift = np.repeat(np.array(factors), size, axis=0).T
    return multiplier, shift


def _check_types(given: Types, shapes: Sequence[Shape], dtypes: Sequence[DType]) -> None:
    for kind, shape, dtype in zip(given, shapes, dtypes, strict=False):
        require(kind == TensorType(shape, dtype), f"expects {TensorType(shape, dtype)}, got {kind}")


@dataclass(frozen=True)
class RowProducts(Operator):
    """A sum of products per row. Operands: x [..., N, K], w [N, K], optional bias [N] of the result's type.

    y[..., n] = bias[n] + sum over k of (x[..., n, k] - input_zero_point) * w[n, k]: int32 modulo 2**32 of int8 and
    int16 values, or float32.
    """

    input_zero_point: int = 0

    def infer(self, inputs: Types) -> TensorType:
        x, w, *bias = inputs
        require(len(w.shape) == 2 and x.shape[-2:] == w.shape, f"expects [..., N, K] and [N, K], got {x} and {w}")
        real = x.dtype is DType.FLOAT32 and w.dtype is DType.FLOAT32
        narrow = x.dtype in (DType.INT8, DType.INT16) and w.dtype in (DType.INT8, DType.INT16)
        require(narrow or (real and not self.input_zero_point), f"expects int8, int16 or float32, got {x} and {w}")
        held = TensorType((w.shape[0],), DType.FLOAT32 if real else DType.INT32)
        for b in bias:
            require(b == held, f"expects {held}, got {b}")
        return TensorType(x.shape[:-1], held.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        real = inputs[0].dtype == np.float32
        x, w, *bias = (array.astype(np.float64 if real else np.int64) for array in inputs)
        total = ((x - self.input_zero_point) * w).sum(axis=-1)
        return np.asarray(total + bias[0] if bias else total).astype(np.float32 if real else np.int32)

    def crop(self, box: Box, inputs: Types) -> Cut:
        x, _, *bias = inputs
        depth = (0, x.shape[-1])
        return self, ((*box, depth), (box[-1], depth), *((box[-1],) for _ in bias))

    def macs(self, inputs: Types) -> int:
        return inputs[0].elements

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
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
    SOFTSIGN = "Softsign"
    HARD_SIGMOID = "HardSigmoid"
    AFFINE = "Affine"

    @property
    def is_line(self) -> bool:
        """Whether it has a slope and an offset."""
        return self in (Curve.HARD_SIGMOID, Curve.AFFINE)


Line = tuple[float, float]
"""The slope and the offset of a curve that has them."""
CURVES: dict[Curve, Callable[[Array, Line], Array]] = {
    Curve.SIGMOID: lambda x, _: np.asarray(0.5 * (1.0 + np.tanh(0.5 * x))),
    Curve.TANH: lambda x, _: np.asarray(np.tanh(x)),
    Curve.RELU: lambda x, _: np.maximum(x, 0.0),
    Curve.SOFTSIGN: lambda x, _: x / (1.0 + np.abs(x)),
    Curve.HARD_SIGMOID: lambda x, line: np.clip(x * line[0] + line[1], 0.0, 1.0),
    Curve.AFFINE: lambda x, line: x * line[0] + line[1],
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
    lines: tuple[Line, ...] = ()
    """The lines of f, g and h, where one of these has a line."""
    clip: float = 0.0
    """The largest magnitude that f and g are given; 0 for no limit. ONNX Runtime gives h the cell as it is."""
    cell_clip: float = 0.0
    """The largest magnitude of an LSTM's cell; 0 for no limit."""

    @property
    def functions(self) -> tuple[Curve, ...]:
        """f, g and h."""
        return self.curves or DEFAULT_CURVES[self.kind]

    @property
    def is_plain(self) -> bool:
        """Whether its curves are ONNX's defaults and nothing is limited."""
        return self.functions == DEFAULT_CURVES[self.kind] and not self.clip and not self.cell_clip

    def _function(self, place: int) -> Callable[[Array], Array]:
        """f, g or h on float64 arrays."""
        curve, line = CURVES[self.functions[place]], self.lines[place] if self.lines else (1.0, 0.0)
        return lambda x: curve(_limited(x, self.clip if place < 2 else 0.0), line)

    def infer(self, inputs: Types) -> TensorType:
        x, *others = inputs
        memory = others[3]
        require(len(x.shape) == 3 and len(memory.shape) == 3, f"expects [T, B, I] and [S, B, H], got {x} and {memory}")
        hidden, rows = memory.shape[2], self.kind.gates * memory.shape[2]
        shapes = [(rows, x.shape[2]), (rows, hidden), (2 * rows,), (self.kind.kept, x.shape[1], hidden), (3 * hidden,)]
        _check_types(others, shapes, [DType.FLOAT32] * len(shapes))
        require(x.dtype is DType.FLOAT32, f"expects float32, got {x}")
        require(len(self.functions) == len(DEFAULT_CURVES[self.kind]), f"{len(self.curves)} activations do not fit")
        require(not self.lines or len(self.lines) == len(self.functions), f"{len(self.lines)} lines do not fit")
        require(self.clip >= 0 and self.cell_clip >= 0, f"expects limits of at least 0, got {self.clip}")
        require(len(others) < 5 or self.kind is RecurrentKind.LSTM, "only an LSTM has peepholes")
        return TensorType((x.shape[0] + self.kind.kept - 1, x.shape[1], hidden), DType.FLOAT32)

    def evaluate(self, inputs: Arrays) -> Array:
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
        f, g, h = map(self._function, range(3))
        hidden, cell = memory
        i, o, forget, c = np.split(given + hidden @ r.T + bias, 4, axis=-1)
        of_input, of_output, of_forget = np.split(peephole, 3)
        kept = f(forget + of_forget * cell) * cell + f(i + of_input * cell) * g(c)
        kept = _limited(kept, self.cell_clip)
        return np.stack([f(o + of_output * kept) * h(kept), kept])

    def _gru(self, given: Array, memory: Array, r: Array, bias: Array, _peephole: Array) -> Array:
        f, g = map(self._function, range(2))
        (hidden,) = memory
        size = 2 * hidden.shape[-1]
        update, reset = np.split(f(given[:, :size] + hidden @ r[:size].T + bias[:size]), 2, axis=-1)
        if self.reset_after:
            again = reset * (hidden @ r[size:].T + bias[size:])
        else:
            again = (reset * hidden) @ r[size:].T + bias[size:]
        return np.stack([(1.0 - update) * g(given[:, size:] + again) + update * hidden])

    def _rnn(self, given: Array, memory: Array, r: Array, bias: Array, _peephole: Array) -> Array:
        return np.stack([self._function(0)(given + memory[0] @ r.T + bias)])

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        x, w, r, bias, memory, *peepholes = inputs
        axis = body.integers([0])
        w, r, bias, *peepholes = (body.add("Unsqueeze", [name, axis]) for name in (w, r, bias, *peepholes))
        states = [one_step(body, memory, place) for place in range(self.kind.kept)]
        if not self.cell_clip:
            shown, states = self._layer(body, [x, w, r, bias, "", *states, *peepholes], types[4].shape[2])
            return body.add("Concat", [shown, *states[1:]], axis=0) if states[1:] else shown
        found, steps = {}, range(types[0].shape[0])
        for step in reversed(steps) if self.reverse else steps:
            operands = [one_step(body, x, step), w, r, bias, "", *states, *peepholes]
            found[step], (_, cell) = self._layer(body, operands, types[4].shape[2])
            limits = (body.scalar(bound, DType.FLOAT32) for bound in (-self.cell_clip, self.cell_clip))
            states = [found[step], body.add("Clip", [cell, *limits])]
        return body.add("Concat", [*(found[step] for step in steps), states[1]], axis=0)

    def _layer(self, body: OnnxBody, operands: Sequence[str], hidden: int) -> tuple[str, list[str]]:
        """ONNX's own operator: the hidden values [T, B, H], and those and cells after the last step, [1, B, H] each."""
        lines = [line for curve, line in zip(self.functions, self.lines, strict=False) if curve.is_line]
        attributes: dict[str, Any] = {"linear_before_reset": 1} if self.reset_after else {}
        attributes |= {"clip": self.clip} if self.clip else {}
        alphas, betas = ([line[place] for line in lines] for place in (0, 1))
        attributes |= {"activation_alpha": alphas, "activation_beta": betas} if lines else {}
        shown, *states = body.add_several(
            self.kind.value,
            operands,
            self.kind.kept + 1,
            hidden_size=hidden,
            direction="reverse" if self.reverse else "forward",
            activations=[curve.value for curve in self.functions],
            **attributes,
        )
        return body.add("Squeeze", [shown, body.integers([1])]), states


def _limited(x: Array, most: float) -> Array:
    return np.clip(x, -most, most) if most else x


@dataclass(frozen=True)
class FixedRecurrent(RecurrentLayer, Int64Operator):
    """A GRU or a plain recurrent layer (tanh) over all steps of a sequence, forward.

    Operands: x int8 or int16 [T, B, I], weights int8 [G*H, I], recurrent weights int8 [G*H, H], bias int32 [2*G*H] (in
    units of the products with x, then of those with hidden values), memory int16 [1, B, H]. The rows of weights are
    those of `Recurrent`. The result is int16 [T, B, H]: the hidden values after each step.

    Hidden values, gates and candidates are Q0.15, what they are made of Q3.12. Sums of products are scaled as TFLite
    Micro scales those of an LSTM; a product of two Q0.15 is rounded once, halves up.
    """

    result = DType.INT16
    kind: RecurrentKind
    input_zero_point: int
    input_scaling: tuple[Scaling, ...]
    """Factors of products with x, for each kind of gate: to Q3.12."""
    hidden_scaling: tuple[Scaling, ...]
    """Factors of products with hidden values, the same."""
    reset_after: bool = False
    """A GRU's linear_before_reset: the reset gate multiplies products, not hidden values."""

    def infer(self, inputs: Types) -> TensorType:
        x, w, r, bias, memory = inputs
        require(len(x.shape) == 3 and len(memory.shape) == 3, f"expects [T, B, I] and [1, B, H], got {x} and {memory}")
        hidden, rows = memory.shape[2], self.kind.gates * memory.shape[2]
        shapes = ((rows, x.shape[2]), (rows, hidden), (2 * rows,), (1, x.shape[1], hidden))
        _check_types((w, r, bias, memory), shapes, _FIXED)
        known = x.dtype in (DType.INT8, DType.INT16) and self.kind is not RecurrentKind.LSTM
        require(known, f"expects int8 or int16, got {x}")
        require(self.kind.gates == len(self.input_scaling) == len(self.hidden_scaling), "a factor for each gate")
        return TensorType((x.shape[0], *memory.shape[1:]), DType.INT16)

    def meaning(self, x: Any, w: Any, r: Any, bias: Any, memory: Any) -> Any:
        hidden, size, w = memory[0], memory.shape[2], w.T
        of_x, of_hidden = (_per_row(four, size) for four in (self.input_scaling, self.hidden_scaling))
        with_x, with_hidden = np.split(bias, 2, axis=0)

        def again(values: Any, rows: slice) -> Any:
            sums = values @ r[rows].T + with_hidden[rows]
            return saturated(fixed_point(sums, of_hidden[0][rows], of_hidden[1][rows], Rounding.DOUBLE))

        found = []
        for step in range(x.shape[0]):
            sums = (x[step] - self.input_zero_point) @ w + with_x
            given = saturated(fixed_point(sums, *of_x, Rounding.DOUBLE))
            if self.kind is RecurrentKind.RNN:
                hidden = tanh16(saturated(given + again(hidden, slice(None))))
            else:
                gates, last = slice(0, 2 * size), slice(2 * size, None)
                both = sigmoid16(saturated(given[:, gates] + again(hidden, gates)))
                update, reset = np.split(both, 2, axis=-1)
                inner = (
                    _product(reset, again(hidden, last)) if self.reset_after else again(_product(reset, hidden), last)
                )
                fresh = tanh16(saturated(given[:, last] + inner))
                hidden = ((32768 - update) * fresh + update * hidden + (1 << 14)) >> 15
            found.append(hidden)
        return np.stack(found)


def _product(a: Any, b: Any) -> Any:
    """Product of a Q0.15 and another number of 16 bits, in the other's units."""
    return (a * b + (1 << 14)) >> 15
