"""A network mapped to a mesh: partition, place and route in one line, its speed, and its pieces in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dovetail.errors import PlanError, ProgramError
from dovetail.guests.mesh.choice import Objective
from dovetail.guests.mesh.layers import Ints, layers_of, output_layers
from dovetail.guests.mesh.partition import FEW_SUMS, SMALL, MeshPartition, MeshStage, Section, partition_mesh, read_span
from dovetail.guests.mesh.placement import TRIES, SectionPlacement, Tables, place, tables_of
from dovetail.guests.mesh.sections import SectionSearch, SectionTimes, fewer, one_chip, placements
from dovetail.guests.mesh.simulate import StreamTiming, simulate
from dovetail.guests.mesh.streaming import simulate_stream
from dovetail.guests.mesh.topology import Topology
from dovetail.guests.mesh.traffic import Traffic
from dovetail.ir.crop import crop
from dovetail.ir.graph import Graph, Node, evaluate
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.types import Array, Box, DType, TensorType, box_slices, full_box
from dovetail.schedule.region import Region

PARTIAL = "partial_sums"
"""Name of the operand through which sums go from piece to piece."""


def piece_graph(stage: MeshStage, piece: int) -> tuple[Graph, dict[str, Box]]:
    """The computation of a piece, and the part it reads of each operand.

    Of pieces that sum for each other, all but the first read `PARTIAL`, and all but the last give 32-bit sums.
    """
    layer = stage.layer
    box = stage.result_box(piece)
    if box == full_box(stage.result.shape):
        cut = layer.graph
        reads = {name: full_box(cut.types[name].shape) for name in cut.inputs}
    else:
        tile = crop(layer.graph, box)
        cut, reads = tile.graph, tile.reads
    if stage.cut.sums == 1:
        return cut, reads
    return _partial(stage, piece, cut, reads)


def _partial(stage: MeshStage, piece: int, cut: Graph, reads: dict[str, Box]) -> tuple[Graph, dict[str, Box]]:
    """A piece cut along what it sums over."""
    parts = stage.layer.parts
    assert parts is not None and parts.anchor is not None
    span = (int(stage.boxes[piece, 6]), int(stage.boxes[piece, 7]))
    place, count = piece % stage.cut.sums, stage.cut.sums
    source, weights, *bias = parts.anchor.inputs
    types, constants = dict(cut.types), dict(cut.constants)
    narrowed = [source] if parts.pad is None else [parts.pad.inputs[0], source]
    for name in (*narrowed, weights):
        types[name] = TensorType((*types[name].shape[:-1], span[1] - span[0]), types[name].dtype)
    constants[weights] = constants[weights][..., span[0] : span[1]]
    reads = {**reads, narrowed[0]: (*reads[narrowed[0]][:-1], span)}
    nodes: list[Node] = []
    before = {node.output for node in (parts.pad, parts.anchor) if node is not None}
    for node in cut.nodes:
        if node.output == parts.anchor.output:
            nodes += _summed(node, place, count, bias, types)
        elif node.output in before or place == count - 1:
            nodes.append(node)
    outputs = cut.outputs if place == count - 1 else (nodes[-1].output,)
    read = [name for node in nodes for name in node.inputs]
    inputs = tuple(name for name in (*cut.inputs, PARTIAL) if name in read)
    constants = {name: array for name, array in constants.items() if name in read}
    graph = replace(cut, inputs=inputs, outputs=outputs, nodes=tuple(nodes), types=types, constants=constants)
    return graph, {name: box for name, box in reads.items() if name in inputs}


def _summed(node: Node, place: int, count: int, bias: list[str], types: dict[str, TensorType]) -> list[Node]:
    """The anchor of a piece: the bias is added last, what comes from the piece before by a node of its own."""
    kept = node.inputs if place == count - 1 else node.inputs[: len(node.inputs) - len(bias)]
    if place == 0:
        return [replace(node, inputs=kept)]
    own = f"{node.output}_own"
    types[own] = types[node.output]
    types[PARTIAL] = TensorType(types[node.output].shape, DType.INT32)
    return [replace(node, inputs=kept, output=own), Node(Add(), (own, PARTIAL), node.output, node.origin)]


def execute(parts: MeshPartition, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Compute a network piece by piece, each from the part it reads.

    Returns:
        An array per output.

    Raises:
        ProgramError: pieces overlap or leave something of a result out.
    """
    values: dict[str, Array] = dict(inputs)
    times = {layer.index: np.zeros(layer.graph.types[layer.graph.outputs[0]].shape, np.int8) for layer in parts.layers}
    for section in parts.sections:
        for stage in section.stages:
            _execute_stage(stage, values, times[stage.layer.index])
    for layer in parts.layers:
        if (times[layer.index] != 1).any():
            what = "pieces overlap or leave something out"
            raise ProgramError(what, where=layer.name, hint="report this with the mapping file")
    return parts.outputs_in(values)


