"""The layers of a network with every way of computing each of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from dovetail.errors import ModelError, PlaceError, PlanError
from dovetail.graph.graph import Graph
from dovetail.partition.regions import Region, explain_mismatch, partition
from dovetail.place.costs import border, step, without_offloads
from dovetail.place.model import Candidate, Layer, Step
from dovetail.place.shares import shared
from dovetail.program.ir import CORE
from dovetail.target.description import Target

_DOUBT = 2
"""How many times faster the core must look to get what an engine takes."""


def layers(
    graph: Graph, regions: Sequence[Region], target: Target, pins: Mapping[str, str], held: Collection[str]
) -> tuple[Layer, ...]:
    """Every region with its candidates.

    Args:
        graph: the whole network.
        regions: of the partition, without offloads that cost accuracy.
        target: the machine.
        pins: region name -> where the user wants it.
        held: names of the regions that stay as they are, since their knobs were chosen for that.

    Raises:
        PlaceError: a layer cannot be where the user wants it; says why.
    """
    makers = {region.output: index for index, region in enumerate(regions)}
    found: list[Layer] = []
    for region in regions:
        refused: dict[str, str] = {}
        wish = pins.get(region.name, "")
        known = _candidates(region, graph, target, wish, region.name in held, refused)
        candidates = _wished(region, known, wish, refused) if wish else known
        passed_over = tuple(one for one in known if not any(one is other for other in candidates))
        after = tuple(dict.fromkeys(makers[value] for value in region.graph.inputs if value in makers))
        delays = _delays([found[index] for index in after], after, candidates, target)
        found.append(Layer(region, candidates, refused, after, delays, wish, passed_over))
    return tuple(found)


def _candidates(
    region: Region, graph: Graph, target: Target, wish: str, held: bool, refused: dict[str, str]
) -> tuple[Candidate, ...]:
    """Each engine by itself, several together, then the core; what it is as long as no engine was ever asked."""
    engines = [engine.name for engine in target.engines]
    wanted = set(wish.split("+")) - {CORE, ""}
    if held or (region.engine is None and not wanted):
        refused |= {name: _refusal(region.graph, target, name) for name in engines if _is_lossy(target, name)}
        return (_as_it_is(region, graph, target),)
    alone: list[Candidate] = []
    for name in engines:
        sole = without_offloads(target, {name: name in wanted})
        parts = partition(region.graph, sole)
        if not any(part.engine is not None for part in parts):
            refused[name] = _refusal(region.graph, target, name)
            continue
        mixed = without_offloads(target, {other: other in wanted for other in (name, *engines)})
        for way in (parts, partition(region.graph, mixed)) if len(parts) > 1 else (parts,):
            try:
                alone.append(_candidate(region, way, graph, target))
            except PlanError as error:
                refused[name] = error.what
    alone = [one for index, one in enumerate(alone) if one.place not in {other.place for other in alone[:index]}]
    return (*alone, *_together(alone, graph, target), *_on_core(region, graph, target, refused))


def _is_lossy(target: Target, engine: str) -> bool:
    """True when an engine has offloads that cost accuracy."""
    return any(offload.lossy for offload in target.engine(engine).offloads)


def _as_it_is(region: Region, graph: Graph, target: Target) -> Candidate:
    return Candidate(region.place, (step(region, graph, target),))


def _candidate(region: Region, parts: Sequence[Region], graph: Graph, target: Target) -> Candidate:
    """A layer computed as some regions, which get its name."""
    if len(parts) == 1:
        parts = [replace(parts[0], name=region.name)]
    else:
        parts = [replace(part, name=f"{region.name}_{number}") for number, part in enumerate(parts)]
    places = dict.fromkeys(part.place for part in parts if not (part.is_view or part.still))
    return Candidate(" then ".join(places), tuple(step(part, graph, target) for part in parts))


def _together(alone: Sequence[Candidate], graph: Graph, target: Target) -> Iterator[Candidate]:
    """The layer shared by engines that take it whole and go on by themselves."""
    whole = [one for one in alone if len(one.steps) == 1 and _is_apart(one.steps[0].region)]
    regions = [one.steps[0].region for one in whole]
    for region in shared(regions, [one.cycles for one in whole]):
        try:
            yield Candidate(region.place, (step(region, graph, target),))
        except PlanError:  # no memory for both
            continue


def _is_apart(region: Region) -> bool:
    return region.engine is not None and bool(region.engine.wait)


def _on_core(region: Region, graph: Graph, target: Target, refused: dict[str, str]) -> Iterator[Candidate]:
    try:
        parts = partition(region.graph, without_offloads(target, {}))
    except ModelError as error:
        refused[CORE] = error.what
        return
    found = _candidate(region, [replace(part, reason="") for part in parts], graph, target)
    yield replace(found, steps=tuple(_doubted(step) for step in found.steps))


def _doubted(step: Step) -> Step:
    """A step of the core that is to compete with an engine's: its cycles are an estimate, the engine's a formula."""
    if step.region.place != CORE:
        return step
    uses = tuple(replace(use, length=use.length * _DOUBT) for use in step.uses)
    return replace(step, cycles=step.cycles * _DOUBT, uses=uses)


def _refusal(graph: Graph, target: Target, engine: str) -> str:
    """Why an engine takes nothing of a layer: what was in the way of the offload that came nearest."""
    lossless = without_offloads(target, {engine: False})
    sentences = [explain_mismatch(graph, lossless, node) for node in reversed(graph.nodes)]
    lossy = without_offloads(target, {engine: True})
    for node in reversed(graph.nodes):
        if not explain_mismatch(graph, lossy, node):
            costly = next(offload.lossy for offload in lossy.engine(engine).offloads if offload.lossy)
            return f"{costly}; it is used for layers that are pinned to it only"
    own = [sentence for sentence in sentences if sentence.startswith(f"{engine} ")]
    return own[0].removeprefix(f"{engine} ") if own else "it has no pattern for this layer"


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
    if region.mover or region.is_view or region.still:
        raise PlaceError(f"{wish} does not compute it: elements only move", where=where, hint="leave out this pin")
    reason = next((f"{name} does not take it: {refused[name]}" for name in sorted(wanted) if name in refused), "")
    raise PlaceError(
        reason or f"{wish} cannot share it", where=where, hint="dovetail explain shows what takes each layer"
    )


def _delays(
    before: Sequence[Layer], after: Sequence[int], candidates: Sequence[Candidate], target: Target
) -> dict[tuple[int, int, int], int]:
    """Cycles between the layers' candidates; pairs without any are left out."""
    found: dict[tuple[int, int, int], int] = {}
    for index, layer in zip(after, before, strict=True):
        value = layer.region.output
        for number, earlier in enumerate(layer.candidates):
            for own, later in enumerate(candidates):
                maker = earlier.steps[-1].region
                readers = [one.region for one in later.steps if value in one.region.graph.inputs]
                delay = max((border(value, maker, reader, target) for reader in readers), default=0)
                if delay:
                    found[index, number, own] = delay
    return found
