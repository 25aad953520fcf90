"""The options of `dovetail report`, `dovetail compare` and `dovetail sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BuildFolder = Annotated[Path, typer.Argument(help="A folder made by dovetail compile.", show_default=False)]
First = Annotated[Path, typer.Argument(metavar="A", help="A build, or the JSON of a report.", show_default=False)]
Second = Annotated[Path, typer.Argument(metavar="B", help="Another.", show_default=False)]
Page = Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")]
MaybePage = Annotated[Path | None, typer.Option("--output", "-o", help="Write it here as HTML.", show_default=False)]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the same here as JSON.", show_default=False)]
Trace = Annotated[Path | None, typer.Option(help="Write the timeline here, for Perfetto.", show_default=False)]
Inputs = Annotated[
    Path | None,
    typer.Option(
        "--input", help="An .npz keyed by input tensor names; seeded inputs if not given.", show_default=False
    ),
]
TargetFile = Annotated[
    str | None,
    typer.Option("--target", "-t", help="The target file it was made for, if it was one.", show_default=False),
]
TargetFiles = Annotated[
    list[str] | None,
    typer.Option("--target", "-t", help="The target files they were made for, if they were.", show_default=False),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE,VALUE",
        help="A field of the target and its values; may be repeated. Without one, what may be set is listed.",
        show_default=False,
    ),
]
AllowFloat = Annotated[
    bool, typer.Option("--float", help="Compute in float32 on the core what the model does not quantise.")
]
Jobs = Annotated[
    int | None, typer.Option(help="Processes; as many as there are processors if not given.", show_default=False)
]
