"""Engine assignment: which engine computes what, and when, decided for the network as a whole.

Every layer has candidates: each engine that takes it, several engines at once (each a part of the rows or channels of
its result), and the core. Each candidate has a cost in cycles of engines, DMA and core; between two layers stand the
cycles of relayouts and of copies from one engine's memory to another's. What is minimised is when the network ends,
with everything at the same time that can be. With one engine and no pins layers come one after the other, and each is
computed where it takes the fewest cycles (`cheaper.py`), or where the user pinned it (`pins.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType

from dovetail.files import kept_answer
from dovetail.ir.graph import Graph
from dovetail.program.ir import CORE, Queue, copy_queue
from dovetail.schedule.assign.candidates import Refused as Refused
from dovetail.schedule.assign.candidates import layers
from dovetail.schedule.assign.cheaper import cheaper
from dovetail.schedule.assign.costs import (
    ALL_ROOM,
    Candidate,
    CandidateStep,
    LayerOptions,
    PlacementReason,
    RegionCosts,
    Schedule,
)
from dovetail.schedule.assign.exact import improve
from dovetail.schedule.assign.pins import pinned_cores, resolve
from dovetail.schedule.assign.timetable import heuristic, in_order, lower_bound, settled, slots
from dovetail.schedule.region import AssignedRegion, Region
from dovetail.schedule.solver import solver_version
from dovetail.schedule.tiles.tiling import TileCache
from dovetail.target.description import Target


def placement_reasons(layers: Sequence[LayerOptions], schedule: Schedule) -> dict[str, PlacementReason]:
    """Region name -> why it is where it is; nothing for a layer that could be nowhere else."""
    reasons: dict[str, PlacementReason] = {}
    for layer, pick in zip(layers, schedule.picks, strict=True):
        picked = layer.candidates[pick]
        all_candidates = (*layer.candidates, *layer.passed_over)
        if len(all_candidates) > 1 or layer.refused or layer.pinned:
            costs = tuple((one.place, one.cycles) for one in all_candidates)
            reason = PlacementReason(costs, layer.refused, _why(layer, picked))
            reasons |= dict.fromkeys((step.region.name for step in picked.steps), reason)
    return reasons


def _why(layer: LayerOptions, picked: Candidate) -> str:
    """Why a layer is where it is, in one sentence."""
    if layer.pinned:
        return f"the user pinned it to {layer.pinned}"
    others = [one for one in layer.candidates if one is not picked]
    if _is_left(layer):
        return "; ".join(f"{name}: {reason}" for name, reason in layer.refused.items())
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


def _is_left(layer: LayerOptions) -> bool:
    """True for a layer that the partition gave to an engine, where none has tiles for it."""
    engines = (step.region.shares for one in layer.candidates for step in one.steps)
    return bool(layer.region.shares) and not layer.pinned and not any(engines)


_EXACT_SECONDS = 3.0
"""Deterministic solver time."""
_EXACT_CANDIDATES = 600
"""Candidates of all layers together the solver is asked about; larger networks have the heuristic's answer."""


_CLAIMED = 0.06
"""Part of the clock's cycles by which the costs of a placement may be off for a claim of how good it is."""


@dataclass(frozen=True)
class Assignment:
    """The places and times of all regions, and how good they are."""

    regions: tuple[AssignedRegion, ...]
    """In the order in which they begin."""
    layers: tuple[LayerOptions, ...] = ()
    """Every layer with its candidates, in the partition's order; empty where nothing was to decide."""
    schedule: Schedule | None = None
    bound: int = 0
    """Cycles, by the same estimate, that no placement can be below."""
    compared: Mapping[str, PlacementReason] = field(default_factory=dict)
    """Region name -> what there is to say of a layer that was compared by itself, with one engine."""
    tiles: TileCache = field(default_factory=TileCache, compare=False)
    """The tilings that were looked at."""
    note: str = ""
    """A sentence about what was given up for want of memory; empty for nothing."""
    clock: int = 0
    """Cycles of the planned program by the clock; 0 where there is none."""
    refused: Refused = field(default_factory=dict)
    """The layers for which an engine was meant that has no tiles for them, and why."""

    def losses(self) -> Iterator[str]:
        """Sentences: what was given up for want of memory or tiles."""
        yield from filter(None, [self.note])
        for layer, why in self.refused.items():
            still = any(one.name == layer and one.place in why for one in self.regions)
            how = "computed in a slower way" if still else "not computed"
            yield f"{layer} is {how} by {' and '.join(why)}: {'; '.join(why.values())}"

    def layer_of(self, region: str) -> str:
        """The layer that a region, or a part of one that engines share, is of."""
        names = {
            step.region.name: one.region.name for one in self.layers for each in one.candidates for step in each.steps
        }
        return next((names[name] for name in (region, region.partition("_part_")[0]) if name in names), region)

    def reasons(self) -> Mapping[str, PlacementReason]:
        """Region name -> why it is where it is; nothing for a layer that was compared with nothing."""
        return placement_reasons(self.layers, self.schedule) if self.schedule else self.compared

    @property
    def is_proven(self) -> bool:
        """True when no placement can end earlier, by the costs as they are estimated."""
        return self.schedule is None or self.schedule.finish <= self.bound

    def describe(self) -> str:
        """The outcome in one sentence; empty where nothing was to decide."""
        if self.schedule is None:
            return ""
        finish = self.schedule.finish
        clock = self.clock or finish
        end = f"the network ends after {clock:,} cycles by estimate"
        if all(len(layer.candidates) == 1 for layer in self.layers):  # nothing else was possible
            return end
        if abs(finish - clock) > _CLAIMED * clock:
            return f"{end}; it was placed by costs of {finish:,}, which are too far from that to prove it the least"
        if self.is_proven:
            return f"{end}, proven to be the least"
        return f"{end}, at most {100 * (finish - self.bound) / max(self.bound, 1):.1f} % above the least"


