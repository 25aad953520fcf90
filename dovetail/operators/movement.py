"""Operators that move elements without computing: reshape, transpose, pad, concat, slice, patches, relayout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, Box, DType, Shape, TensorType, full_box
from dovetail.operators.base import Operator, require

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


@dataclass(frozen=True)
class Reshape(Operator):
    """The same elements, row-major, under another shape."""

    shape: Shape

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        require(prod(self.shape) == inputs[0].elements, f"cannot reshape {inputs[0]} to {list(self.shape)}")
        return TensorType(self.shape, inputs[0].dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return inputs[0].reshape(self.shape)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        return body.add("Reshape", [inputs[0], body.integers(self.shape)])


@dataclass(frozen=True)
class Transpose(Operator):
    """Axes in another order: axis i of the result is axis permutation[i] of the operand."""

    permutation: tuple[int, ...]

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        require(
            sorted(self.permutation) == list(range(len(inputs[0].shape))),
            f"{list(self.permutation)} does not permute the axes of {inputs[0]}",
        )
        return TensorType(tuple(inputs[0].shape[axis] for axis in self.permutation), inputs[0].dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return np.ascontiguousarray(inputs[0].transpose(self.permutation))

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        source: list[tuple[int, int]] = [(0, 0)] * len(box)
        for span, axis in zip(box, self.permutation, strict=True):
            source[axis] = span
        return self, (tuple(source),)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        return body.add("Transpose", [inputs[0]], perm=list(self.permutation))


@dataclass(frozen=True)
class Pad(Operator):
    """Elements of one value before and after each axis."""

    before: Shape
    after: Shape
    value: float = 0
    """The element written: an integer for integer types."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        shape = inputs[0].shape
        require(len(shape) == len(self.before) == len(self.after), f"pads {self.before} do not fit {inputs[0]}")
        sizes = zip(self.before, shape, self.after, strict=True)
        return TensorType(tuple(b + s + a for b, s, a in sizes), inputs[0].dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        pads = list(zip(self.before, self.after, strict=True))
        return np.pad(inputs[0], pads, constant_values=np.array(self.value, inputs[0].dtype))

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        spans, before, after = [], [], []
        for (start, stop), lead, size in zip(box, self.before, inputs[0].shape, strict=True):
            inner = (min(max(start - lead, 0), size), min(max(stop - lead, 0), size))
            spans.append(inner)
            before.append(min(max(lead - start, 0), stop - start))
            after.append(stop - start - before[-1] - (inner[1] - inner[0]))
        return Pad(tuple(before), tuple(after), self.value), (tuple(spans),)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        kind = types[0].dtype
        held = DType.INT32 if kind in (DType.INT16, DType.UINT16) else kind  # ONNX Runtime pads no 16-bit integers
        x = inputs[0] if held is kind else body.cast(inputs[0], held)
        padded = body.add("Pad", [x, body.integers((*self.before, *self.after)), body.scalar(self.value, held)])
        return padded if held is kind else body.cast(padded, kind)


@dataclass(frozen=True)
class Concat(Operator):
    """Operands one behind the other along an axis."""

    axis: int

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        first = inputs[0]
        for other in inputs[1:]:
            rest = [a == b for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=True)) if i != self.axis]
            require(all(rest) and other.dtype is first.dtype, f"cannot concatenate {first} and {other}")
        total = sum(kind.shape[self.axis] for kind in inputs)
        shape = (*first.shape[: self.axis], total, *first.shape[self.axis + 1 :])
        return TensorType(shape, first.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return np.concatenate(list(inputs), axis=self.axis)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        total = sum(kind.shape[self.axis] for kind in inputs)
        require(box[self.axis] == (0, total), "a concatenation is not tiled over the axis it is along")
        return self, tuple((*box[: self.axis], (0, kind.shape[self.axis]), *box[self.axis + 1 :]) for kind in inputs)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        return body.add("Concat", list(inputs), axis=self.axis)


@dataclass(frozen=True)
class Slice(Operator):
    """A rectangular part, every `step`-th element."""

    start: Shape
    stop: Shape
    step: Shape

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        require(
            len(self.start) == len(inputs[0].shape)
            and all(0 <= a <= b <= size for a, b, size in zip(self.start, self.stop, inputs[0].shape, strict=True))
            and all(step > 0 for step in self.step),
            f"slice {self.start}:{self.stop}:{self.step} is outside {inputs[0]}",
        )
        sizes = (-((a - b) // s) for a, b, s in zip(self.start, self.stop, self.step, strict=True))
        return TensorType(tuple(sizes), inputs[0].dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        parts = tuple(slice(a, b, s) for a, b, s in zip(self.start, self.stop, self.step, strict=True))
        return np.ascontiguousarray(inputs[0][parts])

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        spans = zip(box, self.start, self.step, strict=True)
        reads = tuple((first + a * step, first + (b - 1) * step + 1) for (a, b), first, step in spans)
        return Slice((0,) * len(reads), tuple(stop - start for start, stop in reads), self.step), (reads,)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        axes = tuple(range(len(self.start)))
        operands = [inputs[0], *(body.integers(v) for v in (self.start, self.stop, axes, self.step))]
        return body.add("Slice", operands)


@dataclass(frozen=True)
class Patches(Operator):
    """Each window of an NHWC image laid out as one pixel's channels, in (row, column, channel) order.

    A convolution is a 1x1 convolution of its patches: result [N, OH, OW, KH*KW*C].
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x = inputs[0]
        require(len(x.shape) == 4, f"expects NHWC, got {x}")
        sizes = []
        for axis in (0, 1):
            span = (self.kernel[axis] - 1) * self.dilation[axis] + 1
            require(x.shape[1 + axis] >= span, f"the window spans {span} of an axis of {x.shape[1 + axis]}")
            sizes.append((x.shape[1 + axis] - span) // self.stride[axis] + 1)
        return TensorType((x.shape[0], *sizes, prod(self.kernel) * x.shape[3]), x.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x = inputs[0]
        span = tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        view = np.lib.stride_tricks.sliding_window_view(x, span, axis=(1, 2))
        view = view[:, :: self.stride[0], :: self.stride[1], :, :: self.dilation[0], :: self.dilation[1]]
        image = view.transpose(0, 1, 2, 4, 5, 3)
        return np.ascontiguousarray(image).reshape(*image.shape[:3], -1)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        depth = prod(self.kernel) * inputs[0].shape[3]
        require(box[3] == (0, depth), "patches are not tiled over channels")
        spans = [
            (a * s, (b - 1) * s + (k - 1) * d + 1)
            for (a, b), k, s, d in zip(box[1:3], self.kernel, self.stride, self.dilation, strict=True)
        ]
        return self, ((box[0], *spans, (0, inputs[0].shape[3])),)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        (_, height, width, _) = self.infer(types).shape
        parts = []
        for row in range(self.kernel[0]):
            for column in range(self.kernel[1]):
                start = (row * self.dilation[0], column * self.dilation[1])
                stop = (start[0] + (height - 1) * self.stride[0] + 1, start[1] + (width - 1) * self.stride[1] + 1)
                window = [start, stop, (1, 2), self.stride]
                parts.append(body.add("Slice", [inputs[0], *(body.integers(v) for v in window)]))
        return body.add("Concat", parts, axis=3)


@dataclass(frozen=True)
class Relayout(Operator):
    """The same value lying in another layout: no element changes, only where it is. The layout stage puts it in."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        return inputs[0]

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return inputs[0]

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, (box,)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        return body.add("Identity", [inputs[0]])


def whole(inputs: Sequence[TensorType]) -> tuple[Box, ...]:
    """The boxes that cover whole operands."""
    return tuple(full_box(kind.shape) for kind in inputs)
