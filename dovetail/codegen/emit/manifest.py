"""The description of a build: its manifest, and for its report the graph, where every buffer lies and when, and moves.

`dovetail compile` writes the latter as `dovetail-plan.json`; nothing but the report reads it. The fields are those of
the report's JSON (docs/report.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.codegen.emit.lists import dma_rows, dma_transfers
from dovetail.codegen.emit.unit import Unit
from dovetail.ir.graph import Graph, Node
from dovetail.program.ir import (
    CORE,
    Begin,
    Call,
    Copy,
    LaunchStatement,
    Move,
    Program,
    Role,
    Statement,
    View,
    queue_of,
    reads,
    writes,
)
from dovetail.program.transfers import transfers
from dovetail.schedule.assign import Assignment
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.pipeline import Pipeline
from dovetail.schedule.plan import Plan
from dovetail.schedule.plan.allocate import StatementOrder, pieces, touches
from dovetail.schedule.region import Region
from dovetail.schedule.stripe import StripedNetwork
from dovetail.target.description import Target
from dovetail.version import __version__

PLAN = "dovetail-plan.json"
"""Name of the file in a build."""
SCHEMA = 1
"""Version of the file. It grows when a field is removed or changes its meaning."""


def _digest_of(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def manifest(
    model: Path | None,
    target: Target,
    asked: Mapping[str, Any],
    assignment: Assignment,
    laid: LayoutPlan,
    planned: Plan,
    pins: Mapping[str, str],
    striped: StripedNetwork | None = None,
    pipeline: Pipeline | None = None,
) -> dict[str, Any]:
    """Fields of the build's description; the project adds its sources, sizes and entry point.

    Args:
        model: the file that was compiled, if there is one. target: the machine.
        asked: options of the compilation, by the names they have there. pins: layers the user wanted somewhere.
        assignment: who computes each layer. laid: the network and how its values lie. planned: where and when.
        striped: what is computed in stripes. pipeline: its stages.
    """
    side = laid.beside
    layers = [
        {
            "name": region.name,
            "operators": list(region.origins),
            "engine": region.place,
            "macs": region.macs,
            "reason_not_offloaded": region.reason,
            **({"beside": list(side[region.name])} if region.name in side else {}),
        }
        for region in laid.regions
    ]
    found: dict[str, Any] = {
        **asked,
        "schema": 1,
        "model": laid.graph.name,
        "model_sha256": _digest_of(model) if model else "",
        "target": target.name,
        "layers": layers,
        "memory": {
            one.memory: {"size": target.memory(one.memory).size, "peak": one.peak, "lower_bound": one.lower_bound}
            for one in planned.placements
        },
        "stripes": striped.to_json() if striped else [],
    }
    if target.workers:
        speeds = [core.speed for core in target.cores]
        found |= {"cores": len(speeds), "core_speeds": speeds}
        found |= {"delay": pipeline.delay, "pipeline": pipeline.to_json()} if pipeline else {}
    conversions, schedule = laid.conversions(), assignment.schedule
    if conversions:
        found["conversions"] = [asdict(one) for one in conversions]
    if schedule:
        found["placement"] = {"cycles": schedule.finish, "bound": assignment.bound, "pins": dict(pins)}
    return found


def emitted_fields(unit: Unit, sources: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Fields of the build's description that emitting gives; `sources` are what is compiled for the target, the host
    and a board."""
    program = unit.program

    def ports(views: Mapping[str, View]) -> list[dict[str, Any]]:
        """Each input or output: type, symbol and offset, bytes, layout."""
        found = []
        for name, view in views.items():
            buffer = program.buffers[view.buffer]
            assert buffer.address is not None
            steps = unit.steps.get(name)
            found.append(
                {
                    "name": name,
                    "shape": list(view.type.shape),
                    "dtype": view.type.dtype.text,
                    "symbol": unit.arena_name(buffer.memory),
                    "offset": buffer.address - unit.target.memory(buffer.memory).base + view.offset,
                    "bytes": view.span[1] - view.span[0],
                    "layout": str(view.layout) if view.layout else "",
                    "scale": steps.scale if steps else None,
                    "zero_point": steps.zero_point if steps else None,
                }
            )
        return found

    return {
        "dovetail": __version__,
        "entry": f"{unit.model}_run",
        "uses_float": any(k.foreign or any(p.c_type == "float" for p in k.told) for k in unit.kernels),
        "model_prefix": unit.model,
        "arena": unit.shared_arena,
        "optimize": unit.optimize.value,
        "inputs": ports(program.inputs),
        "outputs": ports(program.outputs),
        "state_bytes": sum(kept.first.nbytes for kept in program.states),
        "work": _work(unit),
        **({"stretches": _stretches(unit)} if unit.lists else {}),
        **stack_fields(unit),
        "sources": {name: list(paths) for name, paths in sources.items()},
    }


