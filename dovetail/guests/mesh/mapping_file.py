"""A user's mapping file: groups of elements, layers cut and put on them, positions, routes.

Everything may be left out; `own.py` completes it. Elements are numbers of the mesh as soon as they are read: those
without a position are the next that nothing in the file names. Each wish knows its place in the file, so that the lines
of two that clash can both be named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
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
    on: int | None
    """Its element; None where it is chosen."""
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
class ElementPool:
    """Elements that some layers share."""

    elements: tuple[int, ...]
    at: WishPlace | None = None
    """Its place in the file; None for the elements that no group or piece has."""


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

    at: WishPlace
    objective: str | None
    layers: Mapping[str, LayerWish]
    pools: Mapping[str | None, ElementPool]
    """By the names of groups; None for layers without one."""
    routes: tuple[RouteWish, ...]

    def layer(self, name: str) -> LayerWish:
        """The wish for a layer; one for nothing where there is none."""
        return self.layers.get(name) or LayerWish(name, self.at)

    def pool(self, layer: str) -> ElementPool:
        """The elements a layer may have."""
        return self.pools[self.layer(layer).group]


@dataclass(frozen=True)
class PartWishes:
    """Pieces that models of elements compute; see `parts.py`."""

    elements: Mapping[str, Position | None] = field(default_factory=dict)
    """Names of elements, and their positions where the names say them."""
    pieces: Mapping[str, Sequence[tuple[Box, str, WishPlace]]] = field(default_factory=dict)
    """By layer: box, name of the element, place."""


def read_wishes(
    path: Path | None, network: str, layers: Sequence[MeshLayer], topology: Topology, parts: PartWishes
) -> MappingWishes:
    """The wishes of a file, and of parts.

    Args:
        path: a mapping file, if there is one.
        network: name of the graph.
        layers: of it.
        topology: the mesh.
        parts: pieces that models compute.

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
    by_name, wishes = {layer.name: layer for layer in layers}, {}
    for name, one in (record.layers or {}).items():
        here = at.inside("layers", name)
        if name not in by_name:
            listed = ", ".join(list(by_name)[:16]) + (", ..." if len(by_name) > 16 else "")
            raise here.wrong(f"there is no layer '{name[:60]}' in the network", f"its layers are {listed}")
        wishes[name] = reader.layer(one or LayerRecord(), by_name[name], here)
    for name, pieces in parts.pieces.items():
        wish = wishes.get(name, LayerWish(name, pieces[0][2]))
        if wish.cut is not None or wish.pieces:
            raise wish.at.wrong(f"{name} is cut here and in a part", "leave it to one of them", pieces[0][2])
        wishes[name] = replace(wish, pieces=tuple(PieceWish(box, reader.number(on, p), p) for box, on, p in pieces))
    return MappingWishes(at, record.objective, wishes, reader.pools(record.groups or {}, wishes), routes)


class _WishReader:
    """Reads wishes that refer to elements and chips."""

    def __init__(self, record: MappingRecord, at: WishPlace, topology: Topology, parts: PartWishes) -> None:
        self.topology, self.at = topology, at
        self.names: dict[str, Position | None] = {**parts.elements, **(record.elements or {})}
        owners: dict[int, str] = {}
        for name, place in (record.elements or {}).items():
            if place is not None:
                here = at.inside("elements", name)
                other = owners.setdefault(self._at(place, here), name)
                if other is not name:
                    what = f"the element {list(place)} has two names, the second is '{name[:40]}'"
                    raise here.wrong(what, "give one of them another position", at.inside("elements", other))
        self._numbers = {
            name: self._at(place, unread(f"{name}.onnx", PART_HINT) if name in parts.elements else at)
            for name, place in self.names.items()
            if place is not None
        }
        taken = {*self._numbers.values(), *self._positions(record)}
        self._free = iter([element for element in topology.elements.tolist() if element not in taken])

    def _positions(self, record: MappingRecord) -> Iterator[int]:
        """Elements that the file gives by position; what is no element is told when it is read."""
        chips, per = self.topology.chips, self.topology.mesh.per_chip
        refs: list[Any] = []
        for group in (record.groups or {}).values():
            refs += group if isinstance(group, tuple) else ()
            if isinstance(group, StretchRecord):
                refs += [(*group.chip, number) for number in range(group.elements[0], min(group.elements[1], per))]
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
        layers: Mapping[str, LayerWish],
    ) -> dict[str | None, ElementPool]:
        """The elements of every group, and those that no group or piece has."""
        pools: dict[str | None, ElementPool] = {}
        owners: dict[int, tuple[str, WishPlace]] = {}
        for name, one in groups.items():
            if not isinstance(one, int):
                members = self._members(one, self.at.inside("groups", name))
                for element, here in members.items():
                    other, line = owners.setdefault(element, (name, here))
                    if other is not name:
                        what = f"{self._shown(element)} is in the groups '{other[:40]}' and '{name[:40]}'"
                        raise here.wrong(what, "give it to one of them", line)
                pools[name] = ElementPool(tuple(members), self.at.inside("groups", name))
        for name, one in groups.items():
            if isinstance(one, int):
                here = self.at.inside("groups", name)
                if one > (most := len(self.topology.elements)):
                    raise here.wrong(f"a group of {one} elements", f"there are {most}")
                own = [p.on for wish in layers.values() if wish.group == name for p in wish.pieces if p.on is not None]
                own = [element for element in dict.fromkeys(own) if element not in owners][:one]
                owners.update((element, (name, here)) for element in own)
                pools[name] = ElementPool((*own, *self._next(one - len(own), here)), here)
        for wish in layers.values():
            self._check_group(wish, pools)
        used = {piece.on for wish in layers.values() for piece in wish.pieces}
        used.update(element for pool in pools.values() for element in pool.elements)
        rest = tuple(element for element in self.topology.elements.tolist() if element not in used)
        return {**pools, None: ElementPool(rest)}

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
