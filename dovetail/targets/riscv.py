"""A plain RISC-V microcontroller: one RV32IMC core, flash and RAM, no accelerator."""

from __future__ import annotations

from dovetail.target import Core, Memory, Policy, Target

TARGET = Target(
    name="riscv",
    sentence="RISC-V RV32IMC core alone, 2 MiB flash, 512 KiB RAM",
    core=Core("rv32imc"),
    memories=(Memory("flash", base=0x08000000, size=2 * 1024 * 1024), Memory("ram", base=0x20000000, size=512 * 1024)),
    code="flash",
    values="ram",
    policies=(Policy("exact", "the core requantises as TFLite Micro does", ()),),
)
