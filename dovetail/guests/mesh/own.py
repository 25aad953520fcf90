"""A mapping of the user's own: a placement of which some variables are fixed, cuts or elements. The rest is chosen, and
every piece is checked.

Layers share a pool of elements: those of one group have the group's, all others the elements that no group or piece
has. In a pool every piece has an element of its own where there are enough: the one it would have without any wish,
else the next that is free, first on the same chip. Otherwise pieces share elements, as few as that takes, those with
most clocks first, each on the element with the fewest so far that has the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.cuts import Cut, frontier, require_fit
from dovetail.guests.mesh.layers import Ints, MeshLayer, MeshNetwork, network_of
from dovetail.guests.mesh.mapping import checked, map_network, planned
from dovetail.guests.mesh.mapping_file import (
    ElementPool,
    LayerBoxes,
    MappingWishes,
    RouteWish,
    WishPlace,
    boxes_of_cut,
    read_wishes,
)
from dovetail.guests.mesh.partition import MeshStage, Objective, Section, boxed_stage, choose, resident, slot_choices
from dovetail.guests.mesh.parts import check_parts, wishes_of_parts
from dovetail.guests.mesh.placement import MeshMapping, SectionPlacement, place, shared_bytes
from dovetail.guests.mesh.topology import FAR, Topology, Trees, build_topology, routers_beside
from dovetail.guests.mesh.traffic import traffic_of
from dovetail.ir.graph import Graph
from dovetail.records import Record
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
    """A network mapped by a user's wishes: a mapping file (docs/mesh.md), if there is one, and the computation of
    elements by their names (`parts.py`); `objective` decides where the file does not.

    Raises:
        ModelError: a part computes something else than the network.
        PlanError: the file is damaged, names what is not there, or contradicts itself (with the lines); a piece, or
            those on one element, do not fit.
    """
    network = network_of(graph, regions)
    wishes = read_wishes(path, graph.name, network.layers, topology, wishes_of_parts(parts, network.layers))
    if wishes.is_empty:
        return map_network(graph, regions, topology, Objective(wishes.objective or objective), whole=True)
    mapped = complete(wishes, network, topology, objective)
    check_parts(mapped, parts)
    return mapped


def complete(wishes: MappingWishes, network: MeshNetwork, topology: Topology, objective: Objective) -> MeshMapping:
    """The mapping with some wishes; arguments and errors as of `read_mapping`."""
    layers, results = network.layers, network.results
    objective = Objective(wishes.objective or objective)
    is_open = any(one.boxes is None and wishes.pools[one.group].at is None for one in wishes.layers)
    usual = resident(layers, topology, objective) if is_open and len(topology.places) > 1 else None
    choices = [[stage.slots for stage in usual.stages]] if usual else []
    choices += slot_choices(layers, objective)
    for turn, slots in enumerate(choices):
        held = [wish.slots or own for wish, own in zip(wishes.layers, slots, strict=True)]
        cutting = _Cutting(layers, held, wishes, topology, objective, None if turn else usual)
        try:
            section = Section(tuple(cutting.stages()), usual.groups if usual and turn == 0 else ())
            element = cutting.elements(section, results)
            break
        except PlanError:
            if turn == len(choices) - 1:
                raise
    section, topology = planned(replace(section, groups=()), topology.mesh), with_routes(topology, wishes.routes)
    placed = SectionPlacement(section, topology, traffic_of(section, results), element)
    return checked(MeshMapping(network, objective, topology, (placed,)))


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


class _Cutting(Record, dict=True):
    """Cuts layers into pieces and gives each an element, for certain slots."""

    layers: Sequence[MeshLayer]
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
            members.setdefault(self.wishes.layers[layer.index].group, []).append(layer)
        return [(self.wishes.pools[group], own) for group, own in members.items()]

    @cached_property
    def boxes(self) -> list[LayerBoxes]:
        """The pieces of every layer: those of the file, else the usual cuts, else the best for what is left of a pool;
        raises PlanError where a pool has too few elements."""
        boxes = [wish.boxes for wish in self.wishes.layers]
        for pool, own in self._pools():
            needed = sum(self._needed(pool, layer) for layer in own)
            left = [layer for layer in own if boxes[layer.index] is None]
            for layer, cut in zip(left, self._cuts(pool, left, needed, len(own)) if left else (), strict=True):
                wish = self.wishes.layers[layer.index]
                boxes[layer.index] = boxes_of_cut(layer, cut, wish.pieces, wish.at, self.topology.mesh)
        return [one for one in boxes if one is not None]

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

    def _needed(self, pool: ElementPool, layer: MeshLayer) -> int:
        """Elements of a pool for the pieces that the file gives of a layer, but for those it puts elsewhere."""
        wish, size = self.wishes.layers[layer.index], len(pool.elements)
        count = sum(piece.on is None for piece in wish.pieces)
        if count > size:
            what = f"{layer.name} has {count} pieces to be put on {size} elements"
            raise wish.at.wrong(what, "cut it into fewer, or make the group larger", pool.at)
        return count

    def _cuts(self, pool: ElementPool, layers: Sequence[MeshLayer], needed: int, most_shared: int) -> list[Cut]:
        """Cuts of a pool's layers without wishes, where the pool's other layers need so many elements; at most so many
        pieces share one."""
        named = {piece.on for wish in self.wishes.layers for piece in wish.pieces}
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
                where = _where(self.wishes.layers[layer.index].at, error.where)
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


def with_routes(topology: Topology, routes: Sequence[RouteWish]) -> Topology:
    """The topology with some routes as a file gives them; every other stays.

    Messages to several readers share their way, so that from one source each place is reached from one place only; and
    no ring of links may wait for one another.

    Raises:
        PlanError: a route takes a link that is not there or dead; two routes contradict each other; links wait for one
            another in a ring.
    """
    between = [route for route in routes if route.chip is None]
    if between:
        ways = [(tuple(topology.chips[place] for place in route.way), route) for route in between]
        topology = replace(topology, between=_changed(topology.between, topology.neighbours, ways))
    width = topology.mesh.grid.width
    for chip in dict.fromkeys(route.chip for route in routes if route.chip is not None):
        number = topology.chips[chip]
        ways = [(tuple(y * width + x for x, y in one.way), one) for one in routes if one.chip == chip]
        trees = _changed(topology.routes(number), routers_beside(topology.mesh, chip), ways)
        topology = replace(topology, detours={**topology.detours, number: trees})
    return topology


def routes_of(placed: SectionPlacement) -> list[str]:
    """The ways messages take between chips, and those on chips that are not the mesh's own choice, as YAML."""
    topology, flows = placed.topology, placed.flows
    visits = np.unique(np.column_stack((flows.chip[flows.visit_flow], flows.visit_chip)), axis=0)
    routes = [str([list(topology.places[chip]) for chip in way]) for way in _ways(topology.between, visits)]
    width, usual = topology.mesh.grid.width, build_topology(topology.mesh)
    for chip in sorted(topology.detours):
        changed = np.argwhere(topology.routes(chip).parent != usual.routes(chip).parent)
        place = list(topology.places[chip])
        for way in _ways(topology.routes(chip), changed):
            routes.append(f"{{chip: {place}, routers: {[[at % width, at // width] for at in way]}}}")
    return routes


