"""How long RISC-V instructions take: the table of cycles, the decoder, and the cycles of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise

from dovetail.sim.core import BlockCost, Instruction
from dovetail.sim.device import Bus, read_number

_CUSTOM = frozenset((0x0B, 0x2B, 0x5B, 0x7B))
"""Opcodes for a core's own instructions (RISC-V Unprivileged ISA manual, "RISC-V base opcode map")."""
_LOAD, _STORE, _IMMEDIATE = 1, 2, 3
"""Must agree with `enum dovetail_kind` of riscv_own.h."""
_PLAIN_CSRS = frozenset((0x304, 0x340))
"""mie and mscratch (RISC-V Privileged ISA manual, "CSR Listing")."""


@dataclass(frozen=True, slots=True)
class CoreCosts:
    """Cycles of each class of instruction.

    The defaults are those of a small in-order 4-stage core with single-cycle memories: CV32E40P User Manual,
    chapter "Pipeline Details", table "Cycle counts per instruction type" and section "Hazards"; interrupt
    latency from chapter "Exceptions and Interrupts". Where the manual gives a range that depends on data or
    alignment, this takes: `divide` 35 (the worst of 3..35), jumps and taken branches to aligned targets,
    aligned loads and stores, CSR accesses at 4 (its mstatus figure). `dovetail.target.costs` has sets that follow
    published cores' RTL.

    Attributes:
        alu: integer arithmetic, logic, shifts, moves, `lui`, `auipc`.
        load: loads. store: stores.
        multiply: `mul`. multiply_high: `mulh`, `mulhu`, `mulhsu`. divide: `div`, `divu`, `rem`, `remu`.
        branch_not_taken: a conditional branch that falls through. branch_taken: one that does not.
        jump: `jal`, `c.j` and their kind, `mret`. jump_register: `jalr` and its compressed forms; 0 for as `jump`.
        system: CSR accesses, fences, `wfi`, `ecall`, `ebreak`. csr: accesses of the CSRs mscratch, mie, mtvec, mepc and
            mcause, which change nothing of what is being fetched; 0 for as `system`.
        load_use: extra cycles when an instruction uses the result of the load just before it, or, not a load itself,
            writes the same register.
        jump_use: extra cycles of `jalr` when the instruction just before it writes its register; with a load, those of
            `load_use` too.
        jump_own: extra cycles of `jalr` that writes the register it jumps by, as far calls do.
        misaligned_target: extra cycles of a jump or taken branch to an instruction of 4 bytes at 2 mod 4.
        misaligned: extra cycles of every instruction of 4 bytes at 2 mod 4.
        divide_least: cycles of the shortest division; one more for each leading zero of the divisor's magnitude, up to
            `divide`. 0 for `divide` always.
        divide_zero: cycles of a division by 0; 0 for as any other.
        interrupt_entry: cycles between an interrupt being taken and the first instruction of its handler.
        wake: cycles between the interrupt line's rise and the instruction after `wfi`.
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
    jump_register: int = 0
    csr: int = 0
    jump_use: int = 0
    jump_own: int = 0
    misaligned_target: int = 0
    misaligned: int = 0
    divide_least: int = 0
    divide_zero: int = 0
    wake: int = 0


@lru_cache(maxsize=65536)
def decode(word: int, wide: bool = False) -> Instruction:
    """Decode the RV32IMC instruction in the low bits of the 32-bit `word`, or the RV64IMC one.

    Encodings: RISC-V Unprivileged ISA manual, the instruction set listings and the chapter on "C".
    """
    if wide and word & 0xE003 == 0x2001:  # C.ADDIW, where RV32 has C.JAL
        return Instruction(2, "alu", 0, (word >> 7 & 31,), result=word >> 7 & 31)
    return _decode_compressed(word & 0xFFFF) if word & 3 != 3 else _decode_full(word)


def _decode_full(word: int) -> Instruction:
    opcode, function, first, second = word & 0x7F, word >> 12 & 7, word >> 15 & 31, word >> 20 & 31
    rd = word >> 7 & 31
    if opcode in (0x03, 0x07):
        return Instruction(4, "load", rd, (first,), result=rd)
    if opcode in (0x23, 0x27):
        return Instruction(4, "store", 0, (first, second))
    if opcode == 0x63:
        return Instruction(4, "branch_not_taken", 0, (first, second))
    if opcode in (0x6F, 0x67):
        return Instruction(
            4, "jump_register" if opcode == 0x67 else "jump", 0, (first,) if opcode == 0x67 else (), result=rd
        )
    if opcode == 0x73:
        if function:
            kind = "csr" if word >> 20 in _PLAIN_CSRS else "system"
            return Instruction(4, kind, 0, () if function & 4 else (first,), result=rd)
        return Instruction(4, "jump" if word == 0x30200073 else "system", ends=True)
    if opcode == 0x0F:
        return Instruction(4, "system")
    if opcode in (0x33, 0x3B) and word >> 25 == 1:
        kind = "multiply" if function == 0 else "multiply_high" if function < 4 else "divide"
        return Instruction(4, kind, 0, (first, second), result=rd)
    if opcode in _CUSTOM:  # may read what it writes, as an accumulation does
        return Instruction(4, "alu", 0, (first, second, rd), result=rd)
    if opcode in (0x37, 0x17):
        return Instruction(4, "alu", result=rd)
    return Instruction(4, "alu", 0, (first,) if opcode in (0x13, 0x1B) else (first, second), result=rd)


def _decode_compressed(half: int) -> Instruction:
    quadrant, function = half & 3, half >> 13
    full, second, low, short = half >> 7 & 31, half >> 2 & 31, 8 + (half >> 2 & 7), 8 + (half >> 7 & 7)
    if quadrant == 0:
        if function == 0:
            return Instruction(2, "alu", 0, (2,), result=low)
        if function < 4:
            return Instruction(2, "load", low, (short,), result=low)
        return Instruction(2, "store", 0, (short, low))
    if quadrant == 1:
        if function in (1, 5):
            return Instruction(2, "jump", result=1 if function == 1 else 0)
        if function >= 6:
            return Instruction(2, "branch_not_taken", 0, (short,))
        if function == 4:
            return Instruction(2, "alu", 0, (short, low) if half >> 10 & 3 == 3 else (short,), result=short)
        reads = function == 0 or (function == 3 and full == 2)
        return Instruction(2, "alu", 0, (full,) if reads else (), result=full)
    if function in (1, 2, 3):
        return Instruction(2, "load", full, (2,), result=full)
    if function >= 5:
        return Instruction(2, "store", 0, (2, second))
    if function == 0:
        return Instruction(2, "alu", 0, (full,), result=full)
    if second:
        return Instruction(2, "alu", 0, (second, full) if half >> 12 & 1 else (second,), result=full)
    if not full:
        return Instruction(2, "system", ends=True)
    return Instruction(2, "jump_register", 0, (full,), result=half >> 12 & 1)


class BlockCounter:
    """Counts blocks by a table of cycles."""

    def __init__(self, costs: CoreCosts, bus: Bus, wide: bool = False) -> None:
        self._costs, self._bus, self._wide = costs, bus, wide
        cycles = {one.name: int(getattr(costs, one.name)) for one in fields(costs)}
        cycles["jump_register"] = costs.jump_register or costs.jump
        cycles["csr"] = costs.csr or costs.system
        cycles["divide"] = costs.divide_least or costs.divide
        self._cycles = cycles
        self._own: dict[int, Instruction] = {}  # behind each load of the core's own, which is a block by itself
        self.kind: Callable[[int], int] = lambda word: 0
        """How an instruction of the core's own is counted: `enum dovetail_kind` of riscv_own.h."""

    def at(self, position: int) -> Instruction:
        """The instruction at an address."""
        parcel = read_number(self._bus, position, 2)
        word = parcel if parcel & 3 != 3 else parcel | read_number(self._bus, position + 2, 2) << 16
        kind = self.kind(word) if word & 0x7F in _CUSTOM else 0
        rd, first, second = word >> 7 & 31, word >> 15 & 31, word >> 20 & 31
        if kind == _STORE:
            return Instruction(4, "store", 0, (first, second))
        if kind in (_LOAD, _IMMEDIATE):
            return Instruction(4, "load" if kind == _LOAD else "alu", rd if kind == _LOAD else -1, (first,), result=rd)
        return decode(word, self._wide)

    def block(self, address: int, size: int) -> BlockCost:
        """See `Core.block_cost`; a load's use in the block after it is not seen.

        The emulator translates past instructions that always trap or wait (`wfi`); what follows one does not run.
        """
        costs, position, instructions, cycles, taken_extra, system = self._costs, address, 0, 0, 0, False
        first = self.at(address)
        before = self._own.get(address, first)
        cycles += self._stall(before, first) if address in self._own else 0
        while position < address + size:
            one = self.at(position)
            cycles += self._cycles[one.kind] + (self._stall(before, one) if instructions else 0)
            cycles += costs.jump_own if one.kind == "jump_register" and one.result and one.result in one.used else 0
            cycles += costs.misaligned if position % 4 and one.size == 4 else 0
            position += one.size
            instructions += 1
            before, system = one, system or one.kind in ("system", "csr") or one.ends
            branch = one.kind == "branch_not_taken"
            taken_extra = costs.branch_taken - costs.branch_not_taken if branch else 0
            if one.ends:
                break
        if before.written > 0 and read_number(self._bus, position - before.size, 2) & 0x7F in _CUSTOM:
            self._own[position] = before
        entered = costs.misaligned_target if address % 4 and first.size == 4 else 0
        return BlockCost(position, instructions, cycles, taken_extra, system, entered)

    def turn(self, address: int, size: int) -> BlockCost:
        """A turn of a hardware loop over instructions of 4 bytes, behind another turn."""
        cost = self.block(address, size)
        wait = self._stall(self.at(address + size - 4), self.at(address))
        return replace(cost, cycles=cost.cycles + wait)

    def _stall(self, before: Instruction, one: Instruction) -> int:
        """Cycles an instruction waits for the one before it."""
        met = before.written in one.used or (one.kind != "load" and one.result == before.written)
        waits = self._costs.load_use if before.written > 0 and met else 0
        jumps = one.kind == "jump_register" and before.result > 0 and before.result in one.used
        return waits + (self._costs.jump_use if jumps else 0)


def divisions(bus: Bus, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Address and word of what may be a division in `size` bytes, every halfword tried."""
    content = bus.view(start, size // 2 * 2).view("<u2").tolist()
    for index, (low, high) in enumerate(pairwise(content)):
        word = low | high << 16
        if word & 0xFE00407F == 0x02004033:
            yield start + 2 * index, word


def division_bits(divisor: int, signed: bool) -> int:
    """Leading zeros of the divisor's magnitude, as CV32E40P's divider steps over them (rtl/cv32e40p_alu.sv, "DIV"):
    those of a negative one's complement, less one."""
    divisor &= 0xFFFFFFFF
    negative = signed and divisor >> 31
    return 31 - (divisor ^ 0xFFFFFFFF).bit_length() if negative else 32 - divisor.bit_length()
