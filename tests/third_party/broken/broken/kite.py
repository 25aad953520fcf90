"""A target of another name than its entry point."""

from dataclasses import replace

from dovetail.targets.riscv import TARGET as RISCV

TARGET = replace(RISCV, name="buzzard")
