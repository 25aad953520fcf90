"""Cuts a network into pieces, one for each element, so that all of it is resident."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.guests.mesh.choice import Objective, SlabGroup, SlabSearch, choose
from dovetail.guests.mesh.cuts import Cut, CutCosts, Frontier, PieceSizes, bounds, costs_of, frontier, grain
from dovetail.guests.mesh.layers import (
    INPUT,
    MOST_SUMS,
    Ints,
    MeshLayer,
    OperandRead,
    box_of,
    layers_of,
    output_layers,
)
from dovetail.guests.mesh.topology import Topology
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array, Box, TensorType, box_shape, box_slices
from dovetail.schedule.region import Region
from dovetail.target.mesh import Mesh


@dataclass(frozen=True)
class MeshStage:
    """A layer cut into pieces, numbered by rows, columns, channels, sums, the last fastest."""

    layer: MeshLayer
    cut: Cut
    boxes: NDArray[np.int64]
    """[pieces, 8]: first and last + 1 of rows, columns, channels, sums."""
    slots: tuple[int, ...]
    """Inputs' worth of each operand a piece holds."""
    costs: CutCosts
    """Costs of every piece."""
    first: int
    """Number of its first piece among all of its section."""
    free: bool = False
    """True where the boxes form no grid; `cut` then counts them as rows."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.boxes)

    @property
    def memory(self) -> Ints:
        """Bytes of each piece's element that are used."""
        return self.costs.memory(self.slots)

    @property
    def last(self) -> NDArray[np.bool_]:
        """The pieces that give results: of those that sum for each other, the last."""
        return np.asarray(np.arange(self.pieces) % self.cut.sums == self.cut.sums - 1)

    @property
    def result(self) -> TensorType:
        """Type of the layer's result."""
        return self.layer.result

    def spans(self, piece: int) -> list[tuple[int, int]]:
        """First and last + 1 of a piece's rows, columns, channels and sums."""
        ends = self.boxes[piece].tolist()
        return list(zip(ends[::2], ends[1::2], strict=True))

    def result_box(self, piece: int) -> Box:
        """The part of the layer's result that a piece computes."""
        return box_of(self.result.shape, *self.spans(piece)[:3])

    def put(self, values: dict[str, Array], piece: int, content: Array) -> None:
        """Put the result of a piece into the layer's result among values; zeros where no piece has put any."""
        kind, box = self.result, self.result_box(piece)
        result = values.setdefault(self.layer.graph.outputs[0], np.zeros(kind.shape, kind.dtype.numpy))
        result[box_slices(box)] = content.reshape(box_shape(box))

    def readers(self, reading: OperandRead) -> Ints:
        """The pieces that read an operand: the first is summed over, the others are for what gives results."""
        return np.nonzero(self.last | (reading is self.layer.readings[0]))[0]


@dataclass(frozen=True)
class Section:
    """Stages that are on the mesh at the same time; what comes from other sections comes through DRAM."""

    stages: tuple[MeshStage, ...]
    groups: tuple[SlabGroup, ...] = ()
    """Layers whose slabs share chips; empty where they have no chips of their own."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return sum(stage.pieces for stage in self.stages)

    @cached_property
    def layers(self) -> frozenset[int]:
        """Indices of its layers."""
        return frozenset(stage.layer.index for stage in self.stages)

    @cached_property
    def owners(self) -> list[tuple[MeshStage, int]]:
        """The stage of each piece, and its number there."""
        return [(stage, piece) for stage in self.stages for piece in range(stage.pieces)]


@dataclass(frozen=True)
class MeshPartition:
    """A network in pieces."""

    graph: Graph
    layers: tuple[MeshLayer, ...]
    outputs: dict[str, int]
    """Network output -> layer."""
    mesh: Mesh
    objective: Objective
    sections: tuple[Section, ...]

    @property
    def resident(self) -> bool:
        """True where the whole network is on the mesh at once."""
        return len(self.sections) == 1

    def outputs_in(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """The network's outputs, given the results of its layers."""
        types = self.graph.types
        names = {name: self.layers[index].graph.outputs[0] for name, index in self.outputs.items()}
        return {name: values[value].reshape(types[name].shape) for name, value in names.items()}


