"""Plain Cortex-M microcontrollers: one core with the DSP extension, flash and RAM, no accelerator.

Instructions are exact on all of them. Cycles of all three follow the Cortex-M4's table (`sim/arm.py`): Arm
publishes none for the Cortex-M7, which issues up to two instructions at once, and none for the Cortex-M33. For the
Cortex-M7 they are therefore more than the core takes, up to twice as many; for neither has their error been measured,
as no RTL of these cores is public.

The DSP extension multiplies two pairs of 16-bit numbers at once (Armv7-M Architecture Reference Manual, SXTB16 and
SMLAD). A word of four int8 becomes two such pairs, the first of taps 0 and 2, the second of taps 1 and 3.
"""

from __future__ import annotations

from dovetail.target import Core, CoreInstruction, Memory, Policy, RegisterMemory, Target

PAIR = RegisterMemory("PAIR", "uint32_t", 2)
"""Two int8, each sign-extended to half a register."""

UNPACK = CoreInstruction(
    "unpack",
    meaning="""
def unpack(to: [i8][2, 2] @ PAIR, of: [i8][4] @ DRAM):
    assert stride(of, 0) == 1
    for p in seq(0, 2):
        for i in seq(0, 2):
            to[p, i] = of[2 * i + p]
""",
    c="unpack({to}, {of});",
    declarations="""\
/* Four int8 as pairs of int16: to[0] holds of[0] and of[2], to[1] holds of[1] and of[3]; of begins at a multiple of 4
   bytes. */
static inline void unpack(uint32_t *to, const int8_t *of)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    uint32_t even, odd;
    __builtin_memcpy(&odd, __builtin_assume_aligned(of, 4), 4);
    __asm__("sxtb16 %0, %1\\n\\tsxtb16 %1, %1, ror #8" : "=&r"(even), "+r"(odd));
    to[0] = even;
    to[1] = odd;
#else
    for (int32_t i = 0; i < 2; ++i) {
        to[i] = (uint32_t)(uint16_t)of[i] | (uint32_t)(uint16_t)of[i + 2] << 16;
    }
#endif
}
""",
    alignment=4,
    memories=(PAIR,),
)

SMLAD = CoreInstruction(
    "smlad",
    meaning="""
def smlad(acc: [i32][1] @ DRAM, a: [i8][2] @ PAIR, b: [i8][2] @ PAIR):
    for i in seq(0, 2):
        acc[0] += a[i] * b[i]
""",
    c="smlad({acc}, {a}, {b});",
    declarations="""\
/* *acc += the products of both pairs of int16. */
static inline void smlad(int32_t *acc, const uint32_t *a, const uint32_t *b)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    __asm__("smlad %0, %1, %2, %0" : "+r"(*acc) : "r"(*a), "r"(*b));
#else
    *acc += (int16_t)*a * (int16_t)*b + (int16_t)(*a >> 16) * (int16_t)(*b >> 16);
#endif
}
""",
    memories=(PAIR,),
)

