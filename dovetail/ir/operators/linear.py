"""Convolutions and fully connected layers, integer and float; float ones take integer weights too, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from dovetail.documented import document
from dovetail.ir.operators.base import Arrays, Cut, Known, Names, Operator, SlidingWindow, Types, broadcast_box, require
from dovetail.ir.types import Array, Box, DType, TensorType, blocks, full_box, with_span

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody


BYTES = (DType.INT8, DType.UINT8)


def accumulator_type(x: DType) -> DType:
    """The type a sum of products with activations of type `x` has: int32, int64 for int16, else float32."""
    if x is DType.FLOAT32:
        return DType.FLOAT32
    return DType.INT64 if x is DType.INT16 else DType.INT32


_LEAST_TERMS = 128
"""Products of a sum from which on float32 is worth its while."""


def _wide(array: Array, zero_point: int, kind: type[np.floating[Any]] = np.float64) -> Array:
    """The array as floats with its zero point taken off: sums of int8 and int16 products stay below 2**53."""
    wide = array.astype(kind)
    return np.subtract(wide, kind(zero_point), out=wide) if zero_point else wide


def _exact_terms(x: Array, w: Array, zero_points: tuple[int, int]) -> int:
    """The most products of two arrays of integers whose sum float32 holds, in any order; 0 where these are few."""
    kinds = zip((DType.of(x.dtype), DType.of(w.dtype)), zero_points, strict=True)
    reach, other = (max(kind.high - zero, zero - kind.low, 1) for kind, zero in kinds)
    terms = (1 << 24) // (reach * other)
    return terms if terms >= _LEAST_TERMS else 0


def _row_products(x: Array, w: Array, zero_points: tuple[int, int]) -> Array:
    """Sums of the products of rows x [..., K] with rows w [N, K]: int32, which wraps, from as many terms at a time as
    float32 holds; in float64 where these are few, or the operands are floats."""
    most = 0 if x.dtype.kind == "f" else _exact_terms(x, w, zero_points)
    if not most:
        wide = _wide(x, zero_points[0])
        return np.concatenate([wide @ _wide(w[part], zero_points[1]).T for part in blocks(w)], axis=-1)
    total = np.zeros((*x.shape[:-1], len(w)), np.int32)
    for first in range(0, x.shape[-1], most):
        terms = slice(first, first + most)
        wide = _wide(x[..., terms], zero_points[0], np.float32)
        for part in blocks(w):
            total[..., part] += (wide @ _wide(w[part, terms], zero_points[1], np.float32).T).astype(np.int32)
    return total


class Linear(Operator):
    """A layer: sums of products of activations, the first operand, with weights, and a bias if there is a third."""

    weight_axis: ClassVar[int] = 0
    """Axis of the weights along which output channels run."""
    input_zero_point: int
    """Subtracted from every element of x (integer types only)."""
    weight_zero_point: int
    """Subtracted from every weight (integer types only)."""

    @property
    def zero_points(self) -> tuple[int, int]:
        """Zero points of the input and of the weights."""
        return self.input_zero_point, self.weight_zero_point

    def as_convolution(self, weights: Array) -> Array:
        """The weights as those of a convolution, [outputs, rows, columns, depth]; of depth 1 where `is_channelwise`."""
        return weights

    def with_zero_points(self, x: int, weights: int = 0) -> Self:
        """The same layer with other zero points.

        Args:
            x: zero point of the input.
            weights: zero point of the weights.
        """
        changed: Any = self
        moved: Self = replace(changed, input_zero_point=x, weight_zero_point=weights)
        return moved

    def raised(self, by: Sequence[int]) -> Operator | None:
        return None if any(by[1:]) else self.with_zero_points(self.input_zero_point + by[0], self.weight_zero_point)

    def macs(self, inputs: Types) -> int:
        result, weights = self.infer(inputs), inputs[1]
        return result.elements * weights.elements // weights.shape[self.weight_axis]

    def filters(self, weights: Array) -> Array:
        """The weights of each output channel as a row: [C, taps]."""
        rows = np.moveaxis(weights, self.weight_axis, 0)
        return rows.reshape(len(rows), -1)

    def as_weights(self, filters: Array, like: Array) -> Array:
        """Rows of weights, as `filters` gives them, in the shape and type of weights."""
        shape = np.moveaxis(like, self.weight_axis, 0).shape
        return np.moveaxis(filters.reshape(shape), 0, self.weight_axis).astype(like.dtype)


@dataclass(frozen=True)
class Convolution(Linear):
    """Full and depthwise convolution: windows without padding (a Pad stands before where needed)."""

    stride: tuple[int, int] = (1, 1)
    """Rows and columns from one window to the next."""
    dilation: tuple[int, int] = (1, 1)
    """Rows and columns from one tap of a window to the next."""
    input_zero_point: int = 0
    """Subtracted from every element of x (integer types only)."""
    weight_zero_point: int = 0
    """Subtracted from every weight (integer types only)."""

    def window(self, inputs: Types) -> SlidingWindow:
        return SlidingWindow((inputs[1].shape[1], inputs[1].shape[2]), self.stride, self.dilation)

    def dense_weights(self, weights: Array) -> Array:
        """Weights [O, KH, KW, I] of a full convolution that computes the same."""
        return weights

    def _image(self, x: TensorType, w: TensorType, channels: int, bias: Types) -> TensorType:
        require(len(x.shape) == 4 and len(w.shape) == 4, f"expects NHWC and OHWI, got {x} and {w}")
        sizes = self.window([x, w]).places(x)
        for b in bias:
            require(b.shape == (channels,), f"expects a bias of {channels}, got {b}")
        return TensorType((x.shape[0], *sizes, channels), accumulator_type(x.dtype))

    def crop(self, box: Box, inputs: Types) -> Cut:
        x, w, *bias = inputs
        spans, _ = self.window(inputs).reads(box, x.shape)
        alike, apart = w.shape[3] == x.shape[3], self.is_channelwise
        if not alike:
            noun = "a depthwise convolution with a multiplier" if apart else "a grouped convolution"
            require(box[3] == (0, w.shape[self.weight_axis]), f"{noun} is not tiled over channels")
        channels = box[3] if apart and alike else (0, x.shape[3])
        kernel = with_span(full_box(w.shape), self.weight_axis, box[3])
        return self, ((box[0], *spans, channels), kernel, *((box[3],) for _ in bias))

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        image = body.add("Transpose", [inputs[0]], perm=[0, 3, 1, 2])
        perm = [3, 0, 1, 2] if self.is_channelwise else [0, 3, 1, 2]
        weights = body.add("Transpose", [inputs[1]], perm=perm)
        groups = types[0].shape[3] // (1 if self.is_channelwise else types[1].shape[3])
        steps = {"strides": list(self.stride), "dilations": list(self.dilation)}
        result = body.products("Conv", (image, weights), types, self.zero_points, group=groups, **steps)
        result = body.add("Transpose", [result], perm=[0, 2, 3, 1])
        return body.add("Add", [result, inputs[2]]) if len(inputs) > 2 else result


@dataclass(frozen=True)
class Conv2d(Convolution):
    """Convolution. Operands: x NHWC, w OHWI (I = channels / groups), optional bias [O] of the accumulator's type.

    y[n,i,j,o] = bias[o] + sum over (a,b,c) of (x[n, i*sh + a*dh, j*sw + b*dw, c] - zx) * (w[o,a,b,c] - zw)
    """

    def infer(self, inputs: Types) -> TensorType:
        x, w, *bias = inputs
        require(
            x.shape[-1] % max(w.shape[-1], 1) == 0 and w.shape[0] % self.groups(inputs) == 0,
            f"{x.shape[-1]} input channels and {w.shape[0]} outputs do not divide into weights {w}",
        )
        return self._image(x, w, w.shape[0], bias)

    def groups(self, inputs: Types) -> int:
        """Number of independent channel groups."""
        return max(inputs[0].shape[-1] // max(inputs[1].shape[-1], 1), 1)

    def evaluate(self, inputs: Arrays) -> Array:
        x, w, *bias = inputs
        groups, depth = x.shape[3] // w.shape[3], w.shape[3]
        windows = SlidingWindow((w.shape[1], w.shape[2]), self.stride, self.dilation).view(x)
        outputs, parts = w.shape[0] // groups, []
        for group in range(groups):
            own = windows[:, :, :, group * depth : (group + 1) * depth]
            weights = w[group * outputs : (group + 1) * outputs]
            if x.dtype.kind == "f":
                wide, other = _wide(own, self.input_zero_point), _wide(weights, self.weight_zero_point)
                parts.append(np.tensordot(wide, other, axes=([3, 4, 5], [3, 1, 2])))
                continue
            rows = own.transpose(0, 1, 2, 4, 5, 3).reshape(-1, weights[0].size)
            sums = _row_products(rows, weights.reshape(outputs, -1), self.zero_points)
            parts.append(sums.reshape(*own.shape[:3], outputs))
        return _accumulate(np.concatenate(parts, axis=-1) if groups > 1 else parts[0], x, bias)


@dataclass(frozen=True)
class DepthwiseConv2d(Convolution):
    """Depthwise convolution. Operands: x NHWC, w [1, KH, KW, C*M], optional bias [C*M].

    Output channel c*M + m reads input channel c.
    """

    weight_axis = 3
    is_channelwise = True

    def as_convolution(self, weights: Array) -> Array:
        return weights.transpose(3, 1, 2, 0)

    def line_of(self, constants: Known) -> tuple[Array, Array] | None:
        factor, *offset = (array.astype(np.float64) for array in constants if array is not None)
        if len(offset) < len(constants) - 2 or factor.shape[:3] != (1, 1, 1) or self.stride != (1, 1):
            return None
        return factor.reshape(-1), offset[0] if offset else np.zeros(1)

    def dense_weights(self, weights: Array) -> Array:
        return np.eye(weights.shape[3], dtype=weights.dtype)[:, None, None] * weights

    def infer(self, inputs: Types) -> TensorType:
        x, w, *bias = inputs
        require(
            w.shape[0] == 1 and w.shape[3] % x.shape[3] == 0,
            f"expects depthwise weights [1, KH, KW, {x.shape[3]}*M], got {w}",
        )
        return self._image(x, w, w.shape[3], bias)

    def evaluate(self, inputs: Arrays) -> Array:
        x, w, *bias = inputs
        taps, is_float = w.shape[1] * w.shape[2], x.dtype.kind == "f"
        is_narrow = not is_float and taps <= _exact_terms(x, w, self.zero_points)
        kind: type[np.floating[Any]] = np.float32 if is_narrow else np.float64
        image, weights = _wide(x, self.input_zero_point, kind), _wide(w, self.weight_zero_point, kind)[0]
        image = np.repeat(image, w.shape[3] // x.shape[3], axis=3) if w.shape[3] > x.shape[3] else image
        windows = SlidingWindow((w.shape[1], w.shape[2]), self.stride, self.dilation).view(image)
        total, product = np.zeros(windows.shape[:4], kind), np.empty(windows.shape[:4], kind)
        for row in range(w.shape[1]):
            for column in range(w.shape[2]):
                total += np.multiply(windows[..., row, column], weights[row, column], out=product)
        return _accumulate(total, x, bias)


@dataclass(frozen=True)
class FullyConnected(Linear):
    """Dense layer. Operands: x [..., K], w [N, K], optional bias [N] of the accumulator's type.

    y[..., n] = bias[n] + sum over k of (x[..., k] - zx) * (w[n, k] - zw)
    """

    input_zero_point: int = 0
    """Subtracted from every element of x (integer types only)."""
    weight_zero_point: int = 0
    """Subtracted from every weight (integer types only)."""

    def as_convolution(self, weights: Array) -> Array:
        return weights[:, None, None, :]

    def infer(self, inputs: Types) -> TensorType:
        x, w, *bias = inputs
        require(len(w.shape) == 2 and x.shape[-1] == w.shape[1], f"expects [..., K] and [N, K], got {x} and {w}")
        for b in bias:
            require(b.shape == (w.shape[0],), f"expects a bias of {w.shape[0]}, got {b}")
        return TensorType((*x.shape[:-1], w.shape[0]), accumulator_type(x.dtype))

    def evaluate(self, inputs: Arrays) -> Array:
        x, w, *bias = inputs
        return _accumulate(_row_products(x, w, self.zero_points), x, bias)

    def crop(self, box: Box, inputs: Types) -> Cut:
        x, _, *bias = inputs
        depth = (0, x.shape[-1])
        return self, ((*box[:-1], depth), (box[-1], depth), *((box[-1],) for _ in bias))

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        weights = body.add("Transpose", [inputs[1]], perm=[1, 0])
        result = body.products("MatMul", (inputs[0], weights), types, self.zero_points)
        return body.add("Add", [result, inputs[2]]) if len(inputs) > 2 else result


def _accumulate(total: Array, x: Array, bias: Sequence[Array]) -> Array:
    """The sum of products in the accumulator's type, bias added; int32 wraps as the hardware does."""
    kind = accumulator_type(DType.of(x.dtype))
    if kind is DType.FLOAT32:
        result = total + bias[0] if bias else total
        return np.asarray(result, dtype=np.float32)
    exact = total.astype(np.int32) if total.dtype.itemsize == 4 else np.rint(total).astype(np.int64)
    for b in bias:
        exact = exact + b.astype(exact.dtype)
    return exact.astype(kind.numpy, copy=False)


