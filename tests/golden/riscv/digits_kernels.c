#include "digits_kernels.h"

/* Loads after this stay after it: without it compilers load far ahead and run out of registers. */
static inline void in_order(void)
{
    __asm__ volatile("" ::: "memory");
}

/* The value, finished here: without it compilers put the work off to where the value is used, and spill. */
static inline int32_t held(int32_t value)
{
    __asm__ volatile("" : "+r"(value) : : "memory");
    return value;
}

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

/* One output pixel, from the taps inside the image. */
static void digits_conv_1_kernel_pixel(int8_t *restrict output, const int8_t *restrict input,
                                       const struct digits_conv_1_kernel_pixel_layer *restrict layer,
                                       int32_t row, int32_t column)
{
    const int32_t top = row * layer->stride_rows - layer->before_rows;
    const int32_t first_row = first_tap(top, 1);
    const int32_t end_row = end_tap(top, 1, 3, 8);
    const int32_t left = column * layer->stride_columns - layer->before_columns;
    const int32_t first_column = first_tap(left, 1);
    const int32_t end_column = end_tap(left, 1, 3, 8);
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
            const int8_t *from = input + ((top + kernel_row) * 8 + left + first_column) * layer->channels;
            const int8_t *tap = layer->weights + channel * layer->products + (kernel_row * 3 + first_column) * layer->channels * 8;
            for (int32_t count = 0; count < (end_column - first_column) * layer->channels; ++count) {
                const int32_t value = *from++ + 128;
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
        const int32_t sums[8] = {sum_0, sum_1, sum_2, sum_3, sum_4, sum_5, sum_6, sum_7};
        for (int32_t lane = 0; lane < 8; ++lane) {
            const int32_t scaled = requantize_single(sums[lane], layer->multiplier[channel + lane], layer->shift[channel + lane], -128);
            output[place + channel + lane] = (int8_t)saturate(scaled);
        }
    }
}

/* 2 neighbouring output columns, all taps inside the image. */
static void digits_conv_1_kernel_pixels(int8_t *restrict output, const int8_t *restrict input,
                                        const int32_t *restrict bias, const int8_t *restrict weights,
                                        const uint32_t *restrict multiplier, const int8_t *restrict shift,
                                        int32_t row, int32_t column)
{
    const int32_t top = row - 1;
    const int32_t left = column - 1;
    const int32_t place = (row * 8 + column) * 8;
    int32_t sum_0_0 = bias[0];
    int32_t sum_0_1 = bias[0 + 1];
    int32_t sum_0_2 = bias[0 + 2];
    int32_t sum_0_3 = bias[0 + 3];
    int32_t sum_0_4 = bias[0 + 4];
    int32_t sum_0_5 = bias[0 + 5];
    int32_t sum_0_6 = bias[0 + 6];
    int32_t sum_0_7 = bias[0 + 7];
    int32_t sum_1_0 = bias[0];
    int32_t sum_1_1 = bias[0 + 1];
    int32_t sum_1_2 = bias[0 + 2];
    int32_t sum_1_3 = bias[0 + 3];
    int32_t sum_1_4 = bias[0 + 4];
    int32_t sum_1_5 = bias[0 + 5];
    int32_t sum_1_6 = bias[0 + 6];
    int32_t sum_1_7 = bias[0 + 7];
    for (int32_t kernel_row = 0; kernel_row < 3; ++kernel_row) {
        const int8_t *from = input + ((top + kernel_row) * 8 + left);
        const int8_t *tap = weights + 0 * 9 + kernel_row * 3 * 8;
        const int8_t *const end = tap + 3 * 8;
        while (tap != end) {
            const int32_t value_0 = from[0];
            const int32_t value_1 = from[1];
            sum_0_0 += value_0 * tap[0];
            sum_1_0 += value_1 * tap[0];
            sum_0_1 += value_0 * tap[1];
            sum_1_1 += value_1 * tap[1];
            __asm__ volatile("" : "+r"(sum_0_0), "+r"(sum_1_0), "+r"(sum_0_1), "+r"(sum_1_1) : : "memory");
            sum_0_2 += value_0 * tap[2];
            sum_1_2 += value_1 * tap[2];
            sum_0_3 += value_0 * tap[3];
            sum_1_3 += value_1 * tap[3];
            __asm__ volatile("" : "+r"(sum_0_2), "+r"(sum_1_2), "+r"(sum_0_3), "+r"(sum_1_3) : : "memory");
            sum_0_4 += value_0 * tap[4];
            sum_1_4 += value_1 * tap[4];
            sum_0_5 += value_0 * tap[5];
            sum_1_5 += value_1 * tap[5];
            __asm__ volatile("" : "+r"(sum_0_4), "+r"(sum_1_4), "+r"(sum_0_5), "+r"(sum_1_5) : : "memory");
            sum_0_6 += value_0 * tap[6];
            sum_1_6 += value_1 * tap[6];
            sum_0_7 += value_0 * tap[7];
            sum_1_7 += value_1 * tap[7];
            __asm__ volatile("" : "+r"(sum_0_6), "+r"(sum_1_6), "+r"(sum_0_7), "+r"(sum_1_7) : : "memory");
            from += 1;
            tap += 8;
            __asm__ volatile("" : "+r"(from), "+r"(tap) : : "memory");
        }
    }
    const int32_t sums[16] = {sum_0_0, sum_0_1, sum_0_2, sum_0_3, sum_0_4, sum_0_5, sum_0_6, sum_0_7, sum_1_0, sum_1_1, sum_1_2, sum_1_3, sum_1_4, sum_1_5, sum_1_6, sum_1_7};
    for (int32_t pixel = 0; pixel < 2; ++pixel) {
        for (int32_t lane = 0; lane < 8; ++lane) {
            const int32_t scaled = requantize_single(sums[pixel * 8 + lane], multiplier[0 + lane], shift[0 + lane], -128);
            output[place + pixel * 8 + 0 + lane] = (int8_t)saturate(scaled);
        }
    }
}

