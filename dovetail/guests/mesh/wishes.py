"""What a user's mapping file asks for: groups of elements, layers cut and put on them, positions, routes.

Everything may be left out; `own.py` completes it. Each wish knows its line, so that two that clash can both be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dovetail.guests.mesh.layers import MeshLayer
from dovetail.guests.mesh.marked import LocatedValue
from dovetail.guests.mesh.topology import Topology
from dovetail.ir.types import Box

SCHEMA = 2
Position = tuple[int, int, int]
"""Column and row of a chip, and the number of an element on it."""
Ref = str | Position
"""An element, by its name in the file or its position."""
_LARGE = 1 << 20
_MOST_SLOTS = 1024


@dataclass(frozen=True, slots=True)
class PieceMapping:
    """A piece."""

    box: Box | None
    """Rows, columns, channels and what is summed over; None where the cut gives it."""
    on: Ref | None
    at: LocatedValue
    """Where it stands."""


@dataclass(frozen=True, slots=True)
class LayerMapping:
    """A layer."""

    name: str
    at: LocatedValue
    group: LocatedValue | None = None
    cut: tuple[int, int, int, int] | None = None
    """Parts of rows, columns, channels and sums."""
    slots: tuple[int, ...] | None = None
    pieces: tuple[PieceMapping, ...] | None = None


@dataclass(frozen=True, slots=True)
class GroupMapping:
    """A group of elements."""

    at: LocatedValue
    members: tuple[tuple[Ref, LocatedValue], ...] = ()
    count: int | None = None
    """So many, whichever; None where they are listed."""


@dataclass(frozen=True, slots=True)
class RouteMapping:
    """A way messages take, from its first place to its last."""

    chip: tuple[int, int] | None
    """On this chip from router to router; None for one between chips."""
    way: tuple[tuple[int, int], ...]
    at: LocatedValue


@dataclass(frozen=True)
class MappingFile:
    """A mapping file."""

    objective: str | None = None
    elements: dict[str, tuple[Position | None, LocatedValue]] = field(default_factory=dict)
    groups: dict[str, GroupMapping] = field(default_factory=dict)
    layers: dict[str, LayerMapping] = field(default_factory=dict)
    routes: tuple[RouteMapping, ...] = ()


def wishes_of(root: LocatedValue, network: str, layers: Sequence[MeshLayer], topology: Topology) -> MappingFile:
    """The wishes of a file.

    Args:
        root: what the file holds.
        network: name of the graph.
        layers: of it.
        topology: the mesh.

    Raises:
        PlanError: it says what no such file can, or names what is not there; with the line.
    """
    entries = root.entries("schema", "network", "objective", "elements", "groups", "layers", "routes")
    schema = entries.get("schema")
    if schema is None or schema.value != SCHEMA:
        raise (schema or root).wrong(f"this is no mapping of schema {SCHEMA}", f"begin it with schema: {SCHEMA}")
    if "network" in entries and entries["network"].value not in (network, None):
        raise entries["network"].wrong(f"the network here is '{network[:60]}'", "the file is of another network")
    objective = entries.get("objective")
    if objective is not None and objective.value not in ("latency", "throughput"):
        raise objective.wrong(f"there is no objective {objective.value!r:.60}", "latency or throughput")
    reader = _ReferenceReader(topology, _elements(entries.get("elements"), topology))
    nothing = LocatedValue(None, root.file, 0)
    return MappingFile(
        objective.value if objective else None,
        reader.elements,
        {name: reader.group(one) for name, one in entries.get("groups", nothing).entries().items()},
        _layers(entries.get("layers", nothing), layers, reader),
        tuple(_route(one, topology) for one in (entries["routes"].items() if "routes" in entries else ())),
    )


def _elements(listed: LocatedValue | None, topology: Topology) -> dict[str, tuple[Position | None, LocatedValue]]:
    found: dict[str, tuple[Position | None, LocatedValue]] = {}
    known: dict[Position, LocatedValue] = {}
    for name, one in (listed.entries() if listed else {}).items():
        place = None if one.value is None else position(one, topology)
        if place is not None and place in known:
            what = f"the element {list(place)} has two names, the second is '{name[:40]}'"
            raise one.wrong(what, "give one of them another position", known[place])
        if place is not None:
            known[place] = one
        found[name] = place, one
    return found


def position(one: LocatedValue, topology: Topology) -> Position:
    """An element's position; raises PlanError where there is none, or it may not be used."""
    x, y, number = one.numbers("a position (column and row of the chip, number on it)", [(0, _LARGE)] * 3)
    chip = topology.chips.get((x, y))
    if chip is None or number >= topology.mesh.per_chip:
        raise one.wrong(f"the element {[x, y, number]} does not exist", f"a chip has {topology.mesh.per_chip} elements")
    if chip * topology.mesh.per_chip + number not in topology.usable:
        raise one.wrong(f"the element {[x, y, number]} is faulty or reserved", "take another element")
    return x, y, number