@dataclass(frozen=True)
class MatrixProduct(Operator):
    """Products of two computed matrices. Operands: a [..., M, K], b [..., K, N] of one type, float32, int8, uint8 or
    int16, or b of 8 bits and a of 16; leading axes broadcast. Integers give the accumulator's type; of 16 and 8 bits
    int32, unless the sums of so many might leave it."""

    left_zero_point: int = 0
    """Subtracted from every element of a (integer types only)."""
    right_zero_point: int = 0
    """Subtracted from every element of b (integer types only)."""

    @property
    def zero_points(self) -> tuple[int, int]:
        """The zero points of a and of b."""
        return self.left_zero_point, self.right_zero_point

    def raised(self, by: Sequence[int]) -> Operator | None:
        return MatrixProduct(self.left_zero_point + by[0], self.right_zero_point + by[1])

    def infer(self, inputs: Types) -> TensorType:
        a, b = inputs
        known = a.dtype in (DType.FLOAT32, DType.INT8, DType.UINT8, DType.INT16)
        same = a.dtype is b.dtype or (b.dtype in BYTES and a.dtype in (*BYTES, DType.INT16))
        fits = len(a.shape) >= 2 and len(b.shape) >= 2 and a.shape[-1:] == b.shape[-2:-1]
        require(known and same and fits, f"expects [..., M, K] and [..., K, N] of one type, got {a} and {b}")
        lead = tuple(int(size) for size in np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
        return TensorType((*lead, a.shape[-2], b.shape[-1]), self._sums(a, b))

    @staticmethod
    def _sums(a: TensorType, b: TensorType) -> DType:
        narrow = a.dtype is DType.INT16 and b.dtype in BYTES and a.shape[-1] << 24 < 1 << 31
        return DType.INT32 if narrow else accumulator_type(a.dtype)

    def evaluate(self, inputs: Arrays) -> Array:
        a, b = inputs
        if a.dtype == np.float32:
            return np.asarray(a.astype(np.float64) @ b.astype(np.float64), dtype=np.float32)
        exact = (a.astype(np.int64) - self.left_zero_point) @ (b.astype(np.int64) - self.right_zero_point)
        kinds = (TensorType(tuple(array.shape), DType.of(array.dtype)) for array in inputs)
        return np.asarray(exact.astype(self._sums(*kinds).numpy))

    def crop(self, box: Box, inputs: Types) -> Cut:
        a, b = inputs
        depth = (0, a.shape[-1])
        left, right = (broadcast_box(box[:-2], kind.shape[:-2]) for kind in (a, b))
        return self, ((*left, box[-2], depth), (*right, depth, box[-1]))

    def macs(self, inputs: Types) -> int:
        return self.infer(inputs).elements * inputs[0].shape[-1]

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        if types[0].dtype is DType.FLOAT32:
            return body.add("MatMul", list(inputs))
        # ONNX Runtime multiplies int64 matrices, exactly.
        terms = [
            body.add("Sub", [body.cast(name, DType.INT64), body.scalar(zero_point, DType.INT64)])
            for name, zero_point in zip(inputs, (self.left_zero_point, self.right_zero_point), strict=True)
        ]
        return body.cast(body.add("MatMul", terms), self._sums(*types))


document(__name__)
