"""A mapping in words and files, and its pieces and firmware compared with the integer graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from dovetail.cli.console import say, show_table
from dovetail.compile import sample_inputs
from dovetail.errors import DovetailError
from dovetail.guests.mesh.building import manager_files
from dovetail.guests.mesh.compiled import CompiledPieces, share_on_engines, used_places
from dovetail.guests.mesh.emit import emit_mesh
from dovetail.guests.mesh.layers import Show
from dovetail.guests.mesh.manifest import mesh_build, mesh_manifest
from dovetail.guests.mesh.mapping import Performance, measure
from dovetail.guests.mesh.mapping_file import SCHEMA as FILE_SCHEMA
from dovetail.guests.mesh.own import routes_of
from dovetail.guests.mesh.partition import Objective
from dovetail.guests.mesh.picture import picture
from dovetail.guests.mesh.pieces import execute, piece_graph
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.guests.mesh.rack import run_exact
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array
from dovetail.prove import difference
from dovetail.target.description import Target

_MOST_EXACT = 3
"""Inputs that firmware is run with at most."""


def require_equal(
    graph: Graph, inputs: Sequence[Mapping[str, Array]], outputs: Sequence[Mapping[str, Array]], what: str, hint: str
) -> None:
    """Raise DovetailError where outputs are not those of the integer graph."""
    other = difference(graph, inputs, outputs)
    if other is not None:
        raise DovetailError(f"{what} something else than the integer graph: {other}", where=graph.name, hint=hint)


def check_pieces(mapped: MeshMapping, show: Show) -> None:
    """Compare the pieces, computed in numpy, with the integer graph."""
    inputs = sample_inputs(mapped.graph)
    outputs, hint = execute(mapped, inputs, show), "report this: the mapping is at fault, not the model"
    require_equal(mapped.graph, [inputs], [outputs], "the pieces together give", hint)
    say("computed piece by piece, the outputs equal the integer graph's in every byte")


def run_exactly(
    target: Target,
    mapped: MeshMapping,
    inputs: int,
    modelled: Performance,
    jobs: int,
    scheduler: str | None,
    show: Show,
) -> None:
    """Run every element's firmware, compare its outputs with the integer graph, and its times with those modelled.

    Raises:
        DovetailError: there is no firmware, it fails, or it gives something else.
    """
    graph, project = mapped.graph, emit_mesh(mapped, target)
    arrays = [sample_inputs(graph, seed) for seed in range(min(inputs, _MOST_EXACT))]
    what = "the elements' firmware gives"
    hint = "report this, or look at the target's element driver if it is yours"
    run = run_exact(mapped, project, target, arrays, jobs, scheduler, show)
    require_equal(graph, arrays, run.outputs, what, hint)
    sections = f"{len(mapped.placed)} sections one after the other"
    ran = f"{len(project.programs)} programs" if mapped.resident else sections
    instructions, stack = sum(one.instructions for one in run.runs), max(one.stack for one in run.runs)
    total = f"{len(run.runs)} elements ran {ran} over {len(arrays)} inputs, {instructions} instructions in all"
    used = f"Most memory of an element {max(run.memory)} of {mapped.mesh.usable} bytes, most stack {stack}"
    say(f"{total}; every output equals the integer graph's. {used}")
    say(f"cycles for each input of the slowest element: {max(run.paces)}")
    executed = measure(mapped, inputs, clocks=run.clocks)
    say(
        f"the stream with the cycles of the firmware: {executed.interval:.0f} clocks between inputs, "
        f"{executed.latency:.0f} for one; modelled {modelled.interval:.0f} and {modelled.latency:.0f}"
    )


def print_stages(mapped: MeshMapping, asked: Objective) -> None:
    """Print a table of the layers and their cuts, and a note where it is not what was asked for."""
    pieces = mapped.mesh.pieces
    shares: list[tuple[int, int]] = []
    headings = ("layer", "on", "rows", "columns", "channels", "sums", "pieces", "clocks", "bytes")
    rows = []
    for section in mapped.sections:
        for stage in section.stages:
            where = "MAC array" if stage.layer.on_array else "core"
            if isinstance(pieces, CompiledPieces):
                compiled = [pieces.compiled(piece_graph(stage, piece)[0]) for piece in range(stage.pieces)]
                shares += map(share_on_engines, compiled)
                where = ", ".join(sorted({name for one in compiled for name in used_places(one)}))
            numbers = (*astuple(stage.cut), stage.pieces, int(stage.costs.clocks.max()), int(stage.memory.max()))
            rows.append([stage.layer.name, where, *map(str, numbers)])
    show_table(headings, rows, left=("layer", "on"))
    if asked is Objective.THROUGHPUT and not mapped.resident:
        say("not all of it is on the mesh at once: it runs in sections, an input after the other")
    if total := sum(macs for _, macs in shares):
        own = 100 * sum(macs for macs, _ in shares) / total
        say(f"{own:.1f} % of the multiply-accumulates are on the elements' engines")


def sentence(mapped: MeshMapping, performance: Performance) -> str:
    """Elements and times of a mapping, in words."""
    clock = mapped.mesh.clock
    used = max(len(placed.tenants) for placed in mapped.placed)
    ratio = performance.interval / performance.bound
    return (
        f"{used} of {len(mapped.topology.elements)} elements; one input takes {performance.latency:.0f} clocks "
        f"({performance.latency / clock * 1e3:.3f} ms), a stream one every {performance.interval:.0f} "
        f"({clock / performance.interval:.0f} per second), {ratio:.2f} times its bound of {performance.bound:.0f}: "
        f"{performance.bottleneck}"
    )


def files_of(mapped: MeshMapping, performance: Performance, target: Target) -> dict[str, bytes]:
    """Everything that is written of a mapping, by relative path."""
    page = picture(mapped, performance, sentence(mapped, performance))
    project = emit_mesh(mapped, target)
    files = {"mapping.json": mapping_json(mapped), "mesh.html": page, **project.files}
    if mapped.resident:
        files["mapping.yaml"] = mapping_yaml(mapped)
    build = mesh_build(mapped, project, target)
    return {**files, **mesh_manifest(build, mapped.graph), **manager_files()}


def mapping_json(mapped: MeshMapping) -> bytes:
    """The mapping as JSON text: per stage its cut, and per piece its element (column and row of the chip, number on
    it), box, bytes and key; per chip its routing entries."""
    content = {
        "schema": 2,
        "network": mapped.graph.name,
        "objective": mapped.objective.value,
        "boards": mapped.mesh.boards,
        "chips": mapped.mesh.chips,
        "elements_per_chip": mapped.mesh.per_chip,
        "usable_bytes": mapped.mesh.usable,
        "sections": [_section(mapped, index) for index in range(len(mapped.placed))],
    }
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _section(mapped: MeshMapping, index: int) -> dict[str, Any]:
    placed, tables = mapped.placed[index], mapped.tables[index]
    stages = []
    for stage in placed.section.stages:
        one: dict[str, Any] = {"layer": stage.layer.name, "cut": list(astuple(stage.cut)), "slots": list(stage.slots)}
        numbers = slice(stage.first, stage.first + stage.pieces)
        places = map(mapped.topology.position, placed.element[numbers].tolist())
        columns = (places, stage.boxes.tolist(), stage.memory.tolist(), tables.key[numbers].tolist())
        names = ("element", "box", "bytes", "key")
        one["pieces"] = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        stages.append(one)
    rows = np.column_stack([tables.first, tables.keys, tables.ways, tables.local])
    routes = [
        {"chip": list(mapped.topology.places[chip]), "entries": rows[tables.chip == chip].tolist()}
        for chip in np.unique(tables.chip).tolist()
    ]
    return {"stages": stages, "routes": routes}


def mapping_yaml(mapped: MeshMapping) -> bytes:
    """The mapping of a resident network in the form `own.read_mapping` reads: with nothing left to choose."""
    placed, _ = mapped.whole
    topology = mapped.topology
    lines = [f"schema: {FILE_SCHEMA}", f"network: {json.dumps(mapped.graph.name)}"]
    lines += [f"objective: {mapped.objective.value}", "layers:"]
    for stage in placed.section.stages:
        lines += [f"  {json.dumps(stage.layer.name)}:", f"    slots: {list(stage.slots)}", "    pieces:"]
        elements = placed.element[stage.first : stage.first + stage.pieces].tolist()
        spans = stage.boxes.reshape(-1, 4, 2)[:, : 4 if stage.cut.sums > 1 else 3].tolist()
        for box, element in zip(spans, elements, strict=True):
            lines.append(f"      - {{box: {box}, on: {list(topology.position(element))}}}")
    routes = routes_of(placed)
    lines += ["routes:"] * bool(routes) + [f"  - {route}" for route in routes]
    return ("\n".join(lines) + "\n").encode()
