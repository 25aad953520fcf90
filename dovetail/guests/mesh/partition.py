"""Cuts a network into pieces, one for each element, so that all of it is resident, or in sections where it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.guests.mesh.choice import Objective, SlabGroup, Streaming, choose, choose_slabs, stream_layer, worth
from dovetail.guests.mesh.cuts import (
    Cut,
    CutCosts,
    Frontier,
    PieceSizes,
    bounds,
    costs_of,
    frontier,
    frontier_or_empty,
    grain,
)
from dovetail.guests.mesh.layers import INPUT, MOST_SUMS, Ints, MeshLayer, OperandRead, layers_of, output_layers
from dovetail.guests.mesh.topology import Topology
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array, Box, TensorType, box_shape, box_slices, full_box
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
    """Of every piece."""
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
        return np.asarray(self.costs.fixed + self.slots[0] * self.costs.slot + self.costs.others)

    @property
    def last(self) -> NDArray[np.bool_]:
        """The pieces that give results: of those that sum for each other, the last."""
        return np.asarray(np.arange(self.pieces) % self.cut.sums == self.cut.sums - 1)

    @property
    def result(self) -> TensorType:
        """Type of the layer's result."""
        return self.layer.graph.types[self.layer.graph.outputs[0]]

    def result_box(self, piece: int) -> Box:
        """The part of the layer's result that a piece computes."""
        shape = self.result.shape
        r0, r1, c0, c1, o0, o1 = (int(end) for end in self.boxes[piece, :6])
        if len(shape) == 4 and shape[0] == 1:
            return ((0, 1), (r0, r1), (c0, c1), (o0, o1))
        if len(shape) == 2 and shape[0] == 1:
            return ((0, 1), (o0, o1))
        return full_box(shape)

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
    streaming: Streaming | None = None
    """How the one stage is streamed through DRAM; None where everything is resident."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return sum(stage.pieces for stage in self.stages)

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
        return len(self.sections) == 1 and self.sections[0].streaming is None

    def outputs_in(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """The network's outputs, given the results of its layers."""
        types = self.graph.types
        names = {name: self.layers[index].graph.outputs[0] for name, index in self.outputs.items()}
        return {name: values[value].reshape(types[name].shape) for name, value in names.items()}


FEW_SUMS = 2
"""Parts of a layer's sums at most, where partial sums are too much for the links between chips."""


def partition_mesh(
    graph: Graph, regions: Sequence[Region], topology: Topology, objective: Objective, most_sums: int = MOST_SUMS
) -> MeshPartition:
    """Cut a network into pieces.

    Args:
        graph: the integer graph.
        regions: its regions, as `dovetail.schedule.partition` makes them.
        topology: the mesh it shall run on.
        objective: what for.
        most_sums: into how many parts the sums of a layer are cut at most.

    Raises:
        PlanError: a layer's smallest piece does not fit an element.
        ModelError: the network does not run on a mesh.
    """
    layers = tuple(replace(layer, most_sums=most_sums) for layer in layers_of(graph, regions))
    outputs = output_layers(graph, layers, regions)
    found = resident(layers, topology, objective)
    sections = (found,) if found else sections_of(layers, topology)
    return MeshPartition(graph, layers, outputs, topology.mesh, objective, sections)


def resident(layers: Sequence[MeshLayer], topology: Topology, objective: Objective) -> Section | None:
    """All layers on the mesh at once; None where they do not fit. Slots are given up before that: first to two."""
    mesh, elements = topology.mesh, len(topology.elements)
    chips, capacity = len(topology.places), topology.capacity
    for slots in slot_choices(layers, objective):
        slabs = choose_slabs(layers, slots, mesh, chips, capacity, objective) if chips > 1 and capacity else None
        if slabs:
            return section(layers, slabs[1], slots, mesh, slabs[0])
        fronts = [frontier_or_empty(layer, mesh, held, elements) for layer, held in zip(layers, slots, strict=True)]
        cuts = choose(fronts, elements, objective)
        if cuts is not None:
            return section(layers, cuts, slots, mesh)
    return None


