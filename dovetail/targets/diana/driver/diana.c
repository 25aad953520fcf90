#include "diana.h"

#include "dma.h"
#include "dovetail_rt.h"

/* Byte offsets of the registers (dovetail/targets/diana/registers.py): of both engines, then of each. */
enum { TRIGGER = 0x00, ACQUIRE = 0x04, STATUS = 0x0C, SOFT_CLEAR = 0x14, EVENT = 0xFC, WT_CONV_ADDR = 0x40 };
enum {
    WT_CONV_N = 0x44, WT_FC_ADDR = 0x48, WT_FC_N = 0x4C, ACT_ADDR = 0x58, ACT_N = 0x5C, CONF_ADDR = 0x60,
    CONF_N = 0x64, ACT_A_ADDR = 0x74, OUT_DATA = 0x7C, OUT_DATA_N = 0x80, NB_TILE = 0x84
};
enum {
    ANA_WT_SIMD_ADDR = 0x44, ANA_ACT_ADDR = 0x50, ANA_ACT_N = 0x54, ANA_CONF_ADDR = 0x58, ANA_CONF_N = 0x5C,
    ANA_OUT_DATA = 0x60, ANA_OUT_DATA_N = 0x64, ANA_NB_TILE = 0x68
};
/* Word numbers of a task, and the operation that has weights of its own. */
enum { WEIGHTS = 0, WEIGHT_BYTES = 1, MORE = 2, OPERAND = 3, OPERAND_BYTES = 4, RESULT = 5, RESULT_BYTES = 6, LAYER = 7 };
enum { LAYER_WORDS = 22, DENSE = 2, CLEARING = 4 };

@addresses@

/* Tasks an engine was given, and those known to have ended; both wrap around. */
struct engine {
    uint32_t base;
    uint32_t issued;
    uint32_t ended;
};

static struct engine digital = { DIANA_DIGITAL_BASE, 0u, 0u };
static struct engine analog = { DIANA_ANALOG_BASE, 0u, 0u };

/* Tasks given that have not ended: an engine holds one. */
static inline uint32_t in_flight(const struct engine *engine) { return dovetail_mmio_read(engine->base + STATUS) & 1u; }
/* Forgets the ends so far; from now on one raises the interrupt line. With an event unit: clear the engine's event. */
static inline void listen(const struct engine *engine) { dovetail_mmio_write(engine->base + EVENT, 1u); }
/* Keeps the line low, so that the core can sleep for something else. */
static inline void ignore(const struct engine *engine) { dovetail_mmio_write(engine->base + EVENT, 0u); }

@await@

static void init(struct engine *engine)
{
    dovetail_mmio_write(engine->base + SOFT_CLEAR, 0u);
    for (volatile uint32_t passed = 0u; passed < CLEARING; passed++) {
        /* clearing takes a few cycles, in which the engine must not be touched */
    }
    ignore(engine);
    engine->issued = 0u;
    engine->ended = 0u;
}

static void acquire(struct engine *engine)
{
    while ((dovetail_mmio_read(engine->base + ACQUIRE) & 0x80000000u) != 0u) {
        await(engine, engine->issued);
    }
}

static uint32_t trigger(struct engine *engine)
{
    dovetail_compiler_barrier();
    dovetail_mmio_write(engine->base + TRIGGER, 0u);
@handed_over@
}

static void wait(struct engine *engine, uint32_t ticket)
{
@awaited@
}

void diana_digital_init(void) { init(&digital); }
void diana_analog_init(void) { init(&analog); }
void diana_digital_wait(uint32_t ticket) { wait(&digital, ticket); }
void diana_analog_wait(uint32_t ticket) { wait(&analog, ticket); }

uint32_t diana_digital_start(const uint32_t *task)
{
    const uint32_t base = DIANA_DIGITAL_BASE;
    const uint32_t dense = (task[LAYER] == DENSE) ? 1u : 0u;
    acquire(&digital);
    dovetail_mmio_write(base + ((dense != 0u) ? WT_FC_ADDR : WT_CONV_ADDR), task[WEIGHTS]);
    dovetail_mmio_write(base + ((dense != 0u) ? WT_FC_N : WT_CONV_N), task[WEIGHT_BYTES]);
    dovetail_mmio_write(base + ACT_ADDR, task[OPERAND]);
    dovetail_mmio_write(base + ACT_N, task[OPERAND_BYTES]);
    dovetail_mmio_write(base + ACT_A_ADDR, task[MORE]);
    dovetail_mmio_write(base + OUT_DATA, task[RESULT]);
    dovetail_mmio_write(base + OUT_DATA_N, task[RESULT_BYTES]);
    dovetail_mmio_write(base + CONF_ADDR, address_of(task + LAYER));
    dovetail_mmio_write(base + CONF_N, LAYER_WORDS);
    dovetail_mmio_write(base + NB_TILE, 1u);
    return trigger(&digital);
}

uint32_t diana_analog_start(const uint32_t *task)
{
    const uint32_t base = DIANA_ANALOG_BASE;
    acquire(&analog);
    dovetail_mmio_write(base + WT_CONV_ADDR, task[WEIGHTS]);
    dovetail_mmio_write(base + ANA_WT_SIMD_ADDR, task[MORE]);
    dovetail_mmio_write(base + ANA_ACT_ADDR, task[OPERAND]);
    dovetail_mmio_write(base + ANA_ACT_N, task[OPERAND_BYTES]);
    dovetail_mmio_write(base + ANA_OUT_DATA, task[RESULT]);
    dovetail_mmio_write(base + ANA_OUT_DATA_N, task[RESULT_BYTES]);
    dovetail_mmio_write(base + ANA_CONF_ADDR, address_of(task + LAYER));
    dovetail_mmio_write(base + ANA_CONF_N, LAYER_WORDS);
    dovetail_mmio_write(base + ANA_NB_TILE, 1u);
    return trigger(&analog);
}
