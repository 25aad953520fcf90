"""The least cycles of each layer on its engine in its best form, by the engine's own cost model; of the network so.

This bound keeps who computes each layer, and knows what an engine makes of it: modes, blocks that are not full,
products with padding. It leaves out how layers are cut, waits, starts but for those nothing can hide, and transfers but
for bytes that must be brought. What is between it and the bound of the model and the hardware is said in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, prod

from dovetail.bounds import best, core_cycles, core_product, core_word, model_bound, work_of
from dovetail.codegen.emit.plan_file import products_of
from dovetail.codegen.manifest import BuildManifest, OperatorWork
from dovetail.codegen.plan_file import PlanEdge, PlanFile, PlanLayer
from dovetail.ir.crop import total_macs
from dovetail.ir.graph import Graph
from dovetail.ir.types import full_box
from dovetail.program.ir import CORE
from dovetail.records import Record
from dovetail.schedule.partition import initial_partition
from dovetail.schedule.region import EnginePart
from dovetail.schedule.tiles.tile import tile_match
from dovetail.target.description import Target

BETWEEN = {
    "peak": "products at the peak",
    "kind": "the engine's mode",
    "blocks": "blocks that are not full",
    "unwanted": "products with padding or zeros",
    "own": "loads, results, starts of blocks",
}
"""Parts of the least cycles of a layer, and their names."""
_KNOBS = 64
"""Most settings of an offload that are all asked for their cycles."""
_CUTS = 16
"""Most ways to cut channels that are looked at."""
_PASSED_OVER = {"Slice", "Pick", "Gather"}
"""Operators that leave out elements of their operand."""
_AROUND = {"Pad", "Concat"}
"""Operators whose operands may lie inside their result, where they are made."""
_TELLING = 0.02
"""Share of the least cycles from which on a part is told."""


class Least(Record):
    """The least cycles of a layer on its engine."""

    cycles: int
    """0 where none are known; `why` then says why."""
    parts: Mapping[str, float]
    """The parts of these, by `BETWEEN`."""
    packed: int
    """Bytes of its constants as the engine reads them."""
    why: str
    """The distance from the engine's peak, as a sentence."""


_SEVERAL, _PART = "several engines compute it", "it is a part of a layer, or another form of it"


def leasts(manifest: BuildManifest, plan: PlanFile, graph: Graph, target: Target) -> list[Least | None]:
    """The least of each layer, one of 0 cycles for engines' layers that have none of their own; None for layers of
    cores and DMAs. `graph` is the integer graph of the build."""
    regions = {region.name: region for region in initial_partition(graph, target)}
    engines = {engine.name: engine for engine in target.engines}
    works, found = work_of(manifest.layers, manifest.operators), list[Least | None]()
    for layer, own, work in zip(manifest.layers, plan["layers"], works, strict=True):
        places = [engines[name] for name in layer.engine.split("+") if name in engines]
        region = regions.get(layer.name)
        offload = next((one for one in places[0].offloads if one.name == own["offload"]), None) if places else None
        if len(places) != 1 or region is None or offload is None:
            found.append(Least(0, {}, 0, _SEVERAL if len(places) > 1 else _PART) if places else None)
            continue
        whole, (engine,) = full_box(region.shape), places
        part = EnginePart(region.name, region.graph, engine, offload, whole, {}, {}, frozenset(), region.origins)
        try:
            found.append(_least(part, target.works_in_place(engine), work))
        except Exception as error:  # a target's own function, of which a report must not end
            found.append(Least(0, {}, 0, f"{offload.name} says no cycles of it as a whole: {error!r}"))
    return found


def _least(part: EnginePart, is_whole: bool, work: Sequence[OperatorWork]) -> Least:
    cycles, shape, words = _fewest(part, is_whole), part.shape, list[str]()
    wanted, macs = sum(products.count for each in work for products in each.products), total_macs(part.graph)
    parts = dict.fromkeys(BETWEEN, 0.0) | {"peak": wanted / part.engine.ideal_macs_per_cycle}
    for node in part.graph.nodes:  # the one that has products
        if (form := products_of(part.graph, node, part.graph.producers())) is None or not wanted:
            continue
        most = best(part.engine, form)
        sizes = (form.inputs, form.outputs, *(shape[1:3] if len(shape) == 4 else (1, 1)))
        full = prod(size / (block * ceil(size / block)) for size, block in zip(sizes, most.block, strict=True))
        own = wanted / (most.macs_per_cycle or 1)
        parts |= {"kind": own - parts["peak"], "blocks": own / full - own}
        parts["unwanted"] = max(0.0, macs / wanted - 1) * own / full
        words += [f"{most.why} ({most.macs_per_cycle:.3g} MACs a cycle at best)"] if most.why else []
        words += _partial(sizes, most.block) if parts["blocks"] > _TELLING * cycles else []
    parts["own"] = cycles - sum(parts.values())
    for name in ("unwanted", "own"):
        words += [f"{100 * parts[name] / cycles:.0f} % for {BETWEEN[name]}"] if parts[name] > _TELLING * cycles else []
    packed = sum(array.size for array in part.offload.pack(part.match).values())
    return Least(cycles, {name: round(part, 1) for name, part in parts.items()}, packed, "; ".join(words))


