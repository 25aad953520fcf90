"""How long RISC-V instructions take: the table of cycles, the decoder, and the cycles of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import pairwise

from dovetail.records import Record
from dovetail.sim.core import BlockCost
from dovetail.sim.device import Bus, read_number
from dovetail.sim.encodings import Instruction, decoder

_CUSTOM = frozenset((0x0B, 0x2B, 0x5B, 0x7B))
"""Opcodes for a core's own instructions (RISC-V Unprivileged ISA manual, "RISC-V base opcode map")."""
_LOAD, _STORE, _IMMEDIATE = 1, 2, 3
"""Must agree with `enum dovetail_kind` of riscv_own.h."""


class CoreCosts(Record):
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
            writes the same register. From 2 on it is a cycle less for each instruction in between, and so are the next
            ones.
        multiply_use, shift_use, own_use: the same for products, for shifts, and for instructions of the core's own.
        own_behind: extra cycles of an instruction of the core's own just behind a load or store.
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
    multiply_use: int = 0
    shift_use: int = 0
    own_use: int = 0
    own_behind: int = 0


_FULL = decoder(
    """
    ....... ..... nnnnn ... ddddd 0000.11  load
    ....... mmmmm nnnnn ... ..... 0100.11  store
    ....... mmmmm nnnnn ... ..... 1100011  branch_not_taken
    ....... ..... ..... ... ddddd 1101111  jump
    ....... ..... nnnnn ... ddddd 1100111  jump_register
    0011000 00010 00000 000 00000 1110011  jump ends
    ....... ..... ..... 000 ..... 1110011  system ends
    0011000 00100 ..... 1.. ddddd 1110011  csr
    0011010 00000 ..... 1.. ddddd 1110011  csr
    ....... ..... ..... 1.. ddddd 1110011  system
    0011000 00100 nnnnn ... ddddd 1110011  csr
    0011010 00000 nnnnn ... ddddd 1110011  csr
    ....... ..... nnnnn ... ddddd 1110011  system
    ....... ..... ..... ... ..... 0001111  system
    0000001 mmmmm nnnnn 000 ddddd 011.011  multiply
    0000001 mmmmm nnnnn 0.. ddddd 011.011  multiply_high
    0000001 mmmmm nnnnn 1.. ddddd 011.011  divide
    ....... mmmmm nnnnn ... xxxxx 0001011  alu
    ....... mmmmm nnnnn ... xxxxx 0101011  alu
    ....... mmmmm nnnnn ... xxxxx 1011011  alu
    ....... mmmmm nnnnn ... xxxxx 1111011  alu
    ....... ..... ..... ... ddddd 0.10111  alu
    ....... ..... nnnnn ... ddddd 001.011  alu
    ....... mmmmm nnnnn ... ddddd .......  alu
    """,
    32,
)
"""RISC-V Unprivileged ISA manual, the instruction set listings; of the CSRs mie and mscratch change nothing of what is
being fetched, and a core's own instructions may read what they write, as an accumulation does."""
_SHORT = """
    000 ... ... .. ddd 00  alu +2
    0.. ... nnn .. ddd 00  load
    1.. ... nnn .. mmm 00  store
    001 . ..... ... .. 01  jump =1
    101 . ..... ... .. 01  jump
    11. ... nnn ... .. 01  branch_not_taken
    100 .11 xxx .. mmm 01  alu
    100 ... xxx ... .. 01  alu
    000 . xxxxx ..... 01   alu
    011 . 00010 ..... 01   alu +2 =2
    ... . ddddd ..... 01   alu
    000 . xxxxx ..... 10   alu
    0.. . ddddd ..... 10   load +2
    100 . 00000 00000 10   system ends
    100 0 nnnnn 00000 10   jump_register
    100 1 nnnnn 00000 10   jump_register =1
    100 0 ddddd mmmmm 10   alu
    100 1 xxxxx mmmmm 10   alu
    1.. . ..... mmmmm 10   store +2
"""
"""Ibid., chapter on "C"."""
_COMPRESSED, _COMPRESSED_64 = (decoder(more + _SHORT, 16, 8) for more in ("", "001 . xxxxx ..... 01 alu"))


