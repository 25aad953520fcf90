"""The options of `dovetail check`, `dovetail new-target` and `dovetail vectors`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A target's name, or the path of a target file.", show_default=False)
]
Sims = Annotated[
    list[str] | None,
    typer.Option(
        "--sim",
        help="What the cases run on: the device's Python model alone (model), the simulated chip (iss), the same with "
        "Verilog (rtl), this computer (host). May be repeated; the quickest and the chip if not given.",
        show_default=False,
    ),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="Only this offload; may be repeated.", show_default=False)
]
Full = Annotated[bool, typer.Option("--full", help="More and larger cases.")]
Seconds = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds some 20 cases together may take.")]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML here.", show_default=False)]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Write Markdown here.", show_default=False)]
Name = Annotated[str, typer.Argument(help="Of the target, its engine and its driver's functions.", show_default=False)]
Where = Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is already there.")]
Format = Annotated[str, typer.Option("--format", help="hex (for $readmemh), bin or npz.")]
Into = Annotated[Path, typer.Option("--output", "-o", help="Folder for the vectors.", show_default=False)]
