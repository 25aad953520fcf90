#include "copy.h"

/* The usual row: a block of 16 channels of a byte. */
#define BLOCK 16u

/* Rows of one block, word by word where all addresses are multiples of four. */
static void copy_blocks(uint8_t *to, const uint8_t *from, uint32_t rows, uint32_t target_stride,
                        uint32_t source_stride)
{
    const uintptr_t all = (uintptr_t)to | (uintptr_t)from | target_stride | source_stride;
    if ((all & 3u) != 0u) {
        for (; rows != 0u; rows--, to += target_stride, from += source_stride) {
            __builtin_memcpy(to, from, BLOCK);
        }
        return;
    }
    for (; rows != 0u; rows--, to += target_stride, from += source_stride) {
        __builtin_memcpy(__builtin_assume_aligned(to, 4), __builtin_assume_aligned(from, 4), BLOCK);
    }
}

/* Rows of less than a word. */
static void copy_few(uint8_t *to, const uint8_t *from, uint32_t row_bytes, uint32_t rows, uint32_t target_stride,
                     uint32_t source_stride)
{
    for (; rows != 0u; rows--, to += target_stride, from += source_stride) {
        to[0] = from[0];
        if (row_bytes > 1u) {
            to[1] = from[1];
        }
        if (row_bytes > 2u) {
            to[2] = from[2];
        }
    }
}

void copy_1d(void *target, const void *source, uint32_t bytes)
{
    __builtin_memcpy(target, source, bytes);
}

void copy_2d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
             uint32_t source_row_stride)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    if (row_bytes == BLOCK) {
        copy_blocks(to, from, rows, target_row_stride, source_row_stride);
        return;
    }
    if (row_bytes != 0u && row_bytes < 4u) {
        copy_few(to, from, row_bytes, rows, target_row_stride, source_row_stride);
        return;
    }
    for (; rows != 0u; rows--, to += target_row_stride, from += source_row_stride) {
        __builtin_memcpy(to, from, row_bytes);
    }
}

void copy_3d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
             uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride, uint32_t source_plane_stride)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    for (; planes != 0u; planes--, to += target_plane_stride, from += source_plane_stride) {
        copy_2d(to, from, row_bytes, rows, target_row_stride, source_row_stride);
    }
}

void copy_pad(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
              uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride, uint32_t source_plane_stride,
              const copy_padding *padding)
{
    uint8_t *inner = (uint8_t *)target + (uintptr_t)padding->top * target_row_stride + padding->left;
    copy_fill_border(target, row_bytes, rows, target_row_stride, planes, target_plane_stride, padding);
    copy_3d(inner, source, row_bytes, rows, target_row_stride, source_row_stride, planes, target_plane_stride,
            source_plane_stride);
}

static void fill(uint8_t *to, uint32_t bytes, uint32_t rows, uint32_t stride, int value)
{
    for (; rows != 0u && bytes != 0u; rows--, to += stride) {
        __builtin_memset(to, value, bytes);
    }
}

void copy_fill_border(void *target, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride, uint32_t planes,
                      uint32_t target_plane_stride, const copy_padding *padding)
{
    const uint32_t width = padding->left + row_bytes + padding->right;
    const uintptr_t stride = target_row_stride;
    uint8_t *plane = target;
    for (; planes != 0u; planes--, plane += target_plane_stride) {
        uint8_t *beside = plane + padding->top * stride;
        fill(plane, width, padding->top, target_row_stride, padding->fill);
        fill(beside, padding->left, rows, target_row_stride, padding->fill);
        fill(beside + padding->left + row_bytes, padding->right, rows, target_row_stride, padding->fill);
        fill(beside + rows * stride, width, padding->bottom, target_row_stride, padding->fill);
    }
}
