"""The boxes of a layer as its user gives them: checked, completed, and put in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.guests.mesh.cuts import Cut
from dovetail.guests.mesh.layers import MeshLayer
from dovetail.guests.mesh.mapping_file import LayerWish, PieceWish
from dovetail.guests.mesh.partition import boxes_of
from dovetail.ir.types import Box
from dovetail.target.mesh import Mesh

_MOST_PIECES = 1 << 18
_MOST_CELLS = 1 << 24


@dataclass(frozen=True)
class LayerBoxes:
    """The pieces of a layer."""

    cut: Cut
    boxes: NDArray[np.int64]
    """As `MeshStage.boxes`."""
    free: bool
    """As `MeshStage.free`."""
    pieces: tuple[PieceWish, ...]
    """The wish for each; at the layer's place in the file for pieces the file leaves out."""


def boxes_of_cut(layer: MeshLayer, cut: Cut, wish: LayerWish, mesh: Mesh) -> LayerBoxes:
    """The pieces of a cut, on the elements that a wish lists, if it does."""
    boxes = boxes_of(layer, cut, mesh)
    return LayerBoxes(cut, boxes, False, wish.pieces or (PieceWish(None, None, wish.at),) * len(boxes))


def boxes_wished(wish: LayerWish, layer: MeshLayer, mesh: Mesh) -> LayerBoxes | None:
    """The pieces a file gives a layer; None where it says neither cut nor pieces.

    Raises:
        PlanError: boxes overlap; there are too many; sums are cut and the boxes form no grid, or elements give whole
            results only.
    """
    if wish.cut is None and not wish.pieces:
        return None
    cut, whole = Cut(*(wish.cut or (1, 1, 1, 1))), (0, layer.summed)
    if mesh.pieces is not None and (cut.sums > 1 or any(piece.box and piece.box[3] != whole for piece in wish.pieces)):
        hint = "elements with engines of their own give whole results: cut rows, columns or channels"
        raise wish.at.wrong(f"{wish.name} is cut over what it sums", hint)
    if max(cut.pieces, len(wish.pieces)) > _MOST_PIECES:
        raise wish.at.wrong(f"{wish.name} is cut into more than {_MOST_PIECES} pieces", "cut it into fewer")
    if not wish.pieces or wish.pieces[0].box is None:
        return boxes_of_cut(layer, cut, wish, mesh)
    return _sorted([*wish.pieces, *_left_out(wish, layer)], wish)


def _left_out(wish: LayerWish, layer: MeshLayer) -> list[PieceWish]:
    """Pieces for the elements that no box holds."""
    sizes = (*layer.image, layer.summed)
    boxes = [piece.box or () for piece in wish.pieces]
    ends = [np.unique([0, size, *(end for box in boxes for end in box[axis])]) for axis, size in enumerate(sizes)]
    if np.prod([float(len(end)) for end in ends]) > _MOST_CELLS:
        raise wish.at.wrong(f"the boxes of {wish.name} have too many different edges", "let boxes share their edges")
    owner = np.full([len(end) - 1 for end in ends], -1, np.int64)
    for number, box in enumerate(boxes):
        part = tuple(slice(*np.searchsorted(end, span)) for end, span in zip(ends, box, strict=True))
        other = int(owner[part].max())
        if other >= 0:
            what = f"the box {_shown(box)} of {wish.name} overlaps {_shown(boxes[other])}"
            hint = "give each element of the result to one piece"
            raise wish.pieces[number].at.wrong(what, hint, wish.pieces[other].at)
        owner[part] = number
    return [PieceWish(box, None, wish.at) for box in _filled(owner < 0, ends)]


def _filled(free: NDArray[np.bool_], ends: Sequence[NDArray[np.int64]]) -> list[Box]:
    """Boxes of the cells that are free, each grown as far as it goes, the last axis first."""
    boxes = []
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
        boxes.append(tuple((int(end[a]), int(end[b])) for end, a, b in zip(ends, start, stop, strict=True)))
    return boxes


def _shown(box: Box) -> str:
    return str([list(span) for span in box])


def _sorted(pieces: list[PieceWish], wish: LayerWish) -> LayerBoxes:
    """The pieces in the order of a grid where they form one."""
    pieces.sort(key=lambda piece: piece.box or ())
    spans = [sorted({piece.box[axis] for piece in pieces if piece.box}) for axis in range(4)]
    cut = Cut(*map(len, spans))
    boxes = np.array([[end for span in piece.box or () for end in span] for piece in pieces], np.int64)
    free = cut.pieces != len(pieces)  # they cover the image once: as many as the grid has cells are the grid
    if free and len(spans[3]) > 1:
        what = f"sums of {wish.name} are cut, and its boxes form no grid"
        raise pieces[0].at.wrong(what, "cut rows, columns and channels at the same places for all pieces")
    cut = Cut(rows=len(pieces)) if free else cut
    return LayerBoxes(cut, boxes, free, tuple(pieces))
