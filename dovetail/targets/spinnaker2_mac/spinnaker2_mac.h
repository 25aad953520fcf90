/* The MAC array of an element, for one core that computes whole layers with it. */
#ifndef SPINNAKER2_MAC_H
#define SPINNAKER2_MAC_H

#include <stdint.h>

/* Computes a layer: the array makes the 32-bit sums of a row while the core requantises those of the row before. Returns when
   the result is there. `constants` are the weights and parameters packed for it. */
void spinnaker2_mac_layer(const uint32_t *task, const uint8_t *constants);

#endif
