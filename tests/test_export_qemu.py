"""Exports as a person links them, with a C library, on machines QEMU emulates: they give what TFLite Micro gives."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model
from dovetail.guests.export.write import export
from dovetail.run import open_build
from dovetail.target.description import Target
from dovetail.targets import load_target
from oracles import NETWORKS, references
from test_end_to_end import network_file
from test_export import STRICT

pytestmark = pytest.mark.oracles


@dataclass(frozen=True)
class Machine:
    """A machine of QEMU's: the target, and where code and values lie after a reset."""

    target: str
    flags: tuple[str, ...]
    """Of GCC."""
    code: int = 0
    ram: int = 0x20000000
    sizes: tuple[int, int] = (4 << 20, 4 << 20)
    """Bytes of both."""

    @property
    def tools(self) -> tuple[str, str, str]:
        """Prefix of the compiler, its library's name, and the emulator."""
        if load_target(self.target).core.isa.startswith("cortex"):
            return "arm-none-eabi-", "newlib", "qemu-system-arm"
        return "riscv64-unknown-elf-", "picolibc", f"qemu-system-riscv{64 if self.target == 'riscv64' else 32}"


def _arm(processor: str) -> tuple[str, ...]:
    return (f"-mcpu={processor}", "-mthumb", "-mfloat-abi=soft")


MACHINES = {
    "mps2-an385": Machine("cortex_m3", _arm("cortex-m3")),
    "mps2-an386": Machine("cortex_m4", _arm("cortex-m4")),
    "netduinoplus2": Machine("stm32f407", _arm("cortex-m4"), 0x08000000, sizes=(1 << 20, 128 << 10)),
    "mps2-an500": Machine("cortex_m7", _arm("cortex-m7")),
    "mps2-an505": Machine("cortex_m33", _arm("cortex-m33"), 0x10000000, 0x38000000),
    "mps3-an547": Machine("cortex_m55", _arm("cortex-m55+nofp"), 0x10000000, 0x30000000, (512 << 10, 512 << 10)),
    "virt rv64": Machine(
        "riscv64",
        ("-march=rv64imac", "-misa-spec=2.2", "-mabi=lp64", "-mcmodel=medany", "--specs=picolibc.specs"),
        0x80000000,
        0x80400000,
    ),
    "virt": Machine(
        "riscv", ("-march=rv32imc", "-misa-spec=2.2", "-mabi=ilp32", "--specs=picolibc.specs"), 0x80000000, 0x80400000
    ),
}
"""By QEMU's names, and what tells two of a name apart. The Cortex-M33 and M55 begin in the secure view of memory."""

PROGRAM = r"""
#include <stdio.h>
#include "net.h"
static const int8_t given[] = {GIVEN};
int main(void)
{
    for (int at = 0; at < NET_INPUT_0_ELEMENTS; at++) { NET_INPUT_0[at] = given[at]; }
    net_run();
    for (int at = 0; at < NET_OUTPUT_0_ELEMENTS; at++) { printf("%d ", NET_OUTPUT_0[at]); }
    printf("\n");
    return 0;
}
"""
VECTORS = """
extern int _start(void);
extern char __stack[];
__attribute__((section(".vectors"), used)) static void *const vectors[] = {__stack, (void *)&_start};
"""
SCRIPT = """
ENTRY(_start)
MEMORY { code (rx) : ORIGIN = CODE, LENGTH = ROOM
         ram (rwx) : ORIGIN = VALUES, LENGTH = MORE }
SECTIONS {
    .text : { KEEP(*(.vectors)) *(.text*) *(.rodata*) KEEP(*(.init)) KEEP(*(.fini)) } > code
    .ARM.exidx : { *(.ARM.exidx*) *(.eh_frame*) } > code
    .preinit_array : { __preinit_array_start = .; __preinit_array_end = .; } > code
    .init_array : { __init_array_start = .; KEEP(*(.init_array*)) __init_array_end = .; } > code
    .fini_array : { __fini_array_start = .; KEEP(*(.fini_array*)) __fini_array_end = .; } > code
    .data : { *(.data*) } > ram
    .bss : { __bss_start__ = .; *(.bss*) *(COMMON) __bss_end__ = .; } > ram
    end = .; __end__ = .; __stack = ORIGIN(ram) + LENGTH(ram);
}
"""
"""QEMU loads .data to where it belongs, so nobody copies it."""


