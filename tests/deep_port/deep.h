#ifndef DEEP_H
#define DEEP_H

#include <stdint.h>

void deep_init(void);                      /* once before an inference */
uint32_t deep_start(const uint32_t *task); /* starts a task; its ticket */
void deep_wait(uint32_t ticket);           /* returns when that task's results are in memory */

#endif
