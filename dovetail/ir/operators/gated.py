"""GRU and plain recurrent layers on integers: int8 operands and weights, 16-bit gates and hidden values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.ir.operators.arithmetic import Rounding, fixed_point
from dovetail.ir.operators.base import require
from dovetail.ir.operators.recurrent import (
    RecurrentKind,
    RecurrentLayer,
    Scaling,
    limited,
    one_step,
    products,
    saturated,
    scaled,
    sigmoid16,
    sigmoid_nodes,
    tanh16,
    tanh_nodes,
)
from dovetail.ir.types import Array, DType, TensorType

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody


@dataclass(frozen=True)
class FixedRecurrent(RecurrentLayer):
    """A GRU or a plain recurrent layer (tanh) over all steps of a sequence, forward.

    Operands: x int8 or int16 [T, B, I], weights int8 [G*H, I], recurrent weights int8 [G*H, H], bias int32 [2*G*H] (in
    units of the products with x, then of those with hidden values), memory int16 [1, B, H]. The rows of weights are
    those of `Recurrent`. The result is int16 [T, B, H]: the hidden values after each step.

    Hidden values, gates and candidates are Q0.15, what they are made of Q3.12. Sums of products are scaled as TFLite
    Micro scales those of an LSTM; a product of two Q0.15 is rounded once, halves up.
    """

    kind: RecurrentKind
    input_zero_point: int
    input_scaling: tuple[Scaling, ...]
    """Factors of products with x, for each kind of gate: to Q3.12."""
    hidden_scaling: tuple[Scaling, ...]
    """Factors of products with hidden values, the same."""
    reset_after: bool = False
    """A GRU's linear_before_reset: the reset gate multiplies products, not hidden values."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, w, r, bias, memory = inputs
        require(len(x.shape) == 3 and len(memory.shape) == 3, f"expects [T, B, I] and [1, B, H], got {x} and {memory}")
        hidden, rows = memory.shape[2], self.kind.gates * memory.shape[2]
        shapes = ((rows, x.shape[2]), (rows, hidden), (2 * rows,), (1, x.shape[1], hidden))
        kinds = (DType.INT8, DType.INT8, DType.INT32, DType.INT16)
        for kind, shape, dtype in zip((w, r, bias, memory), shapes, kinds, strict=True):
            require(kind == TensorType(shape, dtype), f"expects {TensorType(shape, dtype)}, got {kind}")
        known = x.dtype in (DType.INT8, DType.INT16) and self.kind is not RecurrentKind.LSTM
        require(known, f"expects int8 or int16, got {x}")
        require(self.kind.gates == len(self.input_scaling) == len(self.hidden_scaling), "a factor for each gate")
        return TensorType((x.shape[0], *memory.shape[1:]), DType.INT16)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, w, r, bias, memory = (array.astype(np.int64) for array in inputs)
        hidden, size = memory[0], memory.shape[2]
        of_x, of_hidden = (np.repeat(four, size, axis=0).T for four in (self.input_scaling, self.hidden_scaling))
        with_x, with_hidden = np.split(bias, 2)

        def again(values: Array, rows: slice) -> Array:
            sums = values @ r[rows].T + with_hidden[rows]
            return saturated(fixed_point(sums, of_hidden[0][rows], of_hidden[1][rows], Rounding.DOUBLE))

        found = []
        for step in x:
            sums = (step - self.input_zero_point) @ w.T + with_x
            given = saturated(fixed_point(sums, of_x[0], of_x[1], Rounding.DOUBLE))
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
        return np.stack(found).astype(np.int16)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        x, w, r, bias, memory = (body.cast(name, DType.INT64) for name in inputs)
        size, first, gates = types[4].shape[2], body.integers([0]), self.kind.gates
        w, r = (body.add("Transpose", [name], perm=[1, 0]) for name in (w, r))
        of_x, of_hidden = (np.repeat(np.array(f), size, axis=0) for f in (self.input_scaling, self.hidden_scaling))
        with_x, with_hidden = body.add_several("Split", [bias], 2, axis=0, num_outputs=2)
        hidden = body.add("Squeeze", [one_step(body, memory, 0), first])
        found = []
        for place in range(types[0].shape[0]):
            step = body.add("Squeeze", [one_step(body, x, place), first])
            given = scaled(body, body.add("Add", [products(body, step, self.input_zero_point, w), with_x]), of_x)
            again = scaled(body, body.add("Add", [products(body, hidden, 0, r), with_hidden]), of_hidden)
            if self.kind is RecurrentKind.RNN:
                hidden = tanh_nodes(body, limited(body, body.add("Add", [given, again])), 12)
            else:
                parts = [
                    body.add_several("Split", [name], gates, axis=-1, num_outputs=gates) for name in (given, again)
                ]
                sums = [limited(body, body.add("Add", list(pair))) for pair in zip(*parts, strict=True)][:2]
                update, reset = (sigmoid_nodes(body, total) for total in sums)
                if self.reset_after:
                    inner = _product_nodes(body, reset, parts[1][2])
                else:
                    _, _, rows = body.add_several("Split", [r], 3, axis=-1, num_outputs=3)
                    _, _, last = body.add_several("Split", [with_hidden], 3, axis=0, num_outputs=3)
                    sums_again = products(body, _product_nodes(body, reset, hidden), 0, rows)
                    inner = scaled(body, body.add("Add", [sums_again, last]), of_hidden[2 * size :])
                fresh = tanh_nodes(body, limited(body, body.add("Add", [parts[0][2], inner])), 12)
                share = body.add("Mul", [body.add("Sub", [body.number(32768), update]), fresh])
                whole = body.add("Add", [share, body.add("Mul", [update, hidden])])
                hidden = body.shift_right(body.add("Add", [whole, body.number(1 << 14)]), body.number(15))
            found.append(body.add("Unsqueeze", [hidden, first]))
        return body.cast(body.add("Concat", found, axis=0), DType.INT16)


def _product(a: Array, b: Array) -> Array:
    """Product of a Q0.15 and another number of 16 bits, in the other's units."""
    result: Array = (a * b + (1 << 14)) >> 15
    return result


def _product_nodes(body: OnnxBody, a: str, b: str) -> str:
    return body.shift_right(body.add("Add", [body.add("Mul", [a, b]), body.number(1 << 14)]), body.number(15))