def _execute_stage(stage: MeshStage, values: dict[str, Array], times: Array) -> None:
    """Compute the pieces of a stage into `values`, and count in `times` how often each element is."""
    result: Array | None = None
    for piece in range(stage.pieces):
        graph, reads = piece_graph(stage, piece)
        operands = {PARTIAL: result} if PARTIAL in graph.inputs and result is not None else {}
        for reading in stage.layer.readings:
            if reading.name in graph.inputs:
                whole = values[reading.value].reshape(stage.layer.graph.types[reading.name].shape)
                operands[reading.name] = np.ascontiguousarray(whole[box_slices(reads[reading.name])])
        result = evaluate(graph, operands)[graph.outputs[0]]
        if stage.last[piece]:
            stage.put(values, piece, result)
            times[box_slices(stage.result_box(piece))] += 1


def check_covered(section: Section, traffic: Traffic) -> int:
    """Check that every piece is sent all it reads: the boxes of its senders' messages, which do not overlap, hold as
    many of the elements it reads as there are.

    Returns:
        How many messages pieces receive for one input.

    Raises:
        ProgramError: a piece lacks part of an operand.
    """
    sender, receiver = traffic.pairs()
    boxes = np.concatenate([stage.boxes[:, :6] for stage in section.stages])
    stage_of = np.repeat(np.arange(len(section.stages)), [stage.pieces for stage in section.stages])
    place = {stage.layer.index: number for number, stage in enumerate(section.stages)}
    for number, stage in enumerate(section.stages):
        for reading in stage.layer.readings:
            if reading.producer not in place:
                continue
            here = (stage_of[receiver] == number) & (stage_of[sender] == place[reading.producer])
            _covered(stage, reading, receiver[here] - stage.first, boxes[sender[here]])
    return len(sender)


def _covered(stage: MeshStage, reading: Any, receiver: Any, boxes: Any) -> None:
    readers = stage.readers(reading)
    wanted, got = np.ones(stage.pieces), np.ones(len(receiver))
    for axis in range(3):
        low, high = read_span(reading, stage.layer, axis, stage.boxes)
        wanted *= high - low
        got *= np.clip(
            np.minimum(high[receiver], boxes[:, 2 * axis + 1]) - np.maximum(low[receiver], boxes[:, 2 * axis]), 0, None
        )
    total = np.bincount(receiver, weights=got, minlength=stage.pieces)
    short = [int(piece) for piece in readers if total[piece] != wanted[piece]]
    if short:
        piece = short[0]
        raise ProgramError(
            f"piece {piece} is sent {int(total[piece])} of the {int(wanted[piece])} elements it reads "
            f"of '{reading.value}'",
            where=stage.layer.name,
            hint="report this with the mapping file",
        )


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
    """The least interval: what the busiest element, link or DRAM does for one input."""
    bottleneck: str
    timing: StreamTiming | None
    """Of a resident network: the whole of it."""
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
        objective: what for. For latency, sections one after the other are compared with the network as a whole.
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
    found = place_and_route(partition_mesh(graph, regions, topology, objective), topology)
    if len(topology.places) < 2 or not found.parts.resident:
        return found
    # what goes between chips, partial sums above all, is only known once all is placed
    if objective is Objective.LATENCY:
        other = place_and_route(partition_mesh(graph, regions, topology, Objective.THROUGHPUT), topology)
        shorter = other.parts.resident and measure(other, 1).latency < measure(found, 1).latency
        return replace(other, parts=replace(other.parts, objective=objective)) if shorter else found
    first = simulate(found.whole[0], _STALLED)
    if first.interval <= first.bound * _STALLS:
        return found
    other = place_and_route(partition_mesh(graph, regions, topology, objective, FEW_SUMS), topology)
    return other if other.parts.resident and simulate(other.whole[0], _STALLED).interval < first.interval else found


