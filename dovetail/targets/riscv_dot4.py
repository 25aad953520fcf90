"""The plain RISC-V microcontroller with one made-up instruction: four products of int8 added to an int32.

It is the worked example of a core instruction with a meaning: `dot4 rd, rs1, rs2` in the opcode custom-0 (RISC-V
Unprivileged ISA manual, "RV32/64G Instruction Set Listings"), R-type, funct3 = funct7 = 0; rd is read and written.
"""

from __future__ import annotations

from dataclasses import replace
from struct import Struct

from dovetail.simulate.extension import Registers
from dovetail.target import CoreInstruction
from dovetail.targets import riscv

_CUSTOM_0 = 0x0B
_BYTES = Struct("<4b").unpack

DOT4 = CoreInstruction(
    "dot4",
    meaning="""
def dot4(acc: [i32][1] @ DRAM, a: [i8][4] @ DRAM, b: [i8][4] @ DRAM):
    assert stride(a, 0) == 1
    assert stride(b, 0) == 1
    for i in seq(0, 4):
        acc[0] += a[i] * b[i]
""",
    c="dot4({acc}, {a}, {b});",
    declarations="""\
/* *acc += a[0] * b[0] + ... + a[3] * b[3]; a and b begin at multiples of 4 bytes. */
static inline void dot4(int32_t *acc, const int8_t *a, const int8_t *b)
{
#if defined(__riscv) && !defined(DOVETAIL_HOST)
    int32_t left, right;
    __builtin_memcpy(&left, __builtin_assume_aligned(a, 4), 4);
    __builtin_memcpy(&right, __builtin_assume_aligned(b, 4), 4);
    __asm__(".insn r 0x0b, 0, 0, %0, %1, %2" : "+r"(*acc) : "r"(left), "r"(right));
#else
    for (int32_t i = 0; i < 4; ++i) {
        *acc += a[i] * b[i];
    }
#endif
}
""",
    alignment=4,
)


def execute(word: int, registers: Registers) -> bool:
    """Execute a dot4; False when the word is another instruction."""
    if word & 0x7F != _CUSTOM_0 or word >> 12 & 7 or word >> 25:
        return False
    left, right = registers.read(word >> 15 & 31), registers.read(word >> 20 & 31)
    total = registers.read(word >> 7 & 31)
    for a, b in zip(_BYTES(left.to_bytes(4, "little")), _BYTES(right.to_bytes(4, "little")), strict=True):
        total += a * b
    registers.write(word >> 7 & 31, total & 0xFFFFFFFF)
    return True


TARGET = replace(
    riscv.TARGET,
    name="riscv_dot4",
    sentence="riscv with a made-up instruction: 4 x int8 dot product, accumulated",
    core=replace(riscv.TARGET.core, instructions=(DOT4,), extension="dovetail.targets.riscv_dot4:execute"),
)