SMLAD_2X2 = CoreInstruction(
    "smlad_2x2",
    meaning="""
def smlad_2x2(n: size, acc: [i32][2, 2] @ DRAM, a: [i8][n, 2, 2, 2] @ PAIR, w: [i8][n, 2, 4] @ DRAM):
    assert stride(acc, 0) == 2
    assert stride(acc, 1) == 1
    assert stride(w, 0) == 8
    assert stride(w, 1) == 4
    assert stride(w, 2) == 1
    for v in seq(0, n):
        for x in seq(0, 2):
            for c in seq(0, 2):
                for p in seq(0, 2):
                    for i in seq(0, 2):
                        acc[x, c] += a[v, x, p, i] * w[v, c, 2 * i + p]
""",
    c="smlad_2x2({n}, {acc}, {a}, {w});",
    declarations="""\
/* Sums of two pixels (a) and two channels (w) over n steps of four taps. Loads that follow each other take a cycle each
   but the first, so all six of a step do; compilers would take them two by two, in three cycles. */
#define SMLAD_2X2(at) \\
    "ldr %4, [%11, #16 * " #at "]\\n\\tldr %5, [%11, #16 * " #at " + 4]\\n\\t" \\
    "ldr %6, [%11, #16 * " #at " + 8]\\n\\tldr %7, [%11, #16 * " #at " + 12]\\n\\t" \\
    "ldr %8, [%12, #8 * " #at "]\\n\\tldr %9, [%12, #8 * " #at " + 4]\\n\\t" \\
    "sxtb16 %10, %8\\n\\tsxtb16 %8, %8, ror #8\\n\\t" \\
    "smlad %0, %4, %10, %0\\n\\tsmlad %2, %6, %10, %2\\n\\tsmlad %0, %5, %8, %0\\n\\tsmlad %2, %7, %8, %2\\n\\t" \\
    "sxtb16 %10, %9\\n\\tsxtb16 %9, %9, ror #8\\n\\t" \\
    "smlad %1, %4, %10, %1\\n\\tsmlad %3, %6, %10, %3\\n\\tsmlad %1, %5, %9, %1\\n\\tsmlad %3, %7, %9, %3\\n\\t"
#define SMLAD_2X2_STEPS(steps) \\
    __asm__ volatile(steps \\
        : "+r"(sum_0), "+r"(sum_1), "+r"(sum_2), "+r"(sum_3), "=&r"(t[0]), "=&r"(t[1]), "=&r"(t[2]), "=&r"(t[3]), \\
          "=&r"(t[4]), "=&r"(t[5]), "=&r"(t[6]) \\
        : "r"(a), "r"(w) : "memory")
static inline void smlad_2x2(int32_t n, int32_t *acc, const uint32_t *a, const int8_t *w)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    int32_t sum_0 = acc[0], sum_1 = acc[1], sum_2 = acc[2], sum_3 = acc[3];
    uint32_t t[7];
#if defined(__clang__)
#pragma clang loop unroll(disable)
#endif
    for (int32_t turn = n / 8; turn > 0; --turn) {
        SMLAD_2X2_STEPS(SMLAD_2X2(0) SMLAD_2X2(1) SMLAD_2X2(2) SMLAD_2X2(3)
                        SMLAD_2X2(4) SMLAD_2X2(5) SMLAD_2X2(6) SMLAD_2X2(7));
        a += 32;
        w += 64;
    }
    if (n & 4) {
        SMLAD_2X2_STEPS(SMLAD_2X2(0) SMLAD_2X2(1) SMLAD_2X2(2) SMLAD_2X2(3));
        a += 16;
        w += 32;
    }
    if (n & 2) {
        SMLAD_2X2_STEPS(SMLAD_2X2(0) SMLAD_2X2(1));
        a += 8;
        w += 16;
    }
    if (n & 1) {
        SMLAD_2X2_STEPS(SMLAD_2X2(0));
    }
    acc[0] = sum_0;
    acc[1] = sum_1;
    acc[2] = sum_2;
    acc[3] = sum_3;
#else
    for (int32_t i = 0; i < 16 * n; ++i) {
        const uint32_t pair = a[i / 16 * 4 + i / 8 % 2 * 2 + i % 2];
        const int32_t value = (int16_t)(i / 2 % 2 != 0 ? pair >> 16 : pair);
        acc[i / 8 % 2 * 2 + i / 4 % 2] += value * w[i / 16 * 8 + i / 4 % 2 * 4 + i % 4];
    }
#endif
}
""",
    alignment=4,
    memories=(PAIR,),
)


def cortex_m(number: int) -> Target:
    """The microcontroller with a Cortex-M of that number: 4, 7 or 33."""
    return Target(
        name=f"cortex_m{number}",
        sentence=f"Arm Cortex-M{number} core alone (DSP extension, no floating point), 1 MiB flash, 256 KiB RAM",
        core=Core(f"cortex-m{number}", stack=8192, instructions=(UNPACK, SMLAD_2X2, SMLAD)),
        memories=(
            Memory("flash", base=0x08000000, size=1024 * 1024),
            Memory("ram", base=0x20000000, size=256 * 1024),
        ),
        code="flash",
        values="ram",
        policies=(Policy("exact", "the core requantises as TFLite Micro does", ()),),
    )


M4, M7, M33 = cortex_m(4), cortex_m(7), cortex_m(33)
