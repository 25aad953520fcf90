"""What compilers, start-up code and linker must know of a core's instruction set: the one place that says it.

Flags and their reasons: hardware/cores.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from dovetail.errors import BuildError

Family = Literal["riscv", "arm", "host"]
"""What simulator and start-up code tell apart."""

EMITTED_C = ("-fno-strict-aliasing", "-Wall", "-Wextra", "-Wconversion", "-Wshadow")
"""Options emitted C is compiled with wherever it is: bytes are read as other types; no warning is left."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A core as the tools see it.

    Attributes:
        name: as `Core.isa` says it, e.g. "rv32imc" or "cortex-m4".
        family: "riscv", "arm" for the Thumb-2 cores of the M profile, or "host" for this computer, which is compiled
            for without flags, start-up code and linker script.
        zig: flags that make zig compile and link for it. gcc: the same for a cross GCC.
        gcc_command: the cross GCC's usual name.
        start: its start-up code in emit/runtime. entry: the symbol the start-up code begins at.
        architecture: name for the linker's OUTPUT_ARCH. discarded: sections nobody needs in the firmware.
        accumulators: sums the core kernels' inner loops keep at once; 16 suits the 31 registers of RISC-V, 6 the 13
            of Thumb-2.
    """

    name: str
    family: Family
    zig: tuple[str, ...]
    gcc: tuple[str, ...]
    gcc_command: str
    start: str
    entry: str
    architecture: str
    discarded: str
    accumulators: int

    @property
    def is_host(self) -> bool:
        """True for this computer: programs for it are no firmware."""
        return self.family == "host"


_CORTEX_M = {"cortex-m4": "cortex_m4", "cortex-m7": "cortex_m7", "cortex-m33": "cortex_m33+dsp"}
"""GCC's names and zig's, which leaves DSP instructions out of the Cortex-M33 unless they are asked for."""


def instruction_set(isa: str) -> InstructionSet:
    """The instruction set of that name.

    Raises:
        BuildError: there is none.
    """
    if re.fullmatch(r"rv32[iemac]+", isa):
        return _riscv(isa)
    if isa in _CORTEX_M:
        return _cortex_m(isa)
    if isa == "host":
        return InstructionSet(isa, "host", (), (), "cc", "", "main", "", "", accumulators=6)
    raise BuildError("there is no compiler for this instruction set", where=f"instruction set '{isa}'",
                     hint=f"use 'host', e.g. 'rv32imc', or one of {', '.join(_CORTEX_M)}")


def _riscv(isa: str) -> InstructionSet:
    extensions = "".join(f"+{letter}" for letter in isa.removeprefix("rv32") if letter != "i")
    return InstructionSet(
        isa, "riscv",
        zig=("-target", "riscv32-freestanding-none", f"-mcpu=generic_rv32{extensions}"),
        # -misa-spec: newer ones split off Zicsr and find no multilib
        gcc=(f"-march={isa}", "-misa-spec=2.2", "-mabi=ilp32e" if "e" in isa else "-mabi=ilp32"),
        gcc_command="riscv64-unknown-elf-gcc", start="rv32_start.S", entry="_start", architecture="riscv",
        discarded="*(.riscv.attributes)", accumulators=16,
    )


def _cortex_m(isa: str) -> InstructionSet:
    return InstructionSet(
        isa, "arm",
        zig=("-target", "thumb-freestanding-eabi", f"-mcpu={_CORTEX_M[isa]}"),  # eabi: no floating-point registers
        gcc=(f"-mcpu={isa}", "-mthumb", "-mfloat-abi=soft"),
        gcc_command="arm-none-eabi-gcc", start="cortex_m_start.S", entry="Reset_Handler", architecture="arm",
        discarded="*(.ARM.attributes) *(.ARM.exidx .ARM.exidx.* .ARM.extab .ARM.extab.*)", accumulators=6,
    )
