/* Driver of DIANA's two engines, the digital and the analog one.
 *
 * A task is a constant made by the compiler (dovetail/targets/diana/registers.py, task_words): addresses and sizes,
 * then the layer's fields. Each engine takes one task at a time; both may work at once.
 *
 * Not reentrant: to be called from one thread of control, and not from interrupt handlers.
 */
#ifndef DOVETAIL_DIANA_H
#define DOVETAIL_DIANA_H

#include <stdint.h>

#ifndef DIANA_DIGITAL_BASE
#define DIANA_DIGITAL_BASE 0x10201000u /* address of the digital engine's registers */
#endif

#ifndef DIANA_ANALOG_BASE
#define DIANA_ANALOG_BASE 0x10202000u /* address of the analog engine's registers */
#endif

/* Drops a task an engine was to be given, and invalidates its tickets. Once, before the first start. */
void diana_digital_init(void);
void diana_analog_init(void);

/* Starts a task and returns its ticket; waits while the engine works. The task must stay as it is until it ends. */
uint32_t diana_digital_start(const uint32_t *task);
uint32_t diana_analog_start(const uint32_t *task);

/* Returns when the task of the ticket, and so every task of this engine started before it, has ended and its results
 * are in memory. Waiting again for an ended task returns at once. */
void diana_digital_wait(uint32_t ticket);
void diana_analog_wait(uint32_t ticket);

#endif
