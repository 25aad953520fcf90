"""The shared inline C functions of recurrent kernels on integers."""

from __future__ import annotations

RECURRENT_HELPERS: dict[str, str] = {
    "sigmoid_16": """\
/* 1 / (1 + exp(-x)) in Q0.15 for Q3.12, interpolated in 256 sigmoids of 24ths. */
static inline int32_t sigmoid_16(int32_t value, const uint16_t *table)
{
    const int32_t raised = value * 3;
    const uint32_t size = (uint32_t)(raised < 0 ? -raised : raised), place = size >> 9;
    uint32_t found = 0x7FFFu << 10;
    if (place < 255u) {
        const uint32_t below = table[place];
        found = (below << 9) + (size & 0x1FFu) * (table[place + 1u] - below);
    }
    return (int32_t)((raised >= 0 ? found + 0x200u : 0x20001FFu - found) >> 10);
}
""",
    "tanh_16": """\
/* The hyperbolic tangent in Q0.15 for a value with 12 + right - left fraction bits, from the same table. */
static inline int32_t tanh_16(int32_t value, int32_t left, int32_t right, const uint16_t *table)
{
    const int32_t raised = (value * (3 << left) + ((1 << right) >> 1)) >> right;
    const uint32_t size = (uint32_t)(raised < 0 ? -raised : raised), place = size >> 8;
    int32_t found = 0xFFFF << 8;
    if (place < 255u) {
        const uint32_t below = table[place];
        found = (int32_t)((below << 8) + (size & 0xFFu) * (table[place + 1u] - below));
    }
    return (raised >= 0 ? found - 0x7FFF80 : 0x80007F - found) >> 8;
}
""",
}
"""C source of each function, by its name."""
