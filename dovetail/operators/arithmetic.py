"""Requantisation, clipping, tables and element-wise arithmetic: where every rounding is spelled out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, Box, DType, Shape, TensorType, full_box
from dovetail.operators.base import Operator, one_for_all, require

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


class Rounding(enum.Enum):
    """How a fixed-point product is rounded."""

    DOUBLE = "double"
    """gemmlowp and TFLite Micro: a high product (halves rounded up), then a rounding shift (halves away from zero)."""
    SINGLE = "single"
    """TOSA and XNNPACK: one 64-bit product, one rounding shift (half up)."""
    WIDE = "wide"
    """TFLite Micro for 64-bit accumulators: the multiplier cut to 16 bits, one rounding shift (half up)."""


def broadcast_box(box: Box, shape: Shape) -> Box:
    """The part of an operand of `shape` that `box` of the broadcast result reads."""
    lead = len(box) - len(shape)
    spans = zip(box[lead:], shape, strict=True)
    return tuple((0, 1) if size == 1 else span for span, size in spans)


def fixed_point(x: Array, multiplier: Array | int, shift: Array | int, rounding: Rounding) -> Array:
    """x * multiplier * 2**(shift - 31) as int64, rounded; arrays broadcast.

    Args:
        x: int64 values within int32 (within 48 bits for WIDE).
        multiplier: in [0, 2**31), normally at least 2**30.
        shift: the power of two, negative to shift right.
    """
    x, multiplier, shift = (np.asarray(a, dtype=np.int64) for a in (x, multiplier, shift))
    if rounding is Rounding.WIDE:
        reduced = np.where(multiplier < 0x7FFF0000, (multiplier + (1 << 15)) >> 16, 0x7FFF)
        total = 15 - shift
        return (x * reduced + (np.int64(1) << (total - 1))) >> total
    if rounding is Rounding.SINGLE:
        total = 31 - shift
        return (x * multiplier + (np.int64(1) << (total - 1))) >> total
    left, right = np.maximum(shift, 0), np.maximum(-shift, 0)
    product = (x << left).astype(np.int32).astype(np.int64) * multiplier
    high = (product + (1 << 30)) >> 31
    mask = (np.int64(1) << right) - 1
    threshold = (mask >> 1) + (high < 0)
    return np.asarray((high >> right) + ((high & mask) > threshold))


@dataclass(frozen=True)
class Requantize(Operator):
    """Fixed-point scaling. Operands: x, multiplier int32 [1 or C], shift int32 [1 or C].

    y = fixed_point((x - input_zero_point) * 2**left_shift, multiplier, shift) + output_zero_point, as int32;
    parameters of size C run along the last axis.
    """

    rounding: Rounding = Rounding.DOUBLE
    input_zero_point: int = 0
    output_zero_point: int = 0
    left_shift: int = 0
    """Bits of head-room the operand is raised by first."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, multiplier, shift = inputs
        for kind in (multiplier, shift):
            fits = kind.shape in ((1,), x.shape[-1:])
            require(fits and kind.dtype is DType.INT32, f"expects int32 [1] or [{x.shape[-1:]}], got {kind}")
        return TensorType(x.shape, DType.INT32)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, multiplier, shift = inputs
        raised = (x.astype(np.int64) - self.input_zero_point) << self.left_shift
        scaled = fixed_point(raised, multiplier, shift, self.rounding) + self.output_zero_point
        return scaled.astype(np.int32)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, (box, *(broadcast_box(box, kind.shape) for kind in inputs[1:]))

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return one_for_all(inputs)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        return body.requantize(self, inputs)


@dataclass(frozen=True)
class ScaleShift(Operator):
    """The requantisation of simple engines. Operands: x, then scale, offset and shift, int32 [1 or C] each.

    y = (x * scale + offset) >> shift, rounded down, as int32. The product must stay within int32.
    """

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x = inputs[0]
        for kind in inputs[1:]:
            fits = kind.shape in ((1,), x.shape[-1:])
            require(fits and kind.dtype is DType.INT32, f"expects int32 [1] or [{x.shape[-1:]}], got {kind}")
        return TensorType(x.shape, DType.INT32)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, scale, offset, shift = (array.astype(np.int64) for array in inputs)
        return ((x * scale + offset) >> shift).astype(np.int32)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, (box, *(broadcast_box(box, kind.shape) for kind in inputs[1:]))

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return one_for_all(inputs)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        x, scale, offset, shift = (body.cast(name, DType.INT64) for name in inputs)
        total = body.add("Add", [body.add("Mul", [x, scale]), offset])
        return body.cast(body.shift_right(total, shift), DType.INT32)


@dataclass(frozen=True)
class Clip(Operator):
    """Limit to [low, high] and narrow to `dtype`."""

    low: int
    high: int
    dtype: DType

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        fits = self.dtype.low <= self.low <= self.high <= self.dtype.high
        require(fits, f"[{self.low}, {self.high}] is not a range of {self.dtype.text}")
        return TensorType(inputs[0].shape, self.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return np.clip(inputs[0], self.low, self.high).astype(self.dtype.numpy)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, (box,)

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return True

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        wide = body.cast(inputs[0], DType.INT64)  # ONNX Runtime clips no 16-bit integers
        bounds = [body.scalar(self.low, DType.INT64), body.scalar(self.high, DType.INT64)]
        return body.cast(body.add("Clip", [wide, *bounds]), self.dtype)


@dataclass(frozen=True)
class Offset(Operator):
    """x + offset, narrowed to `dtype`: an int8 value as uint8 (offset 128) and back (-128). Never overflows."""

    offset: int
    dtype: DType

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        kind = inputs[0].dtype
        fits = self.dtype.low <= kind.low + self.offset and kind.high + self.offset <= self.dtype.high
        require(fits, f"{kind.text} + {self.offset} does not fit {self.dtype.text}")
        return TensorType(inputs[0].shape, self.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return (inputs[0].astype(np.int32) + self.offset).astype(self.dtype.numpy)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, (box,)

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return True

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        wide = body.cast(inputs[0], DType.INT32)
        return body.cast(body.add("Add", [wide, body.scalar(self.offset, DType.INT32)]), self.dtype)


@dataclass(frozen=True)
class Add(Operator):
    """Sum of two operands of one type (int32 or float32), with broadcasting."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        a, b = inputs
        require(a.dtype is b.dtype and a.dtype in (DType.INT32, DType.FLOAT32), f"cannot add {a} and {b}")
        return TensorType(np.broadcast_shapes(a.shape, b.shape), a.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return np.add(inputs[0], inputs[1])

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, tuple(broadcast_box(box, kind.shape) for kind in inputs)

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return one_for_all(inputs)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        return body.add("Add", list(inputs))


@dataclass(frozen=True)
class Lookup(Operator):
    """A table per 8-bit value. Operands: x int8 or uint8, table [256] indexed by x - lowest value of its type."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, table = inputs
        require(x.dtype in (DType.INT8, DType.UINT8) and table.shape == (256,), f"cannot look {x} up in {table}")
        return TensorType(x.shape, table.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, table = inputs
        return np.asarray(table[x.astype(np.int32) - DType.of(x.dtype).low])

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, (box, full_box(inputs[1].shape))

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return True

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        lowest = body.scalar(types[0].dtype.low, DType.INT32)
        index = body.add("Sub", [body.cast(inputs[0], DType.INT32), lowest])
        return body.add("Gather", [inputs[1], index])
