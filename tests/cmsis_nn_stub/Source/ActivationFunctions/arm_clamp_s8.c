#include "arm_nnsupport.h"

int8_t arm_clamp_s8(int32_t value, const cmsis_nn_activation *activation)
{
    const int32_t raised = value < activation->min ? activation->min : value;
    return (int8_t)(raised > activation->max ? activation->max : raised);
}
