#ifndef KESTREL_H
#define KESTREL_H

#include <stdint.h>

void kestrel_init(void);                                         /* once before an inference */
uint32_t kestrel_start(const uint32_t *words, uint32_t count);   /* starts a list; its ticket */
void kestrel_wait(uint32_t ticket);                              /* returns when all of that list has ended */

#endif
