"""A rack of elements on a line: what whoever manages them answers, in the frames of every board and two kinds more.

docs/agent.md has the frames byte by byte; mesh/runtime/mesh_manager.c is the same in C. A request may come twice, and
carrying it out again changes nothing. What comes over the line is bounded.
"""

from __future__ import annotations

import enum
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from dovetail.errors import DovetailError
from dovetail.records import Record
from dovetail.sim.frames import ANSWER, MAXIMUM_PAYLOAD, REFUSED, VERSION, Decoder, Frame, FrameKind, encode
from dovetail.sim.line import Link

ROOM = 8
"""Inputs of a stream that a rack of this file takes at once."""
MOST_LOADED = 256 << 20
"""Bytes that may be loaded into a rack, and given to it as inputs."""


class LoadKind(enum.IntEnum):
    """Kind of the content of a LOAD."""

    NOTHING = 0
    """Forget all there is."""
    PROGRAM = 1
    """By number, an ELF file."""
    DATA = 2
    """Data of an element."""
    TABLE = 3
    """An element's program number, and of each of its pieces the section, and where header and transfers lie: in the
    element's data, or in the DRAM where the network runs in several sections."""
    ROUTES = 4
    """A chip's routing table: counts of entries and sets, then both."""
    TENSOR = 5
    """By number: bytes of a tensor in DRAM, for one input."""
    DRAM = 6
    """A chip's DRAM: what elements load from it."""


class RefusedError(Exception):
    """A request that cannot be carried out, and why."""


@dataclass
class RackContents:
    """Everything loaded into a rack: of each kind by number, or by the word of an element or chip."""

    parts: dict[int, dict[int, bytearray]] = field(default_factory=lambda: {kind: {} for kind in LoadKind if kind})

    def add(self, what: int, number: int, offset: int, content: bytes) -> None:
        """Carry out LOAD; raises RefusedError."""
        if what not in self.parts:
            raise RefusedError(f"nothing is loaded as {what}")
        known = self.parts[what].get(number, bytearray())
        if offset > len(known) or self.nbytes() + len(content) > MOST_LOADED:
            raise RefusedError(f"byte {offset} does not follow the loaded bytes, or the content is too large")
        known[offset : offset + len(content)] = content
        self.parts[what][number] = known

    def nbytes(self) -> int:
        """Bytes of everything."""
        return sum(len(content) for one in self.parts.values() for content in one.values())


class RackRun(Record):
    """Results and clock cycles of a run."""

    results: Mapping[int, bytes]
    """Tensors in DRAM that were stored, by number; of all inputs, one after the other."""
    clocks: Sequence[int]
    """[inputs, pieces, 4] when each began, gave its slots back, sent, and when its element was free; from the beginning
    of the stream, or of the piece's section where there are several."""
    cycles: int
    """Clock cycles of the slowest element."""


class RackBackend(ABC):
    """The backend that runs the elements: boards, or an emulator."""

    @abstractmethod
    def check(self, loaded: RackContents) -> None:
        """Look at what was loaded; raises RefusedError or DovetailError where it cannot run."""

    @abstractmethod
    def run(self, loaded: RackContents, inputs: Sequence[Mapping[int, bytes]]) -> RackRun:
        """Compute some inputs, of each the tensors by number; raises as `check`."""


