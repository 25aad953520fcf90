"""The border between float and integer values: quantise and dequantise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, Box, DType, Shape, TensorType
from dovetail.operators.base import Operator, one_for_all, require

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


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


def _parameter_boxes(box: Box, inputs: Sequence[TensorType], axis: int) -> tuple[Box, ...]:
    """The parts of scale and zero point that `box` of the operand needs."""
    if inputs[1].shape == (1,):
        return (((0, 1),), ((0, 1),))
    return ((box[axis],), (box[axis],))


@dataclass(frozen=True)
class Quantize(Operator):
    """Float to integer. Operands: x float32, scale float32 [1 or C], zero_point int32 [1 or C].

    y = saturate(round_half_even(x / scale) + zero_point), the division in float32 (ONNX QuantizeLinear);
    parameters of size C run along `axis`.
    """

    dtype: DType
    """The integer type of the result."""
    axis: int = -1

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, scale, zero_point = inputs
        require(x.dtype is DType.FLOAT32 and self.dtype.is_integer, f"cannot quantise {x} to {self.dtype.text}")
        _check_parameters(x, scale, zero_point, self.axis)
        return TensorType(x.shape, self.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, scale, zero_point = inputs
        shape = _aligned_shape(scale.shape, x.shape, self.axis)
        steps = np.rint(x / scale.reshape(shape)).astype(np.float64) + zero_point.reshape(shape)
        return np.clip(steps, self.dtype.low, self.dtype.high).astype(self.dtype.numpy)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, (box, *_parameter_boxes(box, inputs, self.axis))

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return one_for_all(inputs)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        shape = body.integers(_aligned_shape(types[1].shape, types[0].shape, self.axis))
        scale, zero_point = (body.add("Reshape", [name, shape]) for name in inputs[1:])
        steps = body.real64(body.add("Round", [body.add("Div", [inputs[0], scale])]))
        total = body.add("Add", [steps, body.real64(zero_point)])
        bounds = [body.real64_scalar(self.dtype.low), body.real64_scalar(self.dtype.high)]
        return body.cast(body.add("Clip", [total, *bounds]), self.dtype)


@dataclass(frozen=True)
class Dequantize(Operator):
    """Integer to float. Operands: x integer, scale float32 [1 or C], zero_point int32 [1 or C].

    y = float32(x - zero_point) * scale; parameters of size C run along `axis`.
    """

    axis: int = -1

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, scale, zero_point = inputs
        require(x.dtype.is_integer, f"cannot dequantise {x}")
        _check_parameters(x, scale, zero_point, self.axis)
        return TensorType(x.shape, DType.FLOAT32)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, scale, zero_point = inputs
        shape = _aligned_shape(scale.shape, x.shape, self.axis)
        steps = (x.astype(np.int64) - zero_point.reshape(shape)).astype(np.float32)
        return np.asarray(steps * scale.reshape(shape), dtype=np.float32)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, (box, *_parameter_boxes(box, inputs, self.axis))

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return one_for_all(inputs)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        shape = body.integers(_aligned_shape(types[1].shape, types[0].shape, self.axis))
        scale, zero_point = (body.add("Reshape", [name, shape]) for name in inputs[1:])
        steps = body.add("Sub", [body.cast(inputs[0], DType.INT64), body.cast(zero_point, DType.INT64)])
        return body.add("Mul", [body.cast(steps, DType.FLOAT32), scale])
