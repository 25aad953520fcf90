/* Brings up a VTA on a board: one launch at a time, over the registers of the public designs (apache/tvm-vta).
 *
 * VTA_MAP says which: VTA_MAP_HLS, the four modules of hardware/xilinx (boards pynq, ultra96, zcu104), or VTA_MAP_VCR, the
 * control registers of hardware/chisel (board de10nano). Memory the engine reads or writes must be contiguous on the bus.
 *
 * The functions below the line are the board's; vta_board.c has ones for bare metal without caches, where a bus address is
 * a pointer, unless VTA_BOARD_HOOKS is defined. Not reentrant.
 */
#ifndef DOVETAIL_VTA_BOARD_H
#define DOVETAIL_VTA_BOARD_H

#include <stdint.h>

#define VTA_MAP_HLS 1
#define VTA_MAP_VCR 2

#ifndef VTA_MAP
#define VTA_MAP VTA_MAP_HLS
#endif

#ifndef VTA_BLOCK
#define VTA_BLOCK 16u /* channels of an element */
#endif

#ifndef VTA_BATCH
#define VTA_BATCH 1u /* images of an element */
#endif

/* Where the registers lie: of pynq and de10nano; ultra96 has the modules at 0xA0000000 (config/pkg_config.py). Mapped
 * memory of another address: define it. The HLS modules fetch, load, compute and store are 0x1000 apart. */
#ifndef VTA_REGISTERS
#if VTA_MAP == VTA_MAP_HLS
#define VTA_REGISTERS 0x43C00000u
#else
#define VTA_REGISTERS 0xFF220000u
#endif
#endif

/* Most instructions of a launch the VCR driver can relocate: its copy takes 16 bytes of each. */
#ifndef VTA_MOST_INSTRUCTIONS
#define VTA_MOST_INSTRUCTIONS 4096u
#endif

/* A launch, as an entry of `commands` in the index.json of `dovetail compile --dump`; addresses are those on the bus. */
typedef struct {
    const uint32_t *instructions; /* 4 words each, aligned to 16 bytes */
    uint32_t count;
    uint32_t uop, inp, wgt, acc, out; /* elements of each memory are counted from here */
} vta_launch;

typedef enum {
    VTA_DONE = 0,
    VTA_TIMEOUT = 1,  /* FINISH was not seen in so many polls */
    VTA_MISALIGNED = 2, /* an address is no multiple of what the bus or an element needs; see vta_alignment */
    VTA_TOO_LONG = 3  /* more than VTA_MOST_INSTRUCTIONS */
} vta_status;

/* Bytes that constants, activations and instructions must be aligned to: the largest element. */
uint32_t vta_alignment(void);

/* Runs a launch to its end. Before, what the engine reads must be flushed (vta_board_flush); after, what it has written
 * must be invalidated. The instructions are flushed here. */
vta_status vta_board_run(const vta_launch *launch, uint32_t polls);

/* ---- the board's */

uint32_t vta_board_read(uint32_t address);
void vta_board_write(uint32_t address, uint32_t value);
/* The address on the bus of what lies behind a pointer. */
uint32_t vta_board_address(const void *pointer);
/* Writes cached data back, so that the engine reads it; forgets cached data, so that the processor reads what is there. */
void vta_board_flush(const void *pointer, uint32_t bytes);
void vta_board_invalidate(const void *pointer, uint32_t bytes);
/* Waits some microseconds: after a start, a done of the launch before may still stand in the HLS design's register. */
void vta_board_settle(void);

#endif
