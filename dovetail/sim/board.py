"""Runs a build on a board: inputs up, inferences, outputs and cycles down, in frames or through a debugger's server.

emit/runtime/board_main.c says what frames look like. What comes from a line is not trusted: a decoder holds at most one
frame, and skips what is none.
"""

from __future__ import annotations

import enum
import math
import os
import secrets
import shlex
import signal
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.errors import BoardError
from dovetail.sim.agent import open_agent
from dovetail.sim.gdb import GdbSession, server_of
from dovetail.sim.line import Board, BoardSession, LineGone, Link, open_link

MAXIMUM_PAYLOAD = 1024
"""Bytes of payload a frame may have."""
MAXIMUM_FRAME = 8 + MAXIMUM_PAYLOAD + 4
_MAGIC = b"\xd7\xe9"
_HEAD = struct.Struct("<2sBBH")
_HEADER_BYTES, _TRAILER_BYTES = 8, 4
ATTEMPTS = 8
"""How often a request is sent at most, while none but an inference keeps the board busy."""
_ANSWER_SECONDS = 1.0
_LOAD_SECONDS = 600.0
_VERSION = 2
_GONE_SECONDS = 30.0
"""How long a line that is gone may take to come again."""
_PAUSE_SECONDS = 0.2
_LEAST_PAYLOAD = 32


class Kind(enum.IntEnum):
    """What a request asks for."""

    HELLO = 1
    WRITE = 2
    RUN = 3
    READ = 4
    CYCLES = 5
    RESET = 6
    SESSION = 7


ANSWER = 0x80
"""Added to the kind of a request in its answer."""
REFUSED = 0xFF
"""Kind of the answer to a request that cannot be carried out."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: kind and sequence number of 0 to 255, and at most `MAXIMUM_PAYLOAD` bytes."""

    kind: int
    sequence: int
    payload: bytes = b""


def encode(frame: Frame) -> bytes:
    """The bytes of a frame; raises ValueError where its payload is too long."""
    if len(frame.payload) > MAXIMUM_PAYLOAD:
        raise ValueError(f"a payload of {len(frame.payload)} bytes; the limit is {MAXIMUM_PAYLOAD}")
    head = _HEAD.pack(_MAGIC, frame.kind, frame.sequence, len(frame.payload))
    content = head + struct.pack("<H", zlib.crc32(head) & 0xFFFF) + frame.payload
    return content + struct.pack("<I", zlib.crc32(content))


class Decoder:
    """Finds frames in a stream of bytes."""

    def __init__(self) -> None:
        self._held = bytearray()
        self.skipped = 0
        """Bytes that belonged to no frame."""

    def feed(self, content: bytes) -> list[Frame]:
        """Take more bytes; return the frames that end in them."""
        self._held += content
        found = []
        while (frame := self._next()) is not None:
            found.append(frame)
        return found

    def _next(self) -> Frame | None:
        """The first frame; None when more bytes are needed."""
        while True:
            start = self._held.find(_MAGIC)
            kept = len(self._held) - int(self._held.endswith(_MAGIC[:1]))
            self._skip(start if start >= 0 else kept)
            if len(self._held) < _HEADER_BYTES:
                return None
            _, kind, sequence, length = _HEAD.unpack_from(self._held)
            (check,) = struct.unpack_from("<H", self._held, _HEAD.size)
            if length <= MAXIMUM_PAYLOAD and check == zlib.crc32(self._held[: _HEAD.size]) & 0xFFFF:
                end = _HEADER_BYTES + length
                if len(self._held) < end + _TRAILER_BYTES:
                    return None
                if struct.unpack_from("<I", self._held, end)[0] == zlib.crc32(self._held[:end]):
                    payload = bytes(self._held[_HEADER_BYTES:end])
                    del self._held[: end + _TRAILER_BYTES]
                    return Frame(kind, sequence, payload)
            self._skip(1)

    def _skip(self, count: int) -> None:
        del self._held[:count]
        self.skipped += count


