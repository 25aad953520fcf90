"""The least cycles a layer can take, and where its cycles went.

The time of a layer has four parts. Its engine is busy for it: "peak" is what its MACs would take at the engine's peak,
"below_peak" the rest. "transfers": its DMA transfers go on and no engine works. "core": nothing but cores works in its
windows; a window is a stretch in which core 0 works, or waits, for the layer. So a layer that waits for the engine or
the transfers of another is not charged for that, and where one engine works at a time the layers add up to the
inference.

The bound of a layer is the larger of what its MACs take at the peak of what computes it and what its bytes take on
their way: through the DMA, or through the engine's own port where the target says how wide that is. On cores it is one
multiply-accumulate per product (by the widest instruction they have) and one store per word of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.claims import transfers_of
from dovetail.report import Span, union, windows

if TYPE_CHECKING:
    from dovetail.sim.protocol import InferenceResult
    from dovetail.target.chip import Core, Dma
    from dovetail.target.description import Target
    from dovetail.target.engine import StreamDma

KINDS = ("peak", "below_peak", "transfers", "core")
"""Kinds of cycles, in the order they are shown in."""

_NEAR = 0.98
"""Share of its time from which on a layer is at its bound."""

_CLOSE = 0.1
"""Largest relative error of a cost model that counts as right."""


@dataclass(frozen=True, slots=True)
class LayerBound:
    """The least cycles of a layer and what sets them."""

    cycles: float
    by: str
    """As a sentence; empty where there is nothing to do."""


def core_product(cores: Sequence[Core]) -> float:
    """Fewest cycles of a multiply-accumulate on these cores together."""
    return 1 / sum(1 / _product(core) for core in cores)


def core_word(cores: Sequence[Core]) -> float:
    """Fewest cycles in which some cores together load or store a word of 4 bytes."""
    from dovetail.sim.architecture import architecture_of, core_costs

    costs = (architecture_of(core.isa).word(core_costs(core.isa, core.costs, core.isa)) for core in cores)
    return 1 / sum(1 / cycles for cycles in costs)


def _product(core: Core) -> float:
    """One core's: by the widest of its own instructions that adds products, one cycle each, or its basic ones. What is
    all taps of a block is a loop of those instructions and no instruction."""
    from dovetail.kernels.scheduled.knobs import block_of, extents, is_product
    from dovetail.sim.architecture import architecture_of, core_costs

    basic = architecture_of(core.isa).product(core_costs(core.isa, core.costs, core.isa))
    single = [one for one in core.instructions if is_product(one) and block_of(one) is None]
    widths = [group * taps for group, taps in (extents(one) for one in single)]
    return float(min([basic, *(1 / width for width in widths)]))


def model_bound(work: Mapping[str, int], target: Target) -> LayerBound:
    """The least cycles of a model on hardware, whatever the schedule.

    Its products at the peak of all engines and cores together, or its weights and ends by all ways together: DMAs,
    engines' own ports, loads and stores of cores. What an engine reads where it lies through a port of unknown width
    is left out. Cores alone do all of it one after the other.

    Args:
        work: of the model without dead parts, as `codegen.emit.plan_file.model_work` has it; nothing is known if empty.
        target: the hardware.
    """
    if not work or target.core.is_host:
        return LayerBound(0, "")
    product, word = core_product(target.cores), core_word(target.cores)
    moved = sum(work[name] for name in ("weights", "read", "written"))
    if not target.engines:
        return LayerBound(work["products"] * product + moved / 4 * word, "products and words of the cores")
    peak = sum(engine.ideal_macs_per_cycle for engine in target.engines) + 1 / product
    limits = [LayerBound(work["products"] / peak, "its products at the peak of engines and cores")]
    ports = [engine.bytes_per_cycle for engine in target.engines if target.reads_constants(engine)]
    if None not in ports:
        doors = sum(dma.bytes_per_cycle for dma in target.dmas) + sum(port or 0 for port in ports) + 4 / word
        limits.append(LayerBound(moved / doors, "its weights, inputs and outputs by DMAs, ports and cores"))
    return max(limits, key=lambda limit: limit.cycles)


def bound(layer: Mapping[str, Any], plan: Mapping[str, Any], target: Target, cores: Sequence[Core]) -> LayerBound:
    """The bound of one layer, as the run's JSON and the build's plan have it; `cores` have a part of it, if any do."""
    if plan["idle"]:
        return LayerBound(0, "")
    names = layer["engine"].split("+")
    engines = [engine for engine in target.engines if engine.name in names]
    limits = []
    if layer["ideal_macs_per_cycle"]:
        cycles = layer["macs"] / layer["ideal_macs_per_cycle"]
        limits.append(LayerBound(cycles, f"its MACs at the peak of {layer['engine']}"))
        wide = sum(engine.bytes_per_cycle or 0 for engine in engines)
        if wide and all(engine.bytes_per_cycle for engine in engines):
            touched = plan["read"] + plan["written"] + sum(constant["bytes"] for constant in plan["constants"])
            limits.append(LayerBound(touched / wide, f"its operands and result through {layer['engine']}'s port"))
    elif layer["engine"] == "core":
        words = -(-(plan["written"] if plan["calls"] else layer["bytes_moved"]) // 4)
        cycles = plan["products"] * core_product(cores) + words * core_word(cores)
        limits.append(LayerBound(cycles, "one multiply-accumulate per MAC, one store per word"))
    if (dma := _dma_for(layer, target)) is not None and layer["bytes_moved"]:
        limits.append(LayerBound(layer["bytes_moved"] / dma.bytes_per_cycle, f"its bytes through {dma.name}"))
    return max(limits, key=lambda limit: limit.cycles, default=LayerBound(0, ""))


def _dma_for(layer: Mapping[str, Any], target: Target) -> Dma | StreamDma | None:
    """The DMA that copies for a layer; None if the core does."""
    names = layer["engine"].split("+")
    own = [engine.dma for engine in target.engines if engine.name in names and engine.dma]
    return own[0] if own else next((dma for dma in target.dmas if dma.name in names), target.dma)


def exposed(
    inference: InferenceResult, count: int, target: Target, owners: Sequence[int] | None
) -> list[tuple[int, int, int]]:
    """Cycles of each layer in three parts: those of its windows in which an engine works; those in which none does but
    its DMA transfers go on; the rest of its windows.

    They add up to the inference; all 0 without time.

    Args:
        inference: the run.
        count: number of layers.
        target: the machine.
        owners: the layer of each DMA transfer, in order; None where unknown: they belong to the window they lie in.
    """
    engines = {engine.name for engine in target.engines}
    working = union([(j.start, j.end) for name, own in inference.activities.items() if name in engines for j in own])
    dma = transfers_of(inference, target)
    moving = union([*working, *((job.start, job.end) for job in dma)])
    parts = np.zeros((count, 3), int)
    for layer, start, end in windows(inference):
        engine, either = _inside(working, start, end), _inside(moving, start, end)
        parts[layer] += (engine, either - engine if owners is None else 0, end - start - either)
    for job, layer in zip(dma, owners or (), strict=False):
        parts[layer, 1] += job.end - job.start - _inside(working, job.start, job.end)
    return [(engine, transfers, core) for engine, transfers, core in parts.tolist()]


def spent(layer: Mapping[str, Any], own: tuple[int, int, int], further: int) -> dict[str, int] | None:
    """The cycles of a layer of the run's JSON by kind (`KINDS`); None without time. `own` is its part of `exposed`,
    `further` the most cycles a core other than core 0 works for it."""
    if layer["cycles"] is None:
        return None
    engine, transfers, core = own
    engine = engine if layer["engine_cycles"] is None else layer["engine_cycles"]
    peak = min(engine, round(layer["macs"] / layer["ideal_macs_per_cycle"])) if layer["ideal_macs_per_cycle"] else 0
    return dict(zip(KINDS, (peak, engine - peak, transfers, max(core, further)), strict=True))


def _inside(spans: Sequence[Span], start: int, end: int) -> int:
    return sum(max(0, min(last, end) - max(first, start)) for first, last in spans)


def reason(layer: Mapping[str, Any], target: Target, cores: Sequence[Core]) -> str:
    """Why a layer, with its `time`, `bound` and `spent`, takes longer than its bound, as a sentence; empty where
    nothing is done or there is no time. `cores` have a part of it, if any do."""
    where, time = layer["spent"], layer["time"]
    if where is None or not (time or layer["bound"]):
        return ""
    if layer["bound"] > time:
        return "hidden: done while an engine works for another layer"
    if layer["bound"] >= _NEAR * time:
        return "at its bound"
    largest = max(KINDS[1:], key=lambda kind: where[kind])
    share = f"{100 * where[largest] / time:.0f} %"
    if largest == "below_peak" and layer["ideal_macs_per_cycle"]:
        return _engine_reason(layer, share)
    if largest == "transfers" and (dma := _dma_for(layer, target)) is not None:
        rate = layer["bytes_moved"] / (layer["dma_cycles"] or where["transfers"])
        moved = f"{rate:.3g} of {dma.bytes_per_cycle} bytes per cycle"
        return f"{share} in which its transfers go on and no engine works: {dma.name} moves {moved}"
    return _core_reason(layer, share, cores)


def _engine_reason(layer: Mapping[str, Any], share: str) -> str:
    """Why the engine takes so long: its shape, as its own cost model has it, or something else."""
    cycles, modelled = layer["engine_cycles"] or layer["time"], layer["modelled_cycles"] or 0
    expected = "as" if abs(modelled - cycles) <= _CLOSE * cycles else f"{modelled:,} cycles"
    model = f", {expected} its cost model says" if modelled else ""
    if layer["bound"] > layer["macs"] / layer["ideal_macs_per_cycle"] + 1:
        return f"{layer['engine']} is busy {cycles:,} cycles where its bytes take {layer['bound']:,.0f}{model}"
    rate, peak = layer["macs"] / cycles, layer["ideal_macs_per_cycle"]
    return f"{share} below the peak: {layer['engine']} does {rate:.3g} of {peak:g} MACs per cycle{model}"


def _core_reason(layer: Mapping[str, Any], share: str, cores: Sequence[Core]) -> str:
    cycles, launches = layer["spent"]["core"], layer["launches"]
    if layer["engine"] == "core" and layer["macs"]:
        rate, least = cycles / layer["macs"], core_product(cores)
        return f"{share} on the core: {rate:.2f} cycles per MAC, {least:.3g} is the least"
    if layer["engine"] == "core":
        return f"{share} on the core: {cycles / max(layer['elements'], 1):.1f} cycles per element of the result"
    if launches:
        jobs = "1 job" if launches == 1 else f"{launches} jobs"
        return f"{share} in which only the core works: it starts {jobs}, {cycles / launches:,.0f} cycles each"
    return f"{share} in which only the core works: it sets up transfers"