def stack_fields(unit: Unit) -> dict[str, Any]:
    """What the description says of the stack, where it is known."""
    return {"stack": asdict(unit.stack)} if unit.stack else {}


def _work(unit: Unit) -> list[dict[str, Any]]:
    """Per layer: transfers, bytes they write (padding too), launches, their MACs (overlaps too) in all and by engine,
    and the numbers of the cores that compute it, where there are several."""
    found: list[dict[str, Any]] = [
        {"transfers": 0, "bytes": 0, "launches": 0, "macs": 0, "engines": {}} for _ in unit.program.layers
    ]
    for layer, move in _engine_moves(unit.program):
        found[layer]["transfers"] += 1
        found[layer]["bytes"] += move.view.type.nbytes
    for statement in unit.program.statements:
        if isinstance(statement, Copy):
            moves = transfers(statement)
            by_dma = queue_of(statement, unit.program.dma) != CORE
            found[statement.layer]["transfers"] += _transfers(statement) if by_dma else len(moves)
            found[statement.layer]["bytes"] += sum(move.nbytes for move in moves)
        if isinstance(statement, LaunchStatement):
            types, own = statement.graph.types, found[statement.layer]
            macs = sum(n.operator.macs([types[name] for name in n.inputs]) for n in statement.graph.nodes)
            own["launches"] += 1
            own["macs"] += macs
            own["engines"][statement.engine] = own["engines"].get(statement.engine, 0) + macs
    calls = [statement for statement in unit.program.statements if isinstance(statement, Call)]
    for layer, own in enumerate(found if unit.target.workers else ()):
        own["cores"] = sorted({call.core for call in calls if call.layer == layer})
    return found


def _stretches(unit: Unit) -> list[dict[str, Any]]:
    """What is done in a row for one layer: see `dovetail.sim.stretches`."""
    statements = unit.program.statements
    made = {index: count for one in unit.lists for index, count in one.counts.items()}
    inside = {index for one in unit.lists for index in one.statements[1:]}
    found: list[dict[str, Any]] = []
    for index, statement in enumerate(statements):
        if isinstance(statement, Begin):
            found.append({"layer": statement.layer, "core": False, "commands": {}})
            continue
        own = found[-1]
        own["core"] = own["core"] or index not in inside
        if index in made:
            queue = queue_of(statement, unit.program.dma)
            own["commands"][queue] = own["commands"].get(queue, 0) + made[index]
    return [own for own in found if own["core"] or own["commands"]]


def _engine_moves(program: Program) -> Iterator[tuple[int, Move]]:
    """What is brought to engines with a copy of the memory and back, each with the layer it is done for."""
    last = len(program.statements) - 1
    for index, moves in program.moves.items():
        for move in moves:
            yield program.statements[min(index, last)].layer, move


def plan_text(graph: Graph, regions: Sequence[Region], planned: Plan, target: Target) -> str:
    """The file, of the integer graph as the target computes it: the same text for the same network and target."""
    program = planned.program
    copies = [statement for statement in program.statements if isinstance(statement, Copy)] if target.dmas else []
    own: list[list[Statement]] = [[] for _ in regions]
    for statement in program.statements:
        own[statement.layer].append(statement)
    found = {
        "schema": SCHEMA,
        "statements": len(program.statements),
        "begins": _begins(program),
        "graph": _graph(graph, regions),
        "layers": list(map(_layer, regions, own)),
        "memories": _memories(program, planned, target),
        "moves": _moves(program),
        "transfers": [
            [copy.layer, _transfers(copy), *([copy.queue] if copy.queue else [])]
            for copy in copies
            if queue_of(copy, program.dma) != CORE
        ],
    }
    return json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n"


