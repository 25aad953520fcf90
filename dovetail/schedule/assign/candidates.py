"""Every way of computing each layer: on one engine, split across several, on the core."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations, pairwise, product

from dovetail.errors import ModelError, PlaceError, PlanError
from dovetail.ir.graph import Graph
from dovetail.ir.types import Box, full_box, with_span
from dovetail.program.ir import CORE, Queue, copy_queue
from dovetail.schedule.assign.costs import Candidate, LayerOptions, QueueUse, RegionCosts, border
from dovetail.schedule.assign.pins import pinned_cores
from dovetail.schedule.partition import PartitionCache, explain_mismatch, partition, without_offloads
from dovetail.schedule.region import AssignedRegion, EnginePart, LaidRegion, Region, Share, engine_layouts
from dovetail.schedule.tiles.tile import tile_match
from dovetail.target.description import Target

Refused = Mapping[str, Mapping[str, str]]
"""Region name -> engine -> why it does not compute the region."""
_MOST_ENGINES = 4
"""Engines that may share one layer."""
_STEP_PARTS = (1, 2, 3)
"""Cuts are tried at multiples of the offloads' own step, and of these parts of it."""
_MOST_WAYS = 4
"""Other ways of computing a layer on one engine that are compared."""
_DOUBT = 2
"""The core must look so many times faster to get what one of several engines takes: while it computes, it starts
nothing on them."""


def shared(alone: Sequence[Region], cycles: Sequence[int]) -> Iterator[Region]:
    """A layer shared by every set of engines that can: the best cut of each set.

    Args:
        alone: the layer as each engine takes it by itself.
        cycles: what that takes, for each.
    """
    ways = zip(alone, cycles, strict=True)
    usable = [(one, each) for one, each in ways if one.takes_strides and _lies_alike(one, alone[0])][:_MOST_ENGINES]
    for count in range(2, len(usable) + 1):
        for chosen in combinations(usable, count):
            region = _split([one for one, _ in chosen], [each for _, each in chosen])
            if region is not None:
                yield region


def _lies_alike(region: Region, other: Region) -> bool:
    """True when both compute the same, on operands that lie alike."""
    values = (*region.graph.inputs, region.output)
    same = [node.output for node in region.graph.nodes] == [node.output for node in other.graph.nodes]
    layouts = engine_layouts(region), engine_layouts(other)
    return same and all(layouts[0].get(value) == layouts[1].get(value) for value in values)


def _split(alone: Sequence[Region], cycles: Sequence[int]) -> Region | None:
    """The cut whose slowest part is fastest; of equals the one by rows, whose parts read the same constants."""
    parts = [LaidRegion.of(region).parts[0] for region in alone]
    rank = len(parts[0].shape)
    known: dict[tuple[int, Box], int | None] = {}
    best: tuple[int, tuple[Box, ...]] | None = None
    for axis in (*([1] if rank == 4 else []), rank - 1):
        for boxes in _cuts(parts, cycles, axis):
            costs = []
            for index, box in enumerate(boxes):
                if (index, box) not in known:
                    known[index, box] = _cycles(parts[index], box)
                costs.append(known[index, box])
            slowest = max((cost for cost in costs if cost is not None), default=0)
            if None not in costs and (best is None or slowest < best[0]):
                best = slowest, boxes
    if best is None:
        return None
    shares = zip(parts, best[1], strict=True)
    return replace(alone[0], shares=tuple(Share(part.engine, part.offload, box) for part, box in shares))


