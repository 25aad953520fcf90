"""TFLite Micro's fixed-point kernels that are no sums and no tables: quotient, log-softmax, 16-bit functions.

Facts from tflite-micro's kernels/internal/reference/{div,log_softmax,softmax}.h, integer_ops/{logistic,tanh}.h beside
them and kernels/internal/common.h. Each meaning is one function of int64 arrays, which is followed for its ONNX form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dovetail.ir.operators import gemmlowp
from dovetail.ir.operators.arithmetic import Rounding, fixed_point
from dovetail.ir.operators.base import Cut, Int64Operator, Pointwise, Rowwise, Types, broadcast_shape, require
from dovetail.ir.types import Array, Box, DType, TensorType

BYTES = (DType.INT8, DType.UINT8)


@dataclass(frozen=True)
class FixedDivide(Int64Operator, Pointwise):
    """Quotient of two 8-bit values, int32: (a - left) / (b - right) * multiplier * 2**(shift - 31) + output, rounded
    three times as TFLite Micro does. A divisor of 0 counts as 1."""

    pointwise = 2
    result = DType.INT32
    left_zero_point: int
    right_zero_point: int
    output_zero_point: int
    multiplier: int
    shift: int
    """At most 20."""

    def infer(self, inputs: Types) -> TensorType:
        fits = all(kind.dtype in BYTES for kind in inputs) and self.shift <= 20
        require(fits, f"cannot divide {inputs[0]} by {inputs[1]} with a shift of {self.shift}")
        return TensorType(broadcast_shape(inputs), DType.INT32)

    def meaning(self, a: Any, b: Any) -> Any:
        left, right = a - self.left_zero_point, b - self.right_zero_point
        left = np.where(right < 0, -left, left)
        inverse, over_unit = gemmlowp.reciprocal(np.maximum(abs(right), 1), 31)
        size = np.maximum(np.where(left < 0, -left * 2 - 1, left * 2), 1)
        headroom = gemmlowp.leading_zeros(size)
        quotient = gemmlowp.high_product(left << headroom, inverse)
        right_shift = np.clip(over_unit + headroom - self.shift, 0, 31)
        scaled = gemmlowp.rounding_shift(gemmlowp.high_product(quotient, self.multiplier), right_shift)
        return scaled + self.output_zero_point


@dataclass(frozen=True)
class FixedLogSoftmax(Int64Operator, Rowwise):
    """Log-softmax over the last axis of int8 values; int8 with scale 1/16 and zero point 127."""

    multiplier: int
    """Input scale * 2**26 as a Q0.31 multiplier."""
    shift: int
    diff_min: int
    """Differences to the largest below this (it is negative) give the lowest result."""
    back_multiplier: int
    """The inverse of the input's factor, for the limit that the logarithm of the sum leaves."""
    back_shift: int

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        require(x.dtype is DType.INT8 and 0 < x.shape[-1] < 4096, f"expects int8, up to 4095 in a row, got {x}")
        return x

    def tables(self) -> tuple[Array, Array]:
        """Two tables of the differences -d for d = 0..255, int32 [256] each: their Q5.26, and exp of it in Q12.19."""
        differences = np.maximum(-np.arange(256, dtype=np.int64), self.diff_min)
        scaled = fixed_point(differences, self.multiplier, self.shift, Rounding.DOUBLE)
        powers = gemmlowp.rounding_shift(gemmlowp.exponential(scaled), 12)
        kept = -np.arange(256) >= self.diff_min
        return scaled.astype(np.int32), np.where(kept, powers, 0).astype(np.int32)

    def meaning(self, x: Any) -> Any:
        scaled, powers = (table.astype(np.int64) for table in self.tables())
        below = np.max(x, axis=-1, keepdims=True) - x
        logarithm = gemmlowp.logarithm(np.sum(gemmlowp.look_up(powers, below), axis=-1, keepdims=True), 12)
        reach = gemmlowp.high_product((logarithm - (1 << 31)) << max(self.back_shift, 0), self.back_multiplier)
        limit = np.maximum(gemmlowp.rounding_shift(reach, max(-self.back_shift, 0)), self.diff_min - 1)
        raised = gemmlowp.rounding_shift(gemmlowp.look_up(scaled, below) - logarithm, 22) + 127
        return np.where(below + limit < 0, np.clip(raised, -128, 127), -128)


