"""Gives every piece an element, what exchanges much side by side; the keys, tables and trees of its messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.guests.mesh.layers import Ints, MeshNetwork
from dovetail.guests.mesh.partition import Objective, Section
from dovetail.guests.mesh.topology import Topology, Trees
from dovetail.guests.mesh.traffic import Floats, Flows, Traffic, chip_flows, link_bytes, spread, traffic_of
from dovetail.ir.graph import Graph
from dovetail.records import Record
from dovetail.target.mesh import Mesh

_SWAPS = 400
"""Exchanges of two chips that are tried, for each chip."""
TRIES = 12
"""Times this is done for a board."""


class SectionPlacement(Record, dict=True):
    """A section on elements."""

    section: Section
    topology: Topology
    traffic: Traffic
    element: Ints
    """[pieces] chip * elements per chip + number on it."""

    @cached_property
    def flows(self) -> Flows:
        """The messages between chips."""
        return chip_flows(self.traffic, self.topology, self.element)

    @cached_property
    def links(self) -> Floats:
        """[chips, directions] bytes per input on the links that leave each chip."""
        return link_bytes(self.flows, self.topology)

    @property
    def chip(self) -> Ints:
        """[pieces] the chip of each."""
        return np.asarray(self.element // self.topology.mesh.per_chip)

    @cached_property
    def tenants(self) -> dict[int, tuple[int, ...]]:
        """Element -> the pieces on it, in their order; elements in the order of their first pieces."""
        tenants: dict[int, list[int]] = {}
        for piece, element in enumerate(self.element.tolist()):
            tenants.setdefault(element, []).append(piece)
        return {element: tuple(pieces) for element, pieces in tenants.items()}

    @property
    def router(self) -> Ints:
        """[pieces] the router of each on its chip."""
        return np.asarray(self.topology.router_of[self.element % self.topology.mesh.per_chip])


def shared_bytes(memory: Sequence[int], mesh: Mesh) -> int:
    """Bytes of an element that several pieces take together: one stack, and programs that share their run-time."""
    return sum(memory) - (len(memory) - 1) * (mesh.stack + mesh.code // 2)


def place(section: Section, topology: Topology, outputs: frozenset[int], tries: int = TRIES) -> SectionPlacement:
    """Place the pieces of a section.

    Pieces are dealt to chips' worth of elements: slab by slab of each group of layers, else layer by layer. Which chip
    each is, is then improved by exchanging two, to save bytes times hops (`tries` times for a board, less often for
    more chips); of the states on the way the one with the fewest bytes on links is taken whose busiest link is no
    busier than the slowest piece. Results of the layers in `outputs` go to DRAM.

    Raises:
        PlanError: there are more pieces than elements.
    """
    if section.pieces > len(topology.elements):
        hint = "use more chips or boards"
        raise PlanError(f"{section.pieces} pieces on {len(topology.elements)} elements", where="mesh", hint=hint)
    traffic = traffic_of(section, outputs)
    chips = np.array(list(dict.fromkeys((topology.elements // topology.mesh.per_chip).tolist())), np.int64)
    cluster, rank = _clusters(section, topology)
    orders = _orders(topology, traffic, cluster, rank, chips, tries)
    options = (SectionPlacement(section, topology, traffic, _dealt(topology, cluster, rank, one)) for one in orders)
    # a link less busy than the slowest piece holds nobody up
    least = max(int(stage.costs.clocks.max()) for stage in section.stages) * topology.mesh.rates.link
    return min(options, key=lambda one: (max(one.links.max(), least), one.links.sum()))


def _clusters(section: Section, topology: Topology) -> tuple[Ints, Ints]:
    """Per piece the cluster that shares a chip, -1 for whichever comes next, and its rank in the order of placement."""
    if not section.groups:
        return np.full(section.pieces, -1), np.arange(section.pieces)
    cluster = np.empty(section.pieces, np.int64)
    base, capacity = 0, topology.capacity
    for group in section.groups:
        stages = section.stages[group.first : group.last]
        first, last = stages[0].first, stages[-1].first + stages[-1].pieces
        slab = np.concatenate([np.arange(stage.pieces) * group.slabs // stage.pieces for stage in stages])
        order = np.argsort(slab, kind="stable")
        begin = np.searchsorted(slab[order], np.arange(group.slabs))
        within = np.empty(last - first, np.int64)
        within[order] = np.arange(last - first) - begin[slab[order]]
        cluster[first:last] = base + slab * group.chips + within // capacity
        base += group.slabs * group.chips
    return cluster, np.lexsort((np.arange(section.pieces), cluster)).argsort()


def _dealt(topology: Topology, cluster: Ints, rank: Ints, chips: Ints) -> Ints:
    """[pieces] elements, clusters on chips in the order given."""
    per = topology.mesh.per_chip
    turn = np.empty(len(topology.places), np.int64)
    turn[chips] = np.arange(len(chips))
    elements = topology.elements[np.argsort(turn[topology.elements // per], kind="stable")]
    if cluster[0] < 0:
        return elements[rank]
    start = np.searchsorted(turn[elements // per], np.arange(len(chips) + 1))
    order = np.argsort(rank)
    first = np.searchsorted(cluster[order], cluster)
    return np.asarray(elements[start[cluster] + rank - first])


def _orders(topology: Topology, traffic: Traffic, cluster: Ints, rank: Ints, chips: Ints, tries: int) -> Sequence[Ints]:
    """Orders of chips worth measuring: the path over the board, and what exchanging chips made of it."""
    if len(chips) < 3:
        return [chips]
    bytes_ = _between(topology, traffic, _dealt(topology, cluster, rank, chips))[np.ix_(chips, chips)]
    hops = topology.between.hops.astype(np.float64)
    tries = max(1, min(tries, tries * 48 // len(chips)))
    return [chips, *(_exchanged(bytes_, hops, chips, seed) for seed in range(tries))]


def _exchanged(bytes_: NDArray[np.float64], hops: NDArray[np.float64], chips: Ints, seed: int) -> Ints:
    """An order found by simulated annealing."""
    generator = np.random.default_rng(seed)
    where = chips.copy()
    temperature = 0.004 * float((bytes_ * hops[np.ix_(where, where)]).sum())
    swaps = _SWAPS * len(chips)
    for _ in range(swaps):
        a, b = generator.integers(0, len(chips), 2)
        farther = hops[where[b]][where] - hops[where[a]][where]
        farther[a] = farther[b] = 0.0
        change = float((bytes_[a] - bytes_[b]) @ farther)  # what exchanging the two adds to bytes times hops
        if change < 0 or generator.random() < np.exp(-change / max(temperature, 1e-9)):
            where[a], where[b] = where[b], where[a]
        temperature *= 1 - 8 / swaps
    return where


def _between(topology: Topology, traffic: Traffic, element: Ints) -> NDArray[np.float64]:
    """[chips, chips] bytes, both ways together, each destination of a message counted."""
    flows, chips = chip_flows(traffic, topology, element), len(topology.places)
    flow, aim = spread(flows.first, flows.group)
    total = np.zeros((chips, chips))
    np.add.at(total, (flows.chip[flow], flows.aims[aim] % chips), flows.size[flow])
    total += total.T
    np.fill_diagonal(total, 0)
    return total


class Tables(Record):
    """Routing tables. An entry takes the messages whose key, less its lowest bits, is the entry's."""

    key: Ints
    """[pieces] key of each piece's message."""
    chip: Ints
    """[entries], sorted."""
    first: Ints
    """[entries] the lowest key it takes."""
    keys: Ints
    """[entries] how many keys it takes: a power of two that divides `first`."""
    ways: Ints
    """[entries] bit d is set if the message goes on in direction d of the mesh."""
    local: Ints
    """[entries] the set whose members on this chip are given the message, -1 for none."""

    def largest(self) -> int:
        """Entries of the chip that has most."""
        return int(np.bincount(self.chip).max(initial=0)) if len(self.chip) else 0


