"""Options several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class RoundingChoice(enum.StrEnum):
    """Rounding of the model's own requantisations."""

    DOUBLE = "double"
    SINGLE = "single"


class OptimizeChoice(enum.StrEnum):
    """What the core's code is made for."""

    SPEED = "speed"
    SIZE = "size"


class Simulator(enum.StrEnum):
    """What a build runs on."""

    ISS = "iss"
    RTL = "rtl"
    HOST = "host"


class ObjectiveChoice(enum.StrEnum):
    """What a mapping to a mesh is made for."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


class Measure(enum.StrEnum):
    """What tuning goes by."""

    ISS = "iss"
    HOST = "host"
    MODEL = "model"


def _show_version(wanted: bool) -> None:
    """Print the version and end, where it is asked for."""
    if wanted:
        from dovetail import __version__

        typer.echo(f"dovetail {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
]
Model = Annotated[Path, typer.Argument(help="A .tflite, .onnx, .keras or .h5 file.", show_default=False)]
TargetName = Annotated[
    str,
    typer.Option(
        "--target", "-t", help="A target's name (see dovetail targets), or the path of a target file.",
        show_default=False,
    ),
]
Sim = Annotated[
    Simulator | None,
    typer.Option(
        help="The simulated chip with its cycles (iss), the same with engines in Verilog (rtl), or the C code on this "
        "machine (host); iss where there is such a chip.",
        show_default=False,
    ),
]
Rounding = Annotated[RoundingChoice, typer.Option(help="Rounding of the model's requantisations.")]
Requant = Annotated[
    str | None, typer.Option(help="Requantisation policy; the target's default if not given.", show_default=False)
]
