/* An instruction of 64 bits in C: rd = the eight bytes at rs1, times rs2; they are turned round in memory. */
#include "riscv_own.h"

uint32_t dovetail_kind(uint32_t word)
{
    (void)word;
    return DOVETAIL_ALU;
}

uint32_t dovetail_execute(uint32_t word, struct dovetail_core *core)
{
    const uint32_t at = (uint32_t)dovetail_register(core, word >> 15 & 31u);
    const uint64_t read = dovetail_load(core, at, 8);
    if ((word & 0x7Fu) != 0x0Bu) {
        return 0;
    }
    dovetail_store(core, at, 8, ~read);
    dovetail_set_register(core, word >> 7 & 31u, read * dovetail_register(core, word >> 20 & 31u));
    return 1;
}
