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

@registers@

@addresses@

@collect@

#ifdef DOVETAIL_HOST
static void write_page(void) {} /* there is no such memory */
#else
/* The vector biases are products with: 127 in every lane but the last, which is 1; then an element of zeros. */
static void write_page(void)
{
    int8_t *lane = (int8_t *)(uintptr_t)VTA_MEMORY;
    for (uint32_t index = 0; index < VTA_BATCH * VTA_BLOCK; index++) {
        lane[index] = (index % VTA_BLOCK == VTA_BLOCK - 1u) ? 1 : 127;
        lane[VTA_BATCH * VTA_BLOCK + index] = 0;
    }
}
#endif

void vta_init(void)
{
    write_page();
@idle@
    write_register(INP_POINTER, VTA_MEMORY);
    write_register(OUT_POINTER, VTA_MEMORY);
}

uint32_t vta_start(const uint32_t *task, const uint8_t *constants)
{
    const uint32_t count = task[COUNT];
@room@
    write_register(INSN_COUNT, count);
    write_register(INSN_ADDR, address_of(task + INSTRUCTIONS));
    write_register(UOP_POINTER, address_of(task + INSTRUCTIONS + 4u * count));
    write_register(WGT_POINTER, address_of(constants));
    write_register(ACC_POINTER, address_of(constants));
@launch@
}

void vta_wait(uint32_t ticket)
{
@wait@
}
