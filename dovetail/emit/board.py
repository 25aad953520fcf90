"""What an emitted project has for a board: which network it is, where inputs and outputs lie, and how to link it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from dovetail.emit.c_text import guard
from dovetail.emit.runtime import BOARD, runtime_path
from dovetail.emit.source import Unit, place
from dovetail.program.ir import View

_DIGEST_BYTES = 16


def digest_of(files: Mapping[str, str]) -> str:
    """Which build it is, in hexadecimal: of names and texts of the files."""
    state = hashlib.sha256()
    for name, text in sorted(files.items()):
        state.update(f"{name}\0{len(text)}\0{text}".encode())
    return state.hexdigest()[: 2 * _DIGEST_BYTES]


def board_sources(target_sources: tuple[str, ...]) -> tuple[str, ...]:
    """What the firmware of a board is compiled from, but for the user's own functions."""
    return tuple("runtime/board_main.c" if name == "runtime/sim_main.c" else name for name in target_sources)


def board_files(unit: Unit, digest: str) -> dict[str, str]:
    """The files of a board's firmware, by their path in the project."""
    found = {f"runtime/{name}": runtime_path(name).read_text() for name in BOARD}
    return {**found, "src/board_network.h": _network_header(unit, digest)}


def _network_header(unit: Unit, digest: str) -> str:
    """What board_main.c must know of the network."""

    def ports(views: Mapping[str, View]) -> str:
        """The initialisers of the ports."""
        return ", ".join(f"{{{place(unit, view)}, {view.span[1] - view.span[0]}u}}" for view in views.values())

    kept = unit.program.states or unit.delay
    lines = [
        f'#include "{unit.model}.h"',
        "",
        f"#define BOARD_DIGEST {{{', '.join(f'0x{byte:02x}u' for byte in bytes.fromhex(digest))}}}",
        f"#define BOARD_LAYERS {max(1, len(unit.program.layers))}u",
        f"#define BOARD_RUN {unit.model}_run",
        f"#define BOARD_RESET() {f'{unit.model}_reset()' if kept else '((void)0)'}",
        f"#define BOARD_INPUTS {{{ports(unit.program.inputs)}}}",
        f"#define BOARD_OUTPUTS {{{ports(unit.program.outputs)}}}",
        "",
    ]
    return guard("DOVETAIL_BOARD_NETWORK_H", "\n".join(lines))


def board_makefile(model: str, target_sources: tuple[str, ...], defines: str) -> str:
    """The part of a Makefile that links the firmware of a board."""
    return f"""# The firmware of a board. BOARD_IO is your C file with the functions of runtime/board.h.
BOARD_IO =
BOARD_DEFINES = {defines}
BOARD_SOURCES = {" ".join(board_sources(target_sources))}

board: $(BOARD_SOURCES) link.ld
\t@test -n "$(BOARD_IO)" || {{ echo "say which file has the functions of runtime/board.h: BOARD_IO=file.c"; exit 1; }}
\t$(CC) $(CFLAGS) $(BOARD_DEFINES) -Isrc -Iruntime -Idriver -nostdlib -Wl,--gc-sections -T link.ld \\
\t\t$(BOARD_SOURCES) $(BOARD_IO) -lgcc -o {model}_board.elf
"""