void digits_conv_1_kernel(int8_t *restrict output, const int8_t *restrict input,
                                 const int32_t *restrict bias, const int8_t *restrict weights,
                                 const uint32_t *restrict multiplier, const int8_t *restrict shift,
                                 const struct digits_conv_1_kernel_pixel_layer *restrict layer)
{
    for (int32_t row = 0; row < 8; ++row) {
        int32_t column = 0;
        if (row >= 1 && row < 7) {
            for (; column < 1; ++column) {
                digits_conv_1_kernel_pixel(output, input, layer, row, column);
            }
            for (; column < 7; column += 2) {
                digits_conv_1_kernel_pixels(output, input, bias, weights, multiplier, shift, row, column);
            }
        }
        for (; column < 8; ++column) {
            digits_conv_1_kernel_pixel(output, input, layer, row, column);
        }
    }
}

/* 2 neighbouring output columns, all taps inside the image. */
static void digits_conv_2_kernel_pixels(int8_t *restrict output, const int8_t *restrict input,
                                        const int32_t *restrict bias, const int8_t *restrict weights,
                                        const uint32_t *restrict multiplier, const int8_t *restrict shift,
                                        int32_t row, int32_t column)
{
    const int32_t top = row * 2;
    const int32_t left = column * 2;
    const int32_t place = (row * 4 + column) * 16;
    for (int32_t channel = 0; channel < 16; channel += 8) {
        int32_t sum_0_0 = bias[channel];
        int32_t sum_0_1 = bias[channel + 1];
        int32_t sum_0_2 = bias[channel + 2];
        int32_t sum_0_3 = bias[channel + 3];
        int32_t sum_0_4 = bias[channel + 4];
        int32_t sum_0_5 = bias[channel + 5];
        int32_t sum_0_6 = bias[channel + 6];
        int32_t sum_0_7 = bias[channel + 7];
        int32_t sum_1_0 = bias[channel];
        int32_t sum_1_1 = bias[channel + 1];
        int32_t sum_1_2 = bias[channel + 2];
        int32_t sum_1_3 = bias[channel + 3];
        int32_t sum_1_4 = bias[channel + 4];
        int32_t sum_1_5 = bias[channel + 5];
        int32_t sum_1_6 = bias[channel + 6];
        int32_t sum_1_7 = bias[channel + 7];
        for (int32_t kernel_row = 0; kernel_row < 3; ++kernel_row) {
            const int8_t *from = input + ((top + kernel_row) * 8 + left) * 8;
            const int8_t *tap = weights + channel * 72 + kernel_row * 3 * 64;
            const int8_t *const end = tap + 24 * 8;
            while (tap != end) {
                int32_t value_0 = from[0];
                int32_t value_1 = from[16];
                sum_0_0 += value_0 * tap[0];
                sum_1_0 += value_1 * tap[0];
                sum_0_1 += value_0 * tap[1];
                sum_1_1 += value_1 * tap[1];
                __asm__ volatile("" : "+r"(sum_0_0), "+r"(sum_1_0), "+r"(sum_0_1), "+r"(sum_1_1) : : "memory");
                sum_0_2 += value_0 * tap[2];
                sum_1_2 += value_1 * tap[2];
                sum_0_3 += value_0 * tap[3];
                sum_1_3 += value_1 * tap[3];
                __asm__ volatile("" : "+r"(sum_0_2), "+r"(sum_1_2), "+r"(sum_0_3), "+r"(sum_1_3) : : "memory");
                sum_0_4 += value_0 * tap[4];
                sum_1_4 += value_1 * tap[4];
                sum_0_5 += value_0 * tap[5];
                sum_1_5 += value_1 * tap[5];
                __asm__ volatile("" : "+r"(sum_0_4), "+r"(sum_1_4), "+r"(sum_0_5), "+r"(sum_1_5) : : "memory");
                sum_0_6 += value_0 * tap[6];
                sum_1_6 += value_1 * tap[6];
                sum_0_7 += value_0 * tap[7];
                sum_1_7 += value_1 * tap[7];
                __asm__ volatile("" : "+r"(sum_0_6), "+r"(sum_1_6), "+r"(sum_0_7), "+r"(sum_1_7) : : "memory");
                value_0 = from[1];
                value_1 = from[17];
                sum_0_0 += value_0 * tap[8];
                sum_1_0 += value_1 * tap[8];
                sum_0_1 += value_0 * tap[9];
                sum_1_1 += value_1 * tap[9];
                __asm__ volatile("" : "+r"(sum_0_0), "+r"(sum_1_0), "+r"(sum_0_1), "+r"(sum_1_1) : : "memory");
                sum_0_2 += value_0 * tap[10];
                sum_1_2 += value_1 * tap[10];
                sum_0_3 += value_0 * tap[11];
                sum_1_3 += value_1 * tap[11];
                __asm__ volatile("" : "+r"(sum_0_2), "+r"(sum_1_2), "+r"(sum_0_3), "+r"(sum_1_3) : : "memory");
                sum_0_4 += value_0 * tap[12];
                sum_1_4 += value_1 * tap[12];
                sum_0_5 += value_0 * tap[13];
                sum_1_5 += value_1 * tap[13];
                __asm__ volatile("" : "+r"(sum_0_4), "+r"(sum_1_4), "+r"(sum_0_5), "+r"(sum_1_5) : : "memory");
                sum_0_6 += value_0 * tap[14];
                sum_1_6 += value_1 * tap[14];
                sum_0_7 += value_0 * tap[15];
                sum_1_7 += value_1 * tap[15];
                __asm__ volatile("" : "+r"(sum_0_6), "+r"(sum_1_6), "+r"(sum_0_7), "+r"(sum_1_7) : : "memory");
                from += 2;
                tap += 16;
                __asm__ volatile("" : "+r"(from), "+r"(tap) : : "memory");
            }
        }
        const int32_t sums[16] = {sum_0_0, sum_0_1, sum_0_2, sum_0_3, sum_0_4, sum_0_5, sum_0_6, sum_0_7, sum_1_0, sum_1_1, sum_1_2, sum_1_3, sum_1_4, sum_1_5, sum_1_6, sum_1_7};
        for (int32_t pixel = 0; pixel < 2; ++pixel) {
            for (int32_t lane = 0; lane < 8; ++lane) {
                const int32_t scaled = requantize_single(sums[pixel * 8 + lane], multiplier[channel + lane], shift[channel + lane], -128);
                output[place + pixel * 16 + channel + lane] = (int8_t)saturate(scaled);
            }
        }
    }
}

