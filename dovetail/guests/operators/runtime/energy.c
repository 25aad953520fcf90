static void spectrum_energy(uint32_t *result, const int16_t *given, int32_t size, int32_t start, int32_t stop)
{
    for (int32_t at = 0; at < size; ++at) {
        const int16_t *own = given + 2 * at;
        const uint32_t energy = (uint32_t)(own[0] * own[0]) + (uint32_t)(own[1] * own[1]);
        result[at] = at >= start && at < stop ? energy : 0u;
    }
}