def tables_of(placed: SectionPlacement) -> Tables:
    """Number the messages and make the tables.

    Messages of one chip to one set have keys of their own, a power of two of them, so that one entry on each chip they
    visit takes them all.

    Raises:
        PlanError: a chip needs more entries than it has.
    """
    topology, traffic, flows = placed.topology, placed.traffic, placed.flows
    chips = len(topology.places)
    code = traffic.group * chips + placed.chip
    flow = np.searchsorted(flows.group * chips + flows.chip, code)
    count = np.bincount(flow, minlength=len(flows.size))
    room = 1 << np.ceil(np.log2(np.maximum(count, 1))).astype(np.int64)
    order = np.lexsort((flows.chip, flows.group, -room))
    base = np.empty(len(order), np.int64)
    base[order] = np.cumsum(room[order]) - room[order]
    rank = np.argsort(flow, kind="stable")
    key = np.empty(len(flow), np.int64)
    key[rank] = np.arange(len(flow)) - (np.cumsum(count) - count)[flow[rank]] + base[flow[rank]]
    which, where, ways, local = _visits(flows, chips)
    entries = np.lexsort((base[which], where))
    tables = Tables(key, *(column[entries] for column in (where, base[which], room[which], ways, local)))
    if tables.largest() > topology.mesh.route_entries:
        chip = int(np.bincount(tables.chip).argmax())
        what = f"chip {topology.places[chip]} needs {tables.largest()} routing entries of {topology.mesh.route_entries}"
        raise PlanError(what, where="mesh", hint="use fewer elements (--chips), or --objective latency")
    return tables


