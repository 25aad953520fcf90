"""Sections for little latency on one chip: a few layers, often one, on all elements at a time, then the next.

Results go through DRAM from section to section; an element's weights of the next section are loaded while the present
one computes, where its memory holds both. All elements wait for each other between sections, so the times add up. A
layer too large for all elements together is computed a part after the other, each a section.

Candidates are placed and measured by the model of time, since fetching and storing is much of what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dovetail.guests.mesh.cuts import Cut, Frontier, frontier_or_empty
from dovetail.guests.mesh.layers import Ints, MeshLayer
from dovetail.guests.mesh.partition import (
    SMALL,
    MeshStage,
    Section,
    boxed_stage,
    boxes_of,
    read_span,
    residents,
    section,
)
from dovetail.guests.mesh.placement import SectionPlacement, place
from dovetail.guests.mesh.simulate import StreamTiming, simulate
from dovetail.guests.mesh.topology import Topology
from dovetail.target.mesh import Mesh

LAYER_CODE = 1536
"""Bytes of an element's code for each layer, beside `Mesh.code`: its program is that of all sections."""
TABLE = 2048
"""Bytes of a section's header and transfers that are loaded with its constants, at most as a rule."""
JOINED = 100
"""Clocks in which elements learn that all others have come to the end of a section."""
_LONGEST = 3
"""Layers of a section at most."""
_CUTS = 8
"""Cuts of a layer that are measured, those of the most pieces; on small meshes all."""
_ROUNDS = (2, 3, 4, 6, 8, 12, 16)
"""Parts a layer that is too large is computed in."""


@dataclass(frozen=True, eq=False)
class SectionTimes:
    """A section on elements, with its times in clocks."""

    placed: SectionPlacement

    @cached_property
    def timing(self) -> StreamTiming:
        """Of one input, weights loaded."""
        return simulate(self.placed, 1)

    @property
    def load(self) -> float:
        """Clocks the DRAM takes to load weights and tables."""
        return loading(self.placed) / self.placed.topology.mesh.rates.dram

    @property
    def free(self) -> float:
        """Clocks while it runs in which nothing else wants the DRAM."""
        return max(0.0, self.timing.latency - float(self.timing.busy[-len(self.placed.topology.places) :].max()))

    @cached_property
    def memory(self) -> int:
        """Bytes of the element that uses most."""
        return max(int(stage.memory.max()) for stage in self.placed.section.stages)

    @cached_property
    def loaded(self) -> int:
        """Bytes the element with most of them loads."""
        return max(int(stage.costs.constants.max()) for stage in self.placed.section.stages) + TABLE

    def after(self, before: SectionTimes | None) -> float:
        """Clocks from the end of the section before to its own: what of its load was not done by then, and the rest."""
        ahead = before is not None and before.memory + self.loaded <= self.placed.topology.mesh.usable
        hidden = before.free if before is not None and ahead else 0.0
        return max(0.0, self.load - hidden) + self.prepared + self.timing.latency + JOINED

    @cached_property
    def prepared(self) -> float:
        """Clocks of the core before anything is fetched: of the element with most padding to write."""
        core = self.placed.topology.mesh.core
        found = [np.zeros(1)]
        for stage in self.placed.section.stages:
            rows, nbytes = padded(stage)
            found.append(core.padding_row * rows + core.padding * nbytes)
        return core.section + float(np.concatenate(found).max())


def padded(stage: MeshStage) -> tuple[Ints, Ints]:
    """[pieces] stretches of padding around the first operand of each piece, and their bytes."""
    layer, reading, boxes = stage.layer, stage.layer.readings[0], stage.boxes
    if not layer.on_array or layer.kind == "dense":
        return np.zeros(stage.pieces, np.int64), np.zeros(stage.pieces, np.int64)
    around, inside = [], []
    for axis in range(2):
        low, high = read_span(reading, layer, axis, boxes)
        inside.append(high - low)
        around.append((boxes[:, 2 * axis + 1] - boxes[:, 2 * axis] - 1) * reading.step[axis] + reading.span[axis])
    low, high = read_span(reading, layer, 2, boxes)
    start = boxes[:, 2] * reading.step[1] - reading.lead[1]
    left = read_span(reading, layer, 1, boxes)[0] > start
    sides = left.astype(np.int64) + (around[1] - inside[1] > read_span(reading, layer, 1, boxes)[0] - start)
    return around[0] - inside[0] + sides * inside[0], (around[0] * around[1] - inside[0] * inside[1]) * (high - low)


def loading(placed: SectionPlacement) -> int:
    """Bytes of weights that the chip with most reads from its DRAM when a section begins: what several of its pieces
    hold is read once."""
    total = np.zeros(len(placed.topology.places), np.int64)
    for stage in placed.section.stages:
        part = np.arange(stage.pieces) % (stage.cut.channels * stage.cut.sums)
        if stage.free:
            part = np.unique(stage.boxes[:, 4:], axis=0, return_inverse=True)[1].reshape(-1)
        chip = placed.chip[stage.first : stage.first + stage.pieces]
        rows = np.unique(np.column_stack((chip, part, stage.costs.constants)), axis=0)
        np.add.at(total, rows[:, 0], rows[:, 2])
    return int(total.max())


def sections_on_a_chip(
    layers: Sequence[MeshLayer], topology: Topology, outputs: frozenset[int]
) -> tuple[SectionTimes, ...] | None:
    """The sections that take the least time one after the other on the chip with most elements, by dynamic
    programming; None where some layer fits no way.

    Args:
        layers: the network.
        topology: the mesh.
        outputs: layers whose results the network gives.
    """
    mesh = replace(topology.mesh, code=topology.mesh.code + LAYER_CODE * len(layers))
    return _SectionSearch(layers, one_chip(topology), mesh, outputs).run()


