//@ curve_16
/* A function between points: segments of 2^bits, from `starts`[0] on above 0 and before it below, and their slopes. */
static inline int32_t curve_16(int32_t value, int32_t bits, int32_t shift, const int32_t *starts,
                               const uint16_t *slopes)
{
    const int32_t place = value >> bits;
    return (starts[place] + (value & ((1 << bits) - 1)) * slopes[place]) >> shift;
}

//@ saturate_16: clip
/* The value limited to int16. */
static inline int32_t saturate_16(int32_t value)
{
#if defined(__ARM_FEATURE_SAT)
    return (int32_t)__builtin_arm_ssat(value, 16);
#else
    return clip(value, -32768, 32767);
#endif
}

//@ saturate_17: clip
/* The value limited to 17 bits. */
static inline int32_t saturate_17(int32_t value)
{
#if defined(__ARM_FEATURE_SAT)
    return (int32_t)__builtin_arm_ssat(value, 17);
#else
    return clip(value, -65536, 65535);
#endif
}

//@ gate_sums
/* The products of values with the weights of four gates added to their sums, modulo 2^32. Both come in fours of values,
   from multiples of 4 bytes; the weights of a pair of values are those of two gates, then of the other two, each first
   with the one value, then with the other. */
static inline void gate_sums(uint32_t *sums, const int16_t *from, const int8_t *weights, int32_t fours)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
#define FOUR                                                                                                          \
    "ldrd %4, %5, [%7], #8\n\tldm %8!, {r4, r5, r6, r8}\n\t"                                                          \
    "sxtb16 %6, r4\n\tsxtb16 r4, r4, ror #8\n\tsmlad %0, %6, %4, %0\n\tsmlad %1, r4, %4, %1\n\t"                      \
    "sxtb16 %6, r5\n\tsxtb16 r5, r5, ror #8\n\tsmlad %2, %6, %4, %2\n\tsmlad %3, r5, %4, %3\n\t"                      \
    "sxtb16 %6, r6\n\tsxtb16 r6, r6, ror #8\n\tsmlad %0, %6, %5, %0\n\tsmlad %1, r6, %5, %1\n\t"                      \
    "sxtb16 %6, r8\n\tsxtb16 r8, r8, ror #8\n\tsmlad %2, %6, %5, %2\n\tsmlad %3, r8, %5, %3\n\t"
    uint32_t sum_0 = sums[0], sum_1 = sums[1], sum_2 = sums[2], sum_3 = sums[3], first, second, pair;
#define OPERANDS                                                                                                      \
    : "+&r"(sum_0), "+&r"(sum_1), "+&r"(sum_2), "+&r"(sum_3), "=&r"(first), "=&r"(second), "=&r"(pair), "+&r"(from), \
      "+&r"(weights) : : "r4", "r5", "r6", "r8", "memory"
    for (int32_t turn = fours >> 2; turn > 0; --turn) {
        __asm__ volatile(FOUR FOUR FOUR FOUR OPERANDS);
    }
    if (fours & 2) {
        __asm__ volatile(FOUR FOUR OPERANDS);
    }
    if (fours & 1) {
        __asm__ volatile(FOUR OPERANDS);
    }
#undef FOUR
#undef OPERANDS
    sums[0] = sum_0;
    sums[1] = sum_1;
    sums[2] = sum_2;
    sums[3] = sum_3;
#else
    for (int32_t pair = 0; pair < 2 * fours; ++pair) {
        for (int32_t gate = 0; gate < 4; ++gate) {
            const int8_t *with = weights + 8 * pair + gate / 2 * 4 + gate % 2;
            sums[gate] += (uint32_t)(from[2 * pair] * with[0]) + (uint32_t)(from[2 * pair + 1] * with[2]);
        }
    }
#endif
}
