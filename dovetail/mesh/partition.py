"""Cuts a network into pieces, one for each element, so that all of it is resident, or in sections where it must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.graph.graph import Graph
from dovetail.mesh.choice import Objective, choose
from dovetail.mesh.cuts import Costs, Cut, Ints, Sizes, bounds, costs_of, frontier
from dovetail.mesh.layers import INPUT, Layer, Reading, layers_of, output_layers
from dovetail.mesh.slabs import Group, choose_slabs
from dovetail.mesh.stream import Streaming
from dovetail.mesh.topology import Topology
from dovetail.partition import Region
from dovetail.target.mesh import Mesh


@dataclass(frozen=True)
class Stage:
    """A layer cut into pieces, numbered by rows, columns, channels, sums, the last fastest."""

    layer: Layer
    cut: Cut
    boxes: NDArray[np.int64]
    """[pieces, 8]: first and last + 1 of rows, columns, channels, sums."""
    slots: tuple[int, ...]
    """Inputs' worth of each operand a piece holds."""
    costs: Costs
    """Of every piece."""
    first: int
    """Number of its first piece among all of its section."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.boxes)

    @property
    def memory(self) -> Ints:
        """Bytes of each piece's element that are used."""
        return np.asarray(self.costs.fixed + self.slots[0] * self.costs.slot + self.costs.others)

    @property
    def last(self) -> NDArray[np.bool_]:
        """The pieces that give results: of those that sum for each other, the last."""
        return np.asarray(np.arange(self.pieces) % self.cut.sums == self.cut.sums - 1)


