#include "rbe.h"

#include "dma.h"
#include "dovetail_rt.h"

/* Byte offsets of the registers, from RBE_BASE on. */
enum { START = 0x00, FINISHED = 0x04, JOB = 0x10 };

static uint32_t issued;
static uint32_t finished;

void rbe_init(void)
{
    finished = dovetail_mmio_read(RBE_BASE + FINISHED);
    issued = finished;
}

uint32_t rbe_start(const uint32_t *task)
{
    rbe_wait(issued); /* the engine holds one job */
    for (uint32_t word = 0; word < RBE_WORDS; word++) {
        dovetail_mmio_write(RBE_BASE + JOB + 4u * word, task[word]);
    }
    dovetail_compiler_barrier();
    dovetail_mmio_write(RBE_BASE + START, 1u);
    issued++;
    return issued;
}

void rbe_wait(uint32_t ticket)
{
    while ((finished - ticket) >= 0x80000000u) {
        uint32_t count = dovetail_mmio_read(RBE_BASE + FINISHED); /* also lowers the interrupt line */
        if (count == finished) {
            dma_acknowledge();
            dovetail_wait_for_interrupt();
        }
        finished = count;
    }
    dovetail_compiler_barrier();
}