void digits_conv_2_kernel(int8_t *restrict output, const int8_t *restrict input,
                                 const int32_t *restrict bias, const int8_t *restrict weights,
                                 const uint32_t *restrict multiplier, const int8_t *restrict shift,
                                 const struct digits_conv_1_kernel_pixel_layer *restrict layer)
{
    for (int32_t row = 0; row < 4; ++row) {
        int32_t column = 0;
        if (row >= 0 && row < 3) {
            for (; column < 2; column += 2) {
                digits_conv_2_kernel_pixels(output, input, bias, weights, multiplier, shift, row, column);
            }
        }
        for (; column < 4; ++column) {
            digits_conv_1_kernel_pixel(output, input, layer, row, column);
        }
    }
}

/* 4 columns from column 0, some taps outside the image. */
static void digits_depthwise_3_kernel_column_0(int8_t *restrict output, const int8_t *restrict input,
                                               const int8_t *restrict weights,
                                               const int32_t *restrict border_bias,
                                               const uint32_t *restrict multiplier,
                                               const int8_t *restrict shift, int32_t row)
{
    const int32_t column = 0;
    const int32_t top = row - 1;
    const int32_t first_row = first_tap(top, 1);
    const int32_t end_row = end_tap(top, 1, 3, 4);
    const int32_t left = column - 1;
    const int32_t place = (row * 4 + column) * 16;
    for (int32_t channel = 0; channel < 16; ++channel) {
        int32_t sum_0 = border_bias[channel];
        int32_t sum_1 = border_bias[channel];
        int32_t sum_2 = border_bias[channel];
        int32_t sum_3 = border_bias[channel];
        for (int32_t kernel_row = first_row; kernel_row < end_row; ++kernel_row) {
            const int8_t *from = input + ((top + kernel_row) * 4 + left + 1) * 16 + channel;
            const int8_t *tap = weights + (kernel_row * 3) * 16 + channel;
            const int32_t weight_0 = tap[0];
            const int32_t weight_1 = tap[16];
            const int32_t weight_2 = tap[32];
            int32_t value = from[0] + 128;
            sum_0 += value * weight_1;
            sum_1 += value * weight_0;
            in_order();
            value = from[16] + 128;
            sum_0 += value * weight_2;
            sum_1 += value * weight_1;
            sum_2 += value * weight_0;
            in_order();
            value = from[32] + 128;
            sum_1 += value * weight_2;
            sum_2 += value * weight_1;
            sum_3 += value * weight_0;
            in_order();
            value = from[48] + 128;
            sum_2 += value * weight_2;
            sum_3 += value * weight_1;
            in_order();
            sum_0 = held(sum_0);
            sum_1 = held(sum_1);
            sum_2 = held(sum_2);
            sum_3 = held(sum_3);
        }
        const int32_t sums[4] = {sum_0, sum_1, sum_2, sum_3};
        for (int32_t pixel = 0; pixel < 4; ++pixel) {
            const int32_t scaled = requantize_single(sums[pixel], multiplier[channel], shift[channel], -128);
            output[place + pixel * 16 + channel] = (int8_t)saturate(scaled);
        }
    }
}

