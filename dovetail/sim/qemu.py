"""Arm firmware in QEMU, for cores that Unicorn has not: the machine mps3-an547 with its Cortex-M55 and Helium.

QEMU is another program, in a process of its own, and optional. It is stopped through its debugger's server where the
harness (qemu_main.c) gets inputs, begins a layer or has outputs. Its log says which blocks of code it translates and
each time it executes one, so the instructions counted are those executed; `sim/helium.py` states their cycles.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from dovetail.codegen.build.elf import describe_address, load_image, symbols
from dovetail.errors import BoardError, SimulationError
from dovetail.sim.arm import CortexMCosts
from dovetail.sim.gdb import Remote
from dovetail.sim.helium import HeliumBlock, block_of
from dovetail.sim.line import Link
from dovetail.sim.protocol import Buffers, InferenceResult, Marker, SimulationResult, Simulator

PROGRAM = "qemu-system-arm"
HARNESS = Path(__file__).with_name("qemu_main.c")
"""Stands in for `SIMULATION_MAIN` in the firmware."""
MACHINE = "mps3-an547"
_SP, _LR, _PC, _STATUS = "d", "e", "f", "19"
"""Numbers of registers (gdb/features/arm/arm-m-profile.xml)."""
_THUMB = 1 << 24
_READY, _END_OF_LAYERS = 1, 0xFFFFFFFF
_PATIENCE = 20.0
"""Seconds an answer may take while the core stands."""
_SEGMENT = re.compile(rb"IN:[^\n]*\n((?:0x[^\n]*\n)+)")
_TRANSLATED = re.compile(rb"^0x(\w+): +(\w+(?: \w+)?) ", re.MULTILINE)
_EXECUTED = re.compile(rb"^Trace 0: \w+ \[\w+/(\w+)/", re.MULTILINE)


class QemuSession(Simulator):
    """A chip of the machine `MACHINE` with its firmware; an inference may take `timeout` seconds.

    Raises:
        SimulationError: QEMU is not installed or does not start, or the firmware stops where it must not.
    """

    def __init__(self, elf: Path, costs: CortexMCosts, timeout: float) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            hint = "install QEMU (Debian: qemu-system-arm), or use --sim host, which counts nothing"
            raise SimulationError(f"{PROGRAM} is not installed", where="simulator 'qemu'", hint=hint)
        self._timeout, self._symbols = timeout, symbols(elf)
        entry, self._segments = load_image(elf, "EM_ARM")
        self._costs = costs
        self._ends: dict[int, int] = {}
        """The address behind each block that is translated."""
        self._blocks: dict[tuple[int, int], HeliumBlock] = {}
        self._logs = 0
        self._closing = contextlib.ExitStack()
        try:
            self._folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
            self._start(program)
            self._bring(entry)
        except BoardError as error:
            self.close()
            raise _said(error) from None
        except BaseException:
            self.close()
            raise

    def _start(self, program: str) -> None:
        server = self._folder / "server"
        command = [program, "-M", MACHINE, "-nodefaults", "-display", "none", "-S"]
        command += ["-gdb", f"unix:{server},server=on,wait=off", "-d", "exec,nochain,in_asm", "-D", str(self._log())]
        with (self._folder / "messages").open("wb") as messages:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages)
        self._closing.callback(_ended, process)
        line, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + _PATIENCE
        while True:
            try:
                line.connect(str(server))
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    line.close()
                    said = (self._folder / "messages").read_text(errors="replace").strip()[-600:]
                    what = f"QEMU does not start: {said or error.strerror}"
                    raise SimulationError(what, where=MACHINE, hint=f"run {PROGRAM} -M help") from None
                time.sleep(0.02)
        line.setblocking(False)
        link = Link(line.detach(), "qemu")
        self._closing.callback(link.close)
        self._remote = Remote(link, _PATIENCE)

    def _bring(self, entry: int) -> None:
        """Load the firmware and stand where it first asks for inputs."""
        self._remote.describe()
        self._remote.ask("?")
        for address, content in self._segments:
            self._remote.write(address, content)
        self._set(_STATUS, _THUMB)
        self._set(_PC, entry & ~1)
        for name in ("qemu_command", "dovetail_mark", "qemu_fault"):
            self._remote.done(f"Z0,{self._symbols[name].address & ~1:x},2")
        self._remote.resume(self._timeout)
        self._counted()

    def run(self, inputs: Sequence[Buffers], outputs: Mapping[str, int]) -> SimulationResult:
        """See `Simulator.run`."""
        try:
            return SimulationResult(tuple(self._inference(given, outputs) for given in inputs))
        except BoardError as error:
            self.close()
            raise _said(error) from None

    def close(self) -> None:
        """End QEMU; may be called again."""
        self._closing.close()

    def _inference(self, given: Buffers, wanted: Mapping[str, int]) -> InferenceResult:
        for place, content in given.items():
            self._remote.write(self._address(place), content)
        markers: list[Marker] = []
        layer, begun, now = None, (0, 0), (0, 0)
        while True:
            self._return()
            counted = self._counted()
            now = now[0] + counted[0], now[1] + counted[1]
            if layer is not None:
                markers.append(Marker(layer, begun[0], now[0], begun[1], now[1]))
            at, argument = self._get(_PC), self._get("0")
            if at == self._symbols["qemu_command"].address & ~1:
                break
            layer, begun = (None if argument == _END_OF_LAYERS else argument), now
        results = {place: self._remote.read(self._address(place), size) for place, size in wanted.items()}
        cycles, instructions = now
        while self._get("0") != _READY or self._get(_PC) != self._symbols["qemu_command"].address & ~1:
            self._return()
        self._counted()
        return InferenceResult(results, instructions, cycles, cycles, 0, tuple(markers))

    def _return(self) -> None:
        """Go on behind the call of a function the core stands in, to the next."""
        self._set(_PC, self._get(_LR) & ~1)
        self._remote.resume(self._timeout)
        if self._get(_PC) == self._symbols["qemu_fault"].address & ~1:
            stacked = self._remote.read(self._get(_SP) + 24, 4)
            place = describe_address(int.from_bytes(stacked, "little"), self._symbols)
            hint = f"look for a bad pointer, or an instruction that {MACHINE} does not have"
            raise SimulationError(f"the core met a fault at {place}", where="firmware", hint=hint)

    def _counted(self) -> tuple[int, int]:
        """Cycles and instructions since the last call: QEMU goes on with another log, and this one is read."""
        old, new = self._folder / f"{self._logs}.log", self._log()
        self._remote.done(f"qRcmd,{f'logfile {new}'.encode().hex()}")
        cycles = instructions = 0
        content = old.read_bytes()
        old.unlink()
        at = 0
        for part in [*_SEGMENT.finditer(content), None]:
            end = part.start() if part is not None else len(content)
            run = _EXECUTED.findall(content, at, end)
            for (text, following), times in Counter(zip(run, [*run[1:], b"0"], strict=False)).items():
                start = int(text, 16)
                block = self._block(start)
                taken = block.taken_extra if int(following, 16) != self._ends[start] else 0
                instructions += times * block.instructions
                cycles += times * (block.cycles + taken)
            if part is not None:
                lines = _TRANSLATED.findall(part[1])
                last, code = lines[-1]
                self._ends[int(lines[0][0], 16)] = int(last, 16) + len(code.replace(b" ", b"")) // 2
                at = part.end()
        return cycles, instructions

    def _block(self, start: int) -> HeliumBlock:
        key = start, self._ends[start]
        if key not in self._blocks:
            for base, content in self._segments:
                if base <= start < base + len(content):
                    code = content[start - base : key[1] - base]
                    self._blocks[key] = block_of(code, self._costs)
                    break
        return self._blocks[key]

    def _log(self) -> Path:
        self._logs += 1
        return self._folder / f"{self._logs}.log"

    def _address(self, place: str) -> int:
        name, _, offset = place.partition("+")
        return self._symbols[name].address + int(offset or 0)

    def _get(self, register: str) -> int:
        (value,) = struct.unpack("<I", bytes.fromhex(self._remote.ask(f"p{register}")[:8]))
        return int(value)

    def _set(self, register: str, value: int) -> None:
        self._remote.done(f"P{register}={struct.pack('<I', value).hex()}")


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _said(error: BoardError) -> SimulationError:
    return SimulationError(error.what, where="simulator 'qemu'", hint=error.hint)
