/* Driver of the tests' made-up engine. */
#ifndef BLOCKS_H
#define BLOCKS_H

#include <stdint.h>

uint32_t blocks_start(const uint32_t *task, const uint8_t *constants);
void blocks_wait(uint32_t ticket);

#endif
