"""Brings a strided copy to what a DMA does: planes of rows of contiguous bytes, their rows and columns perhaps padded.

A copy between two layouts is taken apart at the steps of both: whole blocks are one nest of axes, the last blocks that
are only partly used one more. What counts down on one side only is one nest per index, for strides are positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod

from dovetail.ir.layout import Layout, axis_offsets, row_major
from dovetail.ir.types import Shape, TensorType
from dovetail.program.ir import Copy, View
from dovetail.records import Record, replace

_MOST_AXES = 3


class Transfer(Record):
    """One DMA transfer. Offsets and strides are bytes, relative to the two buffers."""

    source: int
    destination: int
    row_bytes: int
    rows: int = 1
    source_row_stride: int = 0
    destination_row_stride: int = 0
    planes: int = 1
    source_plane_stride: int = 0
    destination_plane_stride: int = 0
    pad_rows: tuple[int, int] = (0, 0)
    """Rows of fill above and below."""
    pad_bytes: tuple[int, int] = (0, 0)
    """Bytes of fill left and right of every row."""
    fill: int = 0
    border: bool = False
    """Only the fill is written: what it surrounds lies there already."""

    @property
    def is_padded(self) -> bool:
        """True when the transfer writes fill around what it copies."""
        return any((*self.pad_rows, *self.pad_bytes))

    @property
    def destination_row_bytes(self) -> int:
        """Bytes of a row as written."""
        return self.row_bytes + sum(self.pad_bytes)

    @property
    def destination_rows(self) -> int:
        """Rows written, all planes."""
        return self.planes * (self.rows + sum(self.pad_rows))

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        inside = self.planes * self.rows * self.row_bytes if self.border else 0
        return self.destination_rows * self.destination_row_bytes - inside


class _CopyAxis(Record):
    size: int
    source: int
    destination: int


_CopyNest = tuple[int, int, tuple[_CopyAxis, ...]]
"""First byte in the source and in the destination, and the axes to walk from there, outermost first."""


def transfers(copy: Copy) -> tuple[Transfer, ...]:
    """The DMA transfers of a copy, in order.

    Raises:
        ValueError: padding along an axis other than an image's rows and columns, or layouts whose blocks do not
            divide each other, or which put different elements into a byte.
    """
    first, second = copy.source.offset, copy.destination.offset
    made = relative_transfers(copy)
    return tuple(replace(one, source=one.source + first, destination=one.destination + second) for one in made)


def relative_transfers(copy: Copy) -> tuple[Transfer, ...]:
    """The same with offsets from where the two views begin; raises as `transfers`."""
    source, destination = copy.source, copy.destination
    ends = (source.type, source.strides, source.layout), (destination.type, destination.strides, destination.layout)
    return _transfers(*ends, copy.before, copy.fill, copy.fills_border)


_End = tuple[TensorType, tuple[int, ...], Layout | None]
"""Type, strides and layout of what a copy reads or writes."""


@lru_cache(maxsize=1024)  # tiles and layers are copied alike, and every stage asks for each copy
def _transfers(source: _End, destination: _End, before: Shape, fill: int, border: bool) -> tuple[Transfer, ...]:
    """The transfers of a copy between the starts of two buffers."""
    first, second = (View("", kind, strides, layout=layout) for kind, strides, layout in (source, destination))
    copy = _of_bytes(Copy(0, first, second, before, fill))
    if any(copy.before) or copy.source.type.shape != copy.destination.type.shape:
        return tuple(_padded(copy, border))
    size = copy.source.type.dtype.numpy.itemsize
    nests = ((source, destination, _merged(axes, size)) for source, destination, axes in _nests(copy))
    return tuple(transfer for nest in nests for transfer in _split(*nest))


@lru_cache(maxsize=1024)
def dma_rows(copy: Copy) -> tuple[Transfer, ...]:
    """A copy in planes of rows, as many rows to a plane as can be."""
    return tuple(_rows(copy))


def _rows(copy: Copy) -> Iterator[Transfer]:
    for whole in transfers(copy):
        if whole.planes > whole.rows:
            strides = (whole.source_plane_stride, whole.destination_plane_stride)
            turned = replace(whole, rows=whole.planes, source_row_stride=strides[0], destination_row_stride=strides[1])
            inner = (whole.rows, whole.source_row_stride, whole.destination_row_stride)
        else:
            turned, inner = whole, (whole.planes, whole.source_plane_stride, whole.destination_plane_stride)
        for number in range(inner[0]):
            places = (whole.source + number * inner[1], whole.destination + number * inner[2])
            yield replace(turned, source=places[0], destination=places[1], planes=1)


def transfer_count(copy: Copy) -> int:
    """Number of transfers a DMA makes of a copy."""
    return len(dma_rows(copy) if copy.stream else dma_sizes(copy))


def dma_transfers(copy: Copy) -> list[Transfer]:
    """Transfers of a DMA that carry out a copy, in order: borders as strips."""
    return [part for whole in transfers(copy) for part in (strips(whole) if whole.border else (whole,))]


def dma_sizes(copy: Copy) -> list[Transfer]:
    """The same for those who ask for sizes only: offsets are from where the views begin."""
    return [part for whole in relative_transfers(copy) for part in (strips(whole) if whole.border else (whole,))]


def ends_in_padding(copy: Copy, transfer: Transfer) -> bool:
    """Whether each row of a transfer is the used part of a last block in the copy's destination: what lies behind it in
    the block means nothing."""
    layout, kind = copy.destination.layout, copy.destination.type
    if layout is None or layout.packed or copy.source.layout is not None or transfer.is_padded:
        return False
    axis, step = layout.dims[-1]
    block = layout.coarser(axis, step)
    used = kind.shape[axis] % (block or 1) * kind.dtype.numpy.itemsize
    return step == 1 and copy.destination.strides[-1] == kind.dtype.numpy.itemsize and transfer.row_bytes == used


def same_packing(a: Layout | None, b: Layout | None) -> bool:
    """Whether bytes hold the same elements in both layouts, so that copying bytes converts one to the other."""
    return _packing(a) == _packing(b)


def _packing(layout: Layout | None) -> tuple[int, int, bool] | None:
    """Axis, number and order of the elements that share a byte; None where each has bytes of its own."""
    if layout is None or not layout.packed:
        return None
    return layout.dims[-1][0], layout.fields, layout.dims[-1] in layout.backwards


def _of_bytes(copy: Copy) -> Copy:
    """A copy of packed values as one of their bytes."""
    source, destination = copy.source.layout, copy.destination.layout
    if not same_packing(source, destination):
        raise ValueError(f"bytes hold other elements in {source or 'row-major'} than in {destination or 'row-major'}")
    if source is None or not source.packed:
        return copy
    axis, share = source.dims[-1][0], source.fields
    if copy.before and (copy.before[axis] or copy.source.type.shape[axis] != copy.destination.type.shape[axis]):
        raise ValueError(f"padding along axis {axis}, whose elements share bytes")
    bits = 8 // share
    fill = sum((copy.fill & ((1 << bits) - 1)) << (bits * number) for number in range(share))
    return replace(copy, source=copy.source.bytewise, destination=copy.destination.bytewise, fill=fill)


def strips(transfer: Transfer) -> tuple[Transfer, ...]:
    """A border as transfers that a DMA can do: rows of fill above and below, bytes of fill left and right."""
    (top, bottom), (left, right) = transfer.pad_rows, transfer.pad_bytes
    row, width = transfer.destination_row_stride, transfer.destination_row_bytes
    beside = transfer.destination + top * row
    sides = [
        (transfer.destination, width, 0, (top, 0), (0, 0)),
        (beside + transfer.rows * row, width, 0, (bottom, 0), (0, 0)),
        (beside, 0, transfer.rows, (0, 0), (left, 0)),
        (beside + left + transfer.row_bytes, 0, transfer.rows, (0, 0), (right, 0)),
    ]
    blank = replace(transfer, source_row_stride=0, source_plane_stride=0, border=False)
    return tuple(
        replace(blank, source=start, destination=start, row_bytes=size, rows=rows, pad_rows=above, pad_bytes=side)
        for start, size, rows, above, side in sides
        if above[0] or side[0]
    )


def _nests(copy: Copy) -> Iterator[_CopyNest]:
    source, destination = copy.source, copy.destination
    if source.layout == destination.layout:
        yield source.offset, destination.offset, _axes(source, destination)
        return
    ways = [_ViewStrides(view) for view in (source, destination)]
    parts = [_segments(size, _steps(ways, axis, size)) for axis, size in enumerate(source.type.shape)]
    for combination in product(*parts):
        first = [start for start, _ in combination]
        digits = [(axis, count, step) for axis, (_, counts) in enumerate(combination) for count, step in counts]
        axes = [
            (axis, step, _CopyAxis(n, *(way.apart(axis, first[axis], step) for way in ways)))
            for axis, n, step in digits
            if n > 1
        ]
        walked = [along for _, _, along in axes if min(along.source, along.destination) >= 0]
        single = [(axis, step, along.size) for axis, step, along in axes if along not in walked]
        for chosen in product(*(range(count) for _, _, count in single)):
            place = list(first)
            for (axis, step, _), index in zip(single, chosen, strict=True):
                place[axis] += step * index
            starts = [way.view.offset + sum(way.at(axis, start) for axis, start in enumerate(place)) for way in ways]
            yield starts[0], starts[1], tuple(sorted(walked, key=lambda along: -along.destination))


def _axes(source: View, destination: View) -> tuple[_CopyAxis, ...]:
    """The physical dimensions of two views in one layout."""
    return tuple(map(_CopyAxis, source.physical, source.strides, destination.strides))


class _ViewStrides:
    """Distances of the elements of a view."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.layout = view.layout or row_major(len(view.type.shape))
        self._offsets = axis_offsets(self.layout, view.strides, view.type.shape)

    def at(self, axis: int, index: int) -> int:
        """Bytes from the first physical element to the one at `index` of an axis."""
        return int(self._offsets[axis][index])

    def apart(self, axis: int, index: int, step: int) -> int:
        """Bytes from the element at `index` of an axis to the one a step on; negative where that lies before it."""
        return self.at(axis, index + step) - self.at(axis, index)