def _cuts(parts: Sequence[EnginePart], cycles: Sequence[int], axis: int) -> Iterator[tuple[Box, ...]]:
    """The result cut along an axis in proportion to the engines' speeds, at the multiples of a step near that."""
    whole = full_box(parts[0].shape)
    size = whole[axis][1]
    speeds = [1 / max(count, 1) for count in cycles]
    ideal = [size * sum(speeds[: number + 1]) / sum(speeds) for number in range(len(speeds) - 1)]
    is_last = axis == len(whole) - 1
    step = max(part.offload.channel_step if is_last else part.offload.row_step for part in parts)
    steps = {max(1, step // count) for count in _STEP_PARTS}
    places = [sorted({int(place // n) * n + more for n in steps for more in (0, n)}) for place in ideal]
    for inner in product(*places):
        ends = (0, *inner, size)
        if all(begin < end for begin, end in pairwise(ends)):
            yield tuple(with_span(whole, axis, span) for span in pairwise(ends))


def _cycles(part: EnginePart, box: Box) -> int | None:
    """Cycles of a box of the result; None where the engine does not take it."""
    try:
        return part.offload.cycles(tile_match(part, box)[1])
    except ValueError:
        return None


def layers(
    costs: RegionCosts, regions: Sequence[Region], pins: Mapping[str, str], held: Collection[str], without: Refused
) -> tuple[LayerOptions, ...]:
    """Every region with its candidates.

    Args:
        costs: of the network on the machine.
        regions: of the partition, without offloads that cost accuracy.
        pins: region name -> where the user wants it.
        held: names of the regions that stay as they are, since their knobs were chosen for that.
        without: region name -> engines that the plan found no tiles for, and why.

    Raises:
        PlaceError: a layer cannot be where the user wants it; says why.
        PlanError: nothing can compute a layer; says why, of each engine and the core.
    """
    makers = {region.output: index for index, region in enumerate(regions)}
    options: list[LayerOptions] = []
    for region in regions:
        refused = dict(without.get(region.name, {}))
        pinned = pins.get(region.name, "")
        cores = pinned_cores(pinned)
        wish = CORE if cores else pinned
        every = _candidates(replace(AssignedRegion.of(region), cores=cores), costs, wish, region.name in held, refused)
        candidates = _wished(region, every, wish, refused) if wish else every
        if not candidates:
            raise nothing_computes(region, refused)
        passed_over = tuple(one for one in every if not any(one is other for other in candidates))
        after = tuple(dict.fromkeys(makers[value] for value in region.graph.inputs if value in makers))
        delays = _delays({index: options[index] for index in after}, candidates, costs.target)
        if costs.target.dma is not None:
            counts = {index: len(options[index].candidates) for index in after}
            candidates = _brought(candidates, delays, counts, copy_queue(costs.target))
        options.append(LayerOptions(region, candidates, refused, after, delays, pinned, passed_over))
    return tuple(options)


def _candidates(
    region: AssignedRegion, costs: RegionCosts, wish: str, held: bool, refused: dict[str, str]
) -> tuple[Candidate, ...]:
    """Each engine by itself, several together, then the core; what it is as long as no engine was ever asked."""
    target, graph, cache = costs.target, region.graph, PartitionCache()
    engines = [engine.name for engine in target.engines if engine.name not in refused]
    wanted = set(wish.split("+")) - {CORE, ""}
    if held or not (region.shares or wanted):
        lossy = [engine.name for engine in target.engines if any(offload.lossy for offload in engine.offloads)]
        refused |= {name: _refusal(graph, target, name) for name in lossy}
        return (Candidate(region.place, (costs.step(region),)),)
    alone: list[Candidate] = []
    for name in engines:
        sole = without_offloads(target, {name: name in wanted})
        parts = partition(graph, sole, cache=cache)
        if not any(part.shares for part in parts):
            refused[name] = _refusal(graph, target, name)
            continue
        mixed = without_offloads(target, {other: other in wanted for other in (name, *engines)})
        ways = [parts, *([partition(graph, mixed, cache=cache)] if len(parts) > 1 else [])]
        ways += [way for way in others(graph, parts, sole, cache) if {part.place for part in way} == {name}]
        for way in ways:
            try:
                alone.append(costs.candidate(region.name, way))
            except PlanError as error:
                refused[name] = error.what
        if any(one.members == {name} for one in alone):
            refused.pop(name, None)
    best = {one.place: one for one in sorted(reversed(alone), key=lambda one: -one.cycles)}  # the first of equals
    alone = [one for one in alone if best[one.place] is one]
    return (*alone, *_together(alone, costs), *on_core(region, costs, refused, cache))


def nothing_computes(region: Region, refused: Mapping[str, str]) -> PlanError:
    """The error of a layer that neither the engines nor the core compute, with the reason of each."""
    why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    hint = "fewer channels in this layer, or more room where a size is named"
    return PlanError(f"nothing can compute {region.name}: {why}", where=", ".join(region.origins), hint=hint)


def others(
    graph: Graph, parts: Sequence[Region], target: Target, cache: PartitionCache | None = None
) -> Iterator[tuple[Region, ...]]:
    """The same layer by other offloads of its engines: each time without those used before.

    Args:
        graph: the layer.
        parts: how it is computed first; nothing else is tried for an offload that is preferred.
        target: the machine, with the offloads that may be used.
        cache: as of `partition`.
    """
    left, cache = target, cache or PartitionCache()
    for _ in range(_MOST_WAYS):
        shares = [share for part in parts for share in part.shares]
        used = {(share.engine.name, share.offload.name) for share in shares}
        if not used or any(share.offload.prefer for share in shares):
            return
        engines = []
        for one in left.engines:
            kept = tuple(offload for offload in one.offloads if (one.name, offload.name) not in used)
            engines.append(replace(one, offloads=kept))
        left = replace(left, engines=tuple(engines))
        try:
            parts = partition(graph, left, cache=cache)
        except ModelError:  # the core has no kernel for a part
            return
        if not any(part.shares for part in parts):
            return
        yield parts


def _together(alone: Sequence[Candidate], costs: RegionCosts) -> Iterator[Candidate]:
    """The layer shared by engines that take it whole and go on by themselves."""
    single = [one for one in alone if len(one.steps) == 1]
    whole = [one for one in single if any(share.engine.wait for share in one.steps[0].region.shares)]
    for region in shared([one.steps[0].region for one in whole], [one.cycles for one in whole]):
        with suppress(PlanError):  # no memory for both
            yield Candidate(region.place, (costs.step(region),))


def on_core(
    region: AssignedRegion, costs: RegionCosts, refused: dict[str, str], cache: PartitionCache, doubt: float = _DOUBT
) -> Iterator[Candidate]:
    """The layer on the core, beside hardware so many times its cycles, for they are an estimate and the engine's a
    formula; nothing where it has no kernel for it."""
    try:
        parts = partition(region.graph, without_offloads(costs.target, {}), cache=cache)
    except ModelError as error:
        refused[CORE] = error.what
        return
    own = [replace(AssignedRegion.of(part), reason="", cores=region.cores) for part in parts]
    candidate = costs.candidate(region.name, own)
    doubt = 1 if region.engine is not None and region.engine.device is None else doubt
    steps = []
    for one in candidate.steps:
        uses = tuple(replace(use, length=round(use.length * doubt)) for use in one.uses)
        steps.append(replace(one, cycles=round(one.cycles * doubt), uses=uses) if one.region.place == CORE else one)
    yield replace(candidate, steps=tuple(steps))


def _refusal(graph: Graph, target: Target, engine: str) -> str:
    """Why an engine takes nothing of a layer: what was in the way of the offload that came nearest."""
    lossless, lossy = (without_offloads(target, {engine: allowed}) for allowed in (False, True))
    nodes = graph.nodes[::-1]
    if not all(explain_mismatch(graph, lossy, node) for node in nodes):
        costly = next(offload.lossy for offload in lossy.engine(engine).offloads if offload.lossy)
        return f"{costly}; it is used for layers that are pinned to it only"
    sentences = (explain_mismatch(graph, lossless, node) for node in nodes)
    own = (one.removeprefix(f"{engine} ") for one in sentences if one.startswith(f"{engine} "))
    left = (graph.left[node.output] for node in nodes if node.output in graph.left)
    return next(chain(own, left), "it has no pattern for this layer")


def _wished(
    region: Region, candidates: Sequence[Candidate], wish: str, refused: Mapping[str, str]
) -> tuple[Candidate, ...]:
    """The candidates that are where the user wants them.

    Raises:
        PlaceError: there is none.
    """
    wanted = frozenset(wish.split("+"))
    kept = tuple(one for one in candidates if frozenset(one.place.split("+")) == wanted)
    kept = kept or tuple(one for one in candidates if wanted <= one.members)
    if kept:
        return kept
    where = f"layer {region.name}" + (f" ({', '.join(region.origins)})" if region.origins else "")
    if region.copied_by or region.is_idle:
        raise PlaceError(f"{wish} does not compute it: elements only move", where=where, hint="leave out this pin")
    reason = next((f"{name} does not take it: {refused[name]}" for name in sorted(wanted) if name in refused), "")
    raise PlaceError(
        reason or f"{wish} cannot share it", where=where, hint="dovetail explain shows what takes each layer"
    )


def _brought(
    candidates: tuple[Candidate, ...], delays: Mapping[tuple[int, int, int], int], makers: Mapping[int, int], dma: Queue
) -> tuple[Candidate, ...]:
    """The candidates, the DMA busy before each with what has to be brought it whichever of its makers' candidates,
    given by their number, are chosen."""
    brought = []
    for own, candidate in enumerate(candidates):
        least = (min(delays.get((maker, one, own), 0) for one in range(count)) for maker, count in makers.items())
        first, length = candidate.steps[0], sum(least)
        uses = (*first.uses, QueueUse(dma, -length, length)) if length else first.uses
        brought.append(replace(candidate, steps=(replace(first, uses=uses), *candidate.steps[1:])))
    return tuple(brought)


def _delays(
    before: Mapping[int, LayerOptions], candidates: Sequence[Candidate], target: Target
) -> dict[tuple[int, int, int], int]:
    """Cycles between the layers' candidates; pairs without any are left out."""
    delays: dict[tuple[int, int, int], int] = {}
    for index, layer in before.items():
        value = layer.region.output
        for (number, earlier), (own, later) in product(enumerate(layer.candidates), enumerate(candidates)):
            maker = earlier.steps[-1].region
            readers = [one.region for one in later.steps if value in one.region.graph.inputs]
            if delay := max((border(value, maker, reader, target) for reader in readers), default=0):
                delays[index, number, own] = delay
    return delays
