"""Recurrent layers on floats: ONNX's LSTM, GRU and RNN, one direction of each."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.base import Operator, require

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


class RecurrentKind(enum.Enum):
    """What a cell computes."""

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
class Recurrent(Operator):
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

    def macs(self, inputs: Sequence[TensorType]) -> int:
        x, w, r = inputs[:3]
        return x.shape[0] * x.shape[1] * (w.elements + r.elements)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        from dovetail.graph import onnx_recurrent

        return onnx_recurrent.recurrent(body, self, inputs, types)
