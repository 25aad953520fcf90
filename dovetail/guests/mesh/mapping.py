"""A network mapped to a mesh: partition, place and route in one line, and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.choice import Objective
from dovetail.guests.mesh.cuts import require_fit
from dovetail.guests.mesh.layers import MOST_SUMS, Ints, Show, layers_of, output_layers, unseen
from dovetail.guests.mesh.partition import (
    FEW_SUMS,
    SMALL,
    MeshPartition,
    MeshStage,
    frontiers_of,
    partition_mesh,
)
from dovetail.guests.mesh.pieces import check_covered, piece_graph
from dovetail.guests.mesh.placement import SectionPlacement, Tables, place, tables_of
from dovetail.guests.mesh.sections import LAYER_CODE, SectionSearch, SectionTimes, fewer, one_chip, placements
from dovetail.guests.mesh.simulate import StreamTiming, simulate
from dovetail.guests.mesh.topology import Topology
from dovetail.ir.graph import Graph
from dovetail.schedule.region import Region


@dataclass(frozen=True)
class MeshMapping:
    """A network on a mesh."""

    parts: MeshPartition
    topology: Topology
    placed: tuple[SectionPlacement, ...]
    """Per section."""
    tables: tuple[Tables, ...]

    @property
    def whole(self) -> tuple[SectionPlacement, Tables]:
        """The one section of a resident network, placed and routed; raises ValueError where there are several."""
        if not self.parts.resident:
            raise ValueError("the network is not resident as a whole")
        return self.placed[0], self.tables[0]


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
    graph: Graph,
    regions: Sequence[Region],
    topology: Topology,
    objective: Objective,
    whole: bool = False,
    show: Show = unseen,
) -> MeshMapping:
    """Partition, place and route; every piece is checked to be sent all it reads.

    Args:
        graph: the integer graph.
        regions: its regions.
        topology: the mesh.
        objective: the time that counts. For latency, sections one after the other are compared with the network as a
            whole; for throughput, they are taken where not all of it fits at once.
        whole: no sections.
        show: called with what is being done now.

    Raises:
        PlanError: the network does not fit; says what is short.
        ModelError: it does not run on a mesh.
    """
    in_sections = not whole and topology.mesh.pieces is None
    found = None
    if objective is Objective.THROUGHPUT or not in_sections:
        found = _as_a_whole(graph, regions, topology, objective, show)
    if found is None and in_sections:
        found = _quickest(graph, regions, topology, show)
    if found is None:
        raise _too_large(graph, regions, topology, in_sections)
    return found


def _too_large(graph: Graph, regions: Sequence[Region], topology: Topology, in_sections: bool) -> PlanError:
    """The error for a network that does not fit; raises that for a layer of which no piece does."""
    layers, mesh = layers_of(graph, regions), topology.mesh
    for layer in layers:
        require_fit(layer, mesh, layer.one_slot)
    fronts, count = frontiers_of(layers, topology), len(topology.elements)
    what = f"its layers have at least {sum(int(one.pieces[0]) for one in fronts if one.cuts)} pieces"
    for layer in (layer for layer, one in zip(layers, fronts, strict=True) if not one.cuts):
        what = f"{layer.name} alone has more pieces than there are elements"
    what += f", {count} elements are there"
    if in_sections:
        code = mesh.code + LAYER_CODE * len(layers) + mesh.stack
        what += f"; in sections, code and stack of {len(layers)} layers take {code} of an element's {mesh.usable} bytes"
    return PlanError(what, where=graph.name, hint="use more chips or boards, or elements with more memory")


def _as_a_whole(
    graph: Graph, regions: Sequence[Region], topology: Topology, objective: Objective, show: Show
) -> MeshMapping | None:
    """All of a network on the mesh at once; None where it does not fit."""

    def mapped(objective: Objective, most_sums: int = MOST_SUMS) -> MeshMapping | None:
        show(f"cutting into pieces for {objective.value}")
        parts = partition_mesh(graph, regions, topology, objective, most_sums)
        show(f"placing and routing for {objective.value}")
        return place_and_route(parts, topology) if parts else None

    first = mapped(objective)
    if len(topology.places) < 2 or first is None:
        return first
    # what goes between chips, partial sums above all, is only known once all is placed
    if objective is Objective.LATENCY:
        other = mapped(Objective.THROUGHPUT)
        if other is None or measure(other, 1).latency >= measure(first, 1).latency:
            return first
        return replace(other, parts=replace(other.parts, objective=objective))
    timing = simulate(first.whole[0], _STALLED)
    if timing.interval <= timing.bound * _STALLS:
        return first
    other = mapped(objective, FEW_SUMS)
    return other if other and simulate(other.whole[0], _STALLED).interval < timing.interval else first


def _quickest(graph: Graph, regions: Sequence[Region], topology: Topology, show: Show) -> MeshMapping | None:
    """The least latency of what is tried: in sections on one chip, or as a whole, on a chip on fewer elements too."""
    layers = layers_of(graph, regions)
    outputs = output_layers(graph, layers, regions)
    results = frozenset(outputs.values())

    def mapped(placed: Sequence[SectionPlacement]) -> MeshMapping:
        sections = tuple(one.section for one in placed)
        parts = MeshPartition(graph, layers, outputs, topology.mesh, Objective.LATENCY, sections)
        return MeshMapping(parts, topology, tuple(placed), tuple(map(tables_of, placed)))

    sections = SectionSearch(layers, one_chip(topology), results).run(show)
    options = [mapped([one.placed for one in sections])] if sections else []
    several, small = len(topology.places) > 1, len(topology.elements) <= SMALL
    subsets = [fewer(topology, count) for count in range(topology.capacity - 1, 0, -1)] if small else []
    for where in [topology, *subsets] if several else []:
        part = _as_a_whole(graph, regions, where, Objective.LATENCY, show)
        options += [replace(part, topology=topology)] if part else []
    show("placing all layers at once")
    for where in (one_chip(topology), *([topology] if several and small else [])):
        options += [mapped([one]) for one in placements(layers, where, results)]
    if not options:
        return None
    best = min(options, key=lambda one: measure(one, 1).latency)
    for placed in best.placed:
        check_covered(placed.section, placed.traffic)
    return best


_STALLS, _STALLED = 1.1, 20
"""How much longer than its bound an interval is for another partition to be tried, and inputs of the stream that is
modelled for that."""


def place_and_route(parts: MeshPartition, topology: Topology) -> MeshMapping:
    """The stages behind partition, of a network as a whole.

    Raises:
        DovetailError: an element's target cannot compute a piece.
    """
    parts = planned(parts)
    return routed(parts, place(parts.sections[0], topology, frozenset(parts.outputs.values())))


def routed(parts: MeshPartition, placed: SectionPlacement) -> MeshMapping:
    """A network as a whole on its elements; raises ProgramError where a piece is not sent all it reads."""
    check_covered(placed.section, placed.traffic)
    return MeshMapping(parts, placed.topology, (placed,), (tables_of(placed),))


def planned(parts: MeshPartition) -> MeshPartition:
    """The pieces with the clocks of their plans, where the elements' target computes them; as they are elsewhere."""
    pieces = parts.mesh.pieces
    if pieces is None:
        return parts

    def stage_of(stage: MeshStage) -> MeshStage:
        held = zip(stage.layer.readings, stage.slots, strict=True)
        copied = [reading.name for reading, slots in held if slots > 1]
        graphs = (piece_graph(stage, piece)[0] for piece in range(stage.pieces))
        clocks = np.array([pieces.planned(graph, copied) for graph in graphs], np.int64)
        return replace(stage, costs=replace(stage.costs, clocks=clocks, floor=clocks))

    (section,) = parts.sections
    return replace(parts, sections=(replace(section, stages=tuple(map(stage_of, section.stages))),))


