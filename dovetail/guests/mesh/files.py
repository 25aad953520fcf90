"""A mapping as files: JSON for other tools, YAML that can be edited and given back; and in a sentence."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import numpy as np

from dovetail.guests.mesh.mapping import MeshMapping, Performance
from dovetail.guests.mesh.mapping_file import SCHEMA as FILE_SCHEMA
from dovetail.guests.mesh.own_routes import routes_of

SCHEMA = 1


def mapping_json(mapped: MeshMapping) -> bytes:
    """The mapping as JSON text: per stage its cut, and per piece its element (column and row of the chip, number on
    it), box, bytes and key; per chip its routing entries."""
    parts = mapped.parts
    content = {
        "schema": SCHEMA,
        "network": parts.graph.name,
        "objective": parts.objective.value,
        "boards": parts.mesh.boards,
        "chips": parts.mesh.chips,
        "elements_per_chip": parts.mesh.per_chip,
        "usable_bytes": parts.mesh.usable,
        "sections": [_section(mapped, index) for index in range(len(parts.sections))],
    }
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _section(mapped: MeshMapping, index: int) -> dict[str, Any]:
    section, placed, tables = mapped.parts.sections[index], mapped.placed[index], mapped.tables[index]
    streaming = section.streaming
    streamed = streaming and {name: getattr(streaming, name) for name in ("bands", "slices", "depths")}
    stages = []
    for stage in section.stages:
        one: dict[str, Any] = {"layer": stage.layer.name, "cut": list(astuple(stage.cut)), "slots": list(stage.slots)}
        if placed is not None and tables is not None:
            numbers = slice(stage.first, stage.first + stage.pieces)
            places = [list(mapped.topology.position(element)) for element in placed.element[numbers].tolist()]
            columns = (places, stage.boxes.tolist(), stage.memory.tolist(), tables.key[numbers].tolist())
            names = ("element", "box", "bytes", "key")
            one["pieces"] = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        stages.append(one)
    found: dict[str, Any] = {"streamed": streamed, "stages": stages}
    if tables is not None:
        found["routes"] = [
            {
                "chip": list(mapped.topology.places[chip]),
                "entries": np.column_stack(
                    [array[tables.chip == chip] for array in (tables.first, tables.keys, tables.ways, tables.local)]
                ).tolist(),
            }
            for chip in np.unique(tables.chip).tolist()
        ]
    return found


def mapping_yaml(mapped: MeshMapping) -> bytes:
    """The mapping of a resident network in the form `own.read_mapping` reads: with nothing left to choose."""
    placed, _ = mapped.whole
    parts, topology = mapped.parts, mapped.topology
    lines = [
        f"schema: {FILE_SCHEMA}",
        f"network: {json.dumps(parts.graph.name)}",
        f"objective: {parts.objective.value}",
    ]
    lines.append("layers:")
    for stage in placed.section.stages:
        lines += [f"  {json.dumps(stage.layer.name)}:", f"    slots: {list(stage.slots)}", "    pieces:"]
        numbers = slice(stage.first, stage.first + stage.pieces)
        spans = stage.boxes.reshape(-1, 4, 2)[:, : 4 if stage.cut.sums > 1 else 3].tolist()
        for box, element in zip(spans, placed.element[numbers].tolist(), strict=True):
            lines.append(f"      - {{box: {box}, on: {list(topology.position(element))}}}")
    routes = routes_of(placed)
    lines += ["routes:"] * bool(routes) + [f"  - {route}" for route in routes]
    return ("\n".join(lines) + "\n").encode()


def sentence(mapped: MeshMapping, performance: Performance) -> str:
    """Elements and times of a mapping, in words."""
    clock = mapped.parts.mesh.clock
    pairs = zip(mapped.parts.sections, mapped.placed, strict=True)
    used = max(len(placed.tenants) if placed else section.pieces for section, placed in pairs)
    ratio = performance.interval / performance.bound
    return (
        f"{used} of {len(mapped.topology.elements)} elements; one input takes {performance.latency:.0f} clocks "
        f"({performance.latency / clock * 1e3:.3f} ms), a stream one every {performance.interval:.0f} "
        f"({clock / performance.interval:.0f} per second), {ratio:.2f} times its bound of {performance.bound:.0f}: "
        f"{performance.bottleneck}"
    )
