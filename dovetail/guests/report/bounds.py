"""The parts of a layer's cycles, and why it takes longer than its bound.

The time of a layer has four parts. Its engine is busy for it: "peak" is what its MACs would take at the engine's peak,
"below_peak" the rest. "transfers": its DMA transfers go on and no engine works. "core": nothing but cores works in its
windows; a window is a stretch in which core 0 works, or waits, for the layer. So a layer that waits for the engine or
the transfers of another is not charged for that, and where one engine works at a time the layers add up to the
inference. Bounds are those of `dovetail.bounds` and, on engines, of `least`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.bounds import core_product
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
        return f"{share} DMA only: {dma.name} moves {moved}"
    return _core_reason(layer, share, cores)


def _engine_reason(layer: Mapping[str, Any], share: str) -> str:
    """Why the engine takes so long: its shape, as its own cost model has it, or something else."""
    cycles, modelled = layer["engine_cycles"] or layer["time"], layer["modelled_cycles"] or 0
    expected = "as" if abs(modelled - cycles) <= _CLOSE * cycles else f"{modelled:,} cycles"
    model = f", {expected} its cost model says" if modelled else ""
    rate, peak = layer["macs"] / cycles, layer["ideal_macs_per_cycle"]
    why = f": {layer['why_least']}" if layer["why_least"] else ""
    return f"{share} below the peak: {layer['engine']} does {rate:.3g} of {peak:g} MACs per cycle{model}{why}"


def _core_reason(layer: Mapping[str, Any], share: str, cores: Sequence[Core]) -> str:
    cycles, launches = layer["spent"]["core"], layer["launches"]
    if layer["engine"] == "core" and layer["macs"]:
        rate, least = cycles / layer["macs"], core_product(cores)
        return f"{share} on the core: {rate:.2f} cycles per MAC, {least:.3g} is the least"
    if layer["engine"] == "core":
        return f"{share} on the core: {cycles / max(layer['elements'], 1):.1f} cycles per element of the result"
    if launches:
        jobs = "1 job" if launches == 1 else f"{launches} jobs"
        return f"{share} core only: it starts {jobs}, {cycles / launches:,.0f} cycles each"
    return f"{share} core only: it sets up transfers"
