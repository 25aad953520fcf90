/* The cores of a chip: core 0 runs the network, the others what it starts on them. Five functions; cores.c has them for
   the simulated chip and, one thread doing everything in turn, for the host. For another chip, or the threads of an
   operating system, write these five in its place:

   - The network calls core_start(), core_after() and core_wait(), from core 0 only; start-up code calls core_id() and
     core_serve().
   - A core runs its jobs in the order they are started; a job runs to its end, starts no other and waits for none.
   - What core 0 wrote before core_start() the job sees, and what the job wrote core 0 sees after core_wait(), another
     core in its jobs after core_after(): where caches are not kept coherent, cores write them back after each job and
     drop them before the next.
   - Jobs that may run at the same time write no byte that another one reads or writes; they may share a cache line.
   - Every core needs the stack that link.ld reserves for it. */
#ifndef DOVETAIL_CORES_H
#define DOVETAIL_CORES_H

#include <stdint.h>

typedef void (*core_job)(void);

/* The number of the core that calls it, from 0. */
uint32_t core_id(void);

/* Has another core run a job, after those it was given before; returns at once, with a ticket. (It may wait for room
   where many jobs are under way.) */
uint32_t core_start(uint32_t core, core_job job);

/* Has a core (not 0) run the jobs it is given from here on when the job of another core (not 0) with this ticket, and
   all before it, have finished; returns at once. Only networks in a pipeline whose stages have several cores call it. */
void core_after(uint32_t core, uint32_t other, uint32_t ticket);

/* Returns when the job of this core with this ticket, and all before it, have finished. */
void core_wait(uint32_t core, uint32_t ticket);

/* What every core but 0 does from its start: runs the jobs it is given. Does not return on a chip. */
void core_serve(void);

#endif
