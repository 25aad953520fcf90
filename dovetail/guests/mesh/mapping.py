"""A network mapped to a mesh: partition, place and route in one line, and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.cuts import require_fit
from dovetail.guests.mesh.layers import MOST_SUMS, Ints, MeshNetwork, Show, network_of, unseen
from dovetail.guests.mesh.partition import SMALL, MeshStage, Objective, Section, frontiers_of, resident
from dovetail.guests.mesh.pieces import check_covered, piece_graph
from dovetail.guests.mesh.placement import MeshMapping, place
from dovetail.guests.mesh.sections import LAYER_CODE, SectionSearch, SectionTimes, fewer, one_chip
from dovetail.guests.mesh.simulate import StreamTiming, simulate
from dovetail.guests.mesh.topology import Topology
from dovetail.ir.graph import Graph
from dovetail.records import Record
from dovetail.schedule.region import Region
from dovetail.target.mesh import Mesh


class Performance(Record):
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

    For latency, sections one after the other are compared with the network as a whole (not if `whole`); for throughput,
    they are taken where not all of it fits at once. `show` is told what is being done now.

    Raises:
        PlanError: the network does not fit; says what is short.
        ModelError: it does not run on a mesh.
    """
    network = network_of(graph, regions)
    in_sections = not whole and topology.mesh.pieces is None
    found = None
    if objective is Objective.THROUGHPUT or not in_sections:
        found = _as_a_whole(network, topology, objective, show)
    if found is None and in_sections:
        found = _quickest(network, topology, show)
    if found is None:
        raise _too_large(network, topology, in_sections)
    return found


def _too_large(network: MeshNetwork, topology: Topology, in_sections: bool) -> PlanError:
    """The error for a network that does not fit; raises that for a layer of which no piece does."""
    layers, mesh = network.layers, topology.mesh
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
    return PlanError(what, where=network.graph.name, hint="use more chips or boards, or elements with more memory")


def _as_a_whole(network: MeshNetwork, topology: Topology, objective: Objective, show: Show) -> MeshMapping | None:
    """All of a network on the mesh at once; None where it does not fit."""

    def mapped(cut_for: Objective, most_sums: int = MOST_SUMS) -> MeshMapping | None:
        show(f"cutting into pieces for {cut_for.value}")
        layers = [replace(layer, most_sums=most_sums) for layer in network.layers]
        section = resident(layers, topology, cut_for)
        show(f"placing and routing for {cut_for.value}")
        return place_and_route(network, section, topology, objective) if section else None

    first = mapped(objective)
    if first is None:
        return None
    if objective is Objective.LATENCY:  # what messages take is only known once all is placed
        other = mapped(Objective.THROUGHPUT)
        return other if other and measure(other, 1).latency < measure(first, 1).latency else first
    timing = simulate(first.placed[0], _STALLED)
    if len(topology.places) < 2 or timing.interval <= timing.bound * _STALLS:
        return first
    other = mapped(objective, FEW_SUMS)
    return other if other and simulate(other.placed[0], _STALLED).interval < timing.interval else first


def _quickest(network: MeshNetwork, topology: Topology, show: Show) -> MeshMapping | None:
    """The least latency of what is tried: in sections on one chip, or as a whole, on fewer elements too."""
    chip = one_chip(topology)
    sections = SectionSearch(network.layers, chip, network.results).run(show)
    placed = tuple(one.placed for one in sections or ())
    options = [MeshMapping(network, Objective.LATENCY, topology, placed)] if placed else []
    small = len(topology.elements) <= SMALL
    subsets = [fewer(topology, count) for count in range(topology.capacity - 1, 0, -1)] if small else []
    for where in (topology, *([chip] if len(topology.places) > 1 else []), *subsets):
        part = _as_a_whole(network, where, Objective.LATENCY, show)
        options += [replace(part, topology=topology)] if part else []
    return checked(min(options, key=lambda one: measure(one, 1).latency)) if options else None


_STALLS, _STALLED = 1.1, 20
"""How much longer than its bound an interval is for another partition to be tried, and inputs of the stream that is
modelled for that."""
FEW_SUMS = 2
"""Parts of a layer's sums at most, where partial sums are too much for the links between chips."""


def place_and_route(network: MeshNetwork, section: Section, topology: Topology, objective: Objective) -> MeshMapping:
    """The stages behind partition, of a network as a whole.

    Raises:
        DovetailError: an element's target cannot compute a piece.
    """
    placed = place(planned(section, topology.mesh), topology, network.results)
    return checked(MeshMapping(network, objective, topology, (placed,)))


def checked(mapped: MeshMapping) -> MeshMapping:
    """The mapping; raises ProgramError where a piece is not sent all it reads, PlanError for too large tables."""
    for placed in mapped.placed:
        check_covered(placed.section, placed.traffic)
    assert len(mapped.tables) == len(mapped.placed)
    return mapped


def planned(section: Section, mesh: Mesh) -> Section:
    """The pieces with the clocks of their plans, where the elements' target computes them; as they are elsewhere."""
    pieces = mesh.pieces
    if pieces is None:
        return section

    def stage_of(stage: MeshStage) -> MeshStage:
        held = zip(stage.layer.readings, stage.slots, strict=True)
        copied = [reading.name for reading, slots in held if slots > 1]
        graphs = (piece_graph(stage, piece)[0] for piece in range(stage.pieces))
        clocks = np.array([pieces.planned(graph, copied) for graph in graphs], np.int64)
        return replace(stage, costs=replace(stage.costs, clocks=clocks, floor=clocks))

    return replace(section, stages=tuple(map(stage_of, section.stages)))


def measure(mapped: MeshMapping, inputs: int = 12, clocks: Ints | None = None) -> Performance:
    """Run the event model: a stream of inputs through a resident network, or one input through all sections; with
    `clocks` (`ExactRun.clocks`) for what firmware was seen to take."""
    if mapped.resident:
        turns = None if clocks is None else clocks[:, :, 1:] - clocks[:, :, :1]
        timing = simulate(mapped.placed[0], inputs, turns)
        alone = simulate(mapped.placed[0], 1, turns).latency if inputs > 1 else timing.latency
        return Performance(alone, timing.interval, timing.bound, timing.bottleneck, timing, (alone,))
    results = [_in_sections(mapped, own) for own in ([None] if clocks is None else clocks)]
    return max(results, key=lambda one: one.latency)


def _in_sections(mapped: MeshMapping, clocks: Ints | None) -> Performance:
    """Sections one after the other; clocks [pieces, 4] of one input."""
    sections = mapped.sections
    each: Sequence[Ints | None] = [None] * len(sections)
    if clocks is not None:
        each = np.split(clocks, np.cumsum([section.pieces for section in sections])[:-1])
    times = [SectionTimes(placed, own) for placed, own in zip(mapped.placed, each, strict=True)]
    taken = [one.after(before) for one, before in zip(times, [None, *times[:-1]], strict=True)]
    name = sections[int(np.argmax(taken))].stages[0].layer.name
    bottleneck = f"sections one after the other, most of all {name}"
    return Performance(sum(taken), sum(taken), sum(one.timing.bound for one in times), bottleneck, None, tuple(taken))
