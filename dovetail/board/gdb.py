"""Runs a board's firmware through a debugger's server (OpenOCD, J-Link, QEMU): inputs and outputs through memory.

The protocol is GDB's remote serial protocol ("Debugging with GDB", appendix E). The firmware is that of `make board`:
it is stopped where main begins; then `board_infer` is called as a debugger calls a function, with main as the place to
return to, where a breakpoint is. What the server says is not trusted: answers are bounded.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dovetail.board import Board
from dovetail.board.link import Link, connect, host_and_port, unknown
from dovetail.board.session import check_digest
from dovetail.build.elf import Symbol, load_image, symbols
from dovetail.build.instruction_sets import instruction_set
from dovetail.errors import BoardError

if TYPE_CHECKING:
    from dovetail.run import Build

DEFAULT_SERVER = "127.0.0.1:3333"
"""Where OpenOCD listens."""
_ANSWER_SECONDS = 5.0
_ATTEMPTS = 4
_MOST_ANSWER = 1 << 14
"""Bytes of an answer."""
_PART = 512
"""Bytes of memory read or written at once; every server takes packets of 1100 bytes."""


@dataclass(frozen=True, slots=True)
class _Registers:
    """Numbers of registers as servers know them (gdb/features: riscv/32bit-cpu.xml, arm/arm-m-profile.xml), and the
    machine's name in an ELF file."""

    pc: int
    link: int
    thumb: int
    machine: str


_REGISTERS: Mapping[str, _Registers] = {
    "riscv": _Registers(32, 1, 0, "EM_RISCV"),
    "arm": _Registers(15, 14, 1, "EM_ARM"),
}


class Remote:
    """One debugger's server.

    Args:
        link: the connection to it.
        patience: seconds an answer may take while the core stands.
    """

    def __init__(self, link: Link, patience: float) -> None:
        self._link = link
        self._patience = patience
        self._held = bytearray()

    def ask(self, text: str) -> str:
        """Send a packet, again while it is refused; return the answer.

        Raises:
            BoardError: none comes in time, or it is too long.
        """
        packet = _packet(text)
        for _ in range(_ATTEMPTS):
            self._link.write(packet)
            answer = self._answer(time.monotonic() + self._patience)
            if answer is not None:
                return answer
        raise self._error(f"the debugger's server refuses the packet {text[:24]!r} {_ATTEMPTS} times")

    def done(self, text: str) -> None:
        """Send a packet that is answered by OK; raises BoardError."""
        answer = self.ask(text)
        if answer != "OK":
            said = f"answers {answer[:24]!r} to" if answer else "does not know"
            raise self._error(f"the debugger's server {said} {text[:24]!r}")

    def read(self, address: int, nbytes: int) -> bytes:
        """Memory; raises BoardError."""
        found = b""
        while len(found) < nbytes:
            count = min(_PART, nbytes - len(found))
            answer = self.ask(f"m{address + len(found):x},{count:x}")
            try:
                part = bytes.fromhex(answer)
            except ValueError:
                part = b""
            if len(part) != count:
                raise self._error(f"{count} bytes at {address + len(found):#x} cannot be read: {answer[:24]!r}")
            found += part
        return found

    def write(self, address: int, content: bytes) -> None:
        """Write memory; raises BoardError."""
        for offset in range(0, len(content), _PART):
            part = content[offset : offset + _PART]
            self.done(f"M{address + offset:x},{len(part):x}:{part.hex()}")

    def resume(self, seconds: float) -> None:
        """Let the core run until it stops by itself; raises BoardError when it does not in so many seconds."""
        self._link.write(_packet("c"))
        deadline = time.monotonic() + seconds
        while True:
            try:
                answer = self._answer(deadline)
            except BoardError:
                self._link.write(b"\x03")  # stop it, so that the next one finds it stopped
                raise
            if answer is None:
                self._link.write(_packet("c"))
            elif answer[:1] in ("T", "S"):
                return
            elif answer[:1] != "O":  # O: what the firmware prints
                raise self._error(f"the core cannot go on: the server says {answer[:24]!r}")

    def _answer(self, deadline: float) -> str | None:
        """The next packet; None where the server wants the last one again."""
        while True:
            start, end = self._held.find(b"$"), self._held.find(b"#")
            if start < 0 and self._held[:1] == b"-":
                self._held.clear()
                return None
            if 0 <= start < end and len(self._held) >= end + 3:
                content, check = bytes(self._held[start + 1 : end]), bytes(self._held[end + 1 : end + 3])
                del self._held[: end + 3]
                good = check.lower() == b"%02x" % (sum(content) & 0xFF)
                self._link.write(b"+" if good else b"-")
                if good:
                    return content.decode("ascii", "replace")
                continue
            if 0 <= end < start or len(self._held) > _MOST_ANSWER:
                if len(self._held) > _MOST_ANSWER:
                    raise self._error(f"an answer of the debugger's server is longer than {_MOST_ANSWER} bytes")
                del self._held[:start]
                continue
            left = deadline - time.monotonic()
            content = self._link.read(left) if left > 0 else b""
            if not content:
                raise self._error("the debugger's server does not answer, or the core did not stop in time")
            self._held += content

    def _error(self, what: str) -> BoardError:
        return BoardError(what, where=self._link.where,
                          hint="see what the server itself says; give a longer --timeout if the inference takes longer")


