/* What a RISC-V core's own instructions may read and change in the simulator: for the C file of Core.extension, which
   has the two functions at the end. */
#ifndef DOVETAIL_RISCV_OWN_H
#define DOVETAIL_RISCV_OWN_H

#include <stdint.h>

struct dovetail_core;

/* The value of register x0 to x31, and a new one; of a core of 32 bits the lower half. */
uint64_t dovetail_register(struct dovetail_core *core, uint32_t number);
void dovetail_set_register(struct dovetail_core *core, uint32_t number, uint64_t value);

/* 1, 2, 4 or 8 bytes of memory, without sign. */
uint64_t dovetail_load(struct dovetail_core *core, uint32_t address, uint32_t bytes);
void dovetail_store(struct dovetail_core *core, uint32_t address, uint32_t bytes, uint64_t value);

/* The address of the instruction. */
uint32_t dovetail_address(struct dovetail_core *core);

/* A hardware loop: the instructions up to `end` (not included) are executed `turns` times, beginning with the next
   one. All of them must be the core's own, of 4 bytes. Interrupts are taken behind the loop. */
void dovetail_repeat(struct dovetail_core *core, uint32_t end, uint32_t turns);

/* How long an instruction takes, and for which registers it waits: as an addition of rd, rs1 and rs2; as a load to rd by
   rs1; as a store of rs2 by rs1; as an addition of rs1 and a constant. */
enum dovetail_kind { DOVETAIL_ALU = 0, DOVETAIL_LOAD = 1, DOVETAIL_STORE = 2, DOVETAIL_IMMEDIATE = 3 };
uint32_t dovetail_kind(uint32_t word);

/* Executes an instruction; 0 where the word is none of the core's own. */
uint32_t dovetail_execute(uint32_t word, struct dovetail_core *core);

#endif
