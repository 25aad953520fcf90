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
    test: Annotated[
        Path | None, option(help="Write samples of digits or story that their training never saw here.")
    ] = None,
    tokenizer: Annotated[Path | None, option(help="Write story's tokenizer here, in llama2.c's form.")] = None,
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
        files = {path: models.build_float(name) if real else models.build(name)}
        files |= {tokenizer: models.tokenizer(name)} if tokenizer else {}
        data = {calibration: models.calibration(name)} if calibration else {}
        data |= {test: models.held_back(name)} if test else {}
    for file, content in files.items():
        write_file(file, content)
        say(f"{file}: {len(content):,} bytes")
    for file, arrays in data.items():
        write_outputs(file, [arrays], batched=False)
        say(f"{file}: {', '.join(f'{key} {list(array.shape)}' for key, array in arrays.items())}")
