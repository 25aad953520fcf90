"""C and assembler files every emitted project may contain, and the linker script they expect."""

from __future__ import annotations

from pathlib import Path

START = "rv32_start.S"
"""Start-up code of an RV32 firmware; `InstructionSet.start` names that of any core."""
RUNTIME = ("dovetail_rt.h", "dovetail_rt.c")
"""Helpers every firmware is linked with."""
DMA_DRIVER = ("dma.h", "dma.c")
"""Driver of the DMA."""
COPY = ("copy.h", "copy.c")
"""Copies by the core, where there is no DMA."""
CORES = ("cores.h", "cores.c")
"""How cores start one another, where there are several."""
SIMULATION_MAIN = "sim_main.c"
"""The harness that runs a model under a simulator."""

BOARD = ("board.h", "board_main.c")
"""The firmware of a board, which answers `dovetail run --on`."""


def runtime_path(name: str) -> Path:
    """Return the file `name` of this folder.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(__file__).with_name(name)
    if not path.is_file():
        raise FileNotFoundError(path)
    return path
