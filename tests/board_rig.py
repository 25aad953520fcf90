"""Boards for tests: the emitted firmware on a simulated chip with a UART, or as a process; lines with faults."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import SimulationError
from dovetail.run import ProjectBuild
from dovetail.sim.device import Activity, Bus, DeviceSpec, MemoryRegion, target_devices
from dovetail.sim.frames import Decoder, encode
from dovetail.sim.protocol import SimulationSetup
from dovetail.sim.worker import IssSession

UART_IO = Path(__file__).parent / "board" / "uart_io.c"
STDIO_IO = Path(__file__).parent / "board" / "stdio_io.c"
FLAGS = ("-std=c99", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")


class Uart:
    """Registers: bytes that wait (reading it waits for some, or a moment), data, cycles. Its line is TCP."""

    name = "uart"

    def __init__(self, bus: Bus, port: int) -> None:
        self._line = socket.create_connection(("127.0.0.1", port))
        self._held = bytearray()
        self._now = 0

    def reset(self) -> None:
        pass

    def read(self, offset: int, now: int) -> int:
        if offset == 8:
            return now & 0xFFFFFFFF
        if offset == 4:
            return self._held.pop(0)
        if not self._held and select.select([self._line], [], [], 0.2)[0]:
            content = self._line.recv(4096)
            if not content:
                raise SimulationError("the line is closed")
            self._held += content
        return len(self._held)

    def write(self, offset: int, value: int, now: int) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(bytes([value]))

    def next_event(self) -> int | None:
        return None

    def advance(self, now: int) -> None:
        pass

    def interrupt(self) -> bool:
        return False

    def activities(self) -> list[Activity]:
        return []


@contextmanager
def chip(build: ProjectBuild, elf: Path) -> Iterator[socket.socket]:
    """The firmware on the simulated chip; gives the other end of its UART."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        uart = DeviceSpec(f"{__file__}:Uart", 0x1A300000, 256, {"port": server.getsockname()[1]})
        memories = tuple(MemoryRegion(memory.name, memory.base, memory.size) for memory in build.target.memories)
        core = build.target.core
        devices = (*target_devices(build.target, {}), uart)
        workers = tuple(worker.costs for worker in build.target.workers)
        setup = SimulationSetup(
            elf,
            memories,
            devices,
            core.isa,
            core.costs,
            extension=core.extension,
            workers=workers,
            mailbox=build.target.mailbox,
        )
        session = IssSession(setup)
        line = server.accept()[0]

    def run() -> None:
        """Until the line is closed."""
        with contextlib.suppress(SimulationError):
            session.run([], {})

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield line
    finally:
        line.close()
        thread.join(20)
        session.close()


def compile_process(build: ProjectBuild, program: Path, *defines: str) -> Path:
    """The firmware as a program of this computer."""
    names = [*build.manifest.sources.host, "runtime/frames.c", "runtime/board_main.c", str(STDIO_IO)]
    folders = [f"-I{folder}" for folder in ("src", "runtime", "driver")]
    macros = ["-DDOVETAIL_HOST", "-DDOVETAIL_BOARD", *(f"-D{define}" for define in defines)]
    subprocess.run(["cc", *FLAGS, *macros, *folders, *names, "-o", program], cwd=build.folder, check=True, timeout=60)
    return program


@contextmanager
def process(program: Path) -> Iterator[socket.socket]:
    """The program; gives the other end of its standard input and output."""
    ours, theirs = socket.socketpair()
    with theirs:
        started = subprocess.Popen([program], stdin=theirs, stdout=theirs)
    try:
        yield ours
    finally:
        ours.close()
        started.wait(10)


Fault = Callable[[bytes], list[bytes]]
"""What arrives instead of a frame that is sent."""


def no_fault(content: bytes) -> list[bytes]:
    """The frame itself."""
    return [content]


class Faults:
    """A line that drops, repeats, damages and cuts frames and adds garbage, each with this probability."""

    def __init__(self, seed: int, probability: float) -> None:
        self._random = random.Random(seed)
        self._probability = probability
        self.count = 0

    def __call__(self, content: bytes) -> list[bytes]:
        chance = self._random.random()
        kind = int(chance / self._probability)
        self.count += kind < 5
        if kind == 0:
            return []
        if kind == 1:
            return [content, content]
        if kind == 2:
            place = self._random.randrange(len(content))
            damaged = bytearray(content)
            damaged[place] ^= 1 << self._random.randrange(8)
            return [bytes(damaged)]
        if kind == 3:
            return [content[: self._random.randrange(1, len(content))]]
        if kind == 4:
            return [self._random.randbytes(self._random.randrange(1, 40)) + b"\xd7\xe9\xd7", content]
        return [content]


class Cuts:
    """Cuts a line after some of the bytes of a frame, with this probability for each but the first two: HELLO."""

    def __init__(self, seed: int, probability: float) -> None:
        self._random = random.Random(seed)
        self._probability = probability
        self.count, self._frames = 0, 0

    def __call__(self, content: bytes) -> int | None:
        """How many bytes of a frame still arrive; None for all, and the line stays."""
        self._frames += 1
        if self._frames <= 2 or self._random.random() >= self._probability:
            return None
        self.count += 1
        return self._random.randrange(len(content) + 1)


class Line:
    """Carries frames between a board and who opens the line, a TCP connection or a pseudo-terminal.

    Args:
        board: the board's end.
        terminal: a pseudo-terminal in place of TCP.
        fault: what happens to frames on both ways.
        port: of TCP; 0 for any.
        cuts: where TCP connections end.
    """

    def __init__(
        self,
        board: socket.socket,
        terminal: bool = False,
        fault: Fault = no_fault,
        port: int = 0,
        cuts: Cuts | None = None,
    ) -> None:
        self._board, self._fault, self._cuts = board, fault, cuts
        self._stop, self._stopped = os.pipe()
        self._server: socket.socket | None = None
        self._slave = -1
        if terminal:
            self._client, self._slave = os.openpty()
            self.where = f"serial:{os.ttyname(self._slave)}"
        else:
            self._client = -1
            self._server = socket.create_server(("127.0.0.1", port))
            self.where = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._stopped, b"x")
        self._thread.join(10)
        for file in (self._stop, self._stopped, self._client, self._slave):
            if file >= 0:
                os.close(file)
        if self._server is not None:
            self._server.close()

    def _carry(self) -> None:
        board = self._board.fileno()
        decoders = {board: Decoder()}
        while True:
            files = [self._stop, board, *([self._client] if self._client >= 0 else [])]
            files += [self._server.fileno()] if self._server is not None and self._client < 0 else []
            ready = select.select(files, [], [])[0]
            if self._stop in ready:
                return
            if self._server is not None and self._server.fileno() in ready:
                self._client = self._server.accept()[0].detach()
                continue
            for file in ready:
                try:
                    content = os.read(file, 4096)
                except OSError:
                    content = b""
                if not content:
                    if file == board:
                        return
                    self._hang_up(decoders)
                    break
                other = self._client if file == board else board
                for frame in decoders.setdefault(file, Decoder()).feed(content):
                    for part in self._fault(encode(frame)):
                        cut = self._cuts(part) if self._cuts else None
                        with contextlib.suppress(OSError):
                            os.write(other, part[:cut])
                        if cut is not None:
                            self._hang_up(decoders)
                            break
                if self._client < 0:
                    break

    def _hang_up(self, decoders: dict[int, Decoder]) -> None:
        """Close the connection, and forget what came of a frame."""
        if self._client >= 0:
            os.close(self._client)
            decoders.pop(self._client, None)
            self._client = -1
