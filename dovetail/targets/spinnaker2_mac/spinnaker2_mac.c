#include "spinnaker2_mac.h"

#include "dovetail_rt.h"

/* Byte offsets of the registers. */
enum { START = 0x00, FINISHED = 0x04, JOB = 0x10 };
/* Words of a task: those of the array's job for a row, then what belongs to the layer. */
enum {
    IMAGE, WEIGHTS, SUMS, IMAGE_ROW, COLUMNS, OUTPUTS, INPUTS, KERNEL_ROWS, KERNEL_COLUMNS, STRIDE, KIND, IS_UNSIGNED,
    ROW_STRIDE, JOB_WORDS, ROWS = JOB_WORDS, RESULT, PARAMETERS, ZERO, LOW, HIGH, ONCE
};

static uint32_t sums_of(const uint32_t *task, uint32_t row)
{
    return task[SUMS] + (row & 1u) * task[COLUMNS] * task[OUTPUTS] * 4u;
}

static void begin(const uint32_t *task, const uint8_t *constants, uint32_t row)
{
    for (uint32_t word = 0; word < JOB_WORDS; ++word) {
        uint32_t value = task[word];
        if (word == IMAGE) {
            value += row * task[ROW_STRIDE] * task[IMAGE_ROW];
        } else if (word == WEIGHTS) {
            value += (uint32_t)(uintptr_t)constants;
        } else if (word == SUMS) {
            value = sums_of(task, row);
        }
        dovetail_mmio_write(SPINNAKER2_MAC_BASE + JOB + 4u * word, value);
    }
    dovetail_compiler_barrier();
    dovetail_mmio_write(SPINNAKER2_MAC_BASE + START, 1u);
}

/* What a channel has: bias less zero points, multiplier, and a shift to the left before the product or to the right behind. */
typedef struct {
    int32_t folded, multiplier, left, right;
} channel_t;

/* sum * multiplier * 2^(left - right - 31), rounded once. */
static inline int32_t scaled_once(int32_t sum, const channel_t *own)
{
    const int32_t total = 31 + own->right - own->left;
    return (int32_t)(((int64_t)sum * own->multiplier + ((int64_t)1 << (total - 1))) >> total);
}

/* The same rounded twice, as TensorFlow Lite Micro does: halves up, then halves away from zero. */
static inline int32_t scaled_twice(int32_t sum, const channel_t *own)
{
    const int32_t raised = (int32_t)((uint32_t)sum << own->left);
    const int32_t high = (int32_t)(((int64_t)raised * own->multiplier + 0x40000000) >> 31);
    if (own->right == 0) {
        return high;
    }
    /* (high + half, less 1 where negative) >> right, by halves so that nothing leaves 32 bits */
    const int32_t twice = (high + (high >> 31)) >> (own->right - 1);
    return (twice >> 1) + (twice & 1);
}

/* The core's part of a row: folded zero points and biases, requantisation, limits. */
static void finish(const uint32_t *task, const uint8_t *constants, uint32_t row)
{
    const channel_t *const first = (const channel_t *)(const void *)(constants + task[PARAMETERS]);
    const channel_t *const end = first + task[OUTPUTS];
    const uint32_t once = task[ONCE];
    const int32_t zero = (int32_t)task[ZERO];
    const int32_t low = (int32_t)task[LOW];
    const int32_t high = (int32_t)task[HIGH];
    const int32_t *sums = (const int32_t *)(uintptr_t)sums_of(task, row);
    uint8_t *result = (uint8_t *)(uintptr_t)task[RESULT] + row * task[COLUMNS] * task[OUTPUTS];
    for (uint32_t left = task[COLUMNS]; left > 0u; --left) {
        for (const channel_t *own = first; own != end; ++own) {
            const int32_t sum = (int32_t)((uint32_t)*sums++ + (uint32_t)own->folded);
            int32_t value = (once != 0u ? scaled_once(sum, own) : scaled_twice(sum, own)) + zero;
            value = value < low ? low : value;
            *result++ = (uint8_t)(value > high ? high : value);
        }
    }
}

void spinnaker2_mac_layer(const uint32_t *task, const uint8_t *constants)
{
    uint32_t finished = dovetail_mmio_read(SPINNAKER2_MAC_BASE + FINISHED);
    begin(task, constants, 0);
    for (uint32_t row = 0; row < task[ROWS]; ++row) {
        ++finished;
        while (dovetail_mmio_read(SPINNAKER2_MAC_BASE + FINISHED) != finished) {
            dovetail_wait_for_interrupt();
        }
        dovetail_compiler_barrier();
        if (row + 1u < task[ROWS]) {
            begin(task, constants, row + 1u);
        }
        finish(task, constants, row);
    }
}
