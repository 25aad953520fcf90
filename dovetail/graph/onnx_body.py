"""Writes an operator's meaning as standard ONNX nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from dovetail.graph import onnx_fixed_point
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.activation import FixedSoftmax
from dovetail.operators.arithmetic import Requantize

OPSET = 21
"""The version of the standard operators the bodies are written in."""

_ELEMENT_TYPES = {
    "bool": onnx.TensorProto.BOOL,
    "int8": onnx.TensorProto.INT8,
    "int16": onnx.TensorProto.INT16,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
    "uint8": onnx.TensorProto.UINT8,
    "uint16": onnx.TensorProto.UINT16,
    "uint32": onnx.TensorProto.UINT32,
    "float32": onnx.TensorProto.FLOAT,
}


def element_type(dtype: DType) -> int:
    """ONNX's number for the type that holds an element; types narrower than a byte are held in one."""
    return int(_ELEMENT_TYPES[dtype.numpy.name])


class OnnxBody:
    """Collects the nodes of one operator's meaning.

    Names given to `add` are the operator's operands, or results of earlier calls.

    Args:
        reserved: names that must not be given to new values.
    """

    def __init__(self, reserved: Sequence[str] = ()) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._names = set(reserved)
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def add(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a standard node; returns the name of its result."""
        name = self._fresh(op_type.lower())
        self.nodes.append(onnx.helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def add_several(self, op_type: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        """Add a standard node with several results; returns their names."""
        names = [self._fresh(op_type.lower()) for _ in range(count)]
        self.nodes.append(onnx.helper.make_node(op_type, list(inputs), names, **attributes))
        return names

    def tensor(self, array: Array) -> str:
        """The name of a constant; equal constants are written once."""
        key = (array.dtype.name, tuple(array.shape), array.tobytes())
        if key not in self._constants:
            name = self._fresh("constant")
            value = onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape))
            self.nodes.append(onnx.helper.make_node("Constant", [], [name], value=value))
            self._constants[key] = name
        return self._constants[key]

    def integers(self, values: Sequence[int]) -> str:
        """The name of an int64 constant of one axis: a shape, a list of axes."""
        return self.tensor(np.array(values, np.int64))

    def scalar(self, value: float, dtype: DType) -> str:
        """The name of a constant without axes."""
        return self.tensor(np.array(value, dtype.numpy))

    def cast(self, name: str, dtype: DType) -> str:
        """The value converted to an element type; int4 and its like become the byte that holds them."""
        return self.add("Cast", [name], to=element_type(dtype))

    def real64(self, name: str) -> str:
        """The value converted to float64."""
        return self.add("Cast", [name], to=int(onnx.TensorProto.DOUBLE))

    def real64_scalar(self, value: float) -> str:
        """The name of a float64 constant without axes."""
        return self.tensor(np.array(value, np.float64))

    def shift_right(self, total: str, shift: str) -> str:
        """total / 2**shift rounded down, both int64, 0 <= shift <= 62."""
        return onnx_fixed_point.shift_right(self, total, shift)

    def with_sign(self, size: str, x: str) -> str:
        """size where x is not negative, -size elsewhere, both int64."""
        return onnx_fixed_point.with_sign(self, size, x)

    def requantize(self, operator: Requantize, inputs: Sequence[str]) -> str:
        """The meaning of `Requantize` in 64-bit integers."""
        return onnx_fixed_point.requantize(self, operator, inputs)

    def fixed_softmax(self, operator: FixedSoftmax, x: str) -> str:
        """The meaning of `FixedSoftmax` in 64-bit integers."""
        return onnx_fixed_point.softmax(self, operator, x)

    def convolution(
        self,
        image: str,
        weights: str,
        types: Sequence[TensorType],
        zero_points: tuple[int, int],
        attributes: Mapping[str, Any],
    ) -> str:
        """A convolution of an NCHW image with OIHW weights, in the accumulator's type.

        Args:
            types: types of image and weights, whatever their layout.
            zero_points: of image and weights; not used in float.
            attributes: strides, dilations and group of ONNX's Conv.
        """
        if types[0].dtype is DType.FLOAT32:
            return self.add("Conv", [image, weights], **attributes)
        return self._products("ConvInteger", (image, weights), types, zero_points, attributes)

    def matrix_product(self, x: str, weights: str, types: Sequence[TensorType], zero_points: tuple[int, int]) -> str:
        """x [..., K] times weights [K, N], in the accumulator's type; arguments as for `convolution`."""
        if types[0].dtype is DType.FLOAT32:
            return self.add("MatMul", [x, weights])
        return self._products("MatMulInteger", (x, weights), types, zero_points, {})

    def _products(
        self,
        op_type: str,
        operands: tuple[str, str],
        types: Sequence[TensorType],
        zero_points: tuple[int, int],
        attributes: Mapping[str, Any],
    ) -> str:
        """Sums of products of unsigned bytes, the one combination every runtime computes exactly.

        A 16-bit operand goes as its high and its low byte, and the sums are put together in int64.
        """
        x, weights = operands
        weights, weight_zero = self._unsigned(weights, types[1].dtype, zero_points[1])
        if types[0].dtype.bits <= 8:
            x, zero = self._unsigned(x, types[0].dtype, zero_points[0])
            return self.add(op_type, [x, weights, zero, weight_zero], **attributes)
        raised = self.add("Sub", [self.cast(x, DType.INT32), self.scalar(types[0].dtype.low, DType.INT32)])
        zero_high, zero_low = divmod(zero_points[0] - types[0].dtype.low, 256)
        byte = self.scalar(256, DType.INT32)
        parts = ((self.add("Div", [raised, byte]), zero_high), (self.add("Mod", [raised, byte]), zero_low))
        sums = []
        for part, zero_point in parts:
            zero = self.scalar(zero_point, DType.UINT8)
            terms = [self.cast(part, DType.UINT8), weights, zero, weight_zero]
            sums.append(self.cast(self.add(op_type, terms, **attributes), DType.INT64))
        total = self.add("Add", [self.add("Mul", [sums[0], self.scalar(256, DType.INT64)]), sums[1]])
        return total if types[0].dtype is DType.INT16 else self.cast(total, DType.INT32)

    def _unsigned(self, name: str, dtype: DType, zero_point: int) -> tuple[str, str]:
        """An 8-bit operand as uint8, and its zero point moved along."""
        if not dtype.signed:
            return name, self.scalar(zero_point, DType.UINT8)
        raised = self.add("Add", [self.cast(name, DType.INT32), self.scalar(128, DType.INT32)])
        return self.cast(raised, DType.UINT8), self.scalar(zero_point + 128, DType.UINT8)

    def _fresh(self, stem: str) -> str:
        count = 1
        name = stem
        while name in self._names:
            count += 1
            name = f"{stem}_{count}"
        self._names.add(name)
        return name