def _packet(text: str) -> bytes:
    return f"${text}#{sum(text.encode()) & 0xFF:02x}".encode()


class GdbSession:
    """A board whose core stands at main; see `session.Session`.

    Args:
        link: the connection to the server; closed with the session.
        build: what the firmware was made from.
        elf: the firmware.
        timeout: seconds the longest inference may take.

    Raises:
        DovetailError: the firmware is missing or another one, or the server does not do its part.
    """

    def __init__(self, link: Link, build: Build, elf: Path, timeout: float) -> None:
        self._link = link
        self._remote = Remote(link, min(_ANSWER_SECONDS, timeout))
        self._timeout = timeout
        self._manifest = build.manifest
        self._registers = _REGISTERS[instruction_set(build.target.core.isa).family]
        self._symbols = symbols(elf)
        entry, segments = load_image(elf, self._registers.machine)
        wide = self._registers.thumb == 0 and "c" not in build.target.core.isa.removeprefix("rv32")
        self._breakpoint = f"{self._symbol('main'):x},{4 if wide else 2}"
        self._remote.ask("?")
        for segment in segments:
            self._bring(segment.address, segment.data)
        self._stop = self._symbol("main")
        if self._remote.ask(f"Z0,{self._breakpoint}") != "OK":
            self._remote.done(f"Z1,{self._breakpoint}")
        self._go(entry & ~self._registers.thumb)
        digest = self._remote.read(self._symbol("board_digest"), 16).hex()
        check_digest(digest, str(build.manifest["digest"]), link.where)

    def write(self, port: int, content: bytes) -> None:
        """See `Session`."""
        self._remote.write(self._place(self._manifest["inputs"][port]), content)

    def infer(self) -> tuple[int, Sequence[int]]:
        """See `Session`."""
        self._set(self._registers.link, self._stop | self._registers.thumb)
        self._go(self._symbol("board_infer"))
        count = max(1, len(self._manifest["layers"]))
        (total,) = struct.unpack("<Q", self._remote.read(self._symbol("board_total_cycles"), 8))
        layers = self._remote.read(self._symbol("board_layer_cycles"), 8 * count)
        return total, struct.unpack(f"<{count}Q", layers)

    def read(self, port: int, nbytes: int) -> bytes:
        """See `Session`."""
        return self._remote.read(self._place(self._manifest["outputs"][port]), nbytes)

    def __enter__(self) -> GdbSession:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the breakpoint away, if the server still listens, and close the connection."""
        if error is None:
            with contextlib.suppress(BoardError):
                if self._remote.ask(f"z0,{self._breakpoint}") != "OK":
                    self._remote.ask(f"z1,{self._breakpoint}")
        self._link.close()

    def _bring(self, address: int, content: bytes) -> None:
        """See that memory has these bytes; flash is written by whoever can."""
        if self._remote.read(address, len(content)) == content:
            return
        self._remote.write(address, content)
        if self._remote.read(address, len(content)) != content:
            what = f"{len(content)} bytes of the firmware at {address:#x} are not on the board"
            raise BoardError(f"{what}, and cannot be written there as into memory", where=self._link.where,
                             hint="load the firmware into flash first, e.g. by --load 'openocd ... program {elf}'")

    def _go(self, address: int) -> None:
        """Run from an address to where main begins."""
        self._set(self._registers.pc, address)
        self._remote.resume(self._timeout)
        answer = self._remote.ask(f"p{self._registers.pc:x}")
        if answer.lower() != struct.pack("<I", self._stop).hex():
            raise BoardError(f"the core stopped at {_address(answer)} instead of {self._stop:#x}, where main begins",
                             where=self._link.where, hint="it may have met a fault, or another breakpoint")

    def _set(self, register: int, value: int) -> None:
        self._remote.done(f"P{register:x}={struct.pack('<I', value).hex()}")

    def _symbol(self, name: str) -> int:
        symbol: Symbol | None = self._symbols.get(name)
        if symbol is None:
            raise BoardError(f"the firmware has no symbol '{name}'", where=self._link.where,
                             hint="make it with make board BOARD_IO=file.c, and keep its symbols")
        return symbol.address

    def _place(self, port: Mapping[str, object]) -> int:
        return self._symbol(str(port["symbol"])) + int(str(port["offset"]))


def _address(answer: str) -> str:
    """A register's value as the server says it, its bytes in order of addresses."""
    try:
        return f"{int.from_bytes(bytes.fromhex(answer[:8]), 'little'):#x}"
    except ValueError:
        return f"{answer[:24]!r}"


def open_gdb(board: Board, build: Build, elf: Path) -> GdbSession:
    """Connect to a debugger's server and bring the board to where main begins.

    Args:
        board: named "gdb" or "gdb:HOST:PORT".
        build: what the firmware was made from.
        elf: the firmware.

    Raises:
        DovetailError: as `GdbSession` does.
    """
    kind, colon, rest = board.where.partition(":")
    if kind != "gdb" or (colon and not rest):
        raise unknown(board.where)
    if not elf.is_file():
        raise BoardError(f"there is no firmware {elf}", where=board.where,
                         hint="make board BOARD_IO=file.c in the build, or give --board-io file.c")
    link = connect(*host_and_port(rest or DEFAULT_SERVER, board.where), board.where)
    try:
        return GdbSession(link, build, elf, board.timeout)
    except BaseException:
        link.close()
        raise
