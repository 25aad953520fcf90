"""What `dovetail report` and `dovetail compare` do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.console import note, output, progress, say
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from collections.abc import Callable


def report_of(
    folder: Path,
    page_file: Path,
    json_file: Path | None,
    trace_file: Path | None,
    simulator: str | None,
    source: Path | None,
    target_name: str | None,
) -> None:
    """Run a build and write its report; raises DovetailError."""
    from dovetail.cli.arrays import write_file

    with progress("starting") as show:
        data = detailed(folder, simulator, source, target_name, show)
        if trace_file is not None and not data["timeline"]:
            raise DovetailError("a trace has times, and on the host there are none", where="--trace",
                                hint="leave --trace out")
        show("drawing")
        from dovetail.report.page import page
        from dovetail.report.trace import trace_text

        text = page(data)
    write_file(page_file, text.encode())
    if json_file is not None:
        write_file(json_file, (json.dumps(data, indent=2) + "\n").encode())
    if trace_file is not None:
        write_file(trace_file, trace_text(data).encode())
    if source is None:
        note("no --input: the inputs are random numbers with seed 0")
    say(f"{page_file}: {_sentence(data)}")


def detailed(
    folder: Path, simulator: str | None, source: Path | None, target_name: str | None, show: Callable[[str], None]
) -> dict[str, Any]:
    """Everything known of a build and one run of it; raises DovetailError."""
    from dovetail.cli.arrays import read_inputs, seeded_inputs
    from dovetail.report.detail import detail, read_plan
    from dovetail.run import default_simulator, open_build, run_build
    from dovetail.targets import load_target

    build = open_build(folder, load_target(target_name) if target_name else None)
    read_plan(build)
    ports = build.manifest["inputs"]
    inputs = [seeded_inputs(ports)] if source is None else read_inputs(source, ports)[0]
    simulator = simulator or default_simulator(build.target)
    show(f"compiling and running {folder} on the {simulator}")
    return detail(run_build(build, simulator, inputs))


def _sentence(data: dict[str, Any]) -> str:
    """What was found, in one line."""
    summary, cycles = data["summary"], data["cycles"]["total"]
    where = f"{summary['offloaded_layers']} of {summary['layers']} layers on an engine"
    if cycles is None:
        return where
    longest = max(data["layers"], key=lambda layer: layer["time"])
    return f"{cycles:,} cycles, {where}; the longest layer is {longest['name']} with {longest['time']:,}"


def compare_to(
    paths: tuple[Path, Path],
    page_file: Path | None,
    json_file: Path | None,
    simulator: str | None,
    source: Path | None,
    targets: tuple[str, ...],
) -> None:
    """Print two builds (or reports) side by side and write what is asked for; raises DovetailError."""
    from dovetail.cli.arrays import write_file
    from dovetail.report.compare import compare, read_report

    with progress("starting") as show:
        found = [
            read_report(path) if path.is_file() else detailed(path, simulator, source, _target_of(path, targets), show)
            for path in paths
        ]
        data = compare(found[0], found[1], _called(paths))
        if page_file is not None:
            from dovetail.report.page.versus import versus

            write_file(page_file, versus(data).encode())
    if json_file is not None:
        write_file(json_file, (json.dumps(data, indent=2) + "\n").encode())
    _print_comparison(data)


def _called(paths: tuple[Path, Path]) -> tuple[str, str]:
    """Short names for two paths, different if the paths are."""
    a, b = (path.resolve() for path in paths)
    return (a.name, b.name) if a.name != b.name or a == b else (str(paths[0]), str(paths[1]))


def _target_of(folder: Path, targets: tuple[str, ...]) -> str | None:
    """Of the target files given, the one a build was made for; None for a built-in target."""
    from dovetail.emit.project import MANIFEST
    from dovetail.targets import load_target

    if not targets or not (folder / MANIFEST).is_file():
        return None
    try:
        name = json.loads((folder / MANIFEST).read_text())["target"]
    except (ValueError, KeyError, TypeError):
        return None  # opening the build says what is wrong with it
    return next((given for given in targets if load_target(given).name == name), None)


def _print_comparison(data: dict[str, Any]) -> None:
    """What changed, the totals and the layers."""
    from rich.table import Table
    from rich.text import Text

    a, b = data["a"]["name"], data["b"]["name"]
    for change in data["changed"]:
        say(f"{change['what']}: {change['a']} -> {change['b']}")
    table = Table(show_edge=False, pad_edge=False)
    for heading in (f"layers of {a}", f"layers of {b}"):
        table.add_column(heading, overflow="fold")
    for heading in (a, b, "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in data["layers"]:
        sides = [f"{' '.join(row[side]['layers'])} ({row[side]['where']})".replace(" ()", "-") for side in "ab"]
        table.add_row(*(Text(text) for text in (*sides, *_figures(row["a"]["time"], row["b"]["time"], row["ratio"]))))
    table.add_section()
    for row in data["totals"]:
        table.add_row(Text(row["name"], style="bold"), "", *_figures(row["a"], row["b"], row["ratio"]))
    output().print(table, highlight=False)


def _figures(a: int | None, b: int | None, ratio: float | None) -> tuple[str, str, str]:
    shown = ["" if value is None else f"{value:,}" for value in (a, b)]
    return shown[0], shown[1], "" if ratio is None else f"{ratio:.3f}"
