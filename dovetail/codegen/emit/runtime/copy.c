#include "copy.h"

/* The usual row: a block of 16 channels of a byte. */
#define BLOCK 16u
#define HALF 8u

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

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
/* The low three bytes of a word; `room` where the address is a multiple of four and a fourth may be written, else an even
 * one. */
static inline void put_three(uint8_t *to, uint32_t word, int room)
{
    const uint16_t low = (uint16_t)word;
    if (room) {
        __builtin_memcpy(__builtin_assume_aligned(to, 4), &word, 4u);
        return;
    }
    __builtin_memcpy(__builtin_assume_aligned(to, 2), &low, 2u);
    to[2] = (uint8_t)(word >> 16);
}

/* Four dense rows of three bytes from three words of an aligned source. */
static inline void put_threes(uint8_t *to, const uint8_t *from, uint32_t stride, int room)
{
    uint32_t words[3];
    __builtin_memcpy(words, __builtin_assume_aligned(from, 4), 12u);
    put_three(to, words[0], room);
    put_three(to + stride, (words[0] >> 24) | (words[1] << 8), room);
    put_three(to + (uintptr_t)2u * stride, (words[1] >> 16) | (words[2] << 16), room);
    put_three(to + (uintptr_t)3u * stride, words[2] >> 8, room);
}

/* Dense rows of three bytes, a few at once where the addresses allow it. Returns how many are left. */
static uint32_t copy_threes(uint8_t *to, const uint8_t *from, uint32_t rows, uint32_t stride, int room)
{
    const uintptr_t all = (uintptr_t)to | stride;
    if (((uintptr_t)from & 3u) != 0u || (all & 1u) != 0u) {
        return rows;
    }
    if (room && stride == BLOCK && (all & 3u) == 0u) {
        for (; rows >= 8u; rows -= 8u, from += 24, to += 8u * BLOCK) {
            put_threes(to, from, BLOCK, 1);
            put_threes(to + 4u * BLOCK, from + 12, BLOCK, 1);
        }
    }
    for (; rows >= 4u; rows -= 4u, from += 12, to += (uintptr_t)4u * stride) {
        put_threes(to, from, stride, 0);
    }
    return rows;
}
#else
static uint32_t copy_threes(uint8_t *to, const uint8_t *from, uint32_t rows, uint32_t stride, int room)
{
    (void)to;
    (void)from;
    (void)stride;
    (void)room;
    return rows;
}
#endif

/* Rows of three bytes; `room` where a fourth may be written behind each. */
static void copy_pixels(uint8_t *to, const uint8_t *from, uint32_t rows, uint32_t target_stride, uint32_t source_stride,
                        int room)
{
    const uint32_t left = (source_stride == 3u) ? copy_threes(to, from, rows, target_stride, room) : rows;
    to += (uintptr_t)(rows - left) * target_stride;
    from += (uintptr_t)(rows - left) * source_stride;
    for (rows = left; rows != 0u; rows--, to += target_stride, from += source_stride) {
        const uint8_t first = from[0], second = from[1], third = from[2];
        to[0] = first;
        to[1] = second;
        to[2] = third;
    }
}

