"""Engine assignment: which engine computes what, and when, decided for the network as a whole.

Every layer has candidates: each engine that takes it, several engines at once (each a part of the rows or channels of
its result), and the core. Each candidate has a cost in cycles of engines, DMA and core; between two layers stand the
cycles of relayouts and of copies from one engine's memory to another's. What is minimised is when the network ends,
with everything at the same time that can be. With one engine and no pins layers come one after the other, and each is
computed where it takes the fewest cycles (`cheaper.py`), or where the user pinned it (`pins.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from dovetail.files import kept_answer
from dovetail.ir.graph import Graph
from dovetail.program.ir import CORE
from dovetail.schedule.assign.candidates import layers
from dovetail.schedule.assign.candidates import pinned_core as pinned_core
from dovetail.schedule.assign.cheaper import cheaper
from dovetail.schedule.assign.costs import (
    ALL_ROOM,
    Candidate,
    CandidateStep,
    LayerOptions,
    PlacementReason,
    Schedule,
    without_offloads,
)
from dovetail.schedule.assign.pins import resolve
from dovetail.schedule.assign.timetable import heuristic, improve, in_order, lower_bound, settled, slots
from dovetail.schedule.partition import Region, partition
from dovetail.schedule.tiles.tiling import TileCache
from dovetail.target.description import Target


def told(layers: tuple[LayerOptions, ...], schedule: Schedule) -> dict[str, PlacementReason]:
    """Region name -> what there is to say; nothing for what nobody computes."""
    found: dict[str, PlacementReason] = {}
    for layer, pick in zip(layers, schedule.picks, strict=True):
        picked = layer.candidates[pick]
        known = (*layer.candidates, *layer.passed_over)
        if len(known) > 1 or layer.refused or layer.pinned:
            costs = tuple((one.place, one.cycles) for one in known)
            found |= dict.fromkeys(
                (step.region.name for step in picked.steps), PlacementReason(costs, layer.refused, why(layer, picked))
            )
    return found


def why(layer: LayerOptions, picked: Candidate) -> str:
    """Why a layer is where it is, in one sentence."""
    if layer.pinned:
        return f"the user pinned it to {layer.pinned}"
    others = [one for one in layer.candidates if one is not picked]
    if not others:
        return layer.region.reason if picked.members == {CORE} else "nothing else takes it"
    best = min(others, key=lambda one: one.cycles)
    if picked.cycles < best.cycles:
        return f"fastest there: {picked.cycles:,} cycles, {best.cycles:,} on {best.place}"
    if picked.cycles == best.cycles:
        return f"as fast there as on {best.place}: {picked.cycles:,} cycles"
    return (
        f"{best.place} would take {best.cycles:,} cycles instead of {picked.cycles:,}, but is wanted by others then: "
        "the network ends no later like this"
    )


def overlap(layers: tuple[LayerOptions, ...], schedule: Schedule) -> int:
    """Cycles of the schedule in which more than one of engines and core compute."""
    changes: list[tuple[int, int]] = []
    for layer, pick, starts in zip(layers, schedule.picks, schedule.starts, strict=True):
        for step, start in zip(layer.candidates[pick].steps, starts, strict=True):
            count = len(step.region.parts) if step.region.engine or step.region.place == CORE else 0
            changes += [(start, count), (start + step.cycles, -count)]
    total = busy = 0
    for (moment, count), (later, _) in pairwise(sorted(changes)):
        busy += count
        total += later - moment if busy > 1 else 0
    return total


_EXACT_SECONDS = 3.0
"""Deterministic solver time."""
_EXACT_CANDIDATES = 600
"""Candidates of all layers together the solver is asked about; larger networks have the heuristic's answer."""


@dataclass(frozen=True)
class Assignment:
    """Where everything is computed, and how good that is."""

    regions: tuple[Region, ...]
    """In the order in which they begin."""
    layers: tuple[LayerOptions, ...] = ()
    """Every layer with its candidates, in the partition's order; empty where nothing was to decide."""
    schedule: Schedule | None = None
    bound: int = 0
    """Cycles, by the same estimate, that no placement can be below."""
    compared: Mapping[str, PlacementReason] = field(default_factory=dict)
    """Region name -> what there is to say of a layer that was compared by itself, with one engine."""
    tiles: TileCache = field(default_factory=TileCache, compare=False)
    """What is known of tiles of regions, by their names, where their values lie row-major."""
    note: str = ""
    """A sentence about what was given up for want of memory; empty for nothing."""

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


