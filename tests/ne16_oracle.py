"""NE16 for tests: launches as the C driver issues them, weights unpacked, the peak of the array."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dovetail.targets.ne16.image import unpack_linear_stored, unpack_stored
from dovetail.targets.ne16.job import CHANNELS_IN, Ne16Job, Register, registers

_MASK32 = 0xFFFFFFFF


def _edge_padding(word: int, row: int, column: int, rows: int, columns: int) -> int:
    """The padding register of one launch of a grid: only what touches its own edges."""
    keep = 0xFFFF
    keep |= 0xF0000000 if row == 0 else 0
    keep |= 0x0F000000 if column == columns - 1 else 0
    keep |= 0x00F00000 if row == rows - 1 else 0
    keep |= 0x000F0000 if column == 0 else 0
    return word & keep


def launches(job: Ne16Job) -> Iterator[tuple[int, ...]]:
    """The register image of every hardware launch of the job, in the order the C driver issues them.

    At stride 2 each launch makes 2x2 outputs; with an odd output size the second row (column) of launches
    starts one output early and repeats one, as the public driver does.
    """
    image = registers(job)
    rows, columns = job.grid
    for row in range(rows):
        for column in range(columns):
            down = 2 * row - (row > 0) * (job.out_height % 2)
            right = 2 * column - (column > 0) * (job.out_width % 2)
            words = list(image)
            words[Register.INFEAT] = (
                image[Register.INFEAT] + 2 * (down * job.in_row_stride + right * job.in_pixel_stride)
            ) & _MASK32
            words[Register.OUTFEAT] = image[Register.OUTFEAT] + down * job.out_row_stride + right * job.out_pixel_stride
            words[Register.PADDING] = _edge_padding(image[Register.PADDING], row, column, rows, columns)
            yield tuple(words)


def packed_weights_nbytes(out_channels: int, in_channels: int, kernel: int, bits: int, depthwise: bool) -> int:
    """Bytes of the packed weights of a convolution; `in_channels` is ignored in depthwise mode."""
    rows, channels = (1, out_channels) if depthwise else (out_channels, in_channels)
    return rows * -(-channels // CHANNELS_IN) * bits * kernel * kernel * 2


def packed_linear_weights_nbytes(out_channels: int, in_channels: int, bits: int) -> int:
    """Bytes of the packed weights of a layer in linear mode; `in_channels` is a multiple of 16."""
    return out_channels * bits * in_channels // 8


def unpack_weights(
    packed: NDArray[np.uint8], bits: int, depthwise: bool, shape: tuple[int, int, int, int]
) -> NDArray[np.int16]:
    """The signed weights (C_out, kh, kw, C_in) of `shape` that `pack_weights` packed (int16)."""
    out_channels, height, width, in_channels = shape
    rows, channels = (1, out_channels) if depthwise else (out_channels, in_channels)
    stored = unpack_stored(packed, bits, height, channels, rows).reshape(rows, height, width, channels)
    return (stored.transpose(3, 1, 2, 0) if depthwise else stored).astype(np.int16) - (1 << (bits - 1))


def unpack_linear_weights(packed: NDArray[np.uint8], bits: int, in_channels: int) -> NDArray[np.int16]:
    """The signed weights (C_out, C_in) that `pack_linear_weights` packed (int16)."""
    return unpack_linear_stored(packed, bits, in_channels).astype(np.int16) - (1 << (bits - 1))


def ideal_macs_per_cycle(job: Ne16Job) -> float:
    """Multiply-accumulates per cycle while the array multiplies, every lane useful.

    9 columns x 9 blocks x 16 one-bit multipliers [R]: 1296 / bits for 3x3; one channel of the 16 for depthwise;
    one block per bit for 1x1, so its width does not matter; 16 blocks of 16 in linear mode.
    """
    if job.linear:
        return 256 / job.weight_bits
    if job.kernel == 1:
        return 9.0 * CHANNELS_IN
    return 81 / job.weight_bits if job.depthwise else 1296 / job.weight_bits
