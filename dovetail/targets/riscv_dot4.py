"""The plain RISC-V microcontroller with an instruction of its own: four products of int8 added to an int32.

`riscv_dot4` is the worked example of a core instruction with a meaning, a made-up one: `dot4 rd, rs1, rs2` in opcode
custom-0 (RISC-V Unprivileged ISA manual, "RV32/64G Instruction Set Listings"), R-type, funct3 = funct7 = 0; rd is read
and written. `riscv_xpulp` has the same meaning in the encoding of the CORE-V cores (CV32E40P and its kind):
`cv.sdotsp.b`, opcode custom-3, funct3 = 1, funct7 = 0x54 (openhwgroup/cv32e40p, "CORE-V Instruction Set Extensions"; so
does LLVM's assembler encode it with the extension xcvsimd).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dovetail.target import CoreInstruction, Target
from dovetail.targets import riscv

_CUSTOM_0 = (0x0B, 0, 0)
_SDOTSP_B = (0x7B, 1, 0x54)
"""Opcode, funct3 and funct7."""

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
    __asm__(".insn r {opcode:#04x}, {funct3}, {funct7}, %0, %1, %2" : "+r"(*acc) : "r"(left), "r"(right));
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
    declarations = _DECLARATIONS.format(name=name, opcode=opcode, funct3=funct3, funct7=funct7)
    call = f"{name}({{acc}}, {{a}}, {{b}});"
    return CoreInstruction(name, _MEANING.format(name=name), call, declarations, alignment=4)


DOT4 = dot_product("dot4", _CUSTOM_0)
SDOTSP_B = dot_product("sdotsp_b", _SDOTSP_B)


def _target(name: str, sentence: str, instruction: CoreInstruction) -> Target:
    extension = str(Path(__file__).with_suffix(".c"))
    core = replace(riscv.TARGET.core, instructions=(instruction,), extension=extension)
    return replace(riscv.TARGET, name=name, sentence=sentence, core=core)


TARGET = _target("riscv_dot4", "riscv with a made-up instruction: 4 x int8 dot product, accumulated", DOT4)
XPULP = _target(
    "riscv_xpulp", "riscv with cv.sdotsp.b of the CORE-V cores: 4 x int8 dot product, accumulated", SDOTSP_B
)
