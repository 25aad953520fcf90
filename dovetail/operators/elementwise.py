"""Operators of two values with broadcasting, in the values' own type."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, Box, DType, TensorType
from dovetail.operators.arithmetic import broadcast_box
from dovetail.operators.base import Operator, one_for_all, require

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


class BinaryKind(enum.Enum):
    """Functions of two values. Integer results are taken modulo 2**bits."""

    ADD = "Add"
    SUBTRACT = "Sub"
    MULTIPLY = "Mul"
    DIVIDE = "Div"
    """Of integers: rounded towards zero; 0 where the divisor is 0."""
    MINIMUM = "Min"
    MAXIMUM = "Max"
    PRELU = "PRelu"
    """a where a >= 0, else a * b: float32 only."""
    SQUARED_DIFFERENCE = "SquaredDifference"
    """(a - b)**2"""
    POWER = "Pow"
    """a**b; of integers rounded towards zero where b is negative, 0 where a is 0 then."""
    MODULO = "Mod"
    """a - floor(a / b) * b: the sign is the divisor's; of integers 0 where the divisor is 0."""


def _divide(a: Array, b: Array) -> Array:
    if a.dtype == np.float32:
        return np.asarray(a / b)
    size = np.abs(a.astype(object)) // np.where(b == 0, 1, np.abs(b.astype(object)))
    sign = np.where((a < 0) != (b < 0), -1, 1)
    exact = np.where(b == 0, 0, size * sign)
    bits = a.dtype.itemsize * 8
    wrapped = np.asarray(exact % (1 << bits), dtype=object)
    return wrapped.astype(f"uint{bits}").astype(a.dtype)


def _real_modulo(a: Array, b: Array) -> Array:
    endless = np.where((a == 0) | ((a < 0) == (b < 0)), a, b)
    return np.where(np.isinf(b) & np.isfinite(a), endless, a - np.floor(a / b) * b)


def _power(a: Array, b: Array) -> Array:
    whole = np.power(a, np.maximum(b, 0))
    inverse = np.where(a == 1, 1, np.where(a + 1 == 0, np.where(b % 2 == 0, 1, -1), 0))
    return np.where(b < 0, inverse.astype(a.dtype), whole)


_FUNCTIONS: dict[BinaryKind, Callable[[Array, Array], Array]] = {
    BinaryKind.ADD: np.add,
    BinaryKind.SUBTRACT: np.subtract,
    BinaryKind.MULTIPLY: np.multiply,
    BinaryKind.DIVIDE: _divide,
    BinaryKind.MINIMUM: np.minimum,
    BinaryKind.MAXIMUM: np.maximum,
    BinaryKind.PRELU: lambda a, b: np.where(a >= 0, a, a * b),
    BinaryKind.SQUARED_DIFFERENCE: lambda a, b: (a - b) * (a - b),
    BinaryKind.POWER: lambda a, b: np.power(a.astype(np.float64), b) if a.dtype == np.float32 else _power(a, b),
    BinaryKind.MODULO: lambda a, b: _real_modulo(a, b) if a.dtype == np.float32 else np.mod(a, b),
}


@dataclass(frozen=True)
class Binary(Operator):
    """A function of two operands of one type, float32 or integers of at least 8 bits, with broadcasting.

    MINIMUM and MAXIMUM are "and" and "or" of bool. Rounded once, in the operands' type. `Add` is the addition the
    quantize stage knows.
    """

    kind: BinaryKind

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        a, b = inputs
        real = a.dtype is DType.FLOAT32
        logic = a.dtype is DType.BOOL and self.kind in (BinaryKind.MINIMUM, BinaryKind.MAXIMUM)
        fits = real or logic or (a.dtype.is_integer and a.dtype.bits >= 8 and self.kind is not BinaryKind.PRELU)
        require(a.dtype is b.dtype and fits, f"{self.kind.value} of {a} and {b} is not supported")
        try:
            shape = tuple(int(size) for size in np.broadcast_shapes(a.shape, b.shape))
        except ValueError:
            raise ValueError(f"{a} and {b} cannot be broadcast to one shape") from None
        return TensorType(shape, a.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        with np.errstate(all="ignore"):  # division by zero is infinite or NaN, as in C
            return np.asarray(_FUNCTIONS[self.kind](inputs[0], inputs[1]), dtype=inputs[0].dtype)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, tuple(broadcast_box(box, kind.shape) for kind in inputs)

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return one_for_all(inputs)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        kind = types[0].dtype
        if self.kind is BinaryKind.PRELU:  # ONNX broadcasts the slope to the operand only
            zero = body.scalar(0, DType.FLOAT32)
            falling = body.add("Mul", [body.add("Min", [inputs[0], zero]), inputs[1]])
            return body.add("Add", [body.add("Max", [inputs[0], zero]), falling])
        if self.kind is BinaryKind.SQUARED_DIFFERENCE:
            difference = Binary(BinaryKind.SUBTRACT).onnx(body, inputs, types)
            return Binary(BinaryKind.MULTIPLY).onnx(body, [difference] * 2, types)
        if self.kind is BinaryKind.MODULO and kind is DType.FLOAT32:
            whole = body.add("Floor", [body.add("Div", list(inputs))])
            return body.add("Sub", [inputs[0], body.add("Mul", [whole, inputs[1]])])
        if kind is DType.FLOAT32 or kind.bits >= 32:
            return body.add(self.kind.value, list(inputs))
        # ONNX Runtime computes no narrow integers; wide ones give the same after the cast, which wraps.
        wide = [body.cast(name, DType.INT32) for name in inputs]
        return body.cast(body.add(self.kind.value, wide), kind)
