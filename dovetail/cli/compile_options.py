"""The options of `dovetail compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.common_options import OptimizeChoice

Folder = Annotated[Path, typer.Option("--output", "-o", help="Folder for the C project.", show_default=False)]
SaveStages = Annotated[
    Path | None, typer.Option(help="Folder for an ONNX model after every stage.", show_default=False)
]
Check = Annotated[bool, typer.Option("--check", help="Compare every stage with the one before in ONNX Runtime.")]
Optimize = Annotated[
    OptimizeChoice,
    typer.Option(help="The core's code: few instructions executed, or one small function for layers of a kind."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the build that is already there.")]
PrintProgram = Annotated[
    bool, typer.Option("--print-program", help="Print the program: copies, launches, calls, waits.")
]
Tuning = Annotated[
    Path | None, typer.Option(help="A tuning file made by dovetail tune for this model.", show_default=False)
]
Dump = Annotated[
    Path | None,
    typer.Option(help="Folder for each launch as raw files: memory, commands, result.", show_default=False),
]
