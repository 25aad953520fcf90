"""The fields of `dovetail.json`, the description of a build; `dovetail.codegen.manifest` reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dovetail.codegen.emit.declared import declared_fields
from dovetail.codegen.emit.unit import Unit
from dovetail.codegen.manifest import SCHEMA
from dovetail.kernels import compared, core_traits
from dovetail.program.ir import (
    CORE,
    Begin,
    Call,
    Copy,
    LaunchStatement,
    Move,
    Program,
    Queue,
    View,
    queue_of,
)
from dovetail.program.transfers import relative_transfers, transfer_count
from dovetail.schedule.assign import Assignment
from dovetail.schedule.assign.costs import PlacementReason
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.pipeline import Pipeline
from dovetail.schedule.plan import Plan
from dovetail.schedule.plan.timed import timed
from dovetail.schedule.region import Region
from dovetail.schedule.stripe import StripedNetwork
from dovetail.target.description import Target
from dovetail.target.offload import Command
from dovetail.version import __version__


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
    reasons = assignment.reasons()
    layers = [_layer(region, laid, reasons, target) for region in laid.regions]
    found: dict[str, Any] = {
        **asked,
        "schema": SCHEMA,
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
    if not target.core.is_host:
        total, each = timed(planned.program, laid.regions, target)
        found["estimated"] = total
        for layer, cycles in zip(layers, each, strict=True):
            layer["estimated"] = cycles
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


def _layer(region: Region, laid: LayoutPlan, reasons: Mapping[str, PlacementReason], target: Target) -> dict[str, Any]:
    """Fields of a layer."""
    return {
        "name": region.name,
        "operators": list(region.origins),
        "engine": region.place,
        "macs": region.macs,
        "reason_not_offloaded": region.reason,
        **({"beside": list(laid.beside[region.name])} if region.name in laid.beside else {}),
        **({"candidates": dict(reasons[region.name].candidates)} if region.name in reasons else {}),
        **kernels_compared(region, target),
    }


def kernels_compared(region: Region, target: Target) -> dict[str, dict[str, int]]:
    """`kernels`: cycles of a region's kernel on the core with its `own_instructions` and of the `plain` one; nothing
    where there is one kernel for it."""
    own, plain = compared(region.graph, core_traits(target.core)) if region.is_kernel else (0, 0)
    return {"kernels": {"own_instructions": own, "plain": plain}} if own else {}


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
        **({"stretches": found} if (found := _stretches(unit)) else {}),
        **stack_fields(unit),
        "sources": {name: list(paths) for name, paths in sources.items()},
    }


def stack_fields(unit: Unit) -> dict[str, Any]:
    """The manifest's entry for the stack, if it was measured."""
    return {"stack": {name: value for name, value in asdict(unit.stack).items() if value}} if unit.stack else {}


def _work(unit: Unit) -> list[dict[str, Any]]:
    """Per layer: transfers, bytes they write (padding too), launches, their MACs (overlaps too) in all and by engine,
    and the numbers of the cores that compute it, where there are several."""
    found: list[dict[str, Any]] = [
        {"transfers": 0, "bytes": 0, "launches": 0, "macs": 0, "engines": {}} for _ in unit.program.layers
    ]
    for layer, move in engine_moves(unit.program):
        found[layer]["transfers"] += 1
        found[layer]["bytes"] += move.view.type.nbytes
    for statement in unit.program.statements:
        if isinstance(statement, Copy):
            moves = relative_transfers(statement)
            by_dma = queue_of(statement, unit.program.dma) != CORE
            found[statement.layer]["transfers"] += transfer_count(statement) if by_dma else len(moves)
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
    return [own | declared for own, declared in zip(found, declared_fields(unit), strict=True)]


def _stretches(unit: Unit) -> list[dict[str, Any]]:
    """Consecutive statements of one layer, for hardware: see `dovetail.sim.stretches`."""
    devices = {engine.name for engine in unit.target.engines if engine.device}
    made = {index: count for one in unit.lists for index, count in one.counts.items()}
    inside = {index for one in unit.lists for index in one.statements[1:]}
    found: list[dict[str, Any]] = []
    for index, statement in enumerate(unit.program.statements if devices else ()):
        if isinstance(statement, Begin):
            found.append({"layer": statement.layer, "core": False, "commands": {}})
            continue
        own = found[-1]
        own["core"] = own["core"] or index not in inside
        queue, count = queue_of(statement, unit.program.dma), made.get(index, 0)
        if isinstance(statement, LaunchStatement) and not statement.stream and statement.engine in devices:
            queue, count = (
                Queue(statement.engine),
                sum(one.jobs for _, one in unit.commands[index] if isinstance(one, Command)),
            )
        if count:
            own["commands"][queue] = own["commands"].get(queue, 0) + count
    return [own for own in found if own["core"] or own["commands"]]


def engine_moves(program: Program) -> Iterator[tuple[int, Move]]:
    """Moves to and from engines that have a copy of the memory, each with the number of its layer."""
    last = len(program.statements) - 1
    for index, moves in program.moves.items():
        for move in moves:
            yield program.statements[min(index, last)].layer, move