void digits_depthwise_3_kernel(int8_t *restrict output, const int8_t *restrict input,
                                      const int8_t *restrict weights, const int32_t *restrict border_bias,
                                      const uint32_t *restrict multiplier, const int8_t *restrict shift)
{
    for (int32_t row = 0; row < 4; ++row) {
        digits_depthwise_3_kernel_column_0(output, input, weights, border_bias, multiplier, shift, row);
    }
}

/* 4 neighbouring output columns, all taps inside the image. */
static void digits_conv_4_kernel_pixels(int8_t *restrict output, const int8_t *restrict input,
                                        const int32_t *restrict bias, const int8_t *restrict weights,
                                        const uint32_t *restrict multiplier, const int8_t *restrict shift,
                                        int32_t column)
{
    const int32_t top = 0;
    const int32_t left = column;
    const int32_t place = column * 32;
    for (int32_t channel = 0; channel < 32; channel += 4) {
        int32_t sum_0_0 = bias[channel];
        int32_t sum_0_1 = bias[channel + 1];
        int32_t sum_0_2 = bias[channel + 2];
        int32_t sum_0_3 = bias[channel + 3];
        int32_t sum_1_0 = bias[channel];
        int32_t sum_1_1 = bias[channel + 1];
        int32_t sum_1_2 = bias[channel + 2];
        int32_t sum_1_3 = bias[channel + 3];
        int32_t sum_2_0 = bias[channel];
        int32_t sum_2_1 = bias[channel + 1];
        int32_t sum_2_2 = bias[channel + 2];
        int32_t sum_2_3 = bias[channel + 3];
        int32_t sum_3_0 = bias[channel];
        int32_t sum_3_1 = bias[channel + 1];
        int32_t sum_3_2 = bias[channel + 2];
        int32_t sum_3_3 = bias[channel + 3];
        const int8_t *from = input + (top * 16 + left) * 16;
        const int8_t *tap = weights + channel * 16;
        const int8_t *const end = tap + 16 * 4;
        while (tap != end) {
            int32_t value_0 = from[0];
            int32_t value_1 = from[16];
            int32_t value_2 = from[32];
            int32_t value_3 = from[48];
            sum_0_0 += value_0 * tap[0];
            sum_1_0 += value_1 * tap[0];
            sum_2_0 += value_2 * tap[0];
            sum_3_0 += value_3 * tap[0];
            __asm__ volatile("" : "+r"(sum_0_0), "+r"(sum_1_0), "+r"(sum_2_0), "+r"(sum_3_0) : : "memory");
            sum_0_1 += value_0 * tap[1];
            sum_1_1 += value_1 * tap[1];
            sum_2_1 += value_2 * tap[1];
            sum_3_1 += value_3 * tap[1];
            __asm__ volatile("" : "+r"(sum_0_1), "+r"(sum_1_1), "+r"(sum_2_1), "+r"(sum_3_1) : : "memory");
            sum_0_2 += value_0 * tap[2];
            sum_1_2 += value_1 * tap[2];
            sum_2_2 += value_2 * tap[2];
            sum_3_2 += value_3 * tap[2];
            __asm__ volatile("" : "+r"(sum_0_2), "+r"(sum_1_2), "+r"(sum_2_2), "+r"(sum_3_2) : : "memory");
            sum_0_3 += value_0 * tap[3];
            sum_1_3 += value_1 * tap[3];
            sum_2_3 += value_2 * tap[3];
            sum_3_3 += value_3 * tap[3];
            __asm__ volatile("" : "+r"(sum_0_3), "+r"(sum_1_3), "+r"(sum_2_3), "+r"(sum_3_3) : : "memory");
            value_0 = from[1];
            value_1 = from[17];
            value_2 = from[33];
            value_3 = from[49];
            sum_0_0 += value_0 * tap[4];
            sum_1_0 += value_1 * tap[4];
            sum_2_0 += value_2 * tap[4];
            sum_3_0 += value_3 * tap[4];
            __asm__ volatile("" : "+r"(sum_0_0), "+r"(sum_1_0), "+r"(sum_2_0), "+r"(sum_3_0) : : "memory");
            sum_0_1 += value_0 * tap[5];
            sum_1_1 += value_1 * tap[5];
            sum_2_1 += value_2 * tap[5];
            sum_3_1 += value_3 * tap[5];
            __asm__ volatile("" : "+r"(sum_0_1), "+r"(sum_1_1), "+r"(sum_2_1), "+r"(sum_3_1) : : "memory");
            sum_0_2 += value_0 * tap[6];
            sum_1_2 += value_1 * tap[6];
            sum_2_2 += value_2 * tap[6];
            sum_3_2 += value_3 * tap[6];
            __asm__ volatile("" : "+r"(sum_0_2), "+r"(sum_1_2), "+r"(sum_2_2), "+r"(sum_3_2) : : "memory");
            sum_0_3 += value_0 * tap[7];
            sum_1_3 += value_1 * tap[7];
            sum_2_3 += value_2 * tap[7];
            sum_3_3 += value_3 * tap[7];
            __asm__ volatile("" : "+r"(sum_0_3), "+r"(sum_1_3), "+r"(sum_2_3), "+r"(sum_3_3) : : "memory");
            from += 2;
            tap += 8;
            __asm__ volatile("" : "+r"(from), "+r"(tap) : : "memory");
        }
        const int32_t sums[16] = {sum_0_0, sum_0_1, sum_0_2, sum_0_3, sum_1_0, sum_1_1, sum_1_2, sum_1_3, sum_2_0, sum_2_1, sum_2_2, sum_2_3, sum_3_0, sum_3_1, sum_3_2, sum_3_3};
        for (int32_t pixel = 0; pixel < 4; ++pixel) {
            for (int32_t lane = 0; lane < 4; ++lane) {
                const int32_t scaled = requantize_single(sums[pixel * 4 + lane], multiplier[channel + lane], shift[channel + lane], -128);
                output[place + pixel * 32 + channel + lane] = (int8_t)saturate(scaled);
            }
        }
    }
}

