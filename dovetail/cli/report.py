"""`dovetail run`, `dovetail report`, `dovetail compare` and `dovetail sweep`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dovetail.cli import options as opt
from dovetail.cli.console import INTERRUPTED, beside_json, note, output, progress, say, show_table
from dovetail.cli.options import argument, option
from dovetail.cli.rack import is_mesh, run_mesh
from dovetail.errors import BuildError, DovetailError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.guests.sweep.run import SweepOutcome
    from dovetail.target import Target


def run(
    build: Annotated[Path, argument(help="A folder made by dovetail compile, or by dovetail mesh.")],
    sim: opt.Sim = None,
    input_file: opt.Inputs = None,
    output_file: Annotated[
        Path | None, option("--output", help="Write the outputs here, an .npz keyed by tensor names.")
    ] = None,
    json_file: Annotated[Path | None, option("--json", help="Write the report here as JSON; - for stdout.")] = None,
    target: opt.TargetFile = None,
    operators: opt.Operators = None,
    core: Annotated[
        str,
        option(help="With --sim rtl: run on this core's RTL (cv32e40p, cv32e40p-pulp, ibex, picorv32, vexriscv)."),
    ] = "",
    waves: Annotated[Path | None, option(help="With --sim rtl: write the engine's signals here, as VCD.")] = None,
    wave_cycles: Annotated[int, typer.Option(min=1, help="Cycles of them, from the start.")] = 10_000,
    on: opt.On = None,
    io: opt.BoardIo = None,
    load: opt.BoardLoad = None,
    timeout: opt.BoardTimeout = 60.0,
    secret: opt.BoardSecret = None,
    check: Annotated[bool, typer.Option(help="Compare the outputs with the integer graph in the build.")] = True,
    check_layers: Annotated[
        bool,
        typer.Option("--check-layers", help="On a simulator: compare every layer, and name the first that differs."),
    ] = False,
) -> None:
    """Run a build on a simulated chip or on a board, and compare its outputs with the integer graph.

    Reports what it cost, layer by layer; ends with status 1 where an output differs.

    Example: dovetail run build/net --input x.npz --output y.npz

    Example: dovetail run build/net --check-layers

    Example: dovetail run build/net --on serial:/dev/ttyUSB0:921600

    Example: dovetail run build/net --on gdb:localhost:3333 --board-io uart.c

    Example: dovetail run build/net --on agent:lab/bench1 --secret lab.secret

    Example: dovetail run build/mesh --on agent:lab/rack --secret lab.secret
    """
    board = opt.board_of(on, io, load, timeout, secret)
    if check_layers and (board or not check):
        what = "layers are compared on a simulator, and only where outputs are"
        raise DovetailError(what, where="--check-layers", hint="leave out --on and --no-check")
    if is_mesh(build):
        others: dict[str, object] = {"--sim": sim, "--core": core, "--waves": waves, "--board-io": io, "--load": load}
        others["--check-layers"] = check_layers
        own = opt.operators_of(operators)
        run_mesh(build, board, input_file, output_file, json_file, target, check, own, others)
        return
    with progress("starting") as show:
        from dovetail import prove
        from dovetail.arrays import read_inputs, seeded_inputs, write_outputs
        from dovetail.report import make_report, print_report
        from dovetail.run import Waves, default_simulator, open_build, run_build
        from dovetail.target.registry import load_target

        opened = open_build(build, load_target(target) if target else None)
        graph = prove.read_graph(opened, opt.operators_of(operators)) if check else None
        ports = opened.manifest.inputs
        inputs, batched = read_inputs(input_file, ports) if input_file else ([seeded_inputs(ports)], False)
        where = board.where if board else f"the {sim or default_simulator(opened.target)}"
        show(f"compiling and running {len(inputs)} inference{'s' if len(inputs) > 1 else ''} on {where}")
        signals = Waves(waves, wave_cycles) if waves else None
        result = run_build(opened, sim, inputs, waves=signals, board=board, core=core)
        report = make_report(result)
        if graph is not None and check_layers:
            show("comparing every layer")
            compared = prove.every_layer(opened, graph, sim, inputs, core)
    if input_file is None:
        note("no --input: the inputs are random numbers with seed 0")
    if output_file is not None:
        write_outputs(output_file, result.outputs, batched)
    with beside_json(json_file, report.to_json()):
        print_report(report, output())
        if graph is not None:
            if check_layers:
                say(compared)
            say(prove.prove(result, graph, inputs))


def report(
    build: opt.BuildFolder,
    page: opt.Page = Path("report.html"),
    json_file: opt.Json = None,
    trace: Annotated[Path | None, option(help="Write the timeline here, for Perfetto.")] = None,
    bound: Annotated[
        bool,
        typer.Option("--bound", help="Print each layer beside whoever is busy longest for it, and why it is slower."),
    ] = False,
    sim: opt.Sim = None,
    input_file: opt.Inputs = None,
    target: opt.TargetFile = None,
    operators: opt.Operators = None,
) -> None:
    """Show where a build's time, memory and bytes go, as one HTML page.

    Runs the build; the page needs nothing else.

    Example: dovetail report build/net -o net.html --json net.json
    """
    from dovetail.arrays import write_file

    with progress("starting") as show:
        data = _detailed(build, sim, input_file, target, show, operators)
        if trace is not None and not data["timeline"]:
            raise DovetailError(
                "a trace has times, and on the host there are none", where="--trace", hint="leave --trace out"
            )
        show("drawing")
        from dovetail.guests.report import page as drawing
        from dovetail.guests.report.detail import trace_text

        text = drawing.page(data)
    write_file(page, text.encode())
    if trace is not None:
        write_file(trace, trace_text(data).encode())
    if input_file is None:
        note("no --input: the inputs are random numbers with seed 0")
    with beside_json(json_file, data):
        if bound:
            _print_bound(data)
        say(f"{page}: {_report_sentence(data)}")


def _print_bound(data: dict[str, Any]) -> None:
    from dovetail.guests.report import near

    if data["cycles"]["total"] is None:
        raise DovetailError(
            "a bound is in cycles, and on the host there are none", where="--bound", hint="use --sim iss"
        )
    headings = ("layer", "where", "cycles", "engine", "DMA", "over", "why")
    show_table(headings, list(near.rows(data)), left=("layer", "where", "why"), fold=("why",))
    for sentence in near.beside(data):
        say(sentence)
    say(near.whole(data))


def _detailed(
    folder: Path,
    simulator: str | None,
    source: Path | None,
    target_name: str | None,
    show: Callable[[str], None],
    operators: Path | None = None,
) -> dict[str, Any]:
    """Everything known of a build and one run of it; raises DovetailError."""
    from dovetail import prove
    from dovetail.arrays import read_inputs, seeded_inputs
    from dovetail.guests.report.detail import detail, read_plan
    from dovetail.run import default_simulator, open_build, run_build
    from dovetail.target.registry import load_target

    build = open_build(folder, load_target(target_name) if target_name else None)
    read_plan(build)
    graph = prove.read_graph(build, opt.operators_of(operators))
    ports = build.manifest.inputs
    inputs = [seeded_inputs(ports)] if source is None else read_inputs(source, ports)[0]
    simulator = simulator or default_simulator(build.target)
    show(f"compiling and running {folder} on the {simulator}")
    result = run_build(build, simulator, inputs)
    prove.prove(result, graph, inputs)
    return detail(result)


def _report_sentence(data: dict[str, Any]) -> str:
    summary, cycles = data["summary"], data["cycles"]["total"]
    where = f"{summary['offloaded_layers']} of {summary['layers']} layers on an engine"
    if cycles is None:
        return where
    longest = max(data["layers"], key=lambda layer: layer["time"])
    return f"{cycles:,} cycles, {where}; the longest layer is {longest['name']} with {longest['time']:,}"


def compare(
    first: Annotated[Path, argument(metavar="A", help="A build, or the JSON of a report.")],
    second: Annotated[Path, argument(metavar="B", help="Another.")],
    page: Annotated[Path | None, option("--output", "-o", help="Write it here as HTML.")] = None,
    json_file: opt.Json = None,
    sim: opt.Sim = None,
    input_file: opt.Inputs = None,
    target: Annotated[
        list[str] | None, option("--target", "-t", help="The target files they were made for, if they were.")
    ] = None,
) -> None:
    """Show two builds side by side.

    What changed, the totals, and layer by layer.

    Example: dovetail compare build/engine build/exact -o compare.html
    """
    from dovetail.arrays import write_file
    from dovetail.guests.report import compare as comparison

    def read(path: Path) -> dict[str, Any]:
        if path.is_file():
            return comparison.read_report(path)
        return _detailed(path, sim, input_file, _target_of(path, target or ()), show)

    with progress("starting") as show:
        a, b = read(first), read(second)
        one, other = first.resolve(), second.resolve()
        short = one.name != other.name or one == other
        names = (one.name, other.name) if short else (str(first), str(second))
        data = comparison.compare(a, b, names)
        if page is not None:
            write_file(page, comparison.versus(data).encode())
    with beside_json(json_file, data):
        _print_comparison(data)


def _target_of(folder: Path, targets: Sequence[str]) -> str | None:
    """Of the target files given, the one a build was made for; None for a built-in target."""
    from dovetail.codegen.manifest import read_manifest
    from dovetail.target.registry import load_target

    try:
        name = read_manifest(folder).target if targets else ""
    except BuildError:
        return None  # opening the build says what is wrong with it
    return next((given for given in targets if load_target(given).name == name), None)


def _print_comparison(data: dict[str, Any]) -> None:
    from rich.text import Text

    for change in data["changed"]:
        say(f"{change['what']}: {change['a']} -> {change['b']}")
    rows: list[Sequence[str | Text] | None] = []
    for row in data["layers"]:
        sides = [f"{' '.join(row[side]['layers'])} ({row[side]['where']})".replace(" ()", "-") for side in "ab"]
        rows.append((*sides, *_figures(row["a"]["time"], row["b"]["time"], row["ratio"])))
    rows.append(None)
    for row in data["totals"]:
        rows.append((Text(row["name"], style="bold"), "", *_figures(row["a"], row["b"], row["ratio"])))
    a, b = data["a"]["name"], data["b"]["name"]
    layers = (f"layers of {a}", f"layers of {b}")
    show_table((*layers, a, b, "ratio"), rows, left=layers, fold=layers, whole=(a, b, "ratio"))


def _figures(a: int | None, b: int | None, ratio: float | None) -> tuple[str, str, str]:
    shown = ["" if value is None else f"{value:,}" for value in (a, b)]
    return shown[0], shown[1], "" if ratio is None else f"{ratio:.3f}"


def sweep(
    model: opt.Model,
    target: opt.TargetName,
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            metavar="NAME=VALUE,VALUE",
            help="A field of the target and its values; may be repeated. Without one, what may be set is listed.",
        ),
    ] = None,
    requant: opt.Requant = None,
    allow_float: opt.AllowFloat = False,
    optimize: Annotated[Literal["speed", "size"], typer.Option(help="As for dovetail compile.")] = "speed",
    jobs: Annotated[int | None, option(help="Processes; as many as there are processors if not given.")] = None,
    scheduler: opt.Scheduler = None,
    page: opt.Page = Path("sweep.html"),
    json_file: opt.Json = None,
) -> None:
    """Compile and run a model for many sizes of the hardware.

    What if the hardware were different? Points that were made before are not made again, so that a sweep that was
    stopped goes on.

    Example: dovetail sweep net.tflite --target ne16 --set l1.size=64K,128K --set dma.bytes_per_cycle=4,8
    """
    from dovetail import fields
    from dovetail.arrays import write_file
    from dovetail.files import default_cache
    from dovetail.guests.sweep import page as drawing
    from dovetail.guests.sweep import run as sweeping
    from dovetail.guests.sweep.run import SweepTask
    from dovetail.target.registry import load_target

    known = load_target(target)
    if not settings:
        for field in fields.fields_of(known).values():
            say(f"{field.name:28} {field.present!s:>12}  {field.about}".rstrip())
        return
    axes = fields.axes_of(known, settings)
    _check_sweep(model, known, requant)
    task = SweepTask(str(model.resolve()), target, requant, allow_float, optimize)
    with progress("starting") as show:

        def told(done: int, count: int, point: Mapping[str, Any], outcome: SweepOutcome) -> None:
            note(f"{done} of {count}: {_settings_text(point)}: {outcome.error or f'{outcome.cycles:,} cycles'}")
            show(f"{done} of {count} points")

        try:
            folder = default_cache() / "sweep"
            if jobs is None:
                jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            outcomes, repeated = sweeping.sweep(task, axes, jobs, folder, told, scheduler)
        except KeyboardInterrupt:
            note("stopped; every point that has ended is kept. Run the same command to go on.")
            sys.exit(INTERRUPTED)
    data = sweeping.to_json(model.stem, known.name, requant or known.policies[0].name, axes, outcomes)
    write_file(page, drawing.sweep_page(data).encode())
    with beside_json(json_file, data):
        _print_sweep(data)
        if repeated:
            note(f"{repeated} of the points were made earlier")
        say(f"{page}: {_sweep_sentence(data)}")


def _check_sweep(model: Path, target: Target, policy: str | None) -> None:
    """Raise DovetailError for what would go wrong at every point."""
    if not model.is_file():
        raise DovetailError("there is no such model", where=str(model), hint="give a .tflite or .onnx file")
    known = [one.name for one in target.policies]
    if policy is not None and policy not in known:
        raise DovetailError(
            f"there is no requantisation policy '{policy}'", where=target.name, hint=f"use one of {', '.join(known)}"
        )


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in settings.items())


def _sweep_sentence(data: dict[str, Any]) -> str:
    points = data["points"]
    if data["best"] is None:
        return f"none of {len(points)} points can be compiled or run"
    best, failed = points[data["best"]], sum(bool(point["error"]) for point in points)
    fastest = f"{_settings_text(best['settings'])}: {best['cycles']:,} cycles"
    refused = f"; {failed} cannot be compiled or run" if failed else ""
    return f"{len(points)} points; the fastest has {fastest}{refused}"


def _print_sweep(data: dict[str, Any]) -> None:
    names = [field["name"] for field in data["fields"]]
    figures = (*names, "cycles", "by the best", "MAC/cycle", *(f"{name} peak" for name in data["memories"]))
    rows = []
    for point in data["points"]:
        by_best = "" if point["by_best"] is None else f"{point['by_best']:.3f}"
        rate = "" if point["macs_per_cycle"] is None else f"{point['macs_per_cycle']:.2f}"
        peaks = [point["peaks"].get(name) for name in data["memories"]]
        set_to = [_number(point["settings"][name]) for name in names]
        rows.append([*set_to, _number(point["cycles"]), by_best, rate, *map(_number, peaks), point["error"]])
    styles = ["bold" if number == data["best"] else "" for number in range(len(rows))]
    why = ("why not",)
    show_table((*figures, *why), rows, left=why, fold=why, whole=figures, styles=styles)


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, bool) else f"{value:,}"
