"""A RISC-V core with little RAM."""

from dovetail.target import Core, Memory, Policy, Target

TARGET = Target(
    name="osprey",
    sentence="RV32IMC core, 256 KiB flash, 64 KiB RAM",
    core=Core("rv32imc"),
    memories=(Memory("flash", base=0x08000000, size=256 * 1024), Memory("ram", base=0x20000000, size=64 * 1024)),
    code="flash",
    values="ram",
    policies=(Policy("exact", "the core requantises as TFLite Micro does", ()),),
)
