#include "maeri.h"

#include "dovetail_rt.h"

/* Byte offsets of the engine's registers (dovetail/targets/maeri/device.py). */
enum { CONTROL = 0x00, TASK = 0x04, WORDS = 0x08, CONSTANTS = 0x0C, FINISHED = 0x10, ROOM = 0x14, HOLD = 0x18 };

#define LAUNCH 1u
#define PLACES 2u

@registers@

@addresses@

@collect@

void maeri_init(void)
{
@idle@
}

static void describe(const uint32_t *task, const uint8_t *constants)
{
    write_register(TASK, address_of(task + 1));
    write_register(WORDS, task[0]);
    write_register(CONSTANTS, address_of(constants));
}

uint32_t maeri_hold(const uint32_t *task, const uint8_t *constants)
{
    describe(task, constants);
    write_register(HOLD, 1u);
    return issued + 1u;
}

uint32_t maeri_start(const uint32_t *task, const uint8_t *constants)
{
@room@
    describe(task, constants);
@launch@
}

void maeri_wait(uint32_t ticket)
{
@wait@
}
