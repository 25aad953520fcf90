/* Counts instructions and cycles of the emulated core, one call per executed block.

   Built by core.py and handed to the emulator as a function pointer, so it needs no headers of the
   emulator. Decoding a block is left to Python (`decode`), once per block: here is only the fast path. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Must agree with `_BlockEntry` in core.py. */
struct block {
    uint32_t address, size; /* size 0: the slot is free */
    uint32_t end, instructions, cycles, taken_extra, system, entered_extra;
};

/* Must agree with waits.py: a place of a cache (used 0: empty), a cache, and the way from a core to a memory, for
   instructions or for data. */
struct line {
    uint64_t number, used;
};

struct cache {
    uint64_t time;
    struct line *lines;
    uint32_t sets, ways;
};

struct port {
    uint64_t base, size;
    struct cache *cache; /* NULL: none */
    struct hook_state *state;
    uint64_t last, bytes; /* the line at hand, 1 more than its number; bytes of the memory that were read or written */
    uint32_t shift, cycles, prefetch; /* bytes of a line as a power of two, and the wait for one */
};

/* Must agree with `HookState` in core.py. */
struct hook_state {
    uint64_t cycles, instructions, deadline, instruction_limit;
    uint32_t current, expected, taken_extra, after_system, interrupt, stop_reason;
    uint32_t used, mask;
    struct block *table;
    void (*decode)(uint32_t address, uint32_t size, struct block *out);
    int (*stop)(void *emulator);
    const uint8_t *predicated; /* per halfword: 0, or 1 + cycles more than when skipped */
    struct port *ports; /* of instructions, then as many of data: where reads wait */
    uint32_t predicated_base, memories;
};

enum { STOP_DEADLINE = 1, STOP_LIMIT = 2, STOP_INTERRUPT = 3 };
enum { FETCH = 0, LOAD = 1, STORE = 2 };

/* Whether a line is in a cache; from now on it is. */
static int holds(struct cache *cache, uint64_t number)
{
    struct line *const set = &cache->lines[number % cache->sets * cache->ways], *oldest = set;
    cache->time++;
    for (struct line *line = set; line < set + cache->ways; line++) {
        if (line->number == number && line->used != 0u) {
            line->used = cache->time;
            return 1;
        }
        oldest = line->used < oldest->used ? line : oldest;
    }
    oldest->number = number;
    oldest->used = cache->time;
    return 0;
}

/* Wait for bytes of a memory; `busy` are the cycles in which a core executes a line of instructions. */
static void wait_for(struct port *port, uint64_t address, uint32_t size, uint32_t busy)
{
    const uint64_t end = (address - port->base + size - 1u) >> port->shift;
    if (port->cycles == 0u) {
        port->bytes += size;
        return;
    }
    for (uint64_t number = (address - port->base) >> port->shift; number <= end; number++) {
        const uint32_t ahead = port->prefetch != 0u && number == port->last ? busy : 0u;
        if (number + 1u != port->last) {
            port->last = number + 1u;
            if (port->cache == NULL || !holds(port->cache, number)) {
                port->bytes += 1u << port->shift;
                port->state->cycles += port->cycles > ahead ? port->cycles - ahead : 0u;
            }
        }
    }
}

/* The core reads bytes by itself, as instructions or as data, or writes them: instructions take so many cycles. */
void dovetail_reads(struct hook_state *state, uint32_t kind, uint32_t address, uint32_t size, uint32_t cycles)
{
    for (uint32_t index = 0; index < state->memories; index++) {
        struct port *const port = &state->ports[(kind == FETCH ? 0u : state->memories) + index];
        if (address >= port->base && address - port->base < port->size) {
            if (kind == STORE) {
                port->bytes += size;
            } else {
                wait_for(port, address, size, (uint32_t)(((uint64_t)cycles << port->shift) / size));
            }
            return;
        }
    }
}

void dovetail_store_hook(void *emulator, int kind, uint64_t address, int size, int64_t value, void *user)
{
    struct port *const port = user;
    (void)emulator;
    (void)kind;
    (void)address;
    (void)value;
    port->bytes += (uint64_t)size;
}

void dovetail_load_hook(void *emulator, int kind, uint64_t address, int size, int64_t value, void *user)
{
    struct port *const port = user;
    (void)emulator;
    (void)kind;
    (void)value;
    if (port->state->stop_reason == 0u) {
        wait_for(port, address, (uint32_t)size, 0);
    }
}

static const struct block *find(struct hook_state *state, uint32_t address, uint32_t size)
{
    uint32_t slot = ((address >> 1) ^ (size << 7)) & state->mask;
    while (state->table[slot].size != 0u) {
        if (state->table[slot].address == address && state->table[slot].size == size) {
            return &state->table[slot];
        }
        slot = (slot + 1u) & state->mask;
    }
    if (state->used > state->mask / 4u * 3u) {
        memset(state->table, 0, ((size_t)state->mask + 1u) * sizeof(struct block));
        state->used = 0;
        return find(state, address, size);
    }
    state->decode(address, size, &state->table[slot]);
    state->used++;
    return &state->table[slot];
}

void dovetail_block_hook(void *emulator, uint64_t address, uint32_t size, void *user)
{
    struct hook_state *state = user;
    const struct block *entry;
    uint32_t reason = 0;
    const uint32_t entered = (uint32_t)address != state->expected;
    if (entered != 0u) {
        state->cycles += state->taken_extra;
    }
    state->taken_extra = 0;
    state->expected = (uint32_t)address + entered; /* where it is stopped before, it comes here again */
    if (state->cycles >= state->deadline) {
        reason = STOP_DEADLINE;
    } else if (state->interrupt != 0u && state->after_system != 0u) {
        reason = STOP_INTERRUPT;
    } else if (state->instructions >= state->instruction_limit) {
        reason = STOP_LIMIT;
    }
    state->after_system = 0;
    if (reason != 0u) {
        state->stop_reason = reason;
        (void)state->stop(emulator);
        return;
    }
    entry = find(state, (uint32_t)address, size);
    state->current = (uint32_t)address;
    state->cycles += entry->cycles + (entered != 0u ? entry->entered_extra : 0u);
    state->instructions += entry->instructions;
    state->expected = entry->end;
    state->taken_extra = entry->taken_extra;
    state->after_system = entry->system;
    if (state->memories != 0u && entry->end != (uint32_t)address) {
        dovetail_reads(state, FETCH, (uint32_t)address, entry->end - (uint32_t)address, entry->cycles);
    }
}

/* Called for executed instructions near those that may be skipped where they stand; counts these. */
void dovetail_executed_hook(void *emulator, uint64_t address, uint32_t size, void *user)
{
    struct hook_state *state = user;
    const uint32_t mark = state->predicated[((uint32_t)address - state->predicated_base) >> 1];
    (void)emulator;
    (void)size;
    if (mark != 0u && state->stop_reason == 0u) {
        state->instructions++;
        state->cycles += mark - 1u;
    }
}
