"""Runs a build on a board: inputs up, inferences, outputs and cycles down."""

from __future__ import annotations

import math
import os
import shlex
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dovetail.board import Board
from dovetail.board.frame import ANSWER, MAXIMUM_PAYLOAD, REFUSED, Decoder, Frame, Kind, encode
from dovetail.board.link import Link, open_link
from dovetail.build.instruction_sets import instruction_set
from dovetail.errors import BoardError, BuildError
from dovetail.simulate.protocol import InferenceResult, Marker, SimulationResult

if TYPE_CHECKING:
    from dovetail.run import Build

ATTEMPTS = 8
"""How often a request is sent at most, while none but an inference keeps the board busy."""
_ANSWER_SECONDS = 1.0
_LOAD_SECONDS = 600.0
_VERSION = 1
_LEAST_PAYLOAD, _MOST_SECONDS = 32, 86_400


class Session(Protocol):
    """A board with the firmware of a build, at its beginning."""

    def write(self, port: int, content: bytes) -> None:
        """Set an input, by its number in the build."""
        ...

    def infer(self) -> tuple[int, Sequence[int]]:
        """Run one inference; its cycles in all, and of each layer."""
        ...

    def read(self, port: int, nbytes: int) -> bytes:
        """An output, by its number in the build."""
        ...


