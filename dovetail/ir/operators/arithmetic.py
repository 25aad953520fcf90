"""Requantisation, clipping, tables and sums, where every rounding is spelled out; quantise and dequantise."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from dovetail.documented import document
from dovetail.ir.operators import gemmlowp
from dovetail.ir.operators.base import Arrays, Cut, Int64Operator, Known, Names, Operator, Pointwise, Types, require
from dovetail.ir.types import Array, Box, DType, Shape, TensorType, blocks, full_box

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody


class Rounding(enum.Enum):
    """Roundings of a fixed-point product."""

    DOUBLE = "double"
    """Rounding of gemmlowp and TFLite Micro: a high product (halves rounded up), then a rounding shift (halves away
    from zero)."""
    SINGLE = "single"
    """TOSA and XNNPACK: one 64-bit product, one rounding shift (half up)."""
    WIDE = "wide"
    """TFLite Micro for 64-bit accumulators: the multiplier cut to 16 bits, one rounding shift (half up)."""
    DOWN = "down"
    """One 64-bit product, one shift that rounds down."""
    AWAY = "away"
    """One 64-bit product, one shift that rounds to the nearest (halves away from zero), as NVDLA's converters do."""
    FLOAT32 = "float32"
    """In float32: the integer, times multiplier * 2**(shift - 31), rounded to the nearest (half to even), within 2**20
    on either side of 0."""


FOLLOWED = NDArrayOperatorsMixin
"""Base of what stands for an array while its operations are followed (`dovetail.ir.onnx_body`)."""
MOST_FLOAT = 1 << 20
"""The magnitude at which `Rounding.FLOAT32` saturates."""


def fixed_point(x: Any, multiplier: Any, shift: Any, rounding: Rounding) -> Any:
    """Rounded products x * multiplier * 2**(shift - 31) as int64; arrays broadcast.

    Args:
        x: int64 values within int32 (within 48 bits for WIDE).
        multiplier: in [0, 2**31), normally at least 2**30.
        shift: the power of two, negative to shift right.
    """
    x, multiplier, shift = (a if isinstance(a, FOLLOWED) else np.asarray(a, np.int64) for a in (x, multiplier, shift))
    if rounding is Rounding.DOWN:
        return x * multiplier >> 31 - shift
    if rounding is Rounding.AWAY:
        return gemmlowp.rounding_shift(x * multiplier, 31 - shift)
    if rounding in (Rounding.SINGLE, Rounding.WIDE):
        if rounding is Rounding.WIDE:
            multiplier = np.where(multiplier < 0x7FFF0000, (multiplier + (1 << 15)) >> 16, 0x7FFF)
        total = (15 if rounding is Rounding.WIDE else 31) - shift
        half = gemmlowp.power_of_two(total - 1)
        return x * multiplier + half >> total
    if rounding is Rounding.FLOAT32:
        if (own := getattr(x, "rounded_product", None)) is not None:
            return own(multiplier, shift, MOST_FLOAT)
        product = np.rint(x.astype(np.float32) * float_scale(multiplier, shift))
        return np.asarray(np.clip(product, -MOST_FLOAT, MOST_FLOAT).astype(np.int64))
    left, right = np.maximum(shift, 0), np.maximum(-shift, 0)
    raised = (x << left).astype(np.int32).astype(np.int64)
    return gemmlowp.rounding_shift(gemmlowp.high_product(raised, multiplier), right)


def float_scale(multiplier: Array, shift: Array) -> Array:
    """The factor multiplier * 2**(shift - 31) as float32, which keeps 24 bits of a multiplier."""
    return np.asarray(np.ldexp(multiplier.astype(np.float64), shift.astype(np.int64) - 31), np.float32)


def quantize_multiplier(real: float) -> tuple[int, int]:
    """A factor as (multiplier, shift): real is about multiplier * 2**(shift - 31).

    The multiplier is in [2**30, 2**31), negative for a negative factor (a leak may be), or 0 for factors below 2**-32,
    as TFLite Micro computes it (kernels/internal/quantization_util.cc).
    """
    if real == 0.0 or not math.isfinite(real):  # scales near the ends of float32 give 0, infinity, or neither
        return ((1 << 31) - 1, 30) if real > 0.0 else (0, 0)
    fraction, shift = math.frexp(real)
    multiplier = math.floor(fraction * (1 << 31) + 0.5)
    if multiplier == 1 << 31:
        multiplier, shift = 1 << 30, shift + 1
    if shift < -31:
        return 0, 0
    return ((1 << 31) - 1, 30) if shift > 30 else (multiplier, shift)


