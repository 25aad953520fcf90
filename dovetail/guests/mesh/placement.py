"""Gives every piece an element, what exchanges much side by side; the keys, tables and trees of its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.guests.mesh.layers import Ints
from dovetail.guests.mesh.partition import Section
from dovetail.guests.mesh.topology import Topology, Trees
from dovetail.guests.mesh.traffic import Loads, Traffic, chip_flows, loads_of, spread, traffic_of
from dovetail.target.mesh import Mesh

_SWAPS = 400
"""Exchanges of two chips that are tried, for each chip."""
TRIES = 12
"""Times this is done for a board."""


@dataclass(frozen=True)
class SectionPlacement:
    """A section on elements."""

    section: Section
    topology: Topology
    traffic: Traffic
    element: Ints
    """[pieces] chip * elements per chip + number on it."""
    loads: Loads

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
    each is, is then improved by exchanging two, to save bytes times hops; of the states on the way the one with
    the least time on the busiest link is taken.

    Args:
        section: what is placed, everything resident.
        topology: where.
        outputs: layers whose results are wanted in DRAM.
        tries: how often, for a board; less often for more chips.

    Raises:
        PlanError: there are more pieces than elements.
    """
    if section.pieces > len(topology.elements):
        hint = "use more chips or boards"
        raise PlanError(f"{section.pieces} pieces on {len(topology.elements)} elements", where="mesh", hint=hint)
    traffic = traffic_of(section, outputs)
    chips = np.array(list(dict.fromkeys((topology.elements // topology.mesh.per_chip).tolist())), np.int64)
    cluster, rank = _clusters(section, topology)

    def placed(order: Ints) -> SectionPlacement:
        element = _dealt(topology, cluster, rank, order)
        return SectionPlacement(section, topology, traffic, element, loads_of(traffic, topology, element))

    options = map(placed, _orders(topology, traffic, cluster, rank, chips, tries))
    return min(options, key=lambda one: (one.loads.busiest_link, one.loads.traffic))


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
    return [chips, *(order for seed in range(tries) for order in _exchanged(bytes_, hops, chips, seed))]


def _exchanged(bytes_: NDArray[np.float64], hops: NDArray[np.float64], chips: Ints, seed: int) -> list[Ints]:
    """Orders found by simulated annealing: the last, and one on the way."""
    orders = []
    generator = np.random.default_rng(seed)
    where = chips.copy()
    temperature = 0.004 * float((bytes_ * hops[np.ix_(where, where)]).sum())
    swaps = _SWAPS * len(chips)
    for step in range(swaps):
        a, b = generator.integers(0, len(chips), 2)
        farther = hops[where[b]][where] - hops[where[a]][where]
        farther[a] = farther[b] = 0.0
        change = float((bytes_[a] - bytes_[b]) @ farther)  # what exchanging the two adds to bytes times hops
        if change < 0 or generator.random() < np.exp(-change / max(temperature, 1e-9)):
            where[a], where[b] = where[b], where[a]
        temperature *= 1 - 8 / swaps
        if step == swaps * 3 // 4:
            orders.append(where.copy())
    return [*orders, where]


def _between(topology: Topology, traffic: Traffic, element: Ints) -> NDArray[np.float64]:
    """[chips, chips] bytes, both ways together, each destination of a message counted."""
    flows, aim_set, aim_chip = chip_flows(traffic, topology, element)
    flow, aim = spread(np.searchsorted(aim_set, np.arange(traffic.sets + 1)), flows.group)
    total = np.zeros((len(topology.places),) * 2)
    np.add.at(total, (flows.chip[flow], aim_chip[aim]), flows.size[flow])
    total += total.T
    np.fill_diagonal(total, 0)
    return total


@dataclass(frozen=True)
class Tables:
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
    visit takes them all. Two entries that do the same and whose keys are two halves of a whole become one.

    Raises:
        PlanError: a chip needs more entries than it has.
    """
    topology, traffic, flows = placed.topology, placed.traffic, placed.loads.flows
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
    which, where, ways, local = _visits(placed)
    entries = _merged(where, base[which], room[which], ways, local)
    tables = Tables(key, *entries)
    if tables.largest() > topology.mesh.route_entries:
        chip = int(np.bincount(tables.chip).argmax())
        what = f"chip {topology.places[chip]} needs {tables.largest()} routing entries of {topology.mesh.route_entries}"
        raise PlanError(what, where="mesh", hint="use fewer elements (--chips), or --objective latency")
    return tables


def _visits(placed: SectionPlacement) -> tuple[Ints, Ints, Ints, Ints]:
    """Flow, chip, directions and local set of every chip a flow is at."""
    topology, traffic, flows = placed.topology, placed.traffic, placed.loads.flows
    chips = len(topology.places)
    before = topology.between.parent[flows.chip[flows.visit_flow], flows.visit_chip].astype(np.int64)
    way = np.argmax(topology.neighbours[before] == flows.visit_chip[:, None], axis=1)
    members = np.unique(traffic.set_of_members() * chips + placed.chip[traffic.members])
    flow, entry = spread(np.searchsorted(members // chips, np.arange(traffic.sets + 1)), flows.group)
    at = np.concatenate((flows.visit_flow * chips + before, flow * chips + members[entry] % chips))
    out = np.concatenate((1 << way, np.zeros(len(flow), np.int64)))
    code, place = np.unique(at, return_inverse=True)
    ways = np.zeros(len(code), np.int64)
    np.bitwise_or.at(ways, place.reshape(-1), out)
    here = np.isin(flows.group[code // chips] * chips + code % chips, members)
    return code // chips, code % chips, ways, np.where(here, flows.group[code // chips], -1)


def _merged(chip: Ints, first: Ints, keys: Ints, ways: Ints, local: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The entries, halves of a whole joined until there are none."""
    order = np.lexsort((first, chip))
    rows = [array[order] for array in (chip, first, keys, ways, local)]
    while True:
        chip, first, keys, ways, local = rows
        same = (chip[:-1] == chip[1:]) & (keys[:-1] == keys[1:]) & (ways[:-1] == ways[1:]) & (local[:-1] == local[1:])
        low = np.nonzero(same & (first[1:] == first[:-1] + keys[:-1]) & (first[:-1] % (2 * keys[:-1]) == 0))[0]
        if not len(low):
            return chip, first, keys, ways, local
        keys = keys.copy()
        keys[low] *= 2
        kept = np.ones(len(chip), bool)
        kept[low + 1] = False
        rows = [array[kept] for array in (chip, first, keys, ways, local)]


@dataclass(slots=True)
class MulticastTree:
    """A multicast tree: links in an order in which the one before each comes first."""

    link: list[int] = field(default_factory=list)
    """Numbers of links; see `Links`."""
    before: list[int] = field(default_factory=list)
    """Place in this tree of the link before, -1 for the first."""
    leaf: dict[tuple[int, int], int] = field(default_factory=dict)
    """(chip, router) -> place of the link that leads there, -1 for the source's own."""


@dataclass(frozen=True)
class Links:
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
    """Makes trees; sources on one router that send to one set share theirs."""

    def __init__(self, placed: SectionPlacement) -> None:
        self._topology = placed.topology
        self.links = Links(placed.topology)
        traffic = placed.traffic
        count = placed.topology.routers
        code = placed.chip[traffic.members] * count + placed.router[traffic.members]
        self._aims: list[list[int]] = [
            np.unique(code[a:b]).tolist() for a, b in zip(traffic.start[:-1], traffic.start[1:], strict=True)
        ]
        self._trees: dict[tuple[int, int, int, bool], MulticastTree] = {}

    def to_set(self, chip: int, router: int, group: int, store: bool) -> MulticastTree:
        """The tree from a router to the members of a set, and to the chip's DRAM if the message is stored."""
        key = (chip, router, group, store)
        if key not in self._trees:
            self._trees[key] = self._tree(chip, router, self._aims[group], store)
        return self._trees[key]

    def from_dram(self, chip: int, aims: list[int]) -> MulticastTree:
        """The tree from the DRAM of a chip to routers on it, given as chip * routers + router."""
        tree = MulticastTree([self.links.dram + chip], [-1])
        self._inside(tree, chip, self._topology.dram, [aim % self._topology.routers for aim in aims], 0)
        return tree

    def _tree(self, chip: int, router: int, aims: list[int], store: bool) -> MulticastTree:
        topology, tree = self._topology, MulticastTree()
        by_chip: dict[int, list[int]] = {}
        for aim in aims:
            by_chip.setdefault(aim // topology.routers, []).append(aim % topology.routers)
        ends = by_chip.pop(chip, []) + [topology.gate] * bool(by_chip) + [topology.dram] * store
        self._inside(tree, chip, router, ends, -1)
        if store:
            tree.link.append(self.links.dram + chip)
            tree.before.append(tree.leaf[chip, topology.dram])
        if by_chip:
            gate = tree.leaf[chip, topology.gate]
            arrived = _grow(tree, topology.between, chip, list(by_chip), gate, self.links.between)
            for other, routers in by_chip.items():
                self._inside(tree, other, topology.gate, routers, arrived[other])
        return tree

    def _inside(self, tree: MulticastTree, chip: int, source: int, routers: list[int], before: int) -> None:
        """Add the links from a router to others of its chip."""
        links = partial(self.links.inside, chip)
        arrived = _grow(tree, self._topology.routes(chip), source, routers, before, links)
        tree.leaf.update(((chip, router), arrived[router]) for router in routers)


def _grow(
    tree: MulticastTree, trees: Trees, source: int, aims: list[int], before: int, link: Callable[[int, int], int]
) -> dict[int, int]:
    """Add the links to some routers (or chips), nearest first; returns the place of the link that leads to each."""
    parent, hops = trees.parent[source], trees.hops[source]
    reached = {source}
    for aim in aims:
        while aim not in reached:
            reached.add(aim)
            aim = int(parent[aim])
    arrived = {source: before}
    for to in sorted(reached - {source}, key=lambda router: (hops[router], router)):
        previous = int(parent[to])
        arrived[to] = len(tree.link)
        tree.link.append(link(previous, to))
        tree.before.append(arrived[previous])
    return arrived
