//@ in_order
/* Loads after this stay after it: without it compilers load far ahead and run out of registers. */
static inline void in_order(void)
{
    __asm__ volatile("" ::: "memory");
}

//@ held
/* The value, finished here: without it compilers put the work off to where the value is used, and spill. */
static inline int32_t held(int32_t value)
{
    __asm__ volatile("" : "+r"(value) : : "memory");
    return value;
}

//@ clip
/* The value limited to [low, high]; most values are inside, which one comparison modulo 2^32 finds. */
static inline int32_t clip(int32_t value, int32_t low, int32_t high)
{
    if (__builtin_expect((uint32_t)value - (uint32_t)low > (uint32_t)high - (uint32_t)low, 0)) {
        return value < low ? low : high;
    }
    return value;
}

//@ halved
/* value / 2, rounded to nearest (halves up), plus zero_point: one addition before the shift where SSAT, which shifts
   too, comes after it; elsewhere the addition behind it goes into the limits of `clip`. */
static inline int32_t halved(int32_t value, int32_t zero_point)
{
#if defined(__ARM_FEATURE_SAT)
    return (value + 2 * zero_point + 1) >> 1;
#else
    return ((value + 1) >> 1) + zero_point;
#endif
}

//@ saturate: clip
/* The value limited to int8. */
static inline int32_t saturate(int32_t value)
{
#if defined(__ARM_FEATURE_SAT)
    return (int32_t)__builtin_arm_ssat(value, 8);
#else
    return clip(value, -128, 127);
#endif
}

//@ bytes_of_halves: clip
/* The halves of a register limited to uint8. */
static inline uint32_t bytes_of_halves(uint32_t halves)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    uint32_t limited;
    __asm__("usat16 %0, #8, %1" : "=r"(limited) : "r"(halves));
    return limited;
#else
    const uint32_t low = (uint32_t)clip((int16_t)(uint16_t)halves, 0, 255);
    return low | ((uint32_t)clip((int16_t)(uint16_t)(halves >> 16), 0, 255) << 16);
#endif
}

//@ line_of
/* ((sum * 2^raise + addition) * factor) / 2^32, rounded down; plus `gain` where that is not below zero. */
static inline int32_t line_of(int32_t sum, int32_t raise, int32_t addition, int32_t factor, int32_t gain)
{
    const int32_t raised = (int32_t)((uint32_t)sum << raise) + addition;
    return (int32_t)(((int64_t)raised * factor) >> 32) + (gain & ~(raised >> 31));
}

//@ four_bytes: bytes_of_halves
/* Four numbers in Q16.16, rounded down and limited to int8, as the bytes of a word. `centre` is added to both halves. */
static inline uint32_t four_bytes(int32_t first, int32_t second, int32_t third, int32_t fourth, uint32_t centre)
{
    uint32_t even = ((uint32_t)third & 0xFFFF0000u) | ((uint32_t)first >> 16);
    uint32_t odd = ((uint32_t)fourth & 0xFFFF0000u) | ((uint32_t)second >> 16);
    if (centre != 0u) {
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
        __asm__("sadd16 %0, %1, %2" : "=r"(even) : "r"(even), "r"(centre));
        __asm__("sadd16 %0, %1, %2" : "=r"(odd) : "r"(odd), "r"(centre));
#else
        even = ((even + (centre & 0xFFFFu)) & 0xFFFFu) | ((even & 0xFFFF0000u) + (centre & 0xFFFF0000u));
        odd = ((odd + (centre & 0xFFFFu)) & 0xFFFFu) | ((odd & 0xFFFF0000u) + (centre & 0xFFFF0000u));
#endif
    }
    return (bytes_of_halves(even) | (bytes_of_halves(odd) << 8)) ^ 0x80808080u;
}

//@ narrow_sums: line_of four_bytes
/* Sums of so many pixels to int8, by `line_of` and 128 less; four channels at a time, whose `size` numbers are four
   additions and four factors (and, with 12, four gains). `centre` is what both halves gain before they are limited. */
