"""Where the bits of weights lie in what an engine reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.ir.types import Array


@dataclass(frozen=True)
class Along:
    """How far bits go along an axis of weights, in blocks of neighbours."""

    block: int
    """Indices in a block."""
    outer: int
    """Bits from one block to the next."""
    inner: int = 0
    """Bits from one index to the next in a block."""

    def bits(self, count: int) -> Array:
        """How far each of so many indices is from the first: int64."""
        index = np.arange(count, dtype=np.int64)
        return index // self.block * self.outer + index % self.block * self.inner


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a layer in the array its engine reads: the lowest bit of weight (output, tap, channel) lies as far
    as its three indices go. Bits of a byte are counted from the lowest.

    A depthwise layer has one output, and its channels along the third axis.
    """

    shape: tuple[int, int, int]
    """Outputs, taps and channels."""
    width: int
    """Bits of a weight."""
    step: int
    """Bits from one bit of a weight to the next."""
    outputs: Along
    taps: Along
    channels: Along
    signed: bool = False
    """Whether the highest bit counts as in two's complement; else the number is unsigned, and half of the numbers are
    taken off: zero is 2**(width - 1)."""

    @property
    def half(self) -> int:
        """The highest bit alone."""
        return 1 << (self.width - 1)

    def weights(self, array: Array) -> Array | None:
        """The weights an array of uint8 holds, int64 of `shape`; None where it is too short."""
        outputs, taps, channels = (a.bits(n) for a, n in zip(self._axes, self.shape, strict=True))
        places = outputs[:, None, None] + taps[:, None] + channels
        if places.size == 0 or int(places.max()) + (self.width - 1) * self.step >= 8 * array.size:
            return None
        found = np.zeros(self.shape, np.int64)
        for bit in range(self.width):
            at = places + bit * self.step
            found += (array[at >> 3].astype(np.int64) >> (at & 7) & 1) << bit
        return (found ^ self.half if self.signed else found) - self.half

    @property
    def _axes(self) -> tuple[Along, Along, Along]:
        return self.outputs, self.taps, self.channels


def in_blocks(shape: tuple[int, int, int], outputs: int, channels: int) -> StoredWeights:
    """Signed bytes in the order (blocks of outputs, taps, blocks of channels, outputs, channels), blocks filled up."""
    block = 8 * outputs * channels
    taps = -(-shape[2] // channels) * block
    along = Along(outputs, shape[1] * taps, 8 * channels), Along(1, taps), Along(channels, block, 8)
    return StoredWeights(shape, 8, 1, *along, signed=True)