@dataclass(frozen=True)
class _ReferenceReader:
    """What references are read with."""

    topology: Topology
    elements: dict[str, tuple[Position | None, LocatedValue]]

    def ref(self, one: LocatedValue) -> Ref:
        """An element by name or position; its name where it has both."""
        if isinstance(one.value, str):
            if one.value not in self.elements:
                known = ", ".join(list(self.elements)[:12]) or "none"
                raise one.wrong(f"there is no element '{one.value[:40]}'", f"names stand under elements: {known}")
            return one.value
        place = position(one, self.topology)
        return next((name for name, (known, _) in self.elements.items() if known == place), place)

    def group(self, one: LocatedValue) -> GroupMapping:
        """A group: a number, a list of elements, or a stretch of a chip's."""
        if type(one.value) is int:
            if not 1 <= one.value <= len(self.topology.elements):
                raise one.wrong(f"a group of {one.value} elements", f"there are {len(self.topology.elements)}")
            return GroupMapping(one, count=one.value)
        members = self._stretch(one) if isinstance(one.value, dict) else [(self.ref(m), m) for m in one.items()]
        seen: dict[Ref, LocatedValue] = {}
        for ref, at in members:
            if ref in seen:
                raise at.wrong(f"{shown_ref(ref)} is twice in the group", "leave one of them out", seen[ref])
            seen[ref] = at
        if not members:
            raise one.wrong("the group is empty", "list its elements, or say how many")
        return GroupMapping(one, tuple(members))

    def _stretch(self, one: LocatedValue) -> list[tuple[Ref, LocatedValue]]:
        """The usable ones of elements first to last + 1 of a chip."""
        entries = one.entries("chip", "elements")
        if len(entries) < 2:
            raise one.wrong("a stretch has a chip and elements", "such as {chip: [0, 0], elements: [0, 32]}")
        x, y = entries["chip"].numbers("a chip (column and row)", [(0, _LARGE)] * 2)
        per = self.topology.mesh.per_chip
        first, last = entries["elements"].numbers("elements (first and last + 1)", [(0, per)] * 2)
        if (x, y) not in self.topology.chips:
            raise entries["chip"].wrong(f"there is no chip {[x, y]}", "chips are columns and rows of the board")
        base = self.topology.chips[x, y] * per
        numbers = [number for number in range(first, last) if base + number in self.topology.usable]
        names = {place: name for name, (place, _) in self.elements.items()}
        return [(names.get((x, y, number), (x, y, number)), one) for number in numbers]


def shown_ref(ref: Ref) -> str:
    """An element in words."""
    return f"the element '{ref}'" if isinstance(ref, str) else f"the element {list(ref)}"


def _layers(listed: LocatedValue, layers: Sequence[MeshLayer], reader: _ReferenceReader) -> dict[str, LayerMapping]:
    known = {layer.name: layer for layer in layers}
    found = {}
    for name, one in listed.entries().items():
        if name not in known:
            names = ", ".join(list(known)[:16]) + (", ..." if len(known) > 16 else "")
            raise one.wrong(f"there is no layer '{name[:60]}' in the network", f"its layers are {names}")
        found[name] = _layer(one, known[name], reader)
    return found


