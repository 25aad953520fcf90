"""The options of `dovetail compile` and `dovetail explain` that say who computes what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Pin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=ENGINE",
        help="Compute a layer, or an operator of the model, on an engine, core, or several (a+b). May be repeated.",
        show_default=False,
    ),
]
Pins = Annotated[
    Path | None,
    typer.Option(help="A file of pins: a table pins of NAME = \"ENGINE\" in TOML, or in .json.", show_default=False),
]
Cores = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cores like the target's own that share every layer; the target's number if not given.",
        show_default=False,
    ),
]
InPipeline = Annotated[
    bool, typer.Option("--pipeline", help="Let each core work on an input of its own, in stages of equal length.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES|32K",
        help="Most bytes of activations on a core alone: layers are computed in stripes where that saves memory.",
        show_default=False,
    ),
]
