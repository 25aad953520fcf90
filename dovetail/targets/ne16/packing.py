"""NE16 weight layouts: bit planes of 16 (linear mode: all) input channels, as the engine reads them.

Source: pulp-platform/pulp-nnx test/Ne16Weight.py for the convolutions, gvsoc/gvsoc-pulp
pulp/ne16/src/ne16_matrixvec.cpp for linear mode.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dovetail.targets.ne16.job import CHANNELS_IN


def packed_weights_nbytes(out_channels: int, in_channels: int, kernel: int, bits: int, depthwise: bool) -> int:
    """Bytes of the packed weights of a convolution; `in_channels` is ignored in depthwise mode."""
    rows, channels = (1, out_channels) if depthwise else (out_channels, in_channels)
    return rows * -(-channels // CHANNELS_IN) * bits * kernel * kernel * 2


def packed_linear_weights_nbytes(out_channels: int, in_channels: int, bits: int) -> int:
    """Bytes of the packed weights of a layer in linear mode; `in_channels` is a multiple of 16."""
    return out_channels * bits * in_channels // 8


def _unsigned(weights: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Weights plus 2**(bits-1), so that they are stored without a sign; ValueError when one has more bits."""
    half = 1 << (bits - 1)
    if weights.size and not (-half <= int(weights.min()) and int(weights.max()) < half):
        raise ValueError(f"weights of {bits} bits lie in {-half}..{half - 1}, not {weights.min()}..{weights.max()}")
    return (weights.astype(np.int16) + half).astype(np.uint8)


def pack_weights(weights: NDArray[np.integer], bits: int, depthwise: bool) -> NDArray[np.uint8]:
    """The bytes the engine reads for a convolution.

    Args:
        weights: signed, (C_out, kh, kw, C_in); depthwise: (C, kh, kw, 1).
        bits: bits per weight, 2..8.
        depthwise: whether the layer is depthwise.

    Returns:
        uint8 of `packed_weights_nbytes` elements, ordered (C_out, groups of 16 inputs, bit, tap, 2 bytes), the
        channels of a group from the lowest bit up; a depthwise layer packs its channels like inputs. Missing
        channels are stored as zero bits. The engine adds -2**(bits-1) to every stored weight.
    """
    stored = _unsigned(weights, bits)
    if depthwise:
        stored = stored.transpose(3, 1, 2, 0)
    rows, height, width, channels = stored.shape
    groups = -(-channels // CHANNELS_IN)
    padded = np.zeros((rows, height * width, groups * CHANNELS_IN), np.uint8)
    padded[:, :, :channels] = stored.reshape(rows, height * width, channels)
    grouped = padded.reshape(rows, height * width, groups, CHANNELS_IN)
    planes = grouped[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    # (row, tap, group, channel, bit) -> (row, group, bit, tap, channel)
    return np.packbits(planes.transpose(0, 2, 4, 1, 3), axis=-1, bitorder="little").reshape(-1)


def unpack_stored(
    packed: NDArray[np.uint8], bits: int, kernel: int, channels: int, rows: int
) -> NDArray[np.uint8]:
    """The unsigned stored weights behind `packed`: (rows, kernel * kernel taps, channels).

    `rows` is C_out and `channels` C_in for a convolution, 1 and C for a depthwise one.
    """
    groups = -(-channels // CHANNELS_IN)
    planes = np.unpackbits(packed.reshape(rows, groups, bits, kernel * kernel, 2), axis=-1, bitorder="little")
    stored = np.packbits(planes.transpose(0, 3, 1, 4, 2), axis=-1, bitorder="little")
    return stored.reshape(rows, kernel * kernel, groups * CHANNELS_IN)[:, :, :channels]


def unpack_weights(
    packed: NDArray[np.uint8], bits: int, depthwise: bool, shape: tuple[int, int, int, int]
) -> NDArray[np.int16]:
    """The signed weights (C_out, kh, kw, C_in) of `shape` that `pack_weights` packed (int16)."""
    out_channels, height, width, in_channels = shape
    rows, channels = (1, out_channels) if depthwise else (out_channels, in_channels)
    stored = unpack_stored(packed, bits, height, channels, rows).reshape(rows, height, width, channels)
    return (stored.transpose(3, 1, 2, 0) if depthwise else stored).astype(np.int16) - (1 << (bits - 1))


def pack_linear_weights(weights: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """The bytes the engine reads in linear mode: (C_out, bit, C_in / 8 bytes), inputs from the lowest bit up.

    Args:
        weights: signed, (C_out, C_in); C_in a multiple of 16.
        bits: bits per weight, 2..8.
    """
    if weights.shape[1] % CHANNELS_IN:
        raise ValueError(f"linear mode needs a multiple of {CHANNELS_IN} inputs, not {weights.shape[1]}")
    planes = _unsigned(weights, bits)[:, None, :] >> np.arange(bits, dtype=np.uint8)[:, None] & 1
    return np.packbits(planes, axis=-1, bitorder="little").reshape(-1)


def unpack_linear_stored(packed: NDArray[np.uint8], bits: int, in_channels: int) -> NDArray[np.uint8]:
    """The unsigned stored weights (C_out, C_in) behind the packed weights of linear mode."""
    planes = np.unpackbits(packed.reshape(-1, bits, in_channels // 8), axis=-1, bitorder="little")
    return np.packbits(planes.transpose(0, 2, 1), axis=-1, bitorder="little").reshape(-1, in_channels)


def unpack_linear_weights(packed: NDArray[np.uint8], bits: int, in_channels: int) -> NDArray[np.int16]:
    """The signed weights (C_out, C_in) that `pack_linear_weights` packed (int16)."""
    return unpack_linear_stored(packed, bits, in_channels).astype(np.int16) - (1 << (bits - 1))