void digits_conv_4_kernel(int8_t *restrict output, const int8_t *restrict input,
                                 const int32_t *restrict bias, const int8_t *restrict weights,
                                 const uint32_t *restrict multiplier, const int8_t *restrict shift)
{
    int32_t column = 0;
    for (; column < 16; column += 4) {
        digits_conv_4_kernel_pixels(output, input, bias, weights, multiplier, shift, column);
    }
}

/* 4 columns from column 0, some taps outside the image. */
static void digits_depthwise_5_kernel_column_0(int8_t *restrict output, const int8_t *restrict input,
                                               const int8_t *restrict weights,
                                               const int32_t *restrict border_bias,
                                               const uint32_t *restrict multiplier,
                                               const int8_t *restrict shift, int32_t row)
{
    const int32_t column = 0;
    const int32_t top = row - 1;
    const int32_t first_row = first_tap(top, 1);
    const int32_t end_row = end_tap(top, 1, 3, 4);
    const int32_t left = column - 1;
    const int32_t place = (row * 4 + column) * 32;
    for (int32_t channel = 0; channel < 32; ++channel) {
        int32_t sum_0 = border_bias[channel];
        int32_t sum_1 = border_bias[channel];
        int32_t sum_2 = border_bias[channel];
        int32_t sum_3 = border_bias[channel];
        for (int32_t kernel_row = first_row; kernel_row < end_row; ++kernel_row) {
            const int8_t *from = input + ((top + kernel_row) * 4 + left + 1) * 32 + channel;
            const int8_t *tap = weights + (kernel_row * 3) * 32 + channel;
            const int32_t weight_0 = tap[0];
            const int32_t weight_1 = tap[32];
            const int32_t weight_2 = tap[64];
            int32_t value = from[0] + 128;
            sum_0 += value * weight_1;
            sum_1 += value * weight_0;
            in_order();
            value = from[32] + 128;
            sum_0 += value * weight_2;
            sum_1 += value * weight_1;
            sum_2 += value * weight_0;
            in_order();
            value = from[64] + 128;
            sum_1 += value * weight_2;
            sum_2 += value * weight_1;
            sum_3 += value * weight_0;
            in_order();
            value = from[96] + 128;
            sum_2 += value * weight_2;
            sum_3 += value * weight_1;
            in_order();
            sum_0 = held(sum_0);
            sum_1 = held(sum_1);
            sum_2 = held(sum_2);
            sum_3 = held(sum_3);
        }
        const int32_t sums[4] = {sum_0, sum_1, sum_2, sum_3};
        for (int32_t pixel = 0; pixel < 4; ++pixel) {
            const int32_t scaled = requantize_single(sums[pixel], multiplier[channel], shift[channel], -128);
            output[place + pixel * 32 + channel] = (int8_t)saturate(scaled);
        }
    }
}

