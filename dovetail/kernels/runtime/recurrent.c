/* The hyperbolic tangent in Q0.15 for a value with 12 + right - left fraction bits, from the sigmoid's table. */
static inline int32_t tanh_16(int32_t value, int32_t left, int32_t right, const uint16_t *table)
{
    return tangent_16((value * (3 << left) + ((1 << right) >> 1)) >> right, table);
}
