#include "blocks.h"

/* There is no such engine: linked, never run. */
uint32_t blocks_start(const uint32_t *task, const uint8_t *constants)
{
    return task[0] + constants[0];
}

void blocks_wait(uint32_t ticket)
{
    (void)ticket;
}