def _transfers(copy: Copy) -> int:
    """How many a DMA makes of a copy."""
    return len(list(dma_rows(copy)) if copy.stream else dma_transfers(copy))


def _begins(program: Program) -> list[list[int]]:
    """Statement and layer of every stretch in which the core works for one layer and does something."""
    pairs = enumerate(pairwise((*program.statements, Begin(-1))))
    return [[index, a.layer] for index, (a, b) in pairs if isinstance(a, Begin) and not isinstance(b, Begin)]


def _graph(graph: Graph, regions: Sequence[Region]) -> dict[str, Any]:
    """Values and which layer makes and reads them."""
    named = (name for region in regions for name in (*region.graph.inputs, region.output))
    values = {name: graph.types[name] for name in (*graph.inputs, *named)}
    return {
        "inputs": list(graph.given),
        "outputs": list(graph.results),
        "states": [[read, written] for read, written, _ in graph.kept],
        "values": {
            name: {"shape": list(kind.shape), "dtype": kind.dtype.text, "bytes": kind.nbytes}
            for name, kind in values.items()
        },
        "edges": [{"reads": list(region.graph.inputs), "makes": region.output} for region in regions],
    }


def _layer(region: Region, own: Sequence[Statement]) -> dict[str, Any]:
    types, constants, nodes = region.graph.types, region.graph.constants, region.graph.nodes
    products, read = least_work(region.graph)
    return {
        "kinds": list(dict.fromkeys(type(node.operator).__name__ for node in nodes)),
        "offload": region.offload.name if region.offload else "",
        "reason": why_not_offloaded(region),
        "nothing": region.is_idle,
        "idle": all(isinstance(s, Begin) for s in own),
        "products": products,
        "read": read,
        "written": types[region.output].nbytes,
        "constants": [
            {
                "name": name,
                "dtype": types[name].dtype.text,
                "bits": types[name].dtype.bits,
                "elements": types[name].elements,
                "bytes": types[name].nbytes,
                "weights": any(_weighs(region.graph, node, name) for node in nodes),
            }
            for name in constants
        ],
        "launches": sum(isinstance(s, LaunchStatement) for s in own),
        "modelled": sum(_modelled(region, s) for s in own if isinstance(s, LaunchStatement)),
        "calls": sum(isinstance(s, Call) for s in own),
    }


def _modelled(region: Region, launch: LaunchStatement) -> int:
    """Cycles of a launch as the offload's cost model has them."""
    mine = region.offload is not None and region.engine is not None and region.engine.name == launch.engine
    return region.offload.cycles(launch.match) if mine and region.offload is not None else 0


def _weighs(graph: Graph, node: Node, name: str) -> bool:
    """True for a constant that a node multiplies its operand with: the second operand of one that has MACs."""
    return node.inputs[1:2] == (name,) and node.operator.macs([graph.types[value] for value in node.inputs]) > 0


def why_not_offloaded(region: Region) -> str:
    """Why no engine computes a layer, as a sentence; empty where one does."""
    if region.is_view:
        return "nothing is computed: the same bytes under another shape"
    if region.is_noop:
        return "nothing is copied: rows lie where they belong"
    if region.copied_by:
        return f"{'the core copies' if region.copied_by == 'core' else 'the DMA does it'}: elements only move"
    if region.engine is None and not region.reason:
        return "the target has no engine"
    return region.reason


