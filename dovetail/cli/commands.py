"""What each command does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.console import note, output, progress, say
from dovetail.errors import BuildError, ModelError

if TYPE_CHECKING:
    from dovetail.board import Board
    from dovetail.compile import Compiled
    from dovetail.partition import Region
    from dovetail.place import Placing
    from dovetail.program.ir import Program
    from dovetail.stripe import Striped
    from dovetail.target import Target

_NEEDED = (
    "dovetail",
    "entry",
    "inputs",
    "layers",
    "memory",
    "model",
    "model_prefix",
    "outputs",
    "policy",
    "sources",
    "uses_float",
    "work",
)
"""What a run needs to know of a build."""


def compile_to(
    model: Path,
    target_name: str,
    folder: Path,
    policy: str | None,
    rounding: str,
    save_stages: Path | None,
    check: bool,
    force: bool,
    print_program: bool,
    tuning: Path | None = None,
    dump_folder: Path | None = None,
    allow_float: bool = False,
    optimize: str = "speed",
    memory_budget: str | None = None,
    cores: int | None = None,
    pipeline: bool = False,
    pins: Mapping[str, str] | None = None,
) -> None:
    """Compile a model into `folder`; raises DovetailError."""
    if folder.exists() and not force:
        raise BuildError(
            f"the output folder {folder} exists", hint="choose another folder, or give --force to replace it"
        )
    if save_stages is not None and save_stages.exists() and not save_stages.is_dir():
        raise BuildError(f"{save_stages} is not a folder", hint="choose another --save-stages")
    with progress("starting") as report:
        from dovetail.compile import Options, compile_model
        from dovetail.emit.project import write_project
        from dovetail.kernels import Optimize
        from dovetail.operators.arithmetic import Rounding
        from dovetail.target.cores import with_cores
        from dovetail.targets import load_target

        budget = _bytes(memory_budget)
        options = Options(
            policy, Rounding(rounding), save_stages, check, tuning, allow_float, Optimize(optimize), budget, pipeline,
            pins or {},
        )
        compiled = compile_model(model, with_cores(load_target(target_name), cores), options, report)
        dumped = 0
        if dump_folder is not None:
            from dovetail.compile import sample_inputs
            from dovetail.emit.dump import dump

            report("dumping launches")
            dumped = dump(compiled.unit, sample_inputs(compiled.graph), dump_folder)
        write_project(compiled.project, folder, replace=force)
    if dump_folder is not None:
        note(f"{dump_folder}: {dumped} launches of one inference with seeded inputs")
    if print_program:
        from dovetail.program.printer import print_program as text_of

        say(text_of(compiled.plan.program).rstrip())
    for sentence in compiled.unit.notes:
        note(sentence)
    say(f"{folder}: {_summary(compiled)}")


def _summary(compiled: Compiled) -> str:
    """One sentence: what went where and what memory it needs."""
    regions = [region for region in compiled.regions if not region.is_view and not region.still]
    offloaded = [region for region in regions if region.engine is not None]
    macs = sum(region.macs for region in regions)
    share = 100 * sum(region.macs for region in offloaded) / macs if macs else 0.0
    memory = "; ".join(
        f"{use.memory} {use.peak:,} bytes at the peak, lower bound {use.lower_bound:,}"
        for use in compiled.plan.placements
        if use.peak
    )
    stripes = f"; {_stripes(compiled.striped, macs)}" if compiled.striped else ""
    placing = compiled.placing
    stripes += f"; {placing.describe()}" if placing.describe() else ""
    count = len(compiled.unit.target.cores)
    shared = f"; {compiled.pipeline.describe()}" if compiled.pipeline else f"; on {count} cores" if count > 1 else ""
    where = f"{len(offloaded)} of {len(regions)} layers and {share:.1f} % of {macs:,} MACs on an engine"
    return f"{where}; {memory}{stripes}{shared}"


def _stripes(striped: Striped, macs: int) -> str:
    """What is computed in stripes, and what it costs; `macs` is all there is to compute, with stripes."""
    before = macs - striped.extra_macs
    return f"for the memory budget {striped.describe()} ({100 * striped.extra_macs / max(before, 1):.2f} %)"


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def parse_bytes(text: str) -> int:
    """A number of bytes: digits, and K for 1024 of them or M for 1024 K.

    Raises:
        ModelError: it is not one.
    """
    match = re.fullmatch(r"(\d+)\s*([KkMm]?)(?:i?[Bb])?", text.strip())
    if match is None or int(match[1]) == 0:
        raise ModelError(f"'{text}' is not a number of bytes", hint="such as 32768 or 32K")
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2].upper()]


def run_folder(
    folder: Path,
    simulator: str | None,
    board: Board | None,
    source: Path | None,
    result_file: Path | None,
    json_file: Path | None,
    target_name: str | None = None,
    waves: Path | None = None,
    wave_cycles: int = 1,
) -> None:
    """Run a build, print the report and write what is asked for; raises DovetailError."""
    with progress("starting") as show:
        from dovetail.cli.arrays import read_inputs, seeded_inputs, write_file, write_outputs
        from dovetail.report import make_report, print_report
        from dovetail.run import Waves, default_simulator, open_build, run_build
        from dovetail.targets import load_target

        build = open_build(folder, load_target(target_name) if target_name else None)
        missing = [key for key in _NEEDED if key not in build.manifest]
        if missing:
            raise BuildError(f"{folder} does not say its {missing[0]}", hint="compile the model again")
        ports = build.manifest["inputs"]
        batched = False
        if source is None:
            inputs = [seeded_inputs(ports)]
        else:
            inputs, batched = read_inputs(source, ports)
        where = board.where if board else f"the {simulator or default_simulator(build.target)}"
        show(f"compiling and running {len(inputs)} inference{'s' if len(inputs) > 1 else ''} on {where}")
        result = run_build(
            build, simulator, inputs, waves=Waves(waves, wave_cycles) if waves else None, board=board
        )  # fmt: skip
        report = make_report(result)
    if source is None:
        note("no --input: the inputs are random numbers with seed 0")
    if result_file is not None:
        write_outputs(result_file, result.outputs, batched)
    if json_file is not None:
        write_file(json_file, (json.dumps(report.to_json(), indent=2) + "\n").encode())
    print_report(report, output())


def all_pins(texts: Sequence[str], path: Path | None) -> dict[str, str]:
    """The pins of a file, and over them those of the command line; raises DovetailError."""
    from dovetail.place.pins import parse_pins, read_pins

    return {**(read_pins(path) if path else {}), **parse_pins(texts)}


def explain(
    model: Path,
    target_name: str,
    policy: str | None,
    as_json: bool,
    memory_budget: str | None = None,
    cores: int | None = None,
    pipeline: bool = False,
    pins: Mapping[str, str] | None = None,
) -> None:
    """Print where every operator goes; raises DovetailError."""
    with progress("starting") as report:
        from dovetail.compile import Options, compile_graph, prepare
        from dovetail.partition import rivals
        from dovetail.place import first, place
        from dovetail.target.cores import with_cores
        from dovetail.targets import load_target

        target = with_cores(load_target(target_name), cores)
        options = Options(policy, memory_budget=_bytes(memory_budget), pipeline=pipeline, pins=pins or {})
        graph = prepare(model, target, options, report)
        striped = program = staged = None
        if options.memory_budget is None and not target.workers and not pipeline:
            report("placing")
            placing = place(graph, first(graph, target), target, options.pins)
            regions = placing.regions
        else:
            compiled = compile_graph(graph, target, options, report, interpret=False)
            regions, striped, staged = compiled.regions, compiled.striped, compiled.pipeline
            placing = compiled.placing
            program = compiled.plan.program if target.workers else None
        rows = _placements(regions, target, {region.name: rivals(graph, target, region) for region in regions})
        _add_candidates(rows, placing)
        rows = [row | {"cores": own} for row, own in zip(rows, _core_shares(program), strict=True)] if program else rows
    if as_json:
        chosen = target.policies[0].name if policy is None else policy
        described = {"schema": 1, "model": graph.name, "target": target.name, "policy": chosen, "layers": rows}
        if placing.schedule is not None:
            described["placement"] = {"cycles": placing.schedule.finish, "bound": placing.bound}
        if options.memory_budget is not None:
            described |= {"memory_budget": options.memory_budget, "stripes": striped.to_json() if striped else []}
        if staged is not None:
            described["pipeline"] = staged.to_json()
        say(json.dumps(described, indent=2))
        return
    _print_placements(rows)
    if placing.schedule is not None:
        say(placing.describe())
    if staged is not None:
        say(staged.describe())
    if striped is not None:
        say(_stripes(striped, sum(region.macs for region in regions)))


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


def list_targets() -> None:
    """Print the targets Dovetail comes with."""
    from dovetail.targets import BUILT_IN, load_target

    width = max(map(len, BUILT_IN))
    for name in BUILT_IN:
        target = load_target(name)
        say(f"{name:{width}} {target.sentence}")
        for index, policy in enumerate(target.policies):
            say(f"{'':{width}} --requant {policy.name}{' (default)' if index == 0 else ''}: {policy.sentence}")


def write_zoo(
    name: str | None, path: Path | None, real: bool = False, calibration: Path | None = None, test: Path | None = None
) -> None:
    """Write a model of the zoo and data for it, or list its names; raises DovetailError."""
    from dovetail import zoo
    from dovetail.cli.arrays import write_file, write_outputs

    if name is None:
        for known in zoo.names():
            say(known)
        return
    path = path or Path(f"{name}.onnx")
    with progress(f"making {name}"):
        content = zoo.build_float(name) if real else zoo.build(name)
        samples = zoo.calibration(name) if calibration else None
        held_back = zoo.held_back(name) if test else None
    write_file(path, content)
    say(f"{path}: {len(content):,} bytes")
    if calibration is not None and samples is not None:
        write_outputs(calibration, [{"input": samples}], batched=False)
        say(f"{calibration}: {len(samples)} samples")
    if test is not None and held_back is not None:
        write_outputs(test, [{"input": held_back[0], "labels": held_back[1]}], batched=False)
        say(f"{test}: {len(held_back[1])} labelled samples")
