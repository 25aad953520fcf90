/* Driver of the second NE16: that of the first under other names. */
#ifndef SECOND_NE16_H
#define SECOND_NE16_H

#include <stdint.h>

void second_init(void);
uint32_t second_start(const uint32_t *task);
void second_wait(uint32_t ticket);

#endif
