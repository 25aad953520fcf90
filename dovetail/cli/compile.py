"""`dovetail compile`, `dovetail explain` and `dovetail tune`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dovetail.cli import options as opt
from dovetail.cli.console import INTERRUPTED, note, progress, say, short_name, show_table
from dovetail.cli.options import option
from dovetail.errors import BuildError, DovetailError, ModelError

if TYPE_CHECKING:
    from dovetail.compile import Compiled
    from dovetail.guests.tune.tuner import LayerResult, Progress, TuningResult
    from dovetail.schedule.stripe import StripedNetwork
    from dovetail.target import Target


def compile_model(
    model: opt.Model,
    target: opt.TargetName,
    build: Annotated[Path, option("--output", "-o", help="Folder for the C project.")],
    requant: opt.Requant = None,
    rounding: opt.Rounding = None,
    shape: opt.Shapes = None,
    set_: opt.Set = None,
    operators: opt.Operators = None,
    inputs: opt.IntegerInputs = "model",
    outputs: opt.IntegerOutputs = "model",
    save_stages: Annotated[Path | None, option(help="Folder for an ONNX model after every stage.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every stage with the one before in ONNX Runtime.")
    ] = False,
    allow_float: opt.AllowFloat = False,
    optimize: Annotated[
        Literal["speed", "size"],
        typer.Option(help="The core's code: few instructions executed, or one small function for layers of a kind."),
    ] = "speed",
    weights: Annotated[
        Literal["auto", "text", "binary"],
        typer.Option(help="Constants as C, or as bytes in a file the assembler takes; auto: bytes of large networks."),
    ] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace the build that is already there.")] = False,
    print_program: Annotated[
        bool, typer.Option("--print-program", help="Print the program: copies, launches, calls, waits.")
    ] = False,
    tuning: Annotated[Path | None, option(help="A tuning file made by dovetail tune for this model.")] = None,
    memory_budget: opt.MemoryBudget = None,
    dump: Annotated[
        Path | None,
        option(
            help="Folder for each launch as raw files: memory, commands, the result it must give, and an index.json; "
            "for another executor of the engine, or a board."
        ),
    ] = None,
    cores: opt.Cores = None,
    pipeline: opt.InPipeline = False,
    keep_dead: opt.KeepDead = False,
    name: opt.Name = None,
    arena: opt.Arena = None,
    pin: opt.Pin = None,
    pins: opt.Pins = None,
) -> None:
    """Compile a model to a C project, verified on the way.

    Example: dovetail compile net.tflite --target ne16 -o build/net --pin conv_4=core

    Example: dovetail compile net.tflite --target riscv --cores 4 -o build/net

    Example: dovetail compile net.onnx --target riscv --set ram.size=16M --shape image=1,3,64,64 -o build/net

    Example: dovetail compile net.tflite --target riscv_big_small --pipeline -o build/net

    Example: dovetail compile net.tflite --target vta -o build/net --dump build/launches

    Example: dovetail compile net.tflite --target cortex_m4 -o build/net --name keywords --arena shared_arena
    """
    _check_folders(build, force, save_stages)
    with progress("starting") as report:
        from dovetail.codegen.emit.project import write_project
        from dovetail.codegen.emit.weights import Weights
        from dovetail.compile import Options
        from dovetail.compile import compile_model as compiled_of
        from dovetail.ir.operators.arithmetic import Rounding as RoundingMode
        from dovetail.kernels import Optimize
        from dovetail.run import with_stack

        chosen, settings = target_with(target, cores, set_)
        options = Options(
            policy=requant,
            rounding=RoundingMode(rounding) if rounding else None,
            shapes=shapes_of(shape),
            operators=opt.operators_of(operators),
            integer_inputs=inputs == "int8",
            integer_outputs=outputs == "int8",
            settings=settings,
            tell=note,
            save_stages=save_stages,
            check=check,
            tuning=tuning,
            allow_float=allow_float,
            optimize=Optimize(optimize),
            weights=Weights(weights),
            memory_budget=parse_bytes(memory_budget),
            pipeline=pipeline,
            keep_dead=keep_dead,
            name=name,
            arena=arena,
            pins=pins_of(pin, pins),
        )
        compiled = compiled_of(model, chosen, options, report)
        report("looking at the stack it needs")
        compiled = with_stack(compiled)
        dumped = _dumped(compiled, dump, report) if dump is not None else 0
        write_project(compiled.project, build, replace=force)
    if dump is not None:
        note(f"{dump}: {dumped} launches of one inference with seeded inputs")
    if print_program:
        from dovetail.program.loops import print_program as text_of

        say(text_of(compiled.plan.program).rstrip())
    for sentence in compiled.unit.notes:
        note(sentence)
    say(f"{build}: {_summary(compiled)}")


def _check_folders(build: Path, force: bool, save_stages: Path | None) -> None:
    """Raise BuildError where a build is not to be replaced, or stages would go into a file."""
    if build.exists() and not force:
        raise BuildError(
            "the output folder exists", where=str(build), hint="choose another folder, or give --force to replace it"
        )
    if save_stages is not None and save_stages.exists() and not save_stages.is_dir():
        raise BuildError("this is not a folder", where=str(save_stages), hint="choose another --save-stages")


def _dumped(compiled: Compiled, folder: Path, report: Callable[[str], None]) -> int:
    """Write the launches of one inference with seeded inputs to a folder; how many there are."""
    from dovetail.codegen.emit.dump import dump
    from dovetail.compile import sample_inputs

    report("dumping launches")
    return dump(compiled.unit, sample_inputs(compiled.graph), folder)


def _summary(compiled: Compiled) -> str:
    """One sentence: what went where and what memory it needs."""
    regions = [region for region in compiled.regions if not region.is_view and not region.still]
    offloaded = [region for region in regions if region.engine is not None]
    macs = sum(region.macs for region in regions)
    share = 100 * sum(region.macs for region in offloaded) / macs if macs else 0.0
    used = [use for use in compiled.plan.placements if use.peak]
    memory = "; ".join(f"{u.memory} {u.peak:,} bytes at the peak, lower bound {u.lower_bound:,}" for u in used)
    parts = [f"{len(offloaded)} of {len(regions)} layers and {share:.1f} % of {macs:,} MACs on an engine", memory]
    if compiled.unit.stack:
        need, reserved = compiled.unit.stack, compiled.unit.target.core.stack
        parts.append(f"stack {need.nbytes:,} bytes at most, {reserved:,} reserved")
    if compiled.dead_macs:
        parts.append(f"{compiled.dead_macs:,} dead MACs of the model left out (--keep-dead computes them)")
    if any(compiled.redundant):
        twice, idle = compiled.redundant
        parts.append(f"operators left out: {twice} computed twice, {idle} that change nothing (--keep-dead keeps them)")
    if compiled.striped:
        parts.append(stripes_sentence(compiled.striped, macs))
    if compiled.assignment.describe():
        parts.append(compiled.assignment.describe())
    count = len(compiled.unit.target.cores)
    if compiled.pipeline:
        parts.append(compiled.pipeline.describe())
    elif count > 1:
        parts.append(f"on {count} cores")
    return "; ".join(parts)


def stripes_sentence(striped: StripedNetwork, macs: int) -> str:
    """The layers in stripes and their cost, in words; `macs` are those of the whole network, with stripes."""
    before = macs - striped.extra_macs
    return f"for the memory budget {striped.describe()} ({100 * striped.extra_macs / max(before, 1):.2f} %)"


def parse_bytes(text: str | None) -> int | None:
    """A number of bytes: digits, and K for 1024 of them or M for 1024 K; None of None.
    Raises ModelError where it is not one."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)\s*([KkMm]?)(?:i?[Bb])?", text.strip())
    if match is None or int(match[1]) == 0:
        raise ModelError(f"'{text}' is not a number of bytes", where="--memory-budget", hint="such as 32768 or 32K")
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2].upper()]