def measure(mapped: MeshMapping, inputs: int = 12, links: bool = False, clocks: Ints | None = None) -> Performance:
    """Run the event model: a stream of inputs through a resident network, or one input through all sections.

    Args:
        mapped: the network.
        inputs: how many.
        links: as of `simulate`.
        clocks: `ExactRun.clocks`, for the times with what firmware was seen to take.
    """
    parts = mapped.parts
    if parts.resident:
        turns = None if clocks is None else clocks[:, :, 1:] - clocks[:, :, :1]
        timing = simulate(mapped.whole[0], inputs, links, turns)
        alone = simulate(mapped.whole[0], 1, turns=turns).latency if inputs > 1 else timing.latency
        return Performance(alone, timing.interval, timing.bound, timing.bottleneck, timing, (alone,))
    results = [_in_sections(mapped, own) for own in ([None] if clocks is None else clocks)]
    return max(results, key=lambda one: one.latency)


def _in_sections(mapped: MeshMapping, clocks: Ints | None) -> Performance:
    """Sections one after the other; clocks [pieces, 4] of one input."""
    parts = mapped.parts
    ends = np.cumsum([section.pieces for section in parts.sections])[:-1]
    each = [None] * len(parts.sections) if clocks is None else np.split(clocks, ends)
    times = [SectionTimes(placed, own) for placed, own in zip(mapped.placed, each, strict=True)]
    taken = [one.after(before) for one, before in zip(times, [None, *times[:-1]], strict=True)]
    name = parts.sections[int(np.argmax(taken))].stages[0].layer.name
    bottleneck = f"sections one after the other, most of all {name}"
    return Performance(sum(taken), sum(taken), sum(one.timing.bound for one in times), bottleneck, None, tuple(taken))