class Rack:
    """Answers frames. Whoever drives it may go and come again: it stays what it is."""

    def __init__(self, machine: RackBackend, room: int = ROOM) -> None:
        self._machine, self._room = machine, room
        self.loaded = RackContents()
        self.digest = bytes(16)
        """Digest of the build it has; zeros for none."""
        self.runs = 0
        """How often inputs were computed."""
        self._session = self._last = 0
        self._tensors: dict[int, bytearray] = {}
        self._ran = RackRun({}, (), 0)

    def answer(self, frame: Frame) -> Frame:
        """The answer to a request."""
        try:
            return Frame((frame.kind | ANSWER) & 0xFF, frame.sequence, self._carried_out(frame.kind, frame.payload))
        except (RefusedError, DovetailError) as error:
            return Frame(REFUSED, frame.sequence, str(error).encode("ascii", "replace")[:400])

    def serve(self, line: socket.socket) -> None:
        """Answer what comes over a line until it is closed."""
        decoder = Decoder()
        with line, suppress(OSError):
            while content := line.recv(1 << 16):
                for frame in decoder.feed(content):
                    line.sendall(encode(self.answer(frame)))

    def _carried_out(self, kind: int, payload: bytes) -> bytes:
        try:
            if kind == FrameKind.HELLO:
                return self._hello(*struct.unpack("<I", payload))
            if kind == FrameKind.SESSION and not payload:
                return struct.pack("<I", self._session)
            if kind == FrameKind.RESET and not payload:
                return b""
            if kind == FrameKind.LOAD:
                what, number, offset = struct.unpack_from("<III", payload)
                return self._load(what, number, offset, payload[12:])
            if kind == FrameKind.START and len(payload) == 16:
                return self._start(payload)
            if kind == FrameKind.WRITE:
                number, _, offset = struct.unpack_from("<HHI", payload)
                return self._write(number, offset, payload[8:])
            if kind == FrameKind.RUN:
                return self._run(*struct.unpack("<II", payload))
            if kind == FrameKind.READ:
                return self._read(*struct.unpack("<HHI", payload))
            if kind == FrameKind.CYCLES:
                (first,) = struct.unpack("<I", payload)
                some = self._ran.clocks[first : first + MAXIMUM_PAYLOAD // 8]
                return struct.pack(f"<{len(some)}Q", *some)
        except struct.error:
            pass
        raise RefusedError(f"a request of kind {kind} and {len(payload)} bytes is none")

    def _hello(self, name: int) -> bytes:
        self._session, self._last = name, 0
        return struct.pack("<HHI", VERSION, MAXIMUM_PAYLOAD, len(self.loaded.parts[LoadKind.DATA])) + self.digest

    def _load(self, what: int, number: int, offset: int, content: bytes) -> bytes:
        self.digest = bytes(16)
        if what == LoadKind.NOTHING:
            self.loaded, self._tensors, self._ran = RackContents(), {}, RackRun({}, (), 0)
        else:
            self.loaded.add(what, number, offset, content)
        return b""

    def _start(self, digest: bytes) -> bytes:
        self._machine.check(self.loaded)
        self.digest = digest
        self._tensors = {number: bytearray(self._room * size) for number, size in self._sizes().items()}
        return struct.pack("<I", self._room)

    def _sizes(self) -> dict[int, int]:
        sizes = {
            number: int.from_bytes(content, "little") for number, content in self.loaded.parts[LoadKind.TENSOR].items()
        }
        if sum(sizes.values()) * self._room > MOST_LOADED:
            raise RefusedError(f"{sum(sizes.values())} bytes of inputs are too many")
        return sizes

    def _write(self, number: int, offset: int, content: bytes) -> bytes:
        tensor = self._tensors.get(number, bytearray())
        if not any(self.digest) or offset + len(content) > len(tensor):
            raise RefusedError(f"tensor {number} has no byte {offset + len(content)}, or nothing was started")
        tensor[offset : offset + len(content)] = content
        return b""

    def _run(self, number: int, count: int) -> bytes:
        if not any(self.digest) or not 0 < count <= self._room:
            raise RefusedError(f"{count} inputs are not 1 to {self._room}, or nothing was started")
        if number != self._last:
            sizes = self._sizes()
            inputs = [
                {n: bytes(t[turn * sizes[n] : (turn + 1) * sizes[n]]) for n, t in self._tensors.items()}
                for turn in range(count)
            ]
            self._ran = self._machine.run(self.loaded, inputs)
            self._last, self.runs = number, self.runs + 1
        return struct.pack("<Q", self._ran.cycles)

    def _read(self, number: int, count: int, offset: int) -> bytes:
        found = self._ran.results.get(number)
        if found is None or count > MAXIMUM_PAYLOAD or offset + count > len(found):
            raise RefusedError(f"result {number} has no byte {offset + count}")
        return found[offset : offset + count]


def rack_link(rack: Rack, where: str) -> Link:
    """A line to a rack in this process, which is served until the line is closed."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    threading.Thread(target=rack.serve, args=(theirs,), daemon=True).start()
    return Link(ours.detach(), where)
