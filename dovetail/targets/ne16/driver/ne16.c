#include "ne16.h"

#include "dma.h"
#include "dovetail_rt.h"

/* Word numbers of the engine's registers, and of the chip's latch of its event. */
enum { TRIGGER = 0, ACQUIRE = 1, STATUS = 3, SOFT_CLEAR = 5, TASK = 8, EVENT = 63 };
enum { PLACES = 2, CLEARING = 4 };
/* Word numbers of a task: three task registers, then what describes a grid. */
enum {
    INFEAT = 1, OUTFEAT = 2, PADDING = 20,
    GRID = 24, COLUMN_IN = 25, COLUMN_OUT = 26, ROW_IN = 27, ROW_OUT = 28, ODD = 29
};

#define PAD_TOP 0xF0000000u
#define PAD_RIGHT 0x0F000000u
#define PAD_BOTTOM 0x00F00000u
#define PAD_LEFT 0x000F0000u

@registers@

@ends@

/* Launches handed over that have not ended: a byte of STATUS for each of the two contexts. */
static inline uint32_t in_flight(void)
{
    const uint32_t status = read_register(STATUS);
    return (status & 1u) + ((status >> 8) & 1u);
}

/* Forgets the ends so far; from now on one raises the interrupt line. With an event unit: clear the engine's event. */
static inline void listen(void) { write_register(EVENT, 1u); }
/* Keeps the line low, so that the core can sleep for something else. */
static inline void ignore(void) { write_register(EVENT, 0u); }

@await@

static inline void acquire(void)
{
    while ((read_register(ACQUIRE) & 0x80000000u) != 0u) {
        await(issued - (PLACES - 1u));
    }
}

static inline void trigger(void)
{
    dovetail_compiler_barrier();
    write_register(TRIGGER, 0u);
    issued++;
}

#define WRITE4(i)                                    \
    write_register(TASK + (i), task[(i)]);           \
    write_register(TASK + (i) + 1u, task[(i) + 1u]); \
    write_register(TASK + (i) + 2u, task[(i) + 2u]); \
    write_register(TASK + (i) + 3u, task[(i) + 3u])

static inline void write_all(const uint32_t *task)
{
    WRITE4(0u);
    WRITE4(4u);
    WRITE4(8u);
    WRITE4(12u);
    WRITE4(16u);
    WRITE4(20u);
}

/* One row of launches. The two contexts keep their registers: `primed` counts those that hold the task. */
static void start_row(const uint32_t *task, uint32_t infeat, uint32_t outfeat, uint32_t padding, uint32_t *primed)
{
    uint32_t columns = task[GRID] & 0xFFFFu;
    uint32_t halve = task[ODD] & 1u;
    uint32_t keep = ~PAD_RIGHT;
    for (uint32_t column = 0u; column < columns; column++) {
        if (column + 1u == columns) {
            keep |= PAD_RIGHT;
        }
        acquire();
        if (*primed < 2u) {
            write_all(task);
            (*primed)++;
        }
        write_register(TASK + INFEAT, infeat);
        write_register(TASK + OUTFEAT, outfeat);
        write_register(TASK + PADDING, padding & keep);
        trigger();
        infeat += task[COLUMN_IN] >> halve;
        outfeat += task[COLUMN_OUT] >> halve;
        halve = 0u;
        keep &= ~PAD_LEFT;
    }
}

/* Kept out of line: it needs many registers, which a plain start would have to save. */
static __attribute__((noinline)) uint32_t start_grid(const uint32_t *task)
{
    uint32_t rows = task[GRID] >> 16;
    uint32_t halve = task[ODD] >> 1;
    uint32_t keep = ~PAD_BOTTOM;
    uint32_t infeat = task[INFEAT];
    uint32_t outfeat = task[OUTFEAT];
    uint32_t primed = 0u;
    for (uint32_t row = 0u; row < rows; row++) {
        if (row + 1u == rows) {
            keep |= PAD_BOTTOM;
        }
        start_row(task, infeat, outfeat, task[PADDING] & keep, &primed);
        infeat += task[ROW_IN] >> halve;
        outfeat += task[ROW_OUT] >> halve;
        halve = 0u;
        keep &= ~PAD_TOP;
    }
    return issued;
}

void ne16_init(void)
{
    write_register(SOFT_CLEAR, 0u);
    for (volatile uint32_t passed = 0u; passed < CLEARING; passed++) {
        /* clearing takes a few cycles, in which the engine must not be touched */
    }
    ignore();
    issued = 0u;
    ended = 0u;
}

uint32_t ne16_start(const uint32_t *task)
{
    if (task[GRID] != 0u) {
        return start_grid(task);
    }
    acquire();
    write_all(task);
    trigger();
    return issued;
}

uint32_t ne16_finished(uint32_t ticket)
{
    return has_ended(ticket);
}

void ne16_wait(uint32_t ticket)
{
@awaited@
}
