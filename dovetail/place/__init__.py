"""Place: which engine computes what, and when, decided for the network as a whole.

Every layer has candidates: each engine that takes it, several engines at once (each a part of the rows or channels of
its result), and the core. Each candidate has a cost in cycles of engines, DMA and core; between two layers stand the
cycles of relayouts and of copies from one engine's memory to another's. What is minimised is when the network ends,
with everything at the same time that can be. With one engine and no pins there is nothing to decide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from dovetail.graph.graph import Graph
from dovetail.partition.regions import Region, partition
from dovetail.place.candidates import layers
from dovetail.place.costs import without_offloads
from dovetail.place.exact import improve
from dovetail.place.explain import Told, overlap, told, why
from dovetail.place.model import Candidate, Layer, Schedule
from dovetail.place.pins import resolve
from dovetail.place.schedule import heuristic, in_order, lower_bound, slots
from dovetail.program.ir import CORE
from dovetail.target.description import Target

_EXACT_SECONDS = 3.0
"""Deterministic solver time."""
_EXACT_CANDIDATES = 600
"""Candidates of all layers together the solver is asked about; larger networks have the heuristic's answer."""


@dataclass(frozen=True)
class Placing:
    """Where everything is computed, and how good that is."""

    regions: tuple[Region, ...]
    """In the order in which they begin."""
    layers: tuple[Layer, ...] = ()
    """What there was to choose from, in the partition's order; empty where nothing was to decide."""
    schedule: Schedule | None = None
    bound: int = 0
    """Cycles, by the same estimate, that no placement can be below."""
    note: str = ""
    """What was given up for want of memory."""

    @property
    def is_proven(self) -> bool:
        """True when no placement can end earlier, by the costs as they are estimated."""
        return self.schedule is None or self.schedule.finish <= self.bound

    def describe(self) -> str:
        """The outcome in one sentence; empty where nothing was to decide."""
        if self.schedule is None:
            return self.note
        finish = self.schedule.finish
        together = f"{overlap(self.layers, self.schedule):,} of them with engines and core at work together"
        if self.is_proven:
            return f"the network ends after {finish:,} cycles by estimate, proven to be the least; {together}"
        gap = 100 * (finish - self.bound) / max(self.bound, 1)
        return f"the network ends after {finish:,} cycles by estimate, at most {gap:.1f} % above the least; {together}"


def place(
    graph: Graph, regions: tuple[Region, ...], target: Target, pins: Mapping[str, str], held: Collection[str] = ()
) -> Placing:
    """Decide where every region is computed.

    Args:
        graph: the whole network.
        regions: of `first`, their knobs chosen.
        target: the machine.
        pins: layer or operator -> engine, "core", or engines joined by "+".
        held: names of regions that stay where they are, since knobs were chosen for them.

    Raises:
        PlaceError: a pin names what does not exist, or wants a layer where it cannot be; says why.
    """
    wishes = resolve(pins, regions, target)
    if len(target.engines) < 2 and not wishes:
        return Placing(regions)
    known = layers(graph, regions, target, wishes, held)
    dma = target.dma.name if target.dma else CORE
    found, bound = heuristic(known, dma), lower_bound(known, dma)
    if found.finish > bound and sum(len(layer.candidates) for layer in known) <= _EXACT_CANDIDATES:
        found, bound = improve(known, found, bound, dma, _EXACT_SECONDS)
    found = in_order(known, found, dma)
    return Placing(_placed(known, found, dma if len(target.engines) > 1 else None), known, found, bound)


def one_by_one(placing: Placing) -> Placing:
    """The same engines, each layer on one of them and after the one before: what needs least memory."""
    assert placing.schedule is not None
    regions = _placed(placing.layers, placing.schedule, None)
    note = "there is no memory for several layers at once: they are computed one after the other"
    return Placing(tuple(replace(region, shares=()) for region in regions), note=note)


def first(graph: Graph, target: Target) -> tuple[Region, ...]:
    """The partition from which placement starts: without offloads that cost accuracy."""
    lossless = {engine.name: False for engine in target.engines}
    return partition(graph, without_offloads(target, lossless))


def _placed(known: tuple[Layer, ...], found: Schedule, dma: str | None) -> tuple[Region, ...]:
    """The chosen regions, in the order in which they are issued; without times, and in the partition's order, without
    the name of the queue of copies."""
    times = slots(known, found, dma) if dma is not None else {}
    chosen = []
    for index, (layer, pick) in enumerate(zip(known, found.picks, strict=True)):
        for number, step in enumerate(layer.candidates[pick].steps):
            slot = times.get(step.region.name)
            region = replace(step.region, reason=_reason(layer, layer.candidates[pick], step.region), slot=slot)
            chosen.append((slot.issue if slot else 0, index, number, region))
    return tuple(region for *_, region in sorted(chosen, key=lambda one: one[:3]))


def _reason(layer: Layer, picked: Candidate, region: Region) -> str:
    """On the core: why no engine computes it."""
    if region.engine is not None or region.mover or (layer.region.engine is None and not layer.pinned):
        return region.reason
    return why(layer, picked)


__all__ = ["Candidate", "Layer", "Placing", "Told", "first", "one_by_one", "overlap", "place", "told"]
