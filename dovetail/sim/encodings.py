"""Decoders of instruction sets, from tables of their encodings as manuals draw them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from dovetail.records import Record


class Instruction(Record):
    """A decoded instruction, as far as its cycles depend on it."""

    size: int
    """2 or 4 bytes."""
    kind: str
    """The name of its field in the table of cycles; conditional branches are "branch_not_taken"."""
    written: int = -1
    """Register a load writes, -1 for everything else (0 too, where that register is always 0)."""
    used: tuple[int, ...] = ()
    """Registers that make it wait for a load right before it."""
    words: int = 0
    """Registers moved by a load or store of several."""
    loads_pc: bool = False
    """Whether it also loads the program counter."""
    ends: bool = False
    """Whether it always leaves the block (it waits or traps)."""
    predicates: int = 0
    """How many instructions after it are predicated."""
    result: int = 0
    """Integer register it writes, whatever it is; 0 for none."""


def decoder(table: str, bits: int, short: int = 0) -> Callable[[int], Instruction]:
    """The decoder of instructions of so many bits.

    A row of the table is the encoding, the kind, and notes; the first row that fits counts. In the encoding a point is
    any bit, and letters are fields: `d` is the register that is written, `n` and `m` those that are read, `x` one that
    is both, `r` a list of registers, `i` the mask of an IT instruction. Registers of three bits count from `short`.
    Notes: `pc` loads the program counter, `ends` leaves the block, `+2` reads register 2, `=2` writes it, `*2` moves
    two words.
    """
    rows = [_row(line, bits, short) for line in table.strip().splitlines()]

    @lru_cache(maxsize=65536)
    def decode(word: int) -> Instruction:
        return next(read(word) for mask, value, read in rows if word & mask == value)

    return decode


def _row(line: str, bits: int, short: int) -> tuple[int, int, Callable[[int], Instruction]]:
    """The bits of a row that are fixed, their values, and what makes an instruction of a word."""
    parts, pattern = line.split(), ""
    while len(pattern) < bits:
        pattern += parts.pop(0)
    kind, *notes = parts
    mask, value = (int("".join(str(int(bit in known)) for bit in pattern), 2) for known in ("01", "1"))
    fields = {name: (bits - 1 - pattern.rindex(name), pattern.count(name)) for name in set(pattern) - set("01.")}
    read, written, words = ([int(note[1:]) for note in notes if note[0] == sign] for sign in "+=*")
    pc, ends = "pc" in notes, "ends" in notes

    def field(word: int, name: str) -> int:
        place, width = fields[name]
        return (word >> place & (1 << width) - 1) + (short if width == 3 else 0)

    def instruction(word: int) -> Instruction:
        found = {name: field(word, name) for name in fields}
        result = found.get("d", found.get("x", sum(written)))
        used = (*(found[name] for name in "nmx" if name in found), *read)
        listed, predicated = found.get("r"), found.get("i", 0)
        moved = sum(words) if listed is None else listed.bit_count() + pc
        return Instruction(
            *(bits // 8, kind, result if kind == "load" and "d" in found else -1, used, moved, pc, ends),
            predicates=5 - (predicated & -predicated).bit_length() if predicated else 0,
            result=result,
        )

    return mask, value, instruction
