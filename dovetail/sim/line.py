"""Boards: how one is named, the line to it as a stream of bytes with time-outs, and what a session with one offers."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from dovetail.documented import document
from dovetail.errors import BoardError
from dovetail.records import Record
from dovetail.sim.protocol import Buffers, InferenceResult, Marker, SimulationResult, Simulator

KINDS = ("serial:/dev/ttyX[:BAUD]", "tcp:HOST:PORT", "gdb[:HOST:PORT]", "agent:HOST[:PORT]/BOARD")
"""Forms of a board's name."""
DEFAULT_BAUD = 115_200
_CONNECT_SECONDS = 5.0
_WRITE_SECONDS = 10.0
"""How long bytes may wait to be taken, beyond what the line's own speed needs."""
_MOST = 1 << 16
_MOST_SECONDS = 86_400


class Board(Record):
    """Address of a board, and the way its firmware gets there."""

    where: str
    """Name of the board, in one of the forms of `KINDS`."""
    io: Path | None = None
    """C file with the functions of runtime/board.h, from which firmware is made; None if the board has its firmware."""
    load: str = ""
    """Command that brings the firmware to the board, with {elf} for its file; empty where it is there already."""
    timeout: float = 60.0
    """Seconds the longest inference may take."""
    secret: Path | None = None
    """File with the agent's secret; None without an agent."""

    def check(self) -> None:
        """Raise BoardError where the time-out makes no sense."""
        if not 0 < self.timeout <= _MOST_SECONDS:
            what = f"a time-out is more than 0 and at most {_MOST_SECONDS} s, not {self.timeout:g} s"
            raise BoardError(what, where=self.where, hint="give another --timeout")


class LineGone(BoardError):
    """The other end of a line is gone; it may come again."""


