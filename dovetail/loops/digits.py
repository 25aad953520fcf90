"""A bias as products of int8 numbers, so that a matrix engine adds it the way it adds everything else."""

from __future__ import annotations

import numpy as np

from dovetail.graph.types import Array

_MOST = 127


def digit_rows(bias: Array, block: int) -> int:
    """Vectors of `block` digits each that one bias needs: 127 * 127 per lane, and one lane for what is left over."""
    reach = int(np.abs(bias.astype(np.int64)).max(initial=0))
    return max(1, -(-reach // (_MOST * _MOST * (block - 1))))


def ones(rows: int, block: int) -> Array:
    """The constant operand, int8 [rows, block]: 127 in every lane but the last of each row, which is 1."""
    made = np.full((rows, block), _MOST, dtype=np.int8)
    made[:, -1] = 1
    return made


def digits(bias: Array, rows: int, block: int) -> Array:
    """Digits of each bias, int8 [len(bias), rows, block], so that sum(digits * ones(rows, block)) is the bias.

    Raises:
        ValueError: a bias is too large for so many rows.
    """
    left = bias.astype(np.int64)
    made = np.zeros((len(bias), rows, block), dtype=np.int8)
    for row in range(rows):
        for lane in range(block - 1):
            digit = np.clip(np.rint(left / _MOST), -_MOST, _MOST).astype(np.int64)
            made[:, row, lane] = digit
            left = left - digit * _MOST
    made[:, -1, -1] = np.clip(left, -_MOST, _MOST)
    if (left != made[:, -1, -1]).any():
        raise ValueError(f"a bias of {int(np.abs(bias).max())} needs more than {rows} rows of {block} digits")
    return made
