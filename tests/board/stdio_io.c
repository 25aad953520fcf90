/* The functions of board.h for a program of this computer that speaks over its standard input and output. */
#include "board.h"

#include <stdlib.h>
#include <unistd.h>

uint32_t board_read(uint8_t *bytes, uint32_t most)
{
    const ssize_t count = read(0, bytes, most);
    if (count <= 0) {
        exit(0);
    }
    return (uint32_t)count;
}

void board_write(const uint8_t *bytes, uint32_t count)
{
    while (count != 0u) {
        const ssize_t done = write(1, bytes, count);
        if (done <= 0) {
            exit(1);
        }
        bytes += done;
        count -= (uint32_t)done;
    }
}

uint32_t board_cycles(void)
{
    static uint32_t now = 0xFFFFFF00u; /* it wraps at once */
    return now += 100u;
}