static inline void narrow_sums(int8_t *to, const int32_t *from, int32_t pixels, int32_t channels, const int32_t *numbers,
                               int32_t size, int32_t raise, uint32_t centre)
{
    int32_t channel = 0;
    for (; channel < channels - 3; channel += 4, numbers += size) {
        const int32_t add_0 = numbers[0], add_1 = numbers[1], add_2 = numbers[2], add_3 = numbers[3];
        const int32_t by_0 = numbers[4], by_1 = numbers[5], by_2 = numbers[6], by_3 = numbers[7];
        const int32_t gain_0 = size > 8 ? numbers[8] : 0, gain_1 = size > 8 ? numbers[9] : 0;
        const int32_t gain_2 = size > 8 ? numbers[10] : 0, gain_3 = size > 8 ? numbers[11] : 0;
        const int32_t *sum = from + channel;
        const int32_t *const end = sum + pixels * channels;
        int8_t *place = to + channel;
        do {
            const int32_t first = sum[0], second = sum[1], third = sum[2], fourth = sum[3];
            const uint32_t word = four_bytes(line_of(first, raise, add_0, by_0, gain_0),
                                             line_of(second, raise, add_1, by_1, gain_1),
                                             line_of(third, raise, add_2, by_2, gain_2),
                                             line_of(fourth, raise, add_3, by_3, gain_3), centre);
            __builtin_memcpy(place, &word, 4);
            sum += channels;
            place += channels;
        } while (sum != end);
    }
    for (int32_t lane = 0; channel < channels; ++channel, ++lane) {
        for (int32_t pixel = 0; pixel < pixels; ++pixel) {
            const int32_t gain = size > 8 ? numbers[8 + lane] : 0;
            const int32_t line = line_of(from[pixel * channels + channel], raise, numbers[lane], numbers[4 + lane], gain);
            to[pixel * channels + channel] = (int8_t)four_bytes(line, 0, 0, 0, centre);
        }
    }
}

//@ add_bytes: saturate
/* (left * first + right * second + offset) / 2^21, rounded down and limited to int8, of so many pairs. */
static inline void add_bytes(int8_t *to, const int8_t *left, const int8_t *right, int32_t count, int32_t first,
                             int32_t second, int32_t offset)
{
    for (int32_t index = 0; index < count; ++index) {
        to[index] = (int8_t)saturate((left[index] * first + right[index] * second + offset) >> 21);
    }
}

//@ add_by_table
/* limited[(left * first + right * second + offset) / 2^shift], rounded down, of so many pairs. Written out, as a sum
   takes few instructions; loads before the stores, which may be to where an operand is. */
static inline void add_by_table(int8_t *to, const int8_t *left, const int8_t *right, int32_t count, int32_t first,
                                int32_t second, int32_t offset, int32_t shift, const int8_t *limited)
{
    int32_t index = 0;
    for (; index < count - 31; index += 32) {
#if defined(__clang__)
#pragma clang loop unroll(full)
#endif
        for (int32_t lane = index; lane < index + 32; lane += 4) {
            const int32_t place_0 = (left[lane] * first + right[lane] * second + offset) >> shift;
            const int32_t place_1 = (left[lane + 1] * first + right[lane + 1] * second + offset) >> shift;
            const int32_t place_2 = (left[lane + 2] * first + right[lane + 2] * second + offset) >> shift;
            const int32_t place_3 = (left[lane + 3] * first + right[lane + 3] * second + offset) >> shift;
            to[lane] = limited[place_0];
            to[lane + 1] = limited[place_1];
            to[lane + 2] = limited[place_2];
            to[lane + 3] = limited[place_3];
        }
    }
    for (; index < count; ++index) {
        to[index] = limited[(left[index] * first + right[index] * second + offset) >> shift];
    }
}

//@ quantize_bytes: held
/* So many floats to 8 bits: a word for each value of a float's bits less `rest` of them, found by where those of its sign
   and exponent start. A word holds the value, less what bits are known, and what makes the others carry into it from a
   step on; those of negative floats are turned round, as they fall with the mantissa. */
static inline void quantize_bytes(uint8_t *to, const float *from, int32_t count, const int32_t *starts,
                                  const uint32_t *words, int32_t rest)
{
    int32_t index = 0;
    for (; index < count - 15; index += 16) {
#if defined(__clang__)
#pragma clang loop unroll(full)
#endif
        for (int32_t lane = index; lane < index + 16; lane += 4) {
            uint32_t bits[4], word[4];
            __builtin_memcpy(bits, from + lane, 16);
            for (int32_t at = 0; at < 4; ++at) {
                word[at] = words[held(starts[bits[at] >> 23] + (int32_t)(bits[at] >> rest))];
            }
            for (int32_t at = 0; at < 4; ++at) {
                to[lane + at] = (uint8_t)((word[at] + (bits[at] ^ (uint32_t)((int32_t)bits[at] >> 31))) >> rest);
            }
        }
    }
    for (; index < count; ++index) {
        uint32_t bits;
        __builtin_memcpy(&bits, from + index, 4);
        const uint32_t word = words[starts[bits >> 23] + (int32_t)(bits >> rest)];
        to[index] = (uint8_t)((word + (bits ^ (uint32_t)((int32_t)bits >> 31))) >> rest);
    }
}

