#include "deep.h"

#include "dma.h"
#include "dovetail_rt.h"

enum { START = 0x00, FINISHED = 0x04, JOB = 0x10, WORDS = 14 };

static uint32_t issued;
static uint32_t finished;

void deep_init(void)
{
    finished = dovetail_mmio_read(DEEP_BASE + FINISHED);
    issued = finished;
}

uint32_t deep_start(const uint32_t *task)
{
    deep_wait(issued);
    for (uint32_t word = 0; word < WORDS; word++) {
        dovetail_mmio_write(DEEP_BASE + JOB + 4u * word, task[word]);
    }
    dovetail_compiler_barrier();
    dovetail_mmio_write(DEEP_BASE + START, 1u);
    issued++;
    return issued;
}

void deep_wait(uint32_t ticket)
{
    while ((finished - ticket) >= 0x80000000u) {
        uint32_t count = dovetail_mmio_read(DEEP_BASE + FINISHED);
        if (count == finished) {
            dma_acknowledge();
            dovetail_wait_for_interrupt();
        }
        finished = count;
    }
    dovetail_compiler_barrier();
}
