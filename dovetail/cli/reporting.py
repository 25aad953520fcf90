"""What `dovetail report` and `dovetail compare` do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.console import note, progress, say
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from collections.abc import Callable


def report_of(
    folder: Path,
    page_file: Path,
    json_file: Path | None,
    trace_file: Path | None,
    simulator: str,
    source: Path | None,
    target_name: str | None,
) -> None:
    """Run a build and write its report; raises DovetailError."""
    from dovetail.cli.arrays import write_file

    if trace_file is not None and simulator == "host":
        raise DovetailError("a trace has times, and on the host there are none", hint="leave --trace or --sim host out")
    with progress("starting") as show:
        data = detailed(folder, simulator, source, target_name, show)
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
    folder: Path, simulator: str, source: Path | None, target_name: str | None, show: Callable[[str], None]
) -> dict[str, Any]:
    """Everything known of a build and one run of it; raises DovetailError."""
    from dovetail.cli.arrays import read_inputs, seeded_inputs
    from dovetail.report.detail import detail, read_plan
    from dovetail.run import open_build, run_build
    from dovetail.targets import load_target

    build = open_build(folder, load_target(target_name) if target_name else None)
    read_plan(build)
    ports = build.manifest["inputs"]
    inputs = [seeded_inputs(ports)] if source is None else read_inputs(source, ports)[0]
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
