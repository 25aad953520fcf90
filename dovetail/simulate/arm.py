"""Cortex-M in the simulator: registers, exceptions, waiting. How long instructions take is in `arm_costs`."""

from __future__ import annotations

import importlib
from typing import Any

from dovetail.build.elf import code_ranges
from dovetail.errors import SimulationError
from dovetail.simulate.architecture import Architecture, BlockCost, CoreSetup, Pause
from dovetail.simulate.arm_costs import CortexMCosts, block_cost, predicated
from dovetail.simulate.device import Activity, Device
from dovetail.simulate.extension import refuse_extension

_SYSTEM_CONTROL = 0xE000E000
_WFI, _WFI_WIDE = b"\x30\xbf", b"\xaf\xf3\x03\x80"
_INTERRUPT = 16  # exception number of interrupt 0, the line of all devices
_RETURN = 0xFFFFFFF9  # to thread mode, main stack, no floating-point frame (ARMv7-M ARM, "Exception return behavior")
_REALIGNED = 1 << 9  # in a stacked xPSR: the stack pointer was moved by 4 (ibid., "Stack alignment on exception entry")
_EXCEPTIONS = {1: "undefined instruction", 2: "SVC", 3: "instruction fetch", 4: "data access", 7: "BKPT",
               17: "no coprocessor", 18: "invalid state", 19: "stack limit passed", 22: "unaligned access"}
"""The emulator's numbers."""
_EXCEPTION_RETURN = 8
_MODELS = {"cortex-m4": "UC_CPU_ARM_CORTEX_M4", "cortex-m7": "UC_CPU_ARM_CORTEX_M7",
           "cortex-m33": "UC_CPU_ARM_CORTEX_M33"}


class SystemControl:
    """The registers of the System Control Space start-up code and drivers need; a `Device` without time.

    Offsets from 0xE000E000: 0x100 and 0x180 enable and disable interrupts 0 to 31, 0xD08 is VTOR. Interrupt 0 is the
    only one that comes, at priority 0, which BASEPRI never masks.
    """

    name = "system control space"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """See `Device.reset`."""
        self.enabled = 0
        self.vectors = 0

    def read(self, offset: int, now: int) -> int:
        """See `Device.read`."""
        if offset in (0x100, 0x180):
            return self.enabled
        if offset == 0xD08:
            return self.vectors
        raise SimulationError(f"there is no register at offset {offset:#x}", where=self.name,
                              hint="look at the driver: of the system's registers only ISER, ICER and VTOR are "
                                   "simulated")

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        if offset == 0x100:
            self.enabled |= value
        elif offset == 0x180:
            self.enabled &= ~value
        elif offset == 0xD08:
            self.vectors = value & ~0x7F
        else:
            raise SimulationError(f"there is no register at offset {offset:#x}", where=self.name,
                                  hint="look at the driver: of the system's registers only ISER, ICER and VTOR are "
                                       "simulated")

    def next_event(self) -> int | None:
        """See `Device.next_event`."""
        return None

    def advance(self, now: int) -> None:
        """See `Device.advance`."""

    def interrupt(self) -> bool:
        """See `Device.interrupt`."""
        return False

    def activities(self) -> list[Activity]:
        """See `Device.activities`."""
        return []


