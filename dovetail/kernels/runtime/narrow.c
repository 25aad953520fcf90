/* The signed field of a byte that is raised to the top bits by `left` and has 32 - `right` bits. */
static inline int32_t field_of(uint8_t packed, int32_t left, int32_t right)
{
    return (int32_t)((uint32_t)packed << left) >> right;
}

/* Element `place` of signed 4-bit integers, two to a byte. */
static inline int32_t packed_4(const uint8_t *packed, int32_t place)
{
    return field_of(packed[place >> 1], 28 - 4 * (place & 1), 28);
}

/* Element `place` of signed 2-bit integers, four to a byte. */
static inline int32_t packed_2(const uint8_t *packed, int32_t place)
{
    return field_of(packed[place >> 2], 30 - 2 * (place & 3), 30);
}
