/* Driver of the DMA. Transfers run in the order they are started; up to 16 may be outstanding, one more start waits.

   Every copy returns a ticket at once; dma_wait(ticket) returns when it, and all before it, have finished.
   Neither source nor target may be touched in between. Strides are byte distances between starts. */
#ifndef DOVETAIL_DMA_H
#define DOVETAIL_DMA_H

#include <stdint.h>

#ifndef DOVETAIL_DMA_BASE
#define DOVETAIL_DMA_BASE 0x1A100000u /* address of its registers */
#endif

/* What surrounds the copied rows in the target: every plane becomes top + rows + bottom rows of
   left + row_bytes + right bytes, and what is not copied is filled with the byte `fill`. */
typedef struct {
    uint16_t top, bottom, left, right;
    uint8_t fill;
} dma_padding;

uint32_t dma_copy_1d(void *target, const void *source, uint32_t bytes);

uint32_t dma_copy_2d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                     uint32_t source_row_stride);

uint32_t dma_copy_3d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                     uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride,
                     uint32_t source_plane_stride);

/* `target` is the first byte of the padding; `source` the first real byte. */
uint32_t dma_copy_pad(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                      uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride,
                      uint32_t source_plane_stride, const dma_padding *padding);

/* Waits asleep until the transfer with this ticket has finished. */
void dma_wait(uint32_t ticket);

/* Lowers the DMA's interrupt line, so that whoever waits for another device sleeps and does not spin. Transfers are
   counted: nothing is lost. */
void dma_acknowledge(void);

#endif
