/* What the functions share; memcpy of one element, as libraries read without alignment. */
#ifndef ARM_NNSUPPORT_H
#define ARM_NNSUPPORT_H

#include <string.h>

#include "arm_nnfunctions.h"

int32_t arm_nn_scaled(int32_t value, int32_t multiplier, int32_t shift);
int8_t arm_clamp_s8(int32_t value, const cmsis_nn_activation *activation);

static inline int32_t arm_nn_read_s8(const int8_t *from)
{
    int8_t value;
    memcpy(&value, from, sizeof(value));
    return value;
}

#endif
