"""Options several commands share; a command's own stand in its signature."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from dovetail.operators import UserOperator
    from dovetail.sim.line import Board

argument = partial(typer.Argument, show_default=False)
"""An argument without a default."""
option = partial(typer.Option, show_default=False)
"""An option without a default worth showing."""

Simulator = Literal["iss", "rtl", "host"]

Model = Annotated[Path, argument(help="A .tflite, .onnx, .keras or .h5 file.")]
TargetName = Annotated[
    str,
    option(
        "--target",
        "--part",
        "-t",
        help="A target's or part's name (see dovetail targets), or the path of a target file.",
    ),
]
TargetFile = Annotated[str | None, option("--target", "-t", help="The target file it was made for, if it was one.")]
Requant = Annotated[str | None, option(help="Requantisation policy; the target's default if not given.")]
Rounding = Annotated[
    Literal["double", "single"] | None,
    option(help="Rounding of the model's requantisations; single for ONNX, double for others if not given."),
]
Shapes = Annotated[
    list[str] | None,
    option("--shape", metavar="NAME=1,3,32,32", help="The shape of an input whose sizes the model leaves open."),
]
Operators = Annotated[
    Path | None, option("--operators", metavar="FILE", help="A Python file that defines operators of your own.")
]
Ends = Literal["model", "int8"]
IntegerInputs = Annotated[
    Ends,
    typer.Option(
        "--inputs",
        help="int8: float inputs that are only quantised are taken as the network's own integers; the header has their "
        "scales.",
    ),
]
IntegerOutputs = Annotated[Ends, typer.Option("--outputs", help="int8: the same of float outputs.")]
Set = Annotated[
    list[str] | None,
    option("--set", metavar="NAME=VALUE", help="A number of the target, such as ram.size=16M. May be repeated."),
]
AllowFloat = Annotated[
    bool, typer.Option("--float", help="Compute in float32 on the core what the model does not quantise.")
]
Sim = Annotated[
    Simulator | None,
    option(
        help="The simulated chip with its cycles (iss), the same with engines in Verilog (rtl), or the C code on this "
        "machine (host); iss where there is such a chip."
    ),
]
Inputs = Annotated[
    Path | None, option("--input", help="An .npz keyed by input tensor names; seeded inputs if not given.")
]
BuildFolder = Annotated[Path, argument(help="A folder made by dovetail compile.")]
Page = Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")]
Json = Annotated[Path | None, option("--json", help="Write the same here as JSON; - for stdout.")]

Pin = Annotated[
    list[str] | None,
    option(
        metavar="NAME=ENGINE",
        help="Compute a layer, or an operator of the model, on an engine, core, one core of several (core1), or "
        "several engines (a+b). May be repeated.",
    ),
]
Pins = Annotated[Path | None, option(help='A file of pins: a table pins of NAME = "ENGINE" in TOML, or in .json.')]
Cores = Annotated[
    int | None,
    option(min=1, help="Cores like the target's own that share every layer; the target's number if not given."),
]
InPipeline = Annotated[
    bool, typer.Option("--pipeline", help="Let each core work on an input of its own, in stages of equal length.")
]
Name = Annotated[
    str | None, option(help="What the C names of the network begin with; the model's own name if not given.")
]
Arena = Annotated[
    str | None,
    option(metavar="SYMBOL", help="C name of an array of your own for the values, which several networks may share."),
]
KeepDead = Annotated[bool, typer.Option("--keep-dead", help="Compute what changes nothing, or twice, too.")]
MemoryBudget = Annotated[
    str | None,
    option(
        metavar="BYTES|32K",
        help="Most bytes of activations and stack on a core alone: layers are computed in stripes where that saves "
        "memory.",
    ),
]

LocalJobs = Annotated[int, typer.Option(help="Processes on this machine.")]
Scheduler = Annotated[str | None, option(help="Address of a Dask scheduler to use instead.")]
ReplaceFolder = Annotated[bool, typer.Option("--force", help="Replace the folder that is already there.")]
ReplaceFiles = Annotated[bool, typer.Option("--force", help="Replace what is already there.")]

On = Annotated[
    str | None,
    option(
        "--on",
        metavar="BOARD",
        help="Run on a board: serial:/dev/ttyX[:BAUD], tcp:HOST:PORT, gdb[:HOST:PORT], agent:HOST[:PORT]/BOARD.",
    ),
]
BoardIo = Annotated[
    Path | None, option("--board-io", help="With --on: make its firmware with this C file (see runtime/board.h).")
]
BoardLoad = Annotated[
    str | None, option("--load", metavar="COMMAND", help="With --on: load the firmware, {elf}, by this command.")
]
BoardSecret = Annotated[
    Path | None,
    option("--secret", envvar="DOVETAIL_SECRET", help="With --on agent: the file of its secret."),
]
BoardTimeout = Annotated[float, typer.Option("--timeout", help="With --on: seconds an inference may take.")]

Data = Annotated[
    Path, option(help="An .npz with an array per input (and labels), a folder of .npy, or a folder of images.")
]
DataScale = Annotated[float, typer.Option("--scale", help="Every element of the data is multiplied with this first.")]
DataOffset = Annotated[float, typer.Option("--offset", help="And this is added to it.")]
DataResize = Annotated[bool, typer.Option("--resize", help="Scale images of another size than the model's.")]
Samples = Annotated[int, typer.Option(help="Samples read, from the first.", min=1)]


def board_of(on: str | None, io: Path | None, load: str | None, timeout: float, secret: Path | None) -> Board | None:
    """The board of these options; None without --on. Raises DovetailError."""
    if on is not None:
        from dovetail.sim.line import Board

        return Board(on, io, load or "", timeout, secret)
    if io is not None or load is not None:
        raise DovetailError(
            "these options are about a board, and none is given", where="--board-io, --load", hint="add --on BOARD"
        )
    return None


def operators_of(file: Path | None) -> tuple[type[UserOperator], ...]:
    """The operators of a user's file, none without one; raises DovetailError."""
    from dovetail.operators import load_operators

    return load_operators(file) if file else ()
