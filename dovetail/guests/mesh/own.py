"""A mapping of the user's own: a placement of which some variables are fixed, cuts or elements. The rest is chosen, and
every piece is checked.

Layers share a pool of elements: those of one group have the group's, all others the elements that no group or piece
has. In a pool every piece has an element of its own where there are enough: the one it would have without any wish,
else the next that is free, first on the same chip. Otherwise pieces share elements, as few as that takes, those with
most clocks first, each on the element with the fewest so far that has the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.choice import Objective, choose
from dovetail.guests.mesh.cuts import Cut, frontier, require_fit
from dovetail.guests.mesh.layers import Ints, MeshLayer, layers_of, output_layers
from dovetail.guests.mesh.mapping import MeshMapping, map_network, planned, routed
from dovetail.guests.mesh.mapping_file import ElementPool, MappingWishes, WishPlace, read_wishes
from dovetail.guests.mesh.own_boxes import LayerBoxes, boxes_of_cut, boxes_wished
from dovetail.guests.mesh.own_routes import with_routes
from dovetail.guests.mesh.partition import MeshPartition, MeshStage, Section, boxed_stage, resident, slot_choices
from dovetail.guests.mesh.parts import check_parts, wishes_of_parts
from dovetail.guests.mesh.placement import SectionPlacement, place, shared_bytes
from dovetail.guests.mesh.topology import Topology
from dovetail.guests.mesh.traffic import traffic_of
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
    wishes = read_wishes(path, graph.name, layers, topology, wishes_of_parts(parts, layers))
    if not (wishes.layers or len(wishes.pools) > 1 or wishes.routes):
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
    wished = [boxes_wished(wishes.layer(layer.name), layer, topology.mesh) for layer in layers]
    is_open = any(boxes is None and wishes.pool(x.name).at is None for x, boxes in zip(layers, wished, strict=True))
    usual = resident(layers, topology, objective) if is_open and len(topology.places) > 1 else None
    choices = [[stage.slots for stage in usual.stages]] if usual else []
    choices += slot_choices(layers, objective)
    outputs = output_layers(graph, layers, regions)
    for turn, slots in enumerate(choices):
        held = [wishes.layer(layer.name).slots or own for layer, own in zip(layers, slots, strict=True)]
        cutting = _Cutting(layers, wished, held, wishes, topology, objective, None if turn else usual)
        try:
            section = Section(tuple(cutting.stages()), usual.groups if usual and turn == 0 else ())
            element = cutting.elements(section, frozenset(outputs.values()))
            break
        except PlanError:
            if turn == len(choices) - 1:
                raise
    section = replace(section, groups=())
    parts = planned(MeshPartition(graph, layers, outputs, topology.mesh, objective, (section,)))
    traffic = traffic_of(parts.sections[0], frozenset(outputs.values()))
    return routed(parts, SectionPlacement(parts.sections[0], with_routes(topology, wishes.routes), traffic, element))


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
    """Cuts layers into pieces and gives each an element, for certain slots."""

    layers: Sequence[MeshLayer]
    wished: Sequence[LayerBoxes | None]
    """The pieces that the file gives, per layer."""
    slots: Sequence[tuple[int, ...]]
    wishes: MappingWishes
    topology: Topology
    objective: Objective
    usual: Section | None
    """The network without wishes."""

    def _pools(self) -> list[tuple[ElementPool, list[MeshLayer]]]:
        """Pools with their layers."""
        members: dict[str | None, list[MeshLayer]] = {}
        for layer in self.layers:
            members.setdefault(self.wishes.layer(layer.name).group, []).append(layer)
        return [(self.wishes.pools[group], own) for group, own in members.items()]

    @cached_property
    def boxes(self) -> list[LayerBoxes]:
        """The pieces of every layer; raises PlanError where a pool has too few elements."""
        boxes = {index: one for pool, own in self._pools() for index, one in self._cut(pool, own)}
        return [boxes[layer.index] for layer in self.layers]

    def stages(self) -> Iterator[MeshStage]:
        """The layers in their pieces; raises PlanError where one does not fit."""
        first = 0
        for layer, one, held in zip(self.layers, self.boxes, self.slots, strict=True):
            try:
                yield (stage := boxed_stage(layer, one.cut, one.boxes, held, self.topology.mesh, first, one.free))
            except PlanError as error:
                raise PlanError(error.what, where=_where(one.pieces[0].at, layer.name), hint=error.hint) from None
            first += stage.pieces

    def elements(self, section: Section, outputs: frozenset[int]) -> Ints:
        """The element of every piece; raises PlanError where pieces do not fit together."""
        wished = [piece for one in self.boxes for piece in one.pieces]
        fixed = [piece.on for piece in wished]
        homes = _PieceElements(section.stages, [piece.at for piece in wished], self.topology.mesh)
        for piece, element in enumerate(fixed):
            if element is not None:
                homes.put(piece, element)
        usual = _usual_elements(section, self.topology, outputs) if None in fixed else []
        for pool, own in self._pools():
            stages = (section.stages[layer.index] for layer in own)
            pieces = (stage.first + number for stage in stages for number in range(stage.pieces))
            homes.deal([piece for piece in pieces if fixed[piece] is None], pool.elements, usual)
        return np.array(homes.home, np.int64)

    def _cut(self, pool: ElementPool, members: Sequence[MeshLayer]) -> Iterator[tuple[int, LayerBoxes]]:
        """The pieces of a pool's layers: those of the file, else the usual cuts, else the best for what is left."""
        wishes, mesh, size = self.wishes, self.topology.mesh, len(pool.elements)
        needed, left = 0, [layer for layer in members if self.wished[layer.index] is None]
        for layer in members:
            if boxes := self.wished[layer.index]:
                needed += (count := sum(piece.on is None for piece in boxes.pieces))
                if count > size:
                    what = f"{layer.name} has {count} pieces to be put on {size} elements"
                    hint = "cut it into fewer, or make the group larger"
                    raise wishes.layer(layer.name).at.wrong(what, hint, pool.at)
                yield layer.index, boxes
        cuts = self._cuts(pool, left, needed, len(members)) if left else []
        for layer, cut in zip(left, cuts, strict=True):
            yield layer.index, boxes_of_cut(layer, cut, wishes.layer(layer.name), mesh)

    def _cuts(self, pool: ElementPool, layers: Sequence[MeshLayer], needed: int, most_shared: int) -> list[Cut]:
        """Cuts of a pool's layers without wishes.

        Args:
            pool: its elements.
            layers: the layers.
            needed: elements for pieces of the pool's other layers.
            most_shared: pieces that share an element at most.
        """
        named = {piece.on for one in self.wished if one for piece in one.pieces}
        mesh, size = self.topology.mesh, len(pool.elements)
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
                where = _where(self.wishes.layer(layer.name).at, error.where)
                raise PlanError(error.what, where=where, hint=error.hint) from None
        names = ", ".join(layer.name for layer in layers[:6]) + (", ..." if len(layers) > 6 else "")
        at = pool.at or self.wishes.at
        raise at.wrong(f"{size} elements are too few for {names}", "make the group larger, or use more chips")


def _where(at: WishPlace, layer: str) -> str:
    """A layer in an error, with its line if it has one."""
    return f"{at.text}: {layer}" if at.path else layer


class _PieceElements:
    """The element of every piece, and what each element holds."""

    def __init__(self, stages: Sequence[MeshStage], at: Sequence[WishPlace], mesh: Mesh) -> None:
        self.home = [-1] * len(at)
        """[pieces] its element."""
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

    def deal(self, pieces: Sequence[int], elements: Sequence[int], usual: Sequence[int]) -> None:
        """Put pieces on the elements of a pool, on their `usual` ones if they can; raises PlanError where one fits none
        of them."""
        empty = dict.fromkeys(element for element in elements if element not in self._pieces)
        if len(pieces) <= len(empty):
            per, left = self._mesh.per_chip, list[int]()
            for piece in pieces:
                if usual and usual[piece] in empty:
                    del empty[usual[piece]]
                    self.put(piece, usual[piece])
                else:
                    left.append(piece)
            for piece in left:
                near = (one for one in empty if usual and one // per == usual[piece] // per)
                element = next(near, next(iter(empty)))
                del empty[element]
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
