"""Element types and tensor types: what every value of a graph is known to be."""

from __future__ import annotations

import enum
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dovetail.documented import document
from dovetail.records import Record

Array = NDArray[Any]
"""Any numpy array."""

Shape = tuple[int, ...]
"""Sizes of a tensor's axes, outermost first. Images are NHWC, convolution weights OHWI."""

Box = tuple[tuple[int, int], ...]
"""A rectangular part of a tensor: (start, stop) per axis."""


_BLOCK = 1 << 18
"""Elements of a large array that are computed with at once."""


def blocks(array: Array) -> list[slice]:
    """Parts of the first axis, in order, which has an element: of large arrays so small that wider numbers of them do
    not take the memory of several such arrays."""
    rows = max(1, _BLOCK // max(1, array.size // len(array)))
    return [slice(start, start + rows) for start in range(0, len(array), rows)]


class DType(enum.Enum):
    """An element type. Types narrower than a byte are held in numpy one element per byte."""

    BOOL = ("bool", 8, False)
    INT2 = ("int2", 2, True)
    INT4 = ("int4", 4, True)
    INT8 = ("int8", 8, True)
    INT16 = ("int16", 16, True)
    INT32 = ("int32", 32, True)
    INT64 = ("int64", 64, True)
    UINT2 = ("uint2", 2, False)
    UINT4 = ("uint4", 4, False)
    UINT8 = ("uint8", 8, False)
    UINT16 = ("uint16", 16, False)
    UINT32 = ("uint32", 32, False)
    FLOAT32 = ("float32", 32, True)

    @cached_property
    def text(self) -> str:
        """The type's name as numpy and messages write it."""
        return self.value[0]

    @cached_property
    def bits(self) -> int:
        """Bits of one element."""
        return self.value[1]

    @cached_property
    def signed(self) -> bool:
        """True for types with negative values."""
        return self.value[2]

    @property
    def is_integer(self) -> bool:
        """True for every integer type, bool excluded."""
        return self not in (DType.FLOAT32, DType.BOOL)

    @cached_property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy type that holds one element (int2 and int4 are held in int8)."""
        if self.bits < 8:
            return np.dtype(np.int8 if self.signed else np.uint8)
        return np.dtype(self.text)

    @property
    def low(self) -> int:
        """The smallest value of an integer type."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def high(self) -> int:
        """The largest value of an integer type."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    def narrowed(self, bits: int) -> DType:
        """The integer type of a number of bits, of the same signedness; raises ValueError if no type has so many
        bits."""
        for candidate in DType:
            if candidate.is_integer and (candidate.bits, candidate.signed) == (bits, self.signed):
                return candidate
        raise ValueError(f"there are no integers of {bits} bits")

    @classmethod
    def of(cls, dtype: DTypeLike) -> DType:
        """The element type of a numpy type; raises ValueError for one that no tensor may have."""
        kind = np.dtype(dtype)
        if (known := _BY_NUMPY.get(kind)) is not None:
            return known
        if kind.name not in _BY_TEXT:
            raise ValueError(f"no tensor can have the numpy type {kind.name}")
        return _BY_TEXT[kind.name]


_BY_TEXT = {dtype.text: dtype for dtype in DType}
_BY_NUMPY = {dtype.numpy: dtype for dtype in DType if dtype.bits >= 8}


class TensorType(Record):
    """Shape and element type of a value."""

    shape: Shape
    """Size of each axis, outermost first."""
    dtype: DType
    """Element type."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense value, elements narrower than a byte packed."""
        return (self.elements * self.dtype.bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype.text}[{'x'.join(map(str, self.shape))}]"


def frozen(array: Array) -> Array:
    """The array, dense and no longer to be written to."""
    kept = np.ascontiguousarray(array).reshape(array.shape)
    kept.setflags(write=False)
    return kept


def dense_steps(shape: Shape) -> tuple[int, ...]:
    """Elements from one index to the next along each axis of a row-major array."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def full_box(shape: Shape) -> Box:
    """The box that covers a whole tensor of this shape."""
    return tuple((0, size) for size in shape)


def with_span(box: Box, axis: int, span: tuple[int, int]) -> Box:
    """The box with another span along an axis."""
    return (*box[:axis], span, *box[axis + 1 :])


def box_shape(box: Box) -> Shape:
    """The shape of the part of a tensor a box covers."""
    return tuple(stop - start for start, stop in box)


def box_slices(box: Box) -> tuple[slice, ...]:
    """A box as numpy slices."""
    return tuple(slice(start, stop) for start, stop in box)


document(__name__)
