"""Sums that are requantised and cut off at what stands for 0: one channel after the other, its constants in registers.

An engine of 32-bit sums leaves such regions to the core. Most of the work is a comparison or two
(`dovetail.ir.requantisation.rectified`).
"""

from __future__ import annotations

import numpy as np

from dovetail.ir.operators.arithmetic import Requantize
from dovetail.ir.requantisation.rectified import rectified_sum
from dovetail.ir.types import DType
from dovetail.kernels.c import Lines, c_type, channel_lanes, loop, total
from dovetail.kernels.scope import REQUANTISED, KernelScope

_LEAST_ROWS = 8
"""Rows from which walking down a channel pays."""
_TURN = 4


def rectified_lines(scope: KernelScope) -> Lines | None:
    """The statements of a region that requantises int32 in memory and cuts the result off at the zero point; None for
    others."""
    match = scope.whole(REQUANTISED)
    if match is None or scope.layouts or match.values["x"] in scope.graph.constants:
        return None
    if match.result.dtype not in (DType.INT8, DType.UINT8):
        return None
    kind, limits = match.type("x"), match.nodes["clip"].operator.limited_to
    assert limits is not None
    channels = kind.shape[-1] if kind.shape else 0
    if kind.dtype is not DType.INT32 or kind.elements < _LEAST_ROWS * channels:
        return None
    operator = match.operator("requantize", Requantize)
    numbers = rectified_sum(operator, limits, match.array("multiplier"), match.array("shift"))
    if numbers is None:
        return None
    rows, source = kind.elements // channels, scope.input(match.values["x"])
    names = {
        stem: scope.constant(match.nodes["requantize"].output, stem, np.broadcast_to(array, channels))
        for stem, array in vars(numbers).items()
    }
    stored, product_of = c_type(match.result.dtype), "(uint32_t)(((uint64_t)(2u * sum) * factor) >> 32)"
    turn = channel_lanes(rows, _TURN)
    middle = total(f"(int32_t)(({product_of} + half) >> down)", limits[0])
    loads = [f"const uint32_t sum_{lane} = (uint32_t)from[{lane * channels}];" for lane in range(turn)]
    one = [
        line
        for lane in range(turn)
        for line in (
            f"if (__builtin_expect(sum_{lane} <= most, 1)) {{",
            f"    to[{lane * channels}] = ({stored})({middle.replace('sum', f'sum_{lane}')});",
            "} else {",
            f"    to[{lane * channels}] = ({stored})((int32_t)sum_{lane} < 0 ? {limits[0]} : {limits[1]});",
            "}",
        )
    ]
    pointers = [
        f"const int32_t *from = {source} + row * {channels} + channel;",
        f"{stored} *to = output + row * {channels} + channel;",
    ]
    body = [
        f"const uint32_t factor = {names['multiplier']}[channel];",
        f"const uint32_t most = (uint32_t){names['limit']}[channel];",
        f"const int32_t down = {names['shift']}[channel];",
        "const uint32_t half = 1u + (1u << (down - 1));",
        *loop("row", rows, [*pointers, *loads, *one], step=turn),
    ]
    return loop("channel", channels, body)
