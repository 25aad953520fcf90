"""Sections for little latency on one chip: a few layers, often one, on all elements at a time, then the next.

Results go through DRAM from section to section; an element's weights of the next section are loaded while the present
one computes, where its memory holds both. All elements wait for each other between sections, so the times add up. A
layer too large for all elements together is computed a part after the other, each a section.

Candidates are placed and measured by the model of time, since fetching and storing is much of what they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from dovetail.guests.mesh.cuts import Cut, frontier, goes
from dovetail.guests.mesh.layers import Ints, MeshLayer, Show
from dovetail.guests.mesh.partition import (
    SMALL,
    MeshStage,
    Section,
    boxed_stage,
    boxes_of,
    frontiers_of,
    piece_sizes,
    read_span,
    resident_section,
    residents,
)
from dovetail.guests.mesh.placement import SectionPlacement, place
from dovetail.guests.mesh.simulate import StreamTiming, charged, simulate
from dovetail.guests.mesh.topology import Topology
from dovetail.records import Record

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
"""Numbers of parts that a layer too large is computed in."""


class SectionTimes(Record, eq=False, dict=True):
    """A section on elements, with its times in clocks."""

    placed: SectionPlacement
    clocks: Ints | None = None
    """[pieces, 4] as `ExactRun.clocks`, where it was executed."""

    @cached_property
    def timing(self) -> StreamTiming:
        """The time of one input, weights loaded."""
        clocks, stages, mesh = self.clocks, self.placed.section.stages, self.placed.topology.mesh
        if clocks is not None:
            return simulate(self.placed, 1, turns=(clocks[:, 1:] - clocks[:, :1])[None])
        sizes = ((stage.layer, piece_sizes(stage.cut, stage.boxes)) for stage in stages)
        more = np.concatenate([goes(layer, each, mesh) for layer, each in sizes]) * mesh.core.section_go
        return simulate(self.placed, 1, turns=charged(self.placed) + more[:, None])

    @property
    def load(self) -> float:
        """Clocks the DRAM takes to load weights and tables."""
        return _loaded_bytes(self.placed) / self.placed.topology.mesh.rates.dram

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
        """Clocks from the end of the section before to its own: the rest of its load, and all behind it."""
        ahead = before is not None and before.memory + self.loaded <= self.placed.topology.mesh.usable
        hidden = before.free if before is not None and ahead else 0.0
        return max(0.0, self.load - hidden) + self.prepared + self.timing.latency + JOINED

    @cached_property
    def prepared(self) -> float:
        """Clocks of the core before anything is fetched: of the element with most padding to write."""
        if self.clocks is not None:
            return float(self.clocks[:, 0].max())
        core = self.placed.topology.mesh.core
        padding = (padded(stage) for stage in self.placed.section.stages)
        most = max(float((core.padding_row * rows + core.padding * nbytes).max()) for rows, nbytes in padding)
        return core.section + most


def padded(stage: MeshStage) -> tuple[Ints, Ints]:
    """[pieces] stretches of padding around the first operand of each piece, and their bytes."""
    layer, reading, boxes = stage.layer, stage.layer.readings[0], stage.boxes
    if not layer.on_array or layer.kind == "dense":
        return np.zeros(stage.pieces, np.int64), np.zeros(stage.pieces, np.int64)
    spans = [read_span(reading, layer, axis, boxes) for axis in range(3)]
    rows, columns, channels = (high - low for low, high in spans)
    all_rows, all_columns = (
        (boxes[:, 2 * axis + 1] - boxes[:, 2 * axis] - 1) * reading.step[axis] + reading.span[axis] for axis in (0, 1)
    )
    left = spans[1][0] - (boxes[:, 2] * reading.step[1] - reading.lead[1])
    sides = (left > 0).astype(np.int64) + (all_columns - columns > left)
    return all_rows - rows + sides * rows, (all_rows * all_columns - rows * columns) * channels


def _loaded_bytes(placed: SectionPlacement) -> int:
    """Bytes of weights that the DRAM gives when a section begins: what several of its pieces hold is read once."""
    held = (np.column_stack((stage.boxes[:, 4:], stage.costs.constants)) for stage in placed.section.stages)
    return sum(int(np.unique(rows, axis=0)[:, -1].sum()) for rows in held)


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


def _orders(topology: Topology) -> tuple[Topology, Topology]:
    """The mesh, and the same with its elements in the order of their distance from the DRAM of their chip."""
    chip, number = np.divmod(topology.elements, topology.mesh.per_chip)
    routers = zip(chip.tolist(), topology.router_of[number].tolist(), strict=True)
    hops = np.array([topology.routes(own).hops[topology.dram, router] for own, router in routers])
    return topology, replace(topology, elements=topology.elements[np.lexsort((topology.elements, hops, chip))])


class SectionSearch(Record, dict=True):
    """Finds the sections that take the least time one after the other on one chip, by dynamic programming."""

    layers: Sequence[MeshLayer]
    topology: Topology
    """The elements of the chip."""
    outputs: frozenset[int]
    """Layers whose results the network gives."""

    @cached_property
    def roomy(self) -> Topology:
        """The elements with less memory for data: their code is that of all sections."""
        mesh = self.topology.mesh
        return replace(self.topology, mesh=replace(mesh, code=mesh.code + LAYER_CODE * len(self.layers)))

    def run(self, show: Show) -> tuple[SectionTimes, ...] | None:
        """The best sections; None where some layer fits no way. `show` is told how far the search is."""
        needed = sum(layer.constant_bytes + layer.result_bytes for layer in self.layers)
        if needed > self.topology.mesh.dram_bytes:
            return None
        fronts = frontiers_of(self.layers, self.roomy)
        best: list[tuple[float, tuple[SectionTimes, ...]]] = [(0.0, ())]
        for end in range(1, len(self.layers) + 1):
            show(f"measuring sections: {end} of {len(self.layers)} layers")
            options = []
            for begin in range(max(0, end - _LONGEST), end):
                time, before = best[begin]
                members = self.layers[begin:end]
                ways: Iterable[list[Section]] = ([one] for one in residents(members, fronts[begin:end], self.roomy))
                for way in ways if len(members) > 1 else self._ways(members[0], fronts[begin].cuts):
                    times, total, last = [self._measured(one) for one in way], time, before[-1] if before else None
                    for one in times:
                        total, last = total + one.after(last), one
                    options.append((total, (*before, *times)))
            best.append(min(options, key=lambda option: option[0], default=(float("inf"), ())))
        return best[-1][1] or None

    def _ways(self, layer: MeshLayer, cuts: Sequence[Cut]) -> Iterator[list[Section]]:
        """Ways to compute a layer by itself: cut, or if no cut fits in the fewest parts of which each does."""
        mesh, elements = self.roomy.mesh, len(self.topology.elements)
        for cut in cuts if elements <= SMALL else cuts[-_CUTS:]:
            yield [resident_section([layer], [cut], mesh)]
        if not cuts:
            limits = (elements * rounds for rounds in _ROUNDS)
            whole_sums = replace(layer, most_sums=1)
            fitting = (one.cuts for most in limits if (one := frontier(whole_sums, mesh, layer.one_slot, most)).cuts)
            for cut in next(fitting, ())[-1:]:
                boxes = boxes_of(layer, cut, mesh)
                parts = np.array_split(boxes, -(-len(boxes) // elements))
                stages = (boxed_stage(layer, Cut(len(part)), part, layer.one_slot, mesh, 0, True) for part in parts)
                yield [Section((stage,)) for stage in stages]

    def _measured(self, section: Section) -> SectionTimes:
        """A section placed, in the better order of elements."""
        own = {stage.layer.index for stage in section.stages}
        later = {one.producer for layer in self.layers if layer.index not in own for one in layer.readings}
        stored = frozenset(own & (self.outputs | later))
        both = (SectionTimes(place(section, where, stored, 1)) for where in _orders(self.topology))
        return min(both, key=lambda one: one.timing.latency)
