"""`dovetail check` and `dovetail vectors`."""

from __future__ import annotations

import sys
from errno import EISDIR
from os import strerror
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer

from dovetail.cli.console import INTERRUPTED, note, progress, say
from dovetail.cli.options import LocalJobs, ReplaceFiles, Scheduler, TargetArgument, option
from dovetail.errors import BuildError


def check(
    target: TargetArgument,
    sim: Annotated[
        list[str] | None,
        option(
            "--sim",
            help="Where the cases run: the device's Python model alone (model), the simulated chip (iss), the same "
            "with Verilog (rtl), this computer (host). May be repeated; the quickest and the chip if not given.",
        ),
    ] = None,
    only: Annotated[list[str] | None, option("--only", help="Only this offload; may be repeated.")] = None,
    full: Annotated[bool, typer.Option("--full", help="More and larger cases.")] = False,
    first: Annotated[bool, option("--first", help="Stop after the first offload with a failure.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds some 20 cases together may take.")] = 60.0,
    jobs: LocalJobs = 1,
    scheduler: Scheduler = None,
    junit: Annotated[Path | None, option(help="Write JUnit XML here.")] = None,
    markdown: Annotated[Path | None, option(help="Write Markdown here.")] = None,
) -> None:
    """Try a port at every limit it declares.

    Says what is likely wrong, in the smallest form. The status is 1 where there are findings. Ctrl-C ends it with what
    was found until then, and the reports say that it was stopped.

    Example: dovetail check port/mine.py --junit check.xml
    """
    for report_file in filter(None, (junit, markdown)):
        _refuse_unwritable(report_file)  # it is told before the work, not after it
    with progress(f"{target}: reading the target", lines=True) as report:
        from dovetail.arrays import write_file
        from dovetail.guests.check import findings, suite
        from dovetail.guests.check.cases import FULL, QUICK
        from dovetail.target.registry import load_target

        order = suite.Order(FULL if full else QUICK, tuple(sim or ()), tuple(only or ()), timeout, first)
        checked = suite.check(load_target(target), order, report, name=target, jobs=jobs, scheduler=scheduler)
    for path, text in ((junit, findings.junit), (markdown, findings.markdown)):
        if path is not None:
            write_file(path, text(checked).encode())
    for number, finding in enumerate(checked.findings, 1):
        say(f"{number}. {findings.finding_text(finding)}\n")
    say(findings.summary(checked))
    if checked.stopped or checked.findings:
        sys.exit(INTERRUPTED if checked.stopped else 1)


def _refuse_unwritable(path: Path) -> None:
    """Raise BuildError where no file can be written, without touching one that is there."""
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, strerror(EISDIR))
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BuildError(f"cannot write it: {error.strerror}", where=str(path), hint="choose another file") from None


def vectors(
    target: TargetArgument,
    output: Annotated[Path, option("--output", "-o", help="Folder for the vectors.")],
    form: Annotated[str, typer.Option("--format", help="hex (for $readmemh), bin or npz.")] = "hex",
    force: ReplaceFiles = False,
) -> None:
    """Write test vectors for a Verilog test bench.

    What each kernel finds in memory, its register writes and the result.

    Example: dovetail vectors macarray --format hex -o vectors
    """
    with progress("making vectors"):
        from dovetail.guests.check.vectors import write_vectors
        from dovetail.target.registry import load_target

        count, without = write_vectors(load_target(target), form, output, force)
    if without:
        note(f"no layer is made for {', '.join(without)}")
    say(f"{output}: {count} kernels")
