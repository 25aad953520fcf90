"""Boards: reaching one over a serial line, TCP or a debugger, and running a build on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KINDS = ("serial:/dev/ttyX[:BAUD]", "tcp:HOST:PORT", "gdb[:HOST:PORT]")
"""How a board is named."""


@dataclass(frozen=True, slots=True)
class Board:
    """How to reach a board, and how the firmware gets there."""

    where: str
    """One of `KINDS`."""
    io: Path | None = None
    """C file with the functions of runtime/board.h, to make the firmware with; None where it is there already."""
    load: str = ""
    """Command that brings the firmware to the board, with {elf} for its file; empty where it is there already."""
    timeout: float = 60.0
    """Seconds the longest inference may take."""
