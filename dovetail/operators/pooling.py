"""Pooling over windows of an NHWC image: maximum, average and sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, Box, DType, TensorType
from dovetail.operators.base import Operator, require

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody

Padding2d = tuple[tuple[int, int], tuple[int, int]]
"""Rows before and after, columns before and after."""


@dataclass(frozen=True)
class _Pooling(Operator):
    """What the pools share. Operand: x NHWC; result [N, OH, OW, C].

    Padding elements take no part in the result. It must be smaller than the kernel, so that every window
    holds a real element.
    """

    kernel: tuple[int, int]
    """Rows and columns of the window."""
    stride: tuple[int, int]
    """Rows and columns from one window to the next."""
    padding: Padding2d = ((0, 0), (0, 0))

    def _result(self, x: TensorType, dtype: DType) -> TensorType:
        require(len(x.shape) == 4, f"expects NHWC, got {x}")
        sizes = []
        for axis in (0, 1):
            kernel, padding = self.kernel[axis], self.padding[axis]
            padded = x.shape[1 + axis] + sum(padding)
            require(max(padding) < kernel <= padded, f"a window of {kernel} does not fit {x} padded by {padding}")
            sizes.append((padded - kernel) // self.stride[axis] + 1)
        return TensorType((x.shape[0], *sizes, x.shape[3]), dtype)

    def _windows(self, x: Array, filler: float) -> Array:
        """Every window of the padded image: (N, OH, OW, C, KH, KW)."""
        pads = ((0, 0), *self.padding, (0, 0))
        padded = np.pad(x, pads, constant_values=np.array(filler, x.dtype))
        view = np.lib.stride_tricks.sliding_window_view(padded, self.kernel, axis=(1, 2))
        return view[:, :: self.stride[0], :: self.stride[1]]

    def _total(self, x: Array) -> Array:
        """The sum over each window with padding as 0, summed row and column at a time, in x's type."""
        windows = self._windows(x, 0)
        total = np.zeros(windows.shape[:4], windows.dtype)
        for row in range(self.kernel[0]):
            for column in range(self.kernel[1]):
                total += windows[..., row, column]
        return total

    def counts(self, x: TensorType) -> Array:
        """Real elements in each window, int64 [1, OH, OW, 1]."""
        ones = np.ones((1, x.shape[1], x.shape[2], 1), np.int64)
        return self._total(ones)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        spans, padding = [], []
        for axis in (0, 1):
            size, lead = inputs[0].shape[1 + axis], self.padding[axis][0]
            start = box[1 + axis][0] * self.stride[axis] - lead
            stop = (box[1 + axis][1] - 1) * self.stride[axis] + self.kernel[axis] - lead
            spans.append((max(start, 0), min(stop, size)))
            padding.append((max(-start, 0), max(stop - size, 0)))
        cropped = replace(self, padding=(padding[0], padding[1]))
        return cropped, ((box[0], spans[0], spans[1], box[3]),)

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
class MaxPool2d(_Pooling):
    """The largest element of each window, in the operand's type."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        return self._result(inputs[0], inputs[0].dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        kind = DType.of(inputs[0].dtype)
        lowest = kind.low if kind.is_integer else -np.inf
        windows = self._windows(inputs[0], lowest)
        return np.ascontiguousarray(windows.max(axis=(4, 5)))

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        # ONNX Runtime pools no 16-bit or 32-bit integers; a float that holds them exactly does as well.
        narrow = types[0].dtype.bits <= 16 or types[0].dtype is DType.FLOAT32
        real = body.cast(inputs[0], DType.FLOAT32) if narrow else body.real64(inputs[0])
        return body.cast(self._onnx_native(body, real, "MaxPool"), types[0].dtype)


@dataclass(frozen=True)
class AveragePool2d(_Pooling):
    """The mean of the real elements of each window.

    Float: float32. Integer: the sum of the raw values divided by the count, rounded half away from zero, as
    int32; this is the average of values that keep their scale and zero point (TFLite Micro's integer pool).
    """

    scaled_sum: bool = False
    """For the quantize stage: the integer form must be a sum and one scaling, as TFLite's MEAN is, also where input
    and result are quantised alike. No meaning of its own."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        real = inputs[0].dtype is DType.FLOAT32
        return self._result(inputs[0], DType.FLOAT32 if real else DType.INT32)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x = inputs[0]
        counts = self.counts(TensorType(tuple(x.shape), DType.of(x.dtype)))
        if x.dtype == np.float32:
            return np.asarray(self._total(x.astype(np.float64)) / counts, dtype=np.float32)
        total = self._total(x.astype(np.int64))
        quotient = (np.abs(total) + counts // 2) // counts
        return np.asarray(np.sign(total) * quotient, dtype=np.int32)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        result = self.infer(types)
        if result.dtype is DType.FLOAT32:
            return self._onnx_native(body, inputs[0], "AveragePool")
        total = self._onnx_total(body, body.cast(inputs[0], DType.INT64), result)
        counts = self.counts(types[0])
        raised = body.add("Add", [body.add("Abs", [total]), body.tensor(counts // 2)])
        quotient = body.add("Div", [raised, body.tensor(counts)])
        return body.cast(body.with_sign(quotient, total), DType.INT32)


@dataclass(frozen=True)
class SumPool2d(_Pooling):
    """The sum of (x - input_zero_point) over each window, as int32; padding adds 0. Integer operands only."""

    input_zero_point: int = 0

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        require(inputs[0].dtype.is_integer, f"expects integers, got {inputs[0]}")
        return self._result(inputs[0], DType.INT32)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return self._total(inputs[0].astype(np.int64) - self.input_zero_point).astype(np.int32)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        wide = body.cast(inputs[0], DType.INT64)
        centred = body.add("Sub", [wide, body.scalar(self.input_zero_point, DType.INT64)])
        return body.cast(self._onnx_total(body, centred, self.infer(types)), DType.INT32)
