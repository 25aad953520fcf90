#include "FreeRTOS.h"
static inline SemaphoreHandle_t machine_made(StaticSemaphore_t *memory, int count)
{
    *memory = (StaticSemaphore_t)MACHINE_SEMAPHORE(count, 1);
    return memory;
}
#define xSemaphoreCreateMutexStatic(memory) machine_made(memory, 1)
#define xSemaphoreCreateBinaryStatic(memory) machine_made(memory, 0)
#define xSemaphoreTake(semaphore, ticks) (machine_take(semaphore), (void)(ticks), 1)
#define xSemaphoreGive(semaphore) (machine_give(semaphore), 1)
#define xSemaphoreGiveFromISR(semaphore, woken) (machine_give(semaphore), *(woken) = 1)
