"""How long the instructions of a RISC-V core take, and how a block of code is counted.

One decoder serves both block hooks (native and Python), so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from dovetail.simulate.architecture import BlockCost


@dataclass(frozen=True, slots=True)
class CoreCosts:
    """Cycles of each class of instruction.

    The defaults are those of a small in-order 4-stage core with single-cycle memories: CV32E40P User Manual,
    chapter "Pipeline Details", table "Cycle counts per instruction type" and section "Hazards"; interrupt
    latency from chapter "Exceptions and Interrupts". Where the manual gives a range that depends on data or
    alignment, this takes: `divide` 35 (the worst of 3..35), jumps and taken branches to aligned targets,
    aligned loads and stores, CSR accesses at 4 (its mstatus figure).

    Attributes:
        alu: integer arithmetic, logic, shifts, moves, `lui`, `auipc`.
        load: loads. store: stores.
        multiply: `mul`. multiply_high: `mulh`, `mulhu`, `mulhsu`. divide: `div`, `divu`, `rem`, `remu`.
        branch_not_taken: a conditional branch that falls through. branch_taken: one that does not.
        jump: `jal`, `jalr` and their compressed forms, `mret`.
        system: CSR accesses, fences, `wfi`, `ecall`, `ebreak`.
        load_use: extra cycles when an instruction uses the result of the load just before it.
        interrupt_entry: cycles between an interrupt being taken and the first instruction of its handler.
    """

    alu: int = 1
    load: int = 1
    store: int = 1
    multiply: int = 1
    multiply_high: int = 5
    divide: int = 35
    branch_not_taken: int = 1
    branch_taken: int = 3
    jump: int = 2
    system: int = 4
    load_use: int = 1
    interrupt_entry: int = 4


@dataclass(frozen=True, slots=True)
class Instruction:
    """A decoded instruction.

    Attributes:
        size: 2 or 4 bytes.
        kind: the name of its field in `CoreCosts`; conditional branches are "branch_not_taken".
        written: register a load writes, 0 for everything else.
        used: registers it reads.
        ends: the instruction always leaves the block (`wfi`, `ecall`, `ebreak`, `mret`).
    """

    size: int
    kind: str
    written: int = 0
    used: tuple[int, ...] = ()
    ends: bool = False


@lru_cache(maxsize=65536)
def decode(word: int) -> Instruction:
    """Decode the RV32IMC instruction in the low bits of the 32-bit `word`.

    Encodings: RISC-V Unprivileged ISA manual, the instruction set listings and the chapter on "C".
    """
    return _decode_compressed(word & 0xFFFF) if word & 3 != 3 else _decode_full(word)


def _decode_full(word: int) -> Instruction:
    opcode, function, first, second = word & 0x7F, word >> 12 & 7, word >> 15 & 31, word >> 20 & 31
    if opcode in (0x03, 0x07):
        return Instruction(4, "load", word >> 7 & 31, (first,))
    if opcode in (0x23, 0x27):
        return Instruction(4, "store", 0, (first, second))
    if opcode == 0x63:
        return Instruction(4, "branch_not_taken", 0, (first, second))
    if opcode in (0x6F, 0x67):
        return Instruction(4, "jump", 0, (first,) if opcode == 0x67 else ())
    if opcode == 0x73:
        if function:
            return Instruction(4, "system", 0, () if function & 4 else (first,))
        return Instruction(4, "jump" if word == 0x30200073 else "system", ends=True)
    if opcode == 0x0F:
        return Instruction(4, "system")
    if opcode == 0x33 and word >> 25 == 1:
        kind = "multiply" if function == 0 else "multiply_high" if function < 4 else "divide"
        return Instruction(4, kind, 0, (first, second))
    if opcode in (0x37, 0x17):
        return Instruction(4, "alu")
    return Instruction(4, "alu", 0, (first,) if opcode == 0x13 else (first, second))


def _decode_compressed(half: int) -> Instruction:
    quadrant, function = half & 3, half >> 13
    full, second, low, short = half >> 7 & 31, half >> 2 & 31, 8 + (half >> 2 & 7), 8 + (half >> 7 & 7)
    if quadrant == 0:
        if function == 0:
            return Instruction(2, "alu", 0, (2,))
        if function < 4:
            return Instruction(2, "load", low, (short,))
        return Instruction(2, "store", 0, (short, low))
    if quadrant == 1:
        if function in (1, 5):
            return Instruction(2, "jump")
        if function >= 6:
            return Instruction(2, "branch_not_taken", 0, (short,))
        if function == 4:
            return Instruction(2, "alu", 0, (short, low) if half >> 10 & 3 == 3 else (short,))
        reads = function == 0 or (function == 3 and full == 2)
        return Instruction(2, "alu", 0, (full,) if reads else ())
    if function in (1, 2, 3):
        return Instruction(2, "load", full, (2,))
    if function >= 5:
        return Instruction(2, "store", 0, (2, second))
    if function == 0:
        return Instruction(2, "alu", 0, (full,))
    if second:
        return Instruction(2, "alu", 0, (second, full) if half >> 12 & 1 else (second,))
    return Instruction(2, "jump", 0, (full,)) if full else Instruction(2, "system", ends=True)


def block_cost(address: int, size: int, fetch: Callable[[int], int], costs: CoreCosts) -> BlockCost:
    """Count the block of `size` bytes at `address`; a load's use in the block after it is not seen.

    The emulator translates past instructions that always trap or wait (`wfi`); what follows one does not run.

    Args:
        fetch: gives the 16-bit parcel at an address.
        costs: cycles per class.
    """
    position, end, instructions, cycles = address, address + size, 0, 0
    written, system, taken_extra = 0, False, 0
    while position < end:
        parcel = fetch(position)
        instruction = decode(parcel if parcel & 3 != 3 else parcel | fetch(position + 2) << 16)
        position += instruction.size
        instructions += 1
        cycles += int(getattr(costs, instruction.kind))
        if written and written in instruction.used:
            cycles += costs.load_use
        written = instruction.written
        system = system or instruction.kind == "system" or instruction.ends
        branch = instruction.kind == "branch_not_taken"
        taken_extra = costs.branch_taken - costs.branch_not_taken if branch else 0
        if instruction.ends:
            break
    return BlockCost(position, instructions, cycles, taken_extra, system)
