"""How many pixels and output channels a sum-of-products kernel computes together."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_PIXELS = 4
_MOST_LANES = 16
_LOOP = 3
"""Instructions per turn besides loads, products and additions: two pointers and a branch."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """The register block of the inner loop."""

    pixels: int
    """Neighbouring output columns whose taps are all inside the image."""
    lanes: int
    """Output channels."""


def instructions(pixels: int, lanes: int) -> float:
    """Instructions per multiply-accumulate of one turn: a load per input and weight, a product and an addition each."""
    return (pixels + lanes + 2 * pixels * lanes + _LOOP) / (pixels * lanes)


def _cost(block: Blocking, outputs: int, columns: int, groups: int, others: int) -> float:
    """Instructions per tap of a whole image: groups of columns in blocks, all other pixels one by one."""
    computed = -(-outputs // block.lanes) * block.lanes
    blocked = columns // block.pixels * block.pixels * groups
    single = columns * groups - blocked + others
    return computed * (blocked * instructions(block.pixels, block.lanes) + single * instructions(1, block.lanes))


def choose_blocking(
    outputs: int,
    columns: int,
    rows: int,
    others: int,
    accumulators: int,
    whole: bool = False,
    lanes: int | None = None,
    multiple: int = 1,
) -> Blocking:
    """The register block with the fewest instructions, the smallest of equals.

    Args:
        outputs: output channels (of one group).
        columns: neighbouring output columns whose taps are all inside.
        rows: how many such rows of columns there are.
        others: output pixels besides these.
        accumulators: sums there are registers for.
        whole: when True the channels of a block must divide `outputs`.
        lanes: the channels of a block, where they are given and there are registers for them.
        multiple: what the channels of a block must be a multiple of; at most `outputs` and `accumulators`.
    """
    candidates = [
        Blocking(pixels, count)
        for pixels in range(1, min(_MOST_PIXELS, max(columns, 1), accumulators) + 1)
        for count in range(1, min(_MOST_LANES, outputs, accumulators // pixels) + 1)
        if count % multiple == 0 and (not whole or outputs % count == 0) and lanes in (None, count)
    ]
    if not candidates:
        return choose_blocking(outputs, columns, rows, others, accumulators, whole, multiple=multiple)
    return min(candidates, key=lambda block: (_cost(block, outputs, columns, rows, others), block.pixels * block.lanes))
