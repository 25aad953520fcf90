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
    """Weighted sums along some axes: linear and cubic resizing. Operands: x, then for each axis constant places int32
    [R, K] and weights [R, K]; both x and the weights float32, or x of 8 bits, the weights int32 and the sums too.

    Along one axis y[..., r, ...] = sum over k of x[..., places[r, k], ...] * weights[r, k], and so on along the next.
    """

    axes: tuple[int, ...]
    """From 0, in rising order."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, *taps = inputs
        fits = self.axes == tuple(sorted(set(self.axes))) and all(0 <= axis < len(x.shape) for axis in self.axes)
        require(fits and len(taps) == 2 * len(self.axes), f"cannot resample {x} along the axes {list(self.axes)}")
        real = x.dtype is DType.FLOAT32
        require(real or x.dtype in (DType.INT8, DType.UINT8), f"cannot resample {x}")
        shape = list(x.shape)
        for axis, places, weights in zip(self.axes, taps[::2], taps[1::2], strict=True):
            kinds = places.dtype is DType.INT32 and weights.dtype is (DType.FLOAT32 if real else DType.INT32)
            alike = kinds and len(places.shape) == 2 and places.shape == weights.shape
            require(alike, f"expects places and weights [R, K], got {places}, {weights}")
            shape[axis] = places.shape[0]
        return TensorType(tuple(shape), DType.FLOAT32 if real else DType.INT32)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, *taps = inputs
        wide = np.float64 if x.dtype == np.float32 else np.int64
        result = x.astype(wide)
        for axis, places, weights in zip(self.axes, taps[::2], taps[1::2], strict=True):
            shape: Shape = (-1,) + (1,) * (x.ndim - 1 - axis)
            terms: list[Array] = [
                np.take(result, places[:, tap], axis=axis) * weights[:, tap].astype(wide).reshape(shape)
                for tap in range(places.shape[1])
            ]
            result = sum(terms[1:], terms[0])
        return np.asarray(result, dtype=np.float32 if wide is np.float64 else np.int32)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        source = tuple((0, inputs[0].shape[axis]) if axis in self.axes else span for axis, span in enumerate(box))
        rows: list[Box] = []
        for axis, places in zip(self.axes, inputs[1::2], strict=True):
            rows += [(box[axis], (0, places.shape[1]))] * 2
        return self, (source, *rows)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        kind = self.infer(types).dtype
        result = body.cast(inputs[0], kind)
        for axis, places, weights, shape in zip(
            self.axes, inputs[1::2], inputs[2::2], (entry.shape for entry in types[1::2]), strict=True
        ):
            taken = body.add("Gather", [result, places], axis=axis)
            after = len(types[0].shape) - 1 - axis
            aligned = body.add("Reshape", [weights, body.integers((*shape, *(1,) * after))])
            weighted = body.add("Mul", [taken, aligned])
            result = body.add("ReduceSum", [weighted, body.integers((axis + 1,))], keepdims=0)
        return result
