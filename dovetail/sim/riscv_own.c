/* Executes a RISC-V core's own instructions, which the emulator takes for illegal ones.

   Built by riscv.py together with the target's file, which has dovetail_execute, and handed to the emulator as a
   function pointer, so it needs no headers of the emulator. */
#include <stdint.h>

/* The target's: computes what is written to rd, which on entry is rd's value, from the values of rs1 and rs2.
   Returns 0 where the word is no instruction of its own. */
uint32_t dovetail_execute(uint32_t word, uint32_t first, uint32_t second, uint32_t *result);

/* Must agree with `_Own` in riscv.py. */
struct own {
    int (*read)(void *core, int number, void *value);
    int (*write)(void *core, int number, const void *value);
    int (*fetch)(void *core, uint64_t address, void *bytes, uint64_t count);
    int (*stop)(void *core);
    int32_t x0, pc; /* the emulator's numbers of these registers */
    uint32_t failed, word;
};

enum { ILLEGAL = 2 }; /* RISC-V Privileged ISA manual, table of mcause values */

void dovetail_own_instruction(void *core, uint32_t number, void *user)
{
    struct own *own = user;
    uint32_t after = 0, word = 0, first = 0, second = 0, result = 0;
    (void)own->read(core, own->pc, &after); /* the program counter is past the instruction */
    (void)own->fetch(core, after - 4u, &word, sizeof word);
    const int32_t rd = own->x0 + (int32_t)(word >> 7 & 31u);
    (void)own->read(core, own->x0 + (int32_t)(word >> 15 & 31u), &first);
    (void)own->read(core, own->x0 + (int32_t)(word >> 20 & 31u), &second);
    (void)own->read(core, rd, &result);
    if (number != ILLEGAL || dovetail_execute(word, first, second, &result) == 0u) {
        own->failed = 1;
        own->word = word;
        (void)own->stop(core);
    } else if (rd != own->x0) {
        (void)own->write(core, rd, &result);
    }
}
