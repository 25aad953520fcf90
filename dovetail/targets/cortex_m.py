"""Plain Cortex-M microcontrollers: one core, flash and RAM, no accelerator.

Instructions are exact on all of them. Cycles of the Cortex-M0+, M3 and M23 follow their manuals, those of the
Cortex-M7 a model of its pairs that is 6 to 9 % above published code (`sim/dual_issue.py`), those of the M33 and M55
the Cortex-M4's table (`sim/arm.py`), as Arm publishes none; how far these two are from it has not been measured.

The Cortex-M55 has Helium besides (`helium.py`), which `sim/helium.py` states cycles for.

The DSP extension multiplies two pairs of 16-bit numbers at once (Armv7-M Architecture Reference Manual, SXTB16 and
SMLAD). A word of four int8 becomes two such pairs, the first of taps 0 and 2, the second of taps 1 and 3.
"""

from __future__ import annotations

import dovetail.target as dt
from dovetail.target import (
    Core,
    CoreInstruction,
    Memory,
    PairBlock,
    PairBlocks,
    Policy,
    Quantisation,
    RegisterMemory,
    Target,
)
from dovetail.targets.helium import CYCLES, FUNCTIONS, HELIUM

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

_STEPS = 8
"""Steps of four taps written out."""


def smlad_block(pixels: int, channels: int) -> CoreInstruction:
    """All products of some pixels and channels: UNPACK of the weights and SMLAD, four taps a step.

    Loads that follow each other take a cycle each but the first, so those of a step all do; compilers would pair them,
    in three cycles. With sums, operands and the two pointers it is to have 13 registers at most.
    """
    name, sums = f"smlad_{pixels}x{channels}", pixels * channels
    meaning = f"""
def {name}(n: size, acc: [i32][{pixels}, {channels}] @ DRAM, a: [i8][n, {pixels}, 2, 2] @ PAIR,
           w: [i8][n, {channels}, 4] @ DRAM):
    assert stride(acc, 0) == {channels}
    assert stride(acc, 1) == 1
    assert stride(w, 0) == {4 * channels}
    assert stride(w, 1) == 4
    assert stride(w, 2) == 1
    for v in seq(0, n):
        for x in seq(0, {pixels}):
            for c in seq(0, {channels}):
                for p in seq(0, 2):
                    for i in seq(0, 2):
                        acc[x, c] += a[v, x, p, i] * w[v, c, 2 * i + p]
"""
    held = ", ".join(f"sum_{number} = acc[{number}]" for number in range(sums))
    back = "".join(f"    acc[{number}] = sum_{number};\n" for number in range(sums))
    c = f"""\
/* Sums of {pixels} pixels (a) and {channels} channels (w) over n steps of four taps. */
{_step(pixels, channels)}
static inline void {name}(int32_t n, int32_t *acc, const uint32_t *a, const int8_t *w)
{{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    int32_t {held};
    uint32_t t[{2 * pixels + channels + 1}];
#if defined(__clang__)
#pragma clang loop unroll(disable)
#endif
    for (int32_t turn = n / {_STEPS}; turn > 0; --turn) {{
{_steps(pixels, channels, _STEPS)}    }}
"""
    for count in (4, 2, 1):
        c += f"    if (n & {count}) {{\n{_steps(pixels, channels, count)}    }}\n"
    c += f"""{back}#else
    for (int32_t i = 0; i < {4 * sums} * n; ++i) {{
        const int32_t step = i / {4 * sums}, x = i / {4 * channels} % {pixels}, c = i / 4 % {channels}, tap = i % 4;
        const uint32_t pair = a[(step * {pixels} + x) * 2 + tap % 2];
        acc[x * {channels} + c] += (int16_t)(pair >> (tap / 2 * 16)) * w[(step * {channels} + c) * 4 + tap];
    }}
#endif
}}
"""
    return CoreInstruction(name, meaning, f"{name}({{n}}, {{acc}}, {{a}}, {{w}});", c, alignment=4, memories=(PAIR,))


