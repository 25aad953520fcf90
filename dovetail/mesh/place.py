"""Gives every piece an element: what exchanges much, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.mesh.loads import Loads, chip_flows, loads_of, spread
from dovetail.mesh.partition import Section
from dovetail.mesh.topology import Topology
from dovetail.mesh.traffic import Traffic, traffic_of

Ints = NDArray[Any]
_SWAPS = 400
"""Exchanges of two chips that are tried, for each chip."""
TRIES = 12
"""Times this is done for a board."""


@dataclass(frozen=True)
class Placed:
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

    @property
    def router(self) -> Ints:
        """[pieces] the router of each on its chip."""
        return np.asarray(self.topology.router_of[self.element % self.topology.mesh.per_chip])


def place(section: Section, topology: Topology, outputs: frozenset[int], tries: int = TRIES) -> Placed:
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
        raise PlanError(f"{section.pieces} pieces on {len(topology.elements)} elements", where="mesh",
                        hint="use more chips or boards")  # fmt: skip
    traffic = traffic_of(section, outputs)
    chips = np.array(list(dict.fromkeys((topology.elements // topology.mesh.per_chip).tolist())), np.int64)
    cluster, rank = _clusters(section, topology)
    best: Placed | None = None
    for order in _orders(topology, traffic, cluster, rank, chips, tries):
        element = _dealt(topology, cluster, rank, order)
        loads = loads_of(traffic, topology, element)
        if best is None or (loads.busiest_link, loads.traffic) < (best.loads.busiest_link, best.loads.traffic):
            best = Placed(section, topology, traffic, element, loads)
    assert best is not None
    return best


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


def _orders(
    topology: Topology, traffic: Traffic, cluster: Ints, rank: Ints, chips: Ints, tries: int
) -> Sequence[Ints]:
    """Orders of chips worth measuring: the path over the board, and what exchanging chips made of it."""
    if len(chips) < 3:
        return [chips]
    bytes_ = _between(topology, traffic, _dealt(topology, cluster, rank, chips))[np.ix_(chips, chips)]
    hops = topology.between.hops.astype(np.float64)
    tries = max(1, min(tries, tries * 48 // len(chips)))
    return [chips, *(order for seed in range(tries) for order in _exchanged(bytes_, hops, chips, seed))]


def _exchanged(bytes_: NDArray[np.float64], hops: NDArray[np.float64], chips: Ints, seed: int) -> list[Ints]:
    """Orders found by simulated annealing: the last, and one on the way."""
    found = []
    generator = np.random.default_rng(seed)
    where = chips.copy()
    temperature = 0.004 * float((bytes_ * hops[np.ix_(where, where)]).sum())
    swaps = _SWAPS * len(chips)
    for step in range(swaps):
        a, b = generator.integers(0, len(chips), 2)
        change = _change(bytes_, hops, where, int(a), int(b))
        if change < 0 or generator.random() < np.exp(-change / max(temperature, 1e-9)):
            where[a], where[b] = where[b], where[a]
        temperature *= 1 - 8 / swaps
        if step == swaps * 3 // 4:
            found.append(where.copy())
    return [*found, where]


def _between(topology: Topology, traffic: Traffic, element: Ints) -> NDArray[np.float64]:
    """[chips, chips] bytes, both ways together, each destination of a message counted."""
    flows, aim_set, aim_chip = chip_flows(traffic, topology, element)
    flow, aim = spread(np.searchsorted(aim_set, np.arange(traffic.sets + 1)), flows.group)
    found = np.zeros((len(topology.places),) * 2)
    np.add.at(found, (flows.chip[flow], aim_chip[aim]), flows.size[flow])
    found += found.T
    np.fill_diagonal(found, 0)
    return found


def _change(bytes_: NDArray[np.float64], hops: NDArray[np.float64], where: Ints, a: int, b: int) -> float:
    """What exchanging the chips of two clusters adds to bytes times hops."""
    farther = hops[where[b]][where] - hops[where[a]][where]
    farther[a] = farther[b] = 0.0
    return float((bytes_[a] - bytes_[b]) @ farther)
