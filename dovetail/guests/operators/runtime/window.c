static void window_rows(
    int16_t *result, const int16_t *given, const int16_t *weights, int32_t rows, int32_t size, int32_t shift)
{
    for (int32_t at = 0; at < rows * size; ++at) {
        const int32_t scaled = (given[at] * weights[at % size]) >> shift;
        result[at] = (int16_t)(scaled < -32768 ? -32768 : scaled > 32767 ? 32767 : scaled);
    }
}
