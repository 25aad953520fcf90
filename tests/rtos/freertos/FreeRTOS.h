/* The names of FreeRTOS the export uses, on the machine for tests. */
#ifndef TEST_FREERTOS_H
#define TEST_FREERTOS_H
#include "../machine.h"
typedef int BaseType_t;
typedef machine_semaphore StaticSemaphore_t, *SemaphoreHandle_t;
#define pdFALSE 0
#define portMAX_DELAY 0xFFFFFFFFu
#define portYIELD_FROM_ISR(woken) ((void)(woken))
#endif
