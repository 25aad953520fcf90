"""`dovetail new-target`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.console import say
from dovetail.cli.options import ReplaceFiles, argument


def new_target(
    name: Annotated[str, argument(help="Of the target, its engine and its driver's functions.")],
    folder: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path("."),
    force: ReplaceFiles = False,
) -> None:
    """Write a target file and a driver to start a port from.

    They compile and run as they are.

    Example: dovetail new-target mine -o port
    """
    from dovetail.guests.newtarget import write_new_target

    paths = write_new_target(name, folder, force)
    say(f"{', '.join(str(path) for path in paths)}: try dovetail check {paths[0]}")
