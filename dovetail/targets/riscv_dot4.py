"""The plain RISC-V microcontroller with an instruction of its own: four products of int8 added to an int32.

`riscv_dot4` is the worked example of a core instruction with a meaning, a made-up one: `dot4 rd, rs1, rs2` in opcode
custom-0 (RISC-V Unprivileged ISA manual, "RV32/64G Instruction Set Listings"), R-type, funct3 = funct7 = 0; rd is read
and written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dovetail.target import CoreInstruction, costs
from dovetail.targets import riscv

_MEANING = """
def {name}(acc: [i32][1] @ DRAM, a: [i8][4] @ DRAM, b: [i8][4] @ DRAM):
    assert stride(a, 0) == 1
    assert stride(b, 0) == 1
    for i in seq(0, 4):
        acc[0] += a[i] * b[i]
"""
_DECLARATIONS = """\
/* *acc += a[0] * b[0] + ... + a[3] * b[3]; a and b begin at multiples of 4 bytes. */
static inline void {name}(int32_t *acc, const int8_t *a, const int8_t *b)
{{
#if defined(__riscv) && !defined(DOVETAIL_HOST)
    int32_t left, right;
    __builtin_memcpy(&left, __builtin_assume_aligned(a, 4), 4);
    __builtin_memcpy(&right, __builtin_assume_aligned(b, 4), 4);
    __asm__("{assembly}" : "+r"(*acc) : "r"(left), "r"(right));
#else
    for (int32_t i = 0; i < 4; ++i) {{
        *acc += a[i] * b[i];
    }}
#endif
}}
"""


def dot_product(name: str, encoding: tuple[int, int, int]) -> CoreInstruction:
    """A 4 x int8 dot product with accumulation as a core's instruction.

    Args:
        name: a C identifier.
        encoding: opcode, funct3 and funct7 of the R-type instruction.
    """
    opcode, funct3, funct7 = encoding
    assembly = f".insn r {opcode:#04x}, {funct3}, {funct7}, {{acc}}, {{a}}, {{b}}"
    declarations = _DECLARATIONS.format(name=name, assembly=assembly.format(acc="%0", a="%1", b="%2"))
    call = f"{name}({{acc}}, {{a}}, {{b}});"
    return CoreInstruction(name, _MEANING.format(name=name), call, declarations, alignment=4, assembly=assembly)


DOT4 = dot_product("dot4", (0x0B, 0, 0))

TARGET = replace(
    riscv.TARGET,
    name="riscv_dot4",
    sentence="riscv with a made-up instruction: 4 x int8 dot product, accumulated",
    core=replace(
        riscv.TARGET.core,
        instructions=(DOT4,),
        extension=str(Path(__file__).with_suffix(".c")),
        kernels=costs.kernel_cycles("rv32imc+dot4"),
    ),
)