def _step(pixels: int, channels: int) -> str:
    """The macro that is the text of one step."""
    acts = [f"%{pixels * channels + number}" for number in range(2 * pixels)]
    words = [f"%{pixels * channels + 2 * pixels + number}" for number in range(channels)]
    even, a, w = (f"%{pixels * channels + 2 * pixels + channels + number}" for number in range(3))
    lines = [f'"ldr {x}, [{a}, #{8 * pixels} * " #at " + {4 * n}]' for n, x in enumerate(acts)]
    lines += [f'"ldr {x}, [{w}, #{4 * channels} * " #at " + {4 * n}]' for n, x in enumerate(words)]
    for channel, word in enumerate(words):
        lines += [f'"sxtb16 {even}, {word}', f'"sxtb16 {word}, {word}, ror #8']
        for part, weight in enumerate((even, word)):
            for pixel in range(pixels):
                total = f"%{pixel * channels + channel}"
                lines.append(f'"smlad {total}, {acts[2 * pixel + part]}, {weight}, {total}')
    head = f"#define SMLAD_{pixels}X{channels}(at)"
    return " \\\n    ".join([head, *(f'{line}\\n\\t"' for line in lines)])


def _steps(pixels: int, channels: int, count: int) -> str:
    """Statements for so many steps, which move the pointers on."""
    sums, temporaries = pixels * channels, 2 * pixels + channels + 1
    text = " ".join(f"SMLAD_{pixels}X{channels}({number})" for number in range(count))
    outputs = [*(f'"+r"(sum_{n})' for n in range(sums)), *(f'"=&r"(t[{n}])' for n in range(temporaries))]
    lines = [f"__asm__ volatile({text}", f"    : {', '.join(outputs)}", '    : "r"(a), "r"(w) : "memory");']
    lines += [f"a += {2 * pixels * count};", f"w += {4 * channels * count};"]
    return "".join(f"        {line}\n" for line in lines)


_MOST_HELD = 10
"""Sums and operands of a block beside which compilers find registers for what is around it, whatever that is."""
_KEPT = """\
    int32_t turn = 1;
    __asm__("" : "+r"(turn)); /* a compiler that saw that it is one turn would find too few registers */
"""


def pairs(block: PairBlock) -> str:
    """C of all products of a block whose operands are pairs already (`PairBlocks.write`).

    The loads of a step stand behind each other, so that each takes a cycle but the first. With sums, operands and the
    two pointers a block is to have 13 registers at most.
    """
    pixels, channels, unroll = block.pixels, block.channels, block.unroll
    sums, held = pixels * channels, pixels + channels
    a, w = (f"%{sums + held + number}" for number in range(2))

    def step(at: int) -> list[str]:
        taken = [f"ldr %{sums + x}, [{a}, #{4 * (x * block.distance + at)}]" for x in range(pixels)]
        taken += [f"ldr %{sums + pixels + c}, [{w}, #{4 * (channels * at + c)}]" for c in range(channels)]
        places = [(x, c) for c in range(channels) for x in range(pixels)]
        products = (
            f"smlad %{x * channels + c}, %{sums + x}, %{sums + pixels + c}, %{x * channels + c}" for x, c in places
        )
        return [*taken, *products]

    def turn(count: int) -> str:
        lines = [line for at in range(count) for line in step(at)]
        text = "".join(f'            "{line}\\n\\t"\n' for line in lines)
        outputs = [*(f'"+r"(sum_{n})' for n in range(sums)), *(f'"=&r"(t[{n}])' for n in range(held))]
        return f"""\
        __asm__ volatile(
{text}            : {", ".join(outputs)} : "r"(from), "r"(weights) : "memory");
        from += {count};
        weights += {channels * count};
"""

    turns, rest = divmod(block.steps, unroll)
    alone = turns == 1 and pixels == 1 and sums + held > _MOST_HELD
    begun = "" if alone else f"int32_t turn = {turns}"
    body = f"    for ({begun}; turn > 0; --turn) {{\n{turn(unroll)}    }}\n" if turns else ""
    body += f"    {{\n{turn(rest)}    }}\n" if rest else ""
    start = ", ".join(f"sum_{number} = sums[{number}]" for number in range(sums))
    back = "".join(f"    sums[{number}] = sum_{number};\n" for number in range(sums))
    return f"""\
/* Sums of {pixels} pixels and {channels} channels over {block.steps} pairs each. */
static inline void {block.name}(int32_t *sums, const uint32_t *from, const uint32_t *weights)
{{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    int32_t {start};
    uint32_t t[{held}];
{_KEPT if alone else ""}#if defined(__clang__)
#pragma clang loop unroll(disable)
#endif
{body}{back}#else
    for (int32_t i = 0; i < {sums * block.steps}; ++i) {{
        const int32_t pixel = i / {channels} % {pixels}, channel = i % {channels}, step = i / {sums};
        const uint32_t a = from[pixel * {block.distance} + step], w = weights[step * {channels} + channel];
        sums[pixel * {channels} + channel] += (int16_t)a * (int16_t)w + (int16_t)(a >> 16) * (int16_t)(w >> 16);
    }}
#endif
}}
"""


