"""The options of `dovetail mesh`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.common_options import ObjectiveChoice

Boards = Annotated[
    int | None, typer.Option(help="Boards there are; the target's own number if not given.", show_default=False)
]
Chips = Annotated[
    int | None, typer.Option(help="Only so many chips of one board.", show_default=False)
]
Objective = Annotated[
    ObjectiveChoice, typer.Option(help="Little time for one input, or many inputs of a stream.")
]
Mapping = Annotated[
    Path | None, typer.Option(help="A mapping.json to use instead, edited or not.", show_default=False)
]
Faults = Annotated[float, typer.Option(help="Share of elements and links taken to be dead, at random.")]
Seed = Annotated[int, typer.Option(help="Of the faults.")]
Inputs = Annotated[int, typer.Option(help="Inputs of the stream that is modelled.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="Run every element's firmware in an emulated core of its own.")
]
Jobs = Annotated[int, typer.Option(help="Processes that do so on this machine.")]
Scheduler = Annotated[
    str | None, typer.Option(help="Address of a Dask scheduler to use instead.", show_default=False)
]
Folder = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder for programs, images, mapping and picture.", show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the folder that is already there.")]
