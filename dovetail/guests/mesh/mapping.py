"""A network mapped to a mesh: partition, place and route in one line, and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.choice import Objective
from dovetail.guests.mesh.layers import Ints, layers_of, output_layers
from dovetail.guests.mesh.partition import (
    FEW_SUMS,
    SMALL,
    MeshPartition,
    MeshStage,
    partition_mesh,
    results_read_later,
)
from dovetail.guests.mesh.pieces import check_covered, piece_graph
from dovetail.guests.mesh.placement import TRIES, SectionPlacement, Tables, place, tables_of
from dovetail.guests.mesh.sections import SectionSearch, SectionTimes, fewer, one_chip, placements
from dovetail.guests.mesh.simulate import StreamTiming, simulate
from dovetail.guests.mesh.streaming import simulate_stream
from dovetail.guests.mesh.topology import Topology
from dovetail.ir.graph import Graph
from dovetail.schedule.region import Region


@dataclass(frozen=True)
class MeshMapping:
    """A network on a mesh."""

    parts: MeshPartition
    topology: Topology
    placed: tuple[SectionPlacement | None, ...]
    """Per section; None for one that is streamed."""
    tables: tuple[Tables | None, ...]

    @property
    def whole(self) -> tuple[SectionPlacement, Tables]:
        """The one section of a resident network, placed and routed; raises ValueError where there are several."""
        placed, tables = self.placed[0], self.tables[0]
        if not self.parts.resident or placed is None or tables is None:
            raise ValueError("the network is not resident as a whole")
        return placed, tables

    @property
    def resident_sections(self) -> tuple[tuple[SectionPlacement, ...], tuple[Tables, ...]]:
        """Placement and tables of every section; raises PlanError if one is streamed."""
        placed, tables = [one for one in self.placed if one], [one for one in self.tables if one]
        if len(placed) < len(self.placed):
            what = "programs are written for sections in which everything is resident"
            raise PlanError(what, where=self.parts.graph.name, hint="use more chips or boards")
        return tuple(placed), tuple(tables)


@dataclass(frozen=True)
class Performance:
    """Times of inputs, in clocks."""

    latency: float
    interval: float
    bound: float
    """The least interval: the work of the busiest element, link or DRAM for one input."""
    bottleneck: str
    timing: StreamTiming | None
    """Timing of a resident network; None for others."""
    sections: tuple[float, ...]
    """Clocks of each section."""


def map_network(
    graph: Graph, regions: Sequence[Region], topology: Topology, objective: Objective, whole: bool = False
) -> MeshMapping:
    """Partition, place and route; every piece is checked to be sent all it reads.

    Args:
        graph: the integer graph.
        regions: its regions.
        topology: the mesh.
        objective: the time that counts. For latency, sections one after the other are compared with the network as a
            whole.
        whole: only the latter.

    Raises:
        PlanError: the network does not fit; says what is short.
        ModelError: it does not run on a mesh.
    """
    if objective is Objective.LATENCY and not whole and topology.mesh.pieces is None:
        return _quickest(graph, regions, topology)
    return _as_a_whole(graph, regions, topology, objective)


def _as_a_whole(graph: Graph, regions: Sequence[Region], topology: Topology, objective: Objective) -> MeshMapping:
    """All of a network on the mesh at once where it fits."""
    first = place_and_route(partition_mesh(graph, regions, topology, objective), topology)
    if len(topology.places) < 2 or not first.parts.resident:
        return first
    # what goes between chips, partial sums above all, is only known once all is placed
    if objective is Objective.LATENCY:
        other = place_and_route(partition_mesh(graph, regions, topology, Objective.THROUGHPUT), topology)
        shorter = other.parts.resident and measure(other, 1).latency < measure(first, 1).latency
        return replace(other, parts=replace(other.parts, objective=objective)) if shorter else first
    timing = simulate(first.whole[0], _STALLED)
    if timing.interval <= timing.bound * _STALLS:
        return first
    other = place_and_route(partition_mesh(graph, regions, topology, objective, FEW_SUMS), topology)
    shorter = other.parts.resident and simulate(other.whole[0], _STALLED).interval < timing.interval
    return other if shorter else first


def _quickest(graph: Graph, regions: Sequence[Region], topology: Topology) -> MeshMapping:
    """The least latency of what is tried: in sections, or as a whole, on a chip on fewer elements too."""
    layers = layers_of(graph, regions)
    outputs = output_layers(graph, layers, regions)
    results = frozenset(outputs.values())

    def mapped(placed: Sequence[SectionPlacement]) -> MeshMapping:
        sections = tuple(one.section for one in placed)
        parts = MeshPartition(graph, layers, outputs, topology.mesh, Objective.LATENCY, sections)
        return MeshMapping(parts, topology, tuple(placed), tuple(map(tables_of, placed)))

    sections = SectionSearch(layers, one_chip(topology), results).run()
    options = [mapped([one.placed for one in sections])] if sections else []
    several, small = len(topology.places) > 1, len(topology.elements) <= SMALL
    subsets = [fewer(topology, count) for count in range(topology.capacity - 1, 0, -1)] if small else []
    for where in [topology, *subsets] if several else []:
        part = _as_a_whole(graph, regions, where, Objective.LATENCY)
        options += [replace(part, topology=topology)] if part.parts.resident else []
    for where in (one_chip(topology), *([topology] if several and small else [])):
        options += [mapped([one]) for one in placements(layers, where, results)]
    if not options:  # as a model only: layers are streamed, or sections are on several chips
        return _as_a_whole(graph, regions, topology, Objective.LATENCY)
    best = min(options, key=lambda one: measure(one, 1).latency)
    for placed in best.resident_sections[0]:
        check_covered(placed.section, placed.traffic)
    return best


_STALLS, _STALLED = 1.1, 20
"""How much longer than its bound an interval is for another partition to be tried, and inputs of the stream that is
modelled for that."""


def place_and_route(parts: MeshPartition, topology: Topology) -> MeshMapping:
    """The stages behind partition.

    Raises:
        DovetailError: an element's target cannot compute a piece.
    """
    parts = planned(parts)
    placed: list[SectionPlacement | None] = []
    for index, section in enumerate(parts.sections):
        one = None
        if section.streaming is None:
            one = place(section, topology, stored_layers(parts, index), max(1, TRIES // len(parts.sections)))
            check_covered(section, one.traffic)
        placed.append(one)
    return MeshMapping(parts, topology, tuple(placed), tuple(tables_of(one) if one else None for one in placed))


def planned(parts: MeshPartition) -> MeshPartition:
    """The pieces with the clocks of their plans, where the elements' target computes them; as they are elsewhere."""
    pieces = parts.mesh.pieces
    if pieces is None or not parts.resident:
        return parts

    def stage_of(stage: MeshStage) -> MeshStage:
        held = zip(stage.layer.readings, stage.slots, strict=True)
        copied = [reading.name for reading, slots in held if slots > 1]
        graphs = (piece_graph(stage, piece)[0] for piece in range(stage.pieces))
        clocks = np.array([pieces.planned(graph, copied) for graph in graphs], np.int64)
        return replace(stage, costs=replace(stage.costs, clocks=clocks, floor=clocks))

    (section,) = parts.sections
    return replace(parts, sections=(replace(section, stages=tuple(map(stage_of, section.stages))),))


