"""Operators of several values with broadcasting: arithmetic, comparison, choice; and conversion of element types."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.documented import document
from dovetail.ir.operators.base import Arrays, Known, Names, Pointwise, T, Types, broadcast_shape, require
from dovetail.ir.types import Array, DType, TensorType

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody


class BinaryKind(enum.Enum):
    """Functions of two values. Integer results are taken modulo 2**bits."""

    ADD = "Add"
    SUBTRACT = "Sub"
    MULTIPLY = "Mul"
    DIVIDE = "Div"
    """Division; of integers rounded towards zero, and 0 if the divisor is 0."""
    MINIMUM = "Min"
    MAXIMUM = "Max"
    PRELU = "PRelu"
    """Parametric ReLU: a for a >= 0, else a * b; float32 only."""
    SQUARED_DIFFERENCE = "SquaredDifference"
    """Squared difference: (a - b)**2."""
    POWER = "Pow"
    """Power: a**b. Integers are rounded towards zero for negative b, and 0 to a negative power is 0."""
    MODULO = "Mod"
    """Remainder: a - floor(a / b) * b, with the divisor's sign. For integers it is 0 if the divisor is 0."""


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
class Binary(Pointwise):
    """A function of two operands of one type, float32 or integers of at least 8 bits, with broadcasting.

    MINIMUM and MAXIMUM are "and" and "or" of bool. Rounded once, in the operands' type. `Add` is the addition the
    quantize stage knows.
    """

    pointwise = 2
    kind: BinaryKind
    """Kind of arithmetic."""

    def infer(self, inputs: Types) -> TensorType:
        a, b = inputs
        real = a.dtype is DType.FLOAT32
        logic = a.dtype is DType.BOOL and self.kind in (BinaryKind.MINIMUM, BinaryKind.MAXIMUM)
        fits = real or logic or (a.dtype.is_integer and a.dtype.bits >= 8 and self.kind is not BinaryKind.PRELU)
        require(a.dtype is b.dtype and fits, f"{self.kind.value} of {a} and {b} is not supported")
        return TensorType(broadcast_shape(inputs), a.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        with np.errstate(all="ignore"):  # division by zero is infinite or NaN, as in C
            return np.asarray(_FUNCTIONS[self.kind](inputs[0], inputs[1]), dtype=inputs[0].dtype)

    def chosen_from(self, operands: Sequence[T]) -> Sequence[T]:
        return operands if self.kind in (BinaryKind.MAXIMUM, BinaryKind.MINIMUM) else ()

    def line_of(self, constants: Known) -> tuple[Array, Array] | None:
        rows = [array.astype(np.float64) for array in constants if array is not None]
        if len(rows) != 1:
            return None
        match self.kind, constants[0] is None:
            case BinaryKind.MULTIPLY, _:
                return rows[0], np.zeros(1)
            case BinaryKind.ADD, _:
                return np.ones(1), rows[0]
            case BinaryKind.SUBTRACT, True:
                return np.ones(1), -rows[0]
            case BinaryKind.DIVIDE, True if rows[0].all():
                return 1 / rows[0], np.zeros(1)
        return None

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        kind = types[0].dtype
        if self.kind is BinaryKind.PRELU and self.infer(types) != types[0]:  # ONNX broadcasts the slope only
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


class CompareKind(enum.Enum):
    """Relations; those that are missing are one of these with the operands exchanged, or equal to false."""

    EQUAL = "Equal"
    LESS = "Less"
    LESS_OR_EQUAL = "LessOrEqual"


_RELATIONS: dict[CompareKind, Callable[[Array, Array], Array]] = {
    CompareKind.EQUAL: np.equal,
    CompareKind.LESS: np.less,
    CompareKind.LESS_OR_EQUAL: np.less_equal,
}


@dataclass(frozen=True)
class Compare(Pointwise):
    """Whether a relation holds between two operands of one type, with broadcasting; bool. NaN is less than nothing."""

    pointwise = 2
    kind: CompareKind
    """Kind of comparison."""

    def infer(self, inputs: Types) -> TensorType:
        a, b = inputs
        require(a.dtype is b.dtype and a.dtype.bits >= 8, f"cannot compare {a} and {b}")
        return TensorType(broadcast_shape(inputs), DType.BOOL)

    def evaluate(self, inputs: Arrays) -> Array:
        return np.asarray(_RELATIONS[self.kind](inputs[0], inputs[1]))

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        # ONNX Runtime compares few types; wider ones hold the narrower exactly.
        wide = types[0].dtype if types[0].dtype is DType.FLOAT32 else DType.INT64
        return body.add(self.kind.value, [body.cast(name, wide) for name in inputs])


@dataclass(frozen=True)
class Select(Pointwise):
    """Elements of a where the condition is true, otherwise of b. Operands: condition bool, a and b of one type; all
    broadcast."""

    pointwise = 3

    def infer(self, inputs: Types) -> TensorType:
        condition, a, b = inputs
        fits = condition.dtype is DType.BOOL and a.dtype is b.dtype and a.dtype.bits >= 8
        require(fits, f"cannot choose between {a} and {b} by {condition}")
        return TensorType(broadcast_shape(inputs), a.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        return np.where(*inputs)

    def chosen_from(self, operands: Sequence[T]) -> Sequence[T]:
        return operands[1:]

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        kind = types[1].dtype
        wide = kind if kind is DType.FLOAT32 else DType.INT64
        return body.cast(body.add("Where", [inputs[0], *(body.cast(name, wide) for name in inputs[1:])]), kind)


@dataclass(frozen=True)
class Convert(Pointwise):
    """The same number in another type.

    From float32 to integers: rounded towards zero, limited to the type, NaN becomes 0. Between integers modulo
    2**bits. To bool: whether it is not 0.
    """

    dtype: DType
    """Element type of the result."""

    def infer(self, inputs: Types) -> TensorType:
        require(min(self.dtype.bits, inputs[0].dtype.bits) >= 8, f"cannot convert {inputs[0]} to {self.dtype.text}")
        return TensorType(inputs[0].shape, self.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        x = inputs[0]
        if self.dtype is DType.BOOL:
            return np.asarray(x != 0)
        if x.dtype != np.float32 or self.dtype is DType.FLOAT32:
            return x.astype(self.dtype.numpy)
        whole = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
        if self.dtype is DType.INT64:  # 2**63 - 1 is no float64
            edge = 2.0**63
            inner = np.where(np.abs(whole) < edge, whole, 0.0).astype(np.int64)
            return np.where(whole >= edge, DType.INT64.high, np.where(whole <= -edge, DType.INT64.low, inner))
        return np.clip(whole, self.dtype.low, self.dtype.high).astype(self.dtype.numpy)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        if types[0].dtype is not DType.FLOAT32 or self.dtype in (DType.FLOAT32, DType.BOOL):
            return body.cast(inputs[0], self.dtype)
        known = body.add("Where", [body.add("IsNaN", [inputs[0]]), body.scalar(0.0, DType.FLOAT32), inputs[0]])
        wide = body.real64(known)
        # The largest int64 is no float64: what lies beyond is as far as its runtime's conversion limits it.
        high = min(self.dtype.high, (1 << 63) - 1024)
        bounds = [body.real64_scalar(self.dtype.low), body.real64_scalar(high)]
        return body.cast(body.cast(body.add("Clip", [wide, *bounds]), DType.INT64), self.dtype)


document(__name__)
