"""Cycles of a core that issues up to two Thumb-2 instructions at once, in order: the Cortex-M7.

Arm publishes no table of cycles. That two words can be loaded at once is in the Technical Reference Manual (ARM DDI
0489, "Load/Store Unit"). That one of two instructions may use the shifter, and that packed ones are only the first of
two, was observed on silicon and published (Mastodon, tag CortexM7). The latency of a load is fitted to code whose
time on silicon is published: CMSIS-NN of February 2018, whose authors measured a network for CIFAR-10 on an STM32F746
at 216 MHz (arXiv:1801.06601, 99.1 ms). It takes 105 ms here as gcc compiles it at -O3, and 108 ms at -O2: 6 and 9 %
more, its convolutions 12 % less to 18 % more. A latency of 3 gives 131 ms, the Cortex-M4's table 146 ms. Caches
always hit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from dovetail.errors import MissingExtraError
from dovetail.records import Record
from dovetail.sim.encodings import Instruction

_LATENCY = {"load": 2, "transfer": 2, "multiply": 2, "multiply_add": 2, "multiply_long": 2, "multiply_long_add": 2}
"""Cycles until another instruction can use a result, where that is not the next one."""
_MEMORY = ("load", "store", "store_register")
_ALONE = ("transfer", "divide", "jump", "call", "system", "barrier")
"""Kinds that nothing is issued beside."""
_SHIFTED = ("lsl", "lsr", "asr", "ror", "rrx", "sxt", "uxt", "ubfx", "sbfx", "bfi", "bfc", "rev", "rbit", "clz")
"""Beginnings of instructions that use the shifter, of which there is one."""
_PACKED = (
    *("sxtb16", "uxtb16", "sxtab16", "uxtab16", "pkh", "rev", "sel", "ssat", "usat", "qadd", "qsub", "qdadd", "sadd"),
    *("uadd", "ssub", "usub", "smlad", "smuad", "smlsd", "smlald", "smlsld", "smul", "smla", "smml", "smmul"),
)
"""Beginnings of instructions that are only ever the first of two."""


class Operands(Record):
    """An instruction's registers, as far as its issue depends on them."""

    reads: frozenset[int]
    writes: frozenset[int]
    addresses: frozenset[int]
    """Registers of an address, which are written back one cycle later."""
    is_shifted: bool
    is_packed: bool


@cache
def _disassembler() -> Callable[[bytes], Operands]:
    """Takes an instruction's bytes; raises MissingExtraError without Capstone."""
    try:
        capstone: Any = importlib.import_module("capstone")
    except ImportError:
        raise MissingExtraError("capstone", "iss", "the clock of the Cortex-M7") from None
    engine = capstone.Cs(capstone.CS_ARCH_ARM, capstone.CS_MODE_THUMB | capstone.CS_MODE_MCLASS)
    engine.detail = True
    memory, register = capstone.arm.ARM_OP_MEM, capstone.arm.ARM_OP_REG

    @cache
    def operands(code: bytes) -> Operands:
        found = next(engine.disasm(code, 0, 1), None)
        if found is None:
            return Operands(frozenset(), frozenset(), frozenset(), True, True)
        reads, writes = map(frozenset, found.regs_access())
        places = [part.mem for part in found.operands if part.type == memory]
        shifts = any(part.type == register and part.shift.value for part in found.operands)
        return Operands(
            reads,
            writes,
            frozenset(number for place in places for number in (place.base, place.index)),
            shifts or found.mnemonic.startswith(_SHIFTED),
            found.mnemonic.startswith(_PACKED),
        )

    return operands


class IssueClock:
    """Issues the instructions of a block one after the other, two at once where the core can."""

    def __init__(self) -> None:
        self.cycle = -1
        """The cycle in which the last one was issued, or, of several cycles, ends."""
        self._ready: dict[int, int] = {}
        """Register -> the first cycle in which it can be read."""
        self._sums: dict[int, int] = {}
        """Register -> the first cycle in which a product can be added to it."""
        self._first: tuple[Instruction, Operands] | None = None
        """The instruction of this cycle that another may be issued beside."""

    def issue(self, instruction: Instruction, code: bytes, cycles: int) -> None:
        """Issue an instruction, of `code`, which keeps others waiting for so many cycles."""
        own = _disassembler()(code)
        is_product = instruction.kind.startswith("multiply")
        added = own.reads & own.writes if is_product else frozenset[int]()
        ready = [self._ready.get(register, 0) for register in own.reads - added]
        ready += [self._sums.get(register, self._ready.get(register, 0)) for register in added]
        earliest = max(ready, default=0)
        if self._first is not None and earliest <= self.cycle and _pair(self._first, (instruction, own)):
            self._first = None
        else:
            self.cycle, self._first = max(self.cycle + 1, earliest), (instruction, own)
        self.cycle += cycles - 1
        for register in own.writes:
            is_address = register in own.addresses and len(own.writes) > 1
            late = 1 if is_address else _LATENCY.get(instruction.kind, 1)
            self._ready[register] = self.cycle + late
            self._sums[register] = self.cycle + (1 if is_product else late)


def _pair(first: tuple[Instruction, Operands], second: tuple[Instruction, Operands]) -> bool:
    """Whether two neighbours, whose operands are there, can be issued at once."""
    (one, left), (other, right) = first, second
    kinds = (one.kind, other.kind)
    return not (
        left.writes & right.writes
        or any(kind in _ALONE for kind in kinds)
        or all(kind.startswith("multiply") for kind in kinds)
        or all(kind in _MEMORY and kind != "load" for kind in kinds)
        or (left.is_shifted and right.is_shifted)
        or right.is_packed
        or one.kind == "branch_not_taken"
    )