def least_work(graph: Graph) -> tuple[int, int]:
    """What no way to compute a layer can do without: products, those with padding of its own left out, and bytes of
    operands read, pixels that a stride passes over left out."""
    from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
    from dovetail.ir.operators.movement import Pad

    producers, products = graph.producers(), 0
    read = {name: graph.types[name].nbytes for name in graph.inputs}
    for node in graph.nodes:
        types = [graph.types[name] for name in node.inputs]
        macs = node.operator.macs(types)
        if isinstance(node.operator, Conv2d | DepthwiseConv2d):
            pad = producers.get(node.inputs[0])
            padded = pad is not None and isinstance(pad.operator, Pad)
            value = pad.inputs[0] if pad is not None and padded else node.inputs[0]
            for axis in (1, 2):
                before = pad.operator.before[axis] if pad is not None and isinstance(pad.operator, Pad) else 0
                size, step = graph.types[value].shape[axis], node.operator.stride[axis - 1]
                spread = node.operator.dilation[axis - 1]
                taps = [
                    output * step + tap * spread - before
                    for output in range(graph.types[node.output].shape[axis])
                    for tap in range(types[1].shape[axis])
                ]
                inside = [place for place in taps if 0 <= place < size]
                macs = macs * len(inside) // len(taps)
                if value in read:
                    read[value] = read[value] * len(set(inside)) // size
        products += macs
    return products, sum(read.values())


def _memories(program: Program, planned: Plan, target: Target) -> dict[str, Any]:
    """Per memory what lies where, and when: of each part of a buffer the first byte and one past the last, the first
    statement that touches it and one past the last, and the one by which the core knows that all have finished."""
    touched, users = touches(program.statements, program.buffers, program.dma), _users(program)
    end = len(program.statements)
    order = StatementOrder(program.statements, program.dma)
    found: dict[str, Any] = {}
    for placement in planned.placements:
        memory = target.memory(placement.memory)
        buffers = []
        for name in placement.addresses:
            buffer = program.buffers[name]
            cut = pieces([(buffer, touched[name])], end, memory.alignment)
            parts = []
            for part in cut:
                known = max(order.finished_at(queue, last, queue) for queue, last in part.span.last_by_queue.items())
                times = max(part.span.first, 0), min(part.span.last + 1, end), min(max(known, part.span.last + 1), end)
                parts.append([part.start, min(part.stop, buffer.nbytes), *times])
            buffers.append(
                {
                    "name": name,
                    "role": buffer.role.value,
                    "address": placement.addresses[name] - memory.base,
                    "bytes": buffer.nbytes,
                    "layers": users.get(name, [0, 0]),
                    "parts": parts,
                }
            )
        busiest = placement.busiest if buffers else None
        found[memory.name] = {"base": memory.base, "size": memory.size, "busiest": busiest, "buffers": buffers}
    return found


def _users(program: Program) -> dict[str, list[int]]:
    """The first and the last layer that touch each buffer."""
    found: dict[str, list[int]] = {}
    for statement in program.statements:
        for view in (*reads(statement), *writes(statement)):
            first, last = found.get(view.buffer, (statement.layer, statement.layer))
            found[view.buffer] = [min(first, statement.layer), max(last, statement.layer)]
    return found


def _moves(program: Program) -> list[dict[str, Any]]:
    """Bytes copies write (padding too), by layer, the memories they go from and to, and whether they are constants."""
    found: dict[tuple[int, str, str, bool], int] = {}
    for statement in program.statements:
        if isinstance(statement, Copy):
            source, destination = (program.buffers[v.buffer] for v in (statement.source, statement.destination))
            key = (statement.layer, source.memory, destination.memory, source.role is Role.CONSTANT)
            found[key] = found.get(key, 0) + sum(transfer.nbytes for transfer in transfers(statement))
    for layer, move in _engine_moves(program):
        memory = program.buffers[move.view.buffer].memory
        key = (layer, *((memory, move.engine) if move.to_engine else (move.engine, memory)), False)
        found[key] = found.get(key, 0) + move.view.type.nbytes
    return [
        {"layer": layer, "from": source, "to": destination, "constants": constants, "bytes": count}
        for (layer, source, destination, constants), count in sorted(found.items())
    ]


def constants_of(layers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every constant of the network once, as the layers name them."""
    return list({constant["name"]: constant for layer in layers for constant in layer["constants"]}.values())
