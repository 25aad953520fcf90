"""`dovetail new-target`, `dovetail check`, `dovetail vectors`, and what there is to try: `targets` and `zoo`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dovetail import plugins
from dovetail.cli import options as opt
from dovetail.cli.console import note, progress, say
from dovetail.cli.options import argument, option
from dovetail.errors import BuildError

Target = Annotated[str, argument(metavar="TARGET", help="A target's name, or the path of a target file.")]


def new_target(
    name: Annotated[str, argument(help="Of the target, its engine and its driver's functions.")],
    folder: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path("."),
    force: opt.ReplaceFiles = False,
) -> None:
    """Write a target file and a driver to start a port from.

    They compile and run as they are.

    Example: dovetail new-target mine -o port
    """
    from dovetail.guests.newtarget import write_new_target

    paths = write_new_target(name, folder, force)
    say(f"{', '.join(str(path) for path in paths)}: try dovetail check {paths[0]}")


def check(
    target: Target,
    sim: Annotated[
        list[str] | None,
        option(
            "--sim",
            help="What the cases run on: the device's Python model alone (model), the simulated chip (iss), the same "
            "with Verilog (rtl), this computer (host). May be repeated; the quickest and the chip if not given.",
        ),
    ] = None,
    only: Annotated[list[str] | None, option("--only", help="Only this offload; may be repeated.")] = None,
    full: Annotated[bool, typer.Option("--full", help="More and larger cases.")] = False,
    first: Annotated[bool, typer.Option("--first", help="Stop behind the first offload with findings.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds some 20 cases together may take.")] = 60.0,
    jobs: opt.LocalJobs = 1,
    scheduler: opt.Scheduler = None,
    junit: Annotated[Path | None, option(help="Write JUnit XML here.")] = None,
    markdown: Annotated[Path | None, option(help="Write Markdown here.")] = None,
) -> None:
    """Try a port at every limit it declares.

    Says what is likely wrong, in the smallest form. The status is 1 where there are findings.

    Example: dovetail check port/mine.py --junit check.xml
    """
    for path in (junit, markdown):
        if path is not None:
            _write(path, "")  # a file that cannot be written is told before the work, not after it
    with progress("reading the target") as report:
        from dovetail.guests.check import findings, suite
        from dovetail.guests.check.cases import FULL, QUICK
        from dovetail.target.registry import load_target

        order = suite.Order(FULL if full else QUICK, tuple(sim or ()), tuple(only or ()), timeout, first)
        found = suite.check(load_target(target), order, report, name=target, jobs=jobs, scheduler=scheduler)
    for path, text in ((junit, findings.junit), (markdown, findings.markdown)):
        if path is not None:
            _write(path, text(found))
    for number, finding in enumerate(found.findings, 1):
        say(f"{number}. {findings.finding_text(finding)}\n")
    say(findings.summary(found))
    if found.findings:
        sys.exit(1)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BuildError(f"cannot write it: {error.strerror}", where=str(path), hint="choose another file") from None


def vectors(
    target: Target,
    output: Annotated[Path, option("--output", "-o", help="Folder for the vectors.")],
    form: Annotated[str, typer.Option("--format", help="hex (for $readmemh), bin or npz.")] = "hex",
    force: opt.ReplaceFiles = False,
) -> None:
    """Write test vectors for a Verilog test bench.

    What each kernel finds in memory, its register writes and the result.

    Example: dovetail vectors macarray --format hex -o vectors
    """
    with progress("making vectors"):
        from dovetail.guests.vectors import write_vectors
        from dovetail.target.registry import load_target

        count, without = write_vectors(load_target(target), form, output, force)
    if without:
        note(f"no layer is made for {', '.join(without)}")
    say(f"{output}: {count} kernels")


def targets(
    parts: Annotated[bool, typer.Option("--parts", help="The microcontrollers whose memories are known.")] = False,
) -> None:
    """List the targets and their requantisation policies, or known microcontrollers.

    Example: dovetail targets --parts
    """
    from dovetail.target.parts import PARTS
    from dovetail.target.registry import installed_targets, load_target

    if parts:
        width = max(map(len, PARTS))
        for name, part in PARTS.items():
            say(f"{name:{width}} {load_target(name).sentence} ({part.source})")
        return
    width = max(map(len, plugins.names(plugins.TARGETS)))
    for name, target in installed_targets(note):
        say(f"{name:{width}} {target.sentence}")
        for index, policy in enumerate(target.policies):
            say(f"{'':{width}} --requant {policy.name}{' (default)' if index == 0 else ''}: {policy.sentence}")


def zoo(
    name: Annotated[str | None, argument(help="A model; without it, the names are listed.")] = None,
    output: Annotated[Path | None, option("--output", "-o", help="The file to write; NAME.onnx if not given.")] = None,
    real: Annotated[bool, typer.Option("--float", help="The float network it is quantised from.")] = False,
    calibration: Annotated[Path | None, option(help="Write float samples for calibration here, as .npz.")] = None,
    test: Annotated[Path | None, option(help="Of digits: write the images held back and labels here.")] = None,
) -> None:
    """Write a model to try Dovetail with, or list them.

    Example: dovetail zoo digits -o digits.onnx
    """
    from dovetail.arrays import write_file, write_outputs
    from dovetail.guests import zoo as models

    if name is None:
        for known in models.names():
            say(known)
        return
    path = output or Path(f"{name}.onnx")
    with progress(f"making {name}"):
        content = models.build_float(name) if real else models.build(name)
        samples = models.calibration(name) if calibration else None
        held_back = models.held_back(name) if test else None
    write_file(path, content)
    say(f"{path}: {len(content):,} bytes")
    if calibration is not None and samples is not None:
        write_outputs(calibration, [{"input": samples}], batched=False)
        say(f"{calibration}: {len(samples)} samples")
    if test is not None and held_back is not None:
        write_outputs(test, [{"input": held_back[0], "labels": held_back[1]}], batched=False)
        say(f"{test}: {len(held_back[1])} labelled samples")
