"""Bytes taken apart into their bits, as engines read weights that compute bit after bit, and products with such."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from dovetail.documented import document
from dovetail.ir.operators.base import Cut, Int64Operator, Types, require
from dovetail.ir.types import Box, DType, Shape, TensorType, full_box

_BITS = 8


@dataclass(frozen=True)
class ToBitPlanes(Int64Operator):
    """The bits of bytes by their weight. Operand: uint8 [N, K]; result: uint8 [N, groups, 8, group / 8].

    Of each `group` of neighbours first those bits that count 1, then those that count 2, and so on; the first
    neighbour in the lowest bit of the first byte. Neighbours the last group lacks are 0.
    """

    result = DType.UINT8
    group: int
    """Neighbours whose bits lie together, a multiple of 8."""

    def _groups(self, depth: int) -> int:
        return -(-depth // self.group)

    def infer(self, inputs: Types) -> TensorType:
        (x,) = inputs
        fits = self.group > 0 and self.group % _BITS == 0 and x.dtype is DType.UINT8 and len(x.shape) == 2
        require(fits, f"expects uint8 [N, K] in groups of whole bytes, got {x} in groups of {self.group}")
        return TensorType((x.shape[0], self._groups(x.shape[1]), _BITS, self.group // _BITS), DType.UINT8)

    def meaning(self, x: Any) -> Any:
        return self.planes(x, *x.shape)

    def planes(self, x: Any, rows: int, depth: int) -> Any:
        """The bits of so many rows."""
        padded = np.pad(x, ((0, 0), (0, -depth % self.group)))
        apart = padded.reshape((rows, self._groups(depth), 1, self.group // _BITS, _BITS))
        planes = apart >> np.arange(_BITS).reshape(_BITS, 1, 1) & 1
        return np.sum(planes << np.arange(_BITS), axis=4)

    def crop(self, box: Box, inputs: Types) -> Cut:
        depth = inputs[0].shape[1]
        whole = ((0, self._groups(depth)), (0, _BITS), (0, self.group // _BITS))
        require(box[1:] == whole, "bits are taken apart in whole rows, which are not tiled")
        return self, ((box[0], (0, depth)),)


@dataclass(frozen=True)
class SpreadBits(Int64Operator):
    """The bits of int8 plus 128, as `ToBitPlanes` gives them, of rows that have all groups' channels and each its own
    alone. Operand: int8 [H, T, D]; result: uint8 of rows [H * T, groups * D].

    Row h * T + t has x[h, t] in the channels of group (first + h) // heads, and `nothing` in all others.
    """

    result = DType.UINT8
    group: int
    """As of `ToBitPlanes`."""
    groups: int
    """Groups of heads; a row has the channels of each."""
    heads: int
    """Heads of a group."""
    nothing: int
    """The byte of the other groups' channels."""
    first: int = 0
    """The number of the first head."""

    def infer(self, inputs: Types) -> TensorType:
        (x,) = inputs
        fits = x.dtype is DType.INT8 and len(x.shape) == 3 and 0 <= self.nothing < 256
        require(fits and self.first + x.shape[0] <= self.groups * self.heads, f"cannot spread {x} over groups")
        rows = TensorType((x.shape[0] * x.shape[1], self.groups * x.shape[2]), DType.UINT8)
        return ToBitPlanes(self.group).infer([rows])

    def meaning(self, x: Any) -> Any:
        heads, rows, depth = x.shape
        own = (self.first + np.arange(heads).reshape(-1, 1, 1, 1)) // self.heads == np.arange(self.groups).reshape(
            -1, 1
        )
        spread = np.where(own, x.reshape((heads, rows, 1, depth)) + 128, self.nothing)
        whole = heads * rows, self.groups * depth
        return ToBitPlanes(self.group).planes(spread.reshape(whole), *whole)

    def crop(self, box: Box, inputs: Types) -> Cut:
        _, rows, depth = inputs[0].shape
        (start, stop), planes = box[0], self.infer(inputs).shape[1:]
        whole = box[1:] == tuple((0, size) for size in planes)
        require(
            whole and start % rows == stop % rows == 0, "bits of a head are spread in whole rows, which are not tiled"
        )
        own = replace(self, first=self.first + start // rows)
        return own, (((start // rows, stop // rows), (0, rows), (0, depth)),)


@dataclass(frozen=True)
class BitProduct(Int64Operator):
    """Sums of products with bytes that `ToBitPlanes` took apart. Operands: x uint8 [..., K], planes uint8
    [N, groups, 8, group / 8] of a matrix w [N, K]; the result is int32.

    y[..., n] = sum over k of x[..., k] * (w[n, k] - zero_point)
    """

    result = DType.INT32
    zero_point: int = 0
    """Subtracted from every element of w."""

    def infer(self, inputs: Types) -> TensorType:
        x, planes = inputs
        bits = all(kind.dtype is DType.UINT8 for kind in inputs) and len(planes.shape) == 4 and planes.shape[2] == _BITS
        fits = bits and len(x.shape) > 1 and planes.shape[1] == -(-x.shape[-1] // max(_BITS * planes.shape[3], 1))
        require(
            fits and 0 <= self.zero_point < 256, f"expects uint8 [..., K] and the bits of [N, K], got {x}, {planes}"
        )
        return TensorType((*x.shape[:-1], planes.shape[0]), DType.INT32)

    def meaning(self, x: Any, planes: Any) -> Any:
        bits = planes.reshape((*planes.shape, 1)) >> np.arange(_BITS) & 1
        total = np.sum(bits << np.arange(_BITS).reshape(_BITS, 1, 1), axis=2)
        rows = total.reshape((planes.shape[0], -1))[:, : x.shape[-1]]
        return x @ (rows - self.zero_point).T

    def crop(self, box: Box, inputs: Types) -> Cut:
        x, planes = inputs
        whole = tuple((0, size) for size in planes.shape[1:])
        return self, ((*box[:-1], (0, x.shape[-1])), (box[-1], *whole))

    def macs(self, inputs: Types) -> int:
        return self.infer(inputs).elements * inputs[0].shape[-1]


@dataclass(frozen=True)
class WriteBits(Int64Operator):
    """Bits that `ToBitPlanes` took apart, with neighbours of each row replaced, one after the other. Operands: planes
    uint8 [N, groups, 8, group / 8], T bytes for each row, uint8 [T, N], their places (T integers, int32 or int64).

    A negative place counts from the end; one beyond either end is moved to that end.
    """

    in_place: ClassVar[bool] = True
    result = DType.UINT8

    def infer(self, inputs: Types) -> TensorType:
        planes, row, place = inputs
        fits = len(planes.shape) == 4 and planes.shape[2] == _BITS and planes.dtype is row.dtype is DType.UINT8
        fits = fits and row.shape == (place.elements, planes.shape[0]) and place.dtype.is_integer
        require(fits, f"cannot write a byte of each row, {row}, among the bits {planes} at {place}")
        return planes

    def meaning(self, planes: Any, row: Any, place: Any) -> Any:
        places, shape = place.reshape((row.shape[0],)), planes.shape
        for number in range(row.shape[0]):
            planes = self._with(shape, planes, row[number : number + 1], places[number : number + 1])
        return planes

    def _with(self, shape: Shape, planes: Any, row: Any, place: Any) -> Any:
        """The planes with one neighbour of each row replaced."""
        rows, groups, _, each = shape
        at, places = place.reshape((1, 1, 1)), groups * each * _BITS
        at = np.clip(np.where(at < 0, at + places, at), 0, places - 1)
        past = at - _BITS * np.arange(groups * each).reshape(groups, 1, each)
        bit = np.where((past >= 0) & (past < _BITS), 1, 0) << np.clip(past, 0, _BITS - 1)
        new = row.reshape((rows, 1, 1, 1)) >> np.arange(_BITS).reshape(_BITS, 1) & 1
        return planes - (planes & bit) + new * bit

    def crop(self, box: Box, inputs: Types) -> Cut:
        planes, row, place = (full_box(kind.shape) for kind in inputs)
        require(box[1:] == planes[1:], "bits are written among whole rows, which are not tiled")
        return self, (box, (row[0], box[0]), place)


document(__name__)
