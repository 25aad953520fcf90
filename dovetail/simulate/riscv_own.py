"""Instructions a RISC-V core has beyond its instruction set: illegal to the emulator, executed by the target.

The target's function is C, built for this computer, or Python, which takes some fifty times as long.
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any, Protocol

from dovetail.errors import DovetailError, SimulationError
from dovetail.simulate.device import Bus
from dovetail.simulate.extension import load_extension

_ILLEGAL = 2  # RISC-V Privileged ISA manual, table of mcause values


class OwnInstructions(Protocol):
    """What executes them."""

    def fault(self) -> str:
        """What stopped the core; empty for nothing. Raises what the target's function raised."""
        ...


def own_instructions(emulator: Any, place: str, bus: Bus) -> OwnInstructions:
    """Have the emulator's illegal instructions executed by the target.

    Args:
        emulator: of the core. place: "file.c", or Python as `load_extension` has it. bus: the memories code lies in.

    Raises:
        SimulationError: there is no such file or function, or it cannot be compiled.
    """
    if place.endswith(".c"):
        return NativeInstructions(emulator, Path(place))
    return PythonInstructions(emulator, place, bus)


class _Own(ctypes.Structure):
    """Mirrors `struct own` of riscv_own.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("read", "write", "fetch", "stop")),
        *((name, ctypes.c_int32) for name in ("x0", "pc")),
        *((name, ctypes.c_uint32) for name in ("failed", "word")),
    )
    failed: int
    word: int


class NativeInstructions:
    """`dovetail_execute` of a C file of the target's (riscv_own.c says what it is given); see `own_instructions`."""

    def __init__(self, emulator: Any, source: Path) -> None:
        from dovetail.build.toolchain import compile_host

        unicorn: Any = importlib.import_module("unicorn")
        names: Any = importlib.import_module("unicorn.riscv_const")
        calls: Any = importlib.import_module("unicorn.unicorn_py3.unicorn").uclib
        glue = Path(__file__).with_name("riscv_own.c")
        if not source.is_file():
            raise SimulationError("there is no such file of the core's own instructions", where=str(source),
                                  hint="correct Core.extension in the target file")
        try:
            self._library = ctypes.CDLL(str(compile_host(source.parent, [glue, source.resolve()], flags=("-O2",))))
        except DovetailError as error:
            raise SimulationError(f"it cannot be compiled: {error.where}: {error.what}", where=str(source),
                                  hint="correct the file Core.extension names") from None
        places = [ctypes.cast(call, ctypes.c_void_p).value
                  for call in (calls.uc_reg_read, calls.uc_reg_write, calls.uc_mem_read, calls.uc_emu_stop)]
        self._own = _Own(*places, int(names.UC_RISCV_REG_X0), int(names.UC_RISCV_REG_PC), 0, 0)
        hook = ctypes.c_size_t()
        function = ctypes.cast(self._library.dovetail_own_instruction, ctypes.c_void_p)
        status = calls.uc_hook_add(emulator._uch, ctypes.byref(hook), unicorn.UC_HOOK_INTR, function,
                                   ctypes.byref(self._own), ctypes.c_uint64(1), ctypes.c_uint64(0))
        if status != unicorn.UC_ERR_OK:
            raise unicorn.UcError(status)

    def fault(self) -> str:
        """See `OwnInstructions`."""
        return f"it does not know the instruction {self._own.word:#010x}" if self._own.failed else ""


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


class PythonInstructions:
    """A function of the target in Python; see `own_instructions`."""

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
        """See `OwnInstructions`."""
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