PAIRS = PairBlocks(((3, 2), (2, 2), (1, 2), (1, 4), (1, 5), (2, 3)), 4095, pairs)
"""Registers are 13: sums, an operand of each pixel and channel, two pointers."""

_HIGH = ("r8", "r9", "r10", "r11")
"""Registers that keep the sums where only r0 to r7 multiply."""


def pairs_in_halves(block: PairBlock) -> str:
    """C of all products of a block of a pixel on a core that multiplies one number at a time and loads words fast
    (Armv6-M): a word is two numbers after two instructions, where a load of each takes two cycles.

    A pointer to the sums is in r0, of pairs in r1, of weights in r2; the end of the loop is in lr.
    """
    held, (turns, rest) = _HIGH[: block.channels], divmod(block.steps, block.unroll)
    low = ("r3", "r4", "r5", "r6")[: block.channels]
    moved = [f"mov {high}, {register}" for high, register in zip(held, low, strict=True)]
    back = [f"mov {register}, {high}" for high, register in zip(held, low, strict=True)]

    def step() -> list[str]:
        lines = ["ldmia r1!, {r3}", "sxth r0, r3", "asrs r3, r3, #16"]
        for first in range(0, block.channels, 2):
            words = ("r4", "r5")[: block.channels - first]
            lines.append(f"ldmia r2!, {{{', '.join(words)}}}")
            for high, word in zip(held[first:], words, strict=False):
                lines += [f"sxth r6, {word}", f"asrs {word}, {word}, #16", "muls r6, r0, r6", f"add {high}, {high}, r6"]
                lines += [f"muls {word}, r3, {word}", f"add {high}, {high}, {word}"]
        return lines

    lines = [".syntax unified", "mov lr, r3", "mov r12, r0", f"ldmia r0!, {{{', '.join(low)}}}", *moved]
    if turns:
        lines += ["1:", *(line for _ in range(block.unroll) for line in step()), "cmp r1, lr", "bne 1b"]
    lines += [*(line for _ in range(rest) for line in step()), "mov r0, r12", *back]
    lines.append(f"stmia r0!, {{{', '.join(low)}}}")
    text = "".join(f'        "{line}\\n\\t"\n' for line in lines)
    clobbers = ", ".join(f'"{name}"' for name in ("r4", "r5", "r6", *held, "r12", "lr", "cc", "memory"))
    return f"""\
/* Sums of a pixel and {block.channels} channels over {block.steps} pairs each. */
static __attribute__((noinline)) void {block.name}(int32_t *sums, const uint32_t *from, const uint32_t *weights)
{{
#if defined(__ARM_ARCH_ISA_THUMB) && __ARM_ARCH_ISA_THUMB == 1 && !defined(DOVETAIL_HOST)
    register int32_t *to __asm__("r0") = sums;
    register const uint32_t *pairs __asm__("r1") = from;
    register const uint32_t *taps __asm__("r2") = weights;
    register const uint32_t *end __asm__("r3") = from + {turns * block.unroll};
    __asm__ volatile(
{text}        : "+r"(to), "+r"(pairs), "+r"(taps), "+r"(end) : : {clobbers});
#else
    for (int32_t i = 0; i < {block.channels * block.steps}; ++i) {{
        const uint32_t a = from[i / {block.channels}], w = weights[i];
        sums[i % {block.channels}] += (int16_t)a * (int16_t)w + (int16_t)(a >> 16) * (int16_t)(w >> 16);
    }}
#endif
}}
"""


