"""Operators that gather a whole axis: sums, extremes, the place of an extreme, normalisation."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, Box, DType, TensorType
from dovetail.operators.base import Operator, require

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


class ReduceKind(enum.Enum):
    """How elements become one."""

    SUM = "ReduceSum"
    MEAN = "ReduceMean"
    PRODUCT = "ReduceProd"
    MAXIMUM = "ReduceMax"
    MINIMUM = "ReduceMin"


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
    axes: tuple[int, ...]
    """From 0, in rising order."""
    input_zero_point: int = 0
    """Taken off every element of an integer SUM."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
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

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x = inputs[0]
        function = _REDUCTIONS[self.kind]
        if self.kind in (ReduceKind.MAXIMUM, ReduceKind.MINIMUM):
            return np.asarray(function(x, axis=self.axes, keepdims=True))
        if x.dtype == np.float32:
            with np.errstate(all="ignore"):
                return np.asarray(function(x.astype(np.float64), axis=self.axes, keepdims=True), dtype=np.float32)
        total = (x.astype(np.int64) - self.input_zero_point).sum(axis=self.axes, keepdims=True)
        return np.asarray(total, dtype=np.int32)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        sizes = inputs[0].shape
        return self, (tuple((0, sizes[axis]) if axis in self.axes else span for axis, span in enumerate(box)),)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        axes = body.integers(self.axes)
        if types[0].dtype is DType.FLOAT32:
            return body.add(self.kind.value, [inputs[0], axes], keepdims=1, noop_with_empty_axes=1)
        wide = body.cast(inputs[0], DType.INT64)
        if self.kind is ReduceKind.SUM:
            wide = body.add("Sub", [wide, body.scalar(self.input_zero_point, DType.INT64)])
        result = body.add(self.kind.value, [wide, axes], keepdims=1, noop_with_empty_axes=1)
        return body.cast(result, self.infer(types).dtype)


@dataclass(frozen=True)
class ArgExtreme(Operator):
    """The place of the largest (or smallest) element along an axis, which stays with size 1."""

    axis: int
    """From 0."""
    largest: bool
    last: bool = False
    """Of equal elements the last, otherwise the first."""
    dtype: DType = DType.INT64
    """INT32 or INT64."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x = inputs[0]
        require(
            0 <= self.axis < len(x.shape) and x.elements > 0 and x.dtype is not DType.BOOL and x.dtype.bits >= 8,
            f"{x} has no extreme along axis {self.axis}",
        )
        require(self.dtype in (DType.INT32, DType.INT64), f"places are int32 or int64, not {self.dtype.text}")
        return TensorType((*x.shape[: self.axis], 1, *x.shape[self.axis + 1 :]), self.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        function = np.argmax if self.largest else np.argmin
        x = np.flip(inputs[0], self.axis) if self.last else inputs[0]
        places = function(x, axis=self.axis, keepdims=True)
        return np.asarray(x.shape[self.axis] - 1 - places if self.last else places, dtype=self.dtype.numpy)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        whole = (0, inputs[0].shape[self.axis])
        return self, ((*box[: self.axis], whole, *box[self.axis + 1 :]),)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        # ONNX Runtime has no ArgMax of 16-bit integers.
        x = body.cast(inputs[0], DType.INT32) if types[0].dtype in (DType.INT16, DType.UINT16) else inputs[0]
        name = "ArgMax" if self.largest else "ArgMin"
        places = body.add(name, [x], axis=self.axis, keepdims=1, select_last_index=int(self.last))
        return body.cast(places, self.dtype)


@dataclass(frozen=True)
class Normalise(Operator):
    """Each row along the last axis divided by its spread, float32.

    y = (x - m) / sqrt(mean((x - m)**2) + epsilon) with m the row's mean, or 0 unless `centred` (RMS normalisation).
    Where `summed` y = x / sqrt(max(sum(x**2), epsilon)): rows of length 1.
    """

    epsilon: float
    centred: bool = True
    summed: bool = False

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x = inputs[0]
        require(x.dtype is DType.FLOAT32 and len(x.shape) > 0 and x.elements > 0, f"cannot normalise {x}")
        return x

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x = inputs[0].astype(np.float64)
        if self.summed:
            return np.asarray(x / np.sqrt(np.maximum((x * x).sum(-1, keepdims=True), self.epsilon)), dtype=np.float32)
        if self.centred:
            x = x - x.mean(axis=-1, keepdims=True)
        spread = (x * x).mean(axis=-1, keepdims=True) + self.epsilon
        with np.errstate(all="ignore"):
            return np.asarray(x / np.sqrt(spread), dtype=np.float32)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        require(box[-1] == (0, inputs[0].shape[-1]), "a normalisation is not tiled over its last axis")
        return self, (box,)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
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
