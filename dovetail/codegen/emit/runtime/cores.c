#include "cores.h"

#include "dovetail_rt.h"

#ifndef DOVETAIL_HOST

/* Registers of the mailbox (dovetail/sim/mailbox.py). The first three belong to the core that reads them. */
typedef struct {
    uint32_t id;       /* its number */
    uint32_t next;     /* reading takes the next job, 0 where there is none */
    uint32_t finished; /* writing says that the job it took has finished */
    uint32_t unused;
    struct {
        uint32_t start; /* writing hands over a job, reading gives the number of jobs handed over */
        uint32_t done;  /* the number of jobs finished; with some left, an interrupt comes when the next one is */
        uint32_t room;  /* jobs it can still be handed */
        uint32_t after; /* writing holds its next job back until another core, in bits 24 to 31, has finished as many jobs
                           as bits 0 to 23 say, modulo 2^24 */
    } core[]; /* by number; that of core 0 is not used */
} mailbox_registers;

static volatile mailbox_registers *mailbox(void)
{
    return (volatile mailbox_registers *)(uintptr_t)DOVETAIL_MAILBOX;
}

uint32_t core_id(void)
{
    return mailbox()->id;
}

uint32_t core_start(uint32_t core, core_job job)
{
    volatile mailbox_registers *box = mailbox();
    while (box->core[core].room == 0u) {
        (void)box->core[core].done; /* lets the next end raise an interrupt */
        if (box->core[core].room == 0u) {
            dovetail_wait_for_interrupt();
        }
    }
    __sync_synchronize(); /* operands are in memory before the job is handed over */
    box->core[core].start = (uint32_t)(uintptr_t)job;
    return box->core[core].start;
}

void core_after(uint32_t core, uint32_t other, uint32_t ticket)
{
    mailbox()->core[core].after = (other << 24) | (ticket & 0xFFFFFFu);
}

void core_wait(uint32_t core, uint32_t ticket)
{
    while (((mailbox()->core[core].done - ticket) & 0x80000000u) != 0u) {
        dovetail_wait_for_interrupt();
    }
    __sync_synchronize(); /* results are read after the job has finished */
}

void core_serve(void)
{
    for (;;) {
        const uintptr_t job = mailbox()->next;
        if (job == 0u) {
            dovetail_wait_for_interrupt();
            continue;
        }
        __sync_synchronize();
        ((core_job)job)();
        __sync_synchronize();
        mailbox()->finished = 1u;
    }
}

#else /* on the host: one thread, which does every job at once */

uint32_t core_id(void)
{
    return 0u;
}

uint32_t core_start(uint32_t core, core_job job)
{
    static uint32_t started = 0u;
    (void)core;
    job();
    return ++started;
}

void core_after(uint32_t core, uint32_t other, uint32_t ticket)
{
    (void)core;
    (void)other;
    (void)ticket;
}

void core_wait(uint32_t core, uint32_t ticket)
{
    (void)core;
    (void)ticket;
}

void core_serve(void)
{
}

#endif
