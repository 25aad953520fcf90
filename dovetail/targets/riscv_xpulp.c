/* What instructions of the CORE-V cores do, for the simulator: those riscv_xpulp.py uses, and all loads and stores that
   move their pointer by a constant. Encodings and meanings: CV32E40P User Manual, "CORE-V Instruction Set Extensions"
   and "CORE-V Hardware Loop feature". */
#include "riscv_own.h"

enum { LOADS = 0x0B, OTHERS = 0x2B, VECTORS = 0x7B };

static uint32_t extended(uint32_t value, uint32_t bits)
{
    const uint32_t sign = 1u << (bits - 1u);
    return (value ^ sign) - sign;
}

/* cv.lb, cv.lh, cv.lw, cv.lbu, cv.lhu rd, imm(rs1!): 1, 2 or 4 bytes; 0 for no load. */
static uint32_t loaded_bytes(uint32_t word)
{
    const uint32_t funct3 = word >> 12 & 7u;
    return (word & 0x7Fu) == LOADS && (funct3 & 3u) != 3u && funct3 != 6u ? 1u << (funct3 & 3u) : 0u;
}

/* cv.sb, cv.sh, cv.sw rs2, imm(rs1!). */
static uint32_t stored_bytes(uint32_t word)
{
    const uint32_t funct3 = word >> 12 & 7u;
    return (word & 0x7Fu) == OTHERS && funct3 < 3u ? 1u << funct3 : 0u;
}

uint32_t dovetail_kind(uint32_t word)
{
    const int clips = (word & 0xFE00707Fu) == (OTHERS | 3u << 12 | 0x38u << 25);
    if (clips || (word & 0x707Fu) == (OTHERS | 4u << 12)) { /* cv.clip, cv.setup */
        return DOVETAIL_IMMEDIATE;
    }
    return loaded_bytes(word) ? DOVETAIL_LOAD : stored_bytes(word) ? DOVETAIL_STORE : DOVETAIL_ALU;
}

static uint32_t dot_product(uint32_t total, uint32_t first, uint32_t second)
{
    for (uint32_t lane = 0; lane < 32u; lane += 8u) {
        total += (uint32_t)((int8_t)(first >> lane & 0xFFu) * (int8_t)(second >> lane & 0xFFu));
    }
    return total;
}

static uint32_t clipped(uint32_t value, uint32_t bits)
{
    const int32_t high = (int32_t)((1u << bits) - 1u) >> 1, low = -high - 1;
    return (uint32_t)((int32_t)value < low ? low : (int32_t)value > high ? high : (int32_t)value);
}

/* (total + first + half) / 2^shift: cv.addRNr. */
static uint32_t added_and_shifted(uint32_t total, uint32_t first, uint32_t shift)
{
    const int32_t sum = (int32_t)(total + first + (shift != 0u ? 1u << (shift - 1u) : 0u));
    return (uint32_t)(sum >> shift);
}

static uint32_t moves_pointer(uint32_t word, struct dovetail_core *core)
{
    const uint32_t at = word >> 15 & 31u, address = dovetail_register(core, at), loaded = loaded_bytes(word);
    if (loaded != 0u) {
        const uint32_t value = dovetail_load(core, address, loaded);
        dovetail_set_register(core, at, address + extended(word >> 20, 12));
        dovetail_set_register(core, word >> 7 & 31u, (word >> 14 & 1u) != 0u ? value : extended(value, 8u * loaded));
        return 1;
    }
    if (stored_bytes(word) == 0u) {
        return 0;
    }
    dovetail_store(core, address, stored_bytes(word), dovetail_register(core, word >> 20 & 31u));
    dovetail_set_register(core, at, address + extended((word >> 20 & 0xFE0u) | (word >> 7 & 31u), 12));
    return 1;
}

uint32_t dovetail_execute(uint32_t word, struct dovetail_core *core)
{
    const uint32_t rd = word >> 7 & 31u, number = word >> 20 & 31u;
    const uint32_t kind = (word & 0x7Fu) | (word >> 12 & 7u) << 7 | word >> 25 << 10; /* opcode, funct3, funct7 */
    uint32_t result, first, second;
    if (moves_pointer(word, core) != 0u) {
        return 1;
    }
    first = dovetail_register(core, word >> 15 & 31u);
    if ((word & 0x7F7Fu) == (OTHERS | 4u << 12 | 7u << 8)) { /* cv.setup, either loop: rs1 turns, words to the end */
        dovetail_repeat(core, dovetail_address(core) + 4u * (word >> 20), first);
        return 1;
    }
    second = dovetail_register(core, number);
    result = dovetail_register(core, rd);
    switch (kind) {
    case VECTORS | 1u << 7 | 0x54u << 10: /* cv.sdotsp.b */
        result = dot_product(result, first, second);
        break;
    case OTHERS | 3u << 7 | 0x48u << 10: /* cv.mac */
        result += first * second;
        break;
    case OTHERS | 3u << 7 | 0x42u << 10: /* cv.addRNr */
        result = added_and_shifted(result, first, second & 31u);
        break;
    case OTHERS | 3u << 7 | 0x38u << 10: /* cv.clip */
        result = clipped(first, number);
        break;
    default:
        return 0;
    }
    dovetail_set_register(core, rd, result);
    return 1;
}
