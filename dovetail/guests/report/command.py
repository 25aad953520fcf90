"""`dovetail report` and `dovetail compare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.console import beside_json, note_seeded, progress, say, show_table
from dovetail.cli.options import BuildFolder, Json, Page, argument, option
from dovetail.cli.run import RunOptions
from dovetail.errors import BuildError, DovetailError
from dovetail.options import Options

if TYPE_CHECKING:
    from rich.text import Text


def report(
    build: BuildFolder,
    options: Annotated[Options, "operators"],
    run: Annotated[RunOptions, "sim", "input_file", "target"],
    page: Page = Path("report.html"),
    json_file: Json = None,
    trace: Annotated[Path | None, option(help="Write the timeline here, for Perfetto.")] = None,
    bound: Annotated[
        bool,
        typer.Option(
            "--bound",
            help="Print each layer's time beside that of its busiest unit, and the reason for the difference.",
        ),
    ] = False,
) -> None:
    """Show where a build's time, memory and bytes go, as one HTML page.

    Runs the build; the page needs nothing else.

    Example: dovetail report build/net -o net.html --json net.json
    """
    from dovetail.arrays import write_file

    with progress("starting") as show:
        data = _detailed(build, run, options, show)
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
    note_seeded(run.input_file)
    with beside_json(json_file, data):
        for note in data["notes"]:
            say(f"{note['level']}: {note['text']}")
        if bound:
            _print_bound(data)
        say(f"{page}: {_report_sentence(data)}")
        say("next: dovetail tune searches for a better plan; dovetail export takes the build to a board")


def _print_bound(data: dict[str, Any]) -> None:
    from dovetail.guests.report import near

    if data["cycles"]["total"] is None:
        raise DovetailError(
            "a bound is in cycles, and on the host there are none", where="--bound", hint="use --sim iss"
        )
    headings = ("layer", "where", "cycles", "engine", "DMA", "its least", "bound", "by", "over", "why")
    show_table(headings, list(near.rows(data)), left=("layer", "where", "by", "why"), fold=("by", "why"))
    for sentence in near.beside(data):
        say(sentence)
    say(near.whole(data))


def _detailed(folder: Path, options: RunOptions, own: Options, show: Callable[[str], None]) -> dict[str, Any]:
    """The costs of a build in one run of it, in detail; raises DovetailError."""
    from dovetail import prove
    from dovetail.arrays import inputs_of
    from dovetail.codegen.plan_file import read_plan
    from dovetail.guests.report.detail import detail
    from dovetail.run import default_simulator, open_build, run_build
    from dovetail.target.registry import load_target

    build = open_build(folder, load_target(options.target) if options.target else None)
    read_plan(folder, len(build.manifest.layers))
    graph = prove.read_graph(build, own.operators)
    inputs, _ = inputs_of(options.input_file, build.manifest.inputs)
    simulator = options.sim or default_simulator(build.target)
    show(f"compiling and running {folder} on the {simulator}")
    result = run_build(build, simulator, inputs)
    prove.prove(result, graph, inputs)
    return detail(result, graph)


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
    run: Annotated[RunOptions, "sim", "input_file"],
    page: Annotated[Path | None, option("--output", "-o", help="Write it here as HTML.")] = None,
    json_file: Json = None,
    target: Annotated[
        list[str] | None,
        option("--target", "-t", help="The target files of the builds; not needed for built-in targets."),
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
        return _detailed(path, replace(run, target=_target_of(path, target or ())), Options(), show)

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
    """The target file a build was made for; None for a built-in target."""
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