class FrameSession:
    """Speaks to the firmware of runtime/board_main.c.

    Args:
        link: the line to it.
        digest: that of the build it must be made from, 32 hexadecimal digits.
        layers: how many the build has.
        timeout: seconds the longest inference may take.

    Raises:
        BoardError: it does not answer, or is made from something else.
    """

    def __init__(self, link: Link, digest: str, layers: int, timeout: float) -> None:
        self._link = link
        self._timeout = timeout
        self._decoder = Decoder()
        self._sequence = 0
        self._number = 0
        self._heard = 0
        self.repeated = 0
        """How many requests had to be sent again."""
        answer = self._ask(Kind.HELLO, answer=24)
        if len(answer) != 24:
            raise self._wrong(f"it introduces itself with {len(answer)} bytes, not 24")
        version, payload, count = struct.unpack_from("<HHI", answer)
        if version != _VERSION:
            raise self._wrong(f"it speaks version {version} of the protocol, this is version {_VERSION}")
        check_digest(answer[8:].hex(), digest, link.where)
        if payload < _LEAST_PAYLOAD or count != max(1, layers):
            raise self._wrong(f"it takes {payload} bytes in a frame and has {count} layers, the build {layers}")
        self._most = min(payload, MAXIMUM_PAYLOAD)
        self._layers = count
        self._ask(Kind.RESET)

    def write(self, port: int, content: bytes) -> None:
        """See `Session`."""
        step = self._most - 8
        for offset in range(0, len(content), step):
            part = content[offset : offset + step]
            self._sized(self._ask(Kind.WRITE, struct.pack("<HHI", port, 0, offset) + part), 0)

    def infer(self) -> tuple[int, Sequence[int]]:
        """See `Session`."""
        self._number += 1
        (total,) = struct.unpack("<Q", self._sized(self._ask(Kind.RUN, struct.pack("<I", self._number), 8), 8))
        layers: list[int] = []
        while len(layers) < self._layers:
            count = min(self._layers - len(layers), self._most // 8)
            answer = self._ask(Kind.CYCLES, struct.pack("<I", len(layers)), 8 * count)
            layers += struct.unpack(f"<{count}Q", self._sized(answer, 8 * count))
        return total, layers

    def read(self, port: int, nbytes: int) -> bytes:
        """See `Session`."""
        found = b""
        while len(found) < nbytes:
            count = min(nbytes - len(found), self._most)
            found += self._sized(self._ask(Kind.READ, struct.pack("<HHI", port, count, len(found)), count), count)
        return found

    def _ask(self, kind: Kind, payload: bytes = b"", answer: int = 0) -> bytes:
        """The answer to a request, of so many bytes if all is well; the request is sent again when none comes."""
        self._sequence = (self._sequence + 1) % 256
        request = encode(Frame(kind, self._sequence, payload))
        patience = min(_ANSWER_SECONDS, self._timeout / ATTEMPTS)
        patience += (2 * len(request) + answer) * self._link.seconds_per_byte
        attempts = max(ATTEMPTS, math.ceil(self._timeout / patience)) if kind is Kind.RUN else ATTEMPTS
        for attempt in range(attempts):
            self.repeated += attempt > 0
            self._link.write(request)
            deadline = time.monotonic() + patience
            while (left := deadline - time.monotonic()) > 0:
                content = self._link.read(left)
                self._heard += len(content)
                for frame in self._decoder.feed(content):
                    if frame.sequence == self._sequence and frame.kind == kind | ANSWER:
                        return frame.payload
                    if frame.sequence == self._sequence and frame.kind == REFUSED:
                        raise self._wrong(f"it refuses the request {kind.name} of {len(payload)} bytes")
        raise self._silent(kind, attempts, attempts * patience)

    def _silent(self, kind: Kind, attempts: int, seconds: float) -> BoardError:
        """The error for a board that did not answer."""
        what = f"the board does not answer: {kind.name} was sent {attempts} times in {seconds:.1f} s"
        if self._heard:
            what += f"; of {self._heard} bytes that came, {self._decoder.skipped} belong to no frame"
            hint = "see that both ends have the same speed, and that nothing else writes to the line"
        else:
            hint = "see that it runs the firmware of make board, and that its line is this one at this speed"
        if kind is Kind.RUN:
            hint = "give a longer --timeout if the inference takes longer; else it may have stopped in a fault"
        return BoardError(what, where=self._link.where, hint=hint)

    def _sized(self, answer: bytes, nbytes: int) -> bytes:
        if len(answer) != nbytes:
            raise self._wrong(f"an answer has {len(answer)} bytes instead of {nbytes}")
        return answer

    def _wrong(self, what: str) -> BoardError:
        return BoardError(f"the board does not do what the protocol says: {what}", where=self._link.where,
                          hint="make the firmware again from this build: make board BOARD_IO=file.c")


def check_digest(found: str, expected: str, where: str) -> None:
    """Raises BoardError when a board has the firmware of another build."""
    if found != expected:
        what = f"the board has the firmware of another build: its digest is {found}, that of the build {expected}"
        raise BoardError(what, where=where, hint="make board BOARD_IO=file.c in this build, and load that firmware")


def run_on_board(
    build: Build, board: Board, inputs: Sequence[Mapping[str, bytes]], wanted: Mapping[str, int],
    cache: Path | None = None,
) -> SimulationResult:
    """Bring the firmware to the board if that is asked for, and run the inferences.

    Args:
        build: the project.
        board: how to reach it.
        inputs: for each inference the contents of all inputs, in the order of the build.
        wanted: bytes of each output, in the order of the build.
        cache: folder of compiled objects; None for the user's.

    Raises:
        DovetailError: it cannot be reached, does not answer, or has another firmware.
    """
    if "digest" not in build.manifest or instruction_set(build.target.core.isa).is_host:
        raise BuildError("the build has no firmware for a board", where=str(build.folder),
                         hint="compile the model again, for a target whose core is not this computer")
    if not 0 < board.timeout <= _MOST_SECONDS:
        raise BoardError(f"a time-out is more than 0 and at most {_MOST_SECONDS} s, not {board.timeout:g} s",
                         where=board.where, hint="give another --timeout")
    elf = firmware_of(build, board, cache)
    if board.load:
        _load(board, elf)
    if board.where.partition(":")[0] == "gdb":
        from dovetail.board.gdb import open_gdb

        with open_gdb(board, build, elf) as debugger:
            return SimulationResult(tuple(_infer(debugger, given, wanted) for given in inputs))
    with open_link(board.where) as link:
        manifest = build.manifest
        session = FrameSession(link, str(manifest["digest"]), len(manifest["layers"]), board.timeout)
        return SimulationResult(tuple(_infer(session, given, wanted) for given in inputs))


def _infer(session: Session, given: Mapping[str, bytes], wanted: Mapping[str, int]) -> InferenceResult:
    for port, content in enumerate(given.values()):
        session.write(port, content)
    total, layers = session.infer()
    outputs = {name: session.read(port, nbytes) for port, (name, nbytes) in enumerate(wanted.items())}
    if not total:  # the board has no counter
        return InferenceResult(outputs)
    times = pairwise(accumulate(layers, initial=0))
    markers = tuple(Marker(layer, start, end, 0, 0) for layer, (start, end) in enumerate(times))
    return InferenceResult(outputs, total_cycles=total, markers=markers)


def image_name(build: Build) -> Path:
    """Where `make board` leaves the firmware."""
    return build.folder / f"{build.manifest['model_prefix']}_board.elf"


def firmware_of(build: Build, board: Board, cache: Path | None = None) -> Path:
    """The firmware's file, made if the board's functions are given; it need not be there otherwise."""
    from dovetail.emit.project import defines
    from dovetail.run import firmware

    if board.io is None:
        return image_name(build)
    if not board.io.is_file():
        raise BoardError(f"there is no file {board.io} with the functions of runtime/board.h",
                         where=board.where, hint="give the right file with --board-io")
    sources = [*(Path(name) for name in build.manifest["sources"]["board"]), board.io.resolve()]
    return firmware(build, sources, defines(build.manifest["model_prefix"], build.target, board=True), cache)


def _load(board: Board, elf: Path) -> None:
    """Run the user's command that loads the firmware."""
    if not elf.is_file():
        raise BoardError(f"there is no firmware {elf} to load", where=board.where,
                         hint="give --board-io FILE.c, or make board in the build first")
    try:
        command = [word.replace("{elf}", str(elf)) for word in shlex.split(board.load)]
        status, said = _carried_out(command, _LOAD_SECONDS)
    except (OSError, ValueError, IndexError) as error:
        raise BoardError(f"the command that loads the firmware does not start: {error}", where=board.where,
                         hint="look at --load") from None
    except subprocess.TimeoutExpired:
        raise BoardError(f"loading the firmware took more than {_LOAD_SECONDS:g} s", where=board.where,
                         hint="try the command of --load by itself") from None
    if status:
        raise BoardError(f"loading the firmware failed with status {status}: {said}", where=board.where,
                         hint="try the command of --load by itself")


def _carried_out(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """The status of a command and the end of what it printed; what it leaves running in the background may go on.

    Raises:
        OSError, IndexError: it cannot be started.
        subprocess.TimeoutExpired: it took longer, and was ended with all it has started.
    """
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=printed,
                              stderr=subprocess.STDOUT) as process:  # fmt: skip
            try:
                status = process.wait(seconds)
            except BaseException:  # Ctrl-C too
                os.killpg(process.pid, signal.SIGKILL)
                raise
        printed.seek(0)
        return status, printed.read()[-600:].decode(errors="replace").strip()
