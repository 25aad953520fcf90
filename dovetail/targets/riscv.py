"""A plain RISC-V microcontroller: RV32IMC cores, flash and RAM, no accelerator."""

from __future__ import annotations

from dovetail.target import Core, Memory, Policy, Target, with_workers

TARGET = Target(
    name="riscv",
    sentence="RISC-V RV32IMC core alone, 2 MiB flash, 512 KiB RAM",
    core=Core("rv32imc"),
    memories=(Memory("flash", base=0x08000000, size=2 * 1024 * 1024), Memory("ram", base=0x20000000, size=512 * 1024)),
    code="flash",
    values="ram",
    policies=(Policy("exact", "the core requantises as TFLite Micro does", ()),),
)

X2 = with_workers(TARGET, TARGET.core)
X4 = with_workers(TARGET, *[TARGET.core] * 3)
