"""Builds small firmware for the simulator's tests, and holds a timer device they use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dovetail.codegen.build.elf import symbols
from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.build.toolchain import compile_firmware, find_compiler
from dovetail.codegen.emit.firmware import DMA_DRIVER, RUNTIME, linker_script, runtime_path
from dovetail.errors import MissingExtraError
from dovetail.sim.device import Activity, Bus, DeviceSpec, MemoryRegion
from dovetail.sim.protocol import SimulationSetup

MEMORIES = (MemoryRegion("l2", 0x1C000000, 0x20000), MemoryRegion("l1", 0x10000000, 0x10000))
DMA = DeviceSpec("dovetail.sim.dma:DmaDevice", 0x1A100000, 4096, {"bytes_per_cycle": 8, "setup_cycles": 16})
TIMER = DeviceSpec(f"{__file__}:Timer", 0x1A200000, 256)

PROLOGUE = """
#include "dovetail_rt.h"
#include "dma.h"
#define READY() command(DOVETAIL_SIM_READY)
#define DONE() command(DOVETAIL_SIM_DONE)
__attribute__((unused, noinline)) static void command(uint32_t what)
{
    dovetail_compiler_barrier();
    dovetail_mmio_write(DOVETAIL_SIM_COMMAND, what);
    dovetail_compiler_barrier();
}
__attribute__((unused)) static void exit_with(uint32_t code)
{
    dovetail_mmio_write(DOVETAIL_SIM_EXIT_CODE, code);
    dovetail_mmio_write(DOVETAIL_SIM_COMMAND, DOVETAIL_SIM_EXIT);
}
int main(void);
"""


def require_cross_compiler(isa: str = "rv32imc") -> None:
    """Skip the test where firmware cannot be compiled."""
    try:
        find_compiler(isa)
    except MissingExtraError as missing:
        pytest.skip(str(missing))


def require_chip() -> None:
    """Skip the test where firmware cannot be compiled or simulated."""
    if find_spec("unicorn") is None:
        pytest.skip("the instruction-set simulator needs unicorn")
    require_cross_compiler()


def build(
    folder: Path,
    source: str,
    *,
    assembler: bool = False,
    stack_bytes: int = 4096,
    data: str = "l2",
    isa: str = "rv32imc",
) -> Path:
    """Compile `source` (C after PROLOGUE, or assembler) with start-up and runtime; return the ELF file."""
    require_cross_compiler(isa)
    start = instruction_set(isa).start
    for name in (start, *RUNTIME, *DMA_DRIVER):
        (folder / name).write_bytes(runtime_path(name).read_bytes())
    main = folder / ("main.S" if assembler else "main.c")
    main.write_text(source if assembler else PROLOGUE + source)
    script = linker_script(
        MEMORIES, text="l2", data=data, stack="l1", stack_bytes=stack_bytes, extra={".l1": "l1"}, isa=isa
    )
    (folder / "link.ld").write_text(script)
    sources = [Path(start), Path("dovetail_rt.c"), Path("dma.c"), Path(main.name)]
    return compile_firmware(
        folder,
        sources,
        linker_script=Path("link.ld"),
        defines={"DOVETAIL_SIM": 1},
        isa=isa,
        flags=() if assembler else ("-Wall", "-Wextra", "-Wconversion", "-Werror"),
    )


def chip(elf: Path, *devices: DeviceSpec, isa: str = "rv32imc") -> SimulationSetup:
    """A chip with MEMORIES and `devices`."""
    return SimulationSetup(elf, MEMORIES, devices, isa)


class Timer:
    """Raises its interrupt a written number of cycles later; any read lowers it and gives the number of rings.

    Writing 0xDEAD kills the process, 0xBEEF raises an ordinary exception.
    """

    name = "timer"

    def __init__(self, bus: Bus) -> None:
        self.reset()

    def reset(self) -> None:
        self._due: int | None = None
        self._rings = 0
        self._level = False

    def read(self, offset: int, now: int) -> int:
        self._level = False
        return self._rings

    def write(self, offset: int, value: int, now: int) -> None:
        if value == 0xDEAD:
            os.kill(os.getpid(), signal.SIGSEGV)
        if value == 0xBEEF:
            raise ZeroDivisionError("a mistake in a device model")
        self._due = now + value

    def next_event(self) -> int | None:
        return self._due

    def advance(self, now: int) -> None:
        if self._due is not None and self._due <= now:
            self._due, self._level = None, True
            self._rings += 1

    def interrupt(self) -> bool:
        return self._level

    def activities(self) -> list[Activity]:
        return []


COUNT_BY_INSTRUCTION = """
import sys, unicorn, unicorn.arm_const
from elftools.elf.elffile import ELFFile
CORE
for base, size in ((0x1C000000, 0x20000), (0x10000000, 0x10000), (0x1A000000, 0x1000), (0xE000E000, 0x1000)):
    core.mem_map(base, size)
with open(sys.argv[1], "rb") as stream:
    elf = ELFFile(stream)
    for segment in elf.iter_segments():
        if segment["p_type"] == "PT_LOAD":
            core.mem_write(segment["p_paddr"], segment.data())
    entry = elf["e_entry"]
count = 0
def step(core, address, size, data):
    global count
    count += 1
core.hook_add(unicorn.UC_HOOK_CODE, step)
core.emu_start(entry, int(sys.argv[2], 16))
print(count, int.from_bytes(core.mem_read(0x1A000004, 4), "little"))
"""
EMULATED = {
    "rv32imc": "core = unicorn.Uc(unicorn.UC_ARCH_RISCV, unicorn.UC_MODE_RISCV32)",
    "rv64gc": "core = unicorn.Uc(unicorn.UC_ARCH_RISCV, unicorn.UC_MODE_RISCV64)",
    "cortex-m0plus": "core = unicorn.Uc(unicorn.UC_ARCH_ARM, unicorn.UC_MODE_THUMB | unicorn.UC_MODE_MCLASS)\n"
    "core.ctl_set_cpu_model(unicorn.arm_const.UC_CPU_ARM_CORTEX_M0)",
    "cortex-m4": "core = unicorn.Uc(unicorn.UC_ARCH_ARM, unicorn.UC_MODE_THUMB | unicorn.UC_MODE_MCLASS)\n"
    "core.ctl_set_cpu_model(unicorn.arm_const.UC_CPU_ARM_CORTEX_M4)",
}


def counted_by_instruction(elf: Path, isa: str = "rv32imc") -> tuple[int, int]:
    """Instructions up to dovetail_halt and the exit code, by a hook on every instruction."""
    halt = symbols(elf)["dovetail_halt"].address
    script = COUNT_BY_INSTRUCTION.replace("CORE", EMULATED[isa])
    answer = subprocess.run(
        [sys.executable, "-c", script, str(elf), f"{halt:x}"], capture_output=True, text=True, check=True
    )
    count, code = answer.stdout.split()
    return int(count), int(code)
