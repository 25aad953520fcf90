"""A mapping of the user's own: what a file asks for is kept, what it leaves out is chosen, and every piece is checked.

Layers share a pool of elements: those of one group have the group's, all others what no group or piece has taken. In a
pool every piece has an element of its own where there are enough; else pieces share elements, as few as that takes,
those with most clocks first, each on the element with the fewest so far that has the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.choice import Objective, choose
from dovetail.guests.mesh.cuts import Cut, frontier, frontier_or_empty
from dovetail.guests.mesh.layers import MeshLayer, layers_of, output_layers
from dovetail.guests.mesh.mapping import MeshMapping, check_covered, map_network, planned, wanted
from dovetail.guests.mesh.marked import LocatedValue, read_marked
from dovetail.guests.mesh.own_boxes import Boxes, boxes_wished
from dovetail.guests.mesh.own_routes import routed
from dovetail.guests.mesh.partition import (
    MeshPartition,
    MeshStage,
    Section,
    boxed_stage,
    boxes_of,
    resident,
    slot_choices,
)
from dovetail.guests.mesh.parts import check_parts, wishes_of_parts
from dovetail.guests.mesh.placement import SectionPlacement, place, shared_bytes, tables_of
from dovetail.guests.mesh.topology import Topology
from dovetail.guests.mesh.traffic import loads_of, traffic_of
from dovetail.guests.mesh.wishes import MappingFile, Position, Ref, shown_ref, wishes_of
from dovetail.ir.graph import Graph
from dovetail.schedule.region import Region
from dovetail.target.mesh import Mesh


def read_mapping(
    path: Path | None,
    graph: Graph,
    regions: Sequence[Region],
    topology: Topology,
    objective: Objective,
    parts: Mapping[str, Graph] = MappingProxyType({}),
) -> MeshMapping:
    """A network mapped as a file asks.

    Args:
        path: the file, if there is one; docs/mesh.md describes it.
        graph: the integer graph, and regions: its regions.
        topology: the mesh.
        objective: what is left out is chosen for it, where the file does not say.
        parts: what elements compute, by the elements' names; see `parts.py`.

    Raises:
        ModelError: a part computes something else than the network.
        PlanError: the file is damaged, names what is not there, or contradicts itself (with the lines); a piece, or
            those on one element, do not fit.
    """
    layers = layers_of(graph, regions)
    wishes = wishes_of(read_marked(path), graph.name, layers, topology) if path else MappingFile()
    wishes = wishes_of_parts(wishes, parts, layers, topology) if parts else wishes
    if not (wishes.layers or wishes.groups or wishes.routes):
        return map_network(graph, regions, topology, Objective(wishes.objective or objective), whole=True)
    found = complete(wishes, graph, regions, topology, objective)
    check_parts(found, parts)
    return found


def complete(
    wishes: MappingFile, graph: Graph, regions: Sequence[Region], topology: Topology, objective: Objective
) -> MeshMapping:
    """As `read_mapping`, of wishes that were read."""
    layers = layers_of(graph, regions)
    objective = Objective(wishes.objective or objective)
    book = _ElementRegistry(topology, wishes)
    given = [boxes_wished(wishes.layers[x.name], x, topology.mesh) if x.name in wishes.layers else None for x in layers]
    for layer, boxes in zip(layers, given, strict=True):
        book.note(layer.name, boxes)
    open_ = any(boxes is None and book.pool(layer.name).at is None for layer, boxes in zip(layers, given, strict=True))
    usual = resident(layers, topology, objective) if open_ and len(topology.places) > 1 else None
    ours = [[stage.slots for stage in usual.stages]] if usual else []
    choices = [*ours, *slot_choices(layers, objective)]
    asked = [wishes.layers[layer.name].slots if layer.name in wishes.layers else None for layer in layers]
    for turn, slots in enumerate(choices):
        held = [one or ours for one, ours in zip(asked, slots, strict=True)]
        try:
            stages, homes = _dealt(layers, given, held, book, objective, usual if turn == 0 else None)
            break
        except PlanError:
            if turn == len(choices) - 1:
                raise
    section = Section(tuple(stages))
    parts = MeshPartition(graph, layers, output_layers(graph, layers, regions), topology.mesh, objective, (section,))
    parts = planned(parts)
    section = parts.sections[0]
    traffic = traffic_of(section, wanted(parts, 0))
    check_covered(section, traffic)
    groups = usual.groups if usual and turn == 0 else ()
    element = np.array(book.placed(homes, replace(section, groups=groups), wanted(parts, 0)), np.int64)
    topology = routed(topology, wishes.routes)
    placed = SectionPlacement(section, topology, traffic, element, loads_of(traffic, topology, element))
    return MeshMapping(parts, topology, (placed,), (tables_of(placed),))


@dataclass(frozen=True)
class _ElementPool:
    """Elements that some layers share."""

    elements: tuple[int, ...]
    at: LocatedValue | None
    """Its line; None for what no group has."""


@dataclass
class _ElementRegistry:
    """The elements a file speaks of, by number, and those chosen besides."""

    topology: Topology
    wishes: MappingFile
    places: list[Position | None] = field(default_factory=list)
    """Position of each; None where it is chosen."""
    known: dict[Ref, int] = field(default_factory=dict)
    pools: dict[str, _ElementPool] = field(default_factory=dict)
    """Group -> its elements."""
    any_of: dict[int, list[int]] = field(default_factory=dict)
    """By the pool's id: elements of a group that the file counts only and no piece has named yet."""
    rest: _ElementPool = field(default_factory=lambda: _ElementPool((), None))

    def __post_init__(self) -> None:
        taken: dict[int, tuple[str, LocatedValue]] = {}
        for name, group in self.wishes.groups.items():
            members = [(self.number(ref), ref, at) for ref, at in group.members]
            for number, ref, at in members:
                if number in taken:
                    other, line = taken[number]
                    what = f"{shown_ref(ref)} is in the groups '{other[:40]}' and '{name[:40]}'"
                    raise at.wrong(what, "give it to one of them", line)
                taken[number] = name, at
            fresh = [self._add(None) for _ in range(group.count or 0)]
            self.pools[name] = _ElementPool((*(number for number, _, _ in members), *fresh), group.at)
            self.any_of[id(self.pools[name])] = fresh

    def _add(self, place: Position | None) -> int:
        self.places.append(place)
        return len(self.places) - 1

    def number(self, ref: Ref) -> int:
        """The number of an element that is named."""
        if ref not in self.known:
            self.known[ref] = self._add(self._place(ref))
        return self.known[ref]

    def _place(self, ref: Ref) -> Position | None:
        return self.wishes.elements[ref][0] if isinstance(ref, str) else ref

    def note(self, layer: str, boxes: Boxes | None) -> None:
        """Number the elements of a layer's pieces; raises PlanError where one is not in the layer's group."""
        pool = self.pool(layer)
        for ref, at in zip(boxes.on, boxes.at, strict=True) if boxes else ():
            if ref is not None and ref not in self.known and pool.at is not None and self.any_of[id(pool)]:
                self.known[ref] = self.any_of[id(pool)].pop(0)
                self.places[self.known[ref]] = self._place(ref)
            if ref is not None and self.number(ref) not in pool.elements and pool.at is not None:
                group = self.wishes.layers[layer].group
                what = f"{shown_ref(ref)} is not in the group of {layer}"
                raise at.wrong(what, "put the piece on an element of the group, or the element into it", group)

    def pool(self, layer: str) -> _ElementPool:
        """The pool of a layer; raises PlanError where its group is not there."""
        wish = self.wishes.layers.get(layer)
        if wish is None or wish.group is None:
            return self.rest
        name = wish.group.text()
        if name not in self.pools:
            raise wish.group.wrong(f"there is no group '{name[:40]}'", f"groups are {', '.join(self.pools) or 'none'}")
        return self.pools[name]

    def close(self) -> None:
        """Count what is left for layers without a group; raises PlanError where the file has more than there are."""
        if self.rest.elements:
            return
        left = len(self.topology.elements) - len(self.places)
        if left < 0:
            what = f"the file takes {len(self.places)} elements, the mesh has {len(self.topology.elements)}"
            groups = sorted(self.pools.values(), key=lambda pool: -len(pool.elements))
            raise (groups[0].at or LocatedValue(None, "mapping", 0)).wrong(
                what, "make groups smaller, or use more chips"
            )
        self.rest = _ElementPool(tuple(self._add(None) for _ in range(left)), None)

    def placed(self, homes: Sequence[int], section: Section, outputs: frozenset[int]) -> list[int]:
        """The element of every piece.

        Where the file does not say, it is the one it would have if nothing were given; else of those that are free the
        next on the path over the mesh, first on the same chip.
        """
        per = self.topology.mesh.per_chip
        found = {
            number: self.topology.chips[place[:2]] * per + place[2]
            for number, place in enumerate(self.places)
            if place is not None
        }
        if found.keys() >= set(homes):
            return [found[number] for number in homes]
        liked = _liked(section, self.topology, outputs)
        taken = set(found.values())
        for number, element in zip(homes, liked, strict=False):
            if number not in found and element not in taken:
                found[number] = element
                taken.add(element)
        free: dict[int, list[int]] = {}
        for element in self.topology.elements[::-1].tolist():
            if element not in taken:
                free.setdefault(element // per, []).append(element)
        for piece, number in enumerate(homes):
            if number not in found:
                chip = liked[piece] // per if piece < len(liked) else -1
                chip = chip if free.get(chip) else next(reversed([one for one in free if free[one]]))
                found[number] = free[chip].pop()
        return [found[number] for number in homes]


def _liked(section: Section, topology: Topology, outputs: frozenset[int]) -> list[int]:
    """Where pieces would be if each had an element of its own and nothing were given; empty for too many pieces."""
    if section.pieces > len(topology.elements):
        return []
    for group in section.groups:  # more pieces than the group's chips have room for: without groups
        slabs = [-(-stage.pieces // group.slabs) for stage in section.stages[group.first : group.last]]
        if sum(slabs) > group.chips * topology.capacity:
            section = replace(section, groups=())
            break
    found: list[int] = place(section, topology, outputs).element.tolist()
    return found


def _dealt(
    layers: Sequence[MeshLayer],
    given: Sequence[Boxes | None],
    slots: Sequence[tuple[int, ...]],
    book: _ElementRegistry,
    objective: Objective,
    usual: Section | None,
) -> tuple[list[MeshStage], list[int]]:
    """Stages, and the number of the element of every piece; `usual` is what there would be without a file.

    Raises:
        PlanError: something does not fit.
    """
    book.close()
    pools = {layer.index: book.pool(layer.name) for layer in layers}
    chosen: dict[int, Boxes] = {}
    for pool in {id(pool): pool for pool in pools.values()}.values():
        members = [layer for layer in layers if pools[layer.index] is pool]
        chosen |= _cut_pool(pool, members, given, slots, book, objective, usual if pool.at is None else None)
    stages: list[MeshStage] = []
    for layer in layers:
        boxes, first = chosen[layer.index], stages[-1].first + stages[-1].pieces if stages else 0
        try:
            mesh, held = book.topology.mesh, slots[layer.index]
            stages.append(boxed_stage(layer, boxes.cut, boxes.boxes, held, mesh, first, boxes.free))
        except PlanError as error:
            raise PlanError(error.what, where=_where(boxes.at[0], layer), hint=error.hint) from None
    homes = _PieceElements(stages, [at for layer in layers for at in chosen[layer.index].at], book.topology.mesh)
    named = [ref for layer in layers for ref in chosen[layer.index].on]
    for piece, ref in enumerate(named):
        if ref is not None:
            homes.put(piece, book.number(ref))
    for pool in {id(pool): pool for pool in pools.values()}.values():
        own = [s for s in stages if pools[s.layer.index] is pool]
        homes.deal([s.first + n for s in own for n in range(s.pieces) if named[s.first + n] is None], pool.elements)
    return stages, homes.home


def _where(at: LocatedValue, layer: MeshLayer) -> str:
    return f"{at.place}: {layer.name}" if at.line else layer.name


def _cut_pool(
    pool: _ElementPool,
    members: Sequence[MeshLayer],
    given: Sequence[Boxes | None],
    slots: Sequence[tuple[int, ...]],
    book: _ElementRegistry,
    objective: Objective,
    usual: Section | None,
) -> dict[int, Boxes]:
    """The pieces of a pool's layers: those of the file, else the usual cuts, else the best for what is left."""
    found = {layer.index: boxes for layer in members if (boxes := given[layer.index]) is not None}
    placed = {book.number(ref) for boxes in given if boxes for ref in boxes.on if ref is not None}
    for layer in members:
        if layer.index in found and found[layer.index].on.count(None) > len(pool.elements):
            boxes = found[layer.index]
            what = f"{layer.name} has {boxes.on.count(None)} pieces to be put on {len(pool.elements)} elements"
            wish = book.wishes.layers[layer.name]
            raise wish.at.wrong(what, "cut it into fewer, or make the group larger", pool.at)
    own = [layer for layer in members if layer.index not in found]
    if not own:
        return found
    mesh, room = book.topology.mesh, len([number for number in pool.elements if number not in placed])
    needed = sum(boxes.on.count(None) for boxes in found.values())
    size = len(pool.elements)
    if usual is not None and sum(usual.stages[layer.index].pieces for layer in own) <= room - needed:
        return found | {layer.index: _own_cut(layer, usual.stages[layer.index].cut, book) for layer in own}
    for times in range(1, 2 + len(members)):
        left = room - needed if times == 1 else times * size - needed
        fronts = [frontier_or_empty(layer, mesh, slots[layer.index], min(max(left, 1), size)) for layer in own]
        cuts = choose(fronts, left, objective) if left >= len(own) else None
        if cuts is not None:
            break
    else:
        for layer in own:
            _require_fit(layer, slots[layer.index], size, book)
        names = ", ".join(layer.name for layer in own[:6]) + (", ..." if len(own) > 6 else "")
        what = f"{size} elements are too few for {names}"
        raise (pool.at or LocatedValue(None, "mesh", 0)).wrong(what, "make the group larger, or use more chips")
    for layer, cut in zip(own, cuts, strict=True):
        found[layer.index] = _own_cut(layer, cut, book)
    return found


def _require_fit(layer: MeshLayer, slots: tuple[int, ...], most: int, book: _ElementRegistry) -> None:
    """Raises PlanError where not even a layer's smallest piece fits an element, with the layer's line."""
    try:
        frontier(layer, book.topology.mesh, slots, most)
    except PlanError as error:
        wish = book.wishes.layers.get(layer.name)
        place = f"{wish.at.place}: {error.where}" if wish else error.where
        raise PlanError(error.what, where=place, hint=error.hint) from None


def _own_cut(layer: MeshLayer, cut: Cut, book: _ElementRegistry) -> Boxes:
    wish = book.wishes.layers.get(layer.name)
    at = wish.at if wish else LocatedValue(None, "mapping", 0)
    boxes = boxes_of(layer, cut, book.topology.mesh)
    return Boxes(cut, boxes, False, (None,) * len(boxes), (at,) * len(boxes))


class _PieceElements:
    """Which element every piece is on, and what each element has taken."""

    def __init__(self, stages: Sequence[MeshStage], at: Sequence[LocatedValue], mesh: Mesh) -> None:
        self.home = [-1] * len(at)
        """[pieces] number of its element."""
        self._at, self._mesh = at, mesh
        self._memory: list[int] = np.concatenate([stage.memory for stage in stages]).tolist()
        self._clocks: list[int] = np.concatenate([stage.costs.clocks for stage in stages]).tolist()
        self._names = [stage.layer.name for stage in stages for _ in range(stage.pieces)]
        self._pieces: dict[int, list[int]] = {}
        self._load: dict[int, int] = {}

    def put(self, piece: int, element: int) -> None:
        """Put a piece on an element; raises PlanError where its pieces do not fit together."""
        here = self._pieces.setdefault(element, [])
        if here and self._mesh.pieces is not None:
            what = f"a piece of {self._names[here[0]]} and one of {self._names[piece]} on an element that holds one"
            hint = "elements with engines of their own have one piece each: use more of them"
            raise self._at[piece].wrong(what, hint, self._at[here[0]])
        if not self._fits(piece, element):
            largest = max(here, key=self._memory.__getitem__)
            bytes_ = shared_bytes([self._memory[one] for one in (*here, piece)], self._mesh)
            what = (
                f"the {len(here) + 1} pieces on an element, of {self._names[largest]} and {self._names[piece]} "
                f"among them, take {bytes_} bytes, it has {self._mesh.usable}"
            )
            hint = "put one of them on another element, cut them into more pieces, or give fewer slots"
            raise self._at[piece].wrong(what, hint, self._at[largest])
        here.append(piece)
        self.home[piece] = element
        self._load[element] = self._load.get(element, 0) + self._clocks[piece]

    def deal(self, pieces: Sequence[int], elements: Sequence[int]) -> None:
        """Put pieces on the elements of a pool; raises PlanError where one fits none of them."""
        empty = [element for element in elements if element not in self._pieces]
        if len(pieces) <= len(empty):
            for piece, element in zip(pieces, empty, strict=False):
                self.put(piece, element)
            return
        for piece in sorted(pieces, key=lambda piece: -self._clocks[piece]):
            names = self._names[piece]
            order = sorted(
                elements,
                key=lambda e: (any(self._names[p] == names for p in self._pieces.get(e, ())), self._load.get(e, 0)),
            )
            self.put(piece, next((element for element in order if self._fits(piece, element)), order[0]))

    def _fits(self, piece: int, element: int) -> bool:
        memory = [self._memory[one] for one in (*self._pieces.get(element, ()), piece)]
        return shared_bytes(memory, self._mesh) <= self._mesh.usable
