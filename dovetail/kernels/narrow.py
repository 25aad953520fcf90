"""Weights of 4 or 2 bits: several to a byte in the constants, taken apart in registers."""

from __future__ import annotations

import numpy as np

from dovetail.graph.types import Array

WIDTHS = (2, 4)
"""Bits of the weights that share bytes."""


def fits(values: Array, bits: int) -> bool:
    """True when signed integers of `bits` hold all values."""
    return bool(values.min() >= -(1 << (bits - 1)) and values.max() < 1 << (bits - 1))


def packed(values: Array, bits: int) -> Array:
    """Signed integers side by side, the first in the lowest bits, as uint8; every row of the last axis begins a byte.

    Args:
        values: of any shape; bytes a row does not fill hold zeros.
        bits: 2 or 4.
    """
    share = 8 // bits
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % share)])
    fields = (padded.astype(np.int64) & ((1 << bits) - 1)).reshape(*values.shape[:-1], -1, share)
    return np.asarray((fields << (bits * np.arange(share))).sum(axis=-1), dtype=np.uint8)


def row_bytes(count: int, bits: int) -> int:
    """Bytes of `count` weights that begin at a byte."""
    return -(-count * bits // 8)


def unpacked(array: str, bits: int, base: int, place: int) -> str:
    """C text of weight number `place`, known now, of those that begin at byte `base` of an array."""
    share = 8 // bits
    at, field = base + place // share, place % share
    return f"field_of({array}[{at}], {32 - bits * (field + 1)}, {32 - bits})"


def looked_up(array: str, bits: int, place: str) -> str:
    """C text of weight number `place`, found at run time, of an array packed without gaps."""
    return f"packed_{bits}({array}, {place})"


NARROW_HELPERS: dict[str, str] = {
    "field_of": """\
/* The signed field of a byte that is raised to the top bits by `left` and has 32 - `right` bits. */
static inline int32_t field_of(uint8_t packed, int32_t left, int32_t right)
{
    return (int32_t)((uint32_t)packed << left) >> right;
}
""",
    "packed_4": """\
/* Element `place` of signed 4-bit integers, two to a byte. */
static inline int32_t packed_4(const uint8_t *packed, int32_t place)
{
    return field_of(packed[place >> 1], 28 - 4 * (place & 1), 28);
}
""",
    "packed_2": """\
/* Element `place` of signed 2-bit integers, four to a byte. */
static inline int32_t packed_2(const uint8_t *packed, int32_t place)
{
    return field_of(packed[place >> 2], 30 - 2 * (place & 3), 30);
}
""",
}
"""C source of each function, by its name."""
