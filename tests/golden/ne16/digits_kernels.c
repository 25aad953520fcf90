#include "digits_kernels.h"

/* The value limited to [low, high]; most values are inside, which one comparison modulo 2^32 finds. */
static inline int32_t clip(int32_t value, int32_t low, int32_t high)
{
    if (__builtin_expect((uint32_t)value - (uint32_t)low > (uint32_t)high - (uint32_t)low, 0)) {
        return value < low ? low : high;
    }
    return value;
}

/* left * right / 2^31, rounded to nearest (halves up); not both are -2^31. */
static inline int32_t multiply_high(int32_t left, int32_t right)
{
    return (int32_t)(((int64_t)left * right + 0x40000000) >> 31);
}

/* value / 2^right, rounded to nearest, halves up; value + 2^(right - 1) must fit, right be at least 1. */
static inline uint32_t round_up_shift(uint32_t value, int32_t right)
{
    return (value + (1u << (right - 1))) >> right;
}

/* sum / count, rounded to nearest, halves away from zero. */
static inline int32_t divide_rounded(int32_t sum, int32_t count)
{
    return sum < 0 ? -((count / 2 - sum) / count) : (sum + count / 2) / count;
}

/* value * 2, limited to 32 bits. */
static inline int32_t double_saturating(int32_t value)
{
    const int32_t limited = value > 0x3FFFFFFF ? 0x3FFFFFFF : (value < -0x40000000 ? -0x40000000 : value);
    return limited * 2 + (value > 0x3FFFFFFF);
}

/* 1 / sum as a Q0.31 factor, for a positive sum raised to [2^31, 2^32): Newton's division in Q2.29. */
static inline int32_t softmax_reciprocal(uint32_t raised)
{
    const int32_t half = (int32_t)(raised >> 1);
    int32_t estimate = 1515870810 + multiply_high(half, -1010580540);
    for (int32_t round = 0; round < 3; ++round) {
        const int32_t error = 0x20000000 - multiply_high(half, estimate);
        estimate += double_saturating(double_saturating(multiply_high(estimate, error)));
    }
    return double_saturating(estimate);
}

/* 64 bytes, aligned to 8, with their top bits inverted: int8 + 128 as uint8, and back. */
static inline void flip_signs(uint8_t *to, const uint8_t *from)
{
    uint32_t words[16];
    __builtin_memcpy(words, __builtin_assume_aligned(from, 8), 64);
    words[0] ^= 0x80808080u;
    words[1] ^= 0x80808080u;
    words[2] ^= 0x80808080u;
    words[3] ^= 0x80808080u;
    words[4] ^= 0x80808080u;
    words[5] ^= 0x80808080u;
    words[6] ^= 0x80808080u;
    words[7] ^= 0x80808080u;
    words[8] ^= 0x80808080u;
    words[9] ^= 0x80808080u;
    words[10] ^= 0x80808080u;
    words[11] ^= 0x80808080u;
    words[12] ^= 0x80808080u;
    words[13] ^= 0x80808080u;
    words[14] ^= 0x80808080u;
    words[15] ^= 0x80808080u;
    __builtin_memcpy(__builtin_assume_aligned(to, 8), words, 64);
}

void digits_offset_0_kernel(uint8_t *restrict output, const int8_t *restrict input)
{
    const uint8_t *from = __builtin_assume_aligned(input, 8);
    uint8_t *to = __builtin_assume_aligned(output, 8);
    flip_signs(to + 0, from + 0);
}

void digits_average_pool_11_kernel(uint8_t *restrict output, const uint8_t *restrict input)
{
    const int32_t top = 0;
    const int32_t left = 0;
    const int32_t place = 0;
    for (int32_t channel = 0; channel < 32; channel += 8) {
        uint32_t even_0 = 0;
        uint32_t odd_0 = 0;
        uint32_t even_1 = 0;
        uint32_t odd_1 = 0;
        uint32_t words[2];
        const uint8_t *from = input + (top * 4 + left) * 32 + channel;
        for (int32_t tap = 0; tap < 16; tap += 4) {
            __builtin_memcpy(words, __builtin_assume_aligned(from, 4), 8);
            even_0 += words[0] & 0xFF00FFu;
            odd_0 += words[0] >> 8;
            even_1 += words[1] & 0xFF00FFu;
            odd_1 += words[1] >> 8;
            from += 32;
            __builtin_memcpy(words, __builtin_assume_aligned(from, 4), 8);
            even_0 += words[0] & 0xFF00FFu;
            odd_0 += words[0] >> 8;
            even_1 += words[1] & 0xFF00FFu;
            odd_1 += words[1] >> 8;
            from += 32;
            __builtin_memcpy(words, __builtin_assume_aligned(from, 4), 8);
            even_0 += words[0] & 0xFF00FFu;
            odd_0 += words[0] >> 8;
            even_1 += words[1] & 0xFF00FFu;
            odd_1 += words[1] >> 8;
            from += 32;
            __builtin_memcpy(words, __builtin_assume_aligned(from, 4), 8);
            even_0 += words[0] & 0xFF00FFu;
            odd_0 += words[0] >> 8;
            even_1 += words[1] & 0xFF00FFu;
            odd_1 += words[1] >> 8;
            from += 32;
        }
        odd_0 -= even_0 >> 8 & 0xFFFF00u;
        odd_1 -= even_1 >> 8 & 0xFFFF00u;
        const int32_t sums[8] = {(int32_t)(even_0 & 0xFFFFu), (int32_t)(odd_0 & 0xFFFFu), (int32_t)(even_0 >> 16), (int32_t)(odd_0 >> 16), (int32_t)(even_1 & 0xFFFFu), (int32_t)(odd_1 & 0xFFFFu), (int32_t)(even_1 >> 16), (int32_t)(odd_1 >> 16)};
        for (int32_t lane = 0; lane < 8; ++lane) {
            output[place + channel + lane] = (uint8_t)(divide_rounded(sums[lane] - 2048, 16) + 128);
        }
    }
}

void digits_softmax_14_kernel(int8_t *restrict output, const uint8_t *restrict input,
                                     const int32_t *restrict exponentials)
{
    const uint8_t *from = input;
    int32_t largest = from[0];
    for (int32_t channel = 1; channel < 10; ++channel) {
        largest = from[channel] > largest ? from[channel] : largest;
    }
    uint32_t sum = 0; /* Q12.19 */
    for (int32_t channel = 0; channel < 10; ++channel) {
        sum += round_up_shift((uint32_t)exponentials[largest - from[channel]], 12);
    }
    int32_t headroom = 9;
    sum <<= 9;
    while (sum < 0x80000000u) {
        sum *= 2u;
        ++headroom;
    }
    const int32_t reciprocal = softmax_reciprocal(sum);
    const int32_t exponent = 35 - headroom;
    for (int32_t channel = 0; channel < 10; ++channel) {
        const int32_t share = (int32_t)round_up_shift((uint32_t)multiply_high(reciprocal, exponentials[largest - from[channel]]), exponent);
        const int32_t limited = clip(share - 128, -128, 127);
        output[channel] = (int8_t)limited;
    }
}