def pins_of(pin: list[str] | None, file: Path | None) -> dict[str, str]:
    """The pins of the file, and over them those of the command line; raises DovetailError."""
    from dovetail.schedule.assign.pins import parse_pins, read_pins

    return {**(read_pins(file) if file else {}), **parse_pins(pin or ())}


def target_of(name: str, cores: int | None) -> Target:
    """The target of a name or file, with so many cores; raises DovetailError."""
    from dovetail.target.description import with_cores
    from dovetail.target.registry import load_target

    return with_cores(load_target(name), cores)


def target_with(name: str, cores: int | None, texts: list[str] | None) -> tuple[Target, dict[str, Any]]:
    """The target of a name or file with numbers changed, and these; raises DovetailError."""
    from dovetail.fields import changed, settings_of

    target = target_of(name, cores)
    settings = settings_of(target, texts or ())
    return changed(target, settings) if settings else target, settings


def shapes_of(texts: list[str] | None) -> dict[str, tuple[int, ...]]:
    """The shapes of `--shape`, by input; raises ModelError."""
    found = {}
    for text in texts or ():
        name, _, sizes = text.rpartition("=")
        parts = [size.strip() for size in sizes.split(",")]
        if not name or not all(size.isdecimal() and 0 < int(size) < 1 << 31 for size in parts):
            raise ModelError(f"'{text}' is not a shape", where="--shape", hint="such as --shape input=1,3,32,32")
        found[name] = tuple(map(int, parts))
    return found


