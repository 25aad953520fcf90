/* Driver of rbe. A task is a constant made by the compiler: the words of a job. To be called from one thread. */
#ifndef DOVETAIL_RBE_H
#define DOVETAIL_RBE_H

#include <stdint.h>

void rbe_init(void);                      /* once before an inference */
uint32_t rbe_start(const uint32_t *task); /* starts a task; its ticket */
void rbe_wait(uint32_t ticket);           /* returns when that task's results are in memory */

#endif
