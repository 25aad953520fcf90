#include "vl.h"

static int32_t fours(int32_t channels)
{
    return (channels + 3) / 4 * 4;
}

/* The product with multiplier * 2**(shift - 31), rounded twice as TensorFlow Lite Micro does. */
static int8_t scaled(int32_t sum, const vl_scaling *scaling, int32_t channel)
{
    int32_t shift = scaling->shift[channel];
    int64_t raised = (int64_t)sum * (shift > 0 ? (int64_t)1 << shift : 1);
    int64_t high = (raised * scaling->multiplier[channel] + ((int64_t)1 << 30)) >> 31;
    if (shift < 0) {
        int64_t mask = ((int64_t)1 << -shift) - 1;
        high = (high >> -shift) + ((high & mask) > (mask >> 1) + (high < 0 ? 1 : 0) ? 1 : 0);
    }
    high += scaling->zero_out;
    return (int8_t)(high < scaling->low ? scaling->low : high > scaling->high ? scaling->high : high);
}

int32_t vl_conv_scratch(const vl_shape *shape, const vl_window *window)
{
    return window->rows * window->columns * fours(shape->channels) * 2 + fours(shape->outputs) * 4;
}

/* The operand's elements under the kernel at a place, zero point taken off. */
static void gather(const vl_shape *shape, const vl_window *window, int32_t zero, const int8_t *image, int32_t row,
                   int32_t column, int16_t *patch)
{
    int32_t depth = fours(shape->channels);
    for (int32_t a = 0; a < window->rows; ++a) {
        for (int32_t b = 0; b < window->columns; ++b) {
            int32_t y = row * window->row_stride - window->top + a;
            int32_t x = column * window->column_stride - window->left + b;
            int inside = y >= 0 && y < shape->height && x >= 0 && x < shape->width;
            for (int32_t c = 0; c < depth; ++c) {
                int used = inside && c < shape->channels;
                *patch++ = (int16_t)(used ? image[(y * shape->width + x) * depth + c] - zero : 0);
            }
        }
    }
}

int32_t vl_conv(const vl_shape *shape, const vl_window *window, const vl_scaling *scaling, const int8_t *image,
                const int8_t *weights, const int32_t *bias, void *scratch, int8_t *result)
{
    int32_t outputs = fours(shape->outputs);
    int32_t taps = window->rows * window->columns * fours(shape->channels);
    int32_t *sums = (int32_t *)scratch;
    int16_t *patch = (int16_t *)(void *)(sums + outputs);
    if (scratch == 0) {
        return 1;
    }
#ifdef VL_LAST /* the device is gone after so many convolutions */
    static uint32_t computed;
    if (computed++ == VL_LAST) {
        return -19;
    }
#endif
    for (int32_t place = 0; place < shape->rows * shape->columns; ++place) {
        gather(shape, window, scaling->zero_in, image, place / shape->columns, place % shape->columns, patch);
        for (int32_t o = 0; o < outputs; ++o) {
            sums[o] = bias[o];
        }
        for (int32_t tap = 0; tap < taps; ++tap) {
            for (int32_t o = 0; o < outputs; ++o) {
                sums[o] += patch[tap] * weights[tap * outputs + o];
            }
        }
        for (int32_t o = 0; o < outputs; ++o) {
            *result++ = scaled(sums[o], scaling, o);
        }
    }
    return 0;
}

int32_t vl_depthwise(const vl_shape *shape, const vl_window *window, const vl_scaling *scaling, const int8_t *image,
                     const int8_t *weights, const int32_t *bias, int8_t *result)
{
    int32_t channels = fours(shape->channels);
    if (shape->channels != shape->outputs) {
        return 1;
    }
    for (int32_t place = 0; place < shape->rows * shape->columns; ++place) {
        int32_t top = place / shape->columns * window->row_stride - window->top;
        int32_t left = place % shape->columns * window->column_stride - window->left;
        for (int32_t c = 0; c < channels; ++c) {
            int32_t sum = bias[c];
            for (int32_t tap = 0; tap < window->rows * window->columns; ++tap) {
                int32_t y = top + tap / window->columns, x = left + tap % window->columns;
                if (y >= 0 && y < shape->height && x >= 0 && x < shape->width) {
                    int32_t value = image[(y * shape->width + x) * channels + c] - scaling->zero_in;
                    sum += value * weights[tap * channels + c];
                }
            }
            *result++ = scaled(sum, scaling, c);
        }
    }
    return 0;
}

int32_t vl_dense(int32_t inputs, int32_t outputs, const vl_scaling *scaling, const int8_t *vector,
                 const int8_t *weights, const int32_t *bias, int8_t *result)
{
    int32_t width = fours(outputs);
    for (int32_t o = 0; o < width; ++o) {
        int32_t sum = bias[o];
        for (int32_t i = 0; i < inputs; ++i) {
            sum += (vector[i] - scaling->zero_in) * weights[i * width + o];
        }
        result[o] = scaled(sum, scaling, o);
    }
    return 0;
}

typedef struct {
    const vl_shape *shape;
    const vl_window *window;
    const vl_scaling *scaling;
    const int8_t *image, *weights;
    const int32_t *bias;
    void *scratch;
    int8_t *result;
} job;

static job jobs[4];
static uint32_t begun, done;
static int32_t status; /* of the first that failed */

uint32_t vl_conv_start(const vl_shape *shape, const vl_window *window, const vl_scaling *scaling, const int8_t *image,
                       const int8_t *weights, const int32_t *bias, void *scratch, int8_t *result)
{
    if (begun - done == 4u) {
        (void)vl_wait(done + 1u);
    }
    jobs[begun % 4u] = (job){shape, window, scaling, image, weights, bias, scratch, result};
    return ++begun;
}

int32_t vl_wait(uint32_t ticket)
{
    while (ticket - done - 1u < 4u) {
        const job *next = &jobs[done % 4u];
        int32_t result = vl_conv(next->shape, next->window, next->scaling, next->image, next->weights, next->bias,
                                 next->scratch, next->result);
        status = status == 0 ? result : status;
        ++done;
    }
    return status;
}

void vl_reset(uint32_t ticket)
{
    done = ticket;
    status = 0;
}