def one_chip(topology: Topology) -> Topology:
    """The elements of the chip with most of them."""
    chip = topology.elements // topology.mesh.per_chip
    most = int(np.bincount(chip, minlength=len(topology.places)).argmax())
    return replace(topology, elements=topology.elements[chip == most])


def fewer(topology: Topology, count: int) -> Topology:
    """`count` elements of each chip."""
    chip = topology.elements // topology.mesh.per_chip
    rank = np.array([np.count_nonzero(chip[:place] == own) for place, own in enumerate(chip)])
    return replace(topology, elements=topology.elements[rank < count])


def placements(layers: Sequence[MeshLayer], topology: Topology, outputs: frozenset[int]) -> list[SectionPlacement]:
    """All layers at once on all elements and on fewer, in two orders of elements each; arguments as of
    `sections_on_a_chip`."""
    slots, count = [(1,) * len(layer.readings) for layer in layers], len(topology.elements)
    fronts = [frontier_or_empty(one, topology.mesh, held, count) for one, held in zip(layers, slots, strict=True)]
    orders = (topology, near_dram(topology))
    return [place(found, where, outputs, 1) for found in residents(layers, fronts, topology) for where in orders]


def near_dram(topology: Topology) -> Topology:
    """The same with its elements in the order of their distance from the DRAM of their chip."""
    per, count = topology.mesh.per_chip, len(topology.elements)
    chip, at = topology.elements // per, topology.router_of[topology.elements % per]
    hops = np.array([topology.routes(int(chip[n])).hops[topology.dram, int(at[n])] for n in range(count)])
    return replace(topology, elements=topology.elements[np.lexsort((topology.elements, hops, chip))])


@dataclass(frozen=True)
class _SectionSearch:
    """Fields as of `sections_on_a_chip`; `mesh` keeps the room for code that programs of all sections take."""

    layers: Sequence[MeshLayer]
    topology: Topology
    mesh: Mesh
    outputs: frozenset[int]
    known: dict[int, Frontier] = field(default_factory=dict)

    @property
    def roomy(self) -> Topology:
        """The mesh with that room."""
        return replace(self.topology, mesh=self.mesh)

    def run(self) -> tuple[SectionTimes, ...] | None:
        """The best sections."""
        needed = sum(layer.constant_bytes + layer.result_bytes for layer in self.layers)
        if needed > self.mesh.dram_bytes:
            return None
        best: list[tuple[float, tuple[SectionTimes, ...]]] = [(0.0, ())]
        for end in range(1, len(self.layers) + 1):
            options = []
            for begin in range(max(0, end - _LONGEST), end):
                time, before = best[begin]
                for found in self.options(begin, end):
                    behind = time
                    for number, one in enumerate(found):
                        last = found[number - 1] if number else before[-1] if before else None
                        behind += one.after(last)
                    options.append((behind, (*before, *found)))
            best.append(min(options, key=lambda option: option[0], default=(float("inf"), ())))
        return best[-1][1] or None

    def options(self, begin: int, end: int) -> list[tuple[SectionTimes, ...]]:
        """Ways to compute some layers together, or one in parts."""
        members = self.layers[begin:end]
        slots = [(1,) * len(layer.readings) for layer in members]
        if end - begin > 1:
            fronts = [self.frontier(index) for index in range(begin, end)]
            return [(self.measured(one),) for one in residents(members, fronts, self.roomy)]
        found = self.frontier(begin).cuts
        if not found:
            return self.rounds(members[0], slots[0])
        most = len(found) if len(self.topology.elements) <= SMALL else _CUTS
        return [(self.measured(section(members, [cut], slots, self.mesh)),) for cut in found[-most:]]

    def frontier(self, index: int) -> Frontier:
        """The cuts of a layer alone on all elements."""
        if index not in self.known:
            layer = self.layers[index]
            slots = (1,) * len(layer.readings)
            self.known[index] = frontier_or_empty(layer, self.mesh, slots, len(self.topology.elements))
        return self.known[index]

    def rounds(self, layer: MeshLayer, slots: tuple[int, ...]) -> list[tuple[SectionTimes, ...]]:
        """A layer in the fewest parts of which each fits."""
        elements = len(self.topology.elements)
        for rounds in _ROUNDS:
            found = frontier_or_empty(replace(layer, most_sums=1), self.mesh, slots, rounds * elements)
            if found.cuts:
                return [self.in_rounds(layer, slots, found.cuts[-1])]
        return []

    def in_rounds(self, layer: MeshLayer, slots: tuple[int, ...], cut: Cut) -> tuple[SectionTimes, ...]:
        """The pieces of a cut, as many at a time as there are elements."""
        boxes, found = boxes_of(layer, cut, self.mesh), []
        count = -(-len(boxes) // len(self.topology.elements))
        for part in np.array_split(boxes, count):
            stage = boxed_stage(layer, Cut(rows=len(part)), part, slots, self.mesh, 0, free=True)
            found.append(self.measured(Section((stage,))))
        return tuple(found)

    def measured(self, found: Section) -> SectionTimes:
        """A section placed."""
        own = {stage.layer.index for stage in found.stages}
        later = {reading.producer for layer in self.layers if layer.index not in own for reading in layer.readings}
        wanted = frozenset(own & (self.outputs | later))
        both = [SectionTimes(place(found, where, wanted, 1)) for where in (self.topology, near_dram(self.topology))]
        return min(both, key=lambda one: one.timing.latency)