/* Rows of less than a word; apart, so that longer ones save no registers for it. */
static __attribute__((noinline)) void copy_few(uint8_t *to, const uint8_t *from, uint32_t row_bytes, uint32_t rows, uint32_t target_stride,
                     uint32_t source_stride)
{
    if (row_bytes == 3u) {
        copy_pixels(to, from, rows, target_stride, source_stride, 0);
        return;
    }
    if (row_bytes == 2u) {
        for (; rows != 0u; rows--, to += target_stride, from += source_stride) {
            const uint8_t first = from[0], second = from[1];
            to[0] = first;
            to[1] = second;
        }
        return;
    }
    for (; source_stride == 1u && rows >= 4u; rows -= 4u, from += 4) { /* no sums for the addresses of one side */
        const uint8_t first = from[0], second = from[1], third = from[2], fourth = from[3];
        *to = first;
        *(to += target_stride) = second;
        *(to += target_stride) = third;
        *(to += target_stride) = fourth;
        to += target_stride;
    }
    for (; rows >= 4u; rows -= 4u) {
        const uint8_t first = *from, second = *(from += source_stride);
        const uint8_t third = *(from += source_stride), fourth = *(from += source_stride);
        from += source_stride;
        *to = first;
        *(to += target_stride) = second;
        *(to += target_stride) = third;
        *(to += target_stride) = fourth;
        to += target_stride;
    }
    for (; rows != 0u; rows--, to += target_stride, from += source_stride) {
        to[0] = from[0];
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

/* Dense pixels of three bytes from a plane of each; apart for the same reason. */
static __attribute__((noinline)) void copy_from_planes(uint8_t *to, const uint8_t *from, uint32_t pixels, uint32_t plane)
{
    const uint8_t *second = from + plane, *third = second + plane;
    for (; pixels >= 4u; pixels -= 4u, to += 12, from += 4, second += 4, third += 4) {
        for (uint32_t pixel = 0; pixel < 4u; pixel++) { /* written out by the compiler */
            const uint8_t red = from[pixel], green = second[pixel], blue = third[pixel];
            to[3u * pixel] = red;
            to[3u * pixel + 1u] = green;
            to[3u * pixel + 2u] = blue;
        }
    }
    for (; pixels != 0u; pixels--, to += 3) {
        to[0] = *from++;
        to[1] = *second++;
        to[2] = *third++;
    }
}

/* Rows of half a block, the many of them innermost; apart for the same reason. */
static __attribute__((noinline)) void copy_halves(uint8_t *to, const uint8_t *from, const uint32_t of_rows[3],
                                                  const uint32_t of_planes[3])
{
    const uint32_t *few = of_planes, *many = of_rows;
    if (of_rows[0] < of_planes[0]) {
        few = of_rows;
        many = of_planes;
    }
    const uint32_t target_stride = many[1], source_stride = many[2];
    const int whole = (((uintptr_t)to | (uintptr_t)from | few[1] | few[2] | target_stride | source_stride) & 3u) == 0u;
    for (uint32_t plane = 0; plane < few[0]; plane++) {
        uint8_t *into = to + (uintptr_t)plane * few[1];
        const uint8_t *out = from + (uintptr_t)plane * few[2];
        for (uint32_t row = many[0]; whole && row != 0u; row--, into += target_stride, out += source_stride) {
            __builtin_memcpy(__builtin_assume_aligned(into, 4), __builtin_assume_aligned(out, 4), HALF);
        }
        for (uint32_t row = many[0]; !whole && row != 0u; row--, into += target_stride, out += source_stride) {
            __builtin_memcpy(into, out, HALF);
        }
    }
}

void copy_3d(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
             uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride, uint32_t source_plane_stride)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    if (row_bytes < 3u && rows < planes) { /* long rows of single bytes take less than many */
        const uint32_t of_rows[3] = {rows, target_row_stride, source_row_stride};
        rows = planes, target_row_stride = target_plane_stride, source_row_stride = source_plane_stride;
        planes = of_rows[0], target_plane_stride = of_rows[1], source_plane_stride = of_rows[2];
    } else if (row_bytes == HALF) {
        const uint32_t of_rows[3] = {rows, target_row_stride, source_row_stride};
        const uint32_t of_planes[3] = {planes, target_plane_stride, source_plane_stride};
        copy_halves(to, from, of_rows, of_planes);
        return;
    }
    if (row_bytes == 1u && planes == 3u && target_row_stride == 3u && target_plane_stride == 1u &&
        source_row_stride == 1u) {
        copy_from_planes(to, from, rows, source_plane_stride);
        return;
    }
    for (; planes != 0u; planes--, to += target_plane_stride, from += source_plane_stride) {
        copy_2d(to, from, row_bytes, rows, target_row_stride, source_row_stride);
    }
}

void copy_into_blocks(void *target, const void *source, uint32_t row_bytes, uint32_t rows, uint32_t target_row_stride,
                      uint32_t source_row_stride, uint32_t planes, uint32_t target_plane_stride,
                      uint32_t source_plane_stride)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    if (row_bytes != 3u) {
        copy_3d(to, from, row_bytes, rows, target_row_stride, source_row_stride, planes, target_plane_stride,
                source_plane_stride);
        return;
    }
    for (; planes != 0u; planes--, to += target_plane_stride, from += source_plane_stride) {
        copy_pixels(to, from, rows, target_row_stride, source_row_stride, 1);
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

/* Blocks where all addresses are multiples of four. */
static void fill_blocks(uint8_t *to, uint32_t rows, uint32_t stride, int value)
{
    uint32_t words[BLOCK / 4u];
    __builtin_memset(words, value, BLOCK);
    for (; rows >= 2u; rows -= 2u) { /* a turn takes as long as two stores */
        __builtin_memcpy(__builtin_assume_aligned(to, 4), words, BLOCK);
        __builtin_memcpy(__builtin_assume_aligned(to += stride, 4), words, BLOCK);
        to += stride;
    }
    if (rows != 0u) {
        __builtin_memcpy(__builtin_assume_aligned(to, 4), words, BLOCK);
    }
}

static void fill(uint8_t *to, uint32_t bytes, uint32_t rows, uint32_t stride, int value)
{
    if ((rows == 1u || bytes == stride) && bytes % BLOCK == 0u) { /* rows of blocks side by side */
        rows *= bytes / BLOCK;
        bytes = stride = BLOCK;
    }
    if (bytes == BLOCK && (((uintptr_t)to | stride) & 3u) == 0u) {
        fill_blocks(to, rows, stride, value);
        return;
    }
    if (bytes < BLOCK) { /* a call for each takes longer */
        for (; rows != 0u; rows--, to += stride) {
            for (uint32_t place = 0; place < bytes; place++) {
                to[place] = (uint8_t)value;
            }
        }
        return;
    }
    for (; rows != 0u; rows--, to += stride) {
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