def _layer(one: LocatedValue, layer: MeshLayer, reader: _ReferenceReader) -> LayerMapping:
    entries = one.entries("group", "cut", "slots", "on", "pieces")
    for a, b in (("cut", "pieces"), ("on", "pieces")):
        if a in entries and b in entries:
            raise entries[b].wrong(f"'{a}' and '{b}' both say how {layer.name} is cut", "keep one", entries[a])
    wish = LayerMapping(layer.name, one, entries.get("group"))
    if "slots" in entries:
        limits = [(1, _MOST_SLOTS)] * len(layer.readings)
        wish = replace(wish, slots=entries["slots"].numbers("slots (one for each operand)", limits))
    if "cut" in entries:
        most = [size if free else 1 for size, free in zip(layer.image, layer.cuttable, strict=True)]
        limits = [(1, size) for size in (*most, -(-layer.summed // layer.unit))]
        rows, columns, channels, sums = entries["cut"].numbers("a cut (rows, columns, channels, sums)", limits)
        wish = replace(wish, cut=(rows, columns, channels, sums))
    if "pieces" in entries:
        pieces = tuple(_piece(each, layer, reader) for each in entries["pieces"].items())
        return replace(wish, pieces=pieces or None)
    return replace(wish, pieces=_listed(entries["on"], wish, entries, reader)) if "on" in entries else wish


def _listed(
    on: LocatedValue, wish: LayerMapping, entries: dict[str, LocatedValue], reader: _ReferenceReader
) -> tuple[PieceMapping, ...] | None:
    """Pieces on elements: one for the whole, or one for each piece of the cut."""
    single = isinstance(on.value, str) or all(type(one.value) is int for one in on.items())
    members = [on] if single else on.items()
    count = 1
    for parts in wish.cut or ():
        count *= parts
    if len(members) != count:
        what = f"{len(members)} elements for the {count} pieces of {wish.name}"
        raise on.wrong(what, "give one for each piece, or a group instead", entries.get("cut"))
    return tuple(PieceMapping(None, reader.ref(one), one) for one in members)


def _piece(one: LocatedValue, layer: MeshLayer, reader: _ReferenceReader) -> PieceMapping:
    entries = one.entries("box", "on")
    if "box" not in entries:
        raise one.wrong("a piece has a box", "such as {box: [[0, 8], [0, 32], [0, 16]]}, an element behind on:")
    spans, box = entries["box"].items(), []
    if len(spans) not in (3, 4):
        raise entries["box"].wrong("a box is rows, columns, channels, each [first, last + 1], and what is summed over")
    sizes = (*layer.image, layer.summed)
    for axis, (name, size) in enumerate(zip(("rows", "columns", "channels", "sums"), sizes, strict=True)):
        if axis == len(spans):
            box.append((0, size))
            continue
        first, last = spans[axis].numbers(f"{name} (first and last + 1)", [(0, size)] * 2)
        if first >= last:
            raise spans[axis].wrong(f"there are no {name} from {first} to {last}", "the second is one beyond the last")
        free = layer.cuttable[axis] if axis < 3 else layer.unit < size
        if not free and (first, last) != (0, size):
            raise spans[axis].wrong(f"{layer.name} cannot be cut along its {name}", f"give [0, {size}]")
        if axis == 3 and (first % layer.unit or (last % layer.unit and last != size)):
            raise spans[axis].wrong(f"sums are cut at multiples of {layer.unit}", "give others")
        box.append((first, last))
    return PieceMapping(tuple(box), reader.ref(entries["on"]) if "on" in entries else None, one)


def _route(one: LocatedValue, topology: Topology) -> RouteMapping:
    chip: tuple[int, int] | None = None
    listed, grid = one, topology.mesh.grid
    if isinstance(one.value, dict):
        entries = one.entries("chip", "routers")
        if len(entries) < 2:
            raise one.wrong(
                "a route on a chip has chip and routers", "such as {chip: [0, 0], routers: [[0, 0], [1, 0]]}"
            )
        x, y = entries["chip"].numbers("a chip (column and row)", [(0, _LARGE)] * 2)
        if (x, y) not in topology.chips:
            raise entries["chip"].wrong(f"there is no chip {[x, y]}", "chips are columns and rows of the board")
        chip, listed = (x, y), entries["routers"]
    high = [(0, grid.width - 1), (0, grid.height - 1)] if chip else [(0, _LARGE)] * 2
    places = [each.numbers("a place (column and row)", high) for each in listed.items()]
    way = tuple((x, y) for x, y in places)
    missing = [place for place in way if chip is None and place not in topology.chips]
    if missing or len(way) < 2 or len(set(way)) != len(way):
        what = f"there is no chip {list(missing[0])}" if missing else "a route leads over two places or more, each once"
        raise one.wrong(what, "list every place on the way, the first and the last too")
    return RouteMapping(chip, way, one)
