"""The plain RISC-V microcontroller with instructions of the CORE-V cores (CV32E40P and its kind).

Encodings and meanings: openhwgroup/cv32e40p, "CORE-V Instruction Set Extensions" and "CORE-V Hardware Loop feature"
(so does LLVM's assembler encode them with xcvsimd, xcvmac, xcvalu and xcvmem). They are written as `.insn`, which every
assembler knows. The C beside this file says what they do, for the simulator.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dovetail.target import Streams, costs
from dovetail.targets import riscv
from dovetail.targets.riscv_dot4 import dot_product

SDOTSP_B = dot_product("sdotsp_b", (0x7B, 1, 0x54))
"""cv.sdotsp.b"""

STREAMS = Streams(
    load=".insn i 0x0b, 2, {to}, {pointer}, {step}",
    repeat=".insn i 0x2b, 4, x14, {turns}, {length}",
)
"""cv.lw with post-increment; cv.setup of hardware loop 0 (funct4 = 7 and the loop's number stand where rd does), which
counts words from itself to the end."""

FUNCTIONS = {
    "multiply_add": """\
/* cv.mac */
static inline int32_t multiply_add(int32_t sum, int32_t left, int32_t right)
{
    __asm__(".insn r 0x2b, 3, 0x48, %0, %1, %2" : "+r"(sum) : "r"(left), "r"(right));
    return sum;
}
""",
    "saturate": """\
/* cv.clip: the value limited to int8. */
static inline int32_t saturate(int32_t value)
{
    int32_t limited;
    __asm__ volatile(".insn r 0x2b, 3, 0x38, %0, %1, x8" : "=r"(limited) : "r"(value));
    return limited;
}
""",
    "requantize_near": """\
/* As one piece, which compilers neither take apart nor spill in: the product's upper word, rounded, its sign, and
   cv.addRNr, which adds both, rounds and shifts. */
static inline int32_t requantize_near(int32_t value, uint32_t multiplier, int32_t shift)
{
    int32_t result;
    __asm__ volatile(
        "mul %0, %1, %2\\n"
        "mulhsu %1, %1, %2\\n"
        "srli %0, %0, 31\\n"
        "add %1, %1, %0\\n"
        "srai %0, %1, 31\\n"
        ".insn r 0x2b, 3, 0x42, %0, %1, %3\\n"
        : "=&r"(result), "+&r"(value)
        : "r"(multiplier), "r"(shift));
    return result;
}
""",
}
"""In the place of Dovetail's own."""

TARGET = replace(
    riscv.TARGET,
    name="riscv_xpulp",
    sentence="riscv with instructions of the CORE-V cores: dot products, hardware loops, moving pointers, clipping",
    core=replace(
        riscv.TARGET.core,
        instructions=(SDOTSP_B,),
        extension=str(Path(__file__).with_suffix(".c")),
        streams=STREAMS,
        functions=FUNCTIONS,
        kernels=costs.kernel_cycles("xpulp"),
    ),
)