def stored_layers(parts: MeshPartition, index: int) -> frozenset[int]:
    """Layers of a section whose results go to DRAM: outputs, and values that later sections read."""
    own = {stage.layer.index for stage in parts.sections[index].stages}
    return frozenset(own.intersection(parts.outputs.values()) | results_read_later(parts.layers, own))


def measure(mapped: MeshMapping, inputs: int = 12, links: bool = False, turns: Ints | None = None) -> Performance:
    """Run the event model: a stream of inputs through a resident network, or one input through all sections; `links`
    and, for a resident network, `turns`: as of `simulate`."""
    parts, mesh = mapped.parts, mapped.topology.mesh
    if parts.resident:
        timing = simulate(mapped.whole[0], inputs, links, turns)
        alone = simulate(mapped.whole[0], 1, turns=turns).latency if inputs > 1 else timing.latency
        return Performance(alone, timing.interval, timing.bound, timing.bottleneck, timing, (alone,))
    clocks, bounds = [], []
    before: SectionTimes | None = None
    for section, placed in zip(parts.sections, mapped.placed, strict=True):
        times = SectionTimes(placed) if placed else None
        if times is not None:
            clocks.append(times.after(before))
            bounds.append(times.timing.bound)
        elif section.streaming is not None:
            clocks.append(simulate_stream(section.streaming, mesh))
            bounds.append(max(section.streaming.dram_clocks, section.streaming.floor))
        before = times
    name = parts.sections[int(np.argmax(clocks))].stages[0].layer.name
    bottleneck = f"sections one after the other, most of all {name}"
    return Performance(sum(clocks), sum(clocks), sum(bounds), bottleneck, None, tuple(clocks))
