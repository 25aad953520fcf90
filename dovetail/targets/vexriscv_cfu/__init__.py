"""VexRiscv with a function unit in Verilog: sums of products of int8, and the steps of a requantisation.

`unit.v` is the unit, `unit.c` its instructions for the simulator `iss`, this file their meaning and their C. With
`--sim rtl` the firmware runs on the RTL of core and unit together. docs/port_instruction.md builds such a target
from an empty file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dovetail.target as dt
from dovetail.target import Cache, CoreInstruction, FunctionUnit
from dovetail.target.chip import BOTH
from dovetail.targets import riscv

HERE = Path(__file__).parent
SUMS = 16
"""Sums the unit has."""
_HELD = 16
"""Registers for weights: a core with a load under way keeps the unit waiting, so loads stand together."""


def assembly(name: str, rd: str, rs1: str, rs2: str = "x0", which: int = 0) -> str:
    """An instruction of the unit as a line of assembly."""
    number = ("add", "take", "hold", "upper", "shifted", "saturate", "lanes").index(name)
    return f".insn r 0x0b, {number}, {which}, {rd}, {rs1}, {rs2}"


def _quoted(lines: list[str]) -> str:
    return "".join(f'        "{line}\\n\\t"\n' for line in lines)


def _loop() -> str:
    """The products of eight taps with `SUMS` channels, again and again."""
    held = [f"%{number}" for number in range(_HELD)]
    turns, x, w = (f"%{_HELD + number}" for number in range(3))
    lines = ["1:", f"lw {held[0]}, 0({x})", f"lw {held[1]}, 4({x})", f"addi {turns}, {turns}, -1", f"addi {x}, {x}, 8"]
    lines.append(assembly("hold", "x0", held[0], held[1]))
    for first in range(0, SUMS, _HELD // 2):
        lines += [f"lw {register}, {8 * first + 4 * number}({w})" for number, register in enumerate(held)]
        lines += [f"addi {w}, {w}, {8 * SUMS}"] if first + _HELD // 2 == SUMS else []
        lines += [assembly("add", "x0", held[2 * n], held[2 * n + 1], first + n) for n in range(_HELD // 2)]
    return _quoted([*lines, f"bnez {turns}, 1b"])


_TAKEN = "".join(
    f'    __asm__ volatile("{assembly("take", "%0", "%0", which=number)}" : "+r"(acc[{number}]));\n'
    for number in range(SUMS)
)
BLOCK = CoreInstruction(
    "products_1x16",
    f"""
def products_1x16(n: size, acc: [i32][1, {SUMS}] @ DRAM, a: [i8][1, 8 * n] @ DRAM, w: [i8][n, {SUMS}, 8] @ DRAM):
    assert stride(acc, 1) == 1
    assert stride(a, 1) == 1
    assert stride(w, 0) == {8 * SUMS}
    assert stride(w, 1) == 8
    assert stride(w, 2) == 1
    for v in seq(0, n):
        for x in seq(0, 1):
            for c in seq(0, {SUMS}):
                for i in seq(0, 8):
                    acc[x, c] += a[x, 8 * v + i] * w[v, c, i]
""",
    "products_1x16({n}, {acc}, {a}, {w});",
    f"""\
/* acc[c] += a[8 * v + i] * w[v][c][i], for n vectors v of eight taps i, and {SUMS} channels c. */
static inline void products_1x16(int32_t n, int32_t *acc, const int8_t *a, const int8_t *w)
{{
#if defined(__riscv) && !defined(DOVETAIL_HOST)
    int32_t t[{_HELD}];
    __asm__ volatile(
{_loop()}        : {", ".join(f'"=&r"(t[{number}])' for number in range(_HELD))}, "+r"(n), "+r"(a), "+r"(w)
        :
        : "memory");
{_TAKEN}#else
    for (int32_t i = 0; i < {8 * SUMS} * n; ++i) {{
        acc[i / 8 % {SUMS}] += a[i / {8 * SUMS} * 8 + i % 8] * w[i];
    }}
#endif
}}
""",
    alignment=4,
)
DOT8 = CoreInstruction(
    "dot8",
    """
def dot8(acc: [i32][1] @ DRAM, a: [i8][8] @ DRAM, b: [i8][8] @ DRAM):
    assert stride(a, 0) == 1
    assert stride(b, 0) == 1
    for i in seq(0, 8):
        acc[0] += a[i] * b[i]
