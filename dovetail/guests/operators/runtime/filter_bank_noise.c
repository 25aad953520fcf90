/* What is above the noise: its estimate follows the signal slowly, at two speeds in turns. */
static void filter_bank_noise(
    uint32_t *result, uint32_t *estimate, uint32_t *kept, const uint32_t *given, const uint32_t *before,
    int32_t channels, int32_t fast, int32_t fast_rest, int32_t slow, int32_t slow_rest, int32_t bits, int32_t shift,
    int32_t least, int32_t clamping)
{
    for (int32_t channel = 0; channel < channels; ++channel) {
        const uint32_t share = (uint32_t)((channel & 1) == 0 ? fast : slow);
        const uint32_t rest = (uint32_t)((channel & 1) == 0 ? fast_rest : slow_rest);
        const uint32_t raised = given[channel] << bits;
        const uint64_t both = (uint64_t)raised * share + (uint64_t)before[channel] * rest;
        const uint32_t noise = (uint32_t)(both >> shift);
        const uint32_t taken = noise > raised ? raised : noise;
        const uint32_t floor = (uint32_t)(((uint64_t)given[channel] * (uint32_t)least) >> shift);
        const uint32_t left = (raised - taken) >> bits;
        kept[channel] = clamping != 0 ? taken : noise;
        estimate[channel] = kept[channel];
        result[channel] = left > floor ? left : floor;
    }
}
