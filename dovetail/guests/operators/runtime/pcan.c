/* A function given by parabolas, three numbers for each interval between powers of 2. */
static int32_t gain_of(uint32_t x, const int16_t *table)
{
    if (x <= 2) {
        return table[x];
    }
    const int32_t interval = bits_of(x, 0);
    const int16_t *own = table + 4 * interval - 6;
    const int32_t part = (int32_t)((interval < 11 ? x << (11 - interval) : x >> (interval - 11)) & 0x3ff);
    int32_t bent = (own[2] * part) >> 5;
    bent = (int32_t)((uint32_t)bent + ((uint32_t)own[1] << 5));
    bent = (int32_t)((uint32_t)bent * (uint32_t)part);
    return (int16_t)(((int32_t)((uint32_t)bent + 16384u) >> 15) + own[0]);
}

static void pcan(
    uint32_t *result, const uint32_t *given, const uint32_t *noise, const int16_t *table, int32_t channels,
    int32_t shift)
{
    for (int32_t channel = 0; channel < channels; ++channel) {
        const uint32_t gain = (uint32_t)gain_of(noise[channel], table);
        const uint32_t ratio = (uint32_t)(((uint64_t)given[channel] * gain) >> shift);
        result[channel] = ratio < 8192u ? (ratio * ratio) >> 20 : (ratio >> 6) - 64u;
    }
}
