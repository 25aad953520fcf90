"""Placement of every operator of a network on a target, with reasons, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail import kernels
from dovetail.codegen.emit.manifest import kernels_compared
from dovetail.codegen.emit.plan_file import why_not_offloaded
from dovetail.compile import Options, compile_graph, machine, prepare
from dovetail.documented import document
from dovetail.ir.graph import Graph
from dovetail.kernels import core_traits
from dovetail.names import names
from dovetail.program.ir import Call, Program
from dovetail.records import Record, field
from dovetail.schedule.assign import Assignment, assign
from dovetail.schedule.joint import side_by_side
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import initial_partition, rivals
from dovetail.schedule.pipeline import Pipeline
from dovetail.schedule.region import Region
from dovetail.schedule.stripe import StripedNetwork
from dovetail.target import Target


class PlacementReport(Record):
    """A network that has been placed."""

    graph: Graph
    """Graph that is placed."""
    target: Target
    """Target it is placed on."""
    options: Options
    """Options of the compilation."""
    regions: Sequence[Region]
    """Regions of the graph, in order."""
    assignment: Assignment
    """Unit and time of each region."""
    striped: StripedNetwork | None = None
    """Stripes of the network; None if layers are computed whole."""
    pipeline: Pipeline | None = None
    """Stages of the network; None without `--pipeline`."""
    program: Program | None = None
    """The program of several cores; None for one."""
    side: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the regions that are computed side by side with a region, by its name."""

    def rows(self) -> list[dict[str, Any]]:
        """Per layer: what computes it, its candidates, and the sentences that say why, as plain values."""
        own = core_traits(self.target.core)
        candidates = self.assignment.reasons()
        shares = _core_shares(self.program) if self.program else None
        rows = list[dict[str, Any]]()
        for number, region in enumerate(self.regions):
            computed = own.instructions and region.place == "core" and not region.is_idle
            row: dict[str, Any] = {
                "name": region.name,
                "operators": list(region.origins),
                "engine": region.place,
                "offload": region.offload.name if region.offload else "",
                "beside": list(self.side.get(region.name, ())),
                "macs": region.macs,
                "reason_not_offloaded": why_not_offloaded(region),
                "offloads_not_used": [] if region.name in candidates else list(rivals(self.graph, self.target, region)),
                "instructions_not_used": list(kernels.unused_instructions(region.graph, own)) if computed else [],
            }
            row |= kernels_compared(region, self.target)
            if region.name in candidates:
                found = candidates[region.name]
                row["candidates"] = [{"place": where, "cycles": cycles} for where, cycles in found.candidates]
                row["refused"], row["why"] = dict(found.refused), found.why
            rows.append(row | {"cores": shares[number]} if shares is not None else row)
        return rows

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        target, options = self.target, self.options
        policy = target.policy(options.policy)
        found = {"schema": 1, "model": self.graph.name, "target": target.name, "policy": policy.name}
        found["policy_is"] = policy.sentence if any(rewrite.lsb for rewrite in policy.rewrites) else ""
        found["layers"] = self.rows()
        if self.assignment.schedule is not None:
            found["placement"] = {"cycles": self.assignment.schedule.finish, "bound": self.assignment.bound}
        if options.memory_budget is not None:
            found["memory_budget"] = options.memory_budget
            found["stripes"] = self.striped.to_json() if self.striped else []
        if self.pipeline is not None:
            interval, delay = self.pipeline.interval, self.pipeline.delay
            found |= {"pipeline": self.pipeline.to_json(), "interval": interval, "delay": delay}
        return found


def explain(
    model: Path, target: Target, options: Options, report: Callable[[str], None] = lambda text: None
) -> PlacementReport:
    """Place a network, and plan it too where cores, stripes or stages matter; raises DovetailError."""
    target, options = machine(target, options)
    graph = prepare(model, target, options, report)
    if options.memory_budget is not None or target.workers or options.pipeline:
        made = compile_graph(graph, target, options, report, interpret=False)
        program = made.plan.program if target.workers else None
        of_plan = (made.assignment, made.striped, made.pipeline, program, made.unit.beside)
        return PlacementReport(graph, target, options, made.regions, *of_plan)
    report("placing")
    assignment = assign(graph, initial_partition(graph, target), target, options.pins)
    side: dict[str, tuple[str, ...]] = {}
    if any(engine.joint for engine in target.engines):
        side = side_by_side(choose_layouts(graph, assignment.regions, target), target).beside
    return PlacementReport(graph, target, options, assignment.regions, assignment, side=side)


def _core_shares(program: Program) -> list[dict[str, float]]:
    """Per layer: the part of its result, of 1, that each core computes."""
    found: list[dict[str, int]] = [{} for _ in program.layers]
    for call in program.statements:
        if isinstance(call, Call):
            found[call.layer][str(call.core)] = call.result.type.elements
    return [{core: own[core] / sum(own.values()) for core in sorted(own, key=int)} for own in found]


if not TYPE_CHECKING:
    __getattr__ = names(__name__, Explained="PlacementReport")

document(__name__)
