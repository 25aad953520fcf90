/* A machine for tests: threads of this computer, semaphores made of them, and an engine that holds its interrupt line up
   until it is told otherwise. */
#ifndef MACHINE_H
#define MACHINE_H
#include <pthread.h>

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int count, limit;
} machine_semaphore;

#define MACHINE_SEMAPHORE(count, limit) {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, (count), (limit)}
void machine_take(machine_semaphore *semaphore);
void machine_give(machine_semaphore *semaphore);

/* The interrupt controller: a line that is up and on calls its handler, again and again. */
void machine_line(int on);
extern void (*machine_handler)(void);
#endif
