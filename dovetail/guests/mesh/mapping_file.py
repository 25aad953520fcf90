"""A user's mapping file: groups of elements, layers cut and put on them, positions, routes.

Everything may be left out; `own.py` completes it. Elements are numbers of the mesh as soon as they are read: those
without a position are the next that nothing in the file names. Each wish knows its place in the file, so that the lines
of two that clash can both be named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dovetail.codegen.manifest import Count
from dovetail.documents import Document, parse_document, read_text
from dovetail.documents.lines import ValuePath
from dovetail.errors import DovetailError, PlanError
from dovetail.guests.mesh.cuts import Cut
from dovetail.guests.mesh.layers import MeshLayer
from dovetail.guests.mesh.partition import boxes_of
from dovetail.guests.mesh.topology import Topology
from dovetail.ir.types import Box
from dovetail.records import Record, field
from dovetail.target.mesh import Mesh

SCHEMA = 2
_MOST_BYTES = 128 << 20
_MOST_SLOTS = 1024
_MOST_PIECES = 1 << 18
_MOST_CELLS = 1 << 24
HINT = "docs/mesh.md shows what such a file holds"
PART_HINT = "cut the model that compile --save-stages writes last, or the files --save-parts writes"
AXES = ("rows", "columns", "channels", "sums")
Pair = tuple[Count, Count]
"""Column and row of a chip or router, or first and last + 1."""
Position = tuple[Count, Count, Count]
"""Column and row of a chip, and the number of an element on it."""
ElementRef = str | Position
"""An element, by its name in the file or its position."""


class StretchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Elements first to last + 1 of a chip."""

    chip: Pair
    elements: Pair


class PieceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a layer, and its element."""

    box: Annotated[
        tuple[Pair, ...],
        Meta(
            min_length=3,
            max_length=4,
            description="a box: rows, columns, channels, each [first, last + 1], and what is summed over",
        ),
    ]
    on: ElementRef | None = None


class LayerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer."""

    group: str | None = None
    cut: Annotated[
        tuple[Count, Count, Count, Count] | None,
        Meta(description="a cut: 4 whole numbers, parts of rows, columns, channels and sums"),
    ] = None
    slots: tuple[Count, ...] | None = None
    on: str | tuple[int | str | Position, ...] | None = None
    pieces: tuple[PieceRecord, ...] | None = None


class ChipRouteRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A way between routers of a chip."""

    chip: Pair
    routers: tuple[Pair, ...]


class MappingRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a mapping file, behind its schema."""

    network: str | None = None
    objective: Literal["latency", "throughput"] | None = None
    elements: dict[str, Position | None] | None = None
    groups: dict[str, Annotated[int, Meta(ge=1)] | tuple[ElementRef, ...] | StretchRecord] | None = None
    layers: dict[str, LayerRecord | None] | None = None
    routes: tuple[tuple[Pair, ...] | ChipRouteRecord, ...] | None = None


class WishPlace(Record):
    """A place in a mapping file, or the file of a part, that something was read from."""

    document: Document[Any]
    path: ValuePath = ()

    def inside(self, *steps: str | int) -> WishPlace:
        """The place of a value in this one."""
        return WishPlace(self.document, (*self.path, *steps))

    def wrong(self, what: str, hint: str | None = None, other: WishPlace | None = None) -> DovetailError:
        """The error about this place; with another one it clashes with, the line of both."""
        clash = f" (clashes with {other.text})" if other is not None else ""
        return self.document.wrong(what + clash, self.path, hint)

    @property
    def text(self) -> str:
        """File and line."""
        return self.document.place(self.path)


def unread(name: str, hint: str = HINT) -> WishPlace:
    """The place of what no text says, in a file of this name."""
    return WishPlace(Document(None, name, "", "yaml", PlanError, hint))


class PieceWish(Record):
    """A piece."""

    box: Box | None
    """Rows, columns, channels and sums; None where the cut gives it."""
    on: int | None
    """Its element; None where it is chosen."""
    at: WishPlace


