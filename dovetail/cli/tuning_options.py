"""The options of `dovetail tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.common_options import Measure

Trials = Annotated[int, typer.Option(help="Trials of each kind of layer, the default included.")]
File = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The tuning file; MODEL.TARGET.toml if not given.", show_default=False),
]
Log = Annotated[
    Path | None,
    typer.Option(
        help="Where every trial is kept; one that exists is gone on with. MODEL.TARGET.jsonl if not given.",
        show_default=False,
    ),
]
Layers = Annotated[
    str | None, typer.Option(help="Only these layers, by name, with commas.", show_default=False)
]
By = Annotated[
    Measure | None,
    typer.Option(
        help="Cycles of the simulated chip, time on this computer (where the core is this computer), or what the "
        "cost model thinks.",
        show_default=False,
    ),
]
Jobs = Annotated[int, typer.Option(help="Processes on this machine.")]
Scheduler = Annotated[
    str | None, typer.Option(help="Address of a Dask scheduler to use instead.", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Of the search.")]