class ArmCore:
    """See `Core`."""

    def __init__(self, setup: CoreSetup) -> None:
        unicorn: Any = importlib.import_module("unicorn")
        self._reg: Any = importlib.import_module("unicorn.arm_const")
        refuse_extension(setup.isa, setup.extension)
        self._costs: CortexMCosts = setup.costs
        self._bus = setup.bus
        self._system = SystemControl()
        self._exception: int | None = None
        self._code = code_ranges(setup.elf)
        self.registers: tuple[int, Device] | None = (_SYSTEM_CONTROL, self._system)
        self.predicated: dict[int, int] = {}
        self.emulator: Any = unicorn.Uc(unicorn.UC_ARCH_ARM, unicorn.UC_MODE_THUMB | unicorn.UC_MODE_MCLASS)
        self.emulator.ctl_set_cpu_model(getattr(self._reg, _MODELS[setup.isa]))
        self.emulator.hook_add(unicorn.UC_HOOK_INTR, self._trapped)

    def start(self, entry: int) -> None:
        """See `Core.start`. The IT blocks are looked for here, where the firmware is in memory."""
        for start, size in self._code:
            self.predicated.update(predicated(start, size, self._fetch, self._costs))
        self._write("PC", entry | 1)

    def pc(self) -> int:
        """See `Core.pc`."""
        return self._read("PC") & ~1

    def resume_at(self) -> int:
        """See `Core.resume_at`: bit 0 says Thumb."""
        return self.pc() | 1

    def pause(self) -> Pause | None:
        """See `Core.pause`."""
        exception, self._exception = self._exception, None
        if exception == _EXCEPTION_RETURN:
            at = self.pc()
            self._leave_interrupt()
            return Pause(at, False, self._costs.interrupt_return)
        pc = self.pc()
        if exception is not None:
            return Pause(pc, False, fault=f"exception {_EXCEPTIONS.get(exception, str(exception))}")
        for waiting in (_WFI, _WFI_WIDE):
            before = pc - len(waiting)
            if self._bus.view(before, len(waiting)).tobytes() == waiting:
                return Pause(before, True)
        return None

    def line_enabled(self) -> bool:
        """See `Core.line_enabled`."""
        return bool(self._system.enabled & 1)

    def enter_interrupt(self) -> int | None:
        """See `Core.enter_interrupt` (ARMv7-M Architecture Reference Manual, "Exception entry behavior")."""
        if self._read("PRIMASK") or self._read("FAULTMASK") or self._read("IPSR"):
            return None
        if self._read("CONTROL") & 3:
            raise SimulationError("an interrupt came while the core used the process stack or was unprivileged, "
                                  "which is not simulated", where="core",
                                  hint="stay on the main stack in privileged mode, as the start-up code does")
        stack, status = self._read("SP"), self._read("XPSR")
        frame = (stack - 32) & ~7
        status = status | _REALIGNED if stack & 4 else status & ~_REALIGNED
        saved = [self._read(name) for name in ("R0", "R1", "R2", "R3", "R12", "LR")]
        words = [*saved, self.pc(), status]
        self._bus.view(frame, 32)[:] = memoryview(b"".join(word.to_bytes(4, "little") for word in words))
        self._write("SP", frame)
        self._write("LR", _RETURN)
        self._write("XPSR", status & 0xF8000000 | 1 << 24 | _INTERRUPT)  # out of any IT block
        self._write("IPSR", _INTERRUPT)
        self._write("PC", self._word(self._system.vectors + 4 * _INTERRUPT) | 1)
        return self._costs.interrupt_entry

    def block_cost(self, address: int, size: int) -> BlockCost:
        """See `Core.block_cost`."""
        return block_cost(address, size, self._fetch, self._costs, self.predicated.__contains__)

    def _leave_interrupt(self) -> None:
        """Undo what `enter_interrupt` did (ibid., "Exception return behavior")."""
        frame = self._read("SP")
        words = [self._word(frame + 4 * index) for index in range(8)]
        for name, word in zip(("R0", "R1", "R2", "R3", "R12", "LR"), words, strict=False):
            self._write(name, word)
        status = words[7]
        self._write("IPSR", 0)
        self._write("XPSR", status & ~_REALIGNED & ~0x1FF)
        self._write("SP", frame + 32 + (4 if status & _REALIGNED else 0))
        self._write("PC", words[6] | 1)

    def _trapped(self, emulator: Any, number: int, data: object) -> None:
        self._exception = number
        emulator.emu_stop()

    def _read(self, name: str) -> int:
        return int(self.emulator.reg_read(getattr(self._reg, f"UC_ARM_REG_{name}")))

    def _write(self, name: str, value: int) -> None:
        self.emulator.reg_write(getattr(self._reg, f"UC_ARM_REG_{name}"), value)

    def _word(self, address: int) -> int:
        return int.from_bytes(self._bus.view(address, 4).tobytes(), "little")

    def _fetch(self, address: int) -> int:
        return int.from_bytes(self._bus.view(address, 2).tobytes(), "little")


ARM = Architecture(
    "EM_ARM",
    CortexMCosts,
    ArmCore,
    product=lambda costs: costs.multiply,
    word=lambda costs: min(costs.store, costs.transfer_word),
)
"""Arm's M profile with Thumb-2."""
