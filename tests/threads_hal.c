/* The five functions of runtime/cores.h as a user might write them: POSIX threads. */
#define _POSIX_C_SOURCE 200809L
#include "cores.h"

#include <pthread.h>
#include <string.h>

enum { MOST = 8, PLACES = 256 };

typedef struct {
    pthread_t thread;
    core_job jobs[PLACES];
    uint32_t after[PLACES + 1][MOST]; /* by job: how many jobs of each other core come before it; last the next one's */
    uint32_t given, taken, done;
} worker;

static worker workers[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static __thread uint32_t self;

uint32_t core_id(void)
{
    return self;
}

void core_serve(void)
{
    worker *w = &workers[self];
    (void)pthread_mutex_lock(&lock);
    for (;;) {
        while (w->taken == w->given) {
            (void)pthread_cond_wait(&change, &lock);
        }
        for (uint32_t other = 0; other < MOST; ++other) {
            while (((workers[other].done - w->after[w->taken % PLACES][other]) & 0x80000000u) != 0u) {
                (void)pthread_cond_wait(&change, &lock);
            }
        }
        const core_job job = w->jobs[w->taken++ % PLACES];
        (void)pthread_mutex_unlock(&lock);
        job();
        (void)pthread_mutex_lock(&lock);
        w->done++;
        (void)pthread_cond_broadcast(&change);
    }
}

static void *begin(void *number)
{
    self = (uint32_t)(uintptr_t)number;
    core_serve();
    return 0;
}

uint32_t core_start(uint32_t core, core_job job)
{
    worker *w = &workers[core];
    (void)pthread_mutex_lock(&lock);
    if (w->given == 0u) {
        (void)pthread_create(&w->thread, 0, begin, (void *)(uintptr_t)core);
    }
    while (w->given - w->done == PLACES) {
        (void)pthread_cond_wait(&change, &lock);
    }
    (void)memcpy(w->after[w->given % PLACES], w->after[PLACES], sizeof w->after[PLACES]);
    w->jobs[w->given++ % PLACES] = job;
    const uint32_t ticket = w->given;
    (void)pthread_cond_broadcast(&change);
    (void)pthread_mutex_unlock(&lock);
    return ticket;
}

void core_after(uint32_t core, uint32_t other, uint32_t ticket)
{
    (void)pthread_mutex_lock(&lock);
    workers[core].after[PLACES][other] = ticket;
    (void)pthread_mutex_unlock(&lock);
}

void core_wait(uint32_t core, uint32_t ticket)
{
    (void)pthread_mutex_lock(&lock);
    while (((workers[core].done - ticket) & 0x80000000u) != 0u) {
        (void)pthread_cond_wait(&change, &lock);
    }
    (void)pthread_mutex_unlock(&lock);
}