//@ add_low_low
/* sum + the lower 16 bits of left * the lower of right, signed. */
static inline int32_t add_low_low(int32_t sum, uint32_t left, uint32_t right)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    __asm__("smlabb %0, %1, %2, %0" : "+r"(sum) : "r"(left), "r"(right));
    return sum;
#else
    return sum + (int16_t)left * (int16_t)right;
#endif
}

//@ add_low_high
/* sum + the lower 16 bits of left * the upper of right, signed. */
static inline int32_t add_low_high(int32_t sum, uint32_t left, uint32_t right)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    __asm__("smlabt %0, %1, %2, %0" : "+r"(sum) : "r"(left), "r"(right));
    return sum;
#else
    return sum + (int16_t)left * ((int32_t)right >> 16);
#endif
}

//@ add_high_low
/* sum + the upper 16 bits of left * the lower of right, signed. */
static inline int32_t add_high_low(int32_t sum, uint32_t left, uint32_t right)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    __asm__("smlatb %0, %1, %2, %0" : "+r"(sum) : "r"(left), "r"(right));
    return sum;
#else
    return sum + ((int32_t)left >> 16) * (int16_t)right;
#endif
}

//@ add_high_high
/* sum + the upper 16 bits of left * the upper of right, signed. */
static inline int32_t add_high_high(int32_t sum, uint32_t left, uint32_t right)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    __asm__("smlatt %0, %1, %2, %0" : "+r"(sum) : "r"(left), "r"(right));
    return sum;
#else
    return sum + ((int32_t)left >> 16) * ((int32_t)right >> 16);
#endif
}

//@ lower_halves
/* The lower 16 bits of both, those of the first below. */
static inline uint32_t lower_halves(uint32_t first, uint32_t second)
{
    return (first & 0xFFFFu) | second << 16;
}

//@ upper_halves
/* The upper 16 bits of both, those of the first below. */
static inline uint32_t upper_halves(uint32_t first, uint32_t second)
{
    return first >> 16 | (second & 0xFFFF0000u);
}

//@ clip_wide
/* The 64-bit value limited to [low, high]. */
static inline int32_t clip_wide(int64_t value, int32_t low, int32_t high)
{
    const int64_t raised = value < low ? low : value;
    return (int32_t)(raised > high ? high : raised);
}

//@ multiply_add
/* sum + left * right, which fits: for cores with an instruction for it. */
static inline int32_t multiply_add(int32_t sum, int32_t left, int32_t right)
{
    return sum + left * right;
}

//@ wrap_add
/* The sum modulo 2^32. */
static inline int32_t wrap_add(int32_t left, int32_t right)
{
    return (int32_t)((uint32_t)left + (uint32_t)right);
}

//@ wrap_shift
/* value * 2^bits modulo 2^32. */
static inline int32_t wrap_shift(int32_t value, int32_t bits)
{
    return (int32_t)((uint32_t)value << bits);
}

//@ multiply_high
/* left * right / 2^31, rounded to nearest (halves up); not both are -2^31. */
static inline int32_t multiply_high(int32_t left, int32_t right)
{
    return (int32_t)(((int64_t)left * right + 0x40000000) >> 31);
}

//@ round_shift
/* value / 2^right, rounded to nearest, halves away from zero. */
static inline int32_t round_shift(int32_t value, int32_t right)
{
    const int32_t mask = (int32_t)((1u << right) - 1u);
    const int32_t threshold = (mask >> 1) + (value < 0);
    return (value >> right) + ((value & mask) > threshold);
}

//@ round_up_shift
/* value / 2^right, rounded to nearest, halves up; value + 2^(right - 1) must fit, right be at least 1. */
static inline uint32_t round_up_shift(uint32_t value, int32_t right)
{
    return (value + (1u << (right - 1))) >> right;
}

//@ requantize_double: halved multiply_upper
/* value * multiplier * 2^(-33 - shift), rounded twice as gemmlowp does: the product to its upper word, then the
   shift by 1 + shift with halves away from zero; plus zero_point. Registers of 64 bits hold it all: both halves are added
   to the product, and less by 1 in the units between the shifts for values below 0. */
