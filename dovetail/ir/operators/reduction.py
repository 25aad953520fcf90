"""Many elements made one: pools over windows of NHWC images, reductions along axes, and rows normalised."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from dovetail.documented import document
from dovetail.ir.operators.base import (
    Arrays,
    Cut,
    IntegerSum,
    Names,
    Operator,
    Rowwise,
    SlidingWindow,
    T,
    Types,
    require,
)
from dovetail.ir.operators.base import Padding2d as Padding2d
from dovetail.ir.types import Array, Box, DType, Shape, TensorType

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody


class ReduceKind(enum.Enum):
    """Kinds of reduction of several elements to one."""

    SUM = "ReduceSum"
    MEAN = "ReduceMean"
    PRODUCT = "ReduceProd"
    MAXIMUM = "ReduceMax"
    MINIMUM = "ReduceMin"


@dataclass(frozen=True)
class Pool2d(Operator):
    """A pool. Operand: x NHWC; result [N, OH, OW, C].

    Padding elements take no part in the result. It must be smaller than the kernel, so that every window
    holds a real element.
    """

    kind: ClassVar[ReduceKind]
    """Kind of reduction of a window."""
    kernel: tuple[int, int]
    """Rows and columns of the window."""
    stride: tuple[int, int]
    """Rows and columns from one window to the next."""
    padding: Padding2d = ((0, 0), (0, 0))
    """Rows above and below, columns to the left and right."""

    @property
    def zero_point(self) -> int:
        """The number taken off every integer."""
        return 0

    def window(self, inputs: Types) -> SlidingWindow:
        return SlidingWindow(self.kernel, self.stride, padding=self.padding)

    def _result(self, x: TensorType, dtype: DType) -> TensorType:
        require(len(x.shape) == 4, f"expects NHWC, got {x}")
        for kernel, padding, size in zip(self.kernel, self.padding, x.shape[1:], strict=False):
            fits = max(padding) < kernel <= size + sum(padding)
            require(fits, f"a window of {kernel} does not fit {x} padded by {padding}")
        return TensorType((x.shape[0], *self.window([x]).places(x), x.shape[3]), dtype)

    def _total(self, x: Array) -> Array:
        """The sum over each window with padding as 0, summed row and column at a time, in x's type."""
        windows = self.window([]).view(x)
        total = np.zeros(windows.shape[:4], windows.dtype)
        for row in range(self.kernel[0]):
            for column in range(self.kernel[1]):
                total += windows[..., row, column]
        return total

    def counts(self, x: TensorType) -> Array:
        """Real elements in each window, int64 [1, OH, OW, 1]."""
        ones = np.ones((1, x.shape[1], x.shape[2], 1), np.int64)
        return self._total(ones)

    def crop(self, box: Box, inputs: Types) -> Cut:
        spans, padding = self.window(inputs).reads(box, inputs[0].shape)
        return replace(self, padding=padding), ((box[0], *spans, box[3]),)

    def _onnx_native(self, body: OnnxBody, image: str, op_type: str) -> str:
        """The ONNX pool of an NHWC value of a type it accepts."""
        (top, bottom), (left, right) = self.padding
        result = body.add(
            op_type,
            [body.add("Transpose", [image], perm=[0, 3, 1, 2])],
            kernel_shape=list(self.kernel),
            strides=list(self.stride),
            pads=[top, left, bottom, right],
        )
        return body.add("Transpose", [result], perm=[0, 2, 3, 1])

    def _onnx_total(self, body: OnnxBody, x: str, result: TensorType) -> str:
        """The sum over each window of an int64 value: per axis, differences of running sums."""
        (top, bottom), (left, right) = self.padding
        pads = body.integers((0, top + 1, left + 1, 0, 0, bottom, right, 0))
        total = body.add("Pad", [x, pads, body.scalar(0, DType.INT64)])
        for axis in (1, 2):
            total = body.add("CumSum", [total, body.scalar(axis, DType.INT64)])
            stride, kernel = self.stride[axis - 1], self.kernel[axis - 1]
            reach = (result.shape[axis] - 1) * stride + 1
            ends = [
                body.add("Slice", [total, *(body.integers((v,)) for v in (start, start + reach, axis, stride))])
                for start in (kernel, 0)
            ]
            total = body.add("Sub", ends)
        return total


