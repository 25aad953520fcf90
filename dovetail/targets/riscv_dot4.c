/* What the instruction of riscv_dot4 does, for the simulator. */
#include "riscv_own.h"

uint32_t dovetail_kind(uint32_t word)
{
    (void)word;
    return DOVETAIL_ALU;
}

uint32_t dovetail_execute(uint32_t word, struct dovetail_core *core)
{
    const uint32_t rd = word >> 7 & 31u;
    const uint32_t first = dovetail_register(core, word >> 15 & 31u), second = dovetail_register(core, word >> 20 & 31u);
    uint32_t result = dovetail_register(core, rd);
    if ((word & 0xFE00707Fu) != 0x0Bu) {
        return 0;
    }
    for (uint32_t lane = 0; lane < 32u; lane += 8u) {
        result += (uint32_t)((int8_t)(first >> lane & 0xFFu) * (int8_t)(second >> lane & 0xFFu));
    }
    dovetail_set_register(core, rd, result);
    return 1;
}
