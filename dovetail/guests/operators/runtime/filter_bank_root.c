/* The square root of `number`, rounded; `most` is the largest result. */
static uint32_t rounded_root(uint64_t number, int32_t bits, uint64_t most)
{
    uint64_t root = 0;
    for (uint64_t bit = (uint64_t)1 << ((bits - 1) & ~1); bit != 0; bit >>= 2) {
        const int fits = number >= root + bit;
        number -= fits ? root + bit : 0;
        root = (root >> 1) + (fits ? bit : 0);
    }
    return (uint32_t)(number > root && root != most ? root + 1 : root);
}

static void filter_bank_root(uint32_t *result, const int64_t *given, const int32_t *shift, int32_t channels)
{
    for (int32_t channel = 0; channel < channels; ++channel) {
        const uint64_t own = (uint64_t)given[channel];
        const uint32_t root = own == 0 ? 0u : rounded_root(own, bits_of(own, 0), own >> 32 == 0 ? 0xffffu : 0xffffffffu);
        result[channel] = root >> (*shift & 31);
    }
}
