"""`dovetail compile` and `dovetail explain`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import kept
from dovetail.cli.console import note, progress, say, short_name, show_table, tell
from dovetail.cli.options import Model, OptionalTarget, TargetName, option
from dovetail.errors import BuildError
from dovetail.folders import check_free, check_replaced, write_files
from dovetail.options import Options

if TYPE_CHECKING:
    from dovetail.compile import Compiled
    from dovetail.schedule.stripe import StripedNetwork
    from dovetail.target.description import Target


def compile_command(
    model: Model,
    target: TargetName,
    build: Annotated[Path, option("--output", "-o", help="Folder for the C project.")],
    options: Options,
    force: Annotated[bool, typer.Option("--force", help="Replace the build that is already there.")] = False,
    anew: Annotated[bool, typer.Option("--anew", help="Compile again what is kept from the last time.")] = False,
    print_program: Annotated[
        bool, typer.Option("--print-program", help="Print the program: copies, launches, calls, waits.")
    ] = False,
    dump: Annotated[
        Path | None,
        option(
            help="Folder for each launch as raw files: memory, commands, the result it must give, and an index.json; "
            "for another executor of the engine, or a board."
        ),
    ] = None,
) -> None:
    """Compile a model to a C project, verified on the way.

    Example: dovetail compile net.tflite --target ne16 -o build/net --pin conv_4=core

    Example: dovetail compile net.tflite --target riscv --cores 4 -o build/net

    Example: dovetail compile net.onnx --target riscv --set ram.size=16M --shape image=1,3,64,64 -o build/net

    Example: dovetail compile net.tflite --target riscv_big_small --pipeline -o build/net

    Example: dovetail compile net.tflite --target vta -o build/net --dump build/launches

    Example: dovetail compile net.tflite --target cortex_m4 -o build/net --name keywords --arena shared_arena
    """
    _check_folders(build, force, options.save_stages)
    place = None if anew or print_program or dump is not None else kept.place_of(model, target, options)
    if place is not None and _written_again(place, build, force):
        return
    with progress("starting") as report, kept.inputs_of(*([model] if place else [])) as inputs:
        from dovetail.codegen.emit.project import write_project
        from dovetail.compile import compile_model
        from dovetail.target.registry import load_target

        compiled = compile_model(model, load_target(target), replace(options, tell=tell), report)
        dumped = _dumped(compiled, dump, report) if dump is not None else 0
        write_project(compiled.project, build, replace=force)
    if dump is not None:
        note(f"{dump}: {dumped} launches of one inference with seeded inputs")
    if print_program:
        from dovetail.program.loops import print_program as text_of

        say(text_of(compiled.plan.program).rstrip())
    summary = _summary(compiled)
    if place is not None:
        kept.keep(place, inputs, build, compiled.notes, summary)
    say(f"{build}: {summary}")


def _written_again(place: Path, build: Path, force: bool) -> bool:
    """Write the build that is kept, if there is one; whether there is."""
    known = kept.find(place)
    if known is None:
        return False
    check_replaced(build, force)
    write_files(known.files, build, force)
    for one in known.notes:
        tell(one)
    say(f"{build}: {known.summary}; kept from the last time, as nothing has changed")
    return True


def _check_folders(build: Path, force: bool, save_stages: Path | None) -> None:
    """Raise BuildError where a build is not to be replaced, or stages would go into a file."""
    check_free(build, force)
    if save_stages is not None and save_stages.exists() and not save_stages.is_dir():
        raise BuildError("this is not a folder", where=str(save_stages), hint="choose another --save-stages")


def _dumped(compiled: Compiled, folder: Path, report: Callable[[str], None]) -> int:
    """Write the launches of one inference with seeded inputs to a folder; how many there are."""
    from dovetail.codegen.emit.dump import dump
    from dovetail.compile import sample_inputs

    report("dumping launches")
    return dump(compiled.unit, sample_inputs(compiled.graph), folder)


def _summary(compiled: Compiled) -> str:
    """One sentence: what the network needs, and where its layers are computed if there is an engine."""
    target, need, parts = compiled.unit.target, compiled.unit.stack, list[str]()
    regions = [region for region in compiled.regions if not region.is_idle]
    macs = sum(region.macs for region in regions)
    used = [use for use in compiled.plan.placements if use.peak]
    if target.engines:
        offloaded = [region for region in regions if region.engine is not None]
        share = 100 * sum(region.macs for region in offloaded) / macs if macs else 0.0
        parts.append(f"{len(offloaded)} of {len(regions)} layers and {share:.1f} % of {macs:,} MACs on an engine")
        parts += [f"{u.memory} {u.peak:,} bytes at the peak, lower bound {u.lower_bound:,}" for u in used]
    else:
        parts.append(f"{len(regions)} layers, {macs:,} MACs")
        if need and need.flash:
            parts.append(f"{target.code} about {need.flash:,} of {target.memory(target.code).size:,} bytes")
        parts += [f"{u.memory} {u.peak:,} of {target.memory(u.memory).size:,} bytes" for u in used]
    parts += [f"{one.name} keeps {one.holds:,} bytes of {target.values} besides" for one in target.engines if one.holds]
    if need:
        said = f"no bound on the stack ({need.why})" if need.nbytes is None else f"stack {need.nbytes:,} bytes at most"
        parts.append(f"{said}, {target.core.stack:,} reserved")
    if compiled.assignment.clock and not target.engines:
        parts.append(_cycles(compiled.assignment.clock, target))
    if compiled.assignment.describe():
        parts.append(compiled.assignment.describe())
    if compiled.pipeline:
        parts.append(compiled.pipeline.describe())
    elif len(target.cores) > 1:
        parts.append(f"on {len(target.cores)} cores")
    if compiled.prefill:
        parts.append(_prefill_sentence(compiled.prefill, target))
    return "; ".join(parts)


def _prefill_sentence(prefill: Compiled, target: Target) -> str:
    """The needs of a network of several steps, in words."""
    own = sum(array.nbytes for _, array in prefill.unit.constants.values())
    peaks = ", ".join(f"{use.memory} {use.peak:,}" for use in prefill.plan.placements if use.peak)
    clock = f", {_cycles(prefill.assignment.clock, target)}" if prefill.assignment.clock else ""
    return f"{prefill.unit.steps_at_once} steps in one call: {peaks} bytes, {own:,} bytes of constants more{clock}"


def _cycles(cycles: int, target: Target) -> str:
    """Cycles of an inference, and their time at the clock of a part one can buy."""
    from dovetail.target.parts import PARTS

    part = PARTS.get(target.name)
    time = f", {cycles / part.clock / 1000:,.2f} ms at {part.clock} MHz" if part else ""
    return f"{cycles:,} cycles by estimate{time}"


def _stripes_sentence(striped: StripedNetwork, macs: int) -> str:
    """The layers in stripes and their cost, in words; `macs` are those of the whole network, with stripes."""
    before = macs - striped.extra_macs
    return f"to fit the memory {striped.describe()} ({100 * striped.extra_macs / max(before, 1):.2f} %)"


def explain(
    model: Model,
    options: Annotated[
        Options,
        *(
            "policy",
            "shapes",
            "settings",
            "operators",
            "memory_budget",
            "cores",
            "pipeline",
            "pins",
            "pins_file",
            "calibration",
        ),
    ],
    target: OptionalTarget = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    whole_names: Annotated[bool, typer.Option("--whole-names", help="Do not shorten the model's names.")] = False,
) -> None:
    """Show where every operator goes, and why.

    What each engine would cost, or what keeps it from taking it. Without a target: what is in the model, and all it is
    refused for.

    Example: dovetail explain net.tflite --target ne16
    """
    if target is None:
        _show_survey(model, options, as_json)
        return
    with progress("starting") as report:
        from dovetail import explain as explaining
        from dovetail.target.registry import load_target

        placed = explaining.explain(model, load_target(target), replace(options, tell=tell), report)
        data = placed.to_json()
    if as_json:
        say(json.dumps(data, indent=2))
        return
    _print_placements(data["layers"], whole_names)
    if data["policy_is"]:
        say(f"policy {data['policy']}: {data['policy_is']}")
    if placed.assignment.schedule is not None:
        say(placed.assignment.describe())
    if placed.pipeline is not None:
        say(placed.pipeline.describe())
    if placed.striped is not None:
        say(_stripes_sentence(placed.striped, sum(region.macs for region in placed.regions)))
    say(f"next: dovetail compile {model} --target {target} -o build/{model.stem}")


def _show_survey(model: Path, options: Options, as_json: bool) -> None:
    """Print what is in a model; ends with 1 where it is refused."""
    from dovetail.survey import survey

    found = survey(model, options)
    if as_json:
        say(json.dumps(found.to_json(), indent=2))
    else:
        headings = ("", "the model")
        kinds = ", ".join(f"{count} {name}" for name, count in found.kinds.items())
        rows = [("inputs", "\n".join(found.inputs))]
        rows += [("outputs", "\n".join(found.outputs))] if found.outputs else []
        rows += [("states", str(found.states))] if found.states else []
        if not found.faults:
            rows += [("operators", ", ".join(f"{count} {name}" for name, count in found.operators.items()))]
            rows += [("constants", f"{found.constants:,} bytes"), ("computed values", kinds)]
        rows += [("to know", str(one)) for one in found.notes]
        rows += [("refused", text) for text in found.reasons()]
        show_table(headings, [*rows, ("outlook", found.outlook)], left=headings, fold=headings[1:])
    if found.faults:
        raise typer.Exit(1)
    if not as_json:
        say(f"next: dovetail explain {model} --target TARGET; dovetail targets lists them")


def _print_placements(layers: Sequence[Mapping[str, Any]], whole_names: bool) -> None:
    rows = []
    for layer in layers:
        names = layer["operators"] if whole_names else map(short_name, layer["operators"])
        operators = "\n".join(names) or "(added by Dovetail)"
        where = f"{layer['engine']} ({layer['offload']})" if layer["offload"] else layer["engine"]
        where = "\n".join(f"core {core}: {100 * own:.1f} %" for core, own in layer.get("cores", {}).items()) or where
        reasons = [layer["reason_not_offloaded"], *_candidates(layer)]
        reasons += [*layer["offloads_not_used"], *layer["instructions_not_used"]]
        rows.append((layer["name"], operators, where, "\n".join(filter(None, reasons))))
    why = "why" if any("why" in layer for layer in layers) else "why not an engine"
    headings = ("layer", "operators", "where", why)
    show_table(headings, rows, left=headings, fold=headings)


def _candidates(layer: Mapping[str, Any]) -> list[str]:
    """The candidates of a layer in words."""
    if "why" not in layer:
        return []
    costs = ", ".join(f"{one['place']} {one['cycles']:,}" for one in layer["candidates"])
    costs = "" if all(f"{one['cycles']:,}" in layer["why"] for one in layer["candidates"]) else f"cycles: {costs}"
    refused = [f"{engine}: {sentence}" for engine, sentence in layer["refused"].items()]
    return [layer["why"] if layer["why"] != layer["reason_not_offloaded"] else "", costs, *refused]
