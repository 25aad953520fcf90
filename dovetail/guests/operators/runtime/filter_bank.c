/* Sums of energies in overlapping triangles: the falling side of a channel is the rising side of the next. */
static void filter_bank(
    int64_t *result, const uint32_t *given, const int16_t *rising, const int16_t *falling, const int16_t *starts,
    const int16_t *places, const int16_t *widths, int32_t channels)
{
    uint64_t sum = 0;
    for (int32_t channel = 0; channel <= channels; ++channel) {
        uint64_t next = 0;
        for (int32_t at = 0; at < widths[channel]; ++at) {
            const uint64_t energy = given[starts[channel] + at];
            sum += (uint64_t)rising[places[channel] + at] * energy;
            next += (uint64_t)falling[places[channel] + at] * energy;
        }
        if (channel > 0) {
            result[channel - 1] = (int64_t)sum;
        }
        sum = next;
    }
}
