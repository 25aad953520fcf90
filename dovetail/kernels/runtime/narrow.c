//@ field_of
/* The signed field of a byte that is raised to the top bits by `left` and has 32 - `right` bits. */
static inline int32_t field_of(uint8_t packed, int32_t left, int32_t right)
{
    return (int32_t)((uint32_t)packed << left) >> right;
}

//@ packed_4: field_of
/* Element `place` of signed 4-bit integers, two to a byte. */
static inline int32_t packed_4(const uint8_t *packed, int32_t place)
{
    return field_of(packed[place >> 1], 28 - 4 * (place & 1), 28);
}

//@ packed_2: field_of
/* Element `place` of signed 2-bit integers, four to a byte. */
static inline int32_t packed_2(const uint8_t *packed, int32_t place)
{
    return field_of(packed[place >> 2], 30 - 2 * (place & 3), 30);
}

//@ unsigned_4
/* Element `place` of unsigned 4-bit integers, two to a byte. */
static inline int32_t unsigned_4(const uint8_t *packed, int32_t place)
{
    return packed[place >> 1] >> 4 * (place & 1) & 15;
}

//@ unsigned_2
/* Element `place` of unsigned 2-bit integers, four to a byte. */
static inline int32_t unsigned_2(const uint8_t *packed, int32_t place)
{
    return packed[place >> 2] >> 2 * (place & 3) & 3;
}

//@ put_4
/* Store element `place` of 4-bit integers; the byte's other element stays. */
static inline void put_4(uint8_t *packed, int32_t place, int32_t value)
{
    const int32_t shift = 4 * (place & 1);
    packed[place >> 1] = (uint8_t)((packed[place >> 1] & ~(15 << shift)) | (value & 15) << shift);
}

//@ put_2
/* Store element `place` of 2-bit integers; the byte's other elements stay. */
static inline void put_2(uint8_t *packed, int32_t place, int32_t value)
{
    const int32_t shift = 2 * (place & 3);
    packed[place >> 2] = (uint8_t)((packed[place >> 2] & ~(3 << shift)) | (value & 3) << shift);
}

//@ bits_apart
/* The bits of 8 bytes by their weight, of which two words have four each: bit i of to[b * step] is bit b of byte i. A
   matrix of 8 x 8 bits turned over in blocks of 1, 2 and 4. */
static inline void bits_apart(uint32_t low, uint32_t high, uint8_t *to, int32_t step)
{
    uint32_t moved = (low ^ (low >> 7)) & 0x00AA00AAu;
    low ^= moved ^ (moved << 7);
    moved = (high ^ (high >> 7)) & 0x00AA00AAu;
    high ^= moved ^ (moved << 7);
    moved = (low ^ (low >> 14)) & 0x0000CCCCu;
    low ^= moved ^ (moved << 14);
    moved = (high ^ (high >> 14)) & 0x0000CCCCu;
    high ^= moved ^ (moved << 14);
    moved = (low ^ (high << 4)) & 0xF0F0F0F0u;
    low ^= moved;
    high ^= moved >> 4;
    to[0] = (uint8_t)low;
    to[step] = (uint8_t)(low >> 8);
    to[2 * step] = (uint8_t)(low >> 16);
    to[3 * step] = (uint8_t)(low >> 24);
    to[4 * step] = (uint8_t)high;
    to[5 * step] = (uint8_t)(high >> 8);
    to[6 * step] = (uint8_t)(high >> 16);
    to[7 * step] = (uint8_t)(high >> 24);
}
