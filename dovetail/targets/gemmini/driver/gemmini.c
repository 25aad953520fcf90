/* Issues Gemmini's instructions (RoCC, custom-3) from a list of nests: loops whose turns differ by constant steps.
   nests.py writes them. */
#include "gemmini.h"

#include "dovetail_rt.h"

#if !defined(__riscv_xlen) || __riscv_xlen != 64
#error "the operands of RoCC instructions have 64 bits: build for rv64"
#endif

enum { FENCE = 0, SETTING = 1, MOVES = 2, PRODUCTS = 3, LINE = 4 };
enum { NOWHERE = 0xFFFFFFFF, ADDS = 0x40000000 };

#define ISSUE(funct, first, second) \
    __asm__ volatile(".insn r 0x7b, 3, " #funct ", x0, %0, %1" : : "r"(first), "r"(second) : "memory")

/* Up to three loops around one instruction; words: counts, address, local operand (2), steps of both. */
#define NEST(funct) \
    for (uint32_t outer = 0; outer < at[0]; ++outer, first += step[0], second += step[3]) { \
        uint64_t row = first, local = second; \
        for (uint32_t middle = 0; middle < at[1]; ++middle, row += step[1], local += step[4]) { \
            uint64_t from = row, to = local; \
            for (uint32_t inner = at[2]; inner != 0u; --inner, from += step[2], to += step[5]) { \
                ISSUE(funct, from, to); \
            } \
        } \
    }

#define LINE_OF(funct) \
    for (; left != 0u; --left, from += step, to += along) { \
        ISSUE(funct, from, to); \
    }

static uint64_t wide(const uint32_t *at)
{
    return at[0] | (uint64_t)at[1] << 32;
}

/* One loop around a move; words: turns, address, local operand (2), steps of both. */
static void line(uint32_t funct, const uint32_t *at)
{
    const uint64_t step = (uint64_t)(int64_t)(int32_t)at[4], along = (uint64_t)(int64_t)(int32_t)at[5];
    uint64_t from = at[1], to = wide(at + 2);
    uint32_t left = at[0];
    if (funct == 1u) {
        LINE_OF(1)
    } else if (funct == 2u) {
        LINE_OF(2)
    } else if (funct == 3u) {
        LINE_OF(3)
    } else {
        LINE_OF(14)
    }
}

static void moves(uint32_t funct, const uint32_t *at)
{
    uint64_t first = at[3], second = wide(at + 4), step[6];
    for (uint32_t index = 0; index < 6u; ++index) {
        step[index] = (uint64_t)(int64_t)(int32_t)at[6 + index];
    }
    if (funct == 1u) {
        NEST(1)
    } else if (funct == 2u) {
        NEST(2)
    } else if (funct == 3u) {
        NEST(3)
    } else {
        NEST(14)
    }
}

/* Pixels in two loops, by one block of weights. The first pair brings the weights into the array, or keeps those there. */
static inline void sweep(uint64_t weights, uint64_t a, uint64_t sums, uint64_t shape, const uint32_t *outer, const uint32_t *inner)
{
    const uint64_t kept = weights | NOWHERE, step = inner[1], along = inner[2];
    uint32_t left = inner[0] - 1u;
    uint64_t from = a + step, to = sums + along;
    ISSUE(6, weights, sums);
    if (weights == kept) {
        ISSUE(5, a, shape);
    } else {
        ISSUE(4, a, shape);
    }
    for (uint32_t run = outer[0]; run != 0u; --run, left = inner[0]) {
        for (; left != 0u; --left, from += step, to += along) {
            ISSUE(6, kept, to);
            ISSUE(5, from, shape);
        }
        a += outer[1];
        sums += outer[2];
        from = a;
        to = sums;
    }
}

/* A row of taps, for all blocks of input channels, a block of output channels and a band. */
static void products(const uint32_t *at)
{
    static const uint32_t once[3] = {1, 0, 0};
    const uint64_t columns = (uint64_t)at[9] << 32, nothing = columns | NOWHERE;
    const uint64_t full = (uint64_t)at[12] << 48, last = (uint64_t)at[13] << 48;
    const uint32_t *const longer = at + at[14], *const shorter = at + at[15], *const runs = at + 16;
    const uint64_t rest_a = at[22], rest_sums = at[23];
    uint64_t sums = at[2] | columns;
    for (uint32_t tap = 0; tap != at[3]; ++tap) {
        uint64_t a = at[0] + tap * at[4], weights = at[1] + tap * at[5];
        for (uint32_t block = at[6]; block != 0u; --block, a += at[7], weights += at[8]) {
            const uint64_t depth = block == 1u ? at[11] : at[10];
            const uint64_t operand = a | depth << 32, held = weights | depth << 48 | columns;
            if (full != 0u) {
                sweep(held, operand | full, sums | full, nothing | full, shorter, longer);
            }
            if (last != 0u) {
                const uint64_t own = full != 0u ? held | NOWHERE : held;
                sweep(own, (operand + rest_a) | last, (sums + rest_sums) | last, nothing | last, once, runs);
            }
            sums |= ADDS;
        }
    }
}

uint32_t gemmini_start(const uint32_t *words, uint32_t count)
{
    const uint32_t *const end = words + count;
    while (words != end) {
        const uint32_t kind = words[0] & 0xFFu, funct = words[0] >> 8 & 0xFFu;
        if (kind == FENCE) {
            __asm__ volatile("fence" : : : "memory");
        } else if (kind == SETTING) {
            ISSUE(0, wide(words + 1), wide(words + 3));
        } else if (kind == MOVES) {
            moves(funct, words + 1);
        } else if (kind == LINE) {
            line(funct, words + 1);
        } else {
            products(words + 1);
        }
        words += words[0] >> 16;
    }
    return 0;
}

void gemmini_wait(uint32_t ticket)
{
    (void)ticket;
    __asm__ volatile("fence" : : : "memory");
    dovetail_compiler_barrier();
}
