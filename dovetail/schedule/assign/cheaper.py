"""The cheaper way of each layer where layers come one after the other: another offload of the engine, or the core.

Where the core is far slower by estimate and no other offload takes a layer, it stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from dovetail.errors import PlanError
from dovetail.program.ir import CORE
from dovetail.schedule.assign.candidates import Refused, nothing_computes, on_core, others
from dovetail.schedule.assign.costs import Candidate, PlacementReason, RegionCosts, costs_alike
from dovetail.schedule.partition import PartitionCache, named, partition, without_offloads
from dovetail.schedule.region import AssignedRegion, Region
from dovetail.schedule.tiles.tiling import TileCache
from dovetail.timing.kernels import core_cycles

_DOUBT = 1.33
"""The core must look so many times faster to get what the engine takes: by estimate layers are up to a fifth off."""
_FAR = 4
"""The core must look so many times slower for an engine to be taken without a closer look."""

Reasons = dict[str, PlacementReason]
"""By region name."""


def cheaper(
    costs: RegionCosts,
    regions: Sequence[AssignedRegion],
    held: Collection[str],
    tiles: TileCache,
    refused: Refused,
) -> tuple[tuple[AssignedRegion, ...], Reasons]:
    """The regions, each as it takes the fewest cycles, and what there is to say of those that were compared.

    Args:
        costs: of the network on the machine, which has one engine.
        regions: of the partition.
        held: names of the regions that stay as they are.
        tiles: gains the tiles of the regions as they are given.
        refused: region name -> the engine that cannot compute it in tiles, and why.

    Raises:
        PlanError: nothing else can compute a refused region; says why.
    """
    if costs.target.core.is_host:
        return tuple(regions), {}
    makers = {region.output: region for region in regions}
    readers: dict[str, list[Region]] = {}
    for region in regions:
        for value in region.graph.inputs:
            readers.setdefault(value, []).append(region)

    def cost(one: Candidate) -> int:
        return one.cycles + costs.around(one, makers, readers)

    chosen: list[AssignedRegion] = []
    reasons: Reasons = {}
    declined: dict[str, str] = {}
    for region in regions:
        if region.name in refused:
            chosen += _elsewhere(region, costs, cost, refused[region.name])
            continue
        candidates = () if region.name in held else tuple(_candidates(region, costs, cost, tiles))
        if len(candidates) < 2:
            chosen.append(region)
            continue
        cycles = [cost(one) for one in candidates]
        best = cycles.index(min(cycles))
        parts = [step.region for step in candidates[best].steps] if best else [region]
        reason = _reason(candidates, cycles, best)
        if reason is not None:
            parts = [replace(part, reason=reason.why) if part.place == CORE else part for part in parts]
            reasons |= dict.fromkeys((part.name for part in parts), reason)
        chosen += parts
        if all(part.place == CORE for part in parts):
            declined[region.output] = reason.why if reason else ""
    if not declined or any(engine.device for engine in costs.target.engines):  # hardware has copies between layers
        return tuple(chosen), reasons
    return _as_one(chosen, reasons, costs, declined)


def _as_one(
    regions: Sequence[AssignedRegion], reasons: Reasons, costs: RegionCosts, declined: Mapping[str, str]
) -> tuple[tuple[AssignedRegion, ...], Reasons]:
    """The regions with neighbours on the core as one kernel where they are one on a core alone, and what is said of
    them; as they are where the engine's offloads are not those of the partition."""
    known = {region.output: region for region in regions}
    owners = {node.output: region for region in regions for node in region.graph.nodes}
    joined: list[AssignedRegion] = []
    for region in partition(costs.graph, costs.target, declined):
        old = known.get(region.output)
        if old is not None and old.graph.nodes == region.graph.nodes:
            joined.append(old)
            continue
        if region.shares:
            return tuple(regions), reasons
        name = old.name if old is not None else f"{owners[region.output].name}_{len(joined)}"
        inner = [declined[node.output] for node in region.graph.nodes if declined.get(node.output)]
        reason = "; ".join(dict.fromkeys(inner)) or region.reason
        told = [reasons[own] for own in (owners[node.output].name for node in region.graph.nodes) if own in reasons]
        if told:
            reasons = {**reasons, name: replace(told[0], why=reason)}
        joined.append(AssignedRegion.of(replace(named(region, name), reason=reason)))
    return tuple(joined), reasons


