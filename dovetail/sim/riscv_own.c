/* Executes a RISC-V core's own instructions, which the emulator takes for illegal ones.

   Built by riscv.py together with the target's file (riscv_own.h says what that has), and handed to the emulator as a
   function pointer, so it needs no headers of the emulator. */
#include "riscv_own.h"

enum { ILLEGAL = 2 /* RISC-V Privileged ISA manual, table of mcause values */, MOST_WORDS = 64 };
enum { UNKNOWN = 1, NO_MEMORY = 2, FOREIGN_LOOP = 3 };
enum { FETCH = 0, LOAD = 1, STORE = 2 }; /* as in block_hook.c */

/* Must agree with `_Own` in riscv.py. */
struct dovetail_core {
    int (*read)(void *emulator, int number, void *value);
    int (*write)(void *emulator, int number, const void *value);
    int (*fetch)(void *emulator, uint64_t address, void *bytes, uint64_t count);
    int (*put)(void *emulator, uint64_t address, const void *bytes, uint64_t count);
    int (*stop)(void *emulator);
    uint64_t (*count)(uint32_t address, uint32_t size); /* of code: instructions in the upper half, cycles */
    void *emulator;
    uint64_t *instructions, *cycles; /* counters, for the turns of loops that the emulator does not see */
    void *state;
    void (*reads)(void *state, uint32_t kind, uint32_t address, uint32_t bytes, uint32_t cycles); /* dovetail_reads */
    int32_t x0, pc;                /* the emulator's numbers of these registers */
    uint32_t failed, word;         /* why it stopped, and at which word or address */
    uint32_t address, known, changed; /* of the present instruction; registers in `values`, and those to write back */
    uint64_t values[32];
};

static void fail(struct dovetail_core *core, uint32_t reason, uint32_t word)
{
    if (core->failed == 0u) {
        core->failed = reason;
        core->word = word;
        (void)core->stop(core->emulator);
    }
}

uint64_t dovetail_register(struct dovetail_core *core, uint32_t number)
{
    if (number == 0u) {
        return 0;
    }
    if ((core->known >> number & 1u) == 0u) {
        core->values[number] = 0; /* a core of 32 bits gives 4 bytes */
        (void)core->read(core->emulator, core->x0 + (int32_t)number, &core->values[number]);
        core->known |= 1u << number;
    }
    return core->values[number];
}

void dovetail_set_register(struct dovetail_core *core, uint32_t number, uint64_t value)
{
    if (number != 0u) {
        core->values[number] = value;
        core->known |= 1u << number;
        core->changed |= 1u << number;
    }
}

static uint64_t content(struct dovetail_core *core, uint32_t address, uint32_t bytes)
{
    uint8_t read[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    uint64_t value = 0;
    if (core->fetch(core->emulator, address, read, bytes) != 0) {
        fail(core, NO_MEMORY, address);
    }
    for (uint32_t byte = 0; byte < 8u; ++byte) {
        value |= (uint64_t)read[byte] << 8u * byte;
    }
    return value;
}

uint64_t dovetail_load(struct dovetail_core *core, uint32_t address, uint32_t bytes)
{
    core->reads(core->state, LOAD, address, bytes, 0);
    return content(core, address, bytes);
}

void dovetail_store(struct dovetail_core *core, uint32_t address, uint32_t bytes, uint64_t value)
{
    core->reads(core->state, STORE, address, bytes, 0);
    uint8_t written[8];
    for (uint32_t byte = 0; byte < 8u; ++byte) {
        written[byte] = (uint8_t)(value >> 8u * byte);
    }
    if (core->put(core->emulator, address, written, bytes) != 0) {
        fail(core, NO_MEMORY, address);
    }
}

uint32_t dovetail_address(struct dovetail_core *core)
{
    return core->address;
}

void dovetail_repeat(struct dovetail_core *core, uint32_t end, uint32_t turns)
{
    const uint32_t before = core->address, first = before + 4u, words = (end - first) / 4u;
    uint32_t body[MOST_WORDS];
    if (first % 4u != 0u || end <= first || words > MOST_WORDS || turns == 0u) {
        fail(core, FOREIGN_LOOP, before);
        return;
    }
    for (uint32_t index = 0; index < words; ++index) {
        body[index] = (uint32_t)content(core, first + 4u * index, 4);
    }
    for (uint32_t turn = 1; turn < turns && core->failed == 0u; ++turn) { /* the last one is left to the emulator */
        for (uint32_t index = 0; index < words && core->failed == 0u; ++index) {
            core->address = first + 4u * index;
            if ((body[index] & 3u) != 3u || dovetail_execute(body[index], core) == 0u) {
                fail(core, FOREIGN_LOOP, core->address);
            }
        }
    }
    if (turns > 1u && core->failed == 0u) {
        const uint64_t counted = core->count(first, 4u * words);
        for (uint32_t turn = 1; turn < turns; ++turn) {
            core->reads(core->state, FETCH, first, 4u * words, (uint32_t)counted);
        }
        *core->instructions += (counted >> 32) * (turns - 1u);
        *core->cycles += (counted & 0xFFFFFFFFu) * (turns - 1u);
    }
    core->address = before;
}

void dovetail_own_instruction(void *emulator, uint32_t number, void *user)
{
    struct dovetail_core *core = user;
    uint64_t after = 0;
    uint32_t word = 0;
    core->emulator = emulator;
    (void)core->read(emulator, core->pc, &after); /* the program counter is past the instruction */
    core->address = (uint32_t)after - 4u;
    core->known = core->changed = 0;
    (void)core->fetch(emulator, core->address, &word, sizeof word);
    if (number != ILLEGAL || dovetail_execute(word, core) == 0u) {
        fail(core, UNKNOWN, word);
    }
    for (uint32_t rest = core->changed, at = 1; rest >> at != 0u && at < 32u; ++at) {
        if ((rest >> at & 1u) != 0u) {
            (void)core->write(emulator, core->x0 + (int32_t)at, &core->values[at]);
        }
    }
}
