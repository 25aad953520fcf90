"""A network mapped to a mesh: partition, place and route in one line, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.graph.graph import Graph
from dovetail.mesh.choice import Objective
from dovetail.mesh.execute import check_covered
from dovetail.mesh.partition import Partitioned, partition_mesh
from dovetail.mesh.place import TRIES, Placed, place
from dovetail.mesh.simulate import Timing, simulate
from dovetail.mesh.stream import simulate_stream
from dovetail.mesh.tables import Tables, tables_of
from dovetail.mesh.topology import Topology
from dovetail.partition import Region


@dataclass(frozen=True)
class Mapped:
    """A network on a mesh."""

    parts: Partitioned
    topology: Topology
    placed: tuple[Placed | None, ...]
    """Per section; None for one that is streamed."""
    tables: tuple[Tables | None, ...]

    @property
    def whole(self) -> tuple[Placed, Tables]:
        """The one section of a resident network, placed and routed; raises ValueError where there are several."""
        placed, tables = self.placed[0], self.tables[0]
        if not self.parts.resident or placed is None or tables is None:
            raise ValueError("the network is not resident as a whole")
        return placed, tables


@dataclass(frozen=True)
class Performance:
    """What inputs take, in clocks."""

    latency: float
    interval: float
    bound: float
    """The least interval: what the busiest element, link or DRAM does for one input."""
    bottleneck: str
    timing: Timing | None
    """Of a resident network: the whole of it."""
    sections: tuple[float, ...]
    """Clocks of each section."""


def map_network(graph: Graph, regions: Sequence[Region], topology: Topology, objective: Objective) -> Mapped:
    """Partition, place and route; every piece is checked to be sent all it reads.

    Raises:
        PlanError: the network does not fit; says what is short.
        ModelError: it does not run on a mesh.
    """
    return place_and_route(partition_mesh(graph, regions, topology, objective), topology)


def place_and_route(parts: Partitioned, topology: Topology) -> Mapped:
    """The stages behind partition."""
    placed = [_placed(parts, index, topology) for index in range(len(parts.sections))]
    tables = [tables_of(one) if one else None for one in placed]
    return Mapped(parts, topology, tuple(placed), tuple(tables))


def wanted(parts: Partitioned, index: int) -> frozenset[int]:
    """Layers of a section whose results go to DRAM: outputs, and what later sections read."""
    own = {stage.layer.index for stage in parts.sections[index].stages}
    later = {reading.producer for layer in parts.layers if layer.index not in own for reading in layer.readings}
    return frozenset(own & ({*parts.outputs.values()} | later))


def _placed(parts: Partitioned, index: int, topology: Topology) -> Placed | None:
    section = parts.sections[index]
    if section.streaming is not None:
        return None
    found = place(section, topology, wanted(parts, index), max(1, TRIES // len(parts.sections)))
    check_covered(section, found.traffic)
    return found


def measure(mapped: Mapped, inputs: int = 12) -> Performance:
    """Run the event model: a stream of inputs through a resident network, or one input through all sections."""
    parts, mesh = mapped.parts, mapped.topology.mesh
    if parts.resident:
        timing = simulate(mapped.whole[0], inputs)
        alone = simulate(mapped.whole[0], 1).latency if inputs > 1 else timing.latency
        return Performance(alone, timing.interval, timing.bound, timing.bottleneck, timing, (alone,))
    clocks, bounds = [], []
    for section, placed in zip(parts.sections, mapped.placed, strict=True):
        if placed is None:
            assert section.streaming is not None
            clocks.append(simulate_stream(section.streaming, mesh))
            bounds.append(max(section.streaming.dram_clocks, section.streaming.floor))
        else:
            timing = simulate(placed, 1)
            load = _loading(placed) / mesh.rates.dram
            clocks.append(timing.latency + load)
            bounds.append(timing.bound + load)
    slowest = int(np.argmax(clocks))
    name = parts.sections[slowest].stages[0].layer.name
    return Performance(sum(clocks), sum(clocks), sum(bounds), f"sections one after the other, most of all {name}",
                       None, tuple(clocks))  # fmt: skip


def _loading(placed: Placed) -> int:
    """Bytes of weights that the chip with most reads from its DRAM when a section begins: what several of its pieces
    hold is read once."""
    total = np.zeros(len(placed.topology.places), np.int64)
    for stage in placed.section.stages:
        part = np.arange(stage.pieces) % (stage.cut.channels * stage.cut.sums)
        chip = placed.chip[stage.first : stage.first + stage.pieces]
        rows = np.unique(np.column_stack((chip, part, stage.costs.constants)), axis=0)
        np.add.at(total, rows[:, 0], rows[:, 2])
    return int(total.max())
