"""Sums that are requantised and cut off at what stands for 0: one channel after the other, its constants in registers.

What an engine of 32-bit sums leaves to the core. Most of it is a comparison or two: sums up to 0 give the least result,
those above a channel's limit the greatest, and only between them is anything multiplied.
"""

from __future__ import annotations

import numpy as np

from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding, fixed_point
from dovetail.ir.types import Array, DType
from dovetail.kernels.c import channel_lanes, loop, total
from dovetail.kernels.kernel import INT32, KernelScope
from dovetail.kernels.region import RegionParts

_LEAST_ROWS = 8
"""Rows from which walking down a channel pays."""
_TURN = 4


def is_rectified(region: RegionParts) -> bool:
    """Whether a region is a requantisation of int32 in memory with its result cut off at the zero point."""
    operators = [node.operator for node in region.tree]
    if region.anchor is not None or [type(one) for one in operators] != [Requantize, Clip]:
        return False
    (scaled, clip), node = operators, region.tree[0]
    assert isinstance(scaled, Requantize) and isinstance(clip, Clip)
    kind, constants = region.graph.types[node.inputs[0]], region.graph.constants
    if kind.dtype is not DType.INT32 or any((name in constants) != bool(at) for at, name in enumerate(node.inputs)):
        return False
    multiplier, shift = _scales(region)
    plain = (scaled.rounding, scaled.input_zero_point, scaled.left_shift) == (Rounding.DOUBLE, 0, 0)
    if shift.max() >= 0 or shift.min() < -30 or multiplier.min() < 0:
        return False
    product_of = (_limits(multiplier, shift, clip.high - clip.low).astype(np.int64) * multiplier) >> 30
    fits = (product_of + 1 + (1 << -shift)).max() < 1 << 32
    narrow = clip.dtype in (DType.INT8, DType.UINT8) and clip.low == scaled.output_zero_point < clip.high
    return plain and bool(fits) and narrow and kind.elements >= _LEAST_ROWS * kind.shape[-1]


def _scales(region: RegionParts) -> tuple[Array, Array]:
    """Multipliers and shifts; a multiplier of 0 gives 0 with any."""
    multiplier, shift = (region.graph.constants[name].astype(np.int64) for name in region.tree[0].inputs[1:])
    return multiplier, np.where(multiplier == 0, -1, shift)


def _limits(multiplier: Array, shift: Array, most: int) -> Array:
    """The greatest sum of each channel whose requantisation is below `most`, by bisection: it never falls."""
    low, high = np.zeros(multiplier.shape, np.int64), np.full(multiplier.shape, INT32[1], np.int64)
    for _ in range(32):
        middle = (low + high + 1) // 2
        below = fixed_point(middle, multiplier, shift, Rounding.DOUBLE) < most
        low, high = np.where(below, middle, low), np.where(below, high, middle - 1)
    return low.astype(np.int32)


def rectified_lines(region: RegionParts, scope: KernelScope) -> list[str]:
    """The statements of such a region.

    For a sum of at least 0 both roundings of `Rounding.DOUBLE` are one: halves go up twice, and a floor of a floor is
    one floor. With r the shift to the right that is (2 sum * 2 multiplier / 2^32 + 1 + 2^r) / 2^(r + 1).
    """
    scaling, clipping = region.tree
    scaled, clip = scaling.operator, clipping.operator
    assert isinstance(scaled, Requantize) and isinstance(clip, Clip)
    kind = region.graph.types[scaling.inputs[0]]
    channels = kind.shape[-1]
    rows = kind.elements // channels
    multiplier, shift = (np.broadcast_to(array, channels) for array in _scales(region))
    arrays = {
        "multiplier": (2 * multiplier).astype(np.uint32),
        "limit": _limits(multiplier, shift, clip.high - clip.low),
        "shift": (1 - shift).astype(np.int8),
    }
    source = scope.input(scaling.inputs[0])
    names = {stem: scope.constant(scaling.output, stem, array) for stem, array in arrays.items()}
    result = "int8_t" if clip.dtype is DType.INT8 else "uint8_t"
    product_of = "(uint32_t)(((uint64_t)(2u * sum) * factor) >> 32)"
    turn = channel_lanes(rows, _TURN)
    middle = total(f"(int32_t)(({product_of} + half) >> down)", clip.low)
    loads = [f"const uint32_t sum_{lane} = (uint32_t)from[{lane * channels}];" for lane in range(turn)]
    one = [
        line
        for lane in range(turn)
        for line in (
            f"if (__builtin_expect(sum_{lane} <= most, 1)) {{",
            f"    to[{lane * channels}] = ({result})({middle.replace('sum', f'sum_{lane}')});",
            "} else {",
            f"    to[{lane * channels}] = ({result})((int32_t)sum_{lane} < 0 ? {clip.low} : {clip.high});",
            "}",
        )
    ]
    pointers = [
        f"const int32_t *from = {source} + row * {channels} + channel;",
        f"{result} *to = output + row * {channels} + channel;",
    ]
    body = [
        f"const uint32_t factor = {names['multiplier']}[channel];",
        f"const uint32_t most = (uint32_t){names['limit']}[channel];",
        f"const int32_t down = {names['shift']}[channel];",
        "const uint32_t half = 1u + (1u << (down - 1));",
        *loop("row", rows, [*pointers, *loads, *one], step=turn),
    ]
    return loop("channel", channels, body)
