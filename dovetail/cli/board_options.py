"""The options of commands that run on a board."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.board import KINDS, Board
from dovetail.errors import DovetailError

On = Annotated[
    str | None,
    typer.Option("--on", metavar="BOARD", help=f"Run on a board: {', '.join(KINDS)}.", show_default=False),
]
Io = Annotated[
    Path | None,
    typer.Option(
        "--board-io", help="With --on: make its firmware with this C file (see runtime/board.h).", show_default=False
    ),
]
Load = Annotated[
    str | None,
    typer.Option(
        "--load", metavar="COMMAND", help="With --on: load the firmware, {elf}, by this command.", show_default=False
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", help="With --on: seconds an inference may take.")]


def board_of(on: str | None, io: Path | None, load: str | None, timeout: float) -> Board | None:
    """The board of these options; None without --on. Raises DovetailError."""
    if on is not None:
        return Board(on, io, load or "", timeout)
    if io is not None or load is not None:
        raise DovetailError("these options are about a board, and none is given", where="--board-io, --load",
                            hint="add --on BOARD")
    return None