@dataclass(frozen=True)
class Section:
    """Stages that are on the mesh at the same time; what comes from other sections comes through DRAM."""

    stages: tuple[Stage, ...]
    groups: tuple[Group, ...] = ()
    """Layers whose slabs share chips; empty where they have no chips of their own."""
    streaming: Streaming | None = None
    """How the one stage is streamed through DRAM; None where everything is resident."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return sum(stage.pieces for stage in self.stages)


@dataclass(frozen=True)
class Partitioned:
    """A network in pieces."""

    graph: Graph
    layers: tuple[Layer, ...]
    outputs: dict[str, int]
    """Network output -> layer."""
    mesh: Mesh
    objective: Objective
    sections: tuple[Section, ...]

    @property
    def resident(self) -> bool:
        """True where the whole network is on the mesh at once."""
        return len(self.sections) == 1 and self.sections[0].streaming is None


def partition_mesh(
    graph: Graph, regions: Sequence[Region], topology: Topology, objective: Objective
) -> Partitioned:
    """Cut a network into pieces.

    Args:
        graph: the integer graph.
        regions: its regions, as `dovetail.partition` makes them.
        topology: the mesh it shall run on.
        objective: what for.

    Raises:
        PlanError: a layer's smallest piece does not fit an element.
        ModelError: the network does not run on a mesh.
    """
    mesh = topology.mesh
    layers = layers_of(graph, regions)
    outputs = output_layers(graph, layers, regions)
    levels = _levels(layers)
    found = _resident(layers, levels, topology, objective)
    if found is None:
        from dovetail.mesh.sections import sections_of

        return Partitioned(graph, layers, outputs, mesh, objective, sections_of(layers, topology))
    return Partitioned(graph, layers, outputs, mesh, objective, (found,))


def _resident(
    layers: Sequence[Layer], levels: Sequence[int], topology: Topology, objective: Objective
) -> Section | None:
    """All layers on the mesh at once; None where they do not fit. Slots are given up before that: first to two."""
    mesh, elements = topology.mesh, len(topology.elements)
    chips, capacity = len(topology.places), topology.capacity
    tried: list[list[tuple[int, ...]]] = []
    for most in (max(levels) + 1, 2, 1):
        slots = [_slots(layer, levels, objective, most) for layer in layers]
        if slots in tried:
            continue
        tried.append(slots)
        slabs = choose_slabs(layers, slots, mesh, chips, capacity, objective) if chips > 1 and capacity else None
        cuts = slabs.cuts if slabs else _anywhere(layers, slots, mesh, elements, objective)
        if cuts is not None:
            return section(layers, cuts, slots, mesh, slabs.groups if slabs else ())
    return None


def _anywhere(
    layers: Sequence[Layer], slots: Sequence[tuple[int, ...]], mesh: Mesh, elements: int, objective: Objective
) -> list[Cut] | None:
    """Cuts of all layers together, wherever their pieces lie; None where they do not fit."""
    try:
        found = [frontier(layer, mesh, held, elements) for layer, held in zip(layers, slots, strict=True)]
    except PlanError:
        return None
    return choose(found, elements, objective)


def section(
    layers: Sequence[Layer], cuts: Sequence[Cut], slots: Sequence[tuple[int, ...]], mesh: Mesh,
    groups: tuple[Group, ...] = (),
) -> Section:  # fmt: skip
    """Resident stages of some layers."""
    stages: list[Stage] = []
    first = 0
    for layer, cut, held in zip(layers, cuts, slots, strict=True):
        stages.append(make_stage(layer, cut, held, mesh, first))
        first += stages[-1].pieces
    return Section(tuple(stages), groups)


def make_stage(layer: Layer, cut: Cut, slots: tuple[int, ...], mesh: Mesh, first: int) -> Stage:
    """A layer cut in one way, every piece's box and costs.

    Raises:
        PlanError: a piece does not fit its element.
    """
    boxes = _boxes(layer, cut, mesh)
    spans = boxes[:, 1::2] - boxes[:, ::2]
    sizes = Sizes(spans[:, 0], spans[:, 1], spans[:, 2], spans[:, 3], np.full(len(boxes), cut.sums))
    stage = Stage(layer, cut, boxes, slots, costs_of(layer, sizes, mesh, slots), first)
    most = int(stage.memory.max())
    if most > mesh.usable:
        raise PlanError(f"a piece takes {most} bytes, an element has {mesh.usable}", where=layer.name,
                        hint="cut the layer into more pieces")  # fmt: skip
    return stage


def axis_bounds(layer: Layer, cut: Cut, mesh: Mesh) -> tuple[Ints, Ints, Ints, Ints]:
    """Where the parts of rows, columns, channels and sums begin and end."""
    height, width, channels = layer.image
    array = mesh.array
    step = array.dense_outputs if layer.kind == "dense" else array.rows
    return (
        bounds(height, cut.rows),
        bounds(width, cut.columns, array.columns if layer.on_array else 1),
        bounds(channels, cut.channels, step),
        bounds(layer.summed, cut.sums, layer.unit),
    )


def _boxes(layer: Layer, cut: Cut, mesh: Mesh) -> NDArray[np.int64]:
    limits = axis_bounds(layer, cut, mesh)
    shape = (cut.rows, cut.columns, cut.channels, cut.sums)
    index = np.indices(shape).reshape(4, -1)
    spans = [(limit[place], limit[place + 1]) for limit, place in zip(limits, index, strict=True)]
    return np.stack([end for span in spans for end in span], axis=1)


def read_span(reading: Reading, layer: Layer, axis: int, boxes: NDArray[np.int64]) -> tuple[Ints, Ints]:
    """First and last + 1 of what pieces read of an operand along its rows (0), columns (1) or channels (2)."""
    size = reading.image[axis]
    whole = np.zeros(len(boxes), np.int64), np.full(len(boxes), size)
    if reading.channels == "all":
        return whole
    if layer.kind == "dense" and reading.channels == "summed":
        height, width, depth = reading.image
        if height * width == 1:
            return (boxes[:, 6], boxes[:, 7]) if axis == 2 else whole
        row = width * depth
        return (boxes[:, 6] // row, -(-boxes[:, 7] // row)) if axis == 0 else whole
    if axis == 2:
        place = 6 if reading.channels == "summed" else 4
        return boxes[:, place], boxes[:, place + 1]
    start = boxes[:, 2 * axis] * reading.step[axis] - reading.lead[axis]
    stop = (boxes[:, 2 * axis + 1] - 1) * reading.step[axis] + reading.span[axis] - reading.lead[axis]
    return np.maximum(start, 0), np.minimum(stop, size)


def _levels(layers: Sequence[Layer]) -> list[int]:
    """Layers on the longest way from the network's inputs, 1 for the first."""
    found: list[int] = []
    for layer in layers:
        found.append(1 + max((found[r.producer] for r in layer.readings if r.producer != INPUT), default=0))
    return found


def _slots(layer: Layer, levels: Sequence[int], objective: Objective, most: int) -> tuple[int, ...]:
    """Inputs' worth of each operand: one for latency. For throughput one more than there are layers on the way, so that
    a value that waits for others holds nobody up, if no more than `most`."""
    if objective is Objective.LATENCY:
        return (1,) * len(layer.readings)
    waits = [levels[layer.index] - (levels[r.producer] if r.producer != INPUT else 0) for r in layer.readings]
    return tuple(min(1 + wait, most) for wait in waits)
