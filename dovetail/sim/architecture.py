"""The one door to what the simulator must know of an instruction set: `riscv.py` and `arm.py` each hold a family, and
import the emulator when a core is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.errors import TargetError
from dovetail.sim.arm import ARM
from dovetail.sim.core import Architecture
from dovetail.sim.riscv import RISCV, RISCV64


def architecture_of(isa: str) -> Architecture:
    """The architecture of an instruction set; raises BuildError where there is none."""
    core = instruction_set(isa)
    return ARM if core.family == "arm" else RISCV64 if core.bits == 64 else RISCV


def core_costs(isa: str, overrides: Mapping[str, int], name: str) -> Any:
    """The table of cycles of a core, with those that differ from the stated default (`Core.costs`); raises TargetError,
    with the target's name, for a class of instructions that does not exist."""
    table = architecture_of(isa).costs
    known = [field.name for field in fields(table())]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        what = f"there is a cost for '{unknown[0]}', which is no class of instructions"
        raise TargetError(what, where=f"core of {name}", hint=f"use {', '.join(known)}")
    return table(**overrides)
