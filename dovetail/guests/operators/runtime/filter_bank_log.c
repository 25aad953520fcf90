/* The natural logarithm: powers of 2 counted, the rest a table of how far the curve is from its chord. */
static void filter_bank_log(
    int16_t *result, const uint32_t *given, const uint16_t *table, int32_t channels, int32_t scale, int32_t shift)
{
    for (int32_t channel = 0; channel < channels; ++channel) {
        const uint32_t own = given[channel] << shift;
        if (own <= 1u) {
            result[channel] = 0;
            continue;
        }
        const int32_t whole = bits_of(own, 0) - 1;
        const uint32_t above = own - ((uint32_t)1 << whole);
        const int32_t part = (int32_t)(whole < 16 ? above << (16 - whole) : above >> (whole - 16));
        const int32_t place = part >> 9;
        const int32_t slope = table[place + 1] - table[place];
        const int32_t bent = (slope * (part - (place << 9))) >> 16;
        const uint32_t power = ((uint32_t)whole << 16) + (uint32_t)(part + table[place] + bent);
        const uint32_t natural = (uint32_t)(((uint64_t)45426 * power + 32768u) >> 16);
        const uint32_t scaled = ((uint32_t)scale * natural + 32768u) >> 16;
        result[channel] = (int16_t)(scaled < 32767u ? scaled : 32767u);
    }
}
