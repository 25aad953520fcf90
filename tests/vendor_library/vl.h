/* An int8 library with awkward rules, for tests. Channels come in fours everywhere: images are [H][W][C4], weights
   [KH][KW][I4][O4], [KH][KW][C4] or [I4][O4], parameters per channel [O4], where X4 is X rounded up to a multiple of 4.
   What lies beyond the last channel is 0 in constants and may be anything elsewhere. Functions return 0, or 1 for what
   they do not take. */
#ifndef VL_H
#define VL_H

#include <stdint.h>

typedef struct {
    int32_t height, width, channels; /* of the operand */
    int32_t rows, columns, outputs;  /* of the result */
} vl_shape;

typedef struct {
    int32_t rows, columns;              /* of the kernel */
    int32_t row_stride, column_stride;
    int32_t top, left;                  /* padding, with the zero point */
} vl_window;

typedef struct {
    int32_t zero_in, zero_out, low, high;
    const int32_t *multiplier;
    const int32_t *shift;
} vl_scaling;

/* Bytes a convolution needs: a patch as int16 and a sum for every output. */
int32_t vl_conv_scratch(const vl_shape *shape, const vl_window *window);
int32_t vl_conv(const vl_shape *shape, const vl_window *window, const vl_scaling *scaling, const int8_t *image,
                const int8_t *weights, const int32_t *bias, void *scratch, int8_t *result);
int32_t vl_depthwise(const vl_shape *shape, const vl_window *window, const vl_scaling *scaling, const int8_t *image,
                     const int8_t *weights, const int32_t *bias, int8_t *result);
int32_t vl_dense(int32_t inputs, int32_t outputs, const vl_scaling *scaling, const int8_t *vector,
                 const int8_t *weights, const int32_t *bias, int8_t *result);

/* Convolutions that are only noted down, and done by vl_wait: at most 4 at a time. They return a ticket, vl_wait what the
   first that failed returned. */
uint32_t vl_conv_start(const vl_shape *shape, const vl_window *window, const vl_scaling *scaling, const int8_t *image,
                       const int8_t *weights, const int32_t *bias, void *scratch, int8_t *result);
int32_t vl_wait(uint32_t ticket);
void vl_reset(uint32_t ticket);

#endif
