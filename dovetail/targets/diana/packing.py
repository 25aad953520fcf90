"""Constants as DIANA's engines read them, and back.

After pulp-platform/dory Hardware_targets/Diana/Diana_TVM: HW_Parser.py and C_Parser.py (digital), Diana_SoC and
Diana_TVM weights_encoder_analog.py (analog). Bytes of digital constants are swapped in words of 32 bits.
"""

from __future__ import annotations

import numpy as np

from dovetail.graph.types import Array
from dovetail.targets.diana.costs import LEAST_ROWS

LANES = 16
"""Channels of a block."""
SPREAD = 4
"""A depthwise channel is the first of so many, the others zero."""
LINES = 128
"""Columns of the analog array that are written together."""


def swapped(data: Array) -> Array:
    """Bytes with each word of four the other way round; its own inverse."""
    return np.ascontiguousarray(data.reshape(-1, 4)[:, ::-1]).reshape(-1)


def pack_convolution(weights: Array, bias: Array) -> Array:
    """Per 16 channels: weights (Cin, Kh, Kw, 16), then four planes of 16 bytes with the biases' bytes, lowest first.

    Args:
        weights: int8 [K, Kh, Kw, C].
        bias: int32 [K].
    """
    channels, height, width, depth = weights.shape
    spare = -channels % LANES
    padded = np.pad(weights, ((0, spare), (0, 0), (0, 0), (0, 0)))
    blocks = padded.reshape(-1, LANES, height, width, depth).transpose(0, 4, 2, 3, 1)
    return _with_biases(blocks, bias)


def pack_depthwise(weights: Array, bias: Array) -> Array:
    """As a convolution of one input channel with three channels of zeros behind each: four times the memory.

    Args:
        weights: int8 [1, Kh, Kw, C].
        bias: int32 [C].
    """
    _, height, width, channels = weights.shape
    spread = np.zeros((channels * SPREAD, height, width, 1), np.int8)
    spread[::SPREAD, :, :, 0] = weights[0].transpose(2, 0, 1)
    wide = np.zeros(channels * SPREAD, np.int32)
    wide[::SPREAD] = bias
    return pack_convolution(spread, wide)


def pack_dense(weights: Array, bias: Array) -> Array:
    """Per 16 results: weights (Cin/16, 16 results, 16 operands), both padded to 16, then the biases' planes.

    Args:
        weights: int8 [K, C].
        bias: int32 [K].
    """
    padded = np.pad(weights, ((0, -weights.shape[0] % LANES), (0, -weights.shape[1] % LANES)))
    blocks = padded.reshape(-1, LANES, padded.shape[1] // LANES, LANES).transpose(0, 2, 1, 3)
    return _with_biases(blocks, bias)


def _with_biases(blocks: Array, bias: Array) -> Array:
    count = blocks.shape[0]
    wide = np.pad(bias.astype("<i4"), (0, count * LANES - bias.size)).view(np.uint8)
    planes = wide.reshape(count, LANES, 4).transpose(0, 2, 1).reshape(count, -1)
    flat = np.ascontiguousarray(blocks).reshape(count, -1).view(np.uint8)
    return swapped(np.concatenate([flat, planes], axis=1).reshape(-1))


def block_bytes(taps: int, depth: int) -> int:
    """Bytes of a block of 16 channels with so many taps and (for dense layers, padded) input channels."""
    return LANES * taps * depth + 4 * LANES


def unpack_blocks(data: Array, taps: int, depth: int) -> tuple[Array, Array]:
    """Stored weights int8 [blocks, depth * taps * 16] and biases int32 [blocks, 16] of swapped constants."""
    blocks = swapped(data).reshape(-1, block_bytes(taps, depth))
    weights, planes = blocks[:, : -4 * LANES].view(np.int8), blocks[:, -4 * LANES :].reshape(-1, 4, LANES)
    biases = sum(planes[:, place].astype(np.uint32) << np.uint32(8 * place) for place in range(4))
    return weights, np.asarray(biases).view(np.int32)


def array_rows(taps: int, depth: int) -> int:
    """Rows of the analog array that a window takes."""
    return taps * max(LEAST_ROWS, depth)


def array_columns(channels: int) -> int:
    """Columns of the analog array that are written for so many channels."""
    return -(-channels // LINES) * LINES


def flipped(rows: int, columns: int) -> Array:
    """Which cells of the array hold a weight with the other sign, bool [rows, columns]: even columns in blocks 0 to 5
    and 12 to 17 of 64 rows, odd ones in blocks 0 to 8."""
    block = np.arange(rows)[:, None] // 64
    even = np.arange(columns)[None, :] % 2 == 0
    return np.where(even, (block < 6) | (block > 11), block <= 8)


def pack_ternary(weights: Array) -> Array:
    """Two bits a weight, 1 as 2 and -1 as 1: rows (Kh, Kw, Cin padded to 64) from the last to the first, of 128 columns
    or a multiple; four columns to a byte, the first lowest.

    Args:
        weights: int8 [K, Kh, Kw, C] of -1, 0 and 1.
    """
    channels, height, width, depth = weights.shape
    taps = height * width
    grid = np.zeros((taps, max(LEAST_ROWS, depth), array_columns(channels)), np.int8)
    grid[:, :depth, :channels] = weights.reshape(channels, taps, depth).transpose(1, 2, 0)
    cells = grid.reshape(array_rows(taps, depth), -1)[::-1]
    cells = np.where(flipped(*cells.shape), -cells, cells)
    codes = np.where(cells == 1, 2, np.where(cells == -1, 1, 0)).astype(np.uint8).reshape(-1, 4)
    return np.asarray((codes << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1), np.uint8)


def unpack_ternary(data: Array, rows: int, columns: int) -> Array:
    """Weights int8 [rows, columns] as the window's taps and channels have them.

    Raises:
        ValueError: a cell holds 3, which is no weight.
    """
    codes = (data.reshape(-1, 1) >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(rows, columns)
    if (codes == 3).any():
        raise ValueError("a cell of the array holds 3, which is no weight")
    cells = np.array([0, -1, 1, 0], np.int8)[codes]
    return np.asarray(np.where(flipped(rows, columns), -cells, cells)[::-1], np.int8)


def pack_scales(scale: Array, offset: Array, channels: int) -> Array:
    """Scales, then offsets, of 16 bits each, for every channel."""
    rows = [np.broadcast_to(array, channels).astype("<i2") for array in (scale, offset)]
    return np.ascontiguousarray(np.concatenate(rows)).view(np.uint8)