""",
    "dot8({acc}, {a}, {b});",
    f"""\
/* *acc += a[0] * b[0] + ... + a[7] * b[7]. */
static inline void dot8(int32_t *acc, const int8_t *a, const int8_t *b)
{{
#if defined(__riscv) && !defined(DOVETAIL_HOST)
    int32_t x[2], y[2];
    __builtin_memcpy(x, __builtin_assume_aligned(a, 4), 8);
    __builtin_memcpy(y, __builtin_assume_aligned(b, 4), 8);
    __asm__ volatile(
{_quoted([assembly("hold", "x0", "%1", "%2"), assembly("add", "x0", "%3", "%4"), assembly("take", "%0", "%0")])}\
        : "+r"(*acc)
        : "r"(x[0]), "r"(x[1]), "r"(y[0]), "r"(y[1]));
#else
    for (int32_t i = 0; i < 8; ++i) {{
        *acc += a[i] * b[i];
    }}
#endif
}}
""",
    alignment=4,
)
LANES = CoreInstruction(
    "lanes4",
    """
def lanes4(n: size, acc: [i32][4] @ DRAM, a: [i8][n, 4] @ DRAM, w: [i8][n, 4] @ DRAM):
    assert stride(acc, 0) == 1
    assert stride(a, 0) == 4
    assert stride(a, 1) == 1
    assert stride(w, 0) == 4
    assert stride(w, 1) == 1
    for k in seq(0, n):
        for c in seq(0, 4):
            acc[c] += a[k, c] * w[k, c]
""",
    "lanes4({n}, {acc}, {a}, {w});",
    f"""\
/* acc[c] += a[k][c] * w[k][c], for n taps k and 4 channels c. */
static inline void lanes4(int32_t n, int32_t *acc, const int8_t *a, const int8_t *w)
{{
#if defined(__riscv) && !defined(DOVETAIL_HOST)
    for (int32_t k = 0; k < n; ++k) {{
        int32_t x, y;
        __builtin_memcpy(&x, __builtin_assume_aligned(a + 4 * k, 4), 4);
        __builtin_memcpy(&y, __builtin_assume_aligned(w + 4 * k, 4), 4);
        __asm__ volatile("{assembly("lanes", "x0", "%0", "%1")}" : : "r"(x), "r"(y));
    }}
{"".join(_TAKEN.splitlines(keepends=True)[:4])}#else
    for (int32_t i = 0; i < 4 * n; ++i) {{
        acc[i % 4] += a[i] * w[i];
    }}
#endif
}}
""",
    alignment=4,
)
FUNCTIONS = {
    "saturate": f"""\
/* The value limited to int8. */
static inline int32_t saturate(int32_t value)
{{
    int32_t limited;
    __asm__("{assembly("saturate", "%0", "%1")}" : "=r"(limited) : "r"(value));
    return limited;
}}
""",
    "requantize_near": f"""\
/* The product's upper word, rounded, then shifted, rounded again. */
static inline int32_t requantize_near(int32_t value, uint32_t multiplier, int32_t shift)
{{
    int32_t upper, result;
    __asm__("{assembly("upper", "%0", "%1", "%2")}" : "=r"(upper) : "r"(value), "r"(multiplier));
    __asm__("{assembly("shifted", "%0", "%1", "%2")}" : "=r"(result) : "r"(upper), "r"(shift));
    return result;
}}
""",
}
"""In the place of Dovetail's own."""

_LINE = 32
_CACHES = tuple(Cache(4096, ways=1, line=_LINE, holds=(kind,)) for kind in BOTH)
"""Caches of the core's configuration "full+cfu". A line takes 13 cycles beside a memory of one cycle a word."""

TARGET = replace(
    riscv.TARGET,
    name="vexriscv_cfu",
    sentence="VexRiscv RV32IM with a function unit: int8 sums of products, requantisation; 4 MiB RAM behind caches",
    memories=(dt.Memory("ram", base=0x40000000, size=1 << 22, waits=13, width=_LINE, caches=_CACHES),),
    code="ram",
    core=dt.Core(
        "rv32im",
        costs=dt.costs.VEXRISCV,
        instructions=(BLOCK, DOT8, LANES),
        functions=FUNCTIONS,
        extension=str(HERE / "unit.c"),
        unit=FunctionUnit("vexriscv_cfu_unit", (HERE / "unit.v",)),
    ),
)