def _ways(trees: Trees, pairs: Ints) -> list[list[int]]:
    """The ways between pairs of source and destination; none that is the beginning of another."""
    wanted = {(int(source), int(last)) for source, last in pairs}
    inner = {(source, int(trees.parent[source, last])) for source, last in wanted}
    ways = []
    for source, last in sorted(wanted - inner):
        way = [last]
        while way[-1] != source:
            way.append(int(trees.parent[source, way[-1]]))
        ways.append(way[::-1])
    return ways


_Way = tuple[tuple[int, ...], RouteWish]


def _changed(trees: Trees, neighbours: Ints, ways: Sequence[_Way]) -> Trees:
    parent = trees.parent.copy()
    owners: dict[tuple[int, int], RouteWish] = {}
    for way, wish in ways:
        for before, here in pairwise(way):
            places = dict(zip(way, wish.way, strict=True))
            if here not in neighbours[before]:
                what = f"there is no working link from {list(places[before])} to {list(places[here])}"
                raise wish.at.wrong(what, "a route goes from neighbour to neighbour")
            other = owners.setdefault((way[0], here), wish)
            if other is not wish and parent[way[0], here] != before:
                what = f"from {list(wish.way[0])}, {list(places[here])} is reached by two ways"
                raise wish.at.wrong(what, "messages to several readers share their way: give one", other.at)
            parent[way[0], here] = before
    changed = Trees(parent)
    _check_rings(changed, [(way, wish) for way, wish in ways])
    return changed


def _check_rings(trees: Trees, ways: Sequence[_Way]) -> None:
    """Refuse routes by which some links wait for one another in a ring: link (a, b), then (b, c) on a message's way."""
    count = len(trees.parent)
    source, last = np.nonzero((trees.hops >= 2) & (trees.hops < FAR))
    middle = trees.parent[source, last].astype(np.int64)
    first = trees.parent[source, middle]
    pairs = np.unique(np.column_stack((first * count + middle, middle * count + last)), axis=0)
    left = pairs
    while len(left):  # take away links that wait for none, or for which none waits
        kept = left[np.isin(left[:, 0], left[:, 1]) & np.isin(left[:, 1], left[:, 0])]
        if len(kept) == len(left):
            break
        left = kept
    if not len(left):
        return
    ring = set(map(tuple, left.tolist()))
    blamed = []
    for way, wish in ways:
        links = [a * count + b for a, b in pairwise(way)]
        if any(pair in ring for pair in pairwise(links)):
            blamed.append(wish)
    wish = blamed[-1] if blamed else ways[-1][1]
    other = blamed[0].at if len(blamed) > 1 else None
    what = "with this route links wait for one another in a ring, and messages could stop for ever"
    raise wish.at.wrong(
        what, "take routes that turn as the others do: along X first, between chips falling, then rising", other
    )
