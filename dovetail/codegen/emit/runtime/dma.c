#include "dma.h"

#include "dovetail_rt.h"

#ifndef DOVETAIL_HOST

/* Registers of one DMA (dovetail/simulate/dma.py). */
typedef struct {
    uint32_t source, target, row_bytes, rows, source_row_stride, target_row_stride;
    uint32_t planes, source_plane_stride, target_plane_stride, fill, pad_rows, pad_bytes;
    uint32_t start, done, status;
} dma_registers;

static volatile dma_registers *registers(void)
{
    return (volatile dma_registers *)(uintptr_t)DOVETAIL_DMA_BASE;
}

/* Waits for a free place in the queue, starts, and reads the number of transfers started so far. */
static uint32_t start(volatile dma_registers *dma, uint32_t dimensions)
{
    while (dma->status == 0u) {
        (void)dma->done; /* lets the next end raise an interrupt */
        if (dma->status == 0u) {
            dovetail_wait_for_interrupt();
        }
    }
    dovetail_compiler_barrier();
    dma->start = dimensions;
    return dma->start;
}

static volatile dma_registers *set_1d(void *target, const void *source, uint32_t row_bytes)
{
    volatile dma_registers *dma = registers();
    dma->source = (uint32_t)(uintptr_t)source;
    dma->target = (uint32_t)(uintptr_t)target;
    dma->row_bytes = row_bytes;
    return dma;
}

static void set_2d(volatile dma_registers *dma, uint32_t rows, uint32_t target_row_stride, uint32_t source_row_stride)
{
    dma->rows = rows;
    dma->source_row_stride = source_row_stride;
    dma->target_row_stride = target_row_stride;
}

static void set_3d(volatile dma_registers *dma, uint32_t planes, uint32_t target_plane_stride,
                   uint32_t source_plane_stride)
{
    dma->planes = planes;
    dma->source_plane_stride = source_plane_stride;
    dma->target_plane_stride = target_plane_stride;
}

uint32_t dma_copy_1d(void *target, const void *source, uint32_t bytes)
{
    return start(set_1d(target, source, bytes), 1u);
}

uint32_t dma_copy_2d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                     uint32_t source_row_stride)
{
    volatile dma_registers *dma = set_1d(target, source, row_bytes);
    set_2d(dma, rows, target_row_stride, source_row_stride);
    return start(dma, 2u);
}

uint32_t dma_copy_3d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                     uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride,
                     uint32_t source_plane_stride)
{
    volatile dma_registers *dma = set_1d(target, source, row_bytes);
    set_2d(dma, rows, target_row_stride, source_row_stride);
    set_3d(dma, planes, target_plane_stride, source_plane_stride);
    return start(dma, 3u);
}

uint32_t dma_copy_pad(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                      uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride,
                      uint32_t source_plane_stride, const dma_padding *padding)
{
    volatile dma_registers *dma = set_1d(target, source, row_bytes);
    set_2d(dma, rows, target_row_stride, source_row_stride);
    set_3d(dma, planes, target_plane_stride, source_plane_stride);
    dma->fill = padding->fill;
    dma->pad_rows = (uint32_t)padding->top << 16 | padding->bottom;
    dma->pad_bytes = (uint32_t)padding->left << 16 | padding->right;
    return start(dma, 4u);
}

/* Reading `done` lowers the interrupt line first, so a transfer that ends after it wakes the core again. The
   difference is taken modulo 2^32: both counters wrap. */
void dma_wait(uint32_t ticket)
{
    volatile dma_registers *dma = registers();
    while (((dma->done - ticket) & 0x80000000u) != 0u) {
        dovetail_wait_for_interrupt();
    }
    dovetail_compiler_barrier();
}

void dma_acknowledge(void)
{
    (void)registers()->done;
}

#else /* on the host: the copies themselves, finished at once */

uint32_t dma_copy_1d(void *target, const void *source, uint32_t bytes)
{
    return dma_copy_2d(target, source, bytes, 1u, bytes, bytes);
}

uint32_t dma_copy_2d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                     uint32_t source_row_stride)
{
    return dma_copy_3d(target, source, row_bytes, rows, target_row_stride, source_row_stride, 1u, 0u, 0u);
}

uint32_t dma_copy_3d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                     uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride,
                     uint32_t source_plane_stride)
{
    static const dma_padding none = {0u, 0u, 0u, 0u, 0u};
    return dma_copy_pad(target, source, row_bytes, rows, target_row_stride, source_row_stride, planes,
                        target_plane_stride, source_plane_stride, &none);
}

uint32_t dma_copy_pad(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                      uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride,
                      uint32_t source_plane_stride, const dma_padding *padding)
{
    static uint32_t issued = 0u;
    const uint32_t width = padding->left + row_bytes + padding->right;
    const uint32_t height = padding->top + rows + padding->bottom;
    for (uint32_t plane = 0; plane < planes; plane++) {
        uint8_t *to = (uint8_t *)target + (uintptr_t)plane * target_plane_stride;
        const uint8_t *from = (const uint8_t *)source + (uintptr_t)plane * source_plane_stride;
        for (uint32_t row = 0; row < height; row++, to += target_row_stride) {
            const uint32_t inside = row - padding->top < rows ? row_bytes : 0u;
            for (uint32_t byte = 0; byte < width; byte++) {
                const uint32_t at = byte - padding->left;
                to[byte] = at < inside ? from[at] : padding->fill;
            }
            from += inside != 0u ? source_row_stride : 0u;
        }
    }
    return ++issued;
}

void dma_wait(uint32_t ticket)
{
    (void)ticket;
}

void dma_acknowledge(void)
{
}

#endif
