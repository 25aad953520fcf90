#include "vta.h"

#include "dovetail_rt.h"

/* Byte offsets of the engine's registers (dovetail/targets/vta/device.py). */
enum {
    CONTROL = 0x00, INSN_COUNT = 0x08, INSN_ADDR = 0x0C, UOP_POINTER = 0x10, INP_POINTER = 0x14, WGT_POINTER = 0x18,
    ACC_POINTER = 0x1C, OUT_POINTER = 0x20, FINISHED = 0x24, ROOM = 0x28
};
/* Word numbers of a task. */
enum { COUNT = 0, INSTRUCTIONS = 2 };

#define LAUNCH 1u
#define IDLE 2u

static inline uint32_t read_register(uint32_t offset) { return dovetail_mmio_read(VTA_BASE + offset); }
static inline void write_register(uint32_t offset, uint32_t value) { dovetail_mmio_write(VTA_BASE + offset, value); }

static inline uint32_t address_of(const void *pointer) { return (uint32_t)(uintptr_t)pointer; }

/* Tasks handed to the engine, and those known to be finished; both as the engine counts them, and wrap around. */
static uint32_t issued;
static uint32_t finished;

/* Looks how many have finished, which lowers the interrupt line; sleeps when there is no news. */
static void collect(void)
{
    uint32_t count = read_register(FINISHED);
    if (count == finished) {
        dovetail_wait_for_interrupt();
    }
    finished = count;
}

#ifdef DOVETAIL_HOST
static void write_ones(void) {} /* there is no such memory */
#else
/* The vector biases are products with: 127 in every lane but the last, which is 1 (dovetail/loops/digits.py). */
static void write_ones(void)
{
    int8_t *lane = (int8_t *)(uintptr_t)VTA_MEMORY;
    for (uint32_t index = 0; index < VTA_BATCH * VTA_BLOCK; index++) {
        lane[index] = (index % VTA_BLOCK == VTA_BLOCK - 1u) ? 1 : 127;
    }
}
#endif

void vta_init(void)
{
    write_ones();
    finished = read_register(FINISHED);
    while ((read_register(CONTROL) & IDLE) == 0u) {
        collect();
    }
    finished = read_register(FINISHED);
    issued = finished;
    write_register(INP_POINTER, VTA_MEMORY);
    write_register(OUT_POINTER, VTA_MEMORY);
}

uint32_t vta_start(const uint32_t *task, const uint8_t *constants)
{
    const uint32_t count = task[COUNT];
    while (read_register(ROOM) == 0u) {
        collect();
    }
    write_register(INSN_COUNT, count);
    write_register(INSN_ADDR, address_of(task + INSTRUCTIONS));
    write_register(UOP_POINTER, address_of(task + INSTRUCTIONS + 4u * count));
    write_register(WGT_POINTER, address_of(constants));
    write_register(ACC_POINTER, address_of(constants));
    __asm__ volatile("" ::: "memory");
    write_register(CONTROL, LAUNCH);
    issued++;
    return issued;
}

void vta_wait(uint32_t ticket)
{
    while ((finished - ticket) >= 0x80000000u) {
        collect();
    }
    __asm__ volatile("" ::: "memory");
}