def multiplier_arrays(reals: Iterable[float]) -> tuple[Array, Array]:
    """Multipliers and shifts of several factors, int32 each."""
    pairs = [quantize_multiplier(real) for real in reals]
    return np.array([m for m, _ in pairs], np.int32), np.array([s for _, s in pairs], np.int32)


class _ChannelScaling(Int64Operator, Pointwise):
    """A value scaled by the operands behind it, one or one per channel each."""

    result = DType.INT32

    def infer(self, inputs: Types) -> TensorType:
        x, *parameters = inputs
        for kind in parameters:
            fits = kind.shape in ((1,), x.shape[-1:])
            require(fits and kind.dtype is DType.INT32, f"expects int32 [1] or [{x.shape[-1:]}], got {kind}")
        return TensorType(x.shape, DType.INT32)

    def evaluate(self, inputs: Arrays) -> Array:
        return super().evaluate(inputs).reshape(inputs[0].shape)  # a scalar, where parameters have an axis

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        found = super().onnx(body, inputs, types)
        return found if types[0].shape else body.add("Reshape", [found, body.integers(())])


@dataclass(frozen=True)
class Requantize(_ChannelScaling):
    """Fixed-point scaling. Operands: x, multiplier int32 [1 or C], shift int32 [1 or C].

    y = fixed_point((x - input_zero_point) * 2**left_shift, multiplier, shift) + output_zero_point, as int32;
    parameters of size C run along the last axis.
    """

    rounding: Rounding = Rounding.DOUBLE
    """Rounding of the product."""
    input_zero_point: int = 0
    """Subtracted from every element of the operand."""
    output_zero_point: int = 0
    """Added to every scaled element."""
    left_shift: int = 0
    """Bits of head-room the operand is raised by first."""

    def slope_of(self, constants: Known) -> float | None:
        multiplier, shift = constants[1:]
        if multiplier is None or shift is None or multiplier.size != 1 or shift.size != 1:
            return None
        return float(multiplier[0]) * 2.0 ** (int(shift[0]) - 31 + self.left_shift)

    def raised(self, by: Sequence[int]) -> Requantize:
        return replace(self, input_zero_point=self.input_zero_point + by[0])

    def meaning(self, x: Any, multiplier: Any, shift: Any) -> Any:
        centred = x - self.input_zero_point if self.input_zero_point else x
        raised = centred * (1 << self.left_shift) if self.left_shift else centred
        scaled = fixed_point(raised, multiplier, shift, self.rounding)
        return scaled + self.output_zero_point if self.output_zero_point else scaled


@dataclass(frozen=True)
class ScaleShift(_ChannelScaling):
    """The requantisation of simple engines. Operands: x, then scale, offset and shift, int32 [1 or C] each.

    y = (x * scale + offset) >> shift, rounded down, as int32. The product must stay within int32.
    """

    def meaning(self, x: Any, scale: Any, offset: Any, shift: Any) -> Any:
        return x * scale + offset >> shift


