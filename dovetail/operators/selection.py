"""Operators that take elements from computed places: pick, gather, resample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, Box, DType, Shape, TensorType, full_box
from dovetail.operators.base import Operator, require

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


@dataclass(frozen=True)
class Pick(Operator):
    """y[i, j, ...] = x[places[0][i], places[1][j], ...]: elements by fixed places along each axis.

    Reversal, repetition, borders that mirror or repeat, and nearest-neighbour resizing are all of this kind.
    """

    places: tuple[tuple[int, ...], ...]
    """For each axis of the operand, where the elements of the result come from, from 0."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x = inputs[0]
        fits = len(self.places) == len(x.shape) and all(
            all(0 <= place < size for place in places) for places, size in zip(self.places, x.shape, strict=True)
        )
        require(fits, f"the places to pick from {x} are outside of it")
        return TensorType(tuple(len(places) for places in self.places), x.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        if not self.places:
            return inputs[0]
        return np.ascontiguousarray(inputs[0][np.ix_(*self.places)])

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        kept = [places[start:stop] for places, (start, stop) in zip(self.places, box, strict=True)]
        spans = tuple((min(places), max(places) + 1) for places in kept)
        moved = tuple(tuple(place - low for place in places) for places, (low, _) in zip(kept, spans, strict=True))
        return replace(self, places=moved), (spans,)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        result = inputs[0]
        for axis, places in enumerate(self.places):
            if places != tuple(range(types[0].shape[axis])):
                result = body.add("Gather", [result, body.integers(places)], axis=axis)
        return body.add("Identity", [result]) if result == inputs[0] else result


@dataclass(frozen=True)
class Gather(Operator):
    """Slices of x along an axis, by computed places. Operands: x, indices (int32 or int64, any shape).

    The indices' axes take the place of `axis`. A negative index counts from the end; one beyond either end is
    moved to that end.
    """

    axis: int
    """From 0."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, indices = inputs
        require(
            0 <= self.axis < len(x.shape) and indices.dtype in (DType.INT32, DType.INT64) and x.shape[self.axis] > 0,
            f"cannot gather from {x} along axis {self.axis} by {indices}",
        )
        return TensorType((*x.shape[: self.axis], *indices.shape, *x.shape[self.axis + 1 :]), x.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, indices = inputs
        size = x.shape[self.axis]
        places = np.clip(np.where(indices < 0, indices + size, indices), 0, size - 1)
        return np.asarray(np.take(x, places, axis=self.axis))

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        x, indices = inputs
        middle = self.axis + len(indices.shape)
        whole = full_box((x.shape[self.axis],))
        return self, ((*box[: self.axis], *whole, *box[middle:]), box[self.axis : middle])

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        size = types[0].shape[self.axis]
        wide = body.cast(inputs[1], DType.INT64)
        lifted = body.add("Add", [wide, body.scalar(size, DType.INT64)])
        from_front = body.add("Where", [body.add("Less", [wide, body.scalar(0, DType.INT64)]), lifted, wide])
        limits = [body.scalar(0, DType.INT64), body.scalar(size - 1, DType.INT64)]
        places = body.add("Clip", [from_front, *limits])
        return body.add("Gather", [inputs[0], places], axis=self.axis)


@dataclass(frozen=True)
class Resample(Operator):
    """Weighted sums along one axis. Operands: x float32, places int32 [R, K], weights float32 [R, K], both constant.

    y[..., r, ...] = sum over k of x[..., places[r, k], ...] * weights[r, k]: linear and cubic resizing of an axis.
    """

    axis: int
    """From 0."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, places, weights = inputs
        require(x.dtype is DType.FLOAT32 and 0 <= self.axis < len(x.shape), f"cannot resample {x}, axis {self.axis}")
        fits = places.dtype is DType.INT32 and weights.dtype is DType.FLOAT32 and len(places.shape) == 2
        require(fits and places.shape == weights.shape, f"expects places and weights [R, K], got {places}, {weights}")
        return TensorType((*x.shape[: self.axis], places.shape[0], *x.shape[self.axis + 1 :]), x.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, places, weights = inputs
        shape: Shape = (-1,) + (1,) * (x.ndim - 1 - self.axis)
        total = np.zeros((*x.shape[: self.axis], places.shape[0], *x.shape[self.axis + 1 :]), np.float64)
        for tap in range(places.shape[1]):
            total += np.take(x, places[:, tap], axis=self.axis) * weights[:, tap].astype(np.float64).reshape(shape)
        return np.asarray(total, dtype=np.float32)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        whole, taps = (0, inputs[0].shape[self.axis]), (0, inputs[1].shape[1])
        rows: Box = (box[self.axis], taps)
        return self, ((*box[: self.axis], whole, *box[self.axis + 1 :]), rows, rows)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        after = len(types[0].shape) - 1 - self.axis
        taken = body.add("Gather", [inputs[0], inputs[1]], axis=self.axis)
        shape = body.integers((*types[1].shape, *(1,) * after))
        weighted = body.add("Mul", [taken, body.add("Reshape", [inputs[2], shape])])
        return body.add("ReduceSum", [weighted, body.integers((self.axis + 1,))], keepdims=0)
