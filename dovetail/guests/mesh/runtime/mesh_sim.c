/* The HAL on the registers of the simulated element (dovetail/guests/mesh/element.py), and the loop over inputs. */
#include "dovetail_rt.h"
#include "element.h"
#include "mesh_hal.h"

enum {
    TRANSFERS = 0x00, EXPECT = 0x04, READY = 0x08, RELEASE = 0x0C, KEY = 0x10, INPUT = 0x14, DATA = 0x18, SEND = 0x1C,
    FETCH = 0x20, STORE = 0x24, JOB = 0x28, BUSY = 0x2C, TURNS = 0x30,
    PIECE = 0x34, CAN = 0x38, IDLE = 0x3C
};

#define MESH_BASE 0x40000000u

static inline void set(uint32_t offset, uint32_t value) { dovetail_mmio_write(MESH_BASE + offset, value); }
static inline uint32_t get(uint32_t offset) { return dovetail_mmio_read(MESH_BASE + offset); }
static inline uint32_t address_of(const void *pointer) { return (uint32_t)(uintptr_t)pointer; }

void mesh_expect(const mesh_transfer_t *transfers, uint32_t count)
{
    dovetail_compiler_barrier();
    set(TRANSFERS, address_of(transfers));
    set(EXPECT, count);
}

void mesh_wait(uint32_t input)
{
    set(INPUT, input);
    while (get(READY) == 0u) {
        dovetail_wait_for_interrupt();
    }
    dovetail_compiler_barrier();
}

void mesh_release(uint32_t input)
{
    dovetail_compiler_barrier();
    set(RELEASE, input);
}

void mesh_send(uint32_t key, uint32_t input, const void *data, uint32_t bytes)
{
    dovetail_compiler_barrier();
    set(KEY, key);
    set(INPUT, input);
    set(DATA, address_of(data));
    set(SEND, bytes);
}

void mesh_sent(uint32_t input)
{
    (void)input; /* the simulated element copies what it sends at once */
}

void mesh_fetch(const mesh_transfer_t *transfers, uint32_t count, uint32_t input)
{
    set(TRANSFERS, address_of(transfers));
    set(INPUT, input);
    set(FETCH, count);
    dovetail_compiler_barrier();
}

void mesh_store(const mesh_transfer_t *transfer, uint32_t input, const void *data)
{
    dovetail_compiler_barrier();
    set(INPUT, input);
    set(DATA, address_of(data));
    set(STORE, address_of(transfer));
}

void mesh_select(uint32_t piece)
{
    set(PIECE, piece);
}

uint32_t mesh_ready(uint32_t input)
{
    set(INPUT, input);
    const uint32_t can = get(CAN);
    dovetail_compiler_barrier();
    return can;
}

void mesh_idle(void)
{
    (void)get(IDLE);
}

void mac_start(const mac_job_t *job)
{
    dovetail_compiler_barrier();
    set(JOB, address_of(job));
}

void mac_wait(void)
{
    while (get(BUSY) != 0u) {
        dovetail_wait_for_interrupt();
    }
    dovetail_compiler_barrier();
}

int main(void);

int main(void)
{
    uint32_t turns = get(TURNS);
    element_begin();
    for (uint32_t turn = 0; turn < turns; ++turn) {
        element_run(turn);
    }
    dovetail_mmio_write(DOVETAIL_SIM_EXIT_CODE, 0u);
    dovetail_mmio_write(DOVETAIL_SIM_COMMAND, DOVETAIL_SIM_EXIT);
    for (;;) {
    }
}