void digits_depthwise_5_kernel(int8_t *restrict output, const int8_t *restrict input,
                                      const int8_t *restrict weights, const int32_t *restrict border_bias,
                                      const uint32_t *restrict multiplier, const int8_t *restrict shift)
{
    for (int32_t row = 0; row < 4; ++row) {
        digits_depthwise_5_kernel_column_0(output, input, weights, border_bias, multiplier, shift, row);
    }
}

/* 4 neighbouring output columns, all taps inside the image. */
static void digits_conv_6_kernel_pixels(int8_t *restrict output, const int8_t *restrict input,
                                        const int32_t *restrict bias, const int8_t *restrict weights,
                                        const uint32_t *restrict multiplier, const int8_t *restrict shift,
                                        int32_t column)
{
    const int32_t top = 0;
    const int32_t left = column;
    const int32_t place = column * 32;
    for (int32_t channel = 0; channel < 32; channel += 4) {
        int32_t sum_0_0 = bias[channel];
        int32_t sum_0_1 = bias[channel + 1];
        int32_t sum_0_2 = bias[channel + 2];
        int32_t sum_0_3 = bias[channel + 3];
        int32_t sum_1_0 = bias[channel];
        int32_t sum_1_1 = bias[channel + 1];
        int32_t sum_1_2 = bias[channel + 2];
        int32_t sum_1_3 = bias[channel + 3];
        int32_t sum_2_0 = bias[channel];
        int32_t sum_2_1 = bias[channel + 1];
        int32_t sum_2_2 = bias[channel + 2];
        int32_t sum_2_3 = bias[channel + 3];
        int32_t sum_3_0 = bias[channel];
        int32_t sum_3_1 = bias[channel + 1];
        int32_t sum_3_2 = bias[channel + 2];
        int32_t sum_3_3 = bias[channel + 3];
        const int8_t *from = input + (top * 16 + left) * 32;
        const int8_t *tap = weights + channel * 32;
        const int8_t *const end = tap + 32 * 4;
        while (tap != end) {
            int32_t value_0 = from[0];
            int32_t value_1 = from[32];
            int32_t value_2 = from[64];
            int32_t value_3 = from[96];
            sum_0_0 += value_0 * tap[0];
            sum_1_0 += value_1 * tap[0];
            sum_2_0 += value_2 * tap[0];
            sum_3_0 += value_3 * tap[0];
            __asm__ volatile("" : "+r"(sum_0_0), "+r"(sum_1_0), "+r"(sum_2_0), "+r"(sum_3_0) : : "memory");
            sum_0_1 += value_0 * tap[1];
            sum_1_1 += value_1 * tap[1];
            sum_2_1 += value_2 * tap[1];
            sum_3_1 += value_3 * tap[1];
            __asm__ volatile("" : "+r"(sum_0_1), "+r"(sum_1_1), "+r"(sum_2_1), "+r"(sum_3_1) : : "memory");
            sum_0_2 += value_0 * tap[2];
            sum_1_2 += value_1 * tap[2];
            sum_2_2 += value_2 * tap[2];
            sum_3_2 += value_3 * tap[2];
            __asm__ volatile("" : "+r"(sum_0_2), "+r"(sum_1_2), "+r"(sum_2_2), "+r"(sum_3_2) : : "memory");
            sum_0_3 += value_0 * tap[3];
            sum_1_3 += value_1 * tap[3];
            sum_2_3 += value_2 * tap[3];
            sum_3_3 += value_3 * tap[3];
            __asm__ volatile("" : "+r"(sum_0_3), "+r"(sum_1_3), "+r"(sum_2_3), "+r"(sum_3_3) : : "memory");
            value_0 = from[1];
            value_1 = from[33];
            value_2 = from[65];
            value_3 = from[97];
            sum_0_0 += value_0 * tap[4];
            sum_1_0 += value_1 * tap[4];
            sum_2_0 += value_2 * tap[4];
            sum_3_0 += value_3 * tap[4];
            __asm__ volatile("" : "+r"(sum_0_0), "+r"(sum_1_0), "+r"(sum_2_0), "+r"(sum_3_0) : : "memory");
            sum_0_1 += value_0 * tap[5];
            sum_1_1 += value_1 * tap[5];
            sum_2_1 += value_2 * tap[5];
            sum_3_1 += value_3 * tap[5];
            __asm__ volatile("" : "+r"(sum_0_1), "+r"(sum_1_1), "+r"(sum_2_1), "+r"(sum_3_1) : : "memory");
            sum_0_2 += value_0 * tap[6];
            sum_1_2 += value_1 * tap[6];
            sum_2_2 += value_2 * tap[6];
            sum_3_2 += value_3 * tap[6];
            __asm__ volatile("" : "+r"(sum_0_2), "+r"(sum_1_2), "+r"(sum_2_2), "+r"(sum_3_2) : : "memory");
            sum_0_3 += value_0 * tap[7];
            sum_1_3 += value_1 * tap[7];
            sum_2_3 += value_2 * tap[7];
            sum_3_3 += value_3 * tap[7];
            __asm__ volatile("" : "+r"(sum_0_3), "+r"(sum_1_3), "+r"(sum_2_3), "+r"(sum_3_3) : : "memory");
            from += 2;
            tap += 8;
            __asm__ volatile("" : "+r"(from), "+r"(tap) : : "memory");
        }
        const int32_t sums[16] = {sum_0_0, sum_0_1, sum_0_2, sum_0_3, sum_1_0, sum_1_1, sum_1_2, sum_1_3, sum_2_0, sum_2_1, sum_2_2, sum_2_3, sum_3_0, sum_3_1, sum_3_2, sum_3_3};
        for (int32_t pixel = 0; pixel < 4; ++pixel) {
            for (int32_t lane = 0; lane < 4; ++lane) {
                const int32_t scaled = requantize_single(sums[pixel * 4 + lane], multiplier[channel + lane], shift[channel + lane], -128);
                output[place + pixel * 32 + channel + lane] = (int8_t)saturate(scaled);
            }
        }
    }
}