FEW_SUMS = 2
"""Parts of a layer's sums at most, where partial sums are too much for the links between chips."""


def partition_mesh(
    graph: Graph, regions: Sequence[Region], topology: Topology, objective: Objective, most_sums: int = MOST_SUMS
) -> MeshPartition | None:
    """Cut a network into pieces that are on the mesh at once; None where they do not fit.

    Args:
        graph: the integer graph.
        regions: its regions, as `dovetail.schedule.partition` makes them.
        topology: the mesh it shall run on.
        objective: the time that counts.
        most_sums: into how many parts the sums of a layer are cut at most.

    Raises:
        ModelError: the network does not run on a mesh.
    """
    layers = tuple(replace(layer, most_sums=most_sums) for layer in layers_of(graph, regions))
    outputs = output_layers(graph, layers, regions)
    whole = resident(layers, topology, objective)
    return MeshPartition(graph, layers, outputs, topology.mesh, objective, (whole,)) if whole else None


def resident(layers: Sequence[MeshLayer], topology: Topology, objective: Objective) -> Section | None:
    """All layers on the mesh at once; None where they do not fit. Slots are given up before that: first to two."""
    mesh, elements = topology.mesh, len(topology.elements)
    chips, capacity = len(topology.places), topology.capacity
    for slots in slot_choices(layers, objective):
        slabs = SlabSearch(layers, slots, mesh, chips, capacity, objective).run() if chips > 1 and capacity else None
        if slabs:
            return resident_section(layers, slabs[1], mesh, slots, slabs[0])
        fronts = [frontier(layer, mesh, held, elements) for layer, held in zip(layers, slots, strict=True)]
        cuts = choose(fronts, elements, objective)
        if cuts is not None:
            return resident_section(layers, cuts, mesh, slots)
    return None


def frontiers_of(layers: Sequence[MeshLayer], topology: Topology) -> list[Frontier]:
    """The cuts of each layer alone on all elements, one slot for each operand."""
    return [frontier(layer, topology.mesh, layer.one_slot, len(topology.elements)) for layer in layers]


