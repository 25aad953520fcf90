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


def cortex_m(number: int) -> Target:
    """The microcontroller with a Cortex-M of that number: 4, 7 or 33."""
    return Target(
        name=f"cortex_m{number}",
        sentence=f"Arm Cortex-M{number} core alone (DSP extension, no floating point), 1 MiB flash, 256 KiB RAM",
        core=Core(f"cortex-m{number}", stack=8192, instructions=(UNPACK, SMLAD)),
        memories=(
            Memory("flash", base=0x08000000, size=1024 * 1024),
            Memory("ram", base=0x20000000, size=256 * 1024),
        ),
        code="flash",
        values="ram",
        policies=(Policy("exact", "the core requantises as TFLite Micro does", ()),),
    )


M4, M7, M33 = cortex_m(4), cortex_m(7), cortex_m(33)
