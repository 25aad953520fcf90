"""How near each layer and the whole network are to whoever is busy longest, and the core's passes beside an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def rows(data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A line per layer of a report's JSON (`detail`) that takes time: name, where, its cycles, those in which engine
    and DMA are busy for it, the cycles over the larger of these (or what the core takes alone), and why that is so."""
    for layer in data["layers"]:
        if not layer["time"]:
            continue
        busy = (layer["engine_cycles"] or 0, layer["dma_cycles"] or 0)
        most = max(*busy, layer["spent"]["core"] if layer["engine"] == "core" else 0)
        over = f"{layer['time'] / most:.2f}" if most else ""
        cycles = (f"{count:,}" if count else "" for count in (layer["time"], *busy))
        yield (layer["name"], layer["engine"], *cycles, over, layer["gap"])


def whole(data: Mapping[str, Any]) -> str:
    """All cycles over those of whoever is busy longest, as a sentence."""
    total = data["cycles"]["total"]
    name, most = max(((n, c) for n, c in data["cycles"].items() if n != "total" and c), key=lambda pair: pair[1])
    return f"{total:,} cycles, {total / most:.3f} times the {most:,} of {name}, which is busy longest"


def beside(data: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for every pass of the core over a value that an engine makes or reads: what it could be part of, and
    why it is not."""
    edges, layers = data["graph"]["edges"], data["layers"]
    makers = {edge["makes"]: layer for edge, layer in zip(edges, layers, strict=True)}
    for edge, layer in zip(edges, layers, strict=True):
        if layer["engine"] != "core" or layer["nothing"] or not layer["spent"] or not layer["spent"]["core"]:
            continue
        before = [makers[value]["name"] for value in edge["reads"] if value in makers and _on_engine(makers[value])]
        after = _readers(edge["makes"], edges, layers)
        if before or after:
            why = layer["why_not_offloaded"] or "the engine has no such operator"
            cycles = f"{layer['name']}, {layer['spent']['core']:,} cycles in which only the core works"
            yield f"{cycles}: could be fused into {' or '.join((*before, *after))}: no, because {why}"


def _readers(value: str, edges: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The engines' layers that read a value."""
    pairs = zip(edges, layers, strict=True)
    return [layer["name"] for edge, layer in pairs if value in edge["reads"] and _on_engine(layer)]


def _on_engine(layer: Mapping[str, Any]) -> bool:
    return bool(layer["launches"])
