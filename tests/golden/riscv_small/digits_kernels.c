#include "digits_kernels.h"

/* The value limited to [low, high]; most values are inside, which one comparison modulo 2^32 finds. */
static inline int32_t clip(int32_t value, int32_t low, int32_t high)
{
    if (__builtin_expect((uint32_t)value - (uint32_t)low > (uint32_t)high - (uint32_t)low, 0)) {
        return value < low ? low : high;
    }
    return value;
}

/* value / 2, rounded to nearest (halves up), plus zero_point: one addition before the shift where SSAT, which shifts
   too, comes after it; elsewhere the addition behind it goes into the limits of `clip`. */
static inline int32_t halved(int32_t value, int32_t zero_point)
{
#if defined(__ARM_FEATURE_SAT)
    return (value + 2 * zero_point + 1) >> 1;
#else
    return ((value + 1) >> 1) + zero_point;
#endif
}

/* The value limited to int8. */
static inline int32_t saturate(int32_t value)
{
#if defined(__ARM_FEATURE_SAT)
    return (int32_t)__builtin_arm_ssat(value, 8);
#else
    return clip(value, -128, 127);
#endif
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

/* value * multiplier * 2^(-33 - shift), rounded once (halves up); plus zero_point. */
static inline int32_t requantize_single(int32_t value, uint32_t multiplier, int32_t shift, int32_t zero_point)
{
    const int64_t product = (int64_t)value * (int64_t)multiplier;
    return halved((int32_t)(product >> 32) >> shift, zero_point);
}

/* The first kernel tap inside the image, for a window that begins at `start` (negative: before the image). */
static inline int32_t first_tap(int32_t start, int32_t dilation)
{
    return start < 0 ? (dilation - 1 - start) / dilation : 0;
}

/* One past the last kernel tap inside an image of `size`, for a window of `taps` that begins at `start`. */
static inline int32_t end_tap(int32_t start, int32_t dilation, int32_t taps, int32_t size)
{
    return start + (taps - 1) * dilation >= size ? (size - start + dilation - 1) / dilation : taps;
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

/* Functions the compiler shall make small. */
#if defined(__clang__)
#define SMALL __attribute__((minsize, noinline))
#elif defined(__GNUC__)
#define SMALL __attribute__((optimize("Os"), noinline))
#else
#define SMALL
#endif

/* Every output pixel, from the taps inside the image. */
SMALL void digits_conv_1_kernel(int8_t *restrict output, const int8_t *restrict input,
                                 const struct digits_conv_1_kernel_layer *restrict layer)
{
    for (int32_t row = 0; row < layer->outputs_rows; ++row) {
        for (int32_t column = 0; column < layer->outputs_columns; ++column) {
            const int32_t top = row * layer->stride_rows - layer->before_rows;
            const int32_t first_row = first_tap(top, 1);
            const int32_t end_row = end_tap(top, 1, layer->kernel_rows, layer->size_rows);
            const int32_t left = column * layer->stride_columns - layer->before_columns;
            const int32_t first_column = first_tap(left, 1);
            const int32_t end_column = end_tap(left, 1, layer->kernel_columns, layer->size_columns);
            const int32_t place = (row * layer->outputs_columns + column) * layer->outputs;
            for (int32_t channel = 0; channel < layer->outputs; channel += 8) {
                int32_t sum_0 = layer->bias[channel];
                int32_t sum_1 = layer->bias[channel + 1];
                int32_t sum_2 = layer->bias[channel + 2];
                int32_t sum_3 = layer->bias[channel + 3];
                int32_t sum_4 = layer->bias[channel + 4];
                int32_t sum_5 = layer->bias[channel + 5];
                int32_t sum_6 = layer->bias[channel + 6];
                int32_t sum_7 = layer->bias[channel + 7];
                for (int32_t kernel_row = first_row; kernel_row < end_row; ++kernel_row) {
                    const int8_t *from = input + ((top + kernel_row) * layer->size_columns + left + first_column) * layer->channels;
                    const int8_t *tap = layer->weights + channel * layer->products + (kernel_row * layer->kernel_columns + first_column) * layer->channels * 8;
                    for (int32_t count = 0; count < (end_column - first_column) * layer->channels; ++count) {
                        const int32_t value = *from++ - layer->pad_value;
                        sum_0 += value * tap[0];
                        sum_1 += value * tap[1];
                        sum_2 += value * tap[2];
                        sum_3 += value * tap[3];
                        sum_4 += value * tap[4];
                        sum_5 += value * tap[5];
                        sum_6 += value * tap[6];
                        sum_7 += value * tap[7];
                        tap += 8;
                    }
                }
                const int32_t lanes = layer->outputs - channel < 8 ? layer->outputs - channel : 8;
                const int32_t sums[8] = {sum_0, sum_1, sum_2, sum_3, sum_4, sum_5, sum_6, sum_7};
                for (int32_t lane = 0; lane < lanes; ++lane) {
                    const int32_t scaled = requantize_single(sums[lane], layer->multiplier[channel + lane], layer->shift[channel + lane], layer->output_zero_point);
                    output[place + channel + lane] = (int8_t)saturate(scaled);
                }
            }
        }
    }
}

/* Every output pixel, from the taps inside the image. */
SMALL void digits_depthwise_3_kernel(int8_t *restrict output, const int8_t *restrict input,
                                      const struct digits_depthwise_3_kernel_layer *restrict layer)
{
    for (int32_t row = 0; row < 4; ++row) {
        for (int32_t column = 0; column < 4; ++column) {
            const int32_t top = row - 1;
            const int32_t first_row = first_tap(top, 1);
            const int32_t end_row = end_tap(top, 1, 3, 4);
            const int32_t left = column - 1;
            const int32_t first_column = first_tap(left, 1);
            const int32_t end_column = end_tap(left, 1, 3, 4);
            const int32_t place = (row * 4 + column) * layer->channels;
            for (int32_t channel = 0; channel < layer->channels; channel += 4) {
                int32_t total_0 = layer->bias[channel];
                int32_t total_1 = layer->bias[channel + 1];
                int32_t total_2 = layer->bias[channel + 2];
                int32_t total_3 = layer->bias[channel + 3];
                for (int32_t kernel_row = first_row; kernel_row < end_row; ++kernel_row) {
                    const int8_t *from = input + ((top + kernel_row) * 4 + left + first_column) * layer->channels + channel;
                    const int8_t *tap = layer->weights + (kernel_row * 3 + first_column) * layer->channels + channel;
                    for (int32_t kernel_column = first_column; kernel_column < end_column; ++kernel_column) {
                        total_0 += (from[0] + 128) * tap[0];
                        total_1 += (from[1] + 128) * tap[1];
                        total_2 += (from[2] + 128) * tap[2];
                        total_3 += (from[3] + 128) * tap[3];
                        from += layer->channels;
                        tap += layer->channels;
                    }
                }
                const int32_t sums[4] = {total_0, total_1, total_2, total_3};
                for (int32_t lane = 0; lane < 4; ++lane) {
                    const int32_t scaled = requantize_single(sums[lane], layer->multiplier[channel + lane], layer->shift[channel + lane], -128);
                    output[place + channel + lane] = (int8_t)saturate(scaled);
                }
            }
        }
    }
}

/* Every output pixel, from the taps inside the image. */
SMALL void digits_average_pool_7_kernel(int8_t *restrict output, const int8_t *restrict input)
{
    const int32_t top = 0;
    const int32_t first_row = 0;
    const int32_t end_row = 4;
    const int32_t left = 0;
    const int32_t first_column = 0;
    const int32_t end_column = 4;
    const int32_t place = 0;
    const int32_t count = (end_row - first_row) * (end_column - first_column);
    for (int32_t channel = 0; channel < 32; channel += 4) {
        int32_t total_0 = 0;
        int32_t total_1 = 0;
        int32_t total_2 = 0;
        int32_t total_3 = 0;
        for (int32_t kernel_row = first_row; kernel_row < end_row; ++kernel_row) {
            const int8_t *from = input + ((top + kernel_row) * 4 + left + first_column) * 32 + channel;
            for (int32_t kernel_column = first_column; kernel_column < end_column; ++kernel_column) {
                total_0 += from[0];
                total_1 += from[1];
                total_2 += from[2];
                total_3 += from[3];
                from += 32;
            }
        }
        const int32_t sums[4] = {total_0, total_1, total_2, total_3};
        for (int32_t lane = 0; lane < 4; ++lane) {
            output[place + channel + lane] = (int8_t)saturate(divide_rounded(sums[lane], count));
        }
    }
}

SMALL void digits_softmax_10_kernel(int8_t *restrict output, const int8_t *restrict input,
                                     const int32_t *restrict exponentials)
{
    const int8_t *from = input;
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
