"""Keys of messages and the routing tables of chips, compressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.mesh.loads import spread
from dovetail.mesh.place import Placed

Ints = NDArray[Any]


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
    before: int
    """Entries before compression."""

    def largest(self) -> int:
        """Entries of the chip that has most."""
        return int(np.bincount(self.chip).max(initial=0)) if len(self.chip) else 0


def tables_of(placed: Placed) -> Tables:
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
    found = Tables(key, *entries, len(which))
    if found.largest() > topology.mesh.route_entries:
        chip = int(np.bincount(found.chip).argmax())
        raise PlanError(
            f"chip {topology.places[chip]} needs {found.largest()} routing entries of {topology.mesh.route_entries}",
            where="mesh", hint="use fewer elements (--chips), or --objective latency",
        )  # fmt: skip
    return found


def _visits(placed: Placed) -> tuple[Ints, Ints, Ints, Ints]:
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
