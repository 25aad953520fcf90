#include "maeri.h"

#include "dovetail_rt.h"

/* Byte offsets of the engine's registers (dovetail/targets/maeri/device.py). */
enum { CONTROL = 0x00, TASK = 0x04, WORDS = 0x08, CONSTANTS = 0x0C, FINISHED = 0x10, ROOM = 0x14 };

#define LAUNCH 1u
#define PLACES 2u

static inline uint32_t read_register(uint32_t offset) { return dovetail_mmio_read(MAERI_BASE + offset); }
static inline void write_register(uint32_t offset, uint32_t value) { dovetail_mmio_write(MAERI_BASE + offset, value); }

static inline uint32_t address_of(const void *pointer) { return (uint32_t)(uintptr_t)pointer; }

/* Tasks handed to the engine, and those known to be finished; both as the engine counts them, and wrap around. */
static uint32_t issued;
static uint32_t finished;

/* Looks how many have finished, which lowers the interrupt line; sleeps when there is no news. The interrupt stays
 * masked, so no handler runs, and wfi returns at once when the line is high already. */
static void collect(void)
{
    uint32_t count = read_register(FINISHED);
    if (count == finished) {
        dovetail_wait_for_interrupt();
    }
    finished = count;
}

void maeri_init(void)
{
    finished = read_register(FINISHED);
    while (read_register(ROOM) != PLACES) {
        collect();
    }
    finished = read_register(FINISHED);
    issued = finished;
}

uint32_t maeri_start(const uint32_t *task, const uint8_t *constants)
{
    while (read_register(ROOM) == 0u) {
        collect();
    }
    write_register(TASK, address_of(task + 1));
    write_register(WORDS, task[0]);
    write_register(CONSTANTS, address_of(constants));
    __asm__ volatile("" ::: "memory");
    write_register(CONTROL, LAUNCH);
    issued++;
    return issued;
}

void maeri_wait(uint32_t ticket)
{
    while ((finished - ticket) >= 0x80000000u) {
        collect();
    }
    __asm__ volatile("" ::: "memory");
}
