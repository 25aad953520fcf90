"""Layouts: where the elements of a value lie, as a small algebra beside its logical shape.

A layout is a list of *physical dimensions*, outermost first, each a pair (logical axis, step). The index along a
physical dimension is `logical index // step`, counted within the next coarser step of the same axis. So, of images
whose logical shape is N, H, W, C:

    row-major (NHWC)              ((0, 1), (1, 1), (2, 1), (3, 1))
    blocks of 16 channels, "N C/16 H W 16c" ((0, 1), (3, 16), (1, 1), (2, 1), (3, 1))

An axis whose size is no multiple of its coarsest step ends in a block that is only partly used; the rest of it is
padding, part of the value's bytes but of no meaning. Elements lie row-major in the physical dimensions.

Within a block the index may count down instead: rows whose bytes are swapped in words of four are "N C H W/4 -4w".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod

import numpy as np

from dovetail.ir.types import Array, Box, Shape, TensorType, dense_steps

Dimension = tuple[int, int]
"""(logical axis, step)."""

_LETTERS = {1: "C", 2: "NC", 3: "NWC", 4: "NHWC", 5: "NDHWC"}
_OTHERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PART = re.compile(r"(-?)(\d*)([A-Za-z])(?:/(\d+))?")


@dataclass(frozen=True)
class Layout:
    """An order of physical dimensions.

    Raises:
        ValueError: an axis is missing, its steps do not divide each other, its finest step is not 1, or what counts
            down is no dimension within a block.
    """

    dims: tuple[Dimension, ...]
    """Outermost first."""
    backwards: tuple[Dimension, ...] = ()
    """Dimensions within a block whose first index lies last."""

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

    @cached_property
    def rank(self) -> int:
        """Number of logical axes."""
        return len({axis for axis, _ in self.dims})

    @cached_property
    def is_row_major(self) -> bool:
        """True when nothing is blocked and the axes are in their logical order."""
        return self.dims == tuple((axis, 1) for axis in range(self.rank))

    def index(self, axis: int, step: int, place: Array) -> Array:
        """The index along (axis, step) of the elements at some places of the axis."""
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
        they count down)."""
        letters = _letters(self.rank)
        parts = []
        for axis, step in self.dims:
            coarser = self.coarser(axis, step)
            letter = letters[axis] if coarser is None else f"{coarser // step}{letters[axis].lower()}"
            parts.append(("-" if (axis, step) in self.backwards else "") + letter + (f"/{step}" if step > 1 else ""))
        return " ".join(parts)


def _letters(rank: int) -> str:
    return _LETTERS.get(rank, _OTHERS[:rank])


def from_notation(text: str) -> Layout:
    """The layout that prints as `text`.

    Raises:
        ValueError: the text is not a layout's notation.
    """
    found = [_PART.fullmatch(part) for part in text.split()]
    if None in found or not found:
        raise ValueError(f"{text!r} is not a layout")
    parts = [(match[3].upper(), int(match[4] or 1), bool(match[1])) for match in found if match]
    letters = _letters(len({letter for letter, _, _ in parts}))
    if any(letter not in letters for letter, _, _ in parts):
        raise ValueError(f"{text!r} names other axes than {' '.join(letters)}")
    dims = [((letters.index(letter), step), down) for letter, step, down in parts]
    layout = Layout(tuple(dimension for dimension, _ in dims), tuple(dimension for dimension, down in dims if down))
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
    if layout is None:
        return kind.nbytes
    return (prod(physical_shape(layout, kind.shape)) * kind.dtype.bits + 7) // 8


def axis_offsets(layout: Layout, strides: Sequence[int], shape: Shape) -> tuple[Array, ...]:
    """Per logical axis, how far each of its indices is from the first physical one: an element's offset is the sum over
    the axes.

    Args:
        layout: how the value lies.
        strides: distance between neighbours along each physical dimension.
        shape: the logical shape.

    Returns:
        int64 arrays of the axes' sizes, in the unit of `strides`.
    """
    found = [np.zeros(size, dtype=np.int64) for size in shape]
    for (axis, step), stride in zip(layout.dims, strides, strict=True):
        found[axis] += layout.index(axis, step, np.arange(shape[axis])) * stride
    return tuple(found)


def dense_offsets(layout: Layout, shape: Shape) -> tuple[Array, ...]:
    """`axis_offsets`, in elements, of a value that lies densely."""
    return axis_offsets(layout, dense_steps(physical_shape(layout, shape)), shape)


def same_bytes(a: Layout | None, b: Layout | None, shape: Shape) -> bool:
    """True when a value of this shape has every element at the same place, and the same size, in both layouts.

    None stands for row-major. Images of one pixel, for instance, lie the same in any order of their axes.
    """
    first, second = (row_major(len(shape)) if layout is None else layout for layout in (a, b))
    if first == second:
        return True
    if prod(physical_shape(first, shape)) != prod(physical_shape(second, shape)):
        return False
    pairs = zip(dense_offsets(first, shape), dense_offsets(second, shape), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def check_part(layout: Layout | None, box: Box, shape: Shape) -> None:
    """Check that a part of a value of `shape` begins and ends at whole blocks, or ends where the value does.

    Raises:
        ValueError: it does not.
    """
    for axis, ((start, stop), size) in enumerate(zip(box, shape, strict=True)):
        block = 1 if layout is None else layout.block(axis)
        if start % block or (stop % block and stop != size):
            raise ValueError(f"{start} to {stop} of axis {axis} does not lie in whole blocks of {block}")
