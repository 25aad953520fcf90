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

/* Element `place` of unsigned 4-bit integers, two to a byte. */
static inline int32_t unsigned_4(const uint8_t *packed, int32_t place)
{
    return packed[place >> 1] >> 4 * (place & 1) & 15;
}

/* Element `place` of unsigned 2-bit integers, four to a byte. */
static inline int32_t unsigned_2(const uint8_t *packed, int32_t place)
{
    return packed[place >> 2] >> 2 * (place & 3) & 3;
}

/* Store element `place` of 4-bit integers; the byte's other element stays. */
static inline void put_4(uint8_t *packed, int32_t place, int32_t value)
{
    const int32_t shift = 4 * (place & 1);
    packed[place >> 1] = (uint8_t)((packed[place >> 1] & ~(15 << shift)) | (value & 15) << shift);
}

/* Store element `place` of 2-bit integers; the byte's other elements stay. */
static inline void put_2(uint8_t *packed, int32_t place, int32_t value)
{
    const int32_t shift = 2 * (place & 3);
    packed[place >> 2] = (uint8_t)((packed[place >> 2] & ~(3 << shift)) | (value & 3) << shift);
}
