#ifndef DIGITS_H
#define DIGITS_H

/* digits: inference with static memory, for vta, made for speed. */
/* The model's own requantisations round once, as in ONNX Runtime. */
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DIGITS_DOVETAIL_VERSION "VERSION"

extern uint8_t digits_dram[4672]; /* buffers in DRAM */

/* input 'input': int8[1x1x8x8], row-major */
#define DIGITS_INPUT_0_ELEMENTS 64
#define DIGITS_INPUT_0 ((int8_t *)(void *)(digits_dram + 1600))
#define DIGITS_INPUT_0_SCALE 0.00392156886f /* real number = scale * (integer - zero point) */
#define DIGITS_INPUT_0_ZERO_POINT (-128)

static inline int8_t digits_quantize_input_0(float number)
{
    float steps = number / DIGITS_INPUT_0_SCALE;
    steps = steps > 0.0f ? steps : 0.0f; /* what is no number is the lowest too */
    steps = steps < 255.0f ? steps : 255.0f;
    steps = (steps + 12582912.0f) - 12582912.0f; /* to the nearest integer, ties to even; not with -ffast-math */
    return (int8_t)((int32_t)steps + DIGITS_INPUT_0_ZERO_POINT);
}

/* output 'output': int8[1x10], row-major */
#define DIGITS_OUTPUT_0_ELEMENTS 10
#define DIGITS_OUTPUT_0 ((int8_t *)(void *)(digits_dram + 64))
#define DIGITS_OUTPUT_0_SCALE 0.00390625f /* real number = scale * (integer - zero point) */
#define DIGITS_OUTPUT_0_ZERO_POINT (-128)

static inline float digits_dequantize_output_0(int8_t integer)
{
    return (float)((int32_t)integer - DIGITS_OUTPUT_0_ZERO_POINT) * DIGITS_OUTPUT_0_SCALE;
}

/* Bytes of stack digits_run needs at most, with a main that only calls it, interrupts apart: by the
   frames of zig 0.17.1 for code made for speed; other compilers have others. */
#define DIGITS_STACK_BYTES 224u

/* Computes the outputs from the inputs. Not reentrant; inputs may be overwritten. */
void digits_run(void);

#ifdef __cplusplus
}
#endif

#endif