def residents(layers: Sequence[MeshLayer], fronts: Sequence[Frontier], topology: Topology) -> list[Section]:
    """Layers on the mesh at once for latency, on all elements and on ever fewer: more pieces send more messages, so
    that more need not be better. On many elements, a few numbers of them. `fronts`: as `frontiers_of`."""
    elements = len(topology.elements)
    cuts: dict[tuple[Cut, ...], None] = {}
    for count in range(elements, 0, -1 if elements <= SMALL else -(-elements // _FEWER)):
        best = choose(fronts, count, Objective.LATENCY)
        if best is None:
            break
        cuts[tuple(best)] = None
    return [resident_section(layers, one, topology.mesh) for one in cuts]


SMALL = 64
"""Elements up to which every fewer number of them is tried."""
_FEWER = 6
"""Numbers of more elements that are tried."""


def slot_choices(layers: Sequence[MeshLayer], objective: Objective) -> list[list[tuple[int, ...]]]:
    """Numbers of slots to try in turn, for each operand of each layer: ever fewer.

    One for latency. For throughput one more than there are layers on the way, so that a value that waits for others
    holds nobody up.
    """
    if objective is Objective.LATENCY:
        return [[layer.one_slot for layer in layers]]
    levels: dict[int, int] = {INPUT: 0}  # layers on the longest way from the network's inputs, 1 for the first
    for layer in layers:
        levels[layer.index] = 1 + max((levels[reading.producer] for reading in layer.readings), default=0)
    waits = [[1 + levels[layer.index] - levels[r.producer] for r in layer.readings] for layer in layers]
    choices = [[tuple(min(wait, most) for wait in each) for each in waits] for most in (max(levels.values()) + 1, 2, 1)]
    return [slots for number, slots in enumerate(choices) if slots not in choices[:number]]


def resident_section(
    layers: Sequence[MeshLayer],
    cuts: Sequence[Cut],
    mesh: Mesh,
    slots: Sequence[tuple[int, ...]] | None = None,
    groups: tuple[SlabGroup, ...] = (),
) -> Section:
    """Layers in resident pieces; `slots` of each, one of each operand if none are given."""
    stages: list[MeshStage] = []
    first = 0
    for layer, cut, held in zip(layers, cuts, slots or [layer.one_slot for layer in layers], strict=True):
        stages.append(boxed_stage(layer, cut, boxes_of(layer, cut, mesh), held, mesh, first))
        first += stages[-1].pieces
    return Section(tuple(stages), groups)


def boxed_stage(
    layer: MeshLayer,
    cut: Cut,
    boxes: NDArray[np.int64],
    slots: tuple[int, ...],
    mesh: Mesh,
    first: int,
    free: bool = False,
) -> MeshStage:
    """A layer in boxes, [pieces, 8], with their costs; arguments as the fields of `MeshStage`.

    Raises:
        PlanError: a piece does not fit its element.
    """
    costs = costs_of(layer, sizes_of(layer, cut, boxes, mesh), mesh, slots)
    stage = MeshStage(layer, cut, boxes, slots, costs, first, free)
    most = int(stage.memory.max())
    if most > mesh.usable:
        hint = "cut the layer into more pieces"
        raise PlanError(f"a piece takes {most} bytes, an element has {mesh.usable}", where=layer.name, hint=hint)
    return stage


_MOST_LINED = 16
"""Parts of a layer's channels, at most, of which each is searched for lines; others have the layer's."""


def sizes_of(layer: MeshLayer, cut: Cut, boxes: NDArray[np.int64], mesh: Mesh) -> PieceSizes:
    """The sizes of the pieces in boxes, [pieces, 8], and how their sums are requantised."""
    sizes = piece_sizes(cut, boxes)
    channels, which = np.unique(boxes[:, 4:6], axis=0, return_inverse=True)
    if mesh.pieces is not None or cut.sums > 1 or len(channels) > _MOST_LINED:
        return sizes
    lined = np.array([layer.line_use(*span) for span in channels.tolist()])
    return replace(sizes, lined=lined[which.reshape(-1)])


def piece_sizes(cut: Cut, boxes: NDArray[np.int64]) -> PieceSizes:
    """The sizes of the pieces in boxes, [pieces, 8]."""
    rows, columns, channels, sums = (boxes[:, 1::2] - boxes[:, ::2]).T
    return PieceSizes(rows, columns, channels, sums, np.full(len(boxes), cut.sums), np.arange(len(boxes)) % cut.sums)


def boxes_of(layer: MeshLayer, cut: Cut, mesh: Mesh) -> NDArray[np.int64]:
    """[pieces, 8] the boxes of a cut in equal parts, as `Stage.boxes`."""
    shape = (cut.rows, cut.columns, cut.channels, cut.sums)
    sizes = (*layer.image, layer.summed)
    steps = [
        step if parts <= -(-size // step) else 1  # more parts than the array computes side by side: a user's own
        for size, parts, step in zip(sizes, shape, (*grain(layer, mesh), layer.unit), strict=True)
    ]
    limits = [bounds(size, parts, step) for size, parts, step in zip(sizes, shape, steps, strict=True)]
    index = np.indices(shape).reshape(4, -1)
    spans = [(limit[place], limit[place + 1]) for limit, place in zip(limits, index, strict=True)]
    return np.stack([end for span in spans for end in span], axis=1)


def read_span(reading: OperandRead, layer: MeshLayer, axis: int, boxes: NDArray[np.int64]) -> tuple[Ints, Ints]:
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
