//@ as_float
/* The float with these bits. */
static inline float as_float(uint32_t bits)
{
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

//@ as_bits
/* The bits of a float. */
static inline uint32_t as_bits(float value)
{
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

//@ scaled_real: as_bits as_float
/* value * scale, rounded to the nearest, halves to even, of a value of at most 24 bits and a scale from 2^-100 to 2^100:
   in integers, which cores without floating point multiply sooner. */
static inline float scaled_real(int32_t value, float scale)
{
    const uint32_t bits = as_bits(scale);
    uint32_t size = value < 0 ? 0u - (uint32_t)value : (uint32_t)value;
    uint32_t power = (bits >> 23) + 31u;
    if (size == 0u) {
        return 0.0f;
    }
    if (size < 0x10000u) {
        size <<= 16;
        power -= 16u;
    }
    if (size < 0x1000000u) {
        size <<= 8;
        power -= 8u;
    }
    if (size < 0x10000000u) {
        size <<= 4;
        power -= 4u;
    }
    if (size < 0x40000000u) {
        size <<= 2;
        power -= 2u;
    }
    if (size < 0x80000000u) {
        size <<= 1;
        power -= 1u;
    }
    const uint64_t product = (uint64_t)size * ((bits | 0x800000u) << 8);
    uint32_t high = (uint32_t)(product >> 32);
    uint32_t low = (uint32_t)product;
    if (high < 0x80000000u) {
        high = high * 2u + (low >> 31);
        low *= 2u;
        power -= 1u;
    }
    const uint32_t kept = high >> 8;
    const uint32_t rest = ((high & 0x7Fu) | low) != 0u ? 1u : 0u;
    const uint32_t rounded = kept + ((high >> 7) & (rest | kept) & 1u);
    return as_float(((uint32_t)value & 0x80000000u) | ((power << 23) + rounded));
}

//@ shifted_real: as_bits as_float
/* value * scale, of a value below 2^16 and a scale that is a power of two from 2^-100 to 2^100: exact. */
static inline float shifted_real(int32_t value, float scale)
{
    uint32_t size = (value < 0 ? 0u - (uint32_t)value : (uint32_t)value) << 8;
    uint32_t power = (as_bits(scale) >> 23) + 14u;
    if (size == 0u) {
        return 0.0f;
    }
    for (; size < 0x800000u; size *= 2u) {
        --power;
    }
    return as_float(((uint32_t)value & 0x80000000u) | ((power << 23) + size));
}

//@ absolute: as_float as_bits
/* The value without its sign. */
static inline float absolute(float value)
{
    return as_float(as_bits(value) & 0x7FFFFFFFu);
}

//@ larger
/* The larger of two; NaN if one is. */
static inline float larger(float left, float right)
{
    return left > right || left != left ? left : right;
}

//@ smaller
/* The smaller of two; NaN if one is. */
static inline float smaller(float left, float right)
{
    return left < right || left != left ? left : right;
}

//@ sign_of
/* -1, 0 or 1; NaN of NaN. */
static inline float sign_of(float value)
{
    return value > 0.0f ? 1.0f : (value < 0.0f ? -1.0f : value);
}

//@ nearest: absolute
/* The nearest integer, halves to even: from 2^23 on there are no fractions, so adding it rounds. */
static inline float nearest(float value)
{
    const float size = absolute(value);
    if (!(size < 8388608.0f)) {
        return value;
    }
    const float rounded = (size + 8388608.0f) - 8388608.0f;
    return value < 0.0f ? -rounded : rounded;
}

//@ floor_of: nearest
/* The largest integer that is not above the value. */
static inline float floor_of(float value)
{
    const float rounded = nearest(value);
    return rounded > value ? rounded - 1.0f : rounded;
}

//@ ceiling_of: nearest
/* The smallest integer that is not below the value. */
static inline float ceiling_of(float value)
{
    const float rounded = nearest(value);
    return rounded < value ? rounded + 1.0f : rounded;
}

//@ exponential: as_float
/* exp(value), within 2 units in the last place. */
static inline float exponential(float value)
{
    if (!(value < 88.7228394f)) {
        return value != value ? value : __builtin_inff();
    }
    if (value < -103.972084f) {
        return 0.0f;
    }
    const float scaled = value * 1.44269504f;
    const int32_t power = (int32_t)(scaled + (scaled < 0.0f ? -0.5f : 0.5f));
    const float rest = (value - (float)power * 0.693359375f) + (float)power * 2.12194440e-4f;
    float series = 1.98412698e-4f;
    series = series * rest + 1.38888889e-3f;
    series = series * rest + 8.33333333e-3f;
    series = series * rest + 4.16666667e-2f;
    series = series * rest + 1.66666667e-1f;
    series = series * rest + 0.5f;
    series = series * rest * rest + rest + 1.0f;
    const int32_t half = power / 2; /* two factors, since 2^power may be no normal float */
    return series * as_float((uint32_t)(half + 127) << 23) * as_float((uint32_t)(power - half + 127) << 23);
}

//@ exponential_less_one: absolute exponential
/* exp(value) - 1, within 4 units in the last place. */
static inline float exponential_less_one(float value)
{
    if (absolute(value) < 0.35f) {
        float series = 2.48015873e-5f;
        series = series * value + 1.98412698e-4f;
        series = series * value + 1.38888889e-3f;
        series = series * value + 8.33333333e-3f;
        series = series * value + 4.16666667e-2f;
        series = series * value + 1.66666667e-1f;
        series = series * value + 0.5f;
        return series * value * value + value;
    }
    return exponential(value) - 1.0f;
}

//@ logarithm: as_float as_bits
/* The natural logarithm, within 2 units in the last place. */
static inline float logarithm(float value)
{
    if (!(value > 0.0f)) {
        return value == 0.0f ? -__builtin_inff() : __builtin_nanf("");
    }
    if (value > 3.40282347e38f) {
        return value;
    }
    const int32_t subnormal = value < 1.17549435e-38f;
    const uint32_t bits = as_bits(subnormal ? value * 8388608.0f : value);
    const int32_t above = (int32_t)(bits - 0x3F3504F3u) >> 23; /* the fraction will be in [sqrt(1/2), sqrt(2)) */
    const float fraction = as_float(bits - ((uint32_t)above << 23));
    const float power = (float)(above - (subnormal ? 23 : 0));
    const float ratio = (fraction - 1.0f) / (fraction + 1.0f);
    const float square = ratio * ratio;
    float series = 1.81818182e-1f;
    series = series * square + 2.22222222e-1f;
    series = series * square + 2.85714286e-1f;
    series = series * square + 0.4f;
    series = series * square + 6.66666667e-1f;
    series = series * square * ratio + 2.0f * ratio;
    return power * 0.693359375f + (series - power * 2.12194440e-4f);
}

//@ logarithm_above_one
/* log(1 + value) for a value in [0, 1], within 2 units in the last place. */
static inline float logarithm_above_one(float value)
{
    const float ratio = value / (2.0f + value);
    const float square = ratio * ratio;
    float series = 1.17647059e-1f;
    series = series * square + 1.33333333e-1f;
    series = series * square + 1.53846154e-1f;
    series = series * square + 1.81818182e-1f;
    series = series * square + 2.22222222e-1f;
    series = series * square + 2.85714286e-1f;
    series = series * square + 0.4f;
    series = series * square + 6.66666667e-1f;
    return series * square * ratio + 2.0f * ratio;
}

//@ square_root: as_float as_bits
/* The square root, within 1 unit in the last place: an estimate from the halved exponent, and Newton's iteration. */
static inline float square_root(float value)
{
    if (!(value > 0.0f)) {
        return value == 0.0f ? value : __builtin_nanf("");
    }
    if (value > 3.40282347e38f) {
        return value;
    }
    const int32_t subnormal = value < 1.17549435e-38f;
    const float raised = subnormal ? value * 16777216.0f : value;
    float root = as_float((as_bits(raised) >> 1) + 0x1FBB4F2Eu);
    for (int32_t turn = 0; turn < 3; ++turn) {
        root = 0.5f * (root + raised / root);
    }
    return subnormal ? root * 2.44140625e-4f : root;
}

//@ hyperbolic_tangent: absolute exponential_less_one
/* tanh(value), within 3 units in the last place. */
static inline float hyperbolic_tangent(float value)
{
    const float size = absolute(value);
    if (size > 9.02f) {
        return value > 0.0f ? 1.0f : -1.0f;
    }
    const float grown = exponential_less_one(2.0f * size);
    const float result = grown / (grown + 2.0f);
    return value < 0.0f ? -result : result;
}

//@ logistic: absolute exponential
/* 1 / (1 + exp(-value)), within 3 units in the last place. */
static inline float logistic(float value)
{
    const float small = exponential(-absolute(value));
    return (value >= 0.0f ? 1.0f : small) / (1.0f + small);
}

//@ soft_plus: absolute larger exponential logarithm_above_one
/* log(1 + exp(value)), within 3 units in the last place. */
static inline float soft_plus(float value)
{
    return larger(value, 0.0f) + logarithm_above_one(exponential(-absolute(value)));
}

//@ error_series
/* erf(value) for a value in [-1, 1]. */
static inline float error_series(float value)
{
    const float square = value * value;
    float series = -1.63658447e-07f;
    series = series * square + 1.64658537e-6f;
    series = series * square - 1.49256504e-5f;
    series = series * square + 1.20553331e-4f;
    series = series * square - 8.54832714e-4f;
    series = series * square + 5.22397760e-3f;
    series = series * square - 2.68661706e-2f;
    series = series * square + 1.12837917e-1f;
    series = series * square - 3.76126389e-1f;
    series = series * square + 1.12837917f;
    return series * value;
}

//@ error_tail: exponential
/* 1 - erf(value) for a value of at least 1; its relative error grows with the square of the value. */
static inline float error_tail(float value)
{
    const float place = 1.0f / (1.0f + 0.5f * value);
    float series = -0.153710855f;
    series = series * place + 0.678646411f;
    series = series * place - 0.9522558f;
    series = series * place + 0.348871226f;
    series = series * place - 0.0525735312f;
    series = series * place + 0.399904636f;
    series = series * place + 0.99752194f;
    series = series * place - 1.26540899f;
    return place * exponential(series - value * value);
}

//@ error_function: absolute error_series error_tail
/* erf(value), within 3 units in the last place. */
static inline float error_function(float value)
{
    const float size = absolute(value);
    if (size < 1.0f) {
        return error_series(value);
    }
    const float result = size > 5.0f ? 1.0f : 1.0f - error_tail(size);
    return value < 0.0f ? -result : (value != value ? value : result);
}

//@ gaussian_share: absolute error_series error_tail
/* (1 + erf(value / sqrt(2))) / 2, within 2^-16 of its size where it is above 2^-100. */
static inline float gaussian_share(float value)
{
    const float place = value * 0.707106781f;
    if (absolute(place) < 1.0f) {
        return 0.5f + 0.5f * error_series(place);
    }
    const float tail = 0.5f * error_tail(absolute(place));
    return value < 0.0f ? tail : (value != value ? value : 1.0f - tail);
}

//@ turned: absolute nearest
/* The sine of value + quarter * pi / 2. Whole quarters of a turn are taken off in three parts, whose first two have
   few enough bits that their multiples are exact. */
static inline float turned(float value, int32_t quarter)
{
    if (!(absolute(value) < 1.0e6f)) {
        return value == value && absolute(value) < __builtin_inff() ? 0.0f : __builtin_nanf("");
    }
    const float whole = nearest(value * 0.636619772f);
    const float rest = ((value - whole * 1.5703125f) - whole * 4.83751297e-4f) - whole * 7.54978995e-8f;
    const int32_t place = ((int32_t)whole + quarter) & 3;
    const float square = rest * rest;
    float result;
    if (place & 1) {
        float series = 2.44331571e-5f;
        series = series * square - 1.38873163e-3f;
        series = series * square + 4.16666457e-2f;
        result = (series * square * square - 0.5f * square) + 1.0f;
    } else {
        float series = -1.95152959e-4f;
        series = series * square + 8.33216087e-3f;
        series = series * square - 1.66666546e-1f;
        result = series * square * rest + rest;
    }
    return place & 2 ? -result : result;
}

//@ sine: turned
/* The sine, within 2^-22 of it where the operand is below 8192; 0 from a million on. */
static inline float sine(float value)
{
    return turned(value, 0);
}

//@ cosine: turned
/* The cosine, within 2^-22 of it where the operand is below 8192; 0 from a million on. */
static inline float cosine(float value)
{
    return turned(value, 1);
}

//@ power: absolute nearest exponential logarithm
/* base to the power of exponent: by multiplication where that is a small integer, else by logarithms. */
static inline float power(float base, float exponent)
{
    const float whole = nearest(exponent);
    if (whole == exponent && absolute(exponent) <= 64.0f) {
        float result = 1.0f;
        float factor = base;
        for (int32_t rest = (int32_t)absolute(exponent); rest > 0; rest >>= 1) {
            result = rest & 1 ? result * factor : result;
            factor *= factor;
        }
        return exponent < 0.0f ? 1.0f / result : result;
    }
    const float size = exponential(exponent * logarithm(absolute(base)));
    if (!(base < 0.0f)) {
        return base == base ? size : base;
    }
    if (whole != exponent) {
        return __builtin_nanf("");
    }
    return absolute(whole) < 16777216.0f && ((int32_t)whole & 1) ? -size : size;
}

//@ modulo: absolute floor_of
/* What is left of `left` after whole multiples of `right`, with the sign of `right`. */
static inline float modulo(float left, float right)
{
    if (absolute(left) < __builtin_inff() && absolute(right) == __builtin_inff()) {
        return left == 0.0f || (left < 0.0f) == (right < 0.0f) ? left : right;
    }
    return left - floor_of(left / right) * right;
}
