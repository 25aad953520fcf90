/* Driver of the NE16 engine.
 *
 * A task is a constant made by the compiler (dovetail/targets/ne16/job.py, task_words): 24 register values,
 * then the grid of launches of a stride-2 layer. Launches run in the order they were started, at most two
 * of them in the engine's queue.
 *
 * Not reentrant: to be called from one thread of control, and not from interrupt handlers.
 */
#ifndef DOVETAIL_NE16_H
#define DOVETAIL_NE16_H

#include <stdint.h>

#ifndef NE16_BASE
#define NE16_BASE 0x00201000u
#endif

/* Drops everything the engine holds and invalidates all tickets. Once, before the first start. */
void ne16_init(void);

/* Starts a task and returns its ticket. Waits while the queue is full: a plain task only until one launch of
 * those before it is done, a grid of n launches until all but two of its own are handed over. */
uint32_t ne16_start(const uint32_t *task);

/* Returns when the task of the ticket, and so every task started before it, has finished and its outputs are
 * in memory. Later tasks go on. Waiting again for a finished ticket returns at once. */
void ne16_wait(uint32_t ticket);

/* Nonzero when the task of the ticket has finished; does not wait. */
uint32_t ne16_finished(uint32_t ticket);

#endif
