"""What `dovetail explain` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.compiling import Placement, stripes_sentence
from dovetail.cli.console import output, progress, say

if TYPE_CHECKING:
    from dovetail.graph.graph import Graph
    from dovetail.partition import Region
    from dovetail.pipeline import Pipeline
    from dovetail.place import Placing
    from dovetail.program.ir import Program
    from dovetail.stripe import Striped
    from dovetail.target import Target


@dataclass(frozen=True)
class ExplainOrder:
    """The arguments of the command; see `dovetail explain --help`."""

    model: Path
    target: str
    policy: str | None
    as_json: bool
    placement: Placement


@dataclass(frozen=True)
class _Explained:
    """What is known of a network when it has been placed."""

    graph: Graph
    target: Target
    regions: Sequence[Region]
    placing: Placing
    striped: Striped | None = None
    pipeline: Pipeline | None = None
    program: Program | None = None
    """Of several cores."""


def explain(order: ExplainOrder) -> None:
    """Print where every operator goes; raises DovetailError."""
    with progress("starting") as report:
        from dovetail.partition import rivals

        found = _explained(order, report)
        graph, target = found.graph, found.target
        others = {region.name: rivals(graph, target, region) for region in found.regions}
        rows = _placements(found.regions, target, others)
        _add_candidates(rows, found.placing)
        if found.program:
            rows = [row | {"cores": own} for row, own in zip(rows, _core_shares(found.program), strict=True)]
    if order.as_json:
        say(json.dumps(_described(order, found, rows), indent=2))
        return
    _print_placements(rows)
    if found.placing.schedule is not None:
        say(found.placing.describe())
    if found.pipeline is not None:
        say(found.pipeline.describe())
    if found.striped is not None:
        say(stripes_sentence(found.striped, sum(region.macs for region in found.regions)))


def _explained(order: ExplainOrder, report: Callable[[str], None]) -> _Explained:
    """Place the network, and plan it too where cores, stripes or stages matter; raises DovetailError."""
    from dovetail.compile import Options, compile_graph, prepare
    from dovetail.place import first, place

    placed = order.placement
    target = placed.on(order.target)
    options = Options(
        order.policy, memory_budget=placed.bytes(), pipeline=placed.pipeline, pins=placed.all_pins()
    )  # fmt: skip
    graph = prepare(order.model, target, options, report)
    if options.memory_budget is None and not target.workers and not options.pipeline:
        report("placing")
        placing = place(graph, first(graph, target), target, options.pins)
        return _Explained(graph, target, placing.regions, placing)
    made = compile_graph(graph, target, options, report, interpret=False)
    program = made.plan.program if target.workers else None
    return _Explained(graph, target, made.regions, made.placing, made.striped, made.pipeline, program)


def _described(order: ExplainOrder, found: _Explained, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same for machines."""
    target = found.target
    chosen = target.policies[0].name if order.policy is None else order.policy
    described = {"schema": 1, "model": found.graph.name, "target": target.name, "policy": chosen, "layers": rows}
    if found.placing.schedule is not None:
        described["placement"] = {"cycles": found.placing.schedule.finish, "bound": found.placing.bound}
    budget = order.placement.bytes()
    if budget is not None:
        described |= {"memory_budget": budget, "stripes": found.striped.to_json() if found.striped else []}
    if found.pipeline is not None:
        described["pipeline"] = found.pipeline.to_json()
    return described


def _core_shares(program: Program) -> list[dict[str, float]]:
    """Per layer: the part of its result, of 1, that each core computes."""
    from dovetail.program.ir import Call

    found: list[dict[str, int]] = [{} for _ in program.layers]
    for call in program.statements:
        if isinstance(call, Call):
            found[call.layer][str(call.core)] = call.result.type.elements
    return [{core: own[core] / sum(own.values()) for core in sorted(own, key=int)} for own in found]


def _placements(
    regions: Sequence[Region], target: Target, others: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    from dovetail import kernels
    from dovetail.emit.calls import core_traits
    from dovetail.report.plan_file import why_not_offloaded

    own = core_traits(target.core)
    return [
        {
            "name": region.name,
            "operators": list(region.origins),
            "engine": region.place,
            "offload": region.offload.name if region.offload else "",
            "macs": region.macs,
            "reason_not_offloaded": why_not_offloaded(region),
            "offloads_not_used": list(others[region.name]),
            "instructions_not_used": list(kernels.unused_instructions(region.graph, own))
            if own.instructions and region.place == "core" and not region.is_view and not region.still
            else [],
        }
        for region in regions
    ]


def _add_candidates(rows: Sequence[dict[str, Any]], placing: Placing) -> None:
    """To every layer that could be in several places what it costs in each, and why it is where it is."""
    from dovetail.place import told

    known = told(placing.layers, placing.schedule) if placing.schedule else {}
    for row in rows:
        if row["name"] in known:
            found = known[row["name"]]
            row["candidates"] = [{"place": place, "cycles": cycles} for place, cycles in found.candidates]
            row["refused"], row["why"] = dict(found.refused), found.why


def _compared(row: Mapping[str, Any]) -> list[str]:
    """The candidates of a layer in words."""
    if "why" not in row:
        return []
    costs = ", ".join(f"{one['place']} {one['cycles']:,}" for one in row["candidates"])
    refused = [f"{engine}: {sentence}" for engine, sentence in row["refused"].items()]
    return [row["why"] if row["why"] != row["reason_not_offloaded"] else "", f"cycles: {costs}", *refused]


def _print_placements(rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    heads = ("layer", "operators", "where", "why" if any("why" in row for row in rows) else "why not an engine")
    for heading in heads:
        table.add_column(heading, overflow="fold")
    for row in rows:
        operators = "\n".join(row["operators"]) or "(added by Dovetail)"
        place = f"{row['engine']} ({row['offload']})" if row["offload"] else row["engine"]
        place = "\n".join(f"core {core}: {100 * own:.1f} %" for core, own in row.get("cores", {}).items()) or place
        said = [row["reason_not_offloaded"], *_compared(row), *row["offloads_not_used"], *row["instructions_not_used"]]
        reasons = "\n".join(sentence for sentence in said if sentence)
        table.add_row(*(Text(text) for text in (row["name"], operators, place, reasons)))
    output().print(table, highlight=False)