def linked(machine: Machine, folder: Path) -> Path:
    """The program of `folder / "main.c"` with the exported library, start-up code and C library."""
    compiler, elf = f"{machine.tools[0]}gcc", folder / "net.elf"
    ends = [folder / "main.c", folder / "net" / "libnet.a", "-o", elf]
    code, ram = machine.sizes
    places = dict(__flash=machine.code, __flash_size=code, __ram=machine.ram, __ram_size=ram)
    if machine.tools[1] == "newlib":
        text = SCRIPT
        for word, number in zip(("CODE", "ROOM", "VALUES", "MORE"), places.values(), strict=True):
            text = text.replace(word, hex(number))
        (folder / "link.ld").write_text(text)
        (folder / "vectors.c").write_text(VECTORS)
        library = ["--specs=rdimon.specs", "-T", folder / "link.ld", folder / "vectors.c"]
    else:
        library = ["--oslib=semihost", "--crt0=hosted"]
        library += [f"-Wl,--defsym={name}={value:#x}" for name, value in places.items()]
    subprocess.run([compiler, *machine.flags, "-O1", f"-I{folder / 'net/src'}", *library, *ends], check=True)
    return elf


def target_of(machine: Machine) -> Target:
    """The machine's target with no more room for code and constants than the machine has, as `--set` says it."""
    target = load_target(machine.target)
    code = target.memory(target.code)
    room = min(code.size, machine.sizes[0])
    return replace(target, memories=tuple(replace(m, size=room) if m is code else m for m in target.memories))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("board", MACHINES)
def test_an_exported_network_on_a_machine_equals_micro(board: str, name: str, tmp_path: Path) -> None:
    """The exported sources, compiled without a warning, in a program with a C library and semihosting."""
    machine = MACHINES[board]
    prefix, _, emulator = machine.tools
    if not (shutil.which(f"{prefix}gcc") and shutil.which(emulator)):
        pytest.skip(f"{prefix}gcc or {emulator} is not installed")
    compiled = compile_model(network_file(name), target_of(machine), Options(name="net"))
    write_project(compiled.project, tmp_path / "build")
    export(open_build(tmp_path / "build"), "make", tmp_path / "net")
    tools = [f"CC={prefix}gcc", f"AR={prefix}ar", f"CPU={' '.join(machine.flags)} -Werror"]
    subprocess.run(["make", "-s", "-C", tmp_path / "net", *tools], check=True)
    counting = [f"{prefix}gcc", *machine.flags, "-std=c99", *STRICT, f"-I{tmp_path / 'net/src'}", "-fsyntax-only"]
    subprocess.run([*counting, tmp_path / "net" / "example" / "cycles.c"], check=True)
    reference = references(name)
    numbers = reference["in_0"].reshape(-1).tolist()
    (tmp_path / "main.c").write_text(PROGRAM.replace("GIVEN", ", ".join(map(str, numbers))))
    command = [emulator, "-M", board.split()[0], "-nographic", "-monitor", "none", "-serial", "none"]
    command += ["-bios", "none"] if board.startswith("virt") else []
    command += ["-semihosting-config", "enable=on,target=native", "-kernel", linked(machine, tmp_path)]
    given = subprocess.DEVNULL
    found = subprocess.run(command, stdin=given, capture_output=True, text=True, timeout=120, check=True)
    # QEMU writes single characters of semihosting to its standard error
    wanted = reference["out_0__tflm"].reshape(-1)
    np.testing.assert_array_equal([int(number) for number in (found.stdout + found.stderr).split()], wanted)