void digits_conv_6_kernel(int8_t *restrict output, const int8_t *restrict input,
                                 const int32_t *restrict bias, const int8_t *restrict weights,
                                 const uint32_t *restrict multiplier, const int8_t *restrict shift)
{
    int32_t column = 0;
    for (; column < 16; column += 4) {
        digits_conv_6_kernel_pixels(output, input, bias, weights, multiplier, shift, column);
    }
}

void digits_average_pool_7_kernel(int8_t *restrict output, const int8_t *restrict input)
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
        const int8_t *from = input + (top * 4 + left) * 32 + channel;
        for (int32_t tap = 0; tap < 16; tap += 4) {
            __builtin_memcpy(words, __builtin_assume_aligned(from, 4), 8);
            words[0] ^= 0x80808080u;
            even_0 += words[0] & 0xFF00FFu;
            odd_0 += words[0] >> 8;
            words[1] ^= 0x80808080u;
            even_1 += words[1] & 0xFF00FFu;
            odd_1 += words[1] >> 8;
            from += 32;
            __builtin_memcpy(words, __builtin_assume_aligned(from, 4), 8);
            words[0] ^= 0x80808080u;
            even_0 += words[0] & 0xFF00FFu;
            odd_0 += words[0] >> 8;
            words[1] ^= 0x80808080u;
            even_1 += words[1] & 0xFF00FFu;
            odd_1 += words[1] >> 8;
            from += 32;
            __builtin_memcpy(words, __builtin_assume_aligned(from, 4), 8);
            words[0] ^= 0x80808080u;
            even_0 += words[0] & 0xFF00FFu;
            odd_0 += words[0] >> 8;
            words[1] ^= 0x80808080u;
            even_1 += words[1] & 0xFF00FFu;
            odd_1 += words[1] >> 8;
            from += 32;
            __builtin_memcpy(words, __builtin_assume_aligned(from, 4), 8);
            words[0] ^= 0x80808080u;
            even_0 += words[0] & 0xFF00FFu;
            odd_0 += words[0] >> 8;
            words[1] ^= 0x80808080u;
            even_1 += words[1] & 0xFF00FFu;
            odd_1 += words[1] >> 8;
            from += 32;
        }
        odd_0 -= even_0 >> 8 & 0xFFFF00u;
        odd_1 -= even_1 >> 8 & 0xFFFF00u;
        const int32_t sums[8] = {((int32_t)(even_0 & 0xFFFFu) - 2048), ((int32_t)(odd_0 & 0xFFFFu) - 2048), ((int32_t)(even_0 >> 16) - 2048), ((int32_t)(odd_0 >> 16) - 2048), ((int32_t)(even_1 & 0xFFFFu) - 2048), ((int32_t)(odd_1 & 0xFFFFu) - 2048), ((int32_t)(even_1 >> 16) - 2048), ((int32_t)(odd_1 >> 16) - 2048)};
        for (int32_t lane = 0; lane < 8; ++lane) {
            output[place + channel + lane] = (int8_t)divide_rounded(sums[lane], 16);
        }
    }
}

