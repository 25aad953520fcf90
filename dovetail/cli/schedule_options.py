"""The options of `dovetail schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Multipliers = Annotated[
    int | None, typer.Option(help="Of the hardware; the target's own if not given.", show_default=False)
]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=NUMBER: another size of the hardware. May be repeated.", show_default=False),
]
Rules = Annotated[
    Path | None, typer.Option(help="A YAML file of your own rules for the order.", show_default=False)
]
Seconds = Annotated[float, typer.Option(help="To spend on better orders than the first.")]
Simulate = Annotated[bool, typer.Option(help="Execute the order cycle by cycle and compare.")]
Folder = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder for the order, its picture and programs.", show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the folder that is already there.")]
