"""Weights that the kernels of this computer take from what the engine reads, in the order in which they want them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.ir.types import Array
from dovetail.kernels.sums import blocked
from dovetail.target.stored import Along, StoredWeights

_LANES = (1, 2, 3, 4, 5, 6, 8, 16)
"""Outputs that a kernel has side by side for each tap."""


@dataclass(frozen=True)
class Order:
    """How a kernel has its weights: loops over outputs, taps and channels."""

    lanes: int
    """Outputs that are the innermost loop; 0 for all of them."""

    def of(self, weights: Array) -> Array:
        """The weights [outputs, taps, channels] in this order, one after the other."""
        lanes = self.lanes or len(weights)
        return blocked(weights[:, :, None], lanes).reshape(-1)


def order_of(array: Array, stored: StoredWeights, held: Array) -> Order | None:
    """The order in which an array is the weights that the engine's array holds; None where it is in none."""
    weights = stored.weights(held)
    if weights is None or weights.size != array.size:
        return None
    narrow = weights.astype(array.dtype)
    lanes = [lanes for lanes in (*_LANES, 0) if lanes == 0 or len(weights) % lanes == 0]
    return next((Order(each) for each in lanes if np.array_equal(Order(each).of(narrow), array.reshape(-1))), None)


def reading(name: str, place: str, c_type: str, order: Order, stored: StoredWeights) -> str:
    """C of the function `name`, which gives the weights in an order, taken from `place` when it is called first."""
    outputs, taps, channels = stored.shape
    lanes = order.lanes or outputs
    bits = " | ".join(
        f"(from[(at + {bit * stored.step}) >> 3] >> ((at + {bit * stored.step}) & 7) & 1) << {bit}"
        for bit in range(stored.width)
    )
    loops = (("block", outputs // lanes), ("tap", taps), ("channel", channels), ("lane", lanes))
    heads = [f"{'    ' * (n + 1)}for (int32_t {v} = 0; {v} < {size}; {v}++) {{" for n, (v, size) in enumerate(loops)]
    at = " + ".join(
        [
            _far(stored.outputs, f"(block * {lanes} + lane)", outputs),
            _far(stored.taps, "tap", taps),
            _far(stored.channels, "channel", channels),
        ]
    )
    number = f"(({bits}) ^ {stored.half}) - {stored.half}" if stored.signed else f"({bits}) - {stored.half}"
    inner = [
        f"const int32_t at = {at};",
        f"held[to++] = ({c_type})({number});",
    ]
    return "\n".join(
        [
            f"static const {c_type} *{name}(void)",
            "{",
            f"    static {c_type} held[{stored.shape[0] * taps * channels}];",
            "    static int32_t to;",
            f"    const uint8_t *from = {place};",
            "    if (to > 0) { return held; }",
            *heads,
            *(f"{'    ' * 5}{line}" for line in inner),
            *(f"{'    ' * n}}}" for n in range(4, 0, -1)),
            "    return held;",
            "}",
            "",
        ]
    )


def _far(along: Along, index: str, count: int) -> str:
    """C for the bits an index goes."""
    if count <= 1:
        return "0"
    if along.block == 1:
        return f"{index} * {along.outer}"
    inner = f"{index} % {along.block} * {along.inner}"
    return inner if count <= along.block else f"{index} / {along.block} * {along.outer} + {inner}"