HALVES = PairBlocks(((1, 4), (1, 2)), 1 << 20, pairs_in_halves, UNPACK, 4)
"""At most four steps a turn, whose branch is short."""

_ADD_TURN = 8
"""Words of four sums written out."""
_ADD_WORD = (
    "ldr %4, [%1], #4",
    "ldr %5, [%2], #4",
    "and %6, %9, %4, lsl #8",
    "and %7, %9, %5, lsl #8",
    "and %4, %9, %4",
    "and %5, %9, %5",
    "smlawb %8, %10, %6, %12",
    "smlawt %6, %10, %6, %12",
    "smlawb %8, %11, %7, %8",
    "smlawt %6, %11, %7, %6",
    "pkhtb %8, %6, %8, asr #16",
    "smlawb %6, %10, %4, %12",
    "smlawt %4, %10, %4, %12",
    "smlawb %6, %11, %5, %6",
    "smlawt %4, %11, %5, %4",
    "pkhtb %6, %4, %6, asr #16",
    "ssat16 %8, #13, %8",
    "ssat16 %6, #13, %6",
    "and %8, %9, %8, lsl #3",
    "and %6, %9, %6, lsl #3",
    "orr %8, %6, %8, lsr #8",
    "str %8, [%0], #4",
)
"""Four sums. Bytes are the upper ones of halves of a register, first those of elements 0 and 2, then those of 1 and 3;
their products' upper 32 of 48 bits are exact with factors raised by 8 bits. Of the sums in Q10.21 the upper halves in
Q10.5 are limited together, which leaves each result within its half at bit 5."""


def _add_bytes() -> str:
    """C of Dovetail's `add_bytes` by products of halves."""
    turn = "".join(f'            "{line}\\n\\t"\n' for line in _ADD_WORD * _ADD_TURN)
    return f"""\
/* (left * first + right * second + offset) / 2^21, rounded down and limited to int8, of so many pairs, each of which
   begins at a multiple of 4 bytes. */
static inline void add_bytes(int8_t *to, const int8_t *left, const int8_t *right, int32_t count, int32_t first,
                             int32_t second, int32_t offset)
{{
    const int8_t *end = to + count;
    const int8_t *stop = to + count / {4 * _ADD_TURN} * {4 * _ADD_TURN};
    if (stop != to) {{
        uint32_t t[5];
        __asm__ volatile(
            "1:\\n\\t"
{turn}            "cmp %0, %3\\n\\t"
            "bne 1b"
            : "+&r"(to), "+&r"(left), "+&r"(right), "+&r"(stop), "=&r"(t[0]), "=&r"(t[1]), "=&r"(t[2]), "=&r"(t[3]),
              "=&r"(t[4])
            : "r"(0xFF00FF00u), "r"(first * 256), "r"(second * 256), "r"(offset)
            : "memory", "cc");
    }}
    while (to != end) {{
        *to++ = (int8_t)saturate((*left++ * first + *right++ * second + offset) >> 21);
    }}
}}
"""


def _quantize_lines(rest: int) -> str:
    """Asm of four floats, whose loads follow each other."""
    words, places = [f"%{n}" for n in range(3, 7)], [f"%{n}" for n in range(7, 11)]
    lines = [f"ldr {word}, [%1], #4" for word in words]
    lines += [f"lsr {place}, {word}, #23" for word, place in zip(words, places, strict=True)]
    lines += [f"ldr {place}, [%11, {place}, lsl #2]" for place in places]
    lines += [f"add {place}, {place}, {word}, lsr #{rest}" for word, place in zip(words, places, strict=True)]
    lines += [f"ldr {place}, [%12, {place}, lsl #2]" for place in places]
    for word, place in zip(words, places, strict=True):
        lines += [f"eor {word}, {word}, {word}, asr #31", f"add {place}, {place}, {word}"]
        lines += [f"lsr {place}, {place}, #{rest}", f"strb {place}, [%0], #1"]
    turn = [*lines, *lines, "cmp %0, %2", "bne 1b"]
    return "".join(f'            "{line}\\n\\t"\n' for line in turn)


