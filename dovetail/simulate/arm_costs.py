"""How long the instructions of a Cortex-M core take, and how a block of Thumb-2 code is counted.

One decoder serves both block hooks (native and Python), so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from dovetail.simulate.architecture import BlockCost


@dataclass(frozen=True, slots=True)
class CortexMCosts:
    """Cycles of each class of instruction.

    The defaults are those of a Cortex-M4 with memories without wait states: Cortex-M4 Technical Reference Manual
    (ARM DDI 0439), table "Cortex-M4 instruction set summary" and section "Load/store timings"; interrupt latency
    from section "Exceptions". Where the manual gives a range, this takes: a pipeline refill ("P", 1 to 3) of 2,
    `divide` 12 (the worst of 2..12). Not modelled: IT folded into its neighbour, the longer latency of an address
    computed by the instruction before, literals and instructions competing for the flash.

    Attributes:
        alu: arithmetic, logic, shifts, moves, packed (SIMD) additions, IT, hints.
        load: LDR of any size. store: STR with an immediate offset. store_register: STR with a register offset.
        pipelined: cycles less for a load, or a store with a register offset, right behind a load whose result is no
            part of its address.
        transfer: LDM, STM, PUSH, POP, LDRD, STRD before their words. transfer_word: for each of their words.
        multiply: all products and products with accumulation, long and packed (SMLAD) ones too. divide: SDIV, UDIV.
        branch_not_taken: a conditional branch that falls through. branch_taken: one that does not.
        jump: B, BL, BX, BLX, moves to PC. refill: what a load of PC, or TBB, adds to its cycles as a load.
        system: CPS, MRS, MSR, SVC, WFI. barrier: DMB, DSB, ISB.
        skipped: an instruction in an IT block whose condition is false.
        interrupt_entry: cycles between an interrupt being taken and the first instruction of its handler.
        interrupt_return: what a return from an exception takes beyond its jump.
    """

    alu: int = 1
    load: int = 2
    store: int = 1
    store_register: int = 2
    pipelined: int = 1
    transfer: int = 1
    transfer_word: int = 1
    multiply: int = 1
    divide: int = 12
    branch_not_taken: int = 1
    branch_taken: int = 3
    jump: int = 3
    refill: int = 2
    system: int = 2
    barrier: int = 3
    skipped: int = 1
    interrupt_entry: int = 12
    interrupt_return: int = 9


@dataclass(frozen=True, slots=True)
class Instruction:
    """A decoded instruction.

    Attributes:
        size: 2 or 4 bytes.
        kind: the name of its field in `CortexMCosts`; conditional branches are "branch_not_taken".
        written: register a load of one word or less writes, -1 for everything else.
        address: registers a single load or store makes its address from.
        words: registers moved, of "transfer".
        loads_pc: it also loads PC.
        ends: the instruction always leaves the block (WFI, SVC, BKPT, UDF).
        predicates: how many instructions after it are predicated (IT).
    """

    size: int
    kind: str
    written: int = -1
    address: tuple[int, ...] = ()
    words: int = 0
    loads_pc: bool = False
    ends: bool = False
    predicates: int = 0


Fetch = Callable[[int], int]
"""Gives the 16-bit halfword at an address."""


def is_wide(half: int) -> bool:
    """Whether an instruction that begins with `half` has 4 bytes."""
    return half >> 11 in (0b11101, 0b11110, 0b11111)


@lru_cache(maxsize=65536)
def decode(half: int, second: int = 0) -> Instruction:
    """Decode the Thumb-2 instruction of `half` and, where that begins a wide one, `second`.

    Encodings: ARMv7-M Architecture Reference Manual (ARM DDI 0403), chapter "The Thumb Instruction Set Encoding".
    """
    if not is_wide(half):
        return _decode_narrow(half)
    group = half >> 11 & 3
    if group == 1:
        return _decode_multiple(half, second)
    if group == 2:
        return _decode_control(half, second) if second >> 15 else Instruction(4, "alu")
    return _decode_single(half, second)


def _decode_narrow(half: int) -> Instruction:
    top = half >> 12
    if top < 4:
        return Instruction(2, "alu")
    if half < 0x4400:
        return Instruction(2, "multiply" if half >> 6 & 15 == 13 else "alu")
    if half < 0x4800:
        to_pc = half >> 8 & 3 == 3 or (half >> 8 & 3 != 1 and half & 0x87 == 0x87)
        return Instruction(2, "jump" if to_pc else "alu")
    if half < 0x5000:
        return Instruction(2, "load", half >> 8 & 7, (15,))
    if top < 10:
        return _decode_narrow_access(half)
    if top == 12:
        return Instruction(2, "transfer", words=(half & 0xFF).bit_count())
    if top == 13:
        trap = half >> 8 & 15 >= 14
        return Instruction(2, "system", ends=True) if trap else Instruction(2, "branch_not_taken")
    if top == 14:
        return Instruction(2, "jump")
    return _decode_miscellaneous(half) if top == 11 else Instruction(2, "alu")


def _decode_narrow_access(half: int) -> Instruction:
    if half >> 12 == 5:  # register offset
        address: tuple[int, ...] = (half >> 3 & 7, half >> 6 & 7)
        loads, target, store = half >> 9 & 7 >= 3, half & 7, "store_register"
    else:  # immediate offset, from the stack pointer in the last group
        stack = half >> 12 == 9
        address, target = ((13,), half >> 8 & 7) if stack else ((half >> 3 & 7,), half & 7)
        loads, store = bool(half >> 11 & 1), "store"
    return Instruction(2, "load", target, address) if loads else Instruction(2, store, -1, address)


def _decode_miscellaneous(half: int) -> Instruction:
    if half & 0xF500 == 0xB100:
        return Instruction(2, "branch_not_taken")  # CBZ, CBNZ
    if half & 0xF600 == 0xB400:  # PUSH, POP
        return Instruction(2, "transfer", words=(half & 0x1FF).bit_count(), loads_pc=half & 0x900 == 0x900)
    if half & 0xFFE8 == 0xB660:
        return Instruction(2, "system")  # CPS
    if half >> 8 == 0xBE:
        return Instruction(2, "system", ends=True)  # BKPT
    if half >> 8 == 0xBF and half & 15:
        mask = half & 15
        return Instruction(2, "alu", predicates=5 - (mask & -mask).bit_length())
    return Instruction(2, "system", ends=True) if half == 0xBF30 else Instruction(2, "alu")


def _decode_multiple(half: int, second: int) -> Instruction:
    if half >> 9 & 3:  # data processing with a shifted register, coprocessors
        return Instruction(4, "alu")
    if not half >> 6 & 1:  # LDM, STM
        return Instruction(4, "transfer", words=second.bit_count(), loads_pc=bool(half >> 4 & 1 and second >> 15))
    if half & 0xFFF0 == 0xE8D0 and second >> 5 & 7 == 0:
        return Instruction(4, "load", -1, (half & 15, second & 15), loads_pc=True)  # TBB, TBH
    if half & 0xFFE0 in (0xE840, 0xE8C0):  # exclusive accesses
        return Instruction(4, "load", second >> 12, (half & 15,)) if half >> 4 & 1 else Instruction(
            4, "store", -1, (half & 15,))
    return Instruction(4, "transfer", words=2)  # LDRD, STRD


def _decode_control(half: int, second: int) -> Instruction:
    if second >> 12 & 5:
        return Instruction(4, "jump")  # B, BL
    if half >> 6 & 14 != 14:
        return Instruction(4, "branch_not_taken")
    if half == 0xF3AF:
        return Instruction(4, "system", ends=True) if second == 0x8003 else Instruction(4, "alu")
    return Instruction(4, "barrier" if half == 0xF3BF else "system")


def _decode_single(half: int, second: int) -> Instruction:
    if half >> 9 & 3 == 0:  # loads and stores of one register
        plain = half >> 7 & 1 or second >> 11 & 1 or half & 15 == 15
        address = (half & 15,) if plain else (half & 15, second & 15)
        if not half >> 4 & 1:
            return Instruction(4, "store" if plain else "store_register", -1, address)
        if second >> 12 == 15:  # PC, or a hint to the memory
            return Instruction(4, "load", -1, address, loads_pc=True) if half >> 5 & 3 == 2 else Instruction(4, "alu")
        return Instruction(4, "load", second >> 12, address)
    if half >> 7 & 15 == 0b0111:  # long multiplication and division
        divides = half >> 4 & 7 in (1, 3) and second >> 4 & 15 == 15
        return Instruction(4, "divide" if divides else "multiply")
    return Instruction(4, "multiply" if half >> 7 & 15 == 0b0110 else "alu")


def _cycles(instruction: Instruction, before: Instruction | None, costs: CortexMCosts) -> int:
    """Cycles of an instruction that is executed, a conditional branch as not taken."""
    cycles = int(getattr(costs, instruction.kind)) + costs.transfer_word * instruction.words
    if instruction.loads_pc:
        return cycles + costs.refill
    follows = before is not None and before.written >= 0 and before.written not in instruction.address
    return cycles - costs.pipelined if follows and instruction.kind in ("load", "store_register") else cycles


def block_cost(
    address: int, size: int, fetch: Fetch, costs: CortexMCosts, is_predicated: Callable[[int], bool]
) -> BlockCost:
    """Count the block of `size` bytes at `address`; neither IT blocks nor blocks see the load before them.

    Args:
        fetch: gives the halfword at an address.
        costs: cycles per class.
        is_predicated: tells whether the instruction at an address is in an IT block.
    """
    position, end, instructions, cycles = address, address + size, 0, 0
    before: Instruction | None = None
    system, taken_extra = False, 0
    while position < end:
        half = fetch(position)
        instruction = decode(half, fetch(position + 2) if is_wide(half) else 0)
        taken_extra = 0
        if is_predicated(position):
            cycles += costs.skipped
            before = None
        else:
            instructions += 1
            cycles += _cycles(instruction, before, costs)
            before = instruction
            if instruction.kind == "branch_not_taken":
                taken_extra = costs.branch_taken - costs.branch_not_taken
        system = system or instruction.kind in ("system", "barrier")
        position += instruction.size
        if instruction.ends:
            break
    return BlockCost(position, instructions, cycles, taken_extra, system)


def predicated(start: int, size: int, fetch: Fetch, costs: CortexMCosts) -> Iterator[tuple[int, int]]:
    """Find the instructions in IT blocks of a stretch of code (no data in it).

    Yields:
        Each one's address, and the cycles it takes more when it is executed than when it is skipped.
    """
    position, left = start, 0
    while position < start + size:
        half = fetch(position)
        instruction = decode(half, fetch(position + 2) if is_wide(half) else 0)
        if left:
            yield position, _cycles(instruction, None, costs) - costs.skipped
            left -= 1
        else:
            left = instruction.predicates
        position += instruction.size
