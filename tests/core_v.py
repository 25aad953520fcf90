"""Random programs of CORE-V instructions, for the simulator and the RTL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

REGISTERS = ("a0", "a1", "a2", "a3", "a4")
"""What the instructions work on; s0 and s1 are pointers, t2 a number of turns."""
INSTRUCTIONS: Mapping[str, str] = {
    "cv.sdotsp.b": ".insn r 0x7b, 1, 0x54, {rd}, {rs1}, {rs2}",
    "cv.mac": ".insn r 0x2b, 3, 0x48, {rd}, {rs1}, {rs2}",
    "cv.addrnr": ".insn r 0x2b, 3, 0x42, {rd}, {rs1}, {rs2}",
    "cv.clip": ".insn r 0x2b, 3, 0x38, {rd}, {rs1}, x{bits}",
    "cv.lb": ".insn i 0x0b, 0, {rd}, s0, {step}",
    "cv.lh": ".insn i 0x0b, 1, {rd}, s0, {step}",
    "cv.lw": ".insn i 0x0b, 2, {rd}, s0, {step}",
    "cv.lbu": ".insn i 0x0b, 4, {rd}, s0, {step}",
    "cv.lhu": ".insn i 0x0b, 5, {rd}, s0, {step}",
    "cv.sb": ".insn s 0x2b, 0, {rs2}, {step}(s1)",
    "cv.sh": ".insn s 0x2b, 1, {rs2}, {step}(s1)",
    "cv.sw": ".insn s 0x2b, 2, {rs2}, {step}(s1)",
}
"""By the assembler's name."""
WORDS = 256
"""Of memory on either side of each pointer's start."""


def instruction(rng: np.random.Generator, kinds: Sequence[str]) -> str:
    """A random one of these kinds."""
    rd, rs1, rs2 = (str(rng.choice(REGISTERS)) for _ in range(3))
    step = 4 * int(rng.integers(-2, 4))
    return INSTRUCTIONS[str(rng.choice(kinds))].format(
        rd=rd, rs1=rs1, rs2=rs2, bits=int(rng.integers(1, 32)), step=step
    )


def loop(rng: np.random.Generator, kinds: Sequence[str], most: int = 30) -> list[str]:
    """A hardware loop of some turns."""
    body = [instruction(rng, kinds) for _ in range(int(rng.integers(3, most)))]
    turns = int(rng.integers(1, 9))
    return [f"li t2, {turns}", ".balign 4", f".insn i 0x2b, 4, x14, t2, {len(body) + 1}", *body]


def program(seed: int) -> str:
    """Runs of instructions and loops, each between two readings of the time, and all that they change in `stamps`."""
    rng, body = np.random.default_rng(seed), ""
    kinds = list(INSTRUCTIONS)
    for _ in range(6):
        values = "\n".join(f"li {name}, {int(rng.integers(-(1 << 31), 1 << 31))}" for name in REGISTERS)
        lines = [instruction(rng, kinds) for _ in range(30)] + loop(rng, kinds) + [instruction(rng, kinds)]
        text = "\n".join(lines)
        results = "\n".join(f"sw {name}, 0(s2)\naddi s2, s2, 4" for name in (*REGISTERS, "s0", "s1"))
        body += f"la s0, memory + {4 * WORDS}\nla s1, memory + {4 * WORDS}\n{values}\n"
        body += f"call stamp\n{text}\ncall stamp\n{results}\n"
    return f"""
    .option norelax
    .text
    .globl main
main:
    la s2, stamps
    li a1, 1
    call command
{body}
    la s0, memory
    li a1, {2 * WORDS}
1:  lw a0, 0(s0)
    sw a0, 0(s2)
    addi s0, s0, 4
    addi s2, s2, 4
    addi a1, a1, -1
    bnez a1, 1b
    li a1, 2
    call command
    j main
command:
    li a0, 0x1A000000
    sw a1, 0(a0)
    ret
stamp:
    li t0, 0x1A000000
    lw t1, 12(t0)
    sw t1, 0(s2)
    addi s2, s2, 4
    ret
    .data
    .balign 4
memory:
    .word {", ".join(str(int(word)) for word in rng.integers(-(1 << 31), 1 << 31, 2 * WORDS))}
    .bss
    .balign 4
    .globl stamps
stamps: .space {4 * RESULTS}
"""


RESULTS = 6 * (2 + len(REGISTERS) + 2) + 2 * WORDS
"""Words at `stamps` after a program."""
