"""Bytes that cross every link for one input, from who sends to whom and where everyone is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.mesh.topology import Topology
from dovetail.mesh.traffic import Traffic
from dovetail.mesh.trees import tree_links

Ints = NDArray[Any]
Floats = NDArray[Any]


@dataclass(frozen=True)
class Flows:
    """What is sent from one chip to one set, and the chips it visits on its way."""

    chip: Ints
    """[flows] where it comes from."""
    group: Ints
    """[flows] the set it goes to."""
    size: Ints
    """[flows] bytes per input."""
    visit_flow: Ints
    """[visits] which flow."""
    visit_chip: Ints
    """[visits] a chip it is sent on to; the chip before it is the tree's."""


@dataclass(frozen=True)
class Loads:
    """Bytes per input."""

    flows: Flows
    links: Floats
    """[chips, directions] leaving each chip."""
    noc: Floats
    """[chips, routers, 4] leaving each router to the right, downwards, left, upwards."""
    dram: Floats
    """[chips] read and written."""
    busiest_link: float
    """Clocks of the busiest link, between chips or on one."""
    busiest: str
    """Which link that is."""
    traffic: float
    """Bytes times links crossed."""


def spread(start: Ints, which: Ints) -> tuple[Ints, Ints]:
    """Every entry of some of the rows of a table: (place in `which`, place in the table).

    Args:
        start: [rows + 1] where each row begins.
        which: the rows.
    """
    counts = start[which + 1] - start[which]
    owner = np.repeat(np.arange(len(which)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, start[which][owner] + within


def _table(rows: Ints, count: int) -> Ints:
    """Where each row of sorted row numbers begins: [count + 1]."""
    return np.searchsorted(rows, np.arange(count + 1))


def chip_flows(traffic: Traffic, topology: Topology, element: Ints) -> tuple[Flows, Ints, Ints]:
    """The flows between chips, and the distinct (set, chip) of members as two arrays."""
    chips = len(topology.places)
    chip = element // topology.mesh.per_chip
    sources, place = np.unique(traffic.group * chips + chip, return_inverse=True)
    size = np.bincount(place.reshape(-1), weights=traffic.size).astype(np.int64)
    aims = np.unique(traffic.set_of_members() * chips + chip[traffic.members])
    table = _table(aims // chips, traffic.sets)
    flow, aim = spread(table, sources // chips)
    visit_flow, visit_chip = tree_links(topology.between, sources % chips, flow, aims[aim] % chips)
    flows = Flows(sources % chips, sources // chips, size, visit_flow, visit_chip)
    return flows, aims // chips, aims % chips


def loads_of(traffic: Traffic, topology: Topology, element: Ints) -> Loads:
    """The bytes on every link.

    Args:
        traffic: the messages.
        topology: the mesh.
        element: [pieces] where each is.
    """
    mesh = topology.mesh
    flows, aim_set, aim_chip = chip_flows(traffic, topology, element)
    links = link_loads(topology, flows)
    noc = _noc(traffic, topology, element, flows, aim_set, aim_chip)
    chip = element // mesh.per_chip
    dram = np.bincount(chip[traffic.stores], weights=traffic.size[traffic.stores], minlength=len(topology.places))
    dram = dram.astype(np.float64)
    for fetch in traffic.fetches:
        at, size = _fetched(fetch.boxes, fetch.size, chip[fetch.pieces])
        np.add.at(dram, at, size)
    link_time, noc_time = links.max(initial=0) / mesh.rates.link, noc.max(initial=0) / mesh.rates.noc
    where = np.unravel_index(int(links.argmax()), links.shape)
    name = f"the link of chip {topology.places[where[0]]} towards {mesh.directions[where[1]]}"
    if noc_time > link_time:
        spot = np.unravel_index(int(noc.argmax()), noc.shape)
        name = f"a link of router {spot[1]} on chip {topology.places[spot[0]]}"
    return Loads(flows, links, noc, dram, max(link_time, noc_time), name, float(links.sum() + noc.sum()))


def link_loads(topology: Topology, flows: Flows) -> Floats:
    """[chips, directions] bytes leaving each chip."""
    ways = topology.neighbours.shape[1]
    before = topology.between.parent[flows.chip[flows.visit_flow], flows.visit_chip]
    code = before * ways + _directions(topology, before, flows.visit_chip)
    found = np.bincount(code, weights=flows.size[flows.visit_flow], minlength=topology.neighbours.size)
    return found.reshape(topology.neighbours.shape)


def _fetched(boxes: Ints, size: Ints, chip: Ints) -> tuple[Ints, Ints]:
    """Chip and bytes of what is read from its DRAM: what several pieces of a chip read is read once."""
    rows = np.unique(np.column_stack((chip, boxes, size)), axis=0)
    return rows[:, 0], rows[:, -1]


def _directions(topology: Topology, chip: Ints, to: Ints) -> Ints:
    """The direction of the link from each chip to its neighbour."""
    return np.asarray(np.argmax(topology.neighbours[chip] == to[:, None], axis=1))


def _noc(
    traffic: Traffic, topology: Topology, element: Ints, flows: Flows, aim_set: Ints, aim_chip: Ints
) -> Floats:
    """[chips, routers, 4] bytes between routers: from elements to the gate and to members on the same chip, and from
    the gate to members of what comes from other chips."""
    chips, count = len(topology.places), topology.routers
    chip, router = element // topology.mesh.per_chip, topology.router_of[element % topology.mesh.per_chip]
    members = np.unique((traffic.set_of_members() * chips + chip[traffic.members]) * count + router[traffic.members])
    aims = aim_set * chips + aim_chip  # sorted
    table = np.searchsorted(members // count, np.concatenate((aims, [traffic.sets * chips])))
    # from elements: those of one router and set are one flow
    senders, place = np.unique((traffic.group * chips + chip) * count + router, return_inverse=True)
    size = np.bincount(place.reshape(-1), weights=traffic.size)
    there = np.searchsorted(aims, senders // count)
    there = np.where((there < len(aims)) & (aims[np.minimum(there, len(aims) - 1)] == senders // count), there, -1) \
        if len(aims) else np.full(len(senders), -1)
    local = np.nonzero(there >= 0)[0]
    owner, entry = spread(table, there[local])
    flow, aim = local[owner], members[entry] % count
    abroad = np.bincount(aim_set, minlength=traffic.sets)[senders // count // chips] > (there >= 0)
    flow = np.concatenate((flow, np.nonzero(abroad)[0]))
    aim = np.concatenate((aim, np.full(int(abroad.sum()), topology.gate)))
    # to members: what the other chips send to the set
    total = np.bincount(flows.group, weights=flows.size, minlength=traffic.sets)
    own = np.zeros(len(aims))
    at = np.searchsorted(aims, flows.group * chips + flows.chip)
    if len(aims):
        hit = (at < len(aims)) & (aims[np.minimum(at, len(aims) - 1)] == flows.group * chips + flows.chip)
        own[at[hit]] = flows.size[hit]
    coming = total[aim_set] - own
    entering = np.nonzero(coming > 0)[0]
    owner, entry = spread(table, entering)
    source = np.concatenate((senders % count, np.full(len(entering), topology.gate)))
    where = np.concatenate((senders // count % chips, aim_chip[entering]))
    sizes = np.concatenate((size, coming[entering]))
    flow = np.concatenate((flow, len(senders) + owner))
    aim = np.concatenate((aim, members[entry] % count))
    return _router_loads(topology, source, where, sizes, flow, aim)


def _router_loads(
    topology: Topology, source: Ints, chip: Ints, size: Floats, flow: Ints, aim: Ints
) -> Floats:
    """Loads of flows on chips, each over the routes of its chip."""
    width = topology.mesh.grid.width
    found = np.zeros((len(topology.places), topology.routers, 4))
    special = np.isin(chip, np.array(list(topology.detours), np.int64))
    for number in (-1, *topology.detours):
        trees = topology.routes(number)
        mine = ~special[flow] if number < 0 else chip[flow] == number
        which, router = tree_links(trees, source, flow[mine], aim[mine])
        before = trees.parent[source[which], router]
        step = router - before
        way = np.select([step == 1, step == width, step == -1], [0, 1, 2], 3)
        np.add.at(found, (chip[which], before, way), size[which])
    return found