def _visits(flows: Flows, chips: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Flow, chip, directions and local set of every chip a flow is at."""
    flow, aim = spread(flows.first, flows.group)
    at = np.concatenate((flows.visit_flow * chips + flows.before, flow * chips + flows.aims[aim] % chips))
    out = np.concatenate((1 << flows.way, np.zeros(len(flow), np.int64)))
    code, place = np.unique(at, return_inverse=True)
    ways = np.zeros(len(code), np.int64)
    np.bitwise_or.at(ways, place.reshape(-1), out)
    here = np.isin(flows.group[code // chips] * chips + code % chips, flows.aims)
    return code // chips, code % chips, ways, np.where(here, flows.group[code // chips], -1)


class MeshMapping(Record, dict=True):
    """A network on a mesh."""

    network: MeshNetwork
    objective: Objective
    topology: Topology
    placed: tuple[SectionPlacement, ...]
    """Per section."""

    @property
    def graph(self) -> Graph:
        """The integer graph."""
        return self.network.graph

    @property
    def mesh(self) -> Mesh:
        """The description of the mesh."""
        return self.topology.mesh

    @property
    def sections(self) -> tuple[Section, ...]:
        """Its sections."""
        return tuple(one.section for one in self.placed)

    @cached_property
    def tables(self) -> tuple[Tables, ...]:
        """Per section; raises PlanError where a chip needs more entries than it has."""
        return tuple(map(tables_of, self.placed))

    @property
    def resident(self) -> bool:
        """True where the whole network is on the mesh at once."""
        return len(self.placed) == 1

    @property
    def whole(self) -> tuple[SectionPlacement, Tables]:
        """The one section of a resident network, placed and routed; raises ValueError where there are several."""
        if not self.resident:
            raise ValueError("the network is not resident as a whole")
        return self.placed[0], self.tables[0]


@dataclass(slots=True)
class TreeSegment:
    """The part of a multicast tree on one chip: links in an order in which the one before each comes first."""

    link: list[int] = field(default_factory=list)
    """Numbers of links, see `Links`; that between chips which leads here is the first."""
    before: list[int] = field(default_factory=list)
    """Place in this segment of the link before, -1 for where the message enters."""
    at: dict[int, int] = field(default_factory=dict)
    """Router -> place of the link that leads there, -1 where the message enters."""
    onward: list[tuple[int, int]] = field(default_factory=list)
    """Segments on other chips, and the place here their links begin at."""
    members: list[int] = field(default_factory=list)
    """Readers here."""
    leaves: list[int] = field(default_factory=list)
    """Place here of the link that leads to each reader."""
    stored: int = -1
    """Place of the DRAM the message is stored in, -1 for none."""

    def add(self, link: int, before: int) -> int:
        """Add a link behind the one at a place; returns its own."""
        self.link.append(link)
        self.before.append(before)
        return len(self.link) - 1


class Links(Record):
    """Numbers of everything that carries bytes: links between chips, links on chips, DRAM."""

    topology: Topology

    @property
    def noc(self) -> int:
        """The first link on a chip."""
        return len(self.topology.places) * len(self.topology.mesh.directions)

    @property
    def dram(self) -> int:
        """The DRAM of the first chip."""
        return self.noc + len(self.topology.places) * self.topology.routers * 4

    @property
    def count(self) -> int:
        """Number of links."""
        return self.dram + len(self.topology.places)

    def rates(self) -> NDArray[np.float64]:
        """Bytes per clock of each."""
        rates = self.topology.mesh.rates
        sizes = (self.noc, self.dram - self.noc, self.count - self.dram)
        return np.repeat([rates.link, rates.noc, rates.dram], sizes).astype(np.float64)

    def between(self, chip: int, to: int) -> int:
        """The link from a chip to its neighbour."""
        return chip * len(self.topology.mesh.directions) + self.topology.direction_between[chip, to]

    def inside(self, chip: int, router: int, to: int) -> int:
        """The link from a router to the one beside it."""
        step = to - router
        way = 0 if step == 1 else 2 if step == -1 else 1 if step > 0 else 3
        return self.noc + (chip * self.topology.routers + router) * 4 + way

    def name(self, link: int) -> str:
        """Words for a link."""
        places = self.topology.places
        if link >= self.dram:
            return f"DRAM of chip {places[link - self.dram]}"
        if link >= self.noc:
            chip, router = divmod((link - self.noc) // 4, self.topology.routers)
            return f"a link of router {router} on chip {places[chip]}"
        chip, way = divmod(link, len(self.topology.mesh.directions))
        return f"the link of chip {places[chip]} towards {self.topology.mesh.directions[way]}"


class Router:
    """Makes multicast trees: lists of segments, the one where the message begins first."""

    def __init__(self, placed: SectionPlacement) -> None:
        self._topology, self.links = placed.topology, Links(placed.topology)
        self._home = list(zip(placed.chip.tolist(), placed.router.tolist(), strict=True))

    def to_pieces(self, chip: int, router: int, pieces: Sequence[int], store: bool) -> list[TreeSegment]:
        """The tree from a router to pieces, and to the chip's DRAM if the message is stored."""
        topology = self._topology
        aims: dict[int, list[int]] = {chip: [topology.dram] * store}
        for other, at in map(self._home.__getitem__, pieces):
            aims.setdefault(other, []).append(at)
        if len(aims) > 1:
            aims[chip].append(topology.gate)
        first = self._segment(chip, router, aims.pop(chip))
        if store:
            first.stored = first.add(self.links.dram + chip, first.at[topology.dram])
        segments, number = [first], {chip: 0}
        for before, to in _steps(topology.between, chip, aims):
            segments[number[before]].onward.append((len(segments), 0 if number[before] else first.at[topology.gate]))
            number[to] = len(segments)
            segments.append(self._segment(to, topology.gate, aims.get(to, ()), self.links.between(before, to)))
        for piece in pieces:
            self._end(segments[number[self._home[piece][0]]], piece)
        return segments

    def from_dram(self, chip: int, pieces: Sequence[int]) -> list[TreeSegment]:
        """The tree from the DRAM of a chip to pieces on it."""
        aims = [self._home[piece][1] for piece in pieces]
        segment = self._segment(chip, self._topology.dram, aims, self.links.dram + chip)
        for piece in pieces:
            self._end(segment, piece)
        return [segment]

    def _segment(self, chip: int, source: int, aims: Sequence[int], entry: int = -1) -> TreeSegment:
        """The links from a router to others of its chip, behind the link by which the message enters, if it does."""
        segment = TreeSegment()
        segment.at[source] = segment.add(entry, -1) if entry >= 0 else -1
        for before, to in _steps(self._topology.routes(chip), source, aims):
            segment.at[to] = segment.add(self.links.inside(chip, before, to), segment.at[before])
        return segment

    def _end(self, segment: TreeSegment, piece: int) -> None:
        segment.members.append(piece)
        segment.leaves.append(segment.at[self._home[piece][1]])


def _steps(trees: Trees, source: int, aims: Iterable[int]) -> list[tuple[int, int]]:
    """The links to some routers (or chips), nearest first: the one before, and where it leads."""
    parent, hops = trees.parent[source], trees.hops[source]
    reached = {source}
    for aim in aims:
        while aim not in reached:
            reached.add(aim)
            aim = int(parent[aim])
    return [(int(parent[to]), to) for to in sorted(reached - {source}, key=lambda one: (hops[one], one))]