class FrameSession(BoardSession):
    """Speaks to the firmware of runtime/board_main.c, made from the build with that digest (32 hexadecimal digits) and
    so many layers; the longest inference may take `timeout` seconds. Raises BoardError where it does not answer, or is
    made from something else."""

    def __init__(
        self, link: Link, digest: str, layers: int, timeout: float, again: Callable[[], Link] | None = None
    ) -> None:
        """`again` opens the line once more; as the link's name says, if not given."""
        super().__init__(link)
        self._again = again or (lambda: open_link(link.where))
        self._timeout, self._decoder = timeout, Decoder()
        self._sequence = self._number = self._heard = 0
        self.repeated = 0
        """How many requests had to be sent again."""
        self._session = 0
        name = secrets.randbelow((1 << 32) - 1) + 1
        answer = self._ask(Kind.HELLO, struct.pack("<I", name), answer=24)
        if len(answer) != 24:
            raise self._wrong(f"it introduces itself with {len(answer)} bytes, not 24")
        version, payload, count = struct.unpack_from("<HHI", answer)
        if version != _VERSION:
            raise self._wrong(f"it speaks version {version} of the protocol, this is version {_VERSION}")
        self._check_digest(answer[8:].hex(), digest)
        if payload < _LEAST_PAYLOAD or count != max(1, layers):
            raise self._wrong(f"it takes {payload} bytes in a frame and has {count} layers, the build {layers}")
        self._most = min(payload, MAXIMUM_PAYLOAD)
        self._layers, self._session = count, name
        self._ask(Kind.RESET)

    def write(self, port: int, content: bytes) -> None:
        step = self._most - 8
        for offset in range(0, len(content), step):
            part = content[offset : offset + step]
            self._sized(self._ask(Kind.WRITE, struct.pack("<HHI", port, 0, offset) + part), 0)

    def infer(self) -> tuple[int, Sequence[int]]:
        self._number += 1
        (total,) = struct.unpack("<Q", self._sized(self._ask(Kind.RUN, struct.pack("<I", self._number), 8), 8))
        layers: list[int] = []
        while len(layers) < self._layers:
            count = min(self._layers - len(layers), self._most // 8)
            answer = self._ask(Kind.CYCLES, struct.pack("<I", len(layers)), 8 * count)
            layers += struct.unpack(f"<{count}Q", self._sized(answer, 8 * count))
        return total, layers

    def read(self, port: int, nbytes: int) -> bytes:
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
            try:
                frame = self._answer(request, patience)
            except LineGone as gone:
                self._open_again(gone)
                frame = None
            if frame is not None and frame.kind == kind | ANSWER:
                return frame.payload
            if frame is not None:
                raise self._wrong(f"it refuses the request {kind.name} of {len(payload)} bytes")
        raise self._silent(kind, attempts, attempts * patience)

    def _answer(self, request: bytes, seconds: float) -> Frame | None:
        """The answer to an encoded request that is sent once, or the board's refusal; None when neither comes in time.
        Raises BoardError, of it LineGone where the line is cut."""
        _, kind, sequence, _ = _HEAD.unpack_from(request)
        self._link.write(request)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            content = self._link.read(left)
            self._heard += len(content)
            for frame in self._decoder.feed(content):
                if frame.sequence == sequence and frame.kind in (kind | ANSWER, REFUSED):
                    return frame
        return None

    def _open_again(self, gone: LineGone) -> None:
        """Open the line again, and see that the board is where it was. Raises BoardError where the line does not come
        again, or the board has begun anew; `gone` where there was no session yet."""
        if not self._session:
            raise gone
        request = encode(Frame(Kind.SESSION, (self._sequence + 128) % 256))
        deadline = time.monotonic() + max(_GONE_SECONDS, self._timeout)
        while time.monotonic() < deadline:
            self._link.close()
            try:
                self._link, self._decoder = self._again(), Decoder()
                frame = self._answer(request, _ANSWER_SECONDS)
            except BoardError:  # not there yet, or gone again
                time.sleep(_PAUSE_SECONDS)
                continue
            if frame is None:
                continue
            if frame.kind == REFUSED or self._sized(frame.payload, 4) != struct.pack("<I", self._session):
                what = "the board began anew while the line was gone: what it was given and what it kept are lost"
                raise BoardError(what, where=self._link.where, hint="see whether it has lost power, and run again")
            return
        raise gone

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
        hint = "make the firmware again from this build: make board BOARD_IO=file.c"
        return BoardError(f"the board does not do what the protocol says: {what}", where=self._link.where, hint=hint)


def open_board(board: Board, manifest: Mapping[str, Any], isa: str, elf: Path) -> BoardSession:
    """Bring the firmware of a build to a board if that is asked for, and begin to speak to it.

    `isa` is the instruction set of its core; `elf` need not be there where it is neither loaded nor debugged.

    Raises:
        DovetailError: it cannot be reached, does not answer, or has another firmware.
    """
    if board.load:
        load_firmware(board, elf)
    kind = board.where.partition(":")[0]
    opened = partial(open_agent, board, secrets.token_hex(16)) if kind == "agent" else partial(open_link, board.where)
    if kind == "gdb":
        link = server_of(board, elf)
    else:
        link = opened(elf.read_bytes()) if kind == "agent" and board.io is not None else opened()
    try:
        if kind == "gdb":
            return GdbSession(link, manifest, isa, elf, board.timeout)
        return FrameSession(link, str(manifest["digest"]), len(manifest["layers"]), board.timeout, opened)
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
