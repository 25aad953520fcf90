"""Runs a build on a board: inputs up, inferences, outputs and cycles down, in frames or through a debugger's server."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dovetail.codegen.manifest import BuildManifest
from dovetail.errors import BoardError
from dovetail.sim.agent import open_agent
from dovetail.sim.frames import FrameConversation, FrameKind, open_first, read_all, read_cycles, write_all
from dovetail.sim.gdb import GdbSession, server_of
from dovetail.sim.line import Board, BoardSession, Link, open_link

_LOAD_SECONDS = 600.0
_LEAST_PAYLOAD = 32


class FrameSession(BoardSession):
    """Speaks to the firmware of runtime/board_main.c, made from the build with that digest (32 hexadecimal digits) and
    so many layers; the longest inference may take `timeout` seconds. Raises BoardError where it does not answer, or is
    made from something else."""

    def __init__(
        self, link: Link, digest: str, layers: int, timeout: float, again: Callable[[], Link] | None = None
    ) -> None:
        """`again` opens the line once more; as the link's name says, if not given."""
        super().__init__(link)
        self.talk = FrameConversation(
            link, timeout, again, "make the firmware again from this build: make board BOARD_IO=file.c"
        )
        found = self.talk.hello()
        self._check_digest(found.digest, digest)
        if found.payload < _LEAST_PAYLOAD or found.count != max(1, layers):
            what = f"it takes {found.payload} bytes in a frame and has {found.count} layers, the build {layers}"
            raise self.talk.wrong(what)
        self._most, self._layers, self._number = found.payload, found.count, 0
        self.talk.ask(FrameKind.RESET)

    def write(self, port: int, content: bytes) -> None:
        write_all(self.talk, port, content, self._most)

    def infer(self) -> tuple[int, Sequence[int]]:
        self._number += 1
        request = struct.pack("<I", self._number)
        (total,) = struct.unpack("<Q", self.talk.sized(self.talk.ask(FrameKind.RUN, request, 8), 8))
        return total, read_cycles(self.talk, self._layers, self._most)

    def read(self, port: int, nbytes: int) -> bytes:
        return read_all(self.talk, port, nbytes, self._most)

    def close(self) -> None:
        self.talk.link.close()


def opener(board: Board) -> Callable[..., Link]:
    """Opens the line to a board, and opens it again after a cut: always as the same job if an agent lends the board."""
    if board.where.partition(":")[0] == "agent":
        return partial(open_agent, board, secrets.token_hex(16))
    return partial(open_link, board.where)


def open_board(board: Board, manifest: BuildManifest, isa: str, elf: Path) -> BoardSession:
    """Bring the firmware of a build to a board if that is asked for, and begin to speak to it.

    `isa` is the instruction set of its core; `elf` need not be there where it is neither loaded nor debugged.

    Raises:
        DovetailError: it cannot be reached, does not answer, or has another firmware.
    """
    if board.load:
        load_firmware(board, elf)
    kind = board.where.partition(":")[0]
    opened = opener(board)
    if kind == "gdb":
        link = server_of(board, elf)
    else:
        firmware = (elf.read_bytes(),) if kind == "agent" and board.io is not None else ()
        link = open_first(partial(opened, *firmware))
    try:
        if kind == "gdb":
            return GdbSession(link, manifest, isa, elf, board.timeout)
        return FrameSession(link, manifest.digest, len(manifest.layers), board.timeout, opened)
    except BaseException:
        link.close()
        raise


def load_firmware(board: Board, elf: Path) -> None:
    """Run the user's command that loads the firmware; raises BoardError where it fails."""
    if not elf.is_file():
        hint = "give --board-io FILE.c, or make board in the build first"
        raise BoardError(f"there is no firmware {elf} to load", where=board.where, hint=hint)
    try:
        command = [word.replace("{elf}", str(elf)) for word in shlex.split(board.load)]
        status, said = _carried_out(command, _LOAD_SECONDS)
    except (OSError, ValueError, IndexError) as error:
        what = f"the command that loads the firmware does not start: {error}"
        raise BoardError(what, where=board.where, hint="look at --load") from None
    except subprocess.TimeoutExpired:
        what = f"loading the firmware took more than {_LOAD_SECONDS:g} s"
        raise BoardError(what, where=board.where, hint="try the command of --load by itself") from None
    if status:
        hint = "try the command of --load by itself"
        raise BoardError(f"loading the firmware failed with status {status}: {said}", where=board.where, hint=hint)


def _carried_out(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """The status of a command and the end of what it printed; what it leaves running in the background may go on. One
    that takes longer is ended with all it has started."""
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT
        ) as process:
            try:
                status = process.wait(seconds)
            except BaseException:  # Ctrl-C too
                os.killpg(process.pid, signal.SIGKILL)
                raise
        printed.seek(0)
        return status, printed.read()[-600:].decode(errors="replace").strip()