static inline int32_t requantize_double(int32_t value, uint32_t multiplier, int32_t shift, int32_t zero_point)
{
#if defined(__riscv_xlen) && __riscv_xlen == 64
    const int64_t halves = ((int64_t)1 << 30) + ((int64_t)1 << (31 + shift)), product = value * (int64_t)(multiplier >> 1);
    return (int32_t)((product + (value & -0x80000000LL) + halves) >> (32 + shift)) + zero_point;
#else
    const int32_t high = multiply_upper(value, multiplier);
    return halved((high + (high >> 31)) >> shift, zero_point);
#endif
}

//@ requantize_rectified: halved multiply_upper
/* As requantize_double for a value of at least 0, of which both roundings are upwards; zero_point or less for one below.
   Twice the value must fit. */
static inline int32_t requantize_rectified(int32_t value, uint32_t multiplier, int32_t shift, int32_t zero_point)
{
#if defined(__ARM_FEATURE_DSP)
    return halved(multiply_upper(value, multiplier) >> shift, zero_point);
#else
    return halved((((int32_t)(((int64_t)(value * 2) * (int64_t)multiplier) >> 32) + 1) >> 1) >> shift, zero_point);
#endif
}

//@ multiply_upper
/* value * multiplier * 2^-32, rounded once (halves up), for a multiplier of at least 2^31. Arm's SMMLAR takes it as
   multiplier - 2^32 and adds the value: (2^32 * value + value * (multiplier - 2^32) + 2^31) / 2^32. */
static inline int32_t multiply_upper(int32_t value, uint32_t multiplier)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    int32_t high;
    __asm__("smmlar %0, %1, %2, %1" : "=r"(high) : "r"(value), "r"(multiplier));
    return high;
#else
    const int64_t product = (int64_t)value * (int64_t)multiplier;
    return (int32_t)(product >> 32) + (int32_t)((uint32_t)product >> 31);
#endif
}

//@ multiply_add_upper
/* The upper 32 of the 64 bits of left * right, plus addend. */
static inline int32_t multiply_add_upper(int32_t left, int32_t right, int32_t addend)
{
#if defined(__ARM_FEATURE_DSP) && !defined(DOVETAIL_HOST)
    int32_t sum;
    __asm__("smmla %0, %1, %2, %3" : "=r"(sum) : "r"(left), "r"(right), "r"(addend));
    return sum;
#else
    return (int32_t)(((int64_t)left * right) >> 32) + addend;
#endif
}

//@ requantize_near: multiply_upper
/* value * multiplier * 2^(-32 - shift), rounded twice as gemmlowp does, for a shift of at least 1 and values with
   |value| + 2^(shift - 1) below 2^31: for cores that add, round and shift at once. */
static inline int32_t requantize_near(int32_t value, uint32_t multiplier, int32_t shift)
{
    const int32_t high = multiply_upper(value, multiplier);
    return (high + (high >> 31) + (1 << (shift - 1))) >> shift;
}

//@ requantize_double_any: wrap_shift multiply_high
/* value * multiplier * 2^(shift - 31), rounded twice as gemmlowp does; a positive shift comes first. */
static inline int32_t requantize_double_any(int32_t value, int32_t multiplier, int32_t shift)
{
    const int32_t high = multiply_high(shift > 0 ? wrap_shift(value, shift) : value, multiplier);
    return shift < 0 ? (((high + (high >> 31)) >> (-1 - shift)) + 1) >> 1 : high;
}

//@ requantize_double_any_shift: wrap_shift multiply_upper
/* value * multiplier * 2^(shift - 32), rounded twice as gemmlowp does; a positive shift comes first. */
static inline int32_t requantize_double_any_shift(int32_t value, uint32_t multiplier, int32_t shift)
{
    const int32_t high = multiply_upper(shift > 0 ? wrap_shift(value, shift) : value, multiplier);
    return shift < 0 ? (((high + (high >> 31)) >> (-1 - shift)) + 1) >> 1 : high;
}

//@ requantize_single: halved
/* value * multiplier * 2^(-33 - shift), rounded once (halves up); plus zero_point. */
static inline int32_t requantize_single(int32_t value, uint32_t multiplier, int32_t shift, int32_t zero_point)
{
    const int64_t product = (int64_t)value * (int64_t)multiplier;
    return halved((int32_t)(product >> 32) >> shift, zero_point);
}

