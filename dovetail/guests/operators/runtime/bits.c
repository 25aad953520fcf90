/* How many bits a number has up to its highest 1; 0 has `none`. */
static int32_t bits_of(uint64_t number, int32_t none)
{
    int32_t found = 0;
    for (; number != 0; number >>= 1) {
        ++found;
    }
    return found == 0 ? none : found;
}