def _steps(ways: list[_ViewStrides], axis: int, size: int) -> tuple[int, ...]:
    """The steps of both layouts, coarsest first, without those that lead where finer ones do on both sides."""
    steps = sorted({step for way in ways for step in way.layout.steps(axis)}, reverse=True)
    if any(coarse % fine for coarse, fine in pairwise(steps)):
        raise ValueError(f"blocks of {steps[0]} and {steps[1]} do not divide each other: no copy between the layouts")
    steps_kept = steps[-1:]
    for coarse in (step for step in reversed(steps[:-1]) if step < size):
        if any(
            way.apart(axis, 0, coarse) != coarse // steps_kept[0] * way.apart(axis, 0, steps_kept[0]) for way in ways
        ):
            steps_kept.insert(0, coarse)
    return tuple(steps_kept)


def _segments(size: int, steps: tuple[int, ...]) -> list[tuple[int, list[tuple[int, int]]]]:
    """An axis as runs of whole blocks: where each begins, and how many times each step is made in it."""
    runs, start = [], 0
    for place, step in enumerate(steps):
        count = (size - start) // step
        if count:
            finer = zip(steps[place:], steps[place + 1 :], strict=False)
            runs.append((start, [(count, step), *((coarse // fine, fine) for coarse, fine in finer)]))
            start += count * step
    return runs


def _merged(axes: tuple[_CopyAxis, ...], size: int) -> list[_CopyAxis]:
    """The bytes of an element and the axes, innermost first, joined where they follow each other on both sides."""
    merged = [_CopyAxis(size, 1, 1)]
    for axis in reversed([axis for axis in axes if axis.size != 1]):
        inner = merged[-1]
        if (axis.source, axis.destination) == (inner.size * inner.source, inner.size * inner.destination):
            merged[-1] = replace(inner, size=axis.size * inner.size)
        else:
            merged.append(axis)
    return merged


def _split(source: int, destination: int, axes: Sequence[_CopyAxis]) -> Iterator[Transfer]:
    """Axes beyond rows and planes become transfers of their own: the shortest, for the fewest transfers."""
    longest = sorted(range(1, len(axes)), key=lambda place: -axes[place].size)[: _MOST_AXES - 1]
    inner = [axes[place] for place in sorted(longest)]
    outer = [axis for place, axis in enumerate(axes) if place and place not in longest][::-1]
    row, plane = (*inner, _CopyAxis(1, 0, 0), _CopyAxis(1, 0, 0))[:2]
    strides = (row.size, row.source, row.destination, plane.size, plane.source, plane.destination)
    for steps in product(*(range(axis.size) for axis in outer)):
        first = source + sum(axis.source * step for axis, step in zip(outer, steps, strict=True))
        target = destination + sum(axis.destination * step for axis, step in zip(outer, steps, strict=True))
        yield Transfer(first, target, axes[0].size, *strides)


def can_pad(layout: Layout | None) -> bool:
    """True when images in a layout can be padded: rows and columns are not blocked and columns follow their rows."""
    dims = (layout or row_major(4)).dims
    places = [place for place, (axis, _) in enumerate(dims) if axis in (1, 2)]
    return len(places) == 2 and places[1] == places[0] + 1 and dims[places[0]] == (1, 1)


def _padded(copy: Copy, border: bool) -> Iterator[Transfer]:
    """A padded image of one batch: rows of pixels (or of a block of their channels), fill around them, which is all
    that is written for a `border`."""
    source, destination = copy.source, copy.destination
    pads = [
        (lead, total - size - lead)
        for lead, size, total in zip(copy.before, source.type.shape, destination.type.shape, strict=True)
    ]
    if len(pads) != 4 or pads[0] != (0, 0) or pads[3] != (0, 0) or source.type.shape[0] != 1:
        raise ValueError(f"the DMA pads rows and columns of one image only, not {source.type} to {destination.type}")
    if not can_pad(source.layout):
        raise ValueError(f"the DMA pads images whose columns follow their rows, not {source.layout}")
    column = (source.layout or row_major(4)).dims.index((2, 1))
    if source.layout != destination.layout or not destination.is_dense:
        raise ValueError("a padded copy needs one layout and a dense destination")
    inner = zip(source.physical[column:], source.strides[column:], destination.strides[column:], strict=True)
    if any(size > 1 and own != other for size, own, other in inner):
        raise ValueError("a padded copy needs whole pixels side by side")
    pixel, outer = destination.strides[column], _axes(source, destination)
    row = _CopyAxis(prod(source.physical[column:]) * source.type.dtype.numpy.itemsize, 1, 1)
    image = [row, outer[column - 1], *(axis for axis in reversed(outer[: column - 1]) if axis.size != 1)]
    beside = (pads[2][0] * pixel, pads[2][1] * pixel)
    for one in _split(source.offset, destination.offset, image):
        yield replace(one, pad_rows=pads[1], pad_bytes=beside, fill=copy.fill & 0xFF, border=border)