class LayerBoxes(Record):
    """The pieces of a layer."""

    cut: Cut
    boxes: NDArray[np.int64]
    """As `MeshStage.boxes`."""
    free: bool
    """As `MeshStage.free`."""
    pieces: tuple[PieceWish, ...]
    """The wish for each; at the layer's place in the file for pieces the file leaves out."""


class LayerWish(Record):
    """A layer."""

    name: str
    at: WishPlace
    group: str | None = None
    slots: tuple[int, ...] | None = None
    boxes: LayerBoxes | None = None
    """Its pieces; None where they are chosen."""

    @property
    def pieces(self) -> tuple[PieceWish, ...]:
        """Its pieces, where the file gives them."""
        return self.boxes.pieces if self.boxes else ()


class ElementPool(Record):
    """Elements that some layers share."""

    elements: tuple[int, ...]
    at: WishPlace | None = None
    """Its place in the file; None for the elements that no group or piece has."""


class RouteWish(Record):
    """A way of messages, from its first place to its last."""

    chip: Pair | None
    """The chip it is on, from router to router; None for one between chips."""
    way: tuple[Pair, ...]
    at: WishPlace


class MappingWishes(Record):
    """Wishes of a mapping file."""

    at: WishPlace
    objective: str | None
    layers: Sequence[LayerWish]
    """One for every layer of the network, in order."""
    pools: Mapping[str | None, ElementPool]
    """By the names of groups; None for layers without one."""
    routes: tuple[RouteWish, ...]

    @property
    def is_empty(self) -> bool:
        """True where nothing but the objective is wished."""
        named = any(one.at != self.at for one in self.layers)
        return not (named or len(self.pools) > 1 or self.routes)


class PartWishes(Record):
    """Pieces that models of elements compute; see `parts.py`."""

    elements: Mapping[str, Position | None] = field(default_factory=dict)
    """Names of elements, and their positions where the names say them."""
    pieces: Mapping[str, Sequence[tuple[Box, str, WishPlace]]] = field(default_factory=dict)
    """By layer: box, name of the element, place."""


def read_wishes(
    path: Path | None, network: str, layers: Sequence[MeshLayer], topology: Topology, parts: PartWishes
) -> MappingWishes:
    """The wishes of a file, if there is one, and of parts, for a network of this name.

    Raises:
        PlanError: it is no mapping file, or names what is not there; with the line.
    """
    record, at = MappingRecord(), unread("mapping")
    if path is not None:
        text = read_text(path, hint=HINT, most_bytes=_MOST_BYTES, error=PlanError, what="the mapping")
        document = parse_document(text, path.name, "yaml", MappingRecord, schema=SCHEMA, error=PlanError, hint=HINT)
        record, at = document.value, WishPlace(document)
        if record.network not in (network, None):
            raise at.inside("network").wrong(f"the network here is '{network[:60]}'", "the file is of another network")
    reader = _WishReader(record, at, topology, parts)
    routes = tuple(reader.route(one, at.inside("routes", number)) for number, one in enumerate(record.routes or ()))
    numbers, wishes = {layer.name: layer.index for layer in layers}, [LayerWish(layer.name, at) for layer in layers]
    for name, one in (record.layers or {}).items():
        here = at.inside("layers", name)
        if name not in numbers:
            listed = ", ".join(list(numbers)[:16]) + (", ..." if len(numbers) > 16 else "")
            raise here.wrong(f"there is no layer '{name[:60]}' in the network", f"its layers are {listed}")
        wishes[numbers[name]] = reader.layer(one or LayerRecord(), layers[numbers[name]], here)
    for name, pieces in parts.pieces.items():
        wish, here, layer = wishes[numbers[name]], pieces[0][2], layers[numbers[name]]
        if wish.boxes is not None:
            raise wish.at.wrong(f"{name} is cut here and in a part", "leave it to one of them", here)
        own = [PieceWish(box, reader.number(on, place), place) for box, on, place in pieces]
        boxes = boxes_wished(layer, Cut(), own, here, topology.mesh)
        wishes[layer.index] = replace(wish, at=here if wish.at == at else wish.at, boxes=boxes)
    return MappingWishes(at, record.objective, wishes, reader.pools(record.groups or {}, wishes), routes)


