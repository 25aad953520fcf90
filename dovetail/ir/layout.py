"""Layouts: where the elements of a value lie, as a small algebra beside its logical shape.

A layout is a list of *physical dimensions*, outermost first, each a pair (logical axis, step). The index along a
physical dimension is `logical index // step`, counted within the next coarser step of the same axis. So, of images
whose logical shape is N, H, W, C:

    row-major (NHWC)              ((0, 1), (1, 1), (2, 1), (3, 1))
    blocks of 16 channels, "N C/16 H W 16c" ((0, 1), (3, 16), (1, 1), (2, 1), (3, 1))

An axis whose size is no multiple of its coarsest step ends in a block that is only partly used; the rest of it is
padding, part of the value's bytes but of no meaning. Elements lie row-major in the physical dimensions.

Within a block the index may count down instead: rows whose bytes are swapped in words of four are "N C H W/4 -4w".

Elements narrower than a byte lie one to a byte, unless the layout is *packed*: then the last dimension is one byte, its
first index in the lowest bits (in the highest where it counts down). Pairs of channels in a byte are
"N H W C/2 [2c]", pairs of columns "N H W/2 C [2w]". The byte is the unit of everything: strides, parts, copies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod

import numpy as np

from dovetail.documented import document
from dovetail.ir.types import Array, Box, DType, Shape, TensorType, dense_steps
from dovetail.records import Record

Dimension = tuple[int, int]
"""A physical dimension: logical axis, and step along it."""

_LETTERS = {1: "C", 2: "NC", 3: "NWC", 4: "NHWC", 5: "NDHWC"}
_OTHERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PART = re.compile(r"(-?)(\d*)([A-Za-z])(?:/(\d+))?")
FIELDS = {4: 2, 2: 4}
"""Elements that share a byte, by the bits of one."""


class Layout(Record, dict=True):
    """An order of physical dimensions.

    Raises:
        ValueError: an axis is missing, its steps do not divide each other, its finest step is not 1, what counts
            down is no dimension within a block, or a packed byte does not hold 2 or 4 neighbours along an axis.
    """

    dims: tuple[Dimension, ...]
    """Physical dimensions, outermost first."""
    backwards: tuple[Dimension, ...] = ()
    """Dimensions within a block whose first index lies last."""
    packed: bool = False
    """Whether the elements along the last dimension, neighbours along an axis, share a byte."""

    def __post_init__(self) -> None:
        axes = {axis for axis, _ in self.dims}
        if axes != set(range(len(axes))):
            raise ValueError(f"the axes {sorted(axes)} of a layout are not 0 to {len(axes) - 1}")
        for axis in sorted(axes):
            steps = self.steps(axis)
            divide = all(fine > 0 and coarse > fine and coarse % fine == 0 for coarse, fine in pairwise(steps))
            if not divide or steps[-1] != 1:
                raise ValueError(f"the steps {list(steps)} of axis {axis} do not divide each other down to 1")
        for axis, step in self.backwards:
            if (axis, step) not in self.dims or self.coarser(axis, step) is None:
                raise ValueError(f"step {step} of axis {axis} cannot count down: it is not within a block")
        if self.packed and (self.dims[-1][1] != 1 or self.fields not in FIELDS.values()):
            raise ValueError("a byte holds 2 or 4 neighbours along one axis, the last dimension of a packed layout")

    @cached_property
    def fields(self) -> int:
        """Elements in a byte; 1 where each has a byte, or several, of its own."""
        return (self.coarser(*self.dims[-1]) or 1) if self.packed else 1

    @cached_property
    def stored(self) -> tuple[Dimension, ...]:
        """The dimensions that bytes are counted along: all, but for the one within a byte."""
        return self.dims[:-1] if self.packed else self.dims

    @cached_property
    def bytewise(self) -> Layout:
        """The layout of the bytes of a packed one as elements of their own: the axis in a byte is that much shorter."""
        if not self.packed:
            return self
        axis, share = self.dims[-1][0], self.fields
        coarse = {(other, step): (other, step // share if other == axis else step) for other, step in self.stored}
        down = tuple(coarse[dimension] for dimension in self.backwards if dimension in coarse)
        return Layout(tuple(coarse.values()), down)

    @cached_property
    def order(self) -> Layout | None:
        """The order the elements come in, each in a byte of its own; None for row-major."""
        dims, down = self.dims, self.backwards
        if self.packed and dims[-1] not in down and dims[-2] == (dims[-1][0], self.fields):
            dims = (*dims[:-2], dims[-1])
            down = tuple(dimension for dimension in down if dimension in dims)
        found = Layout(dims, down)
        return None if found.is_row_major else found

    @cached_property
    def rank(self) -> int:
        """Number of logical axes."""
        return len({axis for axis, _ in self.dims})

    @cached_property
    def is_row_major(self) -> bool:
        """True when nothing is blocked and the axes are in their logical order."""
        return not self.packed and self.dims == tuple((axis, 1) for axis in range(self.rank))

    def index(self, axis: int, step: int, place: Array) -> Array:
        """The index along (axis, step) of elements.

        Args:
            place: positions along the axis, counted in elements; an array or a number.
        """
        coarser, index = self.coarser(axis, step), place // step
        if coarser is None:
            return index
        count = coarser // step
        return count - 1 - index % count if (axis, step) in self.backwards else index % count

    def steps(self, axis: int) -> tuple[int, ...]:
        """The steps of an axis, coarsest first."""
        return tuple(sorted((step for other, step in self.dims if other == axis), reverse=True))

    def block(self, axis: int) -> int:
        """The coarsest step of an axis: parts of a value begin at multiples of it."""
        return self.steps(axis)[0]

    def coarser(self, axis: int, step: int) -> int | None:
        """The next coarser step of an axis, which bounds the index along (axis, step); None for the coarsest."""
        return min((other for other in self.steps(axis) if other > step), default=None)

    def __str__(self) -> str:
        """As people write it, e.g. "N C/16 H W 16c": upper case and step for the coarsest dimension of an axis, its
        number of indices and lower case for those within a block ("4c/4" where they do not go down to 1, "-4c" where
        they count down), in brackets where they share a byte."""
        letters = _letters(self.rank)
        parts = []
        for axis, step in self.dims:
            coarser = self.coarser(axis, step)
            letter = letters[axis] if coarser is None else f"{coarser // step}{letters[axis].lower()}"
            parts.append(("-" if (axis, step) in self.backwards else "") + letter + (f"/{step}" if step > 1 else ""))
        return " ".join([*parts[:-1], f"[{parts[-1]}]"] if self.packed else parts)


def _letters(rank: int) -> str:
    return _LETTERS.get(rank, _OTHERS[:rank])


def from_notation(text: str) -> Layout:
    """The layout that prints as `text`.

    Raises:
        ValueError: the text is not a layout's notation.
    """
    inside = re.fullmatch(r"(.* )\[(\S+)\]", " ".join(text.split()))
    found = [_PART.fullmatch(part) for part in (inside[1] + inside[2] if inside else text).split()]
    if None in found or not found:
        raise ValueError(f"{text!r} is not a layout")
    parts = [(match[3].upper(), int(match[4] or 1), bool(match[1])) for match in found if match]
    letters = _letters(len({letter for letter, _, _ in parts}))
    if any(letter not in letters for letter, _, _ in parts):
        raise ValueError(f"{text!r} names other axes than {' '.join(letters)}")
    dims = [((letters.index(letter), step), down) for letter, step, down in parts]
    backwards = tuple(dimension for dimension, down in dims if down)
    layout = Layout(tuple(dimension for dimension, _ in dims), backwards, inside is not None)
    if str(layout) != " ".join(text.split()):
        raise ValueError(f"{text!r} is not how the layout {str(layout)!r} is written")
    return layout


def row_major(rank: int) -> Layout:
    """The layout of `rank` axes in their logical order."""
    return Layout(tuple((axis, 1) for axis in range(rank)))


def blocked(order: Sequence[int], axis: int, size: int) -> Layout:
    """Axes in an order, one of them in blocks of `size` whose elements lie innermost.

    `blocked((0, 3, 1, 2), 3, 16)` is "N C/16 H W 16c". Raises ValueError when `order` does not name every axis once.
    """
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"{list(order)} does not order the axes 0 to {len(order) - 1}")
    return Layout((*((other, size if other == axis else 1) for other in order), (axis, 1)))


def packed(layout: Layout | None, rank: int, bits: int, axis: int = -1) -> Layout:
    """A layout with the elements along an axis in bytes, the first in the lowest bits.

    `packed(None, 4, 4)` is "N H W C/2 [2c]".

    Args:
        layout: the order of the elements; None for row-major.
        rank: number of axes.
        bits: of an element, 2 or 4.
        axis: along which neighbours share a byte; its finest step is 1, so blocks of it are of whole bytes.

    Raises:
        ValueError: bytes do not divide the blocks of the axis.
    """
    axis, share = axis % rank, FIELDS[bits]
    base = layout or row_major(rank)
    dims = (*((a, share if (a, step) == (axis, 1) else step) for a, step in base.dims), (axis, 1))
    dims = tuple(dict.fromkeys(dims))  # a block of just these elements is the byte
    down = tuple((a, share if (a, step) == (axis, 1) else step) for a, step in base.backwards)
    return Layout(dims, down, packed=True)


def packing_fits(layout: Layout | None, dtype: DType) -> bool:
    """Whether elements of a type can lie so: what shares bytes must fill them."""
    return layout is None or layout.fields == 1 or dtype.bits * layout.fields == 8


@lru_cache(maxsize=4096)
def physical_shape(layout: Layout, shape: Shape) -> Shape:
    """Sizes of the physical dimensions of a value of a logical shape, the last block of an axis padded up.

    Raises:
        ValueError: the shape has another number of axes.
    """
    if len(shape) != layout.rank:
        raise ValueError(f"the layout {layout} does not fit a value of {len(shape)} axes")
    sizes = []
    for axis, step in layout.dims:
        coarser = layout.coarser(axis, step)
        sizes.append(-(-shape[axis] // step) if coarser is None else coarser // step)
    return tuple(sizes)


def stored_shape(layout: Layout, shape: Shape) -> Shape:
    """`physical_shape` without the dimension within a byte."""
    sizes = physical_shape(layout, shape)
    return sizes[:-1] if layout.packed else sizes


def field_numbers(layout: Layout, shape: Shape) -> Array:
    """The field of its byte that each element lies in, 0 for the lowest bits: int64, to be broadcast to the shape."""
    axis = layout.dims[-1][0]
    found = layout.index(axis, 1, np.arange(shape[axis])) if layout.packed else np.zeros(shape[axis], np.int64)
    return found.reshape([-1 if other == axis else 1 for other in range(len(shape))])


def to_physical(array: Array, layout: Layout) -> Array:
    """The elements of a logical array in the order they lie, of the physical shape; padding is zero."""
    blocks = [layout.block(axis) for axis in range(layout.rank)]
    padded = np.pad(array, [(0, -size % block) for size, block in zip(array.shape, blocks, strict=True)])
    split, order = _split_axes(layout, padded.shape)
    return np.ascontiguousarray(np.flip(padded.reshape(split).transpose(order), _down(layout)))


def from_physical(array: Array, layout: Layout, shape: Shape) -> Array:
    """The logical array of `shape` whose elements lie as `array`, of the physical shape, says."""
    whole = tuple(-(-size // layout.block(axis)) * layout.block(axis) for axis, size in enumerate(shape))
    _, order = _split_axes(layout, whole)
    counted = np.flip(array.reshape(physical_shape(layout, shape)), _down(layout))
    joined = counted.transpose(np.argsort(order)).reshape(whole)
    return np.ascontiguousarray(joined[tuple(slice(0, size) for size in shape)])


def to_bytes(array: Array, layout: Layout | None) -> Array:
    """The bytes of a logical array as it lies in memory, uint8 of one axis; padding is zero."""
    physical = np.ascontiguousarray(array) if layout is None else to_physical(array, layout)
    if layout is None or not layout.packed:
        return physical.reshape(-1).view(np.uint8)
    bits = 8 // layout.fields
    fields = physical.reshape(-1, layout.fields).astype(np.uint8) & ((1 << bits) - 1)
    return np.asarray((fields << (bits * np.arange(layout.fields))).sum(axis=1), dtype=np.uint8)


def from_bytes(found: Array, layout: Layout | None, kind: TensorType) -> Array:
    """The logical array of a type whose bytes lie as `found`, uint8: the inverse of `to_bytes`."""
    if layout is None:
        return found.view(kind.dtype.numpy).reshape(kind.shape)
    elements = found.view(kind.dtype.numpy)
    if layout.packed:
        shifts = 8 // layout.fields * np.arange(layout.fields)
        elements = from_field(found.reshape(-1, 1) >> shifts, kind.dtype)
    return from_physical(elements, layout, kind.shape)


def from_field(raw: Array, dtype: DType) -> Array:
    """Elements of a type from integers whose lowest bits they are."""
    spare = 8 - dtype.bits
    return ((raw << spare).astype(np.uint8).view(dtype.numpy) >> spare).astype(dtype.numpy)


def _split_axes(layout: Layout, shape: Shape) -> tuple[Shape, tuple[int, ...]]:
    """The shape with every axis taken apart, coarsest first, and the place there of each physical dimension."""
    places = [(axis, step) for axis in range(layout.rank) for step in layout.steps(axis)]
    sizes = dict(zip(layout.dims, physical_shape(layout, shape), strict=True))
    return tuple(sizes[place] for place in places), tuple(places.index(dimension) for dimension in layout.dims)


def _down(layout: Layout) -> tuple[int, ...]:
    """The places of the physical dimensions that count down."""
    return tuple(place for place, dimension in enumerate(layout.dims) if dimension in layout.backwards)


def nbytes(layout: Layout | None, kind: TensorType) -> int:
    """Bytes of a value that lies in a layout (None: row-major), padding included."""
    return prod(kind.shape if layout is None else stored_shape(layout, kind.shape)) * kind.dtype.numpy.itemsize


def axis_offsets(layout: Layout, strides: Sequence[int], shape: Shape) -> tuple[Array, ...]:
    """Per logical axis, how far each of its indices is from the first physical one: an element's offset is the sum over
    the axes.

    Args:
        layout: how the value lies.
        strides: distance between neighbours along each physical dimension but one within a byte.
        shape: the logical shape.

    Returns:
        int64 arrays of the axes' sizes, in the unit of `strides`, not to be written to.
    """
    return _axis_offsets(layout, tuple(strides), shape)


@lru_cache(maxsize=1024)  # tiles lie alike, and every stage asks for each
def _axis_offsets(layout: Layout, strides: tuple[int, ...], shape: Shape) -> tuple[Array, ...]:
    found = [np.zeros(size, dtype=np.int64) for size in shape]
    for (axis, step), stride in zip(layout.stored, strides, strict=True):
        found[axis] += layout.index(axis, step, np.arange(shape[axis])) * stride
    for offsets in found:
        offsets.setflags(write=False)
    return tuple(found)


def dense_offsets(layout: Layout, shape: Shape) -> tuple[Array, ...]:
    """`axis_offsets`, in elements (bytes where these share some), of a value that lies densely."""
    return axis_offsets(layout, dense_steps(stored_shape(layout, shape)), shape)


def same_bytes(a: Layout | None, b: Layout | None, shape: Shape) -> bool:
    """True when a value of this shape has every element at the same place, and the same size, in both layouts.

    None stands for row-major. Images of one pixel, for instance, lie the same in any order of their axes.
    """
    first, second = (row_major(len(shape)) if layout is None else layout for layout in (a, b))
    if first == second:
        return True
    if first.fields != second.fields or prod(physical_shape(first, shape)) != prod(physical_shape(second, shape)):
        return False
    if first.fields > 1 and not np.array_equal(field_numbers(first, shape), field_numbers(second, shape)):
        return False
    pairs = list(zip(dense_offsets(first, shape), dense_offsets(second, shape), strict=True))
    # The first element of a block that counts down lies at its end.
    begins = sum(int(one[:1].sum()) - int(other[:1].sum()) for one, other in pairs)
    return begins == 0 and all(np.array_equal(one - one[:1], other - other[:1]) for one, other in pairs)


def check_part(layout: Layout | None, box: Box, shape: Shape) -> None:
    """Check that a part of a value of `shape` begins and ends at whole blocks, or ends where the value does.

    Raises:
        ValueError: it does not.
    """
    for axis, ((start, stop), size) in enumerate(zip(box, shape, strict=True)):
        block = 1 if layout is None else layout.block(axis)
        if start % block or (stop % block and stop != size):
            raise ValueError(f"{start} to {stop} of axis {axis} does not lie in whole blocks of {block}")


document(__name__)
