"""Instructions a RISC-V core has beyond its instruction set: illegal to the emulator, executed by the target."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from dovetail.simulate.device import Bus
from dovetail.simulate.extension import load_extension

_ILLEGAL = 2  # RISC-V Privileged ISA manual, table of mcause values


class _Registers:
    """The integer registers of the emulated core; see `dovetail.simulate.extension.Registers`."""

    def __init__(self, emulator: Any) -> None:
        library: Any = importlib.import_module("unicorn.unicorn_py3.unicorn").uclib
        names: Any = importlib.import_module("unicorn.riscv_const")
        self._read, self._write = library.uc_reg_read, library.uc_reg_write
        self._zero, self._pc = int(names.UC_RISCV_REG_X0), int(names.UC_RISCV_REG_PC)
        self._handle = emulator._uch
        self._value = ctypes.c_uint32()
        self._pointer = ctypes.byref(self._value)

    def program_counter(self) -> int:
        """Address of the next instruction."""
        self._read(self._handle, self._pc, self._pointer)
        return self._value.value

    def read(self, number: int) -> int:
        """Value as 32 bits without sign."""
        self._read(self._handle, self._zero + number, self._pointer)
        return self._value.value

    def write(self, number: int, value: int) -> None:
        """Set one; x0 stays 0."""
        if number:
            self._value.value = value & 0xFFFFFFFF
            self._write(self._handle, self._zero + number, self._pointer)


class OwnInstructions:
    """Hands the emulator's illegal instructions to a function of the target.

    Args:
        emulator: of the core. place: what executes them, see `load_extension`. bus: the memories code lies in.

    Raises:
        SimulationError: there is no such function.
    """

    def __init__(self, emulator: Any, place: str, bus: Bus) -> None:
        unicorn: Any = importlib.import_module("unicorn")
        self._emulator, self._bus = emulator, bus
        self._execute = load_extension(place)
        self._registers = _Registers(emulator)
        self._words: dict[int, int] = {}  # by address; code does not change while it runs
        self._fault = ""
        self._failure: BaseException | None = None
        emulator.hook_add(unicorn.UC_HOOK_INTR, self._exception)

    def fault(self) -> str:
        """What stopped the core; empty for nothing. Raises what the target's function raised."""
        if self._failure is not None:
            raise self._failure
        return self._fault

    def _exception(self, core: Any, number: int, data: object) -> None:
        """Execute one; the program counter is past it (hardware/cores.md). No error can cross the emulator."""
        try:
            before = self._registers.program_counter() - 4
            word = self._words.get(before)
            if word is None:
                word = self._words[before] = int.from_bytes(self._bus.view(before, 4).tobytes(), "little")
            if number == _ILLEGAL and self._execute(word, self._registers):
                return
            self._fault = f"it does not know the instruction {word:#010x}"
        except BaseException as error:
            self._failure = error
        self._emulator.emu_stop()
