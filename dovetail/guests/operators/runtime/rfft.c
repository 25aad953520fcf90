/* The first value times the second, both Q15, rounded. */
static int16_t q15(int32_t product)
{
    return (int16_t)((product + 16384) >> 15);
}

/* (real, imaginary) of a product of complex numbers. */
static void complex_product(int16_t *result, const int16_t *a, const int16_t *b)
{
    result[0] = q15((int32_t)((uint32_t)(a[0] * b[0]) - (uint32_t)(a[1] * b[1])));
    result[1] = q15((int32_t)((uint32_t)(a[0] * b[1]) + (uint32_t)(a[1] * b[0])));
}

/* `factor` / 32767 of both parts. */
static void complex_part(int16_t *value, int32_t factor)
{
    value[0] = q15(value[0] * factor);
    value[1] = q15(value[1] * factor);
}

static void butterfly_2(int16_t *a, int16_t *b, const int16_t *turn)
{
    int16_t turned[2];
    complex_part(a, 16383);
    complex_part(b, 16383);
    complex_product(turned, b, turn);
    for (int32_t part = 0; part < 2; ++part) {
        b[part] = (int16_t)(a[part] - turned[part]);
        a[part] = (int16_t)(a[part] + turned[part]);
    }
}

static void butterfly_4(int16_t *at, int32_t apart, const int16_t *turns, int32_t first)
{
    int16_t turned[3][2];
    int16_t sum[2];
    int16_t between[2];
    int16_t across[2];
    for (int32_t leg = 0; leg < 4; ++leg) {
        complex_part(at + 2 * leg * apart, 8191);
    }
    for (int32_t leg = 0; leg < 3; ++leg) {
        complex_product(turned[leg], at + 2 * (leg + 1) * apart, turns + 2 * (leg + 1) * first);
    }
    for (int32_t part = 0; part < 2; ++part) {
        across[part] = (int16_t)(at[part] - turned[1][part]);
        at[part] = (int16_t)(at[part] + turned[1][part]);
        sum[part] = (int16_t)(turned[0][part] + turned[2][part]);
        between[part] = (int16_t)(turned[0][part] - turned[2][part]);
        at[4 * apart + part] = (int16_t)(at[part] - sum[part]);
        at[part] = (int16_t)(at[part] + sum[part]);
    }
    at[2 * apart] = (int16_t)(across[0] + between[1]);
    at[2 * apart + 1] = (int16_t)(across[1] - between[0]);
    at[6 * apart] = (int16_t)(across[0] - between[1]);
    at[6 * apart + 1] = (int16_t)(across[1] + between[0]);
}

/* The complex transform of `size` values in place, in the order of `rfft`'s places: radix 4, the innermost 2 if need be. */
static void complex_transform(int16_t *values, const int16_t *turns, int32_t size)
{
    int32_t apart = 1;
    for (int32_t left = size; left > 1; left >>= 2) {
        if ((left & 0x55555555) == 0 && apart == 1) { /* an odd power of 2: pairs first */
            for (int32_t at = 0; at < size; at += 2) {
                butterfly_2(values + 2 * at, values + 2 * at + 2, turns);
            }
            apart = 2;
            left >>= 1;
            if (left == 1) {
                return;
            }
        }
        for (int32_t block = 0; block < size; block += 4 * apart) {
            for (int32_t at = 0; at < apart; ++at) {
                butterfly_4(values + 2 * (block + at), apart, turns, at * (size / (4 * apart)));
            }
        }
        apart *= 4;
    }
}

/* Each row of real values as the first half of its spectrum, (real, imaginary); rows are filled up with zeros. */
static void rfft(
    int16_t *spectrum, const int16_t *given, const int16_t *places, const int16_t *turns, const int16_t *halves,
    int16_t *values, int32_t rows, int32_t length, int32_t size)
{
    for (int32_t row = 0; row < rows; ++row) {
        const int16_t *own = given + row * length;
        int16_t *to = spectrum + row * (2 * size + 2);
        for (int32_t at = 0; at < size; ++at) {
            for (int32_t part = 0; part < 2; ++part) {
                const int32_t from = 2 * places[at] + part;
                values[2 * at + part] = from < length ? own[from] : (int16_t)0;
            }
        }
        complex_transform(values, turns, size);
        complex_part(values, 16383);
        to[0] = (int16_t)(values[0] + values[1]);
        to[1] = 0;
        to[2 * size] = (int16_t)(values[0] - values[1]);
        to[2 * size + 1] = 0;
        for (int32_t at = 1; at <= size / 2; ++at) {
            int16_t low[2] = {values[2 * at], values[2 * at + 1]};
            int16_t high[2] = {values[2 * (size - at)], (int16_t)-values[2 * (size - at) + 1]};
            int16_t sum[2];
            int16_t between[2];
            int16_t turned[2];
            complex_part(low, 16383);
            complex_part(high, 16383);
            for (int32_t part = 0; part < 2; ++part) {
                sum[part] = (int16_t)(low[part] + high[part]);
                between[part] = (int16_t)(low[part] - high[part]);
            }
            complex_product(turned, between, halves + 2 * (at - 1));
            to[2 * at] = (int16_t)((sum[0] + turned[0]) >> 1);
            to[2 * at + 1] = (int16_t)((sum[1] + turned[1]) >> 1);
            to[2 * (size - at)] = (int16_t)((sum[0] - turned[0]) >> 1);
            to[2 * (size - at) + 1] = (int16_t)((turned[1] - sum[1]) >> 1);
        }
    }
}