def _quickest(graph: Graph, regions: Sequence[Region], topology: Topology) -> MeshMapping:
    """The least latency of what is tried: in sections, or as a whole, on a chip on fewer elements too."""
    layers = layers_of(graph, regions)
    outputs = output_layers(graph, layers, regions)

    def mapped(sections: tuple[Section, ...], placed: Sequence[SectionPlacement]) -> MeshMapping:
        parts = MeshPartition(graph, layers, outputs, topology.mesh, Objective.LATENCY, sections)
        return MeshMapping(parts, topology, tuple(placed), tuple(tables_of(one) for one in placed))

    found: list[MeshMapping] = []
    measured = SectionSearch(layers, one_chip(topology), frozenset(outputs.values())).run()
    if measured:
        found.append(mapped(tuple(one.placed.section for one in measured), [one.placed for one in measured]))
    several, small = len(topology.places) > 1, len(topology.elements) <= SMALL
    subsets = [fewer(topology, count) for count in range(topology.capacity - 1, 0, -1)] if small else []
    for where in [topology, *subsets] if several else []:
        part = _as_a_whole(graph, regions, where, Objective.LATENCY)
        found += [replace(part, topology=topology)] if part.parts.resident else []
    for where in (one_chip(topology), *([topology] if several and small else [])):
        found += [mapped((one.section,), [one]) for one in placements(layers, where, frozenset(outputs.values()))]
    if not found:  # as a model only: layers are streamed, or sections are on several chips
        return _as_a_whole(graph, regions, topology, Objective.LATENCY)
    best = min(found, key=lambda one: measure(one, 1).latency)
    for section, placed in zip(best.parts.sections, best.placed, strict=True):
        if placed is not None:
            check_covered(section, placed.traffic)
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
        found = None
        if section.streaming is None:
            found = place(section, topology, wanted(parts, index), max(1, TRIES // len(parts.sections)))
            check_covered(section, found.traffic)
        placed.append(found)
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


def wanted(parts: MeshPartition, index: int) -> frozenset[int]:
    """Layers of a section whose results go to DRAM: outputs, and what later sections read."""
    own = {stage.layer.index for stage in parts.sections[index].stages}
    later = {reading.producer for layer in parts.layers if layer.index not in own for reading in layer.readings}
    return frozenset(own & ({*parts.outputs.values()} | later))


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
        if placed is None:
            assert section.streaming is not None
            clocks.append(simulate_stream(section.streaming, mesh))
            bounds.append(max(section.streaming.dram_clocks, section.streaming.floor))
            before = None
        else:
            one = SectionTimes(placed)
            clocks.append(one.after(before))
            bounds.append(one.timing.bound)
            before = one
    name = parts.sections[int(np.argmax(clocks))].stages[0].layer.name
    bottleneck = f"sections one after the other, most of all {name}"
    return Performance(sum(clocks), sum(clocks), sum(bounds), bottleneck, None, tuple(clocks))
