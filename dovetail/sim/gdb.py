"""Runs a board's firmware through a debugger's server (OpenOCD, J-Link, QEMU): inputs and outputs through memory.

The protocol is GDB's remote serial protocol ("Debugging with GDB", appendix E). The firmware is that of `make board`:
it is stopped where main begins; then `board_infer` is called as a debugger calls a function, with main as the place to
return to, where a breakpoint is. What the server says is not trusted: answers are bounded.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from dovetail.codegen.build.elf import load_image, symbols
from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.manifest import BuildManifest, BuildPort
from dovetail.errors import BoardError
from dovetail.sim.architecture import architecture_of
from dovetail.sim.line import Board, BoardSession, Link, connect, host_and_port, unknown

DEFAULT_SERVER = "127.0.0.1:3333"
"""Port OpenOCD listens on."""
_ANSWER_SECONDS = 5.0
_ATTEMPTS = 4
_MOST_ANSWER = 1 << 14
"""Bytes of an answer."""
_MOST_DESCRIPTION = 1 << 16
"""Bytes of the description of registers."""
_PART = 512
"""Bytes of memory read or written at once; every server takes packets of 1100 bytes."""


_REGISTERS = {"riscv": (32, 1, 0), "arm": (15, 14, 1)}
"""By family of cores the numbers of PC and link register as servers know them (gdb/features: riscv/32bit-cpu.xml,
arm/arm-m-profile.xml), and bit 0 of the address of code."""


class Remote:
    """One debugger's server; an answer may take `patience` seconds while the core stands."""

    def __init__(self, link: Link, patience: float) -> None:
        self._link, self._patience, self._held = link, patience, bytearray()

    def ask(self, text: str) -> str:
        """Send a packet, again while it is refused; return the answer. Raises BoardError, as all here do."""
        packet = _packet(text)
        for _ in range(_ATTEMPTS):
            self._link.write(packet)
            answer = self._answer(time.monotonic() + self._patience)
            if answer is not None:
                return answer
        raise self._error(f"the debugger's server refuses the packet {text[:24]!r} {_ATTEMPTS} times")

    def describe(self) -> None:
        """Ask what registers there are, as debuggers do first: some servers (QEMU) give single registers only then. The
        numbers are those of `_REGISTERS` in any case."""
        if "qXfer:features:read+" not in self.ask("qSupported:xmlRegisters=arm,riscv"):
            return
        place, answer = 0, "m"
        while answer[:1] == "m" and place < _MOST_DESCRIPTION:
            answer = self.ask(f"qXfer:features:read:target.xml:{place:x},{_PART:x}")
            place += len(answer) - 1

    def done(self, text: str) -> None:
        """Send a packet that is answered by OK."""
        answer = self.ask(text)
        if answer != "OK":
            said = f"answers {answer[:24]!r} to" if answer else "does not know"
            raise self._error(f"the debugger's server {said} {text[:24]!r}")

    def read(self, address: int, nbytes: int) -> bytes:
        """Memory."""
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
        """Write memory."""
        for offset in range(0, len(content), _PART):
            part = content[offset : offset + _PART]
            self.done(f"M{address + offset:x},{len(part):x}:{part.hex()}")

    def resume(self, seconds: float) -> None:
        """Let the core run until it stops by itself, for so many seconds at most."""
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
        hint = "see what the server itself says; give a longer --timeout if the inference takes longer"
        return BoardError(what, where=self._link.where, hint=hint)


def _packet(text: str) -> bytes:
    return f"${text}#{sum(text.encode()) & 0xFF:02x}".encode()


