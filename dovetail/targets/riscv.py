"""Plain RISC-V microcontrollers: RV32IMC, RV32IMAC and RV64GC cores, flash and RAM, no accelerator."""

from __future__ import annotations

from dataclasses import replace

from dovetail.target import Core, Memory, Policy, Quantisation, Target

TARGET = Target(
    name="riscv",
    sentence="RISC-V RV32IMC core alone, 2 MiB flash, 512 KiB RAM",
    core=Core("rv32imc"),
    memories=(Memory("flash", base=0x08000000, size=2 * 1024 * 1024), Memory("ram", base=0x20000000, size=512 * 1024)),
    code="flash",
    values="ram",
    policies=(Policy("exact", "the core requantises as TFLite Micro does", ()),),
    quantisation=Quantisation(wide_sums=True),
)

IMAC = replace(
    TARGET,
    name="riscv_imac",
    sentence="RISC-V RV32IMAC core alone, 2 MiB flash, 512 KiB RAM",
    core=Core("rv32imac"),
)

RV64 = replace(
    TARGET,
    name="riscv64",
    sentence="RISC-V RV64GC core alone (no floating point), 2 MiB flash, 512 KiB RAM",
    core=Core("rv64gc"),
)
"""Counted by the table of the 32-bit cores: cycles are an estimate, instructions exact."""

HALF_CLOCK = {
    **dict.fromkeys(("alu", "load", "store", "multiply", "branch_not_taken", "load_use"), 2),
    **dict(multiply_high=10, divide=70, branch_taken=6, jump=4, system=8, interrupt_entry=8),
}
"""Twice the cycles of `sim.riscv_costs.CoreCosts`, counted by the clock of the other core."""

BIG_SMALL = replace(
    TARGET,
    name="riscv_big_small",
    sentence="two RISC-V RV32IMC cores, the second at half the clock of the first; memories as riscv",
    workers=(Core("rv32imc", costs=HALF_CLOCK, speed=0.5),),
)
