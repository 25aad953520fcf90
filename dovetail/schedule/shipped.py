"""Tilings that tuning found, shipped with the package: what the planner takes for a layer of the same computation,
between the same memories, on a target of the same description, before it goes by its formula.

The table (`tilings.json`) is made by scripts/ship_tilings.py. It is read when the first layer on an engine is planned.
An entry says only how a layer is cut: whether the cut is possible and fits is asked as of any other, so a table that is
out of date costs cycles at most.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dovetail.ir.graph import Graph
from dovetail.ir.types import Shape
from dovetail.target.description import Target

TABLE = Path(__file__).with_name("tilings.json")
"""The table: a digest of the rest, and for each target that of its description and its entries by layer."""


@dataclass(frozen=True, slots=True)
class TilingEntry:
    """How a layer is cut."""

    shape: Shape
    """Result shape of a whole tile."""
    buffers: int
    """Buffers per operand that changes from tile to tile."""
    channels_outer: bool
    """Whether all positions are computed for some channels before the next channels are."""


def signature(graph: Graph) -> str:
    """A digest of operators, attributes, types and connections; neither weights nor names change it."""
    numbers = {name: f"i{index}" for index, name in enumerate(graph.inputs)}
    lines = [f"{name} {graph.types[value]}" for value, name in numbers.items()]
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            if value not in numbers:
                numbers[value] = f"c{len(numbers)}"
                lines.append(f"{numbers[value]} {graph.types[value]}")
        numbers[node.output] = f"n{index}"
        operands = " ".join(numbers[value] for value in node.inputs)
        lines.append(f"{numbers[node.output]} {graph.types[node.output]} {node.operator!r} {operands}")
    lines.append(" ".join(numbers[value] for value in graph.outputs))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def key_of(graph: Graph, near: frozenset[str]) -> str:
    """Names a layer: its signature, and for each of its ends whether it lies in the engine's memory (n) or not (f)."""
    return f"{signature(graph)}-{''.join('n' if end in near else 'f' for end in (*graph.inputs, *graph.outputs))}"


def find_entry(target: Target, graph: Graph, near: frozenset[str]) -> TilingEntry | None:
    """The entry for a layer whose ends `near` lie in the engine's memory; None where there is none."""
    table = _read().get(target.name)
    if not table or table["description"] != description(target):
        return None
    entry = table["tiles"].get(key_of(graph, near))
    return TilingEntry(tuple(entry[0]), entry[1], entry[2]) if entry else None


def description(target: Target) -> str:
    """A digest of what tilings depend on: memories, DMA and engines, as the target describes them."""
    engines = [
        (e.name, e.memory, e.constants, e.dma, e.ideal_macs_per_cycle, e.bytes_per_cycle) for e in target.engines
    ]
    offloads = [(o.name, o.row_step, o.channel_step, o.strided) for e in target.engines for o in e.offloads]
    described = repr((target.memories, target.dma, target.core.isa, engines, offloads))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def add(target: Target, key: str, entry: TilingEntry) -> None:
    """Write an entry into the table; those made for another description of the target go."""
    tables = dict(_read())
    mark = description(target)
    old = tables.get(target.name)
    tiles = dict(old["tiles"]) if old and old["description"] == mark else {}
    tiles[key] = [list(entry.shape), entry.buffers, entry.channels_outer]
    tables[target.name] = {"description": mark, "tiles": dict(sorted(tiles.items()))}
    tables = dict(sorted(tables.items()))
    TABLE.write_text(json.dumps({"digest": _digest(tables), "tables": tables}, indent=1) + "\n")
    _read.cache_clear()


@lru_cache(maxsize=1)
def _read() -> dict[str, Any]:
    """The entries by target; none where the file is not the one that was written."""
    try:
        whole = json.loads(TABLE.read_text())
        tables: dict[str, Any] = whole["tables"]
        return tables if whole["digest"] == _digest(tables) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _digest(tables: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()
