"""Which block of pixels and channels a scheduled kernel computes together: the one with the fewest instructions."""

from __future__ import annotations

from dovetail.kernels.scheduled.algorithms import Sizes
from dovetail.kernels.scheduled.schedules import Inside, Knobs

_MOST_PIXELS = 4
_MOST_LANES = 16
_UNROLL = 4
_LOOP = 3
"""Instructions per turn of the innermost loop besides loads and products: two pointers and a branch."""
_GATHER = 3
"""Instructions per gathered element: load, store, and a share of the loop."""
_CALL = 40
"""Instructions per block of pixels besides its sums."""


def choose_knobs(sizes: Sizes, inside: Inside, vector: int, group: int, accumulators: int) -> Knobs:
    """The register block with the fewest instructions, the smallest of equals.

    Args:
        sizes: of the layer.
        inside: its pixels without padding.
        vector: taps one instruction multiplies.
        group: channels one instruction computes.
        accumulators: sums there are registers for.
    """
    gathered = sizes.image[2] % vector != 0
    outputs = -(-sizes.result[2] // group) * group
    candidates = [
        Knobs(pixels, lanes, vector, group, gathered, _unroll(sizes, vector, gathered))
        for pixels in range(1, _MOST_PIXELS + 1)
        for lanes in range(group, min(_MOST_LANES, outputs) + 1, group)
        if pixels * lanes <= accumulators and pixels <= max(inside.columns[1] - inside.columns[0], 1)
    ]
    return min(candidates, key=lambda knobs: (_cost(knobs, sizes, inside), knobs.pixels * knobs.lanes))


def _unroll(sizes: Sizes, vector: int, gathered: bool) -> int:
    """The most turns up to `_UNROLL` that divide the loop."""
    count = (sizes.taps if gathered else sizes.image[2]) // vector
    return max(number for number in range(1, _UNROLL + 1) if number == 1 or count % number == 0)


def _cost(knobs: Knobs, sizes: Sizes, inside: Inside) -> float:
    """Instructions of the whole image, without requantisation."""
    (top, bottom), (left, right) = inside.rows, inside.columns
    columns, rows = max(right - left, 0), max(bottom - top, 0)
    others = sizes.result[0] * sizes.result[1] - rows * columns
    whole, rest = divmod(columns, knobs.pixels)
    total = rows * whole * _block(knobs, sizes, knobs.pixels, knobs.gathered)
    if rest:
        total += rows * _block(knobs, sizes, rest, knobs.gathered)
    return total + others * _block(knobs, sizes, 1, True)


def _block(knobs: Knobs, sizes: Sizes, pixels: int, gathered: bool) -> float:
    """Instructions of one block of pixels, all channels."""
    blocks = -(-sizes.result[2] // knobs.lanes)
    vectors = -(-sizes.taps // knobs.vector)
    step = pixels + knobs.lanes + pixels * knobs.lanes + _LOOP / knobs.unroll
    return blocks * (vectors * step + _CALL) + _CALL + (pixels * sizes.taps * _GATHER if gathered else 0)
