"""The least cycles of each layer on its engine in its best form, by the engine's own cost model; of the network so.

This bound keeps who computes each layer, and knows what an engine makes of it: modes, blocks that are not full,
products with padding. It leaves out how layers are cut, starts, waits, and transfers but for bytes that must be
brought. What is between it and the bound of the model and the hardware is said in words.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, prod

from dovetail.bounds import best, core_word, model_bound, work_of
from dovetail.codegen.emit.plan_file import products_of
from dovetail.codegen.manifest import BuildManifest, OperatorWork
from dovetail.codegen.plan_file import PlanEdge, PlanFile, PlanLayer
from dovetail.ir.crop import total_macs
from dovetail.ir.graph import Graph
from dovetail.ir.types import full_box
from dovetail.program.ir import CORE
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
_TELLING = 0.02
"""Share of the least cycles from which on a part is told."""


@dataclass(frozen=True, slots=True)
class Least:
    """The least cycles of a layer on its engine."""

    cycles: int
    parts: Mapping[str, float]
    """The parts of these, by `BETWEEN`."""
    packed: int
    """Bytes of its constants as the engine reads them."""
    why: str
    """The distance from the engine's peak, as a sentence."""


def leasts(manifest: BuildManifest, plan: PlanFile, graph: Graph, target: Target) -> list[Least | None]:
    """The least of each layer; None for those of cores, of several engines, and of bands (`--memory-budget`). `graph`
    is the integer graph of the build."""
    regions = {region.name: region for region in initial_partition(graph, target)}
    works, found = work_of(manifest.layers, manifest.operators), list[Least | None]()
    for layer, own, work in zip(manifest.layers, plan["layers"], works, strict=True):
        engine = next((one for one in target.engines if one.name == layer.engine), None)
        offload = next((one for one in engine.offloads if one.name == own["offload"]), None) if engine else None
        found.append(None)
        if engine and offload and (region := regions.get(layer.name)):
            whole = full_box(region.shape)
            part = EnginePart(region.name, region.graph, engine, offload, whole, {}, {}, frozenset(), region.origins)
            try:
                found[-1] = _least(part, target.works_in_place(engine), work)
            except Exception:  # another form of it, or a cost model that knows no layer larger than a tile
                continue
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


def network_least(
    manifest: BuildManifest, plan: PlanFile, found: Sequence[Least | None], target: Target
) -> tuple[float, str]:
    """The least cycles of a network whose layers are where this build has them, and who sets them: model and hardware;
    the engine that has most to do, or the DMA that brings constants, a transfer for each layer that has some; the core
    before any of an engine's layers can begin, and after the last of them has ended."""
    layers, word = manifest.layers, core_word(target.cores)
    passed = [_passed(one.engine, own, word) for one, own in zip(layers, plan["layers"], strict=True)]
    # a layer that passes over elements need not wait for all of its operand
    early = {number for number, own in enumerate(plan["layers"]) if _PASSED_OVER & set(own["kinds"])}
    whole = model_bound(manifest.operators, target)
    limits = [(whole.cycles, whole.by)]
    for engine in target.engines:
        own = {number: one for number, one in enumerate(found) if one and layers[number].engine == engine.name}
        together: dict[frozenset[str], int] = {}
        for number, one in own.items():
            side = frozenset((layers[number].name, *layers[number].beside))
            together[side] = max(together.get(side, 0), one.cycles)
        if not own:
            continue
        # the stages of a pipeline do not wait for each other
        before, after = (0.0, 0.0) if manifest.delay else _ends(plan["graph"]["edges"], own, passed, early)
        limits.append((before + sum(together.values()) + after, f"layers on {engine.name} at its own least"))
        dma = target.dma_of(engine)
        if dma is not None and not target.reads_constants(engine):
            copies = [dma.setup_cycles + one.packed / dma.bytes_per_cycle for one in own.values() if one.packed]
            limits.append((sum(copies) + after, f"constants through {dma.name}"))
    return max(limits)


def _passed(where: str, layer: PlanLayer, word: float) -> float:
    """Cycles of a core in a pass over a layer's operands: a load and an instruction a word, and the stores."""
    if where != CORE or layer["nothing"]:
        return 0.0
    read = min(layer["read"], layer["written"]) if _PASSED_OVER & set(layer["kinds"]) else layer["read"]
    return read / 4 * (word + 1) + layer["written"] / 4 * word


def _ends(
    edges: Sequence[PlanEdge], own: Container[int], passed: Sequence[float], early: Container[int]
) -> tuple[float, float]:
    """Cycles of the core before any of an engine's layers can begin, and after the last of them has ended; `early` are
    layers that may begin before."""
    makers = {edge["makes"]: number for number, edge in enumerate(edges)}
    readers: dict[int, list[int]] = {number: [] for number in range(len(edges))}
    before, after = [0.0] * len(edges), [0.0] * len(edges)
    for number, edge in enumerate(edges):
        earlier = [makers[name] for name in edge["reads"] if makers.get(name, number) < number]
        before[number] = max((before[one] + passed[one] for one in earlier), default=0.0)
        for one in earlier:
            readers[one].append(number)
    for number in reversed(readers):
        ways = (inf if one in own else passed[one] + after[one] for one in readers[number] if one not in early)
        after[number] = max(ways, default=0.0)
    mine = [number for number in readers if number in own]
    return min(before[number] for number in mine), min(after[number] for number in mine)