//@ requantize_single_any: halved
/* value * multiplier * 2^(shift - 31), rounded once (halves up). */
static inline int32_t requantize_single_any(int32_t value, int32_t multiplier, int32_t shift)
{
    const int64_t product = (int64_t)value * multiplier;
    const int32_t right = 31 - shift;
#if UINTPTR_MAX > 0xFFFFFFFFu
    return (int32_t)((product + ((int64_t)1 << (right - 1))) >> right);
#else
    const int32_t high = (int32_t)(product >> 32);
    const uint32_t low = (uint32_t)product;
    if (right > 32) {
        return halved(high >> (right - 33), 0);
    }
    const uint32_t whole = right < 32 ? (uint32_t)high << (32 - right) | low >> right : (uint32_t)high;
    return (int32_t)(whole + (low >> (right - 1) & 1u));
#endif
}

//@ requantize_down
/* value * multiplier * 2^-right, rounded down. */
static inline int32_t requantize_down(int32_t value, int32_t multiplier, int32_t right)
{
    return (int32_t)(((int64_t)value * multiplier) >> right);
}

//@ requantize_away
/* value * multiplier * 2^-right, rounded to the nearest (halves away from zero). */
static inline int32_t requantize_away(int32_t value, int32_t multiplier, int32_t right)
{
    const int64_t product = (int64_t)value * multiplier;
    return (int32_t)((product + ((int64_t)1 << (right - 1)) - (product < 0)) >> right);
}

//@ requantize_float32: round_even
/* value * scale in float32, rounded to the nearest integer (halves to even), within 2^20 of 0. */
static inline int32_t requantize_float32(int32_t value, float scale)
{
    return round_even((float)value * scale, -1048576, 1048576);
}

//@ requantize_wide
/* value * multiplier * 2^-right for a value of 48 bits and a multiplier of 16, rounded once (halves up). */
static inline int32_t requantize_wide(int64_t value, int32_t multiplier, int32_t right)
{
    return (int32_t)((value * multiplier + ((int64_t)1 << (right - 1))) >> right);
}

//@ first_tap
/* The first kernel tap inside the image, for a window that begins at `start` (negative: before the image). */
static inline int32_t first_tap(int32_t start, int32_t dilation)
{
    return start < 0 ? (dilation - 1 - start) / dilation : 0;
}

//@ end_tap
/* One past the last kernel tap inside an image of `size`, for a window of `taps` that begins at `start`. */
static inline int32_t end_tap(int32_t start, int32_t dilation, int32_t taps, int32_t size)
{
    return start + (taps - 1) * dilation >= size ? (size - start + dilation - 1) / dilation : taps;
}

//@ divide_rounded
/* sum / count, rounded to nearest, halves away from zero. */
static inline int32_t divide_rounded(int32_t sum, int32_t count)
{
    return sum < 0 ? -((count / 2 - sum) / count) : (sum + count / 2) / count;
}

//@ double_saturating
/* value * 2, limited to 32 bits. */
static inline int32_t double_saturating(int32_t value)
{
    const int32_t limited = value > 0x3FFFFFFF ? 0x3FFFFFFF : (value < -0x40000000 ? -0x40000000 : value);
    return limited * 2 + (value > 0x3FFFFFFF);
}

//@ softmax_reciprocal: multiply_high double_saturating
/* 1 / sum as a Q0.31 factor, for a positive sum raised to [2^31, 2^32): Newton's division in Q2.29. */
static inline int32_t softmax_reciprocal(uint32_t raised)
{
    const int32_t half = (int32_t)(raised >> 1);
    int32_t estimate = 1515870810 + multiply_high(half, -1010580540);
    for (int32_t round = 0; round < 3; ++round) {
        const int32_t error = 0x20000000 - multiply_high(half, estimate);
        estimate += double_saturating(double_saturating(multiply_high(estimate, error)));
    }
    return double_saturating(estimate);
}

//@ round_even
/* The nearest integer, halves to even, after limiting to [low, high] with both within 2^22: adding 1.5 * 2^23
   leaves no room for a fraction, so the addition itself rounds. */
static inline int32_t round_even(float value, int32_t low, int32_t high)
{
    const float raised = value > (float)low ? value : (float)low;
    const float limited = raised < (float)high ? raised : (float)high;
    const float shifted = limited + 12582912.0f;
    return (int32_t)(shifted - 12582912.0f);
}

