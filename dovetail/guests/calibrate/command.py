"""`dovetail calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.console import progress, say
from dovetail.cli.options import TargetArgument, option


def calibrate(
    target: TargetArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; TARGET.cycles.json if not given.")
    ] = None,
    only: Annotated[list[str] | None, option("--only", help="Only this function; may be repeated.")] = None,
) -> None:
    """Measure what calls of a library, and a core's own instructions, take on the simulated chip.

    Writes a file for dovetail compile --calibration, or for a line in the target file.

    Example: dovetail calibrate port/mine.py
    """
    with progress("reading the target") as show:
        import msgspec

        from dovetail.arrays import write_file
        from dovetail.guests.calibrate import measure
        from dovetail.target.calibration import SCHEMA
        from dovetail.target.registry import load_target

        found, fitted = measure.calibrate(load_target(target), tuple(only or ()), show)
        path = output or Path(f"{Path(target).stem}.cycles.json")
        content = msgspec.json.encode({"schema": SCHEMA, **msgspec.to_builtins(found)}, order="sorted")
        write_file(path, msgspec.json.format(content, indent=1) + b"\n")
    for one in fitted:
        say(one.sentence)
    line = f'TARGET = dt.calibrated(TARGET, Path(__file__).with_name("{path.name}"))'
    say(f"{path}: give it with --calibration, or end the target file with {line}")