def assign(
    graph: Graph,
    regions: Sequence[Region],
    target: Target,
    pins: Mapping[str, str],
    held: Collection[str] = (),
    refused: Refused = MappingProxyType({}),
) -> Assignment:
    """Decide where every region is computed.

    Args:
        graph: the whole network.
        regions: of `initial_partition`, their knobs chosen.
        target: the machine.
        pins: layer or operator -> engine, "core", a core by its number ("core1"), or engines or cores joined by "+".
        held: names of regions that stay where they are, since knobs were chosen for them.
        refused: region name -> engines that cannot compute it in tiles, as the plan found, and why.

    Raises:
        PlaceError: a pin names what does not exist, or wants a layer where it cannot be; says why.
        PlanError: nothing can compute a layer; says why.
    """
    own, costs = [AssignedRegion.of(region) for region in regions], RegionCosts(graph, target)
    wishes = resolve(pins, own, target)
    if len(target.engines) < 2 and not wishes:
        tiles = TileCache()
        chosen, compared = cheaper(costs, own, held, tiles, refused)
        return Assignment(chosen, compared=compared, tiles=tiles, refused=refused)
    options, dma = layers(costs, own, wishes, held, refused), copy_queue(target)
    schedule, bound = _solved(options, dma)
    placed = _placed(options, schedule, dma if len(target.engines) > 1 else None)
    left = {layer.region.name: layer.refused for layer in options if _is_left(layer)}
    return Assignment(placed, options, schedule, bound, refused={**refused, **left})


def _solved(layers: tuple[LayerOptions, ...], dma: Queue) -> tuple[Schedule, int]:
    """A schedule of the layers, and the cycle none can end before; from the cache where these layers were solved."""
    costs = [(layer.after, sorted(layer.delays.items()), _costs(layer)) for layer in layers]
    question = repr((costs, dma, solver_version()))

    def solve() -> bytes:
        schedule, bound = _solve(layers, dma)
        return json.dumps({**asdict(schedule), "bound": bound}).encode()

    answer = json.loads(kept_answer(Path(__file__).parent, question, solve))
    launches, starts = (tuple(map(tuple, answer[name])) for name in ("launches", "starts"))
    return Schedule(tuple(answer["picks"]), launches, starts, answer["finish"]), answer["bound"]


def _costs(layer: LayerOptions) -> list[object]:
    """All of a layer's candidates that a schedule depends on."""
    return [
        (sorted(one.members), [[getattr(step, each.name) for each in fields(step)[1:]] for step in one.steps])
        for one in layer.candidates
    ]


def _solve(layers: tuple[LayerOptions, ...], dma: Queue) -> tuple[Schedule, int]:
    engines = {name for layer in layers for one in layer.candidates for step in one.steps for name in step.engines}
    layers = tuple(map(_one_ahead, layers)) if len(engines) > 1 else layers
    schedule, bound = heuristic(layers, dma), lower_bound(layers, dma)
    if schedule.finish > bound and sum(len(layer.candidates) for layer in layers) <= _EXACT_CANDIDATES:
        schedule, bound = improve(layers, schedule, bound, dma, _EXACT_SECONDS)
        schedule = settled(layers, schedule, dma)
    return in_order(layers, schedule, dma), bound


def _one_ahead(layer: LayerOptions) -> LayerOptions:
    """The layer with constants that take all the room there is for those that wait: with several engines a schedule
    with as many waiting as fit is hardly ever proven to be the best, and is a worse one."""

    def filled(step: CandidateStep) -> CandidateStep:
        return replace(step, filled=tuple(ALL_ROOM for _ in step.engines))

    candidates = (replace(one, steps=tuple(map(filled, one.steps))) for one in layer.candidates)
    return replace(layer, candidates=tuple(candidates))


def one_by_one(assignment: Assignment) -> Assignment:
    """The same engines, each layer on one of them and after the one before, which needs least memory."""
    assert assignment.schedule is not None
    regions = _placed(assignment.layers, assignment.schedule, None)
    alone = (tuple(replace(share, box=None) for share in region.shares[:1]) for region in regions)
    note = "there is no memory for several layers at once: they are computed one after the other"
    placed = tuple(replace(one, shares=own) for one, own in zip(regions, alone, strict=True))
    return Assignment(placed, note=note, refused=assignment.refused)


def _placed(layers: Sequence[LayerOptions], schedule: Schedule, dma: Queue | None) -> tuple[AssignedRegion, ...]:
    """The chosen regions, in the order in which they are issued; without times, and in the partition's order, without
    the queue of copies."""
    times = slots(layers, schedule, dma) if dma is not None else {}
    chosen = []
    for layer, pick in zip(layers, schedule.picks, strict=True):
        could_be_elsewhere = layer.region.shares or layer.pinned
        for region in (step.region for step in layer.candidates[pick].steps):
            on_core = not (region.shares or region.copied_by)
            reason = _why(layer, layer.candidates[pick]) if on_core and could_be_elsewhere else region.reason
            cores = pinned_cores(layer.pinned) if on_core else ()
            chosen.append(replace(region, reason=reason, slot=times.get(region.name), cores=cores))
    return tuple(sorted(chosen, key=lambda region: region.slot.issue if region.slot else 0))
