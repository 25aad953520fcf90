#include "macarray.h"

#include "dma.h"
#include "dovetail_rt.h"

/* Byte offsets of the registers; the words of a job. */
enum { START = 0x00, FINISHED = 0x04, JOB = 0x10, WORDS = 16 };

static uint32_t issued;
static uint32_t finished;

/* Looks how many jobs have finished, which lowers the interrupt line; sleeps when there is no news. The interrupt stays
 * masked, so no handler runs, and the core wakes at once when the line is high already. */
static void collect(void)
{
    uint32_t count = dovetail_mmio_read(MACARRAY_BASE + FINISHED);
    if (count == finished) {
        dma_acknowledge();
        dovetail_wait_for_interrupt();
    }
    finished = count;
}

void macarray_init(void)
{
    finished = dovetail_mmio_read(MACARRAY_BASE + FINISHED);
    issued = finished;
}

uint32_t macarray_start(const uint32_t *task)
{
    uint32_t job[WORDS];
    const uint32_t before = issued++;
    while ((finished = dovetail_mmio_read(MACARRAY_BASE + FINISHED)) != before) {
        dma_acknowledge();
        dovetail_wait_for_interrupt();
    }
    /* From here on the engine idles. Words that are read before one is written need not be waited for one by one. */
    for (uint32_t word = 0; word < WORDS; word++) {
        job[word] = task[word];
    }
    dovetail_compiler_barrier();
    for (uint32_t word = 0; word < WORDS; word++) {
        dovetail_mmio_write(MACARRAY_BASE + JOB + 4u * word, job[word]);
    }
    dovetail_mmio_write(MACARRAY_BASE + START, 1u);
    return before + 1u;
}

void macarray_wait(uint32_t ticket)
{
    while ((finished - ticket) >= 0x80000000u) {
        collect();
    }
    dovetail_compiler_barrier();
}
