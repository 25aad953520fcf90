"""Bytes taken apart into their bits, as engines read weights that compute bit after bit, and products with such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.ir.operators.base import Operator, require
from dovetail.ir.types import Array, Box, DType, TensorType

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody

_BITS = 8


@dataclass(frozen=True)
class ToBitPlanes(Operator):
    """The bits of bytes by their weight. Operand: uint8 [N, K]; result: uint8 [N, groups, 8, group / 8].

    Of each `group` of neighbours first those bits that count 1, then those that count 2, and so on; the first
    neighbour in the lowest bit of the first byte. Neighbours the last group lacks are 0.
    """

    group: int
    """Neighbours whose bits lie together, a multiple of 8."""

    def _groups(self, depth: int) -> int:
        return -(-depth // self.group)

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        (x,) = inputs
        fits = self.group > 0 and self.group % _BITS == 0 and x.dtype is DType.UINT8 and len(x.shape) == 2
        require(fits, f"expects uint8 [N, K] in groups of whole bytes, got {x} in groups of {self.group}")
        return TensorType((x.shape[0], self._groups(x.shape[1]), _BITS, self.group // _BITS), DType.UINT8)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        rows, depth = inputs[0].shape
        padded = np.zeros((rows, self._groups(depth) * self.group), np.uint8)
        padded[:, :depth] = inputs[0]
        planes = padded.reshape(rows, -1, 1, self.group) >> np.arange(_BITS, dtype=np.uint8)[:, None] & 1
        return np.packbits(planes, axis=-1, bitorder="little")

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        depth = inputs[0].shape[1]
        whole = ((0, self._groups(depth)), (0, _BITS), (0, self.group // _BITS))
        require(box[1:] == whole, "bits are taken apart in whole rows, which are not tiled")
        return self, ((box[0], (0, depth)),)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        rows, depth = types[0].shape
        groups, more = self._groups(depth), -depth % self.group
        x = body.cast(inputs[0], DType.INT32)
        padded = body.add("Pad", [x, body.integers((0, 0, 0, more))]) if more else x
        apart = body.add("Reshape", [padded, body.integers((rows, groups, 1, self.group // _BITS, _BITS))])
        weight = body.tensor((1 << np.arange(_BITS, dtype=np.int32)).reshape(_BITS, 1, 1))
        shifted = body.add("Div", [apart, weight])
        bits = body.add("Mod", [shifted, body.scalar(2, DType.INT32)])
        placed = body.add("Mul", [bits, body.tensor(1 << np.arange(_BITS, dtype=np.int32))])
        total = body.add("ReduceSum", [placed, body.integers((4,))], keepdims=0)
        return body.cast(total, DType.UINT8)


@dataclass(frozen=True)
class BitProduct(Operator):
    """Sums of products with bytes that `ToBitPlanes` took apart. Operands: x uint8 [..., K], planes uint8
    [N, groups, 8, group / 8] of a matrix w [N, K]; the result is int32.

    y[..., n] = sum over k of x[..., k] * (w[n, k] - zero_point)
    """

    zero_point: int = 0
    """Taken off every element of w."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        x, planes = inputs
        bits = all(kind.dtype is DType.UINT8 for kind in inputs) and len(planes.shape) == 4 and planes.shape[2] == _BITS
        fits = bits and len(x.shape) > 1 and planes.shape[1] == -(-x.shape[-1] // max(_BITS * planes.shape[3], 1))
        require(
            fits and 0 <= self.zero_point < 256, f"expects uint8 [..., K] and the bits of [N, K], got {x}, {planes}"
        )
        return TensorType((*x.shape[:-1], planes.shape[0]), DType.INT32)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x, planes = inputs
        bits = np.unpackbits(planes, axis=-1, bitorder="little")
        rows = (bits * (1 << np.arange(_BITS)).reshape(_BITS, 1)).sum(axis=2).reshape(planes.shape[0], -1)
        taken = rows[:, : x.shape[-1]].astype(np.float64) - self.zero_point
        return np.asarray(np.rint(x.astype(np.float64) @ taken.T).astype(np.int64).astype(np.int32))

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        x, planes = inputs
        whole = tuple((0, size) for size in planes.shape[1:])
        return self, ((*box[:-1], (0, x.shape[-1])), (box[-1], *whole))

    def macs(self, inputs: Sequence[TensorType]) -> int:
        return self.infer(inputs).elements * inputs[0].shape[-1]

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        rows, groups, _, each = types[1].shape
        depth, powers = types[0].shape[-1], 1 << np.arange(_BITS, dtype=np.int32)
        x = body.add("Unsqueeze", [body.cast(inputs[1], DType.INT32), body.integers((4,))])
        bits = body.add("Mod", [body.add("Div", [x, body.tensor(powers)]), body.scalar(2, DType.INT32)])
        placed = body.add("Mul", [bits, body.tensor(powers.reshape(_BITS, 1, 1))])
        total = body.add("ReduceSum", [placed, body.integers((2,))], keepdims=0)
        flat = body.add("Reshape", [total, body.integers((rows, groups * each * _BITS))])
        taken = body.add("Slice", [flat, *map(body.integers, ((0,), (depth,), (1,)))])
        matrix = body.add(
            "Transpose", [body.add("Sub", [taken, body.scalar(self.zero_point, DType.INT32)])], perm=[1, 0]
        )
        # ONNX Runtime multiplies int64 matrices, exactly.
        terms = [body.cast(name, DType.INT64) for name in (inputs[0], matrix)]
        return body.cast(body.add("MatMul", terms), DType.INT32)
