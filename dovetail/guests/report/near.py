"""Utilisation: cycles of each layer and of the network over those of the busiest unit, and the core's passes beside an
engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def rows(data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A line per layer of the model in a report's JSON (`detail`) that takes time: name, where, its cycles, those of
    engine and DMA, the engine's least, the bound and what sets it, the cycles over the longer of the two (or what the
    core takes alone), and why that is so."""
    for layer in data["groups"]:
        if not layer["time"]:
            continue
        engine, dma = layer["engine_cycles"] or 0, layer["dma_cycles"] or 0
        most = max(engine, dma, layer["spent"]["core"] if layer["engine"] == "core" else 0)
        over = f"{layer['time'] / most:.2f}" if most else ""
        cycles = (f"{count:,}" if count else "" for count in (layer["time"], engine, dma))
        limits = (f"{limit:,.0f}" if limit else "" for limit in (layer["least"], layer["bound"]))
        parts = f" ({len(layer['layers'])} parts)" if len(layer["layers"]) > 1 else ""
        yield (layer["name"] + parts, layer["engine"], *cycles, *limits, layer["bound_by"], over, layer["gap"])


def whole(data: Mapping[str, Any]) -> str:
    """All cycles over those of whoever is busy longest, as a sentence."""
    total = data["cycles"]["total"]
    name, most = max(((n, c) for n, c in data["cycles"].items() if n != "total" and c), key=lambda pair: pair[1])
    busiest = f"{total:,} cycles, {total / most:.3f} times the {most:,} of {name}, which is busy longest"
    if not data["bound"]:
        return busiest
    if data["least"] > data["bound"]:
        busiest += f", {total / data['least']:.3f} times the {data['least']:,.0f} of {data['least_by']}"
    return f"{busiest}, and {total / data['bound']:.2f} times the {data['bound']:,.0f} of {data['bound_by']}"


def beside(data: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for every pass of the core over a value that an engine makes or reads: which layer it could be part
    of, and why it is not."""
    pairs = list(zip(data["graph"]["edges"], data["layers"], strict=True))
    makers = {edge["makes"]: layer["name"] for edge, layer in pairs if layer["launches"]}
    for edge, layer in pairs:
        if layer["engine"] != "core" or layer["nothing"] or not layer["spent"] or not layer["spent"]["core"]:
            continue
        before = [makers[value] for value in edge["reads"] if value in makers]
        after = [reader["name"] for own, reader in pairs if edge["makes"] in own["reads"] and reader["launches"]]
        if before or after:
            why = layer["why_not_offloaded"] or "the engine has no such operator"
            cycles = f"{layer['name']}, {layer['spent']['core']:,} cycles in which only the core works"
            yield f"{cycles}: could be fused into {' or '.join((*before, *after))}: no, because {why}"