def _fewest(part: EnginePart, is_whole: bool) -> int:
    """Cycles of a layer by the offload's floor, or its cost model under every setting of its knobs: whole, or cut
    across its channels where the engine is given tiles (they may lie better)."""
    offload, match, channels = part.offload, part.match, part.shape[-1]
    if offload.floor is not None:
        return offload.floor(match)
    space = offload.knobs(match) if offload.knobs else None
    points = space.points() if space and space.size <= _KNOBS else ()
    ways = [offload.cycles(replace(match, choice=choice)) for choice in ({}, *points)]
    step = offload.channel_step
    cuts = range(step, channels, step * max(1, channels // step // _CUTS)) if not is_whole and offload.strided else ()
    return min([*ways, *(cycles for cut in cuts if (cycles := _cut(part, cut)) is not None)])


def _cut(part: EnginePart, channels: int) -> int | None:
    """Cycles of a layer in tiles of so many channels; None where it cannot be cut so."""
    count, rest = divmod(part.shape[-1], channels)
    spans = [(count, (0, channels)), *([(1, (part.shape[-1] - rest, part.shape[-1]))] if rest else [])]
    try:
        tiles = [(often, tile_match(part, (*part.extent[:-1], span))[1]) for often, span in spans]
    except ValueError:
        return None
    return sum(often * part.offload.cycles(match) for often, match in tiles)


def _partial(sizes: Sequence[int], block: Sequence[int]) -> list[str]:
    """The dimensions that do not fill their blocks."""
    named = zip(("inputs", "outputs", "rows", "columns"), sizes, block, strict=True)
    return [f"{size} {name} where {of} are computed together" for name, size, of in named if size % of]


_Job = tuple[int, float, float]
"""Layers an engine computes side by side: their cycles, and the least before they can begin and after their end."""


def network_least(
    manifest: BuildManifest, plan: PlanFile, found: Sequence[Least | None], target: Target
) -> tuple[float, str]:
    """The least cycles of a network whose layers are where this build has them, and who sets them: model and hardware;
    layers of an engine one after the other, with what must come before and after them; or the DMA that brings
    constants, a transfer for each layer that has some."""
    layers, whole = manifest.layers, model_bound(manifest.operators, target)
    ends, limits = _ends(manifest, plan, found, target), [(whole.cycles, whole.by)]
    for engine in target.engines:
        own = {number: one for number, one in enumerate(found) if one and layers[number].engine == engine.name}
        sides: dict[frozenset[str], list[int]] = {}
        for number in own:
            sides.setdefault(frozenset((layers[number].name, *layers[number].beside)), []).append(number)
        jobs = [
            (max(own[one].cycles for one in side), min(ends[one][0] for one in side), min(ends[one][1] for one in side))
            for side in sides.values()
        ]
        if not jobs:
            continue
        # the core starts a launch when an engine that holds one has ended the one before
        between = engine.launching if engine.queue == 1 and engine.wait else 0
        limits.append((_in_turn(jobs, between), f"layers on {engine.name} at its own least"))
        dma = target.dma_of(engine)
        if dma is not None and not target.reads_constants(engine):
            copies = [dma.setup_cycles + one.packed / dma.bytes_per_cycle for one in own.values() if one.packed]
            limits.append((sum(copies) + min(after for _, _, after in jobs), f"constants through {dma.name}"))
    return max(limits)


def _in_turn(jobs: Sequence[_Job], between: int) -> float:
    """Least cycles of jobs that are done one at a time: of any of them, the least before, their own, the least after.
    The worst are those that begin no sooner than some cycle and have no less after them than some others."""
    most, last = 0.0, sorted(jobs, key=lambda job: -job[2])
    for first in {before for _, before, _ in jobs}:
        total = first - between
        for cycles, before, after in last:
            if before >= first:
                total += cycles + between
                most = max(most, total + after)
    return most


def _passed(layer: PlanLayer, word: float) -> float:
    """Cycles of a core in a pass over a layer's operands: a load and an instruction a word, and the stores."""
    if layer["nothing"] or _AROUND & set(layer["kinds"]):
        return 0.0
    read = min(layer["read"], layer["written"]) if _PASSED_OVER & set(layer["kinds"]) else layer["read"]
    return read / 4 * (word + 1) + layer["written"] / 4 * word


def _ends(
    manifest: BuildManifest, plan: PlanFile, found: Sequence[Least | None], target: Target
) -> list[tuple[float, float]]:
    """The least cycles before each layer can begin, and after it has ended: engines at their least, and cores, one
    after the other. None in a pipeline, whose stages do not wait for each other."""
    edges, word, product = plan["graph"]["edges"], core_word(target.cores), core_product(target.cores)
    if manifest.delay:
        return [(0.0, 0.0)] * len(edges)
    own = [float(one.cycles) if one else 0.0 for one in found]
    for number, work in enumerate(work_of(manifest.layers, manifest.operators)):
        if manifest.layers[number].engine == CORE:
            products = sum(each.count for one in work for each in one.products)
            layer = plan["layers"][number]
            own[number] = _passed(layer, word) + products * product
            if own[number] and any(core.vectors for core in target.cores):
                own[number] = core_cycles(target.cores, products, layer["read"] + layer["written"])
    # a layer that passes over elements need not wait for all of its operand
    early = [bool(_PASSED_OVER & set(layer["kinds"])) for layer in plan["layers"]]
    return longest(edges, own, early)


def longest(edges: Sequence[PlanEdge], own: Sequence[float], early: Sequence[bool]) -> list[tuple[float, float]]:
    """The longest ways to and from each layer through cycles of the layers, `own`; an `early` one waits for nothing."""
    makers = {edge["makes"]: number for number, edge in enumerate(edges)}
    before, after = [0.0] * len(edges), [0.0] * len(edges)
    pairs = [(makers.get(name, at), at) for at, edge in enumerate(edges) if not early[at] for name in edge["reads"]]
    ways = [(maker, reader) for maker, reader in pairs if maker < reader]
    for maker, reader in ways:
        before[reader] = max(before[reader], before[maker] + own[maker])
    for maker, reader in reversed(ways):
        after[maker] = max(after[maker], own[reader] + after[reader])
    return list(zip(before, after, strict=True))
