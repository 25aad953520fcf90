"""`dovetail zoo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.console import progress, say
from dovetail.cli.options import argument, option


def zoo(
    name: Annotated[str | None, argument(help="A model; without it, the names are listed.")] = None,
    output: Annotated[Path | None, option("--output", "-o", help="The file to write; NAME.onnx if not given.")] = None,
    real: Annotated[bool, typer.Option("--float", help="The float network, before quantisation.")] = False,
    calibration: Annotated[Path | None, option(help="Write float samples for calibration here, as .npz.")] = None,
    test: Annotated[Path | None, option(help="Write digits' held-back images and labels here.")] = None,
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
