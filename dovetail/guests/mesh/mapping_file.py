"""A user's mapping file: groups of elements, layers cut and put on them, positions, routes.

Everything may be left out; `own.py` completes it. Each wish knows its place in the file, so that the lines of two that
clash can both be named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dovetail.codegen.manifest import Count
from dovetail.documents import Document, parse_document, read_text
from dovetail.documents.lines import ValuePath
from dovetail.errors import DovetailError, PlanError
from dovetail.guests.mesh.layers import MeshLayer
from dovetail.guests.mesh.topology import Topology
from dovetail.ir.types import Box

SCHEMA = 2
_MOST_BYTES = 128 << 20
_MOST_SLOTS = 1024
HINT = "docs/mesh.md shows what such a file holds"
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


@dataclass(frozen=True, slots=True)
class WishPlace:
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


@dataclass(frozen=True, slots=True)
class PieceWish:
    """A piece."""

    box: Box | None
    """Rows, columns, channels and sums; None where the cut gives it."""
    on: ElementRef | None
    at: WishPlace


@dataclass(frozen=True, slots=True)
class LayerWish:
    """A layer."""

    name: str
    at: WishPlace
    group: str | None = None
    cut: tuple[int, int, int, int] | None = None
    """Parts of rows, columns, channels and sums."""
    slots: tuple[int, ...] | None = None
    pieces: tuple[PieceWish, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupWish:
    """A group of elements."""

    at: WishPlace
    members: tuple[tuple[ElementRef, WishPlace], ...] = ()
    count: int = 0
    """Elements besides, whichever."""


@dataclass(frozen=True, slots=True)
class RouteWish:
    """A way of messages, from its first place to its last."""

    chip: Pair | None
    """The chip it is on, from router to router; None for one between chips."""
    way: tuple[Pair, ...]
    at: WishPlace


@dataclass(frozen=True)
class MappingWishes:
    """Wishes of a mapping file."""

    at: WishPlace = field(default_factory=lambda: unread("mapping"))
    objective: str | None = None
    elements: dict[str, Position | None] = field(default_factory=dict)
    """Name -> position; None where it is chosen."""
    groups: dict[str, GroupWish] = field(default_factory=dict)
    layers: dict[str, LayerWish] = field(default_factory=dict)
    routes: tuple[RouteWish, ...] = ()

    def layer(self, name: str) -> LayerWish:
        """The wish for a layer; one for nothing where there is none."""
        return self.layers.get(name) or LayerWish(name, self.at)


def read_wishes(path: Path, network: str, layers: Sequence[MeshLayer], topology: Topology) -> MappingWishes:
    """The wishes of a file; arguments and errors as of `parse_wishes`."""
    text = read_text(path, hint=HINT, most_bytes=_MOST_BYTES, error=PlanError, what="the mapping")
    return parse_wishes(text, path.name, network, layers, topology)


def parse_wishes(text: str, file: str, network: str, layers: Sequence[MeshLayer], topology: Topology) -> MappingWishes:
    """The wishes of a text.

    Args:
        text: a mapping file.
        file: name of the file.
        network: name of the graph.
        layers: of it.
        topology: the mesh.

    Raises:
        PlanError: it is no mapping file, or names what is not there; with the line.
    """
    document = parse_document(text, file, "yaml", MappingRecord, schema=SCHEMA, error=PlanError, hint=HINT)
    record, at = document.value, WishPlace(document)
    if record.network not in (network, None):
        raise at.inside("network").wrong(f"the network here is '{network[:60]}'", "the file is of another network")
    names = _element_names(record.elements or {}, at.inside("elements"), topology)
    reader = _WishReader(topology, record.elements or {}, names)
    groups = {name: reader.group(one, at.inside("groups", name)) for name, one in (record.groups or {}).items()}
    routes = (reader.route(one, at.inside("routes", number)) for number, one in enumerate(record.routes or ()))
    by_name, wishes = {layer.name: layer for layer in layers}, {}
    for name, one in (record.layers or {}).items():
        here = at.inside("layers", name)
        if name not in by_name:
            listed = ", ".join(list(by_name)[:16]) + (", ..." if len(by_name) > 16 else "")
            raise here.wrong(f"there is no layer '{name[:60]}' in the network", f"its layers are {listed}")
        wishes[name] = reader.layer(one or LayerRecord(), by_name[name], here)
    return MappingWishes(at, record.objective, record.elements or {}, groups, wishes, tuple(routes))


def _element_names(elements: dict[str, Position | None], at: WishPlace, topology: Topology) -> dict[Position, str]:
    """The name of each position that has one."""
    names: dict[Position, str] = {}
    for name, place in elements.items():
        if place is not None:
            _check_position(place, at.inside(name), topology)
            other = names.setdefault(place, name)
            if other is not name:
                what = f"the element {list(place)} has two names, the second is '{name[:40]}'"
                raise at.inside(name).wrong(what, "give one of them another position", at.inside(other))
    return names


def _check_position(place: Position, at: WishPlace, topology: Topology) -> None:
    """Raise PlanError for a position without an element that may be used."""
    x, y, number = place
    chip, per = topology.chips.get((x, y)), topology.mesh.per_chip
    if chip is None or number >= per:
        raise at.wrong(f"the element {list(place)} does not exist", f"a chip has {per} elements")
    if chip * per + number not in topology.usable:
        raise at.wrong(f"the element {list(place)} is faulty or reserved", "take another element")


@dataclass(frozen=True)
class _WishReader:
    """Reads wishes that refer to elements and chips."""

    topology: Topology
    elements: dict[str, Position | None]
    names: dict[Position, str]

    def ref(self, one: ElementRef, at: WishPlace) -> ElementRef:
        """An element by name or position; its name where it has both."""
        if isinstance(one, str):
            if one not in self.elements:
                listed = ", ".join(list(self.elements)[:12]) or "none"
                raise at.wrong(f"there is no element '{one[:40]}'", f"names stand under elements: {listed}")
            return one
        _check_position(one, at, self.topology)
        return self.names.get(one, one)

    def group(self, one: int | tuple[ElementRef, ...] | StretchRecord, at: WishPlace) -> GroupWish:
        """A group: a number, a list of elements, or a stretch of a chip's."""
        if isinstance(one, int):
            if one > (most := len(self.topology.elements)):
                raise at.wrong(f"a group of {one} elements", f"there are {most}")
            return GroupWish(at, count=one)
        if isinstance(one, StretchRecord):
            members = list(self._stretch(one, at))
        else:
            members = [(self.ref(ref, at.inside(n)), at.inside(n)) for n, ref in enumerate(one)]
        places: dict[ElementRef, WishPlace] = {}
        for ref, here in members:
            if ref in places:
                raise here.wrong(f"{shown_ref(ref)} is twice in the group", "leave one of them out", places[ref])
            places[ref] = here
        if not members:
            raise at.wrong("the group is empty", "list its elements, or say how many")
        return GroupWish(at, tuple(members))

    def _chip(self, place: Pair, at: WishPlace) -> int:
        if place not in self.topology.chips:
            raise at.wrong(f"there is no chip {list(place)}", "chips are columns and rows of the board")
        return self.topology.chips[place]

    def _stretch(self, one: StretchRecord, at: WishPlace) -> Iterator[tuple[ElementRef, WishPlace]]:
        """The usable elements of a stretch."""
        per, chip = self.topology.mesh.per_chip, self._chip(one.chip, at.inside("chip"))
        _require_within(one.elements, [(0, per)] * 2, "elements (first and last + 1)", at.inside("elements"))
        for number in range(*one.elements):
            if chip * per + number in self.topology.usable:
                place = (*one.chip, number)
                yield self.names.get(place, place), at

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
        wish = LayerWish(layer.name, at, one.group, one.cut, one.slots)
        if one.on is not None:
            return replace(wish, pieces=tuple(self._listed(one.on, wish)))
        places = ((piece, at.inside("pieces", number)) for number, piece in enumerate(one.pieces or ()))
        return replace(wish, pieces=tuple(self._piece(piece, layer, here) for piece, here in places))

    def _listed(self, on: str | tuple[int | str | Position, ...], wish: LayerWish) -> Iterator[PieceWish]:
        """Pieces on elements: one for the whole layer, or one for each piece of the cut."""
        at = wish.at.inside("on")
        is_one = isinstance(on, str) or (len(on) > 0 and all(isinstance(step, int) for step in on))
        members: list[tuple[Any, WishPlace]] = [(on, at)] if is_one else [(r, at.inside(n)) for n, r in enumerate(on)]
        if len(members) != (count := prod(wish.cut or ())):
            what = f"{len(members)} elements for the {count} pieces of {wish.name}"
            raise at.wrong(what, "give one for each piece, or a group instead", wish.at.inside("cut"))
        for ref, here in members:
            if isinstance(ref, int) or (isinstance(ref, tuple) and (len(ref) != 3 or min(ref) < 0)):
                shown = list(ref)[:8] if isinstance(ref, tuple) else ref
                raise here.wrong(f"{shown} is no element", "give its name, or its position: [column, row, number]")
            yield PieceWish(None, self.ref(ref, here), here)

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
        on = self.ref(one.on, at.inside("on")) if one.on is not None else None
        return PieceWish(tuple(box), on, at)

    def route(self, one: tuple[Pair, ...] | ChipRouteRecord, at: WishPlace) -> RouteWish:
        """A route between chips, or between routers of a chip."""
        grid = self.topology.mesh.grid
        if isinstance(one, ChipRouteRecord):
            self._chip(one.chip, at.inside("chip"))
            chip, way = one.chip, one.routers
            for number, place in enumerate(way):
                limits = [(0, grid.width - 1), (0, grid.height - 1)]
                _require_within(place, limits, "a place (column and row)", at.inside("routers", number))
        else:
            chip, way = None, one
            for number, place in enumerate(way):
                self._chip(place, at.inside(number))
        if len(way) < 2 or len(set(way)) != len(way):
            what = "a route leads over two places or more, each once"
            raise at.wrong(what, "list every place on the way, the first and the last too")
        return RouteWish(chip, way, at)


def _require_within(numbers: Sequence[int], limits: Sequence[tuple[int, int]], name: str, at: WishPlace) -> None:
    if len(numbers) != len(limits) or any(not a <= one <= b for one, (a, b) in zip(numbers, limits, strict=True)):
        spans = ", ".join(f"{low} to {high}" if low < high else str(low) for low, high in limits)
        raise at.wrong(f"{name} must be {len(limits)} whole numbers ({spans}), not {list(numbers)[:8]}")


def shown_ref(ref: ElementRef) -> str:
    """An element in words."""
    return f"the element '{ref}'" if isinstance(ref, str) else f"the element {list(ref)}"
