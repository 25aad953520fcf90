#include "arm_nnsupport.h"

#include <limits.h>

/* The high half of twice the product, then the shift to the right, each rounded to nearest. */
int32_t arm_nn_scaled(int32_t value, int32_t multiplier, int32_t shift)
{
    const int64_t product = (int64_t)(value * (1 << (shift > 0 ? shift : 0))) * multiplier;
    const int32_t high = (int32_t)((product + (product >= 0 ? 1 << 30 : 1 - (1 << 30))) / ((int64_t)1 << 31));
    const int32_t right = shift < 0 ? -shift : 0, mask = (int32_t)((1u << right) - 1u);
    return (high >> right) + ((high & mask) > (mask >> 1) + (high < 0) ? 1 : 0);
}
