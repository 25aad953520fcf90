/* Strided copies by the core, for chips without a DMA. Strides are byte distances between starts; source and target do
   not overlap. */
#ifndef DOVETAIL_COPY_H
#define DOVETAIL_COPY_H

#include <stdint.h>

/* What surrounds the copied rows in the target: every plane becomes top + rows + bottom rows of
   left + row_bytes + right bytes, and what is not copied is filled with the byte `fill`. */
typedef struct {
    uint32_t top, bottom, left, right;
    uint8_t fill;
} copy_padding;

void copy_1d(void *target, const void *source, uint32_t bytes);

void copy_2d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
             uint32_t source_row_stride);

void copy_3d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
             uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride, uint32_t source_plane_stride);

/* As copy_3d, where the bytes behind a row, up to a multiple of four, mean nothing: they may be changed. */
void copy_into_blocks(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                      uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride,
                      uint32_t source_plane_stride);

/* `target` is the first byte of the padding; `source` the first real byte. */
void copy_pad(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
              uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride, uint32_t source_plane_stride,
              const copy_padding *padding);

/* Fills the padding alone; rows x row_bytes within it are left as they are. */
void copy_fill_border(void *target, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride, uint32_t planes,
                      uint32_t target_plane_stride, const copy_padding *padding);

#endif