def decode(word: int, wide: bool = False) -> Instruction:
    """Decode the RV32IMC instruction in the low bits of the 32-bit `word`, or the RV64IMC one."""
    if word & 3 == 3:
        return _FULL(word)
    return (_COMPRESSED_64 if wide else _COMPRESSED)(word & 0xFFFF)


class _LateResults:
    """Results that later instructions of a block have to wait for, where some come more than a cycle late."""

    def __init__(self, costs: CoreCosts) -> None:
        self._costs, self._ready, self._under_way = costs, dict[int, int](), 0
        self._by_kind = {"load": costs.load_use, "multiply": costs.multiply_use, "multiply_high": costs.multiply_use}

    def after(self, cycles: int) -> _LateResults:
        """The same for a block that begins so many cycles later."""
        other = _LateResults(self._costs)
        other._ready = {register: ready - cycles for register, ready in self._ready.items() if ready > cycles}
        other._under_way = self._under_way - cycles
        return other

    def wait(self, cycles: int, one: Instruction, word: int) -> int:
        """Cycles that an instruction waits, of a block that takes so many up to its end without that."""
        own, start = word & 0x7F in _CUSTOM, cycles - self._costs.alu  # in a clock's own cycles, as `alu` counts them
        waits = max(0, *(self._ready.get(register, 0) - start for register in (*one.used, 0)))
        waits = max(waits, self._under_way - start) if own else waits
        shifts = word & 0x5F == 0x13 and word >> 12 & 3 == 1
        late = self._costs.own_use if own else self._costs.shift_use if shifts else self._by_kind.get(one.kind, 0)
        result = word >> 7 & 31 if own else one.result
        if late and result > 0:
            self._ready[result] = cycles + waits + late
        if one.kind in ("load", "store"):
            self._under_way = cycles + waits + self._costs.own_behind
        return waits


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
        self._carried: dict[int, _LateResults] = {}  # into a block from the one before it
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
        late = (self._carried.get(address) or _LateResults(costs)).after(0)
        first = self.at(address)
        before = self._own.get(address, first)
        cycles += self._stall(before, first) if address in self._own else 0
        while position < address + size:
            one = self.at(position)
            cycles += self._cycles[one.kind] + (self._stall(before, one) if instructions else 0)
            if costs.load_use > 1:
                cycles += late.wait(cycles, one, read_number(self._bus, position, min(one.size, 4)))
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
        if costs.load_use > 1 and not before.ends and self._is_own(position - before.size, position):
            self._carried[position] = late.after(cycles)
        entered = costs.misaligned_target if address % 4 and first.size == 4 else 0
        return BlockCost(position, instructions, cycles, taken_extra, system, entered)

    def _is_own(self, *positions: int) -> bool:
        """Whether one of some instructions is of the core's own: the emulator executes each as a block by itself."""
        return any(read_number(self._bus, position, 2) & 0x7F in _CUSTOM for position in positions)

    def turn(self, address: int, size: int) -> BlockCost:
        """A turn of a hardware loop over instructions of 4 bytes, behind another turn."""
        cost = self.block(address, size)
        wait = self._stall(self.at(address + size - 4), self.at(address))
        return replace(cost, cycles=cost.cycles + wait)

    def _stall(self, before: Instruction, one: Instruction) -> int:
        """Cycles an instruction waits for the one before it."""
        met = before.written in one.used or (one.kind != "load" and one.result == before.written)
        waits = self._costs.load_use if before.written > 0 and met and self._costs.load_use < 2 else 0
        jumps = one.kind == "jump_register" and before.result > 0 and before.result in one.used
        return waits + (self._costs.jump_use if jumps else 0)


def words_like(bus: Bus, start: int, size: int, mask: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Address and word of what may be an instruction in `size` bytes, every halfword tried."""
    content = bus.view(start, size // 2 * 2).view("<u2").tolist()
    for index, (low, high) in enumerate(pairwise(content)):
        word = low | high << 16
        if word & mask == wanted:
            yield start + 2 * index, word


def division_bits(divisor: int, signed: bool) -> int:
    """Leading zeros of the divisor's magnitude, as CV32E40P's divider steps over them (rtl/cv32e40p_alu.sv, "DIV"):
    those of a negative one's complement, less one."""
    divisor &= 0xFFFFFFFF
    negative = signed and divisor >> 31
    return 31 - (divisor ^ 0xFFFFFFFF).bit_length() if negative else 32 - divisor.bit_length()
