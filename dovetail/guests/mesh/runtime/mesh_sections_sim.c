/* mesh_sections.h on the registers of the simulated element. */
#include "dovetail_rt.h"
#include "mesh_sections.h"

enum { PLACE = 0x10, DATA = 0x18, LOAD = 0x40, LOADED = 0x44 };

#define MESH_BASE 0x40000000u

void mesh_join(uint32_t turn)
{
    (void)turn; /* the simulator carries on when all elements are there */
    dovetail_compiler_barrier();
    dovetail_mmio_write(DOVETAIL_SIM_COMMAND, DOVETAIL_SIM_READY);
    dovetail_compiler_barrier();
}

void mesh_load(void *to, uint32_t place, uint32_t bytes)
{
    dovetail_compiler_barrier();
    dovetail_mmio_write(MESH_BASE + PLACE, place);
    dovetail_mmio_write(MESH_BASE + DATA, (uint32_t)(uintptr_t)to);
    dovetail_mmio_write(MESH_BASE + LOAD, bytes);
}

void mesh_loaded(void)
{
    while (dovetail_mmio_read(MESH_BASE + LOADED) == 0u) {
        dovetail_wait_for_interrupt();
    }
    dovetail_compiler_barrier();
}