class _WishReader:
    """Reads wishes that refer to elements and chips."""

    def __init__(self, record: MappingRecord, at: WishPlace, topology: Topology, parts: PartWishes) -> None:
        self.topology, self.at = topology, at
        own = record.elements or {}
        self.names: dict[str, Position | None] = {**parts.elements, **own}
        self._numbers: dict[str, int] = {}
        owners: dict[int, str] = {}
        for name, place in self.names.items():
            if place is not None:
                here = at.inside("elements", name) if name in own else unread(f"{name}.onnx", PART_HINT)
                number = self._numbers[name] = self._at(place, here)
                if name in own and (other := owners.setdefault(number, name)) is not name:
                    what = f"the element {list(place)} has two names, the second is '{name[:40]}'"
                    raise here.wrong(what, "give one of them another position", at.inside("elements", other))
        taken = {*self._numbers.values(), *self._positions(record)}
        self._free = iter([element for element in topology.elements.tolist() if element not in taken])

    def _positions(self, record: MappingRecord) -> Iterator[int]:
        """Elements that the file gives by position; what is no element is told when it is read."""
        chips, per = self.topology.chips, self.topology.mesh.per_chip
        refs: list[Any] = []
        for group in (record.groups or {}).values():
            if isinstance(group, StretchRecord):
                refs += [(*group.chip, number) for number in range(group.elements[0], min(group.elements[1], per))]
            elif isinstance(group, tuple):
                refs += group
        for layer in filter(None, (record.layers or {}).values()):
            refs += [layer.on, *(layer.on or ()), *(piece.on for piece in layer.pieces or ())]
        places = (ref for ref in refs if isinstance(ref, tuple) and len(ref) == 3 and ref[:2] in chips)
        return (chips[place[:2]] * per + place[2] for place in places)

    def _at(self, place: Position, at: WishPlace) -> int:
        """The element at a position; raises PlanError where there is none that may be used."""
        x, y, number = place
        chip, per = self.topology.chips.get((x, y)), self.topology.mesh.per_chip
        if chip is None or number >= per:
            raise at.wrong(f"the element {list(place)} does not exist", f"a chip has {per} elements")
        if chip * per + number not in self.topology.usable:
            raise at.wrong(f"the element {list(place)} is faulty or reserved", "take another element")
        return chip * per + number

    def number(self, one: ElementRef, at: WishPlace) -> int:
        """The element of a name or position; the next free one for a name without a position."""
        if not isinstance(one, str):
            return self._at(one, at)
        if one not in self.names:
            listed = ", ".join(list(self.names)[:12]) or "none"
            raise at.wrong(f"there is no element '{one[:40]}'", f"names stand under elements: {listed}")
        if one not in self._numbers:
            (self._numbers[one],) = self._next(1, at)
        return self._numbers[one]

    def _next(self, count: int, at: WishPlace) -> list[int]:
        """So many elements that nothing in the file names."""
        found = list(islice(self._free, count))
        if len(found) < count:
            most = len(self.topology.elements)
            what = f"the file takes {most + count - len(found)} elements, the mesh has {most}"
            raise at.wrong(what, "make groups smaller, or use more chips")
        return found

    def _shown(self, element: int) -> str:
        return f"the element {list(self.topology.position(element))}"

    def pools(
        self,
        groups: Mapping[str, int | tuple[ElementRef, ...] | StretchRecord],
        layers: Sequence[LayerWish],
    ) -> dict[str | None, ElementPool]:
        """The elements of every group, and those that no group or piece has."""
        pools: dict[str | None, ElementPool] = {}
        owners: dict[int, tuple[str, WishPlace]] = {}
        for name, one in sorted(groups.items(), key=lambda group: isinstance(group[1], int)):
            at = self.at.inside("groups", name)
            if isinstance(one, int):
                on = dict.fromkeys(piece.on for wish in layers if wish.group == name for piece in wish.pieces)
                own = [element for element in on if element is not None and element not in owners]
                members = self._some(one, own[:one], at)
            else:
                members = self._members(one, at)
            for element, here in members.items():
                other, line = owners.setdefault(element, (name, here))
                if other is not name:
                    what = f"{self._shown(element)} is in the groups '{other[:40]}' and '{name[:40]}'"
                    raise here.wrong(what, "give it to one of them", line)
            pools[name] = ElementPool(tuple(members), at)
        for wish in layers:
            self._check_group(wish, pools)
        used = {piece.on for wish in layers for piece in wish.pieces}
        used.update(element for pool in pools.values() for element in pool.elements)
        rest = tuple(element for element in self.topology.elements.tolist() if element not in used)
        return {**pools, None: ElementPool(rest)}

    def _some(self, count: int, own: Sequence[int], at: WishPlace) -> dict[int, WishPlace]:
        """Elements of a group that is a number: `own`, then the next."""
        if count > (most := len(self.topology.elements)):
            raise at.wrong(f"a group of {count} elements", f"there are {most}")
        return dict.fromkeys((*own, *self._next(count - len(own), at)), at)

    def _check_group(self, wish: LayerWish, pools: Mapping[str | None, ElementPool]) -> None:
        """Raise PlanError where a layer's group is not there, or has not the element of one of its pieces."""
        if wish.group is None:
            return
        at = wish.at.inside("group")
        if wish.group not in pools:
            hint = f"groups are {', '.join(str(name) for name in pools) or 'none'}"
            raise at.wrong(f"there is no group '{wish.group[:40]}'", hint)
        for piece in wish.pieces:
            if piece.on is not None and piece.on not in pools[wish.group].elements:
                hint = "put the piece on an element of the group, or the element into it"
                raise piece.at.wrong(f"{self._shown(piece.on)} is not in the group of {wish.name}", hint, at)

    def _members(self, one: tuple[ElementRef, ...] | StretchRecord, at: WishPlace) -> dict[int, WishPlace]:
        """Elements of a group that is a list, or a stretch of a chip's."""
        members: dict[int, WishPlace] = {}
        if isinstance(one, StretchRecord):
            per, chip = self.topology.mesh.per_chip, self._chip(one.chip, at.inside("chip"))
            _require_within(one.elements, [(0, per)] * 2, "elements (first and last + 1)", at.inside("elements"))
            numbers = (chip * per + number for number in range(*one.elements))
            members = {number: at for number in numbers if number in self.topology.usable}
        else:
            for place, ref in enumerate(one):
                here = at.inside(place)
                if (number := self.number(ref, here)) in members:
                    raise here.wrong(f"{self._shown(number)} is twice in the group", "leave it out", members[number])
                members[number] = here
        if not members:
            raise at.wrong("the group is empty", "list its elements, or say how many")
        return members

    def _chip(self, place: Pair, at: WishPlace) -> int:
        if place not in self.topology.chips:
            raise at.wrong(f"there is no chip {list(place)}", "chips are columns and rows of the board")
        return self.topology.chips[place]

    def layer(self, one: LayerRecord, layer: MeshLayer, at: WishPlace) -> LayerWish:
        """The wish for a layer."""
        for name, other in (("cut", one.cut), ("on", one.on)):
            if other is not None and one.pieces is not None:
                what = f"'{name}' and 'pieces' both say how {layer.name} is cut"
                raise at.inside("pieces").wrong(what, "keep one", at.inside(name))
        if one.slots is not None:
            limits = [(1, _MOST_SLOTS)] * len(layer.readings)
            _require_within(one.slots, limits, "slots (one for each operand)", at.inside("slots"))
        if one.cut is not None:
            most = [size if free else 1 for size, free in zip(layer.image, layer.cuttable, strict=True)]
            limits = [(1, size) for size in (*most, -(-layer.summed // layer.unit))]
            _require_within(one.cut, limits, "a cut (rows, columns, channels, sums)", at.inside("cut"))
        places = ((piece, at.inside("pieces", number)) for number, piece in enumerate(one.pieces or ()))
        pieces = [self._piece(piece, layer, here) for piece, here in places]
        cut = Cut(*(one.cut or (1, 1, 1, 1)))
        if one.on is not None:
            pieces = list(self._listed(one.on, cut, layer.name, at))
        has_boxes = one.cut is not None or pieces
        boxes = boxes_wished(layer, cut, pieces, at, self.topology.mesh) if has_boxes else None
        return LayerWish(layer.name, at, one.group, one.slots, boxes)

    def _listed(
        self, on: str | tuple[int | str | Position, ...], cut: Cut, layer: str, of: WishPlace
    ) -> Iterator[PieceWish]:
        """Pieces on elements: one for the whole layer, or one for each piece of the cut."""
        at = of.inside("on")
        is_one = isinstance(on, str) or (len(on) > 0 and all(isinstance(step, int) for step in on))
        members: list[tuple[Any, WishPlace]] = [(on, at)] if is_one else [(r, at.inside(n)) for n, r in enumerate(on)]
        if len(members) != cut.pieces:
            what = f"{len(members)} elements for the {cut.pieces} pieces of {layer}"
            raise at.wrong(what, "give one for each piece, or a group instead", of.inside("cut"))
        for ref, here in members:
            if not isinstance(ref, str) and not (isinstance(ref, tuple) and len(ref) == 3 and min(ref) >= 0):
                raise here.wrong(
                    f"{str(ref)[:80]} is no element", "give its name, or its position: [column, row, number]"
                )
            yield PieceWish(None, self.number(ref, here), here)

    def _piece(self, one: PieceRecord, layer: MeshLayer, at: WishPlace) -> PieceWish:
        box: list[Pair] = []
        for axis, (name, size) in enumerate(zip(AXES, (*layer.image, layer.summed), strict=True)):
            if axis == len(one.box):
                box.append((0, size))
                continue
            (first, last), here = one.box[axis], at.inside("box", axis)
            _require_within((first, last), [(0, size)] * 2, f"{name} (first and last + 1)", here)
            if first >= last:
                raise here.wrong(f"there are no {name} from {first} to {last}", "the second is one beyond the last")
            free = layer.cuttable[axis] if axis < 3 else layer.unit < size
            if not free and (first, last) != (0, size):
                raise here.wrong(f"{layer.name} cannot be cut along its {name}", f"give [0, {size}]")
            if axis == 3 and (first % layer.unit or (last % layer.unit and last != size)):
                raise here.wrong(f"sums are cut at multiples of {layer.unit}", "give others")
            box.append((first, last))
        on = self.number(one.on, at.inside("on")) if one.on is not None else None
        return PieceWish(tuple(box), on, at)

    def route(self, one: tuple[Pair, ...] | ChipRouteRecord, at: WishPlace) -> RouteWish:
        """A route between chips, or between routers of a chip."""
        grid = self.topology.mesh.grid
        chip, way = (one.chip, one.routers) if isinstance(one, ChipRouteRecord) else (None, one)
        if chip is not None:
            self._chip(chip, at.inside("chip"))
        for number, place in enumerate(way):
            if chip is None:
                self._chip(place, at.inside(number))
            else:
                limits = [(0, grid.width - 1), (0, grid.height - 1)]
                _require_within(place, limits, "a place (column and row)", at.inside("routers", number))
        if len(way) < 2 or len(set(way)) != len(way):
            what = "a route leads over two places or more, each once"
            raise at.wrong(what, "list every place on the way, the first and the last too")
        return RouteWish(chip, way, at)


def _require_within(numbers: Sequence[int], limits: Sequence[tuple[int, int]], name: str, at: WishPlace) -> None:
    if len(numbers) != len(limits) or any(not a <= one <= b for one, (a, b) in zip(numbers, limits, strict=True)):
        spans = ", ".join(f"{low} to {high}" if low < high else str(low) for low, high in limits)
        raise at.wrong(f"{name} must be {len(limits)} whole numbers ({spans}), not {list(numbers)[:8]}")


def boxes_of_cut(layer: MeshLayer, cut: Cut, pieces: Sequence[PieceWish], at: WishPlace, mesh: Mesh) -> LayerBoxes:
    """The pieces of a cut, on the elements that are listed, if any are."""
    boxes = boxes_of(layer, cut, mesh)
    return LayerBoxes(cut, boxes, False, tuple(pieces) or (PieceWish(None, None, at),) * len(boxes))


def boxes_wished(layer: MeshLayer, cut: Cut, pieces: Sequence[PieceWish], at: WishPlace, mesh: Mesh) -> LayerBoxes:
    """The pieces a file gives a layer.

    Raises:
        PlanError: boxes overlap; there are too many; sums are cut and the boxes form no grid, or elements give whole
            results only.
    """
    whole = (0, layer.summed)
    if mesh.pieces is not None and (cut.sums > 1 or any(piece.box and piece.box[3] != whole for piece in pieces)):
        hint = "elements with engines of their own give whole results: cut rows, columns or channels"
        raise at.wrong(f"{layer.name} is cut over what it sums", hint)
    if max(cut.pieces, len(pieces)) > _MOST_PIECES:
        raise at.wrong(f"{layer.name} is cut into more than {_MOST_PIECES} pieces", "cut it into fewer")
    if not pieces or pieces[0].box is None:
        return boxes_of_cut(layer, cut, pieces, at, mesh)
    return _sorted([*pieces, *_left_out(pieces, layer, at)], layer)


def _left_out(pieces: Sequence[PieceWish], layer: MeshLayer, at: WishPlace) -> list[PieceWish]:
    """Pieces for the elements that no box holds."""
    sizes = (*layer.image, layer.summed)
    boxes = [piece.box or () for piece in pieces]
    ends = [np.unique([0, size, *(end for box in boxes for end in box[axis])]) for axis, size in enumerate(sizes)]
    if np.prod([float(len(end)) for end in ends]) > _MOST_CELLS:
        raise at.wrong(f"the boxes of {layer.name} have too many different edges", "let boxes share their edges")
    owner = np.full([len(end) - 1 for end in ends], -1, np.int64)
    for number, box in enumerate(boxes):
        part = tuple(slice(*np.searchsorted(end, span)) for end, span in zip(ends, box, strict=True))
        other = int(owner[part].max())
        if other >= 0:
            what = f"the box {_shown(box)} of {layer.name} overlaps {_shown(boxes[other])}"
            hint = "give each element of the result to one piece"
            raise pieces[number].at.wrong(what, hint, pieces[other].at)
        owner[part] = number
    return [PieceWish(box, None, at) for box in _filled(owner < 0, ends)]


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


def _sorted(pieces: list[PieceWish], layer: MeshLayer) -> LayerBoxes:
    """The pieces in the order of a grid where they form one."""
    pieces.sort(key=lambda piece: piece.box or ())
    spans = [sorted({piece.box[axis] for piece in pieces if piece.box}) for axis in range(4)]
    cut = Cut(*map(len, spans))
    boxes = np.array([[end for span in piece.box or () for end in span] for piece in pieces], np.int64)
    free = cut.pieces != len(pieces)  # they cover the image once: as many as the grid has cells are the grid
    if free and len(spans[3]) > 1:
        what = f"sums of {layer.name} are cut, and its boxes form no grid"
        raise pieces[0].at.wrong(what, "cut rows, columns and channels at the same places for all pieces")
    cut = Cut(rows=len(pieces)) if free else cut
    return LayerBoxes(cut, boxes, free, tuple(pieces))
