#include "kernel.h"
#include <stddef.h>
/* Line 5 is the engine's; others never rise. */
#define irq_enable(line) ((line) == 5 ? machine_line(1) : (void)0)
#define irq_disable(line) ((line) == 5 ? machine_line(0) : (void)0)
#define IRQ_CONNECT(line, priority, function, argument, flags) machine_connect((line), (function))
static inline void machine_connect(int line, void (*handler)(const void *))
{
    if (line == 5) {
        machine_handler = (void (*)(void))handler; /* takes an argument it does not look at */
    }
}
