"""The tree of links each message takes, in the order it takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.mesh.place import Placed
from dovetail.mesh.topology import Topology
from dovetail.mesh.trees import Trees

Ints = NDArray[Any]


@dataclass(slots=True)
class Tree:
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
        """How many there are."""
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
        """What people call it."""
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

    def __init__(self, placed: Placed) -> None:
        self._placed, self._topology = placed, placed.topology
        self.links = Links(placed.topology)
        traffic = placed.traffic
        count = placed.topology.routers
        code = placed.chip[traffic.members] * count + placed.router[traffic.members]
        self._aims: list[list[int]] = [
            np.unique(code[a:b]).tolist() for a, b in zip(traffic.start[:-1], traffic.start[1:], strict=True)
        ]
        self._known: dict[tuple[int, int, int, bool], Tree] = {}

    def to_set(self, chip: int, router: int, group: int, store: bool) -> Tree:
        """The tree from a router to the members of a set, and to the chip's DRAM if the message is stored."""
        key = (chip, router, group, store)
        if key not in self._known:
            self._known[key] = self._tree(chip, router, self._aims[group], store)
        return self._known[key]

    def from_dram(self, chip: int, aims: list[int]) -> Tree:
        """The tree from the DRAM of a chip to routers on it, given as chip * routers + router."""
        tree = Tree([self.links.dram + chip], [-1])
        self._inside(tree, chip, self._topology.dram, [aim % self._topology.routers for aim in aims], 0)
        return tree

    def _tree(self, chip: int, router: int, aims: list[int], store: bool) -> Tree:
        count = self._topology.routers
        by_chip: dict[int, list[int]] = {}
        for aim in aims:
            by_chip.setdefault(aim // count, []).append(aim % count)
        local = by_chip.pop(chip, [])
        tree = Tree()
        ends = list(local)
        if by_chip:
            ends.append(self._topology.gate)
        if store:
            ends.append(self._topology.dram)
        self._inside(tree, chip, router, ends, -1)
        if store:
            tree.link.append(self.links.dram + chip)
            tree.before.append(tree.leaf[chip, self._topology.dram])
        if by_chip:
            self._abroad(tree, chip, by_chip)
        return tree

    def _abroad(self, tree: Tree, chip: int, by_chip: dict[int, list[int]]) -> None:
        """Add the links to other chips and on them."""
        arrived = {chip: tree.leaf[chip, self._topology.gate]}
        for before, to in _branches(self._topology.between, chip, list(by_chip)):
            arrived[to] = len(tree.link)
            tree.link.append(self.links.between(before, to))
            tree.before.append(arrived[before])
        for other, routers in by_chip.items():
            self._inside(tree, other, self._topology.gate, routers, arrived[other])

    def _inside(self, tree: Tree, chip: int, source: int, routers: list[int], before: int) -> None:
        """Add the links from a router to others of its chip."""
        arrived = {source: before}
        for previous, to in _branches(self._topology.routes(chip), source, routers):
            arrived[to] = len(tree.link)
            tree.link.append(self.links.inside(chip, previous, to))
            tree.before.append(arrived[previous])
        for router in routers:
            tree.leaf[chip, router] = arrived[router]


def _branches(trees: Trees, source: int, aims: list[int]) -> list[tuple[int, int]]:
    """The links (from, to) of the tree to some routers, nearest first."""
    parent, hops = trees.parent[source], trees.hops[source]
    known = {source}
    found: list[tuple[int, int]] = []
    for aim in aims:
        place = int(aim)
        while place not in known:
            known.add(place)
            before = int(parent[place])
            found.append((before, place))
            place = before
    found.sort(key=lambda branch: (hops[branch[1]], branch[1]))
    return found


def dependencies(placed: Placed) -> list[tuple[int, int]]:
    """(link, the link after it) of every message's tree. Links on a chip count twice, since what comes from other chips
    has a channel of its own there."""
    router = Router(placed)
    found: set[tuple[int, int]] = set()
    links = router.links
    sources = set(zip(placed.chip.tolist(), placed.router.tolist(), placed.traffic.group.tolist(), strict=True))
    for chip, at, group in sorted(sources):
        tree = router.to_set(chip, at, group, False)
        arrived = [False] * len(tree.link)
        for place, (link, before) in enumerate(zip(tree.link, tree.before, strict=True)):
            arrived[place] = link < links.noc or (before >= 0 and arrived[before])
            if before >= 0:
                here = link + links.count * (link >= links.noc and arrived[place])
                there = tree.link[before] + links.count * (tree.link[before] >= links.noc and arrived[before])
                found.add((there, here))
    return sorted(found)
