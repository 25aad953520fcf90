"""The options of `dovetail quantize` and `dovetail accuracy`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class WeightChoice(enum.StrEnum):
    """Widths of weights."""

    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    MIXED = "mixed"


class MethodChoice(enum.StrEnum):
    """How ranges of activations are chosen."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    MSE = "mse"
    ENTROPY = "entropy"


Data = Annotated[
    Path,
    typer.Option(
        help="An .npz with an array per input (and labels), a folder of .npy, or a folder of images.",
        show_default=False,
    ),
]
DataScale = Annotated[float, typer.Option("--scale", help="Every element of the data is multiplied with this first.")]
DataOffset = Annotated[float, typer.Option("--offset", help="And this is added to it.")]
Resize = Annotated[bool, typer.Option("--resize", help="Scale images of another size than the model's.")]
Samples = Annotated[int, typer.Option(help="Samples read, from the first.", min=1)]
FloatModel = Annotated[Path, typer.Argument(help="A float .tflite or .onnx file.", show_default=False)]
Result = Annotated[Path, typer.Option("--output", "-o", help="The .onnx file to write.", show_default=False)]
Weights = Annotated[WeightChoice, typer.Option(help="Width of the weights.")]
Width = Annotated[
    list[str] | None,
    typer.Option(
        "--width",
        help="Width of the weights of layers, by name or pattern: 'conv2*=int2'. May be given several times; the last "
        "that fits a layer counts.",
        show_default=False,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        help="For mixed: bytes=N of weights, cycles=N simulated, loss=POINTS of top-1, or sqnr=DB.", show_default=False
    ),
]
Validation = Annotated[
    Path | None,
    typer.Option(help="For a budget of loss or sqnr: other data it is measured on.", show_default=False),
]
Method = Annotated[MethodChoice, typer.Option(help="How ranges of activations are chosen.")]
Equalise = Annotated[bool, typer.Option("--equalise", help="Even out channels between neighbouring layers.")]
CorrectBias = Annotated[
    bool, typer.Option("--correct-bias/--keep-bias", help="Take each channel's mean error off its bias.")
]
Adaptive = Annotated[
    bool, typer.Option("--adaptive/--nearest", help="Fit the rounding of int4 and int2 weights to the data.")
]
PerChannel = Annotated[
    bool, typer.Option("--per-channel/--per-tensor", help="A scale per output channel of the weights.")
]
Symmetric = Annotated[bool, typer.Option("--symmetric", help="Activations with zero point 0.")]
IntegerEnds = Annotated[
    bool, typer.Option("--integer-ends", help="Inputs and outputs become integers: nothing is left to the core.")
]
Plot = Annotated[Path | None, typer.Option(help="For mixed: write the frontier here, as SVG.", show_default=False)]
Firmware = Annotated[
    str | None, typer.Option("--target", "-t", help="Compare firmware for this target too.", show_default=False)
]
Reference = Annotated[
    Path | None, typer.Option("--float-model", help="The float model it was made from.", show_default=False)
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures here as JSON.", show_default=False)]