def explain(
    model: opt.Model,
    target: opt.TargetName,
    requant: opt.Requant = None,
    shape: opt.Shapes = None,
    set_: opt.Set = None,
    operators: opt.Operators = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    memory_budget: opt.MemoryBudget = None,
    cores: opt.Cores = None,
    pipeline: opt.InPipeline = False,
    pin: opt.Pin = None,
    pins: opt.Pins = None,
    whole_names: Annotated[bool, typer.Option("--whole-names", help="Do not shorten the model's names.")] = False,
) -> None:
    """Show where every operator goes, and why.

    What each engine would cost, or what keeps it from taking it.

    Example: dovetail explain net.tflite --target ne16
    """
    with progress("starting") as report:
        from dovetail import explain as explaining
        from dovetail.compile import Options

        known, _ = target_with(target, cores, set_)
        options = Options(
            requant,
            shapes=shapes_of(shape),
            operators=opt.operators_of(operators),
            tell=note,
            memory_budget=parse_bytes(memory_budget),
            pipeline=pipeline,
            pins=pins_of(pin, pins),
        )
        found = explaining.explain(model, known, options, report)
        data = found.to_json()
    if as_json:
        say(json.dumps(data, indent=2))
        return
    _print_placements(data["layers"], whole_names)
    if found.assignment.schedule is not None:
        say(found.assignment.describe())
    if found.pipeline is not None:
        say(found.pipeline.describe())
    if found.striped is not None:
        say(stripes_sentence(found.striped, sum(region.macs for region in found.regions)))


def _print_placements(layers: Sequence[Mapping[str, Any]], whole_names: bool) -> None:
    rows = []
    for layer in layers:
        names = layer["operators"] if whole_names else map(short_name, layer["operators"])
        operators = "\n".join(names) or "(added by Dovetail)"
        where = f"{layer['engine']} ({layer['offload']})" if layer["offload"] else layer["engine"]
        where = "\n".join(f"core {core}: {100 * own:.1f} %" for core, own in layer.get("cores", {}).items()) or where
        said = [layer["reason_not_offloaded"], *_compared(layer)]
        said += [*layer["offloads_not_used"], *layer["instructions_not_used"]]
        rows.append((layer["name"], operators, where, "\n".join(sentence for sentence in said if sentence)))
    why = "why" if any("why" in layer for layer in layers) else "why not an engine"
    headings = ("layer", "operators", "where", why)
    show_table(headings, rows, left=headings, fold=headings)


def _compared(layer: Mapping[str, Any]) -> list[str]:
    """The candidates of a layer in words."""
    if "why" not in layer:
        return []
    costs = ", ".join(f"{one['place']} {one['cycles']:,}" for one in layer["candidates"])
    costs = "" if all(f"{one['cycles']:,}" in layer["why"] for one in layer["candidates"]) else f"cycles: {costs}"
    refused = [f"{engine}: {sentence}" for engine, sentence in layer["refused"].items()]
    return [layer["why"] if layer["why"] != layer["reason_not_offloaded"] else "", costs, *refused]


