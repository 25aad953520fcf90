#include "kestrel.h"

#include "dovetail_rt.h"

enum { START = 0x00, FINISHED = 0x04, LIST = 0x10, WORDS = 0x14 };

static uint32_t issued;
static uint32_t finished;

void kestrel_init(void)
{
    finished = dovetail_mmio_read(KESTREL_BASE + FINISHED);
    issued = finished;
}

uint32_t kestrel_start(const uint32_t *words, uint32_t count)
{
    kestrel_wait(issued); /* it holds one list */
    dovetail_mmio_write(KESTREL_BASE + LIST, (uint32_t)(uintptr_t)words);
    dovetail_mmio_write(KESTREL_BASE + WORDS, count);
    dovetail_compiler_barrier();
    dovetail_mmio_write(KESTREL_BASE + START, 1u);
    issued++;
    return issued;
}

void kestrel_wait(uint32_t ticket)
{
    while ((finished - ticket) >= 0x80000000u) {
        uint32_t count = dovetail_mmio_read(KESTREL_BASE + FINISHED);
        if (count == finished) {
            dovetail_wait_for_interrupt();
        }
        finished = count;
    }
    dovetail_compiler_barrier();
}
