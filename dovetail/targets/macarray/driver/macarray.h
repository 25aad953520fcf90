/* Driver of the MAC array. A task is a constant made by the compiler: the words of a job (rtl/macarray.v).
 * Not reentrant: to be called from one thread of control, and not from interrupt handlers. */
#ifndef DOVETAIL_MACARRAY_H
#define DOVETAIL_MACARRAY_H

#include <stdint.h>

#ifndef MACARRAY_BASE
#define MACARRAY_BASE 0x00201000u /* address of the registers */
#endif

/* Once, before the first start, while no job runs. */
void macarray_init(void);

/* Waits until the job before has finished, then starts a task; its ticket. */
uint32_t macarray_start(const uint32_t *task);

/* Returns when the task of the ticket has finished and its results are in memory. */
void macarray_wait(uint32_t ticket);

#endif