void digits_dense_9_kernel(int8_t *restrict output, const int8_t *restrict input,
                                  const int32_t *restrict bias, const int8_t *restrict weights,
                                  const uint32_t *restrict multiplier, const int8_t *restrict shift)
{
    const int32_t top = 0;
    const int32_t left = 0;
    const int32_t place = 0;
    int32_t sum_0 = bias[0];
    int32_t sum_1 = bias[0 + 1];
    int32_t sum_2 = bias[0 + 2];
    int32_t sum_3 = bias[0 + 3];
    int32_t sum_4 = bias[0 + 4];
    int32_t sum_5 = bias[0 + 5];
    int32_t sum_6 = bias[0 + 6];
    int32_t sum_7 = bias[0 + 7];
    int32_t sum_8 = bias[0 + 8];
    int32_t sum_9 = bias[0 + 9];
    const int8_t *from = input + (top + left) * 32;
    const int8_t *tap = weights + 0 * 32;
    const int8_t *const end = tap + 32 * 10;
    while (tap != end) {
        int32_t value = from[0];
        sum_0 += value * tap[0];
        sum_1 += value * tap[1];
        sum_2 += value * tap[2];
        sum_3 += value * tap[3];
        __asm__ volatile("" : "+r"(sum_0), "+r"(sum_1), "+r"(sum_2), "+r"(sum_3) : : "memory");
        sum_4 += value * tap[4];
        sum_5 += value * tap[5];
        sum_6 += value * tap[6];
        sum_7 += value * tap[7];
        __asm__ volatile("" : "+r"(sum_4), "+r"(sum_5), "+r"(sum_6), "+r"(sum_7) : : "memory");
        sum_8 += value * tap[8];
        sum_9 += value * tap[9];
        value = from[1];
        sum_0 += value * tap[10];
        sum_1 += value * tap[11];
        __asm__ volatile("" : "+r"(sum_8), "+r"(sum_9), "+r"(sum_0), "+r"(sum_1) : : "memory");
        sum_2 += value * tap[12];
        sum_3 += value * tap[13];
        sum_4 += value * tap[14];
        sum_5 += value * tap[15];
        __asm__ volatile("" : "+r"(sum_2), "+r"(sum_3), "+r"(sum_4), "+r"(sum_5) : : "memory");
        sum_6 += value * tap[16];
        sum_7 += value * tap[17];
        sum_8 += value * tap[18];
        sum_9 += value * tap[19];
        __asm__ volatile("" : "+r"(sum_6), "+r"(sum_7), "+r"(sum_8), "+r"(sum_9) : : "memory");
        from += 2;
        tap += 20;
        __asm__ volatile("" : "+r"(from), "+r"(tap) : : "memory");
    }
    const int32_t sums[10] = {sum_0, sum_1, sum_2, sum_3, sum_4, sum_5, sum_6, sum_7, sum_8, sum_9};
    for (int32_t lane = 0; lane < 10; ++lane) {
        const int32_t scaled = requantize_single(sums[lane], multiplier[place + 0 + lane], shift[place + 0 + lane], 22);
        output[place + 0 + lane] = (int8_t)saturate(scaled);
    }
}

void digits_softmax_10_kernel(int8_t *restrict output, const int8_t *restrict input,
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
