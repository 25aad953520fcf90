"""Operators that move elements, or take them from computed places: reshape to im2col, pick, gather, resample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dovetail.documented import document
from dovetail.ir.operators.base import Arrays, Cut, Mover, Names, Operator, Piece, SlidingWindow, T, Types, require
from dovetail.ir.types import Array, Box, DType, Shape, TensorType, full_box, with_span

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody


@dataclass(frozen=True)
class Reshape(Mover):
    """The same elements, row-major, under another shape."""

    is_view = True
    shape: Shape
    """Shape of the result, with as many elements as the operand."""

    def infer(self, inputs: Types) -> TensorType:
        require(prod(self.shape) == inputs[0].elements, f"cannot reshape {inputs[0]} to {list(self.shape)}")
        return TensorType(self.shape, inputs[0].dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        return inputs[0].reshape(self.shape)

    def pieces(self, inputs: Types) -> tuple[Piece, ...]:
        return (Piece(0, full_box(self.infer(inputs).shape)),)

    def axis_after(self, axis: int, inputs: Types) -> int | None:
        shape, place = inputs[0].shape, axis % len(inputs[0].shape)
        before = prod(shape[:place])
        same = [i for i, n in enumerate(self.shape) if n == shape[place] and prod(self.shape[:i]) == before]
        return same[-1] if same else None

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        return body.add("Reshape", [inputs[0], body.integers(self.shape)])


def permuted(values: tuple[T, ...], order: Shape) -> tuple[T, ...]:
    """Values of axes in another order: that of axis i is the one of axis `order[i]`."""
    return tuple(values[axis] for axis in order)


@dataclass(frozen=True)
class Transpose(Mover):
    """Axes in another order: axis i of the result is axis permutation[i] of the operand."""

    permutation: tuple[int, ...]
    """Axis of the operand for each axis of the result."""

    def infer(self, inputs: Types) -> TensorType:
        require(
            sorted(self.permutation) == list(range(len(inputs[0].shape))),
            f"{list(self.permutation)} does not permute the axes of {inputs[0]}",
        )
        return TensorType(tuple(inputs[0].shape[axis] for axis in self.permutation), inputs[0].dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        return np.ascontiguousarray(inputs[0].transpose(self.permutation))

    def crop(self, box: Box, inputs: Types) -> Cut:
        source: list[tuple[int, int]] = [(0, 0)] * len(box)
        for span, axis in zip(box, self.permutation, strict=True):
            source[axis] = span
        return self, (tuple(source),)

    def pieces(self, inputs: Types) -> tuple[Piece, ...]:
        box = full_box(self.infer(inputs).shape)
        return (Piece(0, box, (0,) * len(box), tuple((axis, 1) for axis in self.permutation)),)

    def is_noop(self, inputs: Types) -> bool:
        return self.permutation == tuple(range(len(self.permutation)))

    def axis_after(self, axis: int, inputs: Types) -> int | None:
        return self.permutation.index(axis % len(self.permutation))

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        return body.add("Transpose", [inputs[0]], perm=list(self.permutation))


@dataclass(frozen=True)
class Pad(Mover):
    """Elements of one value before and after each axis."""

    pads = True
    before: Shape
    """Elements before each axis."""
    after: Shape
    """Elements after each axis."""
    value: float = 0
    """The element written: an integer for integer types."""

    def infer(self, inputs: Types) -> TensorType:
        shape = inputs[0].shape
        require(len(shape) == len(self.before) == len(self.after), f"pads {self.before} do not fit {inputs[0]}")
        sizes = zip(self.before, shape, self.after, strict=True)
        return TensorType(tuple(b + s + a for b, s, a in sizes), inputs[0].dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        pads = list(zip(self.before, self.after, strict=True))
        return np.pad(inputs[0], pads, constant_values=np.array(self.value, inputs[0].dtype))

    def crop(self, box: Box, inputs: Types) -> Cut:
        spans, before, after = [], [], []
        for (start, stop), lead, size in zip(box, self.before, inputs[0].shape, strict=True):
            inner = (min(max(start - lead, 0), size), min(max(stop - lead, 0), size))
            spans.append(inner)
            before.append(min(max(lead - start, 0), stop - start))
            after.append(stop - start - before[-1] - (inner[1] - inner[0]))
        return Pad(tuple(before), tuple(after), self.value), (tuple(spans),)

    @property
    def filler(self) -> float:
        return self.value

    def with_filler(self, value: float) -> Operator:
        return replace(self, value=value)

    def raised(self, by: Sequence[int]) -> Operator | None:
        return replace(self, value=self.value + by[0])

    def reordered(self, order: Shape, inputs: Types) -> Operator | None:
        return Pad(permuted(self.before, order), permuted(self.after, order), self.value)

    def pieces(self, inputs: Types) -> tuple[Piece, ...] | None:
        x, sides = inputs[0], (self.before[:1], self.after[:1], self.before[-1:], self.after[-1:])
        image = len(x.shape) == 4 and x.shape[0] == 1 and x.dtype.numpy.itemsize == 1
        if not image or any(map(any, sides)):
            return None  # rows and columns of one image of bytes only
        return (Piece(0, full_box(self.infer(inputs).shape), before=self.before, fill=int(self.value)),)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        kind = types[0].dtype
        held = DType.INT32 if kind in (DType.INT16, DType.UINT16) else kind  # ONNX Runtime pads no 16-bit integers
        x = inputs[0] if held is kind else body.cast(inputs[0], held)
        padded = body.add("Pad", [x, body.integers((*self.before, *self.after)), body.scalar(self.value, held)])
        return padded if held is kind else body.cast(padded, kind)


@dataclass(frozen=True)
class Concat(Mover):
    """Operands joined along an axis, in order."""

    joins = True
    axis: int
    """Axis that is joined, from 0."""

    def infer(self, inputs: Types) -> TensorType:
        first = inputs[0]
        for other in inputs[1:]:
            rest = [a == b for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=True)) if i != self.axis]
            require(all(rest) and other.dtype is first.dtype, f"cannot concatenate {first} and {other}")
        total = sum(kind.shape[self.axis] for kind in inputs)
        shape = (*first.shape[: self.axis], total, *first.shape[self.axis + 1 :])
        return TensorType(shape, first.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        return np.concatenate(list(inputs), axis=self.axis)

    def crop(self, box: Box, inputs: Types) -> Cut:
        total = sum(kind.shape[self.axis] for kind in inputs)
        require(box[self.axis] == (0, total), "a concatenation is not tiled over the axis it is along")
        return self, tuple((*box[: self.axis], (0, kind.shape[self.axis]), *box[self.axis + 1 :]) for kind in inputs)

    def is_noop(self, inputs: Types) -> bool:
        return len(inputs) == 1

    def reordered(self, order: Shape, inputs: Types) -> Operator | None:
        return Concat(order.index(self.axis))

    def pieces(self, inputs: Types) -> tuple[Piece, ...]:
        whole, axis, start, found = full_box(self.infer(inputs).shape), self.axis, 0, []
        for place, kind in enumerate(inputs):
            stop = start + kind.shape[axis]
            found.append(Piece(place, with_span(whole, axis, (start, stop))))
            start = stop
        return tuple(found)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        return body.add("Concat", list(inputs), axis=self.axis)


@dataclass(frozen=True)
class Slice(Mover):
    """A rectangular part, every `step`-th element."""

    start: Shape
    """First element along each axis."""
    stop: Shape
    """End along each axis: the first element left out."""
    step: Shape
    """Elements from one taken element to the next, along each axis."""

    @property
    def box_read(self) -> Box:
        return tuple(zip(self.start, self.stop, strict=True))

    @property
    def skips(self) -> bool:
        return any(step > 1 for step in self.step)

    def within(self, box: Box) -> Slice:
        start, stop = (tuple(x - a for x, (a, _) in zip(end, box, strict=True)) for end in (self.start, self.stop))
        return Slice(start, stop, self.step)

    def infer(self, inputs: Types) -> TensorType:
        require(
            len(self.start) == len(inputs[0].shape)
            and all(0 <= a <= b <= size for a, b, size in zip(self.start, self.stop, inputs[0].shape, strict=True))
            and all(step > 0 for step in self.step),
            f"slice {self.start}:{self.stop}:{self.step} is outside {inputs[0]}",
        )
        sizes = (-((a - b) // s) for a, b, s in zip(self.start, self.stop, self.step, strict=True))
        return TensorType(tuple(sizes), inputs[0].dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        parts = tuple(slice(a, b, s) for a, b, s in zip(self.start, self.stop, self.step, strict=True))
        return np.ascontiguousarray(inputs[0][parts])

    def crop(self, box: Box, inputs: Types) -> Cut:
        spans = zip(box, self.start, self.step, strict=True)
        reads = tuple((first + a * step, first + (b - 1) * step + 1) for (a, b), first, step in spans)
        return Slice((0,) * len(reads), tuple(stop - start for start, stop in reads), self.step), (reads,)

    def axis_after(self, axis: int, inputs: Types) -> int | None:
        place = axis % len(self.start)
        whole = (self.start[place], self.stop[place], self.step[place]) == (0, inputs[0].shape[place], 1)
        return place if whole else None

    def reordered(self, order: Shape, inputs: Types) -> Operator | None:
        return Slice(permuted(self.start, order), permuted(self.stop, order), permuted(self.step, order))

    def pieces(self, inputs: Types) -> tuple[Piece, ...]:
        walks = tuple(enumerate(self.step))
        return (Piece(0, full_box(self.infer(inputs).shape), self.start, walks),)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        axes = tuple(range(len(self.start)))
        operands = [inputs[0], *(body.integers(v) for v in (self.start, self.stop, axes, self.step))]
        return body.add("Slice", operands)


@dataclass(frozen=True)
class Im2col(Mover):
    """Each window of an NHWC image laid out as one pixel's channels, in (row, column, channel) order.

    im2col: a convolution is a 1x1 convolution of it. Result [N, OH, OW, KH*KW*C].
    """

    kernel: tuple[int, int]
    """Rows and columns of a window."""
    stride: tuple[int, int] = (1, 1)
    """Rows and columns from one window to the next."""
    dilation: tuple[int, int] = (1, 1)
    """Rows and columns from one tap of a window to the next."""

    def __repr__(self) -> str:
        """Part of what tuning files know a layer by."""
        return f"Patches(kernel={self.kernel}, stride={self.stride}, dilation={self.dilation})"

    def window(self, inputs: Types) -> SlidingWindow:
        return SlidingWindow(self.kernel, self.stride, self.dilation)

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        return TensorType((x.shape[0], *self.window(inputs).places(x), prod(self.kernel) * x.shape[3]), x.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        image = self.window([]).view(inputs[0]).transpose(0, 1, 2, 4, 5, 3)
        return np.ascontiguousarray(image).reshape(*image.shape[:3], -1)

    def crop(self, box: Box, inputs: Types) -> Cut:
        shape = inputs[0].shape
        require(box[3] == (0, prod(self.kernel) * shape[3]), "patches are not tiled over channels")
        return self, ((box[0], *self.window(inputs).reads(box, shape)[0], (0, shape[3])),)

    def pieces(self, inputs: Types) -> tuple[Piece, ...] | None:
        """One per row of the window: its columns and channels lie side by side in the image."""
        if self.dilation[1] != 1 or inputs[0].shape[0] != 1:
            return None
        whole, depth = full_box(self.infer(inputs).shape), self.kernel[1] * inputs[0].shape[3]
        walks = ((0, 1), (1, self.stride[0]), (2, self.stride[1]), (3, 1))
        return tuple(
            Piece(0, (*whole[:3], (row * depth, (row + 1) * depth)), (0, row * self.dilation[0], 0, 0), walks)
            for row in range(self.kernel[0])
        )

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        (_, height, width, _) = self.infer(types).shape
        parts = []
        for row in range(self.kernel[0]):
            for column in range(self.kernel[1]):
                start = (row * self.dilation[0], column * self.dilation[1])
                stop = (start[0] + (height - 1) * self.stride[0] + 1, start[1] + (width - 1) * self.stride[1] + 1)
                window = [start, stop, (1, 2), self.stride]
                parts.append(body.add("Slice", [inputs[0], *(body.integers(v) for v in window)]))
        return body.add("Concat", parts, axis=3)


Im2col.__name__ = "Patches"  # its name in layers' names, saved stages and messages


@dataclass(frozen=True)
class Relayout(Mover):
    """The same value in another layout; every element keeps its value."""

    changes_layout = True

    def is_noop(self, inputs: Types) -> bool:
        return False

    def infer(self, inputs: Types) -> TensorType:
        return inputs[0]

    def evaluate(self, inputs: Arrays) -> Array:
        return inputs[0]

    def crop(self, box: Box, inputs: Types) -> Cut:
        return self, (box,)

    def pieces(self, inputs: Types) -> tuple[Piece, ...]:
        return (Piece(0, full_box(self.infer(inputs).shape)),)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        return body.add("Identity", [inputs[0]])


@dataclass(frozen=True)
class Pick(Mover):
    """Elements at fixed places along each axis: y[i, j, ...] = x[places[0][i], places[1][j], ...].

    Reversal, repetition, borders that mirror or repeat, and nearest-neighbour resizing are all of this kind.
    """

    places: tuple[tuple[int, ...], ...]
    """Places, from 0, of the result's elements along each axis of the operand."""

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        fits = len(self.places) == len(x.shape) and all(
            all(0 <= place < size for place in places) for places, size in zip(self.places, x.shape, strict=True)
        )
        require(fits, f"the places to pick from {x} are outside of it")
        return TensorType(tuple(len(places) for places in self.places), x.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        if not self.places:
            return inputs[0]
        return np.ascontiguousarray(inputs[0][np.ix_(*self.places)])

    def crop(self, box: Box, inputs: Types) -> Cut:
        kept = [places[start:stop] for places, (start, stop) in zip(self.places, box, strict=True)]
        spans = tuple((min(places), max(places) + 1) for places in kept)
        moved = tuple(tuple(place - low for place in places) for places, (low, _) in zip(kept, spans, strict=True))
        return replace(self, places=moved), (spans,)

    def is_noop(self, inputs: Types) -> bool:
        return all(taken == tuple(range(size)) for taken, size in zip(self.places, inputs[0].shape, strict=True))

    def reordered(self, order: Shape, inputs: Types) -> Operator | None:
        return Pick(permuted(self.places, order))

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
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
    """Axis whose elements are picked, from 0."""

    def infer(self, inputs: Types) -> TensorType:
        x, indices = inputs
        require(
            0 <= self.axis < len(x.shape) and indices.dtype in (DType.INT32, DType.INT64) and x.shape[self.axis] > 0,
            f"cannot gather from {x} along axis {self.axis} by {indices}",
        )
        return TensorType((*x.shape[: self.axis], *indices.shape, *x.shape[self.axis + 1 :]), x.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        x, indices = inputs
        size = x.shape[self.axis]
        places = np.clip(np.where(indices < 0, indices + size, indices), 0, size - 1)
        return np.asarray(np.take(x, places, axis=self.axis))

    def crop(self, box: Box, inputs: Types) -> Cut:
        x, indices = inputs
        middle = self.axis + len(indices.shape)
        whole = full_box((x.shape[self.axis],))
        return self, ((*box[: self.axis], *whole, *box[middle:]), box[self.axis : middle])

    def chosen_from(self, operands: Sequence[T]) -> Sequence[T]:
        return operands[:1]

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        size = types[0].shape[self.axis]
        wide = body.cast(inputs[1], DType.INT64)
        lifted = body.add("Add", [wide, body.number(size)])
        from_front = body.add("Where", [body.add("Less", [wide, body.number(0)]), lifted, wide])
        return body.add("Gather", [inputs[0], body.limited(from_front, 0, size - 1)], axis=self.axis)


@dataclass(frozen=True)
class Resample(Operator):
    """Weighted sums along some axes: linear and cubic resizing. Operands: x, then for each axis constant places int32
    [R, K] and weights [R, K]; both x and the weights float32, or x of 8 bits, the weights int32 and the sums too.

    Along one axis y[..., r, ...] = sum over k of x[..., places[r, k], ...] * weights[r, k], and so on along the next.
    """

    axes: tuple[int, ...]
    """Axes that change, from 0, in rising order."""

    def infer(self, inputs: Types) -> TensorType:
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

    def evaluate(self, inputs: Arrays) -> Array:
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

    def crop(self, box: Box, inputs: Types) -> Cut:
        source = tuple((0, inputs[0].shape[axis]) if axis in self.axes else span for axis, span in enumerate(box))
        rows: list[Box] = []
        for axis, places in zip(self.axes, inputs[1::2], strict=True):
            rows += [(box[axis], (0, places.shape[1]))] * 2
        return self, (source, *rows)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
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


document(__name__)
