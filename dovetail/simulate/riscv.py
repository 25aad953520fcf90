"""RV32 in the simulator: registers, traps, waiting. How long instructions take is in `riscv_costs`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dovetail.simulate.architecture import Architecture, BlockCost, CoreSetup, Pause
from dovetail.simulate.device import Device
from dovetail.simulate.riscv_costs import CoreCosts, block_cost
from dovetail.simulate.riscv_own import own_instructions

_WFI = 0x10500073
_EXTERNAL_INTERRUPT = 11  # RISC-V Privileged ISA manual, table of mcause values
_MSTATUS_MIE, _MSTATUS_MPIE, _MSTATUS_MPP = 1 << 3, 1 << 7, 3 << 11  # ibid., mstatus


class RiscvCore:
    """See `Core`."""

    registers: tuple[int, Device] | None = None
    predicated: Mapping[int, int] = MappingProxyType({})

    def __init__(self, setup: CoreSetup) -> None:
        unicorn: Any = importlib.import_module("unicorn")
        self._registers: Any = importlib.import_module("unicorn.riscv_const")
        self._costs: CoreCosts = setup.costs
        self._bus = setup.bus
        self.emulator: Any = unicorn.Uc(unicorn.UC_ARCH_RISCV, unicorn.UC_MODE_RISCV32)
        self._own = own_instructions(self.emulator, setup.extension, setup.bus) if setup.extension else None

    def start(self, entry: int) -> None:
        """See `Core.start`."""
        self.emulator.reg_write(self._registers.UC_RISCV_REG_PC, entry)

    def pc(self) -> int:
        """See `Core.pc`."""
        return int(self.emulator.reg_read(self._registers.UC_RISCV_REG_PC))

    def resume_at(self) -> int:
        """See `Core.resume_at`."""
        return self.pc()

    def pause(self) -> Pause | None:
        """See `Core.pause`."""
        if self._own is not None and (fault := self._own.fault()):
            return Pause(self.pc() - 4, False, fault=fault)
        before = self.pc() - 4
        waits = int.from_bytes(self._bus.view(before, 4).tobytes(), "little") == _WFI
        return Pause(before, True) if waits else None

    def line_enabled(self) -> bool:
        """See `Core.line_enabled`: the start-up code enables it."""
        return True

    def enter_interrupt(self) -> int | None:
        """See `Core.enter_interrupt` (Privileged ISA manual, "Machine Trap Handling")."""
        read, write, reg = self.emulator.reg_read, self.emulator.reg_write, self._registers
        status = int(read(reg.UC_RISCV_REG_MSTATUS))
        if not (status & _MSTATUS_MIE and int(read(reg.UC_RISCV_REG_MIE)) >> _EXTERNAL_INTERRUPT & 1):
            return None
        vector = int(read(reg.UC_RISCV_REG_MTVEC))
        write(reg.UC_RISCV_REG_MEPC, self.pc())
        write(reg.UC_RISCV_REG_MCAUSE, 1 << 31 | _EXTERNAL_INTERRUPT)
        write(reg.UC_RISCV_REG_MSTATUS, status & ~_MSTATUS_MIE | _MSTATUS_MPIE | _MSTATUS_MPP)
        write(reg.UC_RISCV_REG_PC, (vector & ~3) + (4 * _EXTERNAL_INTERRUPT if vector & 1 else 0))
        return self._costs.interrupt_entry

    def block_cost(self, address: int, size: int) -> BlockCost:
        """See `Core.block_cost`."""

        def fetch(at: int) -> int:
            return int.from_bytes(self._bus.view(at, 2).tobytes(), "little")

        return block_cost(address, size, fetch, self._costs)


RISCV = Architecture(
    "EM_RISCV",
    CoreCosts,
    RiscvCore,
    product=lambda costs: costs.multiply + costs.alu,
    word=lambda costs: min(costs.load, costs.store),
)
"""32-bit RISC-V."""