class GdbSession(BoardSession):
    """A board whose core, of an instruction set, stands at main; the longest inference may take `timeout` seconds.

    Raises:
        DovetailError: the firmware is missing or not that of the manifest, or the server does not do its part.
    """

    def __init__(self, link: Link, manifest: BuildManifest, isa: str, elf: Path, timeout: float) -> None:
        super().__init__(link)
        self._remote = Remote(link, min(_ANSWER_SECONDS, timeout))
        self._timeout = timeout
        self._manifest = manifest
        self._pc, self._return, self._thumb = _REGISTERS[instruction_set(isa).family]
        self._symbols = symbols(elf)
        entry, segments = load_image(elf, architecture_of(isa).elf_machine, architecture_of(isa).bits)
        wide = self._thumb == 0 and "c" not in isa.removeprefix("rv32")
        self._breakpoint = f"{self._symbol('main'):x},{4 if wide else 2}"
        self._remote.describe()
        self._remote.ask("?")
        for address, content in segments:
            self._bring(address, content)
        self._stop = self._symbol("main")
        if self._remote.ask(f"Z0,{self._breakpoint}") != "OK":
            self._remote.done(f"Z1,{self._breakpoint}")
        self._go(entry & ~self._thumb)
        self._check_digest(self._remote.read(self._symbol("board_digest"), 16).hex(), manifest.digest)

    def write(self, port: int, content: bytes) -> None:
        self._remote.write(self._place(self._manifest.inputs[port]), content)

    def infer(self) -> tuple[int, Sequence[int]]:
        self._set(self._return, self._stop | self._thumb)
        self._go(self._symbol("board_infer"))
        count = max(1, len(self._manifest.layers))
        (total,) = struct.unpack("<Q", self._remote.read(self._symbol("board_total_cycles"), 8))
        layers = self._remote.read(self._symbol("board_layer_cycles"), 8 * count)
        return total, struct.unpack(f"<{count}Q", layers)

    def read(self, port: int, nbytes: int) -> bytes:
        return self._remote.read(self._place(self._manifest.outputs[port]), nbytes)

    def __exit__(self, *raised: object) -> None:
        """Take the breakpoint away, if the server still listens, and close the connection."""
        if raised[0] is None:
            with contextlib.suppress(BoardError):
                if self._remote.ask(f"z0,{self._breakpoint}") != "OK":
                    self._remote.ask(f"z1,{self._breakpoint}")
        self.close()

    def _bring(self, address: int, content: bytes) -> None:
        """See that memory has these bytes; flash is written by whoever can."""
        if self._remote.read(address, len(content)) == content:
            return
        self._remote.write(address, content)
        if self._remote.read(address, len(content)) != content:
            what = f"{len(content)} bytes of the firmware at {address:#x} are not on the board"
            hint = "load the firmware into flash first, e.g. by --load 'openocd ... program {elf}'"
            raise BoardError(f"{what}, and cannot be written there as into memory", where=self._link.where, hint=hint)

    def _go(self, address: int) -> None:
        """Run from an address to where main begins."""
        self._set(self._pc, address)
        self._remote.resume(self._timeout)
        answer = self._remote.ask(f"p{self._pc:x}")
        if answer.lower() != struct.pack("<I", self._stop).hex():
            what = f"the core stopped at {_address(answer)} instead of {self._stop:#x}, where main begins"
            raise BoardError(what, where=self._link.where, hint="it may have met a fault, or another breakpoint")

    def _set(self, register: int, value: int) -> None:
        self._remote.done(f"P{register:x}={struct.pack('<I', value).hex()}")

    def _symbol(self, name: str) -> int:
        if name not in self._symbols:
            hint = "make it with make board BOARD_IO=file.c, and keep its symbols"
            raise BoardError(f"the firmware has no symbol '{name}'", where=self._link.where, hint=hint)
        return self._symbols[name].address

    def _place(self, port: BuildPort) -> int:
        return self._symbol(port.symbol) + port.offset


def _address(answer: str) -> str:
    """A register's value as the server says it, its bytes in order of addresses."""
    try:
        return f"{int.from_bytes(bytes.fromhex(answer[:8]), 'little'):#x}"
    except ValueError:
        return f"{answer[:24]!r}"


def server_of(board: Board, elf: Path) -> Link:
    """Connect to the debugger's server of a board named "gdb" or "gdb:HOST:PORT"; raises BoardError where it is named
    otherwise, there is no firmware, or nobody answers."""
    kind, colon, rest = board.where.partition(":")
    if kind != "gdb" or (colon and not rest):
        raise unknown(board.where)
    if not elf.is_file():
        hint = "make board BOARD_IO=file.c in the build, or give --board-io file.c"
        raise BoardError(f"there is no firmware {elf}", where=board.where, hint=hint)
    return connect(*host_and_port(rest or DEFAULT_SERVER, board.where), board.where)
