#include "vta_board.h"

#ifndef VTA_BOARD_HOOKS
uint32_t vta_board_read(uint32_t address) { return *(volatile uint32_t *)(uintptr_t)address; }
void vta_board_write(uint32_t address, uint32_t value) { *(volatile uint32_t *)(uintptr_t)address = value; }
uint32_t vta_board_address(const void *pointer) { return (uint32_t)(uintptr_t)pointer; }

void vta_board_flush(const void *pointer, uint32_t bytes)
{
    (void)pointer;
    (void)bytes;
}

void vta_board_invalidate(const void *pointer, uint32_t bytes)
{
    (void)pointer;
    (void)bytes;
}

void vta_board_settle(void)
{
    for (volatile uint32_t turn = 0; turn < 1000u; turn++) {
    }
}
#endif

/* Bytes of an element. */
enum {
    UOP_BYTES = 4,
    WGT_BYTES = (int)(VTA_BLOCK * VTA_BLOCK),
    INP_BYTES = (int)(VTA_BATCH * VTA_BLOCK),
    ACC_BYTES = (int)(VTA_BATCH * VTA_BLOCK * 4u)
};

uint32_t vta_alignment(void)
{
    return (WGT_BYTES > ACC_BYTES) ? (uint32_t)WGT_BYTES : (uint32_t)ACC_BYTES;
}

static int misaligned(const vta_launch *launch)
{
    const uint32_t elements = (launch->uop % 16u) | (launch->inp % INP_BYTES) | (launch->wgt % WGT_BYTES) |
                              (launch->acc % ACC_BYTES) | (launch->out % INP_BYTES);
    return (elements | (vta_board_address(launch->instructions) % 16u)) != 0u;
}

#if VTA_MAP == VTA_MAP_HLS

/* The modules, and their registers (config/pkg_config.py): arguments are 8 bytes apart from 0x10 on. */
enum { FETCH = 0x0000, LOAD = 0x1000, COMPUTE = 0x2000, STORE = 0x3000 };
enum { CONTROL = 0x00, FIRST = 0x10, SECOND = 0x18, THIRD = 0x20, FOURTH = 0x28 };

#define START 0x01u
#define AUTORESTART 0x81u

static void put(uint32_t module, uint32_t offset, uint32_t value)
{
    vta_board_write(VTA_REGISTERS + module + offset, value);
}

vta_status vta_board_run(const vta_launch *launch, uint32_t polls)
{
    if (misaligned(launch)) {
        return VTA_MISALIGNED;
    }
    vta_board_flush(launch->instructions, 16u * launch->count);
    put(FETCH, FIRST, launch->count);
    put(FETCH, SECOND, vta_board_address(launch->instructions));
    put(LOAD, FIRST, launch->inp);
    put(LOAD, SECOND, launch->wgt);
    put(COMPUTE, THIRD, launch->uop);
    put(COMPUTE, FOURTH, launch->acc);
    put(STORE, FIRST, launch->out);
    put(FETCH, CONTROL, START);
    put(LOAD, CONTROL, AUTORESTART);
    put(COMPUTE, CONTROL, AUTORESTART);
    put(STORE, CONTROL, AUTORESTART);
    vta_board_settle();
    for (; polls != 0u; polls--) {
        if (vta_board_read(VTA_REGISTERS + COMPUTE + SECOND) == 1u) { /* done, as FINISH sets it */
            return VTA_DONE;
        }
    }
    return VTA_TIMEOUT;
}

#else

enum { CONTROL = 0x00, COUNT = 0x08, INSTRUCTIONS = 0x0C, UOP = 0x10, INP = 0x14, WGT = 0x18, ACC = 0x1C, OUT = 0x20 };

#define LAUNCH 1u
#define FINISHED 2u

/* The design joins a pointer and an offset by OR, not by a sum: the pointers are 0, and instructions have the addresses. */
static uint32_t relocated[4u * VTA_MOST_INSTRUCTIONS] __attribute__((aligned(16)));

static void relocate(const vta_launch *launch)
{
    /* by memory type: UOP, WGT, INP, ACC, OUT */
    const uint32_t first[5] = {launch->uop / UOP_BYTES, launch->wgt / WGT_BYTES, launch->inp / INP_BYTES,
                               launch->acc / ACC_BYTES, launch->out / INP_BYTES};
    for (uint32_t at = 0; at < 4u * launch->count; at += 4u) {
        uint64_t low = launch->instructions[at] | (uint64_t)launch->instructions[at + 1u] << 32;
        const uint32_t memory = (uint32_t)(low >> 7) & 7u;
        if ((low & 7u) <= 1u && memory < 5u) { /* LOAD or STORE: its dram_base is bits 26 to 57 */
            const uint32_t moved = (uint32_t)(low >> 26) + first[memory];
            low = (low & ~((uint64_t)0xFFFFFFFFu << 26)) | (uint64_t)moved << 26;
        }
        relocated[at] = (uint32_t)low;
        relocated[at + 1u] = (uint32_t)(low >> 32);
        relocated[at + 2u] = launch->instructions[at + 2u];
        relocated[at + 3u] = launch->instructions[at + 3u];
    }
    vta_board_flush(relocated, 16u * launch->count);
}

vta_status vta_board_run(const vta_launch *launch, uint32_t polls)
{
    if (launch->count > VTA_MOST_INSTRUCTIONS) {
        return VTA_TOO_LONG;
    }
    if (misaligned(launch)) {
        return VTA_MISALIGNED;
    }
    relocate(launch);
    for (uint32_t pointer = UOP; pointer <= OUT; pointer += 4u) {
        vta_board_write(VTA_REGISTERS + pointer, 0u);
    }
    vta_board_write(VTA_REGISTERS + COUNT, launch->count);
    vta_board_write(VTA_REGISTERS + INSTRUCTIONS, vta_board_address(relocated));
    vta_board_write(VTA_REGISTERS + CONTROL, LAUNCH);
    for (; polls != 0u; polls--) {
        if ((vta_board_read(VTA_REGISTERS + CONTROL) & FINISHED) != 0u) {
            return VTA_DONE;
        }
    }
    return VTA_TIMEOUT;
}

#endif
