/* Driver of the VTA engine.
 *
 * A task is a constant made by the compiler: the number of instructions, the number of micro-operations, then the
 * instructions (4 words each), then the micro-operations (1 word each). Tasks run in the order they were started; the
 * engine holds one that runs and one that waits.
 *
 * The instructions count INP, OUT and 8-bit ACC elements from VTA_MEMORY, WGT and ACC elements from the constants given
 * with the task, and micro-operations from the task's own.
 *
 * Not reentrant: to be called from one thread of control, and not from interrupt handlers.
 */
#ifndef DOVETAIL_VTA_H
#define DOVETAIL_VTA_H

#include <stdint.h>

#ifndef VTA_BASE
#define VTA_BASE 0x43C00000u /* address of the registers */
#endif

#ifndef VTA_MEMORY
#define VTA_MEMORY 0x80000000u /* address of the driver's page; INP and OUT elements are counted from here */
#endif

#ifndef VTA_BLOCK
#define VTA_BLOCK 16u /* channels of an element */
#endif

#ifndef VTA_BATCH
#define VTA_BATCH 1u /* images of an element */
#endif

/* Waits until the engine is idle, sets the pointers that never change, and invalidates all tickets. Once, before the
 * first start. */
void vta_init(void);

/* Starts a task and returns its ticket. Waits while a task runs and another waits. The task and the constants must stay
 * as they are until it has finished. */
uint32_t vta_start(const uint32_t *task, const uint8_t *constants);

/* Returns when the task of the ticket, and so every task started before it, has finished and its outputs are in memory.
 * Later tasks go on. Waiting again for a finished ticket returns at once. */
void vta_wait(uint32_t ticket);

#endif
