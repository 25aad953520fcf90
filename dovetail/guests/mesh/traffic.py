"""Messages, one per piece and input to the pieces that read any of it; and the load of links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.guests.mesh.layers import Ints, OperandRead
from dovetail.guests.mesh.partition import MeshStage, Section, read_span
from dovetail.guests.mesh.topology import Topology, tree_links
from dovetail.records import Record

Floats = NDArray[Any]


class Traffic(Record):
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


class Fetch(Record):
    """An operand that a stage's pieces read from DRAM."""

    pieces: Ints
    boxes: Ints
    """[pieces, 6]: first and last + 1 of rows, columns, channels."""
    size: Ints
    """[pieces] bytes."""


def traffic_of(section: Section, outputs: frozenset[int]) -> Traffic:
    """The messages of a section, all of whose stages are resident; results of the layers in `outputs` go to DRAM."""
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
    return Fetch(stage.first + readers, np.stack([e for span in spans for e in span], axis=1), size)


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


class Flows(Record):
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


def spread(start: Ints, which: Ints) -> tuple[Ints, Ints]:
    """Every entry of some rows of a table, which begin at `start` [rows + 1]: (place in `which`, place in the
    table)."""
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


def link_bytes(flows: Flows, topology: Topology) -> Floats:
    """[chips, directions] bytes per input on the links that leave each chip."""
    code = flows.before * topology.neighbours.shape[1] + flows.way
    links = np.bincount(code, weights=flows.size[flows.visit_flow], minlength=topology.neighbours.size)
    return links.reshape(topology.neighbours.shape)
