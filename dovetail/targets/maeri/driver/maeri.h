/* Driver of the MAERI engine.
 *
 * A task is a constant made by the compiler: the number of its words, then the words (dovetail/targets/maeri/task.py).
 * Tasks run in the order they were started; the engine holds one that runs and one that waits.
 *
 * Tasks that are held begin with the next one that is started, side by side: they have one ticket, and end together.
 *
 * Not reentrant: to be called from one thread of control, and not from interrupt handlers.
 */
#ifndef DOVETAIL_MAERI_H
#define DOVETAIL_MAERI_H

#include <stdint.h>

#ifndef MAERI_BASE
#define MAERI_BASE 0x43D00000u /* address of the registers */
#endif

/* Waits until the engine is idle and invalidates all tickets. Once, before the first start. */
void maeri_init(void);

/* Starts a task and returns its ticket. Waits while a task runs and another waits. The task and the constants must stay
 * as they are until it has finished. */
uint32_t maeri_start(const uint32_t *task, const uint8_t *constants);

/* Holds a task until the next one is started; returns the ticket they will have. The task and the constants must stay as
 * they are until it has finished. */
uint32_t maeri_hold(const uint32_t *task, const uint8_t *constants);

/* Returns when the task of the ticket, and so every task started before it, has finished and its results are in memory.
 * Waiting again for a finished ticket returns at once. */
void maeri_wait(uint32_t ticket);

#endif