@dataclass(frozen=True)
class FixedNormalise(Int64Operator, Rowwise):
    """Rows of int8 values along the last axis divided by their length, int8 with scale 1/128 and no zero point."""

    noun = "a normalisation"
    zero_point: int

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        require(x.dtype is DType.INT8 and 0 < x.shape[-1] < 1 << 15, f"expects int8, up to 32767 in a row, got {x}")
        return x

    def meaning(self, x: Any) -> Any:
        centred = x - self.zero_point
        multiplier, shift = gemmlowp.inverse_root(np.sum(centred * centred, axis=-1, keepdims=True))
        raised = centred << np.maximum(shift + 7, 0)
        scaled = gemmlowp.rounding_shift(gemmlowp.high_product(raised, multiplier), np.maximum(-shift - 7, 0))
        result: Array = np.clip(scaled, -128, 127)
        return result


@dataclass(frozen=True)
class FixedStandard(Int64Operator, Rowwise):
    """Rows of integers along the last axis with mean 0 and deviation 1, or with a mean square of 1; int16 without zero
    point, in steps of `scale`.

    With n elements x in a row, S their sum and Q the sum of their squares, y = (n x - S) / sqrt(n Q - S**2 + epsilon):
    a mean and a mean square times n, so that everything under the root is an exact integer. Its root has 28 bits, the
    quotient is rounded once, halves up. Without `centred` S is taken for 0.
    """

    noun = "a normalisation"
    result = DType.INT16
    size: int
    """Elements of a row."""
    zero_point: int
    epsilon: int
    """In units of the operand's step squared, times n squared."""
    centred: bool = True
    span: tuple[int, int] | None = None
    """The first element of each row that is given, and one behind the last; None for all."""

    @property
    def fraction_bits(self) -> int:
        """Fraction bits of the result: as many as leave room for the square root of n, which no element exceeds."""
        return 15 - (self.size.bit_length() + 1) // 2

    @property
    def scale(self) -> float:
        """Step of the result."""
        return 2.0**-self.fraction_bits

    @property
    def reach(self) -> int:
        """No element is larger: the root of n, in steps of the result, and what the root under it may be off."""
        return min(int(1.01 * self.size**0.5 * (1 << self.fraction_bits)) + 2, DType.INT16.high)

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        narrow = x.dtype in (*BYTES, DType.INT16) and 0 < self.size << (x.dtype.bits + 1) < 1 << 31
        fits = narrow and x.shape[-1:] == (self.size,) and 0 <= self.epsilon < 1 << 59
        require(fits, f"cannot normalise rows of {x} as integers")
        first, stop = self.span or (0, self.size)
        return TensorType((*x.shape[:-1], stop - first), DType.INT16)

    def crop(self, box: Box, inputs: Types) -> Cut:
        first, whole = self.span[0] if self.span else 0, (0, self.size)
        span = (first + box[-1][0], first + box[-1][1])
        return replace(self, span=None if span == whole else span), ((*box[:-1], whole),)

    def scaling(self, spread: Any) -> tuple[Any, Any]:
        """The multiplier for what is under the root, and by how many bits the product is too high."""
        half = (32 - gemmlowp.leading_zeros(np.maximum(spread >> 29, 1))) >> 1
        multiplier, shift = gemmlowp.inverse_root(spread >> (half * 2))
        return multiplier, half - shift + (31 - self.fraction_bits)

    def meaning(self, x: Any) -> Any:
        centred = x - self.zero_point
        total = np.sum(centred, axis=-1, keepdims=True) * int(self.centred)
        spread = np.sum(centred * centred, axis=-1, keepdims=True) * self.size - total * total + self.epsilon
        multiplier, power = self.scaling(spread)
        one = total * 0 + 1
        if self.span:
            centred = centred[(*(slice(None) for _ in x.shape[1:]), slice(*self.span))]
        scaled = ((centred * self.size - total) * multiplier + (one << (power - 1))) >> power
        result: Array = np.clip(scaled, -32768, 32767)
        return result


def table_of_16(function: Callable[[Array], Array], scales: tuple[float, float], zero_points: tuple[int, int]) -> Array:
    """A function of int16 values at 513 points, int16, chosen so that lines between them lie close
    (common.h's LUTPopulateInt16, in float32 as there)."""
    single, steps = np.float32, np.arange(512, dtype=np.float32)
    low, high = (single(scales[0]) * single(bound - zero_points[0]) for bound in (-32768, 32767))
    out_low, out_high = (single(scales[1]) * single(bound - zero_points[1]) for bound in (-32768, 32767))
    step, raised = (high - low) / single(512), single(65536) / (out_high - out_low)

    def rounded(values: Array) -> Array:
        """Halves away from zero."""
        return np.asarray(np.trunc(values + np.copysign(single(0.5), values)), dtype=np.float32)

    places = (low + steps * step, low + steps * step + step / single(2), low + (steps + single(1)) * step)
    here, middle, after = (function(place) * raised for place in places)
    bent = rounded((after + rounded(here)) / single(2)) - rounded(middle)
    last = rounded(function(np.array([high], np.float32)) * raised)
    table = np.append(rounded(here) - rounded(bent / single(2)), last)
    return np.asarray(np.clip(table, -32768, 32767), dtype=np.int16)


