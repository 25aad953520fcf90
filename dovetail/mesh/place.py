"""Gives every piece an element: layers that follow each other, and parts of images that belong together, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.mesh.loads import Loads, loads_of
from dovetail.mesh.partition import Section
from dovetail.mesh.topology import Topology
from dovetail.mesh.traffic import Traffic, traffic_of

Ints = NDArray[np.int64]
_GROUPS = (0, 1, 2, 4, 8)
"""Chips' worth of pieces whose layers are placed slab by slab, tried in turn."""


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
        return self.element // self.topology.mesh.per_chip

    @property
    def router(self) -> Ints:
        """[pieces] the router of each on its chip."""
        return self.topology.router_of[self.element % self.topology.mesh.per_chip]


def place(section: Section, topology: Topology, outputs: frozenset[int], tries: Sequence[int] = _GROUPS) -> Placed:
    """Place the pieces of a section.

    Layers are taken in groups of some chips' worth of pieces. A group's images are cut into as many slabs of rows as it
    has chips; a slab's pieces of all layers lie together, so that layers exchange only borders between chips. Which
    size of groups gives the least time on the busiest link, then the fewest bytes times hops, is tried.

    Args:
        section: what is placed, everything resident.
        topology: where.
        outputs: layers whose results are wanted in DRAM.
        tries: sizes of groups in chips; 0 for one layer after the other.

    Raises:
        PlanError: there are more pieces than elements.
    """
    if section.pieces > len(topology.elements):
        raise PlanError(f"{section.pieces} pieces on {len(topology.elements)} elements", where="mesh",
                        hint="use more chips or boards")  # fmt: skip
    traffic = traffic_of(section, outputs)
    best: Placed | None = None
    for chips in tries if len(topology.places) > 1 else tries[:1]:
        order = _order(section, chips * topology.mesh.per_chip, topology.mesh.per_chip)
        element = np.empty(section.pieces, np.int64)
        element[order] = topology.elements[: section.pieces]
        found = loads_of(traffic, topology, element)
        if best is None or (found.busiest_link, found.traffic) < (best.loads.busiest_link, best.loads.traffic):
            best = Placed(section, topology, traffic, element, found)
    assert best is not None
    return best


def _order(section: Section, most: int, per_chip: int) -> Ints:
    """The pieces in the order of placement."""
    group, slab, count = [], [], 0
    number, members = 0, []
    for stage in section.stages:
        if members and count + stage.pieces > most:
            number, count, members = number + 1, 0, []
        members.append(stage)
        count += stage.pieces
        group.append(np.full(stage.pieces, number))
    groups = np.concatenate(group)
    sizes = np.bincount(groups)
    for stage, own in zip(section.stages, group, strict=True):
        slabs = max(1, round(sizes[own[0]] / per_chip)) if most else 1
        middle = (stage.boxes[:, 0] + stage.boxes[:, 1]) / 2 / stage.layer.image[0]
        slab.append((middle * slabs).astype(np.int64))
    return np.lexsort((np.arange(section.pieces), np.concatenate(slab), groups))