@dataclass(frozen=True)
class MaxPool2d(Pool2d):
    """The largest element of each window, in the operand's type."""

    kind = ReduceKind.MAXIMUM

    def infer(self, inputs: Types) -> TensorType:
        return self._result(inputs[0], inputs[0].dtype)

    def chosen_from(self, operands: Sequence[T]) -> Sequence[T]:
        return operands

    def raised(self, by: Sequence[int]) -> Operator | None:
        return self

    def evaluate(self, inputs: Arrays) -> Array:
        kind = DType.of(inputs[0].dtype)
        lowest = kind.low if kind.is_integer else -np.inf
        return np.ascontiguousarray(self.window([]).view(inputs[0], lowest).max(axis=(4, 5)))

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        # ONNX Runtime pools no 16-bit or 32-bit integers; a float that holds them exactly does as well.
        narrow = types[0].dtype.bits <= 16 or types[0].dtype is DType.FLOAT32
        real = body.cast(inputs[0], DType.FLOAT32) if narrow else body.real64(inputs[0])
        return body.cast(self._onnx_native(body, real, "MaxPool"), types[0].dtype)


class SummingPool2d(Pool2d):
    """A pool whose result follows from the sum of each window."""

    input_zero_point: int
    """Subtracted from every integer."""

    @property
    def zero_point(self) -> int:
        return self.input_zero_point

    def raised(self, by: Sequence[int]) -> Self:
        changed: Any = self
        higher: Self = replace(changed, input_zero_point=self.input_zero_point + by[0])
        return higher

    def of_sums(self, totals: Array, counts: Array | int) -> Array:
        """The result for windows of so many real integers with these sums, int32."""
        return np.asarray(totals - counts * self.input_zero_point).astype(np.int32)

    def integers(self, x: Array) -> Array:
        """The result for an operand of integers.

        Args:
            x: the operand, NHWC.
        """
        return self.of_sums(self._total(x.astype(np.int64)), self.counts(TensorType(x.shape, DType.of(x.dtype))))