def _reason(candidates: Sequence[Candidate], costs: Sequence[int], best: int) -> PlacementReason | None:
    """The reason for the best candidate, beside the first and those that are not far slower; None where there are no
    others."""
    names = [_label(one) for one in candidates]
    near = [at for at, cost in enumerate(costs) if at in (0, best) or costs[best] < cost < _FAR * costs[best]]
    near = [at for at in near if at == best or costs[at] > costs[best]]
    if len(near) < 2:
        return None
    other = min((at for at in near if at != best), key=lambda at: (costs[at], at))
    why = f"fastest there: {costs[best]:,} cycles, {costs[other]:,} on {names[other]}"
    return PlacementReason(tuple((names[at], costs[at]) for at in near), {}, why)


def _candidates(
    region: AssignedRegion, costs: RegionCosts, cost: Callable[[Candidate], int], tiles: TileCache
) -> Iterator[Candidate]:
    """The layer as it is, by other offloads, and on the core; nothing where it is clear which, as where the core takes
    far longer than with any tiles. What takes far longer by the core's part alone is left out: nothing would be said of
    it."""
    target = costs.target
    if region.offload is None or region.offload.prefer:
        return
    lossless = without_offloads(target, {engine.name: False for engine in target.engines})
    cache = PartitionCache()
    ways = list(others(region.graph, [region], lossless, cache))
    on_cores = [sum(costs.step(part).cycles for part in way if not part.shares) for way in ways]
    try:
        upper = _FAR * cost(replace(costs, quick=True).candidate(region.name, (region,), tiles))
        if all(
            cycles >= upper or (len(way) == 1 and costs_alike(region, way[0]))
            for way, cycles in zip(ways, on_cores, strict=True)
        ):
            if not ways and core_cycles(region.graph, target) >= upper:
                return
            if all(cost(one) >= upper for one in on_core(region, costs, {}, cache, _DOUBT)):
                return
        first = costs.candidate(region.name, (region,), tiles)
    except PlanError:  # no memory for it; where that is all there is, the plan says so
        return
    yield first
    steps = [*first.steps]
    far = _FAR * cost(first)
    if not ways and core_cycles(region.graph, target) >= far:
        return
    for way, cycles in zip(ways, on_cores, strict=True):
        if cycles < far:
            with suppress(PlanError):
                found = costs.candidate(region.name, way, alike=steps)
                steps += found.steps
                yield found
    yield from on_core(region, costs, {}, cache, _DOUBT)


def _elsewhere(
    region: AssignedRegion, costs: RegionCosts, cost: Callable[[Candidate], int], why: Mapping[str, str]
) -> list[AssignedRegion]:
    """The cheapest way of a layer that its offload computes in no tiles."""
    lossless = without_offloads(costs.target, {engine.name: False for engine in costs.target.engines})
    cache, refused = PartitionCache(), dict(why)
    found = [*on_core(region, costs, refused, cache)]
    for way in others(region.graph, [region], lossless, cache):
        with suppress(PlanError):
            found.append(replace(costs, far=True).candidate(region.name, way))
    if not found:
        raise nothing_computes(region, refused)
    reason = "; ".join(why.values())
    steps = min(found, key=cost).steps
    return [replace(one.region, reason=reason) if one.region.place == CORE else one.region for one in steps]


def _label(candidate: Candidate) -> str:
    """The places that compute it, each with its offload."""
    parts = (step.region for step in candidate.steps if not step.region.is_idle)
    return " then ".join(f"{one.place} {one.offload.name}" if one.offload else one.place for one in parts)
