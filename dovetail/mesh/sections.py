"""A network that does not fit a mesh as a whole, in sections that follow each other: layers resident together, or one
layer streamed. Values between sections lie in DRAM; the weights of a section are read when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dovetail.errors import PlanError
from dovetail.mesh.choice import Objective, choose, worth
from dovetail.mesh.cuts import Cut, Frontier, frontier
from dovetail.mesh.layers import Layer
from dovetail.mesh.partition import Section, Stage, make_stage, section
from dovetail.mesh.stream import Streaming, stream_layer
from dovetail.mesh.topology import Topology

_LONGEST = 12
"""Layers of a section at most."""


def sections_of(layers: Sequence[Layer], topology: Topology) -> tuple[Section, ...]:
    """The sections that take the least time one after the other, by dynamic programming over layers.

    Raises:
        PlanError: a layer fits neither way (says what its smallest piece takes), or DRAM is too small.
    """
    mesh, elements = topology.mesh, len(topology.elements)
    needed = sum(layer.constant_bytes + int(np.prod(layer.image)) * layer.itemsize for layer in layers)
    if needed > mesh.dram_bytes * len(topology.places):
        raise PlanError(f"weights and values take {needed} bytes, the DRAM has "
                        f"{mesh.dram_bytes * len(topology.places)}", where="mesh", hint="use more chips")  # fmt: skip
    dram = mesh.rates.dram * len(topology.places)
    streams = [_streamed(layer, topology) for layer in layers]
    fronts = [_frontier(layer, topology) for layer in layers]
    best: list[tuple[float, int, list[Cut] | None]] = [(0.0, 0, None)]
    for end in range(1, len(layers) + 1):
        streaming = streams[end - 1]
        options: list[tuple[float, int, list[Cut] | None]] = []
        if streaming is not None:
            options.append((best[end - 1][0] + streaming.estimate, end - 1, None))
        for begin in range(max(0, end - _LONGEST), end):
            found = [one for one in fronts[begin:end] if one is not None]
            cuts = choose(found, elements, Objective.LATENCY) if len(found) == end - begin else None
            if cuts is not None:
                time = best[begin][0] + worth(found, cuts, Objective.LATENCY)
                options.append((time + _moved(layers, begin, end) / dram, begin, cuts))
        if not options:
            frontier(layers[end - 1], mesh, (1,) * len(layers[end - 1].readings), elements)  # raises, with the levers
            raise PlanError("neither resident nor streamed does it fit", where=layers[end - 1].name,
                            hint="use more elements with --boards or --chips")
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


def streamed_stage(layer: Layer, streaming: Streaming, topology: Topology) -> Stage:
    """The pieces of a streamed layer; their memory is what a round takes."""
    roomy = replace(topology.mesh, usable=1 << 40)
    stage = make_stage(layer, streaming.cut, (1,) * len(layer.readings), roomy, 0)
    none = np.zeros(stage.pieces, np.int64)
    costs = replace(stage.costs, fixed=np.full(stage.pieces, streaming.memory), slot=none, others=none)
    return replace(stage, costs=costs)


def _streamed(layer: Layer, topology: Topology) -> Streaming | None:
    """How a layer is streamed on one chip; None where it cannot be."""
    try:
        return stream_layer(layer, topology.mesh, topology.capacity)
    except PlanError:
        return None


def _frontier(layer: Layer, topology: Topology) -> Frontier | None:
    try:
        found = frontier(layer, topology.mesh, (1,) * len(layer.readings), len(topology.elements))
    except PlanError:
        return None
    return found if found.cuts else None


def _moved(layers: Sequence[Layer], begin: int, end: int) -> int:
    """Bytes through DRAM of a resident section: weights, what it takes from before, what later layers want."""
    total = sum(layer.constant_bytes for layer in layers[begin:end])
    taken: dict[str, int] = {}
    for layer in layers[begin:end]:
        for reading in layer.readings:
            if not begin <= reading.producer < end:
                taken[reading.value] = int(np.prod(reading.image)) * reading.itemsize
    wanted = {reading.producer for layer in layers[end:] for reading in layer.readings}
    given = [layer for layer in layers[begin:end] if layer.index in wanted or layer.index == len(layers) - 1]
    return total + sum(taken.values()) + sum(int(np.prod(layer.image)) * layer.itemsize for layer in given)