@dataclass(frozen=True)
class AveragePool2d(SummingPool2d):
    """The mean of the real elements of each window.

    Float: float32. Integer: the sum of x - input_zero_point divided by the count, rounded half away from zero, as
    int32; with 0 this is the average of values that keep their scale and zero point (TFLite Micro's integer pool).
    """

    kind = ReduceKind.MEAN
    scaled_sum: bool = False
    """Whether the integer form must be a sum and one scaling, as in TFLite's MEAN, even if operand and result are
    quantised alike. Only the quantize stage reads it; the result is the same."""
    input_zero_point: int = 0
    """Subtracted from every integer."""

    def infer(self, inputs: Types) -> TensorType:
        real = inputs[0].dtype is DType.FLOAT32
        return self._result(inputs[0], DType.FLOAT32 if real else DType.INT32)

    def evaluate(self, inputs: Arrays) -> Array:
        x = inputs[0]
        if x.dtype != np.float32:
            return self.integers(x)
        counts = self.counts(TensorType(x.shape, DType.FLOAT32))
        return np.asarray(self._total(x.astype(np.float64)) / counts, dtype=np.float32)

    def of_sums(self, totals: Array, counts: Array | int) -> Array:
        centred = totals - counts * self.input_zero_point
        return np.asarray(np.sign(centred) * ((np.abs(centred) + counts // 2) // counts), dtype=np.int32)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        result = self.infer(types)
        if result.dtype is DType.FLOAT32:
            return self._onnx_native(body, inputs[0], "AveragePool")
        wide = body.cast(inputs[0], DType.INT64)
        if self.input_zero_point:
            wide = body.add("Sub", [wide, body.scalar(self.input_zero_point, DType.INT64)])
        total = self._onnx_total(body, wide, result)
        counts = self.counts(types[0])
        raised = body.add("Add", [body.add("Abs", [total]), body.tensor(counts // 2)])
        quotient = body.add("Div", [raised, body.tensor(counts)])
        return body.cast(body.with_sign(quotient, total), DType.INT32)


@dataclass(frozen=True)
class SumPool2d(SummingPool2d):
    """The sum of (x - input_zero_point) over each window, as int32; padding adds 0. Integer operands only."""

    kind = ReduceKind.SUM
    input_zero_point: int = 0

    def infer(self, inputs: Types) -> TensorType:
        require(inputs[0].dtype.is_integer, f"expects integers, got {inputs[0]}")
        return self._result(inputs[0], DType.INT32)

    def evaluate(self, inputs: Arrays) -> Array:
        return self.integers(inputs[0])

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        wide = body.cast(inputs[0], DType.INT64)
        centred = body.add("Sub", [wide, body.scalar(self.input_zero_point, DType.INT64)])
        return body.cast(self._onnx_total(body, centred, self.infer(types)), DType.INT32)


_REDUCTIONS: dict[ReduceKind, Callable[..., Array]] = {
    ReduceKind.SUM: np.sum,
    ReduceKind.MEAN: np.mean,
    ReduceKind.PRODUCT: np.prod,
    ReduceKind.MAXIMUM: np.max,
    ReduceKind.MINIMUM: np.min,
}


@dataclass(frozen=True)
class Reduce(Operator):
    """The elements along some axes made one; the axes stay, with size 1.

    Operand: float32; SUM takes 8-bit integers too, the result is then the int32 sum of x - input_zero_point, and
    MAXIMUM and MINIMUM take any integers, in their own type.
    """

    kind: ReduceKind
    """Kind of reduction."""
    axes: tuple[int, ...]
    """Axes that are reduced, from 0, in rising order."""
    input_zero_point: int = 0
    """Subtracted from every element of an integer SUM."""

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        places = all(0 <= axis < len(x.shape) for axis in self.axes) and self.axes == tuple(sorted(set(self.axes)))
        require(places and x.elements > 0, f"cannot reduce {x} over the axes {list(self.axes)}")
        shape = tuple(1 if axis in self.axes else size for axis, size in enumerate(x.shape))
        if x.dtype is DType.FLOAT32 or (x.dtype.bits >= 8 and self.kind in (ReduceKind.MAXIMUM, ReduceKind.MINIMUM)):
            return TensorType(shape, x.dtype)
        count = prod(x.shape[axis] for axis in self.axes)
        small = x.dtype in (DType.INT8, DType.UINT8, DType.INT16) and count * (x.dtype.high - x.dtype.low) < 1 << 31
        require(self.kind is ReduceKind.SUM and small, f"{self.kind.value} of {count} elements of {x} is not supported")
        return TensorType(shape, DType.INT32)

    def evaluate(self, inputs: Arrays) -> Array:
        x = inputs[0]
        function = _REDUCTIONS[self.kind]
        if self.kind in (ReduceKind.MAXIMUM, ReduceKind.MINIMUM):
            return np.asarray(function(x, axis=self.axes, keepdims=True))
        if x.dtype == np.float32:
            with np.errstate(all="ignore"):
                return np.asarray(function(x.astype(np.float64), axis=self.axes, keepdims=True), dtype=np.float32)
        total = (x.astype(np.int64) - self.input_zero_point).sum(axis=self.axes, keepdims=True)
        return np.asarray(total, dtype=np.int32)

    def crop(self, box: Box, inputs: Types) -> Cut:
        sizes = inputs[0].shape
        return self, (tuple((0, sizes[axis]) if axis in self.axes else span for axis, span in enumerate(box)),)

    def chosen_from(self, operands: Sequence[T]) -> Sequence[T]:
        return operands if self.kind in (ReduceKind.MAXIMUM, ReduceKind.MINIMUM) else ()

    @property
    def sums(self) -> bool:
        return self.kind in (ReduceKind.SUM, ReduceKind.MEAN)

    def summing(self, zero_point: int, x: TensorType) -> IntegerSum:
        count = prod(x.shape[axis] for axis in self.axes) if self.kind is ReduceKind.MEAN else 1
        return IntegerSum(Reduce(ReduceKind.SUM, self.axes, zero_point), count)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        axes = body.integers(self.axes)
        if types[0].dtype is DType.FLOAT32:
            return body.add(self.kind.value, [inputs[0], axes], keepdims=1, noop_with_empty_axes=1)
        wide = body.cast(inputs[0], DType.INT64)
        if self.kind is ReduceKind.SUM:
            wide = body.add("Sub", [wide, body.scalar(self.input_zero_point, DType.INT64)])
        result = body.add(self.kind.value, [wide, axes], keepdims=1, noop_with_empty_axes=1)
        return body.cast(result, self.infer(types).dtype)


@dataclass(frozen=True)
class CumSum(Operator):
    """Running sums along an axis: y[i] = x[0] + ... + x[i].

    Operand: float32, or integers of 32 and 64 bits, modulo 2**bits; of int8, uint8 and int16 the result is the int32
    sum of x - input_zero_point.
    """

    axis: int
    """Axis along which sums run, from 0."""
    exclusive: bool = False
    """Whether y[i] leaves x[i] out."""
    reverse: bool = False
    """Whether sums begin at the end of the axis."""
    input_zero_point: int = 0
    """Subtracted from every integer."""
    sums: ClassVar[bool] = True
    """True: the result is sums of the operand's elements."""

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        require(0 <= self.axis < len(x.shape), f"{x} has no axis {self.axis} to sum along")
        if x.dtype in (DType.FLOAT32, DType.INT32, DType.UINT32, DType.INT64):
            return x
        small = x.dtype in (DType.INT8, DType.UINT8, DType.INT16)
        fits = small and x.shape[self.axis] * (x.dtype.high - x.dtype.low) < 1 << 31
        require(fits, f"running sums of {x.shape[self.axis]} elements of {x} are not supported")
        return TensorType(x.shape, DType.INT32)

    def evaluate(self, inputs: Arrays) -> Array:
        (x,), kind = inputs, self.infer([TensorType(inputs[0].shape, DType.of(inputs[0].dtype))])
        wide = x.astype(np.float64 if kind.dtype is DType.FLOAT32 else np.int64) - self.input_zero_point
        terms = np.moveaxis(wide, self.axis, 0)[:: -1 if self.reverse else 1]
        total = np.cumsum(terms, axis=0)
        if self.exclusive:
            total = np.concatenate([np.zeros_like(total[:1]), total[:-1]])
        return np.ascontiguousarray(np.moveaxis(total[:: -1 if self.reverse else 1], 0, self.axis), kind.dtype.numpy)

    def crop(self, box: Box, inputs: Types) -> Cut:
        require(box[self.axis] == (0, inputs[0].shape[self.axis]), "running sums are not tiled over their axis")
        return self, (box,)

    def reordered(self, order: Shape, inputs: Types) -> Operator | None:
        return replace(self, axis=order.index(self.axis))

    def raised(self, by: Sequence[int]) -> Operator | None:
        return replace(self, input_zero_point=self.input_zero_point + by[0])

    def summing(self, zero_point: int, x: TensorType) -> IntegerSum:
        reach = x.shape[self.axis] * (x.dtype.high - x.dtype.low)
        return IntegerSum(replace(self, input_zero_point=zero_point), headroom=max(30 - reach.bit_length(), 0))

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        x, kind = inputs[0], self.infer(types).dtype
        if kind is not DType.FLOAT32:
            x = body.add("Sub", [body.cast(x, DType.INT64), body.number(self.input_zero_point)])
        steps = {"exclusive": int(self.exclusive), "reverse": int(self.reverse)}
        return body.cast(body.add("CumSum", [x, body.number(self.axis)], **steps), kind)


@dataclass(frozen=True)
class ArgExtreme(Operator):
    """The place of the largest (or smallest) element along an axis, which stays with size 1."""

    axis: int
    """Axis that is reduced, from 0."""
    largest: bool
    """True for the place of the largest element, False for the least."""
    last: bool = False
    """Whether the last of equal elements is taken, otherwise the first."""
    dtype: DType = DType.INT64
    """Element type of the result, INT32 or INT64."""

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        require(
            0 <= self.axis < len(x.shape) and x.elements > 0 and x.dtype is not DType.BOOL and x.dtype.bits >= 8,
            f"{x} has no extreme along axis {self.axis}",
        )
        require(self.dtype in (DType.INT32, DType.INT64), f"places are int32 or int64, not {self.dtype.text}")
        return TensorType((*x.shape[: self.axis], 1, *x.shape[self.axis + 1 :]), self.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        function = np.argmax if self.largest else np.argmin
        x = np.flip(inputs[0], self.axis) if self.last else inputs[0]
        places = function(x, axis=self.axis, keepdims=True)
        return np.asarray(x.shape[self.axis] - 1 - places if self.last else places, dtype=self.dtype.numpy)

    def crop(self, box: Box, inputs: Types) -> Cut:
        whole = (0, inputs[0].shape[self.axis])
        return self, ((*box[: self.axis], whole, *box[self.axis + 1 :]),)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        # ONNX Runtime has no ArgMax of 16-bit integers.
        x = body.cast(inputs[0], DType.INT32) if types[0].dtype in (DType.INT16, DType.UINT16) else inputs[0]
        name = "ArgMax" if self.largest else "ArgMin"
        places = body.add(name, [x], axis=self.axis, keepdims=1, select_last_index=int(self.last))
        return body.cast(places, self.dtype)


@dataclass(frozen=True)
class Normalise(Rowwise):
    """Each row along the last axis divided by its spread, float32.

    y = (x - m) / sqrt(mean((x - m)**2) + epsilon) with m the row's mean, or 0 unless `centred` (RMS normalisation).
    Where `summed` y = x / sqrt(max(sum(x**2), epsilon)): rows of length 1.
    """

    noun = "a normalisation"
    epsilon: float
    """Added to the mean of squares before the root; the least sum of squares if `summed`."""
    centred: bool = True
    """Whether the mean of a row is subtracted first."""
    summed: bool = False
    """Whether rows are divided by the root of their sum of squares, without a mean."""

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        require(x.dtype is DType.FLOAT32 and len(x.shape) > 0 and x.elements > 0, f"cannot normalise {x}")
        return x

    def evaluate(self, inputs: Arrays) -> Array:
        x = inputs[0].astype(np.float64)
        if self.summed:
            return np.asarray(x / np.sqrt(np.maximum((x * x).sum(-1, keepdims=True), self.epsilon)), dtype=np.float32)
        if self.centred:
            x = x - x.mean(axis=-1, keepdims=True)
        spread = (x * x).mean(axis=-1, keepdims=True) + self.epsilon
        with np.errstate(all="ignore"):
            return np.asarray(x / np.sqrt(spread), dtype=np.float32)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        last, x = body.integers((-1,)), inputs[0]
        if self.summed:
            total = body.add("ReduceSum", [body.add("Mul", [x, x]), last], keepdims=1)
            limited = body.add("Max", [total, body.scalar(self.epsilon, DType.FLOAT32)])
            return body.add("Div", [x, body.add("Sqrt", [limited])])
        if self.centred:
            x = body.add("Sub", [x, body.add("ReduceMean", [x, last], keepdims=1)])
        mean = body.add("ReduceMean", [body.add("Mul", [x, x]), last], keepdims=1)
        spread = body.add("Sqrt", [body.add("Add", [mean, body.scalar(self.epsilon, DType.FLOAT32)])])
        return body.add("Div", [x, spread])


document(__name__)
