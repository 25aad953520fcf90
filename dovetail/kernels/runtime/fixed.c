//@ leading_zeros
/* Zero bits before the first one of a value that is not 0. */
static inline int32_t leading_zeros(uint32_t value)
{
#if defined(__ARM_FEATURE_CLZ)
    return __builtin_clz(value);
#else
    int32_t count = 0;
    for (int32_t step = 16; step > 1; step /= 2) {
        if (value >> (32 - step) == 0u) {
            value <<= step;
            count += step;
        }
    }
    return count + (value < 0x80000000u);
#endif
}

//@ divide_fixed: wrap_shift multiply_high round_shift softmax_reciprocal leading_zeros
/* left / right * multiplier * 2^(shift - 31) of 9-bit integers, rounded as TFLite does; 0 as divisor counts as 1. */
static inline int32_t divide_fixed(int32_t left, int32_t right, int32_t multiplier, int32_t shift)
{
    const int32_t signed_left = right < 0 ? -left : left;
    const uint32_t divisor = right == 0 ? 1u : (uint32_t)(right < 0 ? -right : right);
    const int32_t over = leading_zeros(divisor);
    const int32_t twice = signed_left < 0 ? -2 * signed_left - 1 : 2 * signed_left;
    const int32_t headroom = leading_zeros((uint32_t)twice | 1u);
    const int32_t inverse = softmax_reciprocal(divisor << over);
    const int32_t quotient = multiply_high(wrap_shift(signed_left, headroom), inverse);
    const int32_t right_shift = 31 - over + headroom - shift;
    const int32_t limited = right_shift < 0 ? 0 : (right_shift > 31 ? 31 : right_shift);
    return round_shift(multiply_high(quotient, multiplier), limited);
}

//@ fixed_logarithm: multiply_high round_shift double_saturating softmax_reciprocal leading_zeros
/* log(value) in Q5.26 of a Q12.19 that is at least 1: a quotient of polynomials around the nearest power of two. */
static inline int32_t fixed_logarithm(int32_t value)
{
    const int32_t zeros = leading_zeros((uint32_t)value);
    const int32_t headroom = leading_zeros((uint32_t)multiply_high(value, 1518500250)) - 1;
    const int32_t first = double_saturating(multiply_high(value << (zeros - 1), 1518500250));
    const int64_t raised = (int64_t)value << headroom;
    const int32_t second = raised > 0x7FFFFFFF ? 0x7FFFFFFF : (int32_t)raised;
    const int32_t fraction = first < second ? first : second;
    const int32_t above = (12 - zeros) * 0x2000000 + 0x800000;
    const int32_t below = (12 - headroom) * 0x2000000 - 0x800000;
    const int32_t q = (fraction - 1805811301) * 2;
    const int32_t square = multiply_high(q, q);
    const int32_t numerator = multiply_high(q, fraction) + multiply_high(multiply_high(q, square), 117049297);
    const int32_t inner = multiply_high(square, 127690142) + 1057819769 + q;
    const int32_t half_sum = (int32_t)(((uint32_t)fraction + 1805811302u) >> 1);
    const int32_t denominator = multiply_high(half_sum, inner) + multiply_high(q, 638450708);
    const int32_t inverse = softmax_reciprocal((uint32_t)denominator + 0x80000000u);
    const int32_t power = multiply_high(above > below ? above : below, 1488522236);
    return double_saturating(power + multiply_high(round_shift(numerator, 6), inverse));
}

//@ multiply_near
/* left * right / 2^31, rounded to nearest (halves up), for |left| below 2^30. */
static inline int32_t multiply_near(int32_t left, int32_t right)
{
    const int64_t product = (int64_t)(left * 2) * right;
    return (int32_t)(product >> 32) + (int32_t)((uint32_t)product >> 31);
}

//@ inverse_root: multiply_near round_shift leading_zeros
/* 1 / sqrt(value) as a Q0.31 factor and a power of two: Newton's iteration in Q3.28, five rounds from 1 on. The first
   is written out: the cube of 1 is 1. */
static inline int32_t inverse_root(int32_t value, int32_t *shift)
{
    if (value <= 1) {
        return 0x7FFFFFFF;
    }
    const int32_t large = value >= 0x20000000;
    const int32_t known = large ? value / 4 : value;
    const int32_t pairs = (leading_zeros((uint32_t)known) - 1) / 2 - 1;
    const int32_t power = 11 + large - pairs;
    const int32_t half = round_shift((known << (2 * pairs)) >> 1, 1);
    int32_t root = (0x3000000 - ((half + 4) >> 3)) * 8;
    for (int32_t round = 1; round < 5; ++round) {
        const int32_t cube = multiply_near(multiply_near(root, root), root) * 64;
        root = (((3 * root + 8) >> 4) - multiply_near(half, cube)) * 8;
    }
    *shift = power > 0 ? -power : 0;
    return multiply_near(root, 1518500250) << (power < 0 ? -power : 0);
}

//@ between_16
/* A function of an int16 value, between the points of a table of 513. */
static inline int32_t between_16(const int16_t *table, int32_t value)
{
    const int32_t place = 256 + (value >> 7);
    return table[place] + (((table[place + 1] - table[place]) * (value & 127) + 64) >> 7);
}

//@ sigmoid_16
/* The sigmoid of `value` / 12288 in Q0.15, between the points of a table of 257. */
static inline int32_t sigmoid_16(int32_t value, const uint16_t *table)
{
    const uint32_t size = (uint32_t)(value < 0 ? -value : value);
    const uint32_t place = size >> 9;
    uint32_t result = 0x7FFFu << 10;
    if (place < 255u) {
        result = ((uint32_t)table[place] << 9) + (size & 511u) * ((uint32_t)table[place + 1u] - table[place]);
    }
    return (int32_t)((value < 0 ? 0x2000000u - result + 511u : result + 512u) >> 10);
}

//@ tangent_16
/* The hyperbolic tangent of `value` / 12288 in Q0.15, between the points of a table of 257. */
static inline int32_t tangent_16(int32_t value, const uint16_t *table)
{
    const uint32_t size = (uint32_t)(value < 0 ? -value : value);
    const uint32_t place = size >> 8;
    uint32_t result = 0xFFFFu << 8;
    if (place < 255u) {
        result = ((uint32_t)table[place] << 8) + (size & 255u) * ((uint32_t)table[place + 1u] - table[place]);
    }
    const int32_t centred = (int32_t)result - 0x800000;
    return (value < 0 ? 127 - centred : centred + 128) >> 8;
}

//@ converted
/* The float rounded towards zero and limited to [low, high], which are floats themselves; 0 for NaN. */
static inline int32_t converted(float value, float low, float high)
{
    if (value != value) {
        return 0;
    }
    if (value >= high) {
        return high >= 2147483648.0f ? 2147483647 : (int32_t)high;
    }
    return value <= low ? (int32_t)low : (int32_t)value;
}

//@ converted_wide
/* The float rounded towards zero and limited to [low, high], which are floats themselves; 0 for NaN. */
static inline int64_t converted_wide(float value, float low, float high)
{
    if (value != value) {
        return 0;
    }
    if (value >= high) {
        return high >= 9223372036854775808.0f ? 9223372036854775807 : (int64_t)high - (high >= 4294967296.0f);
    }
    return value <= low ? (int64_t)low : (int64_t)value;
}
