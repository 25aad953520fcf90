"""A minimal server of GDB's remote serial protocol with a RISC-V core of Unicorn behind it: a board for one test.

`python gdbserver.py NAME=BASE:SIZE...` prints the port it listens at, and serves one connection after another. Memory
whose name begins with "flash" can only be written when the variable WRITABLE is set.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

import unicorn
from unicorn import riscv_const

PC = 32
REGISTERS = {PC: riscv_const.UC_RISCV_REG_PC} | {n: riscv_const.UC_RISCV_REG_X0 + n for n in range(32)}


class Board:
    """A core at reset."""

    def __init__(self, memories: list[str]) -> None:
        self.core = unicorn.Uc(unicorn.UC_ARCH_RISCV, unicorn.UC_MODE_RISCV32)
        self.flash = []
        for memory in memories:
            name, _, rest = memory.partition("=")
            base, size = (int(text, 0) for text in rest.split(":"))
            self.core.mem_map(base, size)
            if name.startswith("flash") and "WRITABLE" not in os.environ:
                self.flash.append(range(base, base + size))
        self.stops: set[int] = set()

    def answer(self, text: str) -> str:
        """Carry out a packet."""
        kind, rest = text[:1], text[1:]
        if kind == "?":
            return "S05"
        if kind == "m":
            address, count = (int(part, 16) for part in rest.split(","))
            return self.core.mem_read(address, count).hex()
        if kind == "M":
            where, _, content = rest.partition(":")
            address = int(where.split(",")[0], 16)
            if any(address in some for some in self.flash):
                return "E0e"
            self.core.mem_write(address, bytes.fromhex(content))
            return "OK"
        if kind == "P":
            number, _, value = rest.partition("=")
            self.core.reg_write(REGISTERS[int(number, 16)], struct.unpack("<I", bytes.fromhex(value))[0])
            return "OK"
        if kind == "p":
            return struct.pack("<I", self.core.reg_read(REGISTERS[int(rest, 16)])).hex()
        if text.startswith("Z1,"):
            self.stops.add(int(text.split(",")[1], 16))
            return "OK"
        if text.startswith("z1,"):
            self.stops.remove(int(text.split(",")[1], 16))
            return "OK"
        if kind == "c":
            (stop,) = self.stops
            start = self.core.reg_read(REGISTERS[PC])
            try:
                self.core.emu_start(start, stop, count=50_000_000)
            except unicorn.UcError:
                return "T0b"
            return "T05thread:1;"
        return ""


def serve(board: Board, line: socket.socket) -> None:
    """Answer packets until the line is closed; every fifth one is refused once, every seventh answer comes damaged."""
    held, number, text = b"", 0, b""

    def send() -> None:
        """Send the answer."""
        line.sendall(b"$" + text + b"#%02x" % (sum(text) & 0xFF))

    while content := line.recv(4096):
        held += content
        while held:
            if held[:1] == b"-":
                send()
            if held[:1] != b"$":
                held = held[1:]
                continue
            end = held.find(b"#")
            if end < 0 or len(held) < end + 3:
                break
            packet, check, held = held[1:end], int(held[end + 1 : end + 3], 16), held[end + 3 :]
            number += 1
            if check != sum(packet) & 0xFF or number % 5 == 0:
                line.sendall(b"-")
                continue
            text = board.answer(packet.decode()).encode()
            line.sendall(b"+")
            if number % 7 == 0:
                line.sendall(b"$" + text + b"x#00")
            else:
                send()


def main() -> None:
    """Listen."""
    board = Board(sys.argv[1:])
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            with server.accept()[0] as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                serve(board, line)


main()
