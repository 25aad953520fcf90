"""A mapping of the user's own: a file's wishes are kept, the rest is chosen, and every piece is checked.

Layers share a pool of elements: those of one group have the group's, all others the elements that no group or piece
has. In a pool every piece has an element of its own where there are enough; else pieces share elements, as few as that
takes, those with most clocks first, each on the element with the fewest so far that has the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.choice import Objective, choose
from dovetail.guests.mesh.cuts import Cut, frontier, require_fit
from dovetail.guests.mesh.layers import MeshLayer, layers_of, output_layers
from dovetail.guests.mesh.mapping import MeshMapping, map_network, planned, stored_layers
from dovetail.guests.mesh.mapping_file import ElementRef, MappingWishes, Position, WishPlace, read_wishes, shown_ref
from dovetail.guests.mesh.own_boxes import LayerBoxes, boxes_of_cut, boxes_wished
from dovetail.guests.mesh.own_routes import routed
from dovetail.guests.mesh.partition import MeshPartition, MeshStage, Section, boxed_stage, resident, slot_choices
from dovetail.guests.mesh.parts import check_parts, wishes_of_parts
from dovetail.guests.mesh.pieces import check_covered
from dovetail.guests.mesh.placement import SectionPlacement, place, shared_bytes, tables_of
from dovetail.guests.mesh.topology import Topology
from dovetail.guests.mesh.traffic import loads_of, traffic_of
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
    """A network mapped by a user's wishes.

    Args:
        path: the mapping file, if there is one; docs/mesh.md describes it.
        graph: the integer graph, and regions: its regions.
        topology: the mesh.
        objective: decides where the file does not.
        parts: the computation of elements, by their names; see `parts.py`.

    Raises:
        ModelError: a part computes something else than the network.
        PlanError: the file is damaged, names what is not there, or contradicts itself (with the lines); a piece, or
            those on one element, do not fit.
    """
    layers = layers_of(graph, regions)
    wishes = read_wishes(path, graph.name, layers, topology) if path else MappingWishes()
    wishes = wishes_of_parts(wishes, parts, layers, topology) if parts else wishes
    if not (wishes.layers or wishes.groups or wishes.routes):
        return map_network(graph, regions, topology, Objective(wishes.objective or objective), whole=True)
    mapped = complete(wishes, graph, regions, topology, objective)
    check_parts(mapped, parts)
    return mapped


def complete(
    wishes: MappingWishes, graph: Graph, regions: Sequence[Region], topology: Topology, objective: Objective
) -> MeshMapping:
    """The mapping with some wishes; arguments and errors as of `read_mapping`."""
    layers = layers_of(graph, regions)
    objective = Objective(wishes.objective or objective)
    registry = _ElementRegistry(topology, wishes)
    wished = [boxes_wished(wishes.layer(layer.name), layer, topology.mesh) for layer in layers]
    for layer, boxes in zip(layers, wished, strict=True):
        registry.note(layer.name, boxes)
    is_open = any(boxes is None and registry.pool(x.name).at is None for x, boxes in zip(layers, wished, strict=True))
    usual = resident(layers, topology, objective) if is_open and len(topology.places) > 1 else None
    choices = [[stage.slots for stage in usual.stages]] if usual else []
    choices += slot_choices(layers, objective)
    for turn, slots in enumerate(choices):
        held = [wishes.layer(layer.name).slots or own for layer, own in zip(layers, slots, strict=True)]
        try:
            stages, homes = _Cutting(layers, wished, held, registry, objective, None if turn else usual).run()
            break
        except PlanError:
            if turn == len(choices) - 1:
                raise
    outputs = output_layers(graph, layers, regions)
    parts = planned(MeshPartition(graph, layers, outputs, topology.mesh, objective, (Section(tuple(stages)),)))
    section = parts.sections[0]
    traffic = traffic_of(section, stored_layers(parts))
    check_covered(section, traffic)
    groups = usual.groups if usual and turn == 0 else ()
    element = np.array(registry.placed(homes, replace(section, groups=groups), stored_layers(parts)), np.int64)
    topology = routed(topology, wishes.routes)
    placed = SectionPlacement(section, topology, traffic, element, loads_of(traffic, topology, element))
    return MeshMapping(parts, topology, (placed,), (tables_of(placed),))


@dataclass(frozen=True, eq=False)
class _ElementPool:
    """Elements that some layers share, by number in the registry."""

    elements: tuple[int, ...]
    at: WishPlace | None = None
    """Its place in the file; None for the elements that no group has."""
    unnamed: list[int] = field(default_factory=list)
    """Elements that the file only counts, and that no piece has named yet."""


class _ElementRegistry:
    """The elements a file speaks of, by number, and those chosen besides."""

    def __init__(self, topology: Topology, wishes: MappingWishes) -> None:
        self.topology, self.wishes = topology, wishes
        self.places: list[Position | None] = []
        """Position of each; None where it is chosen."""
        self._numbers: dict[ElementRef, int] = {}
        self._pools: dict[str, _ElementPool] = {}
        self._rest = _ElementPool(())
        owners: dict[int, tuple[str, WishPlace]] = {}
        for name, group in wishes.groups.items():
            for ref, at in group.members:
                other, line = owners.setdefault(self.number(ref), (name, at))
                if other is not name:
                    what = f"{shown_ref(ref)} is in the groups '{other[:40]}' and '{name[:40]}'"
                    raise at.wrong(what, "give it to one of them", line)
            unnamed = [self._add(None) for _ in range(group.count)]
            self._pools[name] = _ElementPool((*(self.number(r) for r, _ in group.members), *unnamed), group.at, unnamed)

    def _add(self, place: Position | None) -> int:
        self.places.append(place)
        return len(self.places) - 1

    def number(self, ref: ElementRef) -> int:
        """The number of an element that is named."""
        if ref not in self._numbers:
            self._numbers[ref] = self._add(self._place(ref))
        return self._numbers[ref]

    def _place(self, ref: ElementRef) -> Position | None:
        return self.wishes.elements[ref] if isinstance(ref, str) else ref

    def note(self, layer: str, boxes: LayerBoxes | None) -> None:
        """Number the elements of a layer's pieces; raises PlanError where one is not in the layer's group."""
        pool = self.pool(layer)
        for ref, at in zip(boxes.on, boxes.at, strict=True) if boxes else ():
            if ref is None:
                continue
            if ref not in self._numbers and pool.unnamed:
                self._numbers[ref] = pool.unnamed.pop(0)
                self.places[self._numbers[ref]] = self._place(ref)
            if self.number(ref) not in pool.elements and pool.at is not None:
                hint = "put the piece on an element of the group, or the element into it"
                group = self.wishes.layer(layer).at.inside("group")
                raise at.wrong(f"{shown_ref(ref)} is not in the group of {layer}", hint, group)

    def pool(self, layer: str) -> _ElementPool:
        """The pool of a layer; raises PlanError where its group is not there."""
        wish = self.wishes.layer(layer)
        if wish.group is None:
            return self._rest
        if wish.group not in self._pools:
            hint = f"groups are {', '.join(self._pools) or 'none'}"
            raise wish.at.inside("group").wrong(f"there is no group '{wish.group[:40]}'", hint)
        return self._pools[wish.group]

    def close(self) -> None:
        """Count the elements left for layers without a group; raises PlanError where the file has more than there
        are."""
        if self._rest.elements:
            return
        left = len(self.topology.elements) - len(self.places)
        if left < 0:
            what = f"the file takes {len(self.places)} elements, the mesh has {len(self.topology.elements)}"
            largest = max(self._pools.values(), key=lambda pool: len(pool.elements), default=self._rest)
            raise (largest.at or self.wishes.at).wrong(what, "make groups smaller, or use more chips")
        self._rest = _ElementPool(tuple(self._add(None) for _ in range(left)))

    def placed(self, homes: Sequence[int], section: Section, outputs: frozenset[int]) -> list[int]:
        """The element of every piece.

        Where the file does not say, it is the one it would have without any wish; else of those that are free the
        next on the path over the mesh, first on the same chip.
        """
        per, chips = self.topology.mesh.per_chip, self.topology.chips
        positions = ((number, at) for number, at in enumerate(self.places) if at is not None)
        elements = {number: chips[at[:2]] * per + at[2] for number, at in positions}
        if elements.keys() >= set(homes):
            return [elements[number] for number in homes]
        usual = _usual_elements(section, self.topology, outputs)
        taken = set(elements.values())
        for number, element in zip(homes, usual, strict=False):
            if number not in elements and element not in taken:
                elements[number] = element
                taken.add(element)
        free: dict[int, list[int]] = {}
        for element in self.topology.elements[::-1].tolist():
            if element not in taken:
                free.setdefault(element // per, []).append(element)
        for piece, number in enumerate(homes):
            if number not in elements:
                chip = usual[piece] // per if piece < len(usual) else -1
                chip = chip if free.get(chip) else next(reversed([one for one in free if free[one]]))
                elements[number] = free[chip].pop()
        return [elements[number] for number in homes]


def _usual_elements(section: Section, topology: Topology, outputs: frozenset[int]) -> list[int]:
    """Elements of pieces if each had one of its own and there were no wishes; empty for too many pieces."""
    if section.pieces > len(topology.elements):
        return []
    for group in section.groups:  # more pieces than the group's chips have room for: without groups
        slabs = [-(-stage.pieces // group.slabs) for stage in section.stages[group.first : group.last]]
        if sum(slabs) > group.chips * topology.capacity:
            section = replace(section, groups=())
            break
    elements: list[int] = place(section, topology, outputs).element.tolist()
    return elements


@dataclass(frozen=True)
class _Cutting:
    """Cuts layers into pieces and gives each the number of its element, for certain slots."""

    layers: Sequence[MeshLayer]
    wished: Sequence[LayerBoxes | None]
    """The pieces that the file gives, per layer."""
    slots: Sequence[tuple[int, ...]]
    registry: _ElementRegistry
    objective: Objective
    usual: Section | None
    """The network without wishes."""

    def run(self) -> tuple[list[MeshStage], list[int]]:
        """Stages, and the number of the element of every piece; raises PlanError where something does not fit."""
        self.registry.close()
        members: dict[_ElementPool, list[MeshLayer]] = {}
        for layer in self.layers:
            members.setdefault(self.registry.pool(layer.name), []).append(layer)
        boxes = {index: one for pool, own in members.items() for index, one in self._cut(pool, own)}
        stages: list[MeshStage] = []
        for layer in self.layers:
            one, first = boxes[layer.index], stages[-1].first + stages[-1].pieces if stages else 0
            try:
                mesh, held = self.registry.topology.mesh, self.slots[layer.index]
                stages.append(boxed_stage(layer, one.cut, one.boxes, held, mesh, first, one.free))
            except PlanError as error:
                raise PlanError(error.what, where=_where(one.at[0], layer.name), hint=error.hint) from None
        places = [at for layer in self.layers for at in boxes[layer.index].at]
        homes = _PieceElements(stages, places, self.registry.topology.mesh)
        refs = [ref for layer in self.layers for ref in boxes[layer.index].on]
        for piece, ref in enumerate(refs):
            if ref is not None:
                homes.put(piece, self.registry.number(ref))
        for pool, own in members.items():
            indices = {layer.index for layer in own}
            pieces = (s.first + n for s in stages if s.layer.index in indices for n in range(s.pieces))
            homes.deal([piece for piece in pieces if refs[piece] is None], pool.elements)
        return stages, homes.home

    def _cut(self, pool: _ElementPool, members: Sequence[MeshLayer]) -> Iterator[tuple[int, LayerBoxes]]:
        """The pieces of a pool's layers: those of the file, else the usual cuts, else the best for what is left."""
        wishes, mesh, size = self.registry.wishes, self.registry.topology.mesh, len(pool.elements)
        needed, left = 0, [layer for layer in members if self.wished[layer.index] is None]
        for layer in members:
            if boxes := self.wished[layer.index]:
                needed += (count := boxes.on.count(None))
                if count > size:
                    what = f"{layer.name} has {count} pieces to be put on {size} elements"
                    hint = "cut it into fewer, or make the group larger"
                    raise wishes.layer(layer.name).at.wrong(what, hint, pool.at)
                yield layer.index, boxes
        cuts = self._cuts(pool, left, needed, len(members)) if left else []
        for layer, cut in zip(left, cuts, strict=True):
            yield layer.index, boxes_of_cut(layer, cut, wishes.layer(layer.name), mesh)

    def _cuts(self, pool: _ElementPool, layers: Sequence[MeshLayer], needed: int, most_shared: int) -> list[Cut]:
        """Cuts of a pool's layers without wishes.

        Args:
            pool: its elements.
            layers: the layers.
            needed: elements for pieces of the pool's other layers.
            most_shared: pieces that share an element at most.
        """
        named = {self.registry.number(ref) for one in self.wished if one for ref in one.on if ref is not None}
        mesh, size = self.registry.topology.mesh, len(pool.elements)
        room = len(set(pool.elements) - named)
        usual = [self.usual.stages[layer.index] for layer in layers] if self.usual and pool.at is None else None
        if usual is not None and sum(stage.pieces for stage in usual) <= room - needed:
            return [stage.cut for stage in usual]
        for times in range(1, 2 + most_shared):
            left = (room if times == 1 else times * size) - needed
            most = min(max(left, 1), size)
            fronts = [frontier(layer, mesh, self.slots[layer.index], most) for layer in layers]
            cuts = choose(fronts, left, self.objective) if left >= len(layers) else None
            if cuts is not None:
                return cuts
        for layer in layers:
            try:
                require_fit(layer, mesh, self.slots[layer.index])
            except PlanError as error:
                where = _where(self.registry.wishes.layer(layer.name).at, error.where)
                raise PlanError(error.what, where=where, hint=error.hint) from None
        names = ", ".join(layer.name for layer in layers[:6]) + (", ..." if len(layers) > 6 else "")
        at = pool.at or self.registry.wishes.at
        raise at.wrong(f"{size} elements are too few for {names}", "make the group larger, or use more chips")


def _where(at: WishPlace, layer: str) -> str:
    """A layer in an error, with its line if it has one."""
    return f"{at.text}: {layer}" if at.path else layer


class _PieceElements:
    """The element of every piece, and what each element holds."""

    def __init__(self, stages: Sequence[MeshStage], at: Sequence[WishPlace], mesh: Mesh) -> None:
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
        if (nbytes := self._bytes(piece, element)) > self._mesh.usable:
            largest = max(here, key=self._memory.__getitem__)
            what = (
                f"the {len(here) + 1} pieces on an element, of {self._names[largest]} and {self._names[piece]} "
                f"among them, take {nbytes} bytes, it has {self._mesh.usable}"
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
            name = self._names[piece]
            order = sorted(
                elements,
                key=lambda e: (any(self._names[p] == name for p in self._pieces.get(e, ())), self._load.get(e, 0)),
            )
            fitting = (element for element in order if self._bytes(piece, element) <= self._mesh.usable)
            self.put(piece, next(fitting, order[0]))

    def _bytes(self, piece: int, element: int) -> int:
        """Bytes of an element with one more piece."""
        return shared_bytes([self._memory[one] for one in (*self._pieces.get(element, ()), piece)], self._mesh)
