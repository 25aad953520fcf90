"""Messages, one per piece and input to the pieces that read any of it; and the load of links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.guests.mesh.layers import Ints, OperandRead
from dovetail.guests.mesh.partition import MeshStage, Section, read_span
from dovetail.guests.mesh.topology import Topology, tree_links

Floats = NDArray[Any]


@dataclass(frozen=True)
class Traffic:
    """The messages of a section; piece i sends message i."""

    size: Ints
    """[pieces] bytes of its message."""
    group: Ints
    """[pieces] the set it goes to."""
    start: Ints
    """[sets + 1] where the members of each set begin in `members`."""
    members: Ints
    """Pieces, set by set, each once in a set."""
    held: Ints
    """Per member, how many inputs' worth of the message it holds."""
    fetches: tuple[Fetch, ...]
    """Operands that come from DRAM."""
    stores: NDArray[np.bool_]
    """[pieces] whose message goes to DRAM (too)."""

    @property
    def sets(self) -> int:
        """Number of sets."""
        return len(self.start) - 1

    def set_of_members(self) -> Ints:
        """The set of each entry of `members`."""
        return np.repeat(np.arange(self.sets), np.diff(self.start))

    def pairs(self) -> tuple[Ints, Ints]:
        """Sender and reader of every message."""
        order = np.argsort(self.group, kind="stable")
        owner, entry = spread(np.searchsorted(self.group[order], np.arange(self.sets + 1)), self.set_of_members())
        return order[entry], self.members[owner]


@dataclass(frozen=True)
class Fetch:
    """An operand that a stage's pieces read from DRAM."""

    value: str
    pieces: Ints
    boxes: Ints
    """[pieces, 6]: first and last + 1 of rows, columns, channels."""
    size: Ints
    """[pieces] bytes."""


def traffic_of(section: Section, outputs: frozenset[int]) -> Traffic:
    """The messages of a section.

    Args:
        section: its stages, everything resident.
        outputs: layers whose results are wanted in DRAM.
    """
    users: dict[int, list[_User]] = {stage.layer.index: [] for stage in section.stages}
    fetches = []
    for stage in section.stages:
        for place, reading in enumerate(stage.layer.readings):
            if reading.producer in users:
                users[reading.producer].append((stage, reading, stage.slots[place]))
            else:
                fetches.append(_fetch(stage, reading))
    size, group, start, members, held = [], [], [0], [], []
    stores = np.zeros(section.pieces, bool)
    for stage in section.stages:
        stores[stage.first : stage.first + stage.pieces] = stage.last & (stage.layer.index in outputs)
        size.append(stage.costs.sent)
        sets = np.empty(stage.pieces, np.int64)
        for pieces, depth, senders in _sets(stage, users[stage.layer.index]):
            sets[senders] = len(start) - 1
            start.append(start[-1] + len(pieces))
            members.append(pieces)
            held.append(depth)
        group.append(sets)
    none = np.zeros(0, np.int64)
    sizes, groups, read, depths = map(np.concatenate, (size, group, [none, *members], [none, *held]))
    return Traffic(sizes, groups, np.array(start, np.int64), read, depths, tuple(fetches), stores)


def _fetch(stage: MeshStage, reading: OperandRead) -> Fetch:
    readers = stage.readers(reading)
    boxes = stage.boxes[readers]
    spans = [read_span(reading, stage.layer, axis, boxes) for axis in range(3)]
    size = np.prod([stop - start for start, stop in spans], axis=0) * reading.itemsize
    return Fetch(reading.value, stage.first + readers, np.stack([e for span in spans for e in span], axis=1), size)


_User = tuple[MeshStage, OperandRead, int]
"""A stage that reads a value, by which of its operands, and how many inputs' worth of it a piece holds."""


def _sets(stage: MeshStage, users: list[_User]) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Members, what each holds, and the senders (numbers within the stage) of each set of a stage's messages."""
    parts = stage.cut.sums
    if parts > 1:
        held = np.array([stage.slots[0]])
        for sender in np.nonzero(~stage.last)[0]:
            yield np.array([stage.first + sender + 1]), held, np.array([sender])
    senders = np.nonzero(stage.last)[0]
    if not users:
        yield np.zeros(0, np.int64), np.zeros(0, np.int64), senders
        return
    pieces = np.unique(np.concatenate([user.first + np.arange(user.pieces) for user, _, _ in users]))
    held = np.full(len(pieces), 1 << 30)
    reads = np.zeros((len(senders), len(pieces)), bool)
    box = stage.boxes[senders]
    for user, reading, depth in users:
        at = np.searchsorted(pieces, user.first + np.arange(user.pieces))
        touches = np.zeros((len(senders), user.pieces), bool)
        touches[:, user.readers(reading)] = True
        for axis in range(3):
            low, high = read_span(reading, user.layer, axis, user.boxes)
            touches &= (low < box[:, [2 * axis + 1]]) & (high > box[:, [2 * axis]])
        held[at] = np.minimum(held[at], depth)
        reads[:, at] |= touches
    alike: dict[bytes, list[int]] = {}
    for place, row in enumerate(np.packbits(reads, axis=1)):
        alike.setdefault(row.tobytes(), []).append(place)
    for places in alike.values():
        read = reads[places[0]]
        yield pieces[read], held[read], senders[places]


@dataclass(frozen=True)
class Flows:
    """The messages from one chip to one set, together, and the chips they visit on their way."""

    chip: Ints
    """[flows] where it comes from."""
    group: Ints
    """[flows] the set it goes to."""
    size: Ints
    """[flows] bytes per input."""
    visit_flow: Ints
    """[visits] which flow."""
    visit_chip: Ints
    """[visits] a chip it is sent on to, `before`: the chip it comes from, and `way`: the direction."""
    before: Ints
    way: Ints
    aims: Ints
    """Set * chips + chip for every chip that has members of a set, in this order."""
    first: Ints
    """[sets + 1] where the aims of each set begin."""