@dataclass(frozen=True)
class FixedSoftmax16(Int64Operator, Rowwise):
    """Softmax over the last axis of int16 values in Q0.15: exponential and reciprocal lie between table points."""

    result = DType.INT16
    multiplier: int
    """Input scale * beta * 6553.5 as a Q0.31 multiplier, which makes differences of -10 into -65535."""
    shift: int

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        require(x.dtype is DType.INT16 and 0 < x.shape[-1] < 1 << 15, f"expects int16, got {x}")
        return x

    def tables(self) -> tuple[Array, Array]:
        """exp on [-10, 0] and 1 / (1 + x) on [0, 1], int16 [513] each."""
        step = float(np.float32(2.0) / np.float32(65535))
        exponential = table_of_16(np.exp, (float(np.float32(10.0) / np.float32(65535)), step), (32767, 0))
        unit = float(np.float32(1.0) / np.float32(65535))
        return exponential, table_of_16(lambda x: np.float32(1) / (np.float32(1) + x), (unit, step), (-32768, 0))

    def _between(self, table: Array, value: Array) -> Array:
        place = (value >> 7) + 256
        low, high = (gemmlowp.look_up(table.astype(np.int64), place + step) for step in (0, 1))
        result: Array = low + (((high - low) * (value & 127) + 64) >> 7)
        return result

    def meaning(self, x: Any) -> Any:
        exponential, inverse = self.tables()
        raised = (x - np.max(x, axis=-1, keepdims=True)) << max(self.shift, 0)
        scaled = gemmlowp.rounding_shift(gemmlowp.high_product(raised, self.multiplier), max(-self.shift, 0))
        powers = self._between(exponential, np.clip(scaled + 32767, -32768, 32767))
        total = np.sum(powers, axis=-1, keepdims=True)
        zeros = gemmlowp.leading_zeros(total)
        above_one = (((total << (zeros - 1)) + (1 << 13)) >> 14) - (1 << 15) - (1 << 16)
        reciprocal = self._between(inverse, np.clip(above_one, -32768, 32767))
        half = (total * 0 + 1) << (30 - zeros)
        result: Array = np.clip((powers * reciprocal + half) >> (31 - zeros), 0, 32767)
        return result


_RAISED = (
    *(4, 8, 12, 14, 15, 16, 17, 19, 20, 21, 22, 25, 27, 28, 29, 30, 31, 33, 34, 35, 37, 39, 40, 41, 43, 44, 45, 46),
    *(49, 50, 54, 62, 63, 64, 66, 82, 86, 93, 100, 103, 112, 116, 135, 255),
)
"""Indices at which TFLite's table is one more than the nearest integer."""


def sigmoid_table() -> Array:
    """sigmoid(i / 24) in Q0.16 for i = 0..255, and the last again, uint16 [257]."""
    table = np.floor(65536 / (1.0 + np.exp(-np.arange(256) / 24.0)) + 0.5)
    table[list(_RAISED)] += 1
    return np.append(table, table[-1:]).astype(np.uint16)


def between_sigmoids(scaled: Array, tangent: bool) -> Array:
    """The sigmoid or hyperbolic tangent in Q0.15 of values in steps of 1 / 12288, int64, between 256 points."""
    fine = 8 if tangent else 9
    size: Any = abs(scaled)
    place = np.minimum(size >> fine, 255)
    table = sigmoid_table().astype(np.int64)
    low, high = gemmlowp.look_up(table, place), gemmlowp.look_up(table, place + 1)
    inner = (low << fine) + (size & ((1 << fine) - 1)) * (high - low)
    if tangent:
        result = np.where(place >= 255, 0xFFFF << 8, inner) - (1 << 23)
        return np.where(scaled >= 0, result + 128, 127 - result) >> 8
    result = np.where(place >= 255, 0x7FFF << 10, inner)
    return np.where(scaled >= 0, result + 512, (1 << 25) - result + 511) >> 10


@dataclass(frozen=True)
class Sigmoid16(Int64Operator, Pointwise):
    """Sigmoid or hyperbolic tangent of int16 values in Q0.15, between 256 points; the operand times
    multiplier / 2**shift counts in steps of 1 / 12288."""

    result = DType.INT16
    multiplier: int
    shift: int
    tangent: bool

    def infer(self, inputs: Types) -> TensorType:
        require(inputs[0].dtype is DType.INT16, f"expects int16, got {inputs[0]}")
        return inputs[0]

    def meaning(self, x: Any) -> Any:
        return between_sigmoids((x * self.multiplier + ((1 << self.shift) >> 1)) >> self.shift, self.tangent)