//@ divide_integers
/* left / right rounded towards zero, modulo 2^64; 0 where the divisor is 0. */
static inline int64_t divide_integers(int64_t left, int64_t right)
{
    if (right == -1) {
        return (int64_t)(0u - (uint64_t)left);
    }
    return right == 0 ? 0 : left / right;
}

//@ power_of_integers
/* base to the power of exponent modulo 2^64; rounded towards zero where that is negative, 0 where base is 0 then. */
static inline int64_t power_of_integers(int64_t base, int64_t exponent)
{
    uint64_t result = 1u;
    uint64_t factor = (uint64_t)base;
    if (exponent < 0) {
        return base == 1 ? 1 : (base == -1 ? 1 - 2 * (exponent & 1) : 0);
    }
    for (int64_t rest = exponent; rest > 0; rest >>= 1) {
        result = rest & 1 ? result * factor : result;
        factor *= factor;
    }
    return (int64_t)result;
}

//@ modulo_of_integers
/* What is left of `left` after whole multiples of `right`, with the sign of `right`; 0 where that is 0. */
static inline int64_t modulo_of_integers(int64_t left, int64_t right)
{
    const int64_t rest = right == 0 || right == -1 ? 0 : left % right;
    return rest != 0 && (rest < 0) != (right < 0) ? rest + right : rest;
}

//@ word_at
/* Four bytes at a multiple of four. */
static inline uint32_t word_at(const uint8_t *from)
{
    uint32_t word;
    __builtin_memcpy(&word, __builtin_assume_aligned(from, 4), 4);
    return word;
}

//@ last_live: word_at
/* One behind the last byte that is not 0, of those from `first` to `last`; `first` where there is none. A function of its
   own, so that its registers are none of the loops that call it. */
static __attribute__((noinline)) int32_t last_live(const uint8_t *lives, int32_t first, int32_t last)
{
    if ((((uintptr_t)lives | (uintptr_t)last) & 3u) == 0u) {
        while (last > first + 15 && (word_at(lives + last - 4) | word_at(lives + last - 8) |
                                     word_at(lives + last - 12) | word_at(lives + last - 16)) == 0u) {
            last -= 16;
        }
        while (last > first + 3 && word_at(lives + last - 4) == 0u) {
            last -= 4;
        }
    }
    while (last > first && lives[last - 1] == 0u) {
        --last;
    }
    return last;
}

//@ has_holes: word_at
/* Whether a byte is 0 of those, 0 or 1, from `first` to `last`. */
static inline int32_t has_holes(const uint8_t *lives, int32_t first, int32_t last)
{
    for (int32_t place = first; place < last; ++place) {
        if (((uintptr_t)(lives + place) & 3u) == 0u) {
            while (place < last - 3 && word_at(lives + place) == 0x01010101u) {
                place += 4;
            }
        }
        if (place < last && lives[place] == 0u) {
            return 1;
        }
    }
    return 0;
}

//@ gathered
/* An index counted from either end as one from the front, limited to [0, size). */
static inline int32_t gathered(int64_t index, int32_t size)
{
    const int64_t place = index < 0 ? index + size : index;
    return place < 0 ? 0 : (place >= size ? size - 1 : (int32_t)place);
}

//@ put_half
/* Writes a value as an int16_t. */
static inline void put_half(uint8_t *at, int32_t value)
{
    const int16_t half = (int16_t)value;
    __builtin_memcpy(at, &half, sizeof half);
}

//@ flip_signs
/* 64 bytes, aligned to 8, with their top bits inverted: int8 + 128 as uint8, and back. */
static inline void flip_signs(uint8_t *to, const uint8_t *from)
{
    uint32_t words[16];
    __builtin_memcpy(words, __builtin_assume_aligned(from, 8), 64);
    words[0] ^= 0x80808080u;
    words[1] ^= 0x80808080u;
    words[2] ^= 0x80808080u;
    words[3] ^= 0x80808080u;
    words[4] ^= 0x80808080u;
    words[5] ^= 0x80808080u;
    words[6] ^= 0x80808080u;
    words[7] ^= 0x80808080u;
    words[8] ^= 0x80808080u;
    words[9] ^= 0x80808080u;
    words[10] ^= 0x80808080u;
    words[11] ^= 0x80808080u;
    words[12] ^= 0x80808080u;
    words[13] ^= 0x80808080u;
    words[14] ^= 0x80808080u;
    words[15] ^= 0x80808080u;
    __builtin_memcpy(__builtin_assume_aligned(to, 8), words, 64);
}
