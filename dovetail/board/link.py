"""Lines to a board: a serial port or a TCP connection, as streams of bytes with time-outs."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import time
from types import TracebackType

from dovetail.board import KINDS
from dovetail.errors import BoardError

DEFAULT_BAUD = 115_200
_CONNECT_SECONDS = 5.0
_WRITE_SECONDS = 10.0
"""How long bytes may wait to be taken, beyond what the line's own speed needs."""
_MOST = 1 << 16


class Link:
    """An open line.

    Args:
        file: its file descriptor, non-blocking; closed with the line.
        where: its name, for messages.
        seconds_per_byte: how slow the line is.
    """

    def __init__(self, file: int, where: str, seconds_per_byte: float = 0.0) -> None:
        self._file: int | None = file
        self.where = where
        self.seconds_per_byte = seconds_per_byte

    def write(self, content: bytes) -> None:
        """Send all bytes.

        Raises:
            BoardError: the other end is gone, or takes nothing.
        """
        deadline = time.monotonic() + _WRITE_SECONDS + len(content) * self.seconds_per_byte
        view = memoryview(content)
        try:
            while view:
                if not select.select([], [self._open()], [], max(0.0, deadline - time.monotonic()))[1]:
                    raise BoardError(f"the board takes no bytes: {len(view)} of {len(content)} are not sent",
                                     where=self.where, hint="look at flow control and at what else uses the line")
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self._open(), view) :]
        except OSError as error:
            raise self._gone(error) from None

    def read(self, seconds: float) -> bytes:
        """Bytes that come within so many seconds, at least one; none when nothing comes.

        Raises:
            BoardError: the other end is gone.
        """
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

    def close(self) -> None:
        """Close the line; may be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Link:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _open(self) -> int:
        if self._file is None:
            raise BoardError("the line is closed", where=self.where, hint="open it again")
        return self._file

    def _gone(self, error: OSError | None) -> BoardError:
        reason = f": {error.strerror}" if error is not None and error.strerror else ""
        return BoardError(f"the other end of the line is gone{reason}", where=self.where,
                          hint="see whether the board is powered and the cable or server is still there")


def open_link(where: str) -> Link:
    """Open the line to a board.

    Args:
        where: "serial:/dev/ttyX[:BAUD]" or "tcp:HOST:PORT".

    Raises:
        BoardError: it is written otherwise, or cannot be opened.
    """
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
        raise BoardError(f"nobody answers at {host}, port {port}: {error}", where=where,
                         hint="start the server, or give the address it listens at") from None


def _serial(path: str, baud: int, where: str) -> Link:
    """Open a serial port: 8 bits, no parity, no flow control."""
    try:
        import termios
    except ImportError:
        raise BoardError("serial ports need termios, which this system has not", where=where,
                         hint="put a server such as ser2net before it and use tcp:HOST:PORT") from None
    speed = getattr(termios, f"B{baud}", None)
    if speed is None:
        known = sorted(int(name[1:]) for name in dir(termios) if re.fullmatch(r"B[0-9]{4,}", name))
        raise BoardError(f"{baud} is no speed of a serial line", where=where,
                         hint=f"use one of {', '.join(map(str, known))}")
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
        raise BoardError(f"the serial port cannot be opened: {error.args[-1]}", where=where,
                         hint="see that it exists, is a serial port, and that you may use it") from None
    return Link(file, where, 10 / baud)
