"""The VTA in the simulated chip: registers, one running and one waiting launch, results at the end of a launch.

Registers are 32 bits wide, in the manner of the VCR of the public shell (apache/tvm-vta hardware/chisel
shell/VCR.scala; 0x24 and 0x28 are this chip's own):

- 0x00 CONTROL. Write 1: launch with the registers as they are; later writes to them do not matter to it. Read: bit 0
  a launch is running or waiting, bit 1 none is (so it is set after reset).
- 0x04 CYCLES, read: cycles of the last launch that finished.
- 0x08 INSN_COUNT, 0x0C INSN_ADDR: instructions of a launch, and the address of the first (a multiple of 4).
- 0x10 UOP, 0x14 INP, 0x18 WGT, 0x1C ACC, 0x20 OUT: addresses the elements of each memory are counted from
  (ACC_8BIT counts from INP).
- 0x24 FINISHED, read: launches finished since reset, modulo 2^32; lowers the interrupt line.
- 0x28 ROOM, read: launches that can still be handed over, 0 to 2.

A launch reads its instructions when it is handed over, and all other memory when it finishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dovetail.errors import DovetailError, SimulationError
from dovetail.simulate.device import Activity, Bus
from dovetail.simulate.launch_queue import LaunchQueue
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.executor import Pointers, StreamError, estimate, execute
from dovetail.targets.vta.isa import INSTRUCTION_BYTES

LAUNCHES = 2
"""Launches the device holds: one running, one waiting."""
_MASK32 = 0xFFFFFFFF


class Register(IntEnum):
    """Byte offsets of the registers."""

    CONTROL = 0x00
    CYCLES = 0x04
    INSN_COUNT = 0x08
    INSN_ADDR = 0x0C
    UOP = 0x10
    INP = 0x14
    WGT = 0x18
    ACC = 0x1C
    OUT = 0x20
    FINISHED = 0x24
    ROOM = 0x28


_READ_ONLY = (Register.CYCLES, Register.FINISHED, Register.ROOM)


@dataclass(frozen=True, slots=True)
class _Work:
    """A launch's stream and pointers."""

    stream: bytes
    pointers: Pointers


class VtaDevice:
    """The engine as a `Device`.

    Args:
        bus: the memories it reaches.
        name: its name in reports and messages.
        fields: fields of `VtaConfig` that differ from its defaults.

    Raises:
        TargetError: the configuration is not possible.
    """

    def __init__(self, bus: Bus, name: str = "vta", **fields: int) -> None:
        self.name = name
        self.config = VtaConfig(**fields)
        self._bus = bus
        self.reset()

    def reset(self) -> None:
        """See `Device.reset`."""
        self._registers = dict.fromkeys(Register, 0)
        self._queue: LaunchQueue[_Work] = LaunchQueue(self.name, LAUNCHES)
        self._cycles = 0

    def read(self, offset: int, now: int) -> int:
        """See `Device.read`."""
        register = self._register(offset)
        if register is Register.CONTROL:
            return 1 if self._queue.room < LAUNCHES else 2
        if register is Register.CYCLES:
            return self._cycles & _MASK32
        if register is Register.FINISHED:
            return self._queue.collect()
        return self._queue.room if register is Register.ROOM else self._registers[register]

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        register = self._register(offset)
        if register in _READ_ONLY:
            raise SimulationError(f"register {register.name} is read-only", where=self.name,
                                  hint="look at the driver: this register is only read")
        if register is Register.CONTROL:
            self._launch(value, now)
        else:
            self._registers[register] = value & _MASK32

    def next_event(self) -> int | None:
        """See `Device.next_event`."""
        return self._queue.next_event()

    def advance(self, now: int) -> None:
        """See `Device.advance`."""
        for launch in self._queue.ended(now):
            try:
                execution = execute(launch.work.stream, self._bus, launch.work.pointers, self.config)
            except StreamError as error:
                raise self._error(error, launch.number) from error
            self._cycles = execution.cycles
            macs = execution.gemm_tiles * self.config.batch * self.config.block**2
            label = f"{execution.gemm_tiles} tiles"
            self._queue.activities.append(Activity(launch.start, launch.end, label, macs=macs))

    def interrupt(self) -> bool:
        """See `Device.interrupt`."""
        return self._queue.interrupt

    def activities(self) -> list[Activity]:
        """See `Device.activities`."""
        return list(self._queue.activities)

    def _register(self, offset: int) -> Register:
        try:
            return Register(offset)
        except ValueError:
            raise SimulationError(f"there is no register at offset {offset:#x}", where=self.name,
                                  hint="look at the driver: its offsets must be those of the engine's header") from None

    def _launch(self, value: int, now: int) -> None:
        number, r = self._queue.next_number, self._registers
        if value != 1:
            raise SimulationError(f"CONTROL was written {value}; it takes 1", where=self.name,
                                  hint="look at the driver: write 1 to start")
        self._queue.check_room()
        if r[Register.INSN_ADDR] % 4:
            raise SimulationError(f"the instructions begin at {r[Register.INSN_ADDR]:#x}, not a multiple of 4",
                                  where=self.name, hint="align the instructions to 4 bytes")
        pointers = Pointers(*(r[register] for register in
                              (Register.UOP, Register.INP, Register.WGT, Register.ACC, Register.OUT)))
        try:
            nbytes = r[Register.INSN_COUNT] * INSTRUCTION_BYTES
            stream = self._bus.view(r[Register.INSN_ADDR], nbytes).tobytes()
            cycles = estimate(stream, self.config).cycles
        except (SimulationError, StreamError) as error:
            raise self._error(error, number) from error
        self._queue.hand_over(_Work(stream, pointers), now, cycles)

    def _error(self, error: DovetailError, number: int) -> SimulationError:
        return SimulationError(error.what, where=f"{self.name} launch {number}",
                               hint=error.hint or "look at the addresses the driver gives")
