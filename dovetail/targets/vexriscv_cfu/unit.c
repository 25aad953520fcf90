/* The instructions of unit.v for the simulator iss. */
#include "riscv_own.h"

enum { OPCODE = 0x0B, ADD = 0, TAKE = 1, HOLD = 2, UPPER = 3, SHIFTED = 4, SATURATE = 5, LANES = 6 };

static uint32_t held[2], sums[16];

uint32_t dovetail_kind(uint32_t word)
{
    (void)word;
    return DOVETAIL_ALU;
}

static uint32_t dot4(uint32_t left, uint32_t right)
{
    uint32_t sum = 0;
    for (uint32_t lane = 0; lane < 32u; lane += 8u) {
        sum += (uint32_t)((int8_t)(left >> lane & 0xFFu) * (int8_t)(right >> lane & 0xFFu));
    }
    return sum;
}

uint32_t dovetail_execute(uint32_t word, struct dovetail_core *core)
{
    const uint32_t first = dovetail_register(core, word >> 15 & 31u), second = dovetail_register(core, word >> 20 & 31u);
    const uint32_t shift = second & 31u, which = word >> 25 & 15u;
    const int64_t value = (int32_t)first;
    uint32_t result = 0;
    if ((word & 0x7Fu) != OPCODE || word >> 29 != 0u) {
        return 0;
    }
    switch (word >> 12 & 7u) {
    case ADD:
        sums[which] += dot4(held[0], first) + dot4(held[1], second);
        break;
    case TAKE:
        result = first + sums[which];
        sums[which] = 0;
        break;
    case HOLD:
        held[0] = first;
        held[1] = second;
        break;
    case UPPER:
        result = (uint32_t)((value * second + 0x80000000) >> 32);
        break;
    case SHIFTED:
        result = (uint32_t)((value + ((int64_t)1 << ((shift - 1u) & 31u)) - (value < 0)) >> shift);
        break;
    case SATURATE:
        result = (uint32_t)(value < -128 ? -128 : value > 127 ? 127 : value);
        break;
    case LANES:
        for (uint32_t lane = 0; lane < 4u; ++lane) {
            const uint32_t byte = 0xFFu << 8u * lane;
            sums[(which + lane) & 15u] += dot4(first & byte, second & byte);
        }
        break;
    default:
        return 0;
    }
    dovetail_set_register(core, word >> 7 & 31u, result);
    return 1;
}
