/* The functions of board.h for the simulated UART of board_rig.py. */
#include "board.h"

#define UART ((volatile uint32_t *)0x1A300000u)
enum { WAITING, DATA, CYCLES };

uint32_t board_read(uint8_t *bytes, uint32_t most)
{
    const uint32_t waiting = UART[WAITING];
    const uint32_t count = waiting < most ? waiting : most;
    for (uint32_t i = 0; i < count; i++) {
        bytes[i] = (uint8_t)UART[DATA];
    }
    return count;
}

void board_write(const uint8_t *bytes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        UART[DATA] = bytes[i];
    }
}

uint32_t board_cycles(void)
{
    return UART[CYCLES];
}
