"""The boxes of a layer as its user gives them: checked, completed, and put in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dovetail.guests.mesh.cuts import Cut
from dovetail.guests.mesh.layers import MeshLayer
from dovetail.guests.mesh.marked import LocatedValue
from dovetail.guests.mesh.partition import boxes_of
from dovetail.guests.mesh.wishes import LayerMapping, PieceMapping, Ref
from dovetail.ir.types import Box
from dovetail.target.mesh import Mesh

_MOST_PIECES = 1 << 18
_MOST_CELLS = 1 << 24


@dataclass(frozen=True)
class Boxes:
    """The pieces of a layer."""

    cut: Cut
    boxes: NDArray[np.int64]
    """As `Stage.boxes`."""
    free: bool
    """As `Stage.free`."""
    on: tuple[Ref | None, ...]
    """The element of each; None where it is left to us."""
    at: tuple[LocatedValue, ...]
    """Where each stands; of what we added, where the layer does."""


def boxes_wished(wish: LayerMapping, layer: MeshLayer, mesh: Mesh) -> Boxes | None:
    """The pieces a file gives a layer; None where it says neither cut nor pieces.

    Raises:
        PlanError: boxes overlap; there are too many; sums are cut and the boxes form no grid, or elements give whole
            results only.
    """
    if wish.cut is None and wish.pieces is None:
        return None
    cut = Cut(*(wish.cut or (1, 1, 1, 1)))
    whole = (0, layer.summed)
    if mesh.pieces is not None and (cut.sums > 1 or any(p.box and p.box[3] != whole for p in wish.pieces or ())):
        hint = "elements with engines of their own give whole results: cut rows, columns or channels"
        raise wish.at.wrong(f"{wish.name} is cut over what it sums", hint)
    if cut.pieces > _MOST_PIECES or len(wish.pieces or ()) > _MOST_PIECES:
        raise wish.at.wrong(f"{wish.name} is cut into more than {_MOST_PIECES} pieces", "cut it into fewer")
    given = wish.pieces or (PieceMapping(None, None, wish.at),) * cut.pieces
    if given[0].box is None:
        return Boxes(cut, boxes_of(layer, cut, mesh), False, tuple(p.on for p in given), tuple(p.at for p in given))
    return _sorted([*given, *_left_out(wish, layer, given)], wish)


def _left_out(wish: LayerMapping, layer: MeshLayer, given: Sequence[PieceMapping]) -> list[PieceMapping]:
    """Pieces for what no box holds."""
    sizes = (*layer.image, layer.summed)
    boxes = [piece.box or () for piece in given]
    ends = [np.unique([0, size, *(end for box in boxes for end in box[axis])]) for axis, size in enumerate(sizes)]
    if np.prod([float(len(end)) for end in ends]) > _MOST_CELLS:
        raise wish.at.wrong(f"the boxes of {wish.name} have too many different edges", "let boxes share their edges")
    owner = np.full([len(end) - 1 for end in ends], -1, np.int64)
    for number, box in enumerate(boxes):
        part = tuple(slice(*np.searchsorted(end, span)) for end, span in zip(ends, box, strict=True))
        other = int(owner[part].max())
        if other >= 0:
            what = f"the box {shown_box(box)} of {wish.name} overlaps {shown_box(boxes[other])}"
            raise given[number].at.wrong(what, "give each element of the result to one piece", given[other].at)
        owner[part] = number
    return [PieceMapping(box, None, wish.at) for box in _filled(owner < 0, ends)]


def _filled(free: NDArray[np.bool_], ends: Sequence[NDArray[np.int64]]) -> list[Box]:
    """Boxes of cells that are free, each grown as far as it goes, the last axis first."""
    found = []
    while free.any():
        start = [int(place) for place in np.unravel_index(int(free.argmax()), free.shape)]
        stop = [place + 1 for place in start]
        for axis in range(3, -1, -1):
            while stop[axis] < free.shape[axis]:
                part = [slice(a, b) for a, b in zip(start, stop, strict=True)]
                part[axis] = slice(stop[axis], stop[axis] + 1)
                if not free[tuple(part)].all():
                    break
                stop[axis] += 1
        free[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = False
        found.append(tuple((int(end[a]), int(end[b])) for end, a, b in zip(ends, start, stop, strict=True)))
    return found


def shown_box(box: Box) -> str:
    """A box in words."""
    return str([list(span) for span in box])


def _sorted(pieces: list[PieceMapping], wish: LayerMapping) -> Boxes:
    """The pieces in the order of a grid where they form one."""
    pieces = sorted(pieces, key=lambda piece: piece.box or ())
    spans = [sorted({piece.box[axis] for piece in pieces if piece.box}) for axis in range(4)]
    cut = Cut(*(len(one) for one in spans))
    boxes = np.array([[end for span in piece.box or () for end in span] for piece in pieces], np.int64)
    free = cut.pieces != len(pieces)  # they cover the image once: as many as the grid has cells are the grid
    if free and len(spans[3]) > 1:
        what = f"sums of {wish.name} are cut, and its boxes form no grid"
        raise pieces[0].at.wrong(what, "cut rows, columns and channels at the same places for all pieces")
    found = Boxes(cut, boxes, free, tuple(piece.on for piece in pieces), tuple(piece.at for piece in pieces))
    return replace(found, cut=Cut(rows=len(pieces))) if free else found
