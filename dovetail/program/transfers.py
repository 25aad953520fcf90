"""Brings a strided copy to what a DMA does: planes of rows of contiguous bytes, one plane perhaps padded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from dovetail.program.ir import Copy

_MOST_AXES = 3


@dataclass(frozen=True)
class Transfer:
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
        return self.destination_rows * self.destination_row_bytes


@dataclass(frozen=True)
class _Axis:
    size: int
    source: int
    destination: int


def transfers(copy: Copy) -> tuple[Transfer, ...]:
    """The DMA transfers of a copy, in order.

    Raises:
        ValueError: padding along an axis other than an image's rows and columns.
    """
    if any(copy.before) or copy.source.type.shape != copy.destination.type.shape:
        return (_padded(copy),)
    size = copy.source.type.dtype.numpy.itemsize
    axes = [_Axis(size, 1, 1)]
    strides = zip(copy.source.type.shape, copy.source.strides, copy.destination.strides, strict=True)
    for axis in reversed([_Axis(*triple) for triple in strides if triple[0] != 1]):
        inner = axes[-1]
        spans = (inner.size * inner.source, inner.size * inner.destination)
        if (axis.source, axis.destination) == spans:
            axes[-1] = _Axis(axis.size * inner.size, inner.source, inner.destination)
        else:
            axes.append(axis)
    return tuple(_split(copy, axes))


def _split(copy: Copy, axes: list[_Axis]) -> Iterator[Transfer]:
    """Axes beyond rows and planes become transfers of their own."""
    inner, outer = axes[:_MOST_AXES], axes[_MOST_AXES:]
    row, plane = (*inner[1:], _Axis(1, 0, 0), _Axis(1, 0, 0))[:2]
    for steps in product(*(range(axis.size) for axis in reversed(outer))):
        pairs = list(zip(reversed(outer), steps, strict=True))
        source = copy.source.offset + sum(axis.source * step for axis, step in pairs)
        destination = copy.destination.offset + sum(axis.destination * step for axis, step in pairs)
        strides = (row.size, row.source, row.destination, plane.size, plane.source, plane.destination)
        yield Transfer(source, destination, inner[0].size, *strides)


def _padded(copy: Copy) -> Transfer:
    """A padded NHWC image of one batch: rows of pixels, fill around them."""
    source, destination = copy.source, copy.destination
    pads = [
        (lead, total - size - lead)
        for lead, size, total in zip(copy.before, source.type.shape, destination.type.shape, strict=True)
    ]
    if len(pads) != 4 or pads[0] != (0, 0) or pads[3] != (0, 0) or source.type.shape[0] != 1:
        raise ValueError(f"the DMA pads rows and columns of one image only, not {source.type} to {destination.type}")
    if not destination.is_dense or source.strides[2:] != destination.strides[2:]:
        raise ValueError("a padded copy needs whole pixels side by side")
    pixel = destination.strides[2]
    return Transfer(
        source=source.offset,
        destination=destination.offset,
        row_bytes=source.type.shape[2] * pixel,
        rows=source.type.shape[1],
        source_row_stride=source.strides[1],
        destination_row_stride=destination.strides[1],
        pad_rows=pads[1],
        pad_bytes=(pads[2][0] * pixel, pads[2][1] * pixel),
        fill=copy.fill & 0xFF,
    )
