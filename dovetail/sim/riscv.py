"""RISC-V in the simulator: registers, traps, waiting, and instructions of the core's own.

What compilers and the emulator do not know is executed by the target (`Core.extension`): by C, built for this computer,
or by Python, which takes some fifty times as long: "module:function" or "file.py:function", an `Execute`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dovetail.codegen.build.elf import code_ranges
from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.build.toolchain import compile_host
from dovetail.documented import document
from dovetail.errors import DovetailError, SimulationError
from dovetail.sim.core import (
    Architecture,
    BlockCost,
    CoreSetup,
    EmulatedCore,
    HookState,
    Pause,
    add_native_hook,
    emulator_calls,
)
from dovetail.sim.device import Bus, Coprocessor, find, read_number
from dovetail.sim.riscv_costs import BlockCounter, CoreCosts, division_bits, words_like

_WFI, _FENCE = 0x10500073, 0x0F
_EXTERNAL_INTERRUPT = 11  # RISC-V Privileged ISA manual, table of mcause values
_ILLEGAL = 2  # ibid.
_MSTATUS_MIE, _MSTATUS_MPIE, _MSTATUS_MPP = 1 << 3, 1 << 7, 3 << 11  # ibid., mstatus


class RiscvCore(EmulatedCore):
    """RV32, or RV64 below 4 GiB."""

    def __init__(self, setup: CoreSetup) -> None:
        unicorn: Any = importlib.import_module("unicorn")
        self._registers: Any = importlib.import_module("unicorn.riscv_const")
        self._costs: CoreCosts = setup.costs
        self._bus = setup.bus
        self._bits = instruction_set(setup.isa).bits
        self._counter = BlockCounter(setup.costs, setup.bus, self._bits == 64)
        self.wake = self._costs.wake
        data_counts = self._costs.divide_least or self._costs.divide_zero
        self._code = code_ranges(setup.elf) if data_counts or setup.coprocessors else []
        self._divides, self._coprocessors = bool(data_counts), setup.coprocessors
        mode = unicorn.UC_MODE_RISCV64 if self._bits == 64 else unicorn.UC_MODE_RISCV32
        self.emulator: Any = unicorn.Uc(unicorn.UC_ARCH_RISCV, mode)
        self._own: _NativeInstructions | _PythonInstructions | None = None
        known = (self.emulator, int(self._registers.UC_RISCV_REG_X0), int(self._registers.UC_RISCV_REG_PC))
        if setup.extension.endswith(".c") and setup.coprocessors:
            hint = 'write the core\'s own instructions in Python ("file.py:function")'
            raise SimulationError("instructions in C beside a coprocessor", where=setup.extension, hint=hint)
        if setup.extension.endswith(".c"):
            self._own = _NativeInstructions(*known, Path(setup.extension), self._counter.turn)
            self._counter.kind = self._own.kind
        elif setup.extension or setup.coprocessors:
            execute = find(setup.extension, "extension") if setup.extension else _no_instruction
            self._own = _PythonInstructions(*known, execute, setup.coprocessors, setup.bus, self._bits)

    def start(self, entry: int) -> None:
        """See `Core.start`. Divisions are looked for here, where the firmware is in memory."""
        found = [self._words(0xFE00407F, 0x02004033) if self._divides else {}, self._words(0x707F, _FENCE)]
        self.timed = {address: self._timed(word) for address, word in found[0].items()}
        if isinstance(self._own, _PythonInstructions) and self._coprocessors:
            self.timed |= dict.fromkeys(found[1], self._own.fence)
        self.emulator.reg_write(self._registers.UC_RISCV_REG_PC, entry)

    def count_into(self, state: HookState, reads: int) -> None:
        """See `Core.count_into`."""
        if self._own is not None:
            self._own.count_into(state, reads)

    def pc(self) -> int:
        return int(self.emulator.reg_read(self._registers.UC_RISCV_REG_PC))

    def pause(self) -> Pause | None:
        before = self.pc() - 4
        if self._own is not None and (fault := self._own.fault()):
            return Pause(before, False, fault=fault)
        return Pause(before, True) if read_number(self._bus, before, 4) == _WFI else None

    def enter_interrupt(self) -> int | None:
        """See `Core.enter_interrupt` (Privileged ISA manual, "Machine Trap Handling")."""
        read, write, reg = self.emulator.reg_read, self.emulator.reg_write, self._registers
        status = int(read(reg.UC_RISCV_REG_MSTATUS))
        if not (status & _MSTATUS_MIE and int(read(reg.UC_RISCV_REG_MIE)) >> _EXTERNAL_INTERRUPT & 1):
            return None
        vector = int(read(reg.UC_RISCV_REG_MTVEC))
        write(reg.UC_RISCV_REG_MEPC, self.pc())
        write(reg.UC_RISCV_REG_MCAUSE, 1 << self._bits - 1 | _EXTERNAL_INTERRUPT)
        write(reg.UC_RISCV_REG_MSTATUS, status & ~_MSTATUS_MIE | _MSTATUS_MPIE | _MSTATUS_MPP)
        write(reg.UC_RISCV_REG_PC, (vector & ~3) + (4 * _EXTERNAL_INTERRUPT if vector & 1 else 0))
        return self._costs.interrupt_entry

    def block_cost(self, address: int, size: int) -> BlockCost:
        """See `Core.block_cost`; a load's use in the block after it is not seen.

        The emulator translates past instructions that always trap or wait (`wfi`); what follows one does not run.
        """
        return self._counter.block(address, size)

    def _words(self, mask: int, wanted: int) -> dict[int, int]:
        """By address, the words of the code that look like an instruction."""
        return {at: word for stretch in self._code for at, word in words_like(self._bus, *stretch, mask, wanted)}

    def _timed(self, word: int) -> Callable[[], int]:
        """The cycles a division takes more than `block_cost` counts, from its divisor."""
        costs, signed = self._costs, not word >> 12 & 1
        read, second = self.emulator.reg_read, int(self._registers.UC_RISCV_REG_X0) + (word >> 20 & 31)

        def more() -> int:
            divisor = int(read(second))
            if divisor == 0 and costs.divide_zero:
                return costs.divide_zero - (costs.divide_least or costs.divide)
            return division_bits(divisor, signed) if costs.divide_least else 0

        return more


class Registers(Protocol):
    """The integer registers of the core, by number."""

    def read(self, number: int) -> int:
        """Value without sign, of as many bits as the core has; x0 is 0."""

    def write(self, number: int, value: int) -> None:
        """Set one to the low bits of a value, as many as the core has; x0 stays 0."""


Execute = Callable[[int, Registers], bool]
"""Executes the instruction of a word; False when it is none of the core's own."""