@dataclass(frozen=True)
class Loads:
    """Bytes per input."""

    flows: Flows
    links: Floats
    """[chips, directions] leaving each chip."""
    noc: Floats
    """[chips, routers, 4] leaving each router to the right, downwards, left, upwards."""
    busiest_link: float
    """Clocks of the busiest link, between chips or on one."""
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


def chip_flows(traffic: Traffic, topology: Topology, element: Ints) -> Flows:
    """The flows between chips."""
    chips = len(topology.places)
    chip = element // topology.mesh.per_chip
    sources, place = np.unique(traffic.group * chips + chip, return_inverse=True)
    size = np.bincount(place.reshape(-1), weights=traffic.size).astype(np.int64)
    aims = np.unique(traffic.set_of_members() * chips + chip[traffic.members])
    first = np.searchsorted(aims // chips, np.arange(traffic.sets + 1))
    flow, aim = spread(first, sources // chips)
    visit_flow, visit_chip = tree_links(topology.between, sources % chips, flow, aims[aim] % chips)
    before = topology.between.parent[(sources % chips)[visit_flow], visit_chip].astype(np.int64)
    way = np.argmax(topology.neighbours[before] == visit_chip[:, None], axis=1)
    return Flows(sources % chips, sources // chips, size, visit_flow, visit_chip, before, way, aims, first)


def loads_of(traffic: Traffic, topology: Topology, element: Ints) -> Loads:
    """The bytes on every link.

    Args:
        traffic: the messages.
        topology: the mesh.
        element: [pieces] where each is.
    """
    mesh = topology.mesh
    flows = chip_flows(traffic, topology, element)
    code = flows.before * topology.neighbours.shape[1] + flows.way
    links = np.bincount(code, weights=flows.size[flows.visit_flow], minlength=topology.neighbours.size)
    links = links.reshape(topology.neighbours.shape)
    noc = _noc(traffic, topology, element, flows)
    busiest = max(links.max(initial=0) / mesh.rates.link, noc.max(initial=0) / mesh.rates.noc)
    return Loads(flows, links, noc, busiest, float(links.sum() + noc.sum()))


def _noc(traffic: Traffic, topology: Topology, element: Ints, flows: Flows) -> Floats:
    """[chips, routers, 4] bytes between routers: from elements to the gate and to members on the same chip, and from
    the gate to members of what comes from other chips."""
    chips, count = len(topology.places), topology.routers
    chip, router = element // topology.mesh.per_chip, topology.router_of[element % topology.mesh.per_chip]
    members = np.unique((traffic.set_of_members() * chips + chip[traffic.members]) * count + router[traffic.members])
    aims, (aim_set, aim_chip) = flows.aims, np.divmod(flows.aims, chips)
    table = np.searchsorted(members // count, np.concatenate((aims, [traffic.sets * chips])))
    # from elements: those of one router and set are one flow
    senders, place = np.unique((traffic.group * chips + chip) * count + router, return_inverse=True)
    size = np.bincount(place.reshape(-1), weights=traffic.size)
    there = _find(aims, senders // count)
    local = np.nonzero(there >= 0)[0]
    owner, entry = spread(table, there[local])
    flow, aim = local[owner], members[entry] % count
    abroad = np.bincount(aim_set, minlength=traffic.sets)[senders // count // chips] > (there >= 0)
    flow = np.concatenate((flow, np.nonzero(abroad)[0]))
    aim = np.concatenate((aim, np.full(int(abroad.sum()), topology.gate)))
    # to members: what the other chips send to the set
    total = np.bincount(flows.group, weights=flows.size, minlength=traffic.sets)
    own = np.zeros(len(aims))
    at = _find(aims, flows.group * chips + flows.chip)
    own[at[at >= 0]] = flows.size[at >= 0]
    coming = total[aim_set] - own
    entering = np.nonzero(coming > 0)[0]
    owner, entry = spread(table, entering)
    source = np.concatenate((senders % count, np.full(len(entering), topology.gate)))
    where = np.concatenate((senders // count % chips, aim_chip[entering]))
    sizes = np.concatenate((size, coming[entering]))
    flow = np.concatenate((flow, len(senders) + owner))
    aim = np.concatenate((aim, members[entry] % count))
    return _router_loads(topology, source, where, sizes, flow, aim)


def _find(numbers: Ints, wanted: Ints) -> Ints:
    """The place of each wanted number among sorted ones, -1 where it is not there."""
    place = np.searchsorted(numbers, wanted)
    return np.where(np.isin(wanted, numbers), place, -1)


def _router_loads(topology: Topology, source: Ints, chip: Ints, size: Floats, flow: Ints, aim: Ints) -> Floats:
    """Loads of flows on chips, each over the routes of its chip."""
    width = topology.mesh.grid.width
    loads = np.zeros((len(topology.places), topology.routers, 4))
    special = np.isin(chip, np.array(list(topology.detours), np.int64))
    for number in (-1, *topology.detours):
        trees = topology.routes(number)
        mine = ~special[flow] if number < 0 else chip[flow] == number
        which, router = tree_links(trees, source, flow[mine], aim[mine])
        before = trees.parent[source[which], router]
        step = router - before
        way = np.select([step == 1, step == width, step == -1], [0, 1, 2], 3)
        np.add.at(loads, (chip[which], before, way), size[which])
    return loads