def assign(
    graph: Graph, regions: tuple[Region, ...], target: Target, pins: Mapping[str, str], held: Collection[str] = ()
) -> Assignment:
    """Decide where every region is computed.

    Args:
        graph: the whole network.
        regions: of `first`, their knobs chosen.
        target: the machine.
        pins: layer or operator -> engine, "core", a core by its number ("core1"), or engines joined by "+".
        held: names of regions that stay where they are, since knobs were chosen for them.

    Raises:
        PlaceError: a pin names what does not exist, or wants a layer where it cannot be; says why.
    """
    wishes = resolve(pins, regions, target)
    if len(target.engines) < 2 and not wishes:
        tiles = TileCache()
        chosen, compared = cheaper(graph, regions, target, held, tiles)
        before = {region.name: region.offload for region in regions}
        same = {region.name for region in chosen if region.offload is before.get(region.name)}
        return Assignment(chosen, compared=compared, tiles=tiles.of(same))
    known = layers(graph, regions, target, wishes, held)
    dma = target.dma.name if target.dma else CORE
    found, bound = _kept(known, dma)
    return Assignment(_placed(known, found, dma if len(target.engines) > 1 else None), known, found, bound)


def _kept(known: tuple[LayerOptions, ...], dma: str) -> tuple[Schedule, int]:
    """The schedule that was found before for such layers, or is found now, and what none can be below."""
    asked = [(layer.after, sorted(layer.delays.items()), _costs(layer)) for layer in known]
    solver = find_spec("ortools") is not None
    answer = kept_answer(Path(__file__).parent, repr((asked, dma, solver)), lambda: _answer(*_found(known, dma)))
    held = json.loads(answer)
    launches, starts = (tuple(map(tuple, held[name])) for name in ("launches", "starts"))
    return Schedule(tuple(held["picks"]), launches, starts, held["finish"]), held["bound"]


def _costs(layer: LayerOptions) -> list[object]:
    """All of a layer's candidates that a schedule depends on."""
    return [
        (sorted(one.members), [[getattr(step, each.name) for each in fields(step)[1:]] for step in one.steps])
        for one in layer.candidates
    ]


def _answer(found: Schedule, bound: int) -> bytes:
    return json.dumps({**asdict(found), "bound": bound}).encode()


def _found(known: tuple[LayerOptions, ...], dma: str) -> tuple[Schedule, int]:
    """A schedule of some layers, and what none can be below."""
    engines = {name for layer in known for one in layer.candidates for step in one.steps for name in step.engines}
    known = tuple(map(_one_ahead, known)) if len(engines) > 1 else known
    found, bound = heuristic(known, dma), lower_bound(known, dma)
    if found.finish > bound and sum(len(layer.candidates) for layer in known) <= _EXACT_CANDIDATES:
        found, bound = improve(known, found, bound, dma, _EXACT_SECONDS)
        found = settled(known, found, dma)
    return in_order(known, found, dma), bound


def _one_ahead(layer: LayerOptions) -> LayerOptions:
    """The layer with constants that take all the room there is for those that wait: with several engines a schedule
    with as many waiting as fit is hardly ever proven to be the best, and is a worse one."""

    def filled(step: CandidateStep) -> CandidateStep:
        return replace(step, filled=tuple(ALL_ROOM for _ in step.engines))

    candidates = (replace(one, steps=tuple(map(filled, one.steps))) for one in layer.candidates)
    return replace(layer, candidates=tuple(candidates))


def one_by_one(assignment: Assignment) -> Assignment:
    """The same engines, each layer on one of them and after the one before: what needs least memory."""
    assert assignment.schedule is not None
    regions = _placed(assignment.layers, assignment.schedule, None)
    note = "there is no memory for several layers at once: they are computed one after the other"
    return Assignment(tuple(replace(region, shares=()) for region in regions), note=note)


def first(graph: Graph, target: Target) -> tuple[Region, ...]:
    """The partition from which placement starts: without offloads that cost accuracy."""
    lossless = {engine.name: False for engine in target.engines}
    return partition(graph, without_offloads(target, lossless))


def _placed(known: tuple[LayerOptions, ...], found: Schedule, dma: str | None) -> tuple[Region, ...]:
    """The chosen regions, in the order in which they are issued; without times, and in the partition's order, without
    the name of the queue of copies."""
    times = slots(known, found, dma) if dma is not None else {}
    chosen = []
    for layer, pick in zip(known, found.picks, strict=True):
        could_be_elsewhere = layer.region.engine is not None or layer.pinned
        for region in (step.region for step in layer.candidates[pick].steps):
            on_core = region.engine is None and not region.mover
            reason = why(layer, layer.candidates[pick]) if on_core and could_be_elsewhere else region.reason
            core = pinned_core(layer.pinned) if on_core else None
            chosen.append(replace(region, reason=reason, slot=times.get(region.name), core=core))
    return tuple(sorted(chosen, key=lambda region: region.slot.issue if region.slot else 0))
