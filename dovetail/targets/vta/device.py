"""The VTA in the simulated chip: registers, one running and one waiting launch, results at the end of a launch.

Registers are 32 bits wide, in the manner of the VCR of the public shell (apache/tvm-vta hardware/chisel
shell/VCR.scala; 0x24 and 0x28 are this chip's own):

- 0x00 CONTROL. Write 1: launch with the registers as they are; later writes to them do not matter to it. Read: bit 0
  a launch is running or waiting, bit 1 none is (so it is set after reset).
- 0x04 CYCLES, read: cycles of the last launch that finished.
- 0x08 INSN_COUNT, 0x0C INSN_ADDR: instructions of a launch, and the address of the first (a multiple of 4).
- 0x10 UOP, 0x14 INP, 0x18 WGT, 0x1C ACC, 0x20 OUT: addresses the elements of each memory are counted from.
- 0x24 FINISHED, read: launches finished since reset, modulo 2^32; lowers the interrupt line.
- 0x28 ROOM, read: launches that can still be handed over, 0 to 2.

A launch reads its instructions when it is handed over, and all other memory when it finishes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from dovetail.errors import DovetailError, SimulationError
from dovetail.records import Record
from dovetail.sim.device import Activity, Bus
from dovetail.sim.launch_queue import MASK32, ControlledDevice, Launch
from dovetail.targets.vta.checks import Pointers
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.executor import estimate, execute
from dovetail.targets.vta.isa import INSTRUCTION_BYTES
from dovetail.targets.vta.stream import StreamError


class VtaRegister(IntEnum):
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


_READ_ONLY = (VtaRegister.CYCLES, VtaRegister.FINISHED, VtaRegister.ROOM)


class _VtaLaunch(Record):
    stream: bytes
    pointers: Pointers


class VtaDevice(ControlledDevice[_VtaLaunch]):
    """The engine as a `Device`.

    Args:
        bus: the memories it reaches.
        name: its name in reports and messages.
        fields: fields of `VtaConfig` that differ from its defaults.

    Raises:
        TargetError: the configuration is not possible.
    """

    def __init__(self, bus: Bus, name: str = "vta", **fields: Any) -> None:
        self.config = VtaConfig(**fields)
        super().__init__(bus, name, VtaRegister, _READ_ONLY, "look at the driver: this register is only read")

    def clear(self) -> None:
        """See `QueueDevice.clear`."""
        super().clear()
        self._cycles = 0

    def read(self, offset: int, now: int) -> int:
        """See `Device.read`."""
        if offset == VtaRegister.CONTROL:
            return 1 if self.queue.room < self.PLACES else 2
        return self._cycles & MASK32 if offset == VtaRegister.CYCLES else super().read(offset, now)

    def launch(self, now: int) -> None:
        """See `ControlledDevice.launch`."""
        number, r = self.queue.next_number, self.registers
        if r[VtaRegister.INSN_ADDR] % 4:
            what = f"the instructions begin at {r[VtaRegister.INSN_ADDR]:#x}, not a multiple of 4"
            raise SimulationError(what, where=self.name, hint="align the instructions to 4 bytes")
        order = (VtaRegister.UOP, VtaRegister.INP, VtaRegister.WGT, VtaRegister.ACC, VtaRegister.OUT)
        pointers = Pointers(*(r[register] for register in order))
        try:
            nbytes = r[VtaRegister.INSN_COUNT] * INSTRUCTION_BYTES
            stream = self.bus.view(r[VtaRegister.INSN_ADDR], nbytes).tobytes()
            cycles = estimate(stream, self.config).cycles
        except (SimulationError, StreamError) as error:
            raise self._error(error, number) from error
        self.queue.hand_over(_VtaLaunch(stream, pointers), now, cycles)

    def complete(self, launch: Launch[_VtaLaunch]) -> Activity:
        """See `QueueDevice.complete`."""
        try:
            execution = execute(launch.work.stream, self.bus, launch.work.pointers, self.config)
        except StreamError as error:
            raise self._error(error, launch.number) from error
        self._cycles = execution.cycles
        macs = execution.gemm_tiles * self.config.batch * self.config.block**2
        return Activity(launch.start, launch.end, f"{execution.gemm_tiles} tiles", macs=macs)

    def _error(self, error: DovetailError, number: int) -> SimulationError:
        hint = error.hint or "look at the addresses the driver gives"
        return SimulationError(error.what, where=f"{self.name} launch {number}", hint=hint)
