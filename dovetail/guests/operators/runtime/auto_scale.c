/* As many bits to the left as the largest value has room for, and how many. */
static void auto_scale(int16_t *result, int32_t *bits, const int16_t *given, int32_t size)
{
    int16_t largest = 0;
    for (int32_t at = 0; at < size; ++at) {
        if (given[at] > largest) {
            largest = given[at];
        } else if (-given[at] > largest) {
            largest = (int16_t)-given[at];
        }
    }
    const uint32_t held = largest < 0 ? 0x80000000u : (uint32_t)largest;
    const int32_t room = 15 - bits_of(held, 32);
    *bits = room < 0 ? 0 : room;
    for (int32_t at = 0; at < size; ++at) {
        result[at] = (int16_t)(given[at] * (1 << *bits));
    }
}
