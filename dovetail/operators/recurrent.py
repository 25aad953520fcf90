"""Recurrent layers on integers: TensorFlow Lite Micro's LSTM and the second half of its SVDF, bit for bit.

Facts from tflite-micro's micro/kernels/lstm_eval.h, lstm_eval_common.cc and svdf_common.cc, and TFLite's
kernels/internal/reference/integer_ops/{logistic,tanh}.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, Box, DType, TensorType
from dovetail.operators.arithmetic import Rounding, fixed_point
from dovetail.operators.base import Operator, require
from dovetail.operators.fixed import between_sigmoids

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody

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


def _saturated(x: Array) -> Array:
    return np.clip(x, DType.INT16.low, DType.INT16.high)


@dataclass(frozen=True)
class FixedLstm(Operator):
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
    """Of products with x, for each of the four kinds of gate: to Q3.12."""
    hidden_scaling: tuple[Scaling, ...]
    """Of products with hidden values, the same."""
    forget_scaling: Scaling
    """Of forget gate times cell: to the cell's step."""
    update_scaling: Scaling
    """Of input gate times candidate: to the cell's step."""
    output_scaling: Scaling
    """Of output gate times tanh(cell): to the hidden values' step."""
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
            gates = np.split(_saturated(_saturated(given) + _saturated(again)), 4, axis=-1)
            kept = _saturated(fixed_point(sigmoid16(gates[1]) * cell, *self.forget_scaling, Rounding.DOUBLE))
            added = fixed_point(sigmoid16(gates[0]) * tanh16(gates[2]), *self.update_scaling, Rounding.DOUBLE)
            cell = np.clip(_saturated(kept + _saturated(added)), -self.cell_clip, self.cell_clip)
            shown = sigmoid16(gates[3]) * tanh16(cell, self.cell_bits)
            scaled = fixed_point(shown, *self.output_scaling, Rounding.DOUBLE) + self.hidden_zero_point
            hidden = np.clip(scaled, DType.INT8.low, DType.INT8.high)
            found.append(hidden)
        return np.stack([*found, cell]).astype(np.int16)

    def macs(self, inputs: Sequence[TensorType]) -> int:
        x, w, r = inputs[:3]
        return x.shape[0] * x.shape[1] * (w.elements + r.elements)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        from dovetail.graph import onnx_recurrent

        return onnx_recurrent.fixed_lstm(body, self, inputs, types)


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