class Link:
    """An open line, by its file descriptor, which is non-blocking and closed with it; `where` names it in messages.
    Raises BoardError where the other end is gone, or takes nothing."""

    def __init__(self, file: int, where: str, seconds_per_byte: float = 0.0) -> None:
        self._file: int | None = file
        self.where = where
        self.seconds_per_byte = seconds_per_byte

    def write(self, content: bytes) -> None:
        """Send all bytes; raises BoardError if the line is lost.\n\nArgs:\n    content: the bytes.

        Args:
            content: the bytes.
        """
        deadline = time.monotonic() + _WRITE_SECONDS + len(content) * self.seconds_per_byte
        view = memoryview(content)
        try:
            while view:
                if not select.select([], [self._open()], [], max(0.0, deadline - time.monotonic()))[1]:
                    what = f"the board takes no bytes: {len(view)} of {len(content)} are not sent"
                    raise BoardError(what, where=self.where, hint="look at flow control and at what else uses the line")
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self._open(), view) :]
        except OSError as error:
            raise self._gone(error) from None

    def read(self, seconds: float) -> bytes:
        """Bytes that come within so many seconds, at least one; none when nothing comes."""
        try:
            if not select.select([self._open()], [], [], max(0.0, seconds))[0]:
                return b""
            content = os.read(self._open(), _MOST)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise self._gone(error) from None
        if not content:
            raise self._gone(None)
        return content

    def fileno(self) -> int:
        """The file descriptor, for `select`; raises BoardError where it is closed."""
        return self._open()

    def close(self) -> None:
        """Close the line; may be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        if self._file is None:
            raise BoardError("the line is closed", where=self.where, hint="open it again")
        return self._file

    def _gone(self, error: OSError | None) -> LineGone:
        reason = f": {error.strerror}" if error is not None and error.strerror else ""
        hint = "see whether the board is powered and the cable or server is still there"
        return LineGone(f"the other end of the line is gone{reason}", where=self.where, hint=hint)


def open_link(where: str) -> Link:
    """Open the line to a board "serial:/dev/ttyX[:BAUD]" or "tcp:HOST:PORT"; raises BoardError for other names, and
    where it cannot be opened."""
    kind, _, rest = where.partition(":")
    if kind == "tcp":
        return connect(*host_and_port(rest, where), where)
    if kind != "serial" or not rest:
        raise unknown(where)
    path, _, digits = rest.rpartition(":")
    path, baud = (path, int(digits)) if path and digits.isascii() and digits.isdigit() else (rest, DEFAULT_BAUD)
    return _serial(path, baud, where)


def unknown(where: str) -> BoardError:
    """The error for a board that is named in no known way."""
    return BoardError("this names no board", where=f"'{where}'", hint=f"write it as one of {', '.join(KINDS)}")


def host_and_port(text: str, where: str) -> tuple[str, int]:
    """The parts of "HOST:PORT"; raises BoardError."""
    found = re.fullmatch(r"\[?([^\[\]]+)\]?:([0-9]{1,5})", text)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise unknown(where)
    return found[1], int(found[2])


def connect(host: str, port: int, where: str) -> Link:
    """Open a TCP connection; raises BoardError."""
    try:
        with socket.create_connection((host, port), _CONNECT_SECONDS) as made:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setblocking(False)
            return Link(made.detach(), where)
    except (OSError, UnicodeError) as error:
        hint = "start the server, or give the address it listens at"
        raise BoardError(f"nobody answers at {host}, port {port}: {error}", where=where, hint=hint) from None


def _serial(path: str, baud: int, where: str) -> Link:
    """Open a serial port: 8 bits, no parity, no flow control."""
    try:
        import termios
    except ImportError:
        hint = "put a server such as ser2net before it and use tcp:HOST:PORT"
        raise BoardError("serial ports need termios, which this system has not", where=where, hint=hint) from None
    speed = getattr(termios, f"B{baud}", None)
    if speed is None:
        known = sorted(int(name[1:]) for name in dir(termios) if re.fullmatch(r"B[0-9]{4,}", name))
        hint = f"use one of {', '.join(map(str, known))}"
        raise BoardError(f"{baud} is no speed of a serial line", where=where, hint=hint)
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        control: list[bytes | int] = [0] * len(termios.tcgetattr(file)[6])
        control[termios.VMIN] = 1  # no byte is "try again", and not the end
        modes = termios.CS8 | termios.CREAD | termios.CLOCAL
        termios.tcsetattr(file, termios.TCSANOW, [0, 0, modes, 0, speed, speed, control])
        termios.tcflush(file, termios.TCIOFLUSH)
    except (OSError, termios.error) as error:
        if file >= 0:
            os.close(file)
        hint = "see that it exists, is a serial port, and that you may use it"
        raise BoardError(f"the serial port cannot be opened: {error.args[-1]}", where=where, hint=hint) from None
    return Link(file, where, 10 / baud)


class BoardSession(Simulator):
    """A board with the firmware of a build, at its beginning; its line is closed with the session."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @abstractmethod
    def write(self, port: int, content: bytes) -> None:
        """Set an input, by its number in the build; raises BoardError, as all do."""

    @abstractmethod
    def infer(self) -> tuple[int, Sequence[int]]:
        """Run one inference; its cycles in all, and of each layer."""

    @abstractmethod
    def read(self, port: int, nbytes: int) -> bytes:
        """An output, by its number in the build."""

    def run(self, inputs: Sequence[Buffers], outputs: Mapping[str, int]) -> SimulationResult:
        """See `Simulator.run`; inputs and outputs are in the order of the build."""
        return SimulationResult(tuple(self._infer(given, outputs) for given in inputs))

    def close(self) -> None:
        """Close the line; may be called again."""
        self._link.close()

    def _infer(self, given: Buffers, wanted: Mapping[str, int]) -> InferenceResult:
        for port, content in enumerate(given.values()):
            self.write(port, content)
        total, layers = self.infer()
        outputs = {name: self.read(port, nbytes) for port, (name, nbytes) in enumerate(wanted.items())}
        if not total:  # the board has no counter
            return InferenceResult(outputs)
        times = pairwise(accumulate(layers, initial=0))
        markers = tuple(Marker(layer, start, end, 0, 0) for layer, (start, end) in enumerate(times))
        return InferenceResult(outputs, total_cycles=total, markers=markers)

    def _check_digest(self, found: str, expected: str) -> None:
        """Raise BoardError when the board has the firmware of another build."""
        if found != expected:
            what = f"the board has the firmware of another build: its digest is {found}, that of the build {expected}"
            hint = "make board BOARD_IO=file.c in this build, and load that firmware"
            raise BoardError(what, where=self._link.where, hint=hint)


document(__name__)
