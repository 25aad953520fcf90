#ifndef GEMMINI_H
#define GEMMINI_H

#include <stdint.h>

uint32_t gemmini_start(const uint32_t *words, uint32_t count); /* issues the instructions of a list; its ticket */
void gemmini_wait(uint32_t ticket);                            /* returns when all of them have had their effects */

#endif