def _quantize_bytes() -> str:
    """C of Dovetail's `quantize_bytes`, eight floats a turn."""
    loops = "".join(
        f"""    {"else " if rest == 15 else ""}if (stop != to) {{
        __asm__ volatile(
            "1:\\n\\t"
{_quantize_lines(rest)}\
            : "+&r"(to), "+&r"(from), "+&r"(stop), "=&r"(t[0]), "=&r"(t[1]), "=&r"(t[2]), "=&r"(t[3]), "=&r"(t[4]),
              "=&r"(t[5]), "=&r"(t[6]), "=&r"(t[7])
            : "r"(starts), "r"(words)
            : "memory", "cc");
    }}
""".replace("if (stop != to)", f"if (stop != to && rest == {rest})")
        for rest in (16, 15)
    )
    return f"""\
/* So many floats to 8 bits by tables, as Dovetail's; `rest` is 15 or 16. */
static inline void quantize_bytes(uint8_t *to, const float *from, int32_t count, const int32_t *starts,
                                  const uint32_t *words, int32_t rest)
{{
    const uint8_t *end = to + count;
    const uint8_t *stop = to + count / 8 * 8;
    uint32_t t[8];
{loops}    while (to != end) {{
        uint32_t bits;
        __builtin_memcpy(&bits, from++, 4);
        const uint32_t word = words[starts[bits >> 23] + (int32_t)(bits >> rest)];
        *to++ = (uint8_t)((word + (bits ^ (uint32_t)((int32_t)bits >> 31))) >> rest);
    }}
}}
"""


_PLAIN = {"0plus": dt.costs.CORTEX_M0PLUS, "3": dt.costs.CORTEX_M3, "23": dt.costs.CORTEX_M23}
"""Cores without the DSP extension: what their instructions take."""
_COSTS = {**_PLAIN, "7": dt.costs.CORTEX_M7}


def cortex_m(number: int | str) -> Target:
    """The microcontroller with a Cortex-M of that number: 3, 4, 7, 23, 33, 55 or "0plus"."""
    plain = str(number) in _PLAIN
    known = "no DSP extension" if plain else "DSP extension"
    instructions = () if plain else (UNPACK, smlad_block(2, 2), smlad_block(1, 4), SMLAD)
    functions = {} if plain else {"add_bytes": _add_bytes(), "quantize_bytes": _quantize_bytes()}
    blocks = None if plain else PAIRS
    cycles = None if plain else dt.costs.kernel_cycles("cortex-m7+dsp" if number == 7 else "cortex-m4+dsp")
    if number in ("0plus", 23):
        blocks, cycles = HALVES, dt.costs.kernel_cycles("cortex-m0plus+halves")
    if number == 55:
        blocks, functions, cycles = None, {**functions, **FUNCTIONS}, {**(cycles or {}), **CYCLES}
        known += " and Helium"
    return Target(
        name=f"cortex_m{number}",
        sentence=f"Arm Cortex-M{str(number).replace('plus', '+')} core alone ({known}, no floating point), "
        "1 MiB flash, 256 KiB RAM",
        core=Core(
            f"cortex-m{number}" + ("+mve" if number == 55 else ""),
            stack=8192,
            costs=_COSTS.get(str(number), {}),
            instructions=instructions,
            pairs=blocks,
            vectors=HELIUM if number == 55 else None,
            functions=functions,
            kernels=cycles,
            statements=dt.costs.StatementCycles(begin=0, end=0) if number == 7 else dt.costs.StatementCycles(),
        ),
        memories=(
            Memory("flash", base=0x01000000 if number == 55 else 0x08000000, size=1024 * 1024),
            Memory("ram", base=0x20000000, size=256 * 1024),
        ),
        code="flash",
        values="ram",
        policies=(Policy("exact", "the core requantises as TFLite Micro does", ()),),
        quantisation=Quantisation(wide_sums=True),
    )


M0PLUS, M3, M4, M7, M23, M33, M55 = (cortex_m(number) for number in ("0plus", 3, 4, 7, 23, 33, 55))
