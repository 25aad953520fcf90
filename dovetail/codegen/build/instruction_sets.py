"""Facts about a core's instruction set for compilers, start-up code and linker; they stand here only.

Flags and their reasons: hardware/cores.md.
"""

from __future__ import annotations

import re
from typing import Literal

from dovetail.errors import BuildError
from dovetail.kernels.kernel import CALLING
from dovetail.records import Record

Family = Literal["riscv", "arm", "host"]
"""Family of instruction sets, as simulator and start-up code distinguish them."""

EMITTED_C = ("-fno-strict-aliasing", "-Wall", "-Wextra", "-Wconversion", "-Wshadow")
"""Options emitted C is compiled with wherever it is: bytes are read as other types; no warning is left."""


class InstructionSet(Record):
    """A core as the tools see it.

    Attributes:
        name: as `Core.isa` says it, e.g. "rv32imc" or "cortex-m4".
        family: "riscv", "arm" for the Thumb-2 cores of the M profile, or "host" for this computer, which is compiled
            for without flags, start-up code and linker script.
        zig: flags that make zig compile and link for it. gcc: the same for a cross GCC.
        gcc_command: the cross GCC's usual name.
        start: its start-up code in emit/runtime. entry: the symbol the start-up code begins at.
        architecture: name for the linker's OUTPUT_ARCH. discarded: sections nobody needs in the firmware.
        library: whether firmware needs the compiler's own library even without floating point.
        bits: of a register and an address. "rv64gc" is compiled for without its floating point.
        simulator: the one of `dovetail.run.SIMULATORS` that emulates it.
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
    library: bool = False
    bits: int = 32
    simulator: str = "iss"

    @property
    def is_host(self) -> bool:
        """True for this computer: programs for it are no firmware."""
        return self.family == "host"


_CORTEX_M: dict[str, tuple[str, tuple[str, ...]]] = {
    "cortex-m0plus": ("cortex_m0plus", ("-mcpu=cortex-m0plus",)),
    "cortex-m3": ("cortex_m3", ("-mcpu=cortex-m3",)),
    "cortex-m4": ("cortex_m4", ("-mcpu=cortex-m4",)),
    "cortex-m7": ("cortex_m7", ("-mcpu=cortex-m7",)),
    "cortex-m23": ("cortex_m23 -U__ARM_FEATURE_SAT", ("-mcpu=cortex-m23",)),
    "cortex-m33": ("cortex_m33+dsp", ("-mcpu=cortex-m33",)),
    "cortex-m55": ("cortex_m33+dsp", ("-march=armv8-m.main+dsp", "-mtune=cortex-m55")),
    "cortex-m55+mve": (
        "cortex_m33+dsp+v8_1m_main+lob+mve -D__ARM_FEATURE_MVE=1",
        ("-mcpu=cortex-m55+nofp", "-mfloat-abi=softfp"),
    ),
}
"""zig's names and GCC's flags. zig leaves DSP instructions out of the Cortex-M33 unless they are asked for, and takes
the Cortex-M23 to have SSAT. "cortex-m55" is what the Cortex-M33 has too; "+mve" adds Helium for integers, which zig
assembles but does not compile for, as it has no ABI for vectors without registers of floats."""


def instruction_set(isa: str) -> InstructionSet:
    """The instruction set of that name; raises BuildError where there is none."""
    if known := re.fullmatch(r"rv(32|64)([iemac]+)", isa.replace("rv64gc", "rv64imac")):
        bits, letters = int(known[1]), known[2]
        extensions = "".join(f"+{letter}" for letter in letters if letter != "i")
        zig = ("-target", f"riscv{bits}-freestanding-none", f"-mcpu=generic_rv{bits}{extensions}")
        abi = "lp64" if bits == 64 else "ilp32e" if "e" in letters else "ilp32"
        # -misa-spec: newer ones split off Zicsr and find no multilib
        gcc = (f"-march={known[0]}", "-misa-spec=2.2", f"-mabi={abi}")
        model = ("-mcmodel=medany",) if bits == 64 else ()  # code at any address
        names = ("riscv64-unknown-elf-gcc", "rv32_start.S", "_start", "riscv", "*(.riscv.attributes)")
        return InstructionSet(isa, "riscv", (*zig, *model), (*gcc, *model), *names, bits=bits)
    if isa in _CORTEX_M:
        processor, flags = _CORTEX_M[isa]
        target = ("-target", "thumb-freestanding-eabi", *f"-mcpu={processor}".split())  # eabi: no registers of floats
        flags = (*flags, "-mthumb", *(() if isa.endswith("+mve") else ("-mfloat-abi=soft",)))
        unwanted = "*(.ARM.attributes) *(.ARM.exidx .ARM.exidx.* .ARM.extab .ARM.extab.*)"
        names = ("arm-none-eabi-gcc", "cortex_m_start.S", "Reset_Handler", "arm", unwanted)
        simulator = "qemu" if isa.endswith("+mve") else "iss"
        return InstructionSet(isa, "arm", target, flags, *names, library=isa in CALLING, simulator=simulator)
    if isa == "host":
        return InstructionSet(isa, "host", (), (), "cc", "", "main", "", "", simulator="host")
    hint = f"use 'host', e.g. 'rv32imc', 'rv64gc', or one of {', '.join(_CORTEX_M)}"
    raise BuildError("there is no compiler for this instruction set", where=f"instruction set '{isa}'", hint=hint)