@dataclass(frozen=True)
class Clip(Pointwise):
    """Limit to [low, high] and narrow to `dtype`."""

    low: int
    """Least result."""
    high: int
    """Largest result."""
    dtype: DType
    """Element type of the result."""

    @property
    def limited_to(self) -> tuple[int, int]:
        return self.low, self.high

    def infer(self, inputs: Types) -> TensorType:
        fits = self.dtype.low <= self.low <= self.high <= self.dtype.high
        require(fits, f"[{self.low}, {self.high}] is not a range of {self.dtype.text}")
        return TensorType(inputs[0].shape, self.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        (x,) = inputs
        wide = x.astype(np.int32) if x.dtype.itemsize == 1 else x  # bounds may lie outside of a narrow operand's type
        return np.asarray(np.clip(wide, self.low, self.high).astype(self.dtype.numpy))

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        wide = body.cast(inputs[0], DType.INT64)  # ONNX Runtime clips no 16-bit integers
        return body.cast(body.limited(wide, self.low, self.high), self.dtype)


@dataclass(frozen=True)
class Offset(Pointwise):
    """Elements x + offset, narrowed to `dtype`: an int8 value as uint8 (offset 128) and back (-128). It never
    overflows."""

    offset: int
    """Integer that is added."""
    dtype: DType
    """Element type of the result."""

    def infer(self, inputs: Types) -> TensorType:
        kind = inputs[0].dtype
        fits = self.dtype.low <= kind.low + self.offset and kind.high + self.offset <= self.dtype.high
        require(fits, f"{kind.text} + {self.offset} does not fit {self.dtype.text}")
        return TensorType(inputs[0].shape, self.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        return (inputs[0].astype(np.int32) + self.offset).astype(self.dtype.numpy)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        wide = body.cast(inputs[0], DType.INT32)
        return body.cast(body.add("Add", [wide, body.scalar(self.offset, DType.INT32)]), self.dtype)


@dataclass(frozen=True)
class Add(Pointwise):
    """Sum of two operands of one type (int32 or float32), with broadcasting."""

    pointwise = 2

    def slope_of(self, constants: Known) -> float:
        return 1.0

    def line_of(self, constants: Known) -> tuple[Array, Array] | None:
        rows = [array.astype(np.float64) for array in constants if array is not None]
        return (np.ones(1), rows[0]) if len(rows) == 1 else None

    def infer(self, inputs: Types) -> TensorType:
        a, b = inputs
        require(a.dtype is b.dtype and a.dtype in (DType.INT32, DType.FLOAT32), f"cannot add {a} and {b}")
        return TensorType(np.broadcast_shapes(a.shape, b.shape), a.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        return np.add(inputs[0], inputs[1])

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        return body.add("Add", list(inputs))


@dataclass(frozen=True)
class Lookup(Pointwise):
    """A table per 8-bit value. Operands: x int8 or uint8, table [256] indexed by x - lowest value of its type."""

    def infer(self, inputs: Types) -> TensorType:
        x, table = inputs
        require(x.dtype in (DType.INT8, DType.UINT8) and table.shape == (256,), f"cannot look {x} up in {table}")
        return TensorType(x.shape, table.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        x, table = inputs
        return np.asarray(table[x.astype(np.int32) - DType.of(x.dtype).low])

    def crop(self, box: Box, inputs: Types) -> Cut:
        return self, (box, full_box(inputs[1].shape))

    def is_elementwise(self, inputs: Types) -> bool:
        return True

    def raised(self, by: Sequence[int]) -> Operator | None:
        return self

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        lowest = body.scalar(types[0].dtype.low, DType.INT32)
        index = body.add("Sub", [body.cast(inputs[0], DType.INT32), lowest])
        return body.add("Gather", [inputs[1], index])


def _check_parameters(x: TensorType, scale: TensorType, zero_point: TensorType, axis: int) -> None:
    """Raise ValueError unless scale (float32) and zero point (int32) are both [1] or both run along `axis` of x."""
    rank = len(x.shape)
    along = (x.shape[axis],) if -rank <= axis < rank else (1,)
    fits = scale.shape in ((1,), along) and zero_point.shape == scale.shape
    typed = scale.dtype is DType.FLOAT32 and zero_point.dtype is DType.INT32
    sentence = f"expects scale float32 and zero point int32 of [1] or {list(along)}, got {scale} and {zero_point}"
    require(fits and typed, sentence)


def _aligned_shape(parameter: Shape, x: Shape, axis: int) -> Shape:
    """The shape under which a [1] or [C] parameter broadcasts along `axis` of an operand of shape `x`."""
    if parameter == (1,) or not x:
        return (1,) * len(x)
    place = axis % len(x)
    return tuple(parameter[0] if index == place else 1 for index in range(len(x)))


class _Affine(Pointwise):
    """Quantising and dequantising have in common a scale and a zero point, [1] or along an axis."""

    exact: ClassVar[bool] = True
    axis: int

    def _onnx_parameters(self, body: OnnxBody, inputs: Names, types: Types) -> list[str]:
        shape = body.integers(_aligned_shape(types[1].shape, types[0].shape, self.axis))
        return [body.add("Reshape", [name, shape]) for name in inputs[1:]]

    def crop(self, box: Box, inputs: Types) -> Cut:
        along = ((0, 1) if inputs[1].shape == (1,) else box[self.axis],)
        return self, (box, along, along)

    def reordered(self, order: Shape, inputs: Types) -> Operator | None:
        moved: Any = self
        return self if inputs[1].shape == (1,) else replace(moved, axis=order.index(self.axis % len(order)))


@dataclass(frozen=True)
class Quantize(_Affine):
    """Float to integer. Operands: x float32, scale float32 [1 or C], zero_point int32 [1 or C].

    y = saturate(round_half_even(x / scale) + zero_point), the division in float32 (ONNX QuantizeLinear);
    parameters of size C run along `axis`.
    """

    quantises: ClassVar[bool] = True
    dtype: DType
    """The integer type of the result."""
    axis: int = -1
    """Axis along which scale and zero point differ, if they are arrays."""

    def infer(self, inputs: Types) -> TensorType:
        x, scale, zero_point = inputs
        require(x.dtype is DType.FLOAT32 and self.dtype.is_integer, f"cannot quantise {x} to {self.dtype.text}")
        _check_parameters(x, scale, zero_point, self.axis)
        return TensorType(x.shape, self.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        x, scale, zero_point = inputs
        shape = _aligned_shape(scale.shape, x.shape, self.axis)
        steps = np.rint(x / scale.reshape(shape)).astype(np.float64) + zero_point.reshape(shape)
        return np.clip(steps, self.dtype.low, self.dtype.high).astype(self.dtype.numpy)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        scale, zero_point = self._onnx_parameters(body, inputs, types)
        steps = body.real64(body.add("Round", [body.add("Div", [inputs[0], scale])]))
        total = body.add("Add", [steps, body.real64(zero_point)])
        bounds = [body.real64_scalar(self.dtype.low), body.real64_scalar(self.dtype.high)]
        return body.cast(body.add("Clip", [total, *bounds]), self.dtype)


@dataclass(frozen=True)
class Dequantize(_Affine):
    """Integer to float. Operands: x integer, scale float32 [1 or C], zero_point int32 [1 or C].

    y = float32(x - zero_point) * scale; parameters of size C run along `axis`.
    """

    dequantises: ClassVar[bool] = True
    axis: int = -1
    """Axis along which scale and zero point differ, if they are arrays."""

    def infer(self, inputs: Types) -> TensorType:
        x, scale, zero_point = inputs
        require(x.dtype.is_integer, f"cannot dequantise {x}")
        _check_parameters(x, scale, zero_point, self.axis)
        return TensorType(x.shape, DType.FLOAT32)

    def evaluate(self, inputs: Arrays) -> Array:
        x, scale, zero_point = inputs
        shape = _aligned_shape(scale.shape, x.shape, self.axis)
        whole = x if x.ndim and x.size else x[None]
        result = np.empty(whole.shape, np.float32)
        zero_points, scales = (np.broadcast_to(array.reshape(shape), whole.shape) for array in (zero_point, scale))
        for part in blocks(whole):
            steps = (whole[part].astype(np.int64) - zero_points[part]).astype(np.float32)
            np.multiply(steps, scales[part], out=result[part])
        return result.reshape(x.shape)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        scale, zero_point = self._onnx_parameters(body, inputs, types)
        steps = body.add("Sub", [body.cast(inputs[0], DType.INT64), body.cast(zero_point, DType.INT64)])
        return body.add("Mul", [body.cast(steps, DType.FLOAT32), scale])


_MOST_DIGIT = 6


@cache
def digit_scales(count: int) -> Mapping[int, tuple[int, ...]]:
    """The products of `count` factors 1 + 2**n, n up to 6, and the n of each: what so many shifts and additions
    multiply by. A factor of 2, of n = 0, is a power of two that a shift takes back."""
    return {
        math.prod(1 + 2**n for n in found): found
        for found in combinations_with_replacement(range(_MOST_DIGIT + 1), count)
    }


def scale_digits(scale: Array) -> tuple[Array, ...] | None:
    """The n of every channel's factors, one array after the other; None where four factors are too few."""
    for count in range(5):
        known = digit_scales(count)
        if all(int(each) in known for each in scale):
            return tuple(np.array([known[int(each)][number] for each in scale], np.int32) for number in range(count))
    return None


document(__name__)
