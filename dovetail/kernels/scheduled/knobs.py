"""Which block of pixels and channels a scheduled kernel computes together: the one with the fewest instructions."""

from __future__ import annotations

from dovetail.kernels.scheduled.algorithms import Sizes
from dovetail.kernels.scheduled.schedules import Inside, Knobs
from dovetail.kernels.scheduled.staging import Staging

_MOST_PIXELS = 5
_MOST_LANES = 16
_UNROLL = 8
_LOOP = 3
"""Instructions per turn of the innermost loop besides loads and products: two pointers and a branch."""
_WORD = 4
"""Elements gathered together where the channels of a pixel are a multiple of it."""
_GATHER = 3
"""Instructions per gathered word or element: load, store, and a share of the loop."""
_GUARD = 8
"""Instructions to find out whether a tap is in the image."""
_START = 3
"""Instructions to start a sum and to lay it down."""
_PARTIAL = 4
"""Further instructions per sum where its channel may not exist."""
_REGISTERS = 22
_SPILL = 2
"""Instructions per turn where a block's sums and inputs leave too few registers for addresses, and from how many on."""
_CALL = 40
"""Instructions per block of pixels besides its sums."""


def choose_knobs(sizes: Sizes, inside: Inside, vector: int, group: int, accumulators: int, staging: Staging | None = None) -> Knobs:
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
    import os
    E = os.environ
    candidates = [
        Knobs(pixels, lanes, vector, group, gathered, _unroll(sizes, vector, gathered, staging), staging)
        for pixels in range(1, _MOST_PIXELS + 1)
        for lanes in range(group, min(_MOST_LANES, outputs) + 1, group)
        if pixels * lanes <= (int(E.get('ACC', 4)) if staging else accumulators * 5 // 4) and pixels <= sizes.result[1]
    ]
    if 'PX' in E: candidates = [c for c in candidates if c.pixels == min(int(E['PX']),sizes.result[1])] or candidates
    if 'LN' in E: candidates = [c for c in candidates if c.lanes == int(E['LN'])] or candidates
    return min(candidates, key=lambda knobs: (_cost(knobs, sizes, inside), knobs.pixels * knobs.lanes))


def _unroll(sizes: Sizes, vector: int, gathered: bool, staging: Staging | None) -> int:
    """The most turns up to `_UNROLL` that divide the loop; with staged operands, whose taps are one loop, it remains."""
    count = (sizes.taps if gathered or staging else sizes.image[2]) // vector
    most = min(_UNROLL, count // 2) if staging else _UNROLL
    return max(number for number in range(1, max(most, 1) + 1) if number == 1 or count % number == 0)


def _cost(knobs: Knobs, sizes: Sizes, inside: Inside) -> float:
    """Instructions of the whole image, without requantisation."""
    (top, bottom), (left, right) = inside.rows, inside.columns
    rows, columns = sizes.result[:2]
    blocks, rest = divmod(columns, knobs.pixels)
    free = max(right // knobs.pixels - -(-left // knobs.pixels), 0) * max(bottom - top, 0)
    total = free * _block(knobs, sizes, knobs.pixels, knobs.gathered)
    total += (rows * blocks - free) * _block(knobs, sizes, knobs.pixels, True)
    whole = (top, bottom, left, right) == (0, rows, 0, columns)
    return total + (rows * _block(knobs, sizes, rest, knobs.gathered or not whole) if rest else 0)


def _block(knobs: Knobs, sizes: Sizes, pixels: int, gathered: bool) -> float:
    """Instructions of one block of pixels, all channels."""
    blocks = -(-sizes.result[2] // knobs.lanes)
    vectors = -(-sizes.taps // knobs.vector)
    step = pixels + knobs.lanes + pixels * knobs.lanes + _LOOP / knobs.unroll
    step += max(pixels * knobs.lanes + pixels - _REGISTERS, 0)
    words = sizes.taps / _WORD if sizes.image[2] % _WORD == 0 else sizes.taps
    gathering = pixels * (words * _GATHER + sizes.kernel[0] * sizes.kernel[1] * _GUARD)
    partial = sizes.result[2] % knobs.lanes != 0
    ending = pixels * knobs.lanes * (_START + (_PARTIAL if partial else 0))
    return blocks * (vectors * step + ending + _CALL) + _CALL + (gathering if gathered else 0)