class _RiscvState(ctypes.Structure):
    """Mirrors `struct dovetail_core` of riscv_own.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("read", "write", "fetch", "put", "stop", "count", "emulator")),
        *((name, ctypes.c_void_p) for name in ("instructions", "cycles", "state", "reads")),
        *((name, ctypes.c_int32) for name in ("x0", "pc")),
        *((name, ctypes.c_uint32) for name in ("failed", "word", "address", "known", "changed")),
        ("values", ctypes.c_uint64 * 32),
    )
    failed: int
    word: int
    state: int
    reads: int


_COUNT = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
"""C type of the function that counts the body of a loop."""
_FAULTS = (
    "",
    "it does not know the instruction {:#010x}",
    "nothing is mapped at {:#x}, which one of its own instructions accesses",
    "the hardware loop at {:#x} is not one of 1 to 64 of its own instructions, at multiples of 4 bytes",
)
"""By `failed`, of `word`."""


class _NativeInstructions:
    """`dovetail_execute` of a C file of the target's (riscv_own.h says what it is given)."""

    def __init__(self, emulator: Any, x0: int, pc: int, source: Path, cost: Callable[[int, int], BlockCost]) -> None:
        unicorn: Any = importlib.import_module("unicorn")
        glue = Path(__file__).with_name("riscv_own.c")
        if not source.is_file():
            hint = "correct Core.extension in the target file"
            raise SimulationError("there is no such file of the core's own instructions", where=str(source), hint=hint)
        try:
            sources, include = [glue, source.resolve()], [glue.parent]
            self._library = ctypes.CDLL(str(compile_host(source.parent, sources, include=include, flags=("-O2",))))
        except DovetailError as error:
            what = f"it cannot be compiled: {error.where}: {error.what}"
            raise SimulationError(what, where=str(source), hint="correct the file Core.extension names") from None
        calls = emulator_calls()
        functions = (calls.uc_reg_read, calls.uc_reg_write, calls.uc_mem_read, calls.uc_mem_write, calls.uc_emu_stop)
        self._count, self._cost = _COUNT(self._counted), cost
        places = [ctypes.cast(function, ctypes.c_void_p).value for function in (*functions, self._count)]
        self._own = _RiscvState(*places, x0=x0, pc=pc)
        add_native_hook(emulator, unicorn.UC_HOOK_INTR, self._library.dovetail_own_instruction, self._own, 1, 0)

    def count_into(self, state: HookState, reads: int) -> None:
        """See `Core.count_into`."""
        self._own.state, self._own.reads = ctypes.addressof(state), reads
        for name in ("instructions", "cycles"):
            setattr(self._own, name, ctypes.addressof(state) + getattr(HookState, name).offset)

    def kind(self, word: int) -> int:
        """How an instruction is counted: `enum dovetail_kind`."""
        return int(self._library.dovetail_kind(word))

    def fault(self) -> str:
        """The fault that stopped the core; empty for none."""
        return _FAULTS[self._own.failed].format(self._own.word)

    def _counted(self, address: int, size: int) -> int:
        """Called from C for the body of a loop: its instructions, and its cycles in the lower half."""
        cost = self._cost(address, size)
        return cost.instructions << 32 | cost.cycles


