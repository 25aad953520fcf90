/* The cores of a chip: core 0 runs the network, the others what it starts on them. Four functions; for another chip, or
   an operating system's threads, write these four.

   A core runs its jobs in the order they are started. What core 0 wrote before core_start() the job sees, and what the
   job wrote core 0 sees after core_wait(). */
#ifndef DOVETAIL_CORES_H
#define DOVETAIL_CORES_H

#include <stdint.h>

typedef void (*core_job)(void);

/* The number of the core that calls it, from 0. */
uint32_t core_id(void);

/* Has another core run a job, after those it was given before; returns at once, with a ticket. */
uint32_t core_start(uint32_t core, core_job job);

/* Returns when the job of this core with this ticket, and all before it, have finished. */
void core_wait(uint32_t core, uint32_t ticket);

/* What every core but 0 does from its start: runs the jobs it is given. Does not return on a chip. */
void core_serve(void);

#endif