def residents(layers: Sequence[MeshLayer], fronts: Sequence[Frontier], topology: Topology) -> list[Section]:
    """Layers on the mesh at once for latency, on all elements and on ever fewer: more pieces send more messages, so
    that more need not be better. On many elements, a few numbers of them. `fronts` are the layers' with one slot."""
    elements, slots = len(topology.elements), [(1,) * len(layer.readings) for layer in layers]
    found: dict[tuple[Cut, ...], None] = {}
    for count in range(elements, 0, -1 if elements <= SMALL else -(-elements // _FEWER)):
        cuts = choose(fronts, count, Objective.LATENCY)
        if cuts is None:
            break
        found[tuple(cuts)] = None
    return [section(layers, cuts, slots, topology.mesh) for cuts in found]


SMALL = 64
"""Elements up to which every fewer number of them is tried."""
_FEWER = 6
"""How many numbers of more."""


def slot_choices(layers: Sequence[MeshLayer], objective: Objective) -> list[list[tuple[int, ...]]]:
    """Numbers of slots to try in turn, for each operand of each layer: ever fewer."""
    levels: list[int] = []  # layers on the longest way from the network's inputs, 1 for the first
    for layer in layers:
        levels.append(1 + max((levels[r.producer] for r in layer.readings if r.producer != INPUT), default=0))
    tried: list[list[tuple[int, ...]]] = []
    for most in (max(levels) + 1, 2, 1):
        slots = [_slots(layer, levels, objective, most) for layer in layers]
        if slots not in tried:
            tried.append(slots)
    return tried


def section(
    layers: Sequence[MeshLayer],
    cuts: Sequence[Cut],
    slots: Sequence[tuple[int, ...]],
    mesh: Mesh,
    groups: tuple[SlabGroup, ...] = (),
) -> Section:
    """Resident stages of some layers."""
    stages: list[MeshStage] = []
    first = 0
    for layer, cut, held in zip(layers, cuts, slots, strict=True):
        stages.append(make_stage(layer, cut, held, mesh, first))
        first += stages[-1].pieces
    return Section(tuple(stages), groups)


def make_stage(layer: MeshLayer, cut: Cut, slots: tuple[int, ...], mesh: Mesh, first: int) -> MeshStage:
    """A layer cut in one way, every piece's box and costs.

    Raises:
        PlanError: a piece does not fit its element.
    """
    return boxed_stage(layer, cut, boxes_of(layer, cut, mesh), slots, mesh, first)


def boxed_stage(
    layer: MeshLayer,
    cut: Cut,
    boxes: NDArray[np.int64],
    slots: tuple[int, ...],
    mesh: Mesh,
    first: int,
    free: bool = False,
) -> MeshStage:
    """A layer in the given boxes, [pieces, 8]; other arguments and errors as for `MeshStage` and `make_stage`."""
    sizes = sizes_of(layer, cut, boxes, mesh)
    stage = MeshStage(layer, cut, boxes, slots, costs_of(layer, sizes, mesh, slots), first, free)
    most = int(stage.memory.max())
    if most > mesh.usable:
        hint = "cut the layer into more pieces"
        raise PlanError(f"a piece takes {most} bytes, an element has {mesh.usable}", where=layer.name, hint=hint)
    return stage


_MOST_LOOKED_AT = 16
"""Parts of a layer's channels, at most, of which each is looked at for lines; the lines of others are the layer's."""


def sizes_of(layer: MeshLayer, cut: Cut, boxes: NDArray[np.int64], mesh: Mesh, looked: bool = True) -> PieceSizes:
    """The sizes of the pieces in those boxes, [pieces, 8]; `looked`: whether lines are looked for, of a few parts."""
    spans, parts = boxes[:, 1::2] - boxes[:, ::2], np.full(len(boxes), cut.sums)
    place, lined = np.arange(len(boxes)) % cut.sums, None
    channels, which = np.unique(boxes[:, 4:6], axis=0, return_inverse=True)
    if looked and mesh.pieces is None and cut.sums == 1 and len(channels) <= _MOST_LOOKED_AT:
        lined = np.array([layer.lined(*span) for span in channels.tolist()])[which.reshape(-1)]
    return PieceSizes(spans[:, 0], spans[:, 1], spans[:, 2], spans[:, 3], parts, place, lined)


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


def _slots(layer: MeshLayer, levels: Sequence[int], objective: Objective, most: int) -> tuple[int, ...]:
    """Inputs' worth of each operand: one for latency. For throughput one more than there are layers on the way, so that
    a value that waits for others holds nobody up, if no more than `most`."""
    if objective is Objective.LATENCY:
        return (1,) * len(layer.readings)
    waits = [levels[layer.index] - (levels[r.producer] if r.producer != INPUT else 0) for r in layer.readings]
    return tuple(min(1 + wait, most) for wait in waits)


_LONGEST = 12
"""Layers of a section at most."""


def sections_of(layers: Sequence[MeshLayer], topology: Topology) -> tuple[Section, ...]:
    """The sections that take the least time one after the other, by dynamic programming over layers.

    Raises:
        PlanError: a layer fits neither way (says what its smallest piece takes), or DRAM is too small.
    """
    mesh, elements = topology.mesh, len(topology.elements)
    needed = sum(layer.constant_bytes + layer.result_bytes for layer in layers)
    if needed > mesh.dram_bytes * len(topology.places):
        what = f"weights and values take {needed} bytes, the DRAM has {mesh.dram_bytes * len(topology.places)}"
        raise PlanError(what, where="mesh", hint="use more chips")
    dram = mesh.rates.dram * len(topology.places)
    streams = [_streamed(layer, topology) for layer in layers]
    fronts = [frontier_or_empty(layer, mesh, (1,) * len(layer.readings), elements) for layer in layers]
    best: list[tuple[float, int, list[Cut] | None]] = [(0.0, 0, None)]
    for end in range(1, len(layers) + 1):
        streaming = streams[end - 1]
        options: list[tuple[float, int, list[Cut] | None]] = []
        if streaming is not None:
            options.append((best[end - 1][0] + streaming.estimate, end - 1, None))
        for begin in range(max(0, end - _LONGEST), end):
            cuts = choose(fronts[begin:end], elements, Objective.LATENCY)
            if cuts is not None:
                time = best[begin][0] + worth(fronts[begin:end], cuts, Objective.LATENCY)
                options.append((time + _moved(layers, begin, end) / dram, begin, cuts))
        if not options:
            frontier(layers[end - 1], mesh, (1,) * len(layers[end - 1].readings), elements)  # raises, with the levers
            hint = "use more elements with --boards or --chips"
            raise PlanError("neither resident nor streamed does it fit", where=layers[end - 1].name, hint=hint)
        best.append(min(options, key=lambda option: option[0]))
    found_sections: list[Section] = []
    end = len(layers)
    while end:
        _, begin, cuts = best[end]
        if cuts is None:
            streaming = streams[begin]
            assert streaming is not None
            found_sections.append(Section((streamed_stage(layers[begin], streaming, topology),), streaming=streaming))
        else:
            members = layers[begin:end]
            found_sections.append(section(members, cuts, [(1,) * len(layer.readings) for layer in members], mesh))
        end = begin
    return tuple(reversed(found_sections))


def streamed_stage(layer: MeshLayer, streaming: Streaming, topology: Topology) -> MeshStage:
    """The pieces of a streamed layer; their memory is what a round takes."""
    mesh, slots, cut = topology.mesh, (1,) * len(layer.readings), streaming.cut
    boxes = boxes_of(layer, cut, mesh)
    costs, none = (
        costs_of(layer, sizes_of(layer, cut, boxes, mesh, looked=False), mesh, slots),
        np.zeros(len(boxes), np.int64),
    )
    costs = replace(costs, fixed=np.full(len(boxes), streaming.memory), slot=none, others=none)
    return MeshStage(layer, cut, boxes, slots, costs, 0)


def _streamed(layer: MeshLayer, topology: Topology) -> Streaming | None:
    """How a layer is streamed on one chip; None where it cannot be."""
    try:
        return stream_layer(layer, topology.mesh, int(np.bincount(topology.elements // topology.mesh.per_chip).max()))
    except PlanError:
        return None


def _moved(layers: Sequence[MeshLayer], begin: int, end: int) -> int:
    """Bytes through DRAM of a resident section: weights, what it takes from before, what later layers want."""
    own = layers[begin:end]
    readings = [reading for layer in own for reading in layer.readings if not begin <= reading.producer < end]
    taken = {reading.value: prod(reading.image) * reading.itemsize for reading in readings}
    wanted = {len(layers) - 1, *(reading.producer for layer in layers[end:] for reading in layer.readings)}
    given = sum(layer.result_bytes for layer in own if layer.index in wanted)
    return sum(layer.constant_bytes for layer in own) + sum(taken.values()) + given