def _no_instruction(word: int, registers: Registers) -> bool:
    """The `Execute` of a core without instructions of its own."""
    return False


class _PythonInstructions:
    """An `Execute` of the target's, the `Registers` it is given, and instructions that lead to devices."""

    def __init__(
        self,
        emulator: Any,
        x0: int,
        pc: int,
        execute: Execute,
        coprocessors: Mapping[int, Coprocessor],
        bus: Bus,
        bits: int,
    ) -> None:
        unicorn: Any = importlib.import_module("unicorn")
        self._read, self._write = emulator_calls().uc_reg_read, emulator_calls().uc_reg_write
        self._zero, self._pc = x0, pc
        self._value = ctypes.c_uint64()
        self._mask, self._coprocessors, self._state = (1 << bits) - 1, coprocessors, HookState()
        self._pointer = ctypes.byref(self._value)
        self._emulator, self._execute, self._bus = emulator, execute, bus
        self._words: dict[int, int] = {}  # by address; code does not change while it runs
        self._fault = ""
        self._failure: BaseException | None = None
        emulator.hook_add(unicorn.UC_HOOK_INTR, self._exception)

    def count_into(self, state: HookState, reads: int) -> None:
        """See `Core.count_into`."""
        self._state = state

    def fence(self) -> int:
        """The cycles a fence waits for the devices; 0 after an error, which stops the core."""
        try:
            now = self._state.cycles
            return max(device.fence(now) for device in self._coprocessors.values()) - now
        except BaseException as error:
            self._failure = error
        self._emulator.emu_stop()
        return 0

    def _led(self, word: int) -> bool:
        """Give an instruction to the device its opcode leads to; False where there is none."""
        device, state = self._coprocessors.get(word & 0x7F), self._state
        if device is None:
            return False
        device.advance(state.cycles)
        taken = device.instruct(word, self.read(word >> 15 & 31), self.read(word >> 20 & 31), state.cycles)
        state.cycles = taken.resumed
        if taken.result is not None:
            self.write(word >> 7 & 31, taken.result)
        if device.next_event() is not None:
            state.deadline = 0  # there may be an event before the one the core was to stop at
        return True

    def read(self, number: int) -> int:
        self._value.value = 0
        self._read(self._emulator._uch, self._zero + number, self._pointer)
        return self._value.value

    def write(self, number: int, value: int) -> None:
        if number:
            self._value.value = value & self._mask
            self._write(self._emulator._uch, self._zero + number, self._pointer)

    def fault(self) -> str:
        """The fault that stopped the core; empty for none. Raises the exception of the target's function."""
        if self._failure is not None:
            raise self._failure
        return self._fault

    def _exception(self, core: Any, number: int, data: object) -> None:
        """Execute one; the program counter is past it (hardware/cores.md). No error can cross the emulator."""
        try:
            before = self.read(self._pc - self._zero) - 4
            word = self._words.get(before)
            if word is None:
                word = self._words[before] = read_number(self._bus, before, 4)
            if number == _ILLEGAL and (self._led(word) or self._execute(word, self)):
                return
            self._fault = f"it does not know the instruction {word:#010x}"
        except BaseException as error:
            self._failure = error
        self._emulator.emu_stop()


RISCV = Architecture(
    "EM_RISCV", CoreCosts, RiscvCore, product=lambda c: c.multiply + c.alu, word=lambda c: min(c.load, c.store)
)
"""The 32-bit RISC-V architecture for the simulator."""
RISCV64 = replace(RISCV, bits=64)
"""64-bit RISC-V, by the same table."""

document(__name__)
