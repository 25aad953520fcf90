"""Stated cycles of code with Helium (MVE, the vector extension of Arm's M profile), block by block.

The Cortex-M55 has a data path of 64 bits: a vector instruction takes two cycles, and one for another unit (memory,
multiplier, the rest) begins a cycle behind it (Arm, "Introduction to Helium", beats and overlap). A scalar instruction
waits until vector instructions before it have ended, and takes what the Cortex-M4's table says. The end of a
low-overhead loop takes a cycle. Not modelled: waits for a result, vectors that lie across words of 64 bits, caches, two
scalar instructions at once.
"""

from __future__ import annotations

from dovetail.records import Record
from dovetail.sim.arm import CortexMCosts, cycles_of, decode, is_wide
from dovetail.sim.encodings import decoder

_BEATS = 2
"""Cycles of a vector instruction in its unit."""
_VECTOR = decoder(
    """
    1110 1100 000. ....  .... 1111 000. ....  rest
    111. 110. .... ....  .... .... .... ....  memory
    1111 1110 0.11 0001  .... 1111 0100 1101  predicate
    111. 1110 1111 ...0  .... 111. ..0. ...0  multiply
    111. 1110 0.11 ...1  .... 1110 .... ....  rest
    111. 1110 0... ....  .... 1110 .... ....  multiply
    1110 1111 0... ....  .... 1001 .1.1 ....  multiply
    111. 1111 0... ....  .... 1011 .1.0 ....  multiply
    111. 111. .... ....  .... .... .... ....  rest
    1111 0000 0... ....  11.0 .... .... ....  loop
    .... .... .... ....  .... .... .... ....  scalar
    """,
    32,
)
"""Units of instructions (Arm v8-M Architecture Reference Manual, DDI 0553, chapter C2)."""


class HeliumBlock(Record):
    """Counts of one run of a block."""

    instructions: int
    cycles: int
    """With a final conditional branch as not taken."""
    taken_extra: int
    """Cycles to add when another block than the next follows."""


def block_of(code: bytes, costs: CortexMCosts) -> HeliumBlock:
    """The counts of a straight run of instructions."""
    at = instructions = now = ended = taken_extra = 0
    free: dict[str, int] = {}
    before = None
    while at < len(code):
        half, second = (int.from_bytes(code[place : place + 2], "little") for place in (at, at + 2))
        wide = is_wide(half)
        unit = _VECTOR(half << 16 | second).kind if wide else "scalar"
        at, instructions, taken_extra = at + 2 + 2 * wide, instructions + 1, 0
        if unit in ("memory", "multiply", "rest"):
            begin = max(now, free.get(unit, 0))
            now, ended, before = begin + 1, begin + _BEATS, None
            free[unit] = ended
        elif unit in ("loop", "predicate"):
            now, before = (max(now, ended) if unit == "loop" else now) + 1, None
        else:
            instruction = decode(half, second)
            now = max(now, ended) + cycles_of(instruction, before, costs)
            before = instruction
            if instruction.kind == "branch_not_taken":
                taken_extra = costs.branch_taken - costs.branch_not_taken
    return HeliumBlock(instructions, max(now, ended), taken_extra)
