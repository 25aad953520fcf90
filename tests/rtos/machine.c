/* 5,000 jobs of an engine, each waited for by the exported code; ends with "done", or hangs where a completion is lost. */
#include "machine.h"

#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef BEGIN
void BEGIN(void);
#endif
void TAKE(void);
void GIVE(void);
void dovetail_wait(void);

static pthread_mutex_t controller;
static pthread_cond_t asked = PTHREAD_COND_INITIALIZER;
static int line_up, line_on, started, finished;
void (*machine_handler)(void);

void machine_take(machine_semaphore *semaphore)
{
    pthread_mutex_lock(&semaphore->lock);
    while (semaphore->count == 0) {
        pthread_cond_wait(&semaphore->changed, &semaphore->lock);
    }
    semaphore->count--;
    pthread_mutex_unlock(&semaphore->lock);
}

void machine_give(machine_semaphore *semaphore)
{
    pthread_mutex_lock(&semaphore->lock);
    semaphore->count += semaphore->count < semaphore->limit;
    pthread_cond_signal(&semaphore->changed);
    pthread_mutex_unlock(&semaphore->lock);
}

static void deliver(void)
{
    for (int times = 0; line_up && line_on; times++) {
        if (times > 8) {
            printf("the handler leaves its line on\n");
            exit(1);
        }
        machine_handler();
    }
}

void machine_line(int on)
{
    pthread_mutex_lock(&controller);
    line_on = on;
    deliver();
    pthread_mutex_unlock(&controller);
}

static void *engine(void *unused)
{
    unsigned seed = 1;
    for (;;) {
        pthread_mutex_lock(&controller);
        while (!started) {
            pthread_cond_wait(&asked, &controller);
        }
        pthread_mutex_unlock(&controller);
        for (seed = seed * 1103515245u + 12345u; seed >> 28; seed = seed * 1103515245u + 12345u) {
            sched_yield();
        }
        pthread_mutex_lock(&controller);
        started = 0;
        finished = line_up = 1;
        deliver();
        pthread_mutex_unlock(&controller);
    }
    return unused;
}

static int has_finished(void)
{
    pthread_mutex_lock(&controller);
    const int found = finished;
    pthread_mutex_unlock(&controller);
    return found;
}

static int inside;

static void *task(void *unused)
{
    for (int job = 0; job < 2500; job++) {
        TAKE();
        if (inside++) {
            printf("two tasks at once\n");
            exit(1);
        }
        pthread_mutex_lock(&controller);
        started = 1;
        pthread_cond_signal(&asked);
        pthread_mutex_unlock(&controller);
        while (!has_finished()) {
            dovetail_wait();
        }
        pthread_mutex_lock(&controller);
        finished = line_up = 0;
        pthread_mutex_unlock(&controller);
        inside--;
        GIVE();
    }
    return unused;
}

int main(void)
{
    pthread_t threads[3];
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&controller, &recursive);
#ifdef BEGIN
    BEGIN();
#endif
    pthread_create(&threads[0], 0, engine, 0);
    pthread_create(&threads[1], 0, task, 0);
    pthread_create(&threads[2], 0, task, 0);
    pthread_join(threads[1], 0);
    pthread_join(threads[2], 0);
    printf("done\n");
    return 0;
}
