/* The names of Zephyr the export uses, on the machine for tests. */
#ifndef TEST_ZEPHYR_H
#define TEST_ZEPHYR_H
#include "../machine.h"
#define K_FOREVER 0
#define K_MUTEX_DEFINE(name) machine_semaphore name = MACHINE_SEMAPHORE(1, 1)
#define K_SEM_DEFINE(name, count, limit) machine_semaphore name = MACHINE_SEMAPHORE(count, limit)
#define k_mutex_lock(mutex, time) (machine_take(mutex), (time))
#define k_mutex_unlock(mutex) (machine_give(mutex), 0)
#define k_sem_take(semaphore, time) (machine_take(semaphore), (time))
#define k_sem_give(semaphore) machine_give(semaphore)
#define ARG_UNUSED(x) ((void)(x))
#endif