def tune(
    model: opt.Model,
    target: opt.TargetName,
    trials: Annotated[int, typer.Option(help="Trials of each kind of layer, the default included.")] = 64,
    output: Annotated[
        Path | None, option("--output", "-o", help="The tuning file; MODEL.TARGET.toml if not given.")
    ] = None,
    log: Annotated[
        Path | None,
        option(help="Where every trial is kept; one that exists is gone on with. MODEL.TARGET.jsonl if not given."),
    ] = None,
    layers: Annotated[str | None, option(help="Only these layers, by name, with commas.")] = None,
    measure: Annotated[
        Literal["iss", "host", "model"] | None,
        option(
            help="Cycles of the simulated chip, time on this computer (where the core is this computer), or what the "
            "cost model thinks."
        ),
    ] = None,
    jobs: opt.LocalJobs = 1,
    scheduler: opt.Scheduler = None,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    requant: opt.Requant = None,
    rounding: opt.Rounding = None,
    on: opt.On = None,
    io: opt.BoardIo = None,
    load: opt.BoardLoad = None,
    timeout: opt.BoardTimeout = 60.0,
    secret: opt.BoardSecret = None,
) -> None:
    """Search for tiles, orders and places that take fewer cycles.

    Writes a file for dovetail compile --tuning.

    Example: dovetail tune net.tflite --target ne16 --trials 64 --jobs 2

    Example: dovetail tune net.tflite --target ne16 --on tcp:lab:4000 --board-io uart.c --load 'flash.sh {elf}'

    Example: dovetail tune net.tflite --target ne16 --on agent:lab/bench1,agent:lab/bench2 --board-io uart.c
    """
    boards = [opt.board_of(name, io, load, timeout, secret) for name in (on.split(",") if on is not None else [None])]
    stem = f"{model.stem}.{Path(target).stem}"
    file, log = output or Path(f"{stem}.toml"), log or Path(f"{stem}.jsonl")
    with progress("starting") as show:
        from dovetail.arrays import write_file
        from dovetail.compile import Options
        from dovetail.guests.tune import tuner
        from dovetail.guests.tune.log import may_be_written
        from dovetail.ir.operators.arithmetic import Rounding as RoundingMode
        from dovetail.schedule.tuning import tuning_text

        may_be_written(file)
        try:
            request = tuner.TuningRequest(
                model=model,
                target=target,
                log=log,
                trials=trials,
                options=Options(requant, RoundingMode(rounding) if rounding else None),
                measure=_measure(target, measure, on is not None),
                layers=tuple(name.strip() for name in (layers or "").split(",") if name.strip()),
                seed=seed,
                jobs=jobs,
                scheduler=scheduler,
                boards=tuple(board for board in boards if board is not None),
            )
            tuned = tuner.tune(request, _shown(show), note)
        except KeyboardInterrupt:
            kept = "every trial that has ended is" if log.exists() else "nothing was begun: no trial is"
            note(f"stopped; {kept} in {log}. Run the same command to go on.")
            sys.exit(INTERRUPTED)
        write_file(file, tuning_text(tuned.tuning).encode())
    unit = "ns" if tuned.tuning.measure == "host" else "cycles"
    headings = ("layers", "trials", "failed", "floor", f"default {unit}", f"best {unit}", "saved", "choice")
    rows = [_row(result, tuned.dropped) for result in tuned.layers]
    show_table(headings, rows, left=("layers", "choice"), fold=headings)
    if tuned.repeated:
        note(f"{tuned.repeated} of the trials were made earlier: they are from {log}")
    say(f"{file}: {_sentence(tuned)}")


def _measure(target: str, measure: str | None, on_board: bool) -> str:
    """The measure of a trial; raises DovetailError where two are asked for."""
    from dovetail.run import BOARD, default_simulator
    from dovetail.target.registry import load_target

    if not on_board:
        return measure or default_simulator(load_target(target))
    if measure is not None:
        what = f"a choice is measured on a board or by '{measure}', not by both"
        raise DovetailError(what, where="--measure, --on", hint="leave out --measure or --on")
    return BOARD


def _shown(show: Callable[[str], None]) -> Callable[[Progress], None]:
    def told(now: Progress) -> None:
        trials = f"{now.done} of {now.trials}" if now.trials else f"{now.done}"
        known = {"best": now.best, "default": now.default}
        cycles = ", ".join(f"{what} {count:,}" for what, count in known.items() if count is not None)
        show(f"{now.layer} ({now.number} of {now.count} layers): {trials} trials; {cycles or 'no cycles yet'}")

    return told


def _row(result: LayerResult, dropped: tuple[str, ...]) -> tuple[str, ...]:
    best = result.best.outcome.cycles if result.best else None
    names = ", ".join(name + ("*" if name in dropped else "") for name in result.layer.names)
    failed = sum(trial.outcome.cycles is None for trial in result.trials)
    choice = result.best.choice if result.best else {}
    figures = ["failed" if cycles is None else f"{cycles:,}" for cycles in (result.default, best)]
    saved = "" if best is None or result.default is None else _percent(result.default, best)
    chosen = ", ".join(f"{name} {value}" for name, value in choice.items()) or "the default"
    floor = f"{result.floor.cycles:,}" if result.floor else ""
    return names, str(len(result.trials)), str(failed), floor, *figures, saved, chosen


def _percent(before: int, after: int) -> str:
    return f"{100 * (before - after) / before:.1f} %" if before else "0.0 %"


def _sentence(tuned: TuningResult) -> str:
    tuning = tuned.tuning
    star = "; * does not help in the network and is left out" if tuned.dropped else ""
    floor = f"; its floor is {tuned.floor:,}" if tuned.floor else ""
    kind = {"host": "nanoseconds", "model": "cycles as the cost model thinks"}.get(tuning.measure, "cycles")
    return (
        f"{len(tuning.layers)} layers chosen for; the network takes {tuning.tuned_cycles:,} {kind} instead of "
        f"{tuning.default_cycles:,}, {_percent(tuning.default_cycles, tuning.tuned_cycles)} less{floor}{star}"
    )
