"""Weights as the engine reads them: bit planes.

Source: pulp-platform/pulp-nnx test/Ne16Weight.py; for linear mode gvsoc/gvsoc-pulp pulp/ne16/src/ne16_matrixvec.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dovetail.targets.ne16.job import CHANNELS_IN


def _unsigned(weights: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Weights plus 2**(bits-1), so that they are stored without a sign; ValueError when one has more bits."""
    half = 1 << (bits - 1)
    if weights.size and not (-half <= int(weights.min()) and int(weights.max()) < half):
        raise ValueError(f"weights of {bits} bits lie in {-half}..{half - 1}, not {weights.min()}..{weights.max()}")
    return weights.astype(np.uint8) + np.uint8(half)


def pack_weights(weights: NDArray[np.integer], bits: int, depthwise: bool) -> NDArray[np.uint8]:
    """The bytes the engine reads for a convolution.

    Args:
        weights: signed, (C_out, kh, kw, C_in); depthwise: (C, kh, kw, 1).
        bits: bits per weight, 2..8.
        depthwise: whether the layer is depthwise.

    Returns:
        uint8, ordered (C_out, groups of 16 inputs, bit, tap, 2 bytes), the
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
    planes = _planes(padded.reshape(rows, height * width, groups, CHANNELS_IN), bits)
    # (row, tap, group, byte, bit) -> (row, group, bit, tap, byte)
    return planes.transpose(0, 2, 4, 1, 3).reshape(-1)


def _planes(stored: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Bit planes of bytes: [..., channels] -> [..., channels / 8, bits], the channels of a byte from the lowest bit up.

    Eight bytes are a matrix of 8 x 8 bits, which is transposed as one word: bits, pairs and fours change places.
    """
    words = np.ascontiguousarray(stored).view("<u8").astype(np.uint64)
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        moved = (words ^ words >> np.uint64(shift)) & np.uint64(mask)
        words ^= moved ^ moved << np.uint64(shift)
    return words.astype("<u8").view(np.uint8).reshape(*words.shape, 8)[..., :bits]


def pack_linear_weights(weights: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """The bytes the engine reads in linear mode: (C_out, bit, C_in / 8 bytes), inputs from the lowest bit up.

    Args:
        weights: signed, (C_out, C_in); C_in a multiple of 16.
        bits: bits per weight, 2..8.
    """
    if weights.shape[1] % CHANNELS_IN:
        raise ValueError(f"linear mode needs a multiple of {CHANNELS_IN} inputs, not {weights.shape[1]}")
    return _planes(_unsigned(weights, bits), bits).transpose(0, 2, 1).reshape(-1)
