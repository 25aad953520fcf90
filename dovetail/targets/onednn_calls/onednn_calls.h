/* Layers of int8 on oneDNN, with the requantisation of TensorFlow Lite Micro. */
#ifndef ONEDNN_CALLS_H
#define ONEDNN_CALLS_H

#include <stdint.h>

/* A convolution of images in rows of pixels; a dense layer is one of 1x1 over images of one pixel. Weights lie in rows
   of taps, weights_group to weights_column elements apart from one group, output, input, row or column to the next.
   Multipliers and shifts are one per output channel. */
typedef struct {
    int32_t images, height, width, channels, rows, columns, outputs, groups;
    int32_t kernel_rows, kernel_columns, stride_down, stride_right, dilation_down, dilation_right;
    int32_t top, bottom, left, right;
    int32_t weights_group, weights_output, weights_input, weights_row, weights_column;
    int32_t zero_in, zero_out, low, high;
} onednn_layer;

/* Sums by oneDNN, without the bias, in `sums` (int32, the result's shape); then bias, requantisation and limits.

   Returns 0; 1 where oneDNN failed; 2 where this processor has no instructions that add products of bytes in 32 bits
   (AVX-VNNI, AVX512-VNNI): without them oneDNN's sums are not exact; 3 where there are more than ONEDNN_LAYERS. */
int32_t onednn_convolution(const onednn_layer *layer, const int8_t *x, const int8_t *weights, const int32_t *bias,
                           const int32_t *multiplier, const int32_t *shift, int32_t *sums, int8_t *result);

#endif
