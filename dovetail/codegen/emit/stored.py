"""Weights that the kernels of this computer take from what the engine reads, in the order in which they want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from dovetail.ir.operators.linear import Linear
from dovetail.ir.types import Array
from dovetail.kernels.c import code
from dovetail.kernels.sums import blocked
from dovetail.records import Record
from dovetail.target.pattern import Match

Packer = Callable[[Match], Mapping[str, Array]]
"""As `Offload.pack`."""

_LANES = (1, 2, 3, 4, 5, 6, 8, 16)
"""Outputs that a kernel has side by side for each tap."""


class BitRun(Record):
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

    def blocks(self, count: int) -> tuple[int, int]:
        """Blocks and neighbours in each that have room for so many indices."""
        return -(-count // self.block), min(self.block, count)


class StoredWeights(Record):
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
    outputs: BitRun
    taps: BitRun
    channels: BitRun
    signed: bool = False
    """Whether the highest bit counts as in two's complement; else the number is unsigned, and half of the numbers are
    taken off: zero is 2**(width - 1)."""
    first: int = 0
    """Bits before the lowest one of the first weight."""

    @property
    def half(self) -> int:
        """The highest bit alone."""
        return 1 << (self.width - 1)

    def weights(self, array: Array) -> Array | None:
        """The weights an array of uint8 holds, of `shape`; None where it is too short."""
        axes = tuple(zip((self.outputs, self.taps, self.channels), self.shape, strict=True))
        last = self.first + sum(int(along.bits(count)[-1:].sum()) for along, count in axes)
        if 0 in self.shape or last + (self.width - 1) * self.step >= 8 * array.size:
            return None
        sizes = [size for along, count in axes for size in along.blocks(count)]
        strides = [stride for along, _ in axes for stride in (along.outer, along.inner)]
        reach = self.first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        room = max(reach + max((self.width - 1) * self.step, 0) + 1, 8 * array.size)  # blocks may go beyond the end
        bits = np.pad(np.unpackbits(array, bitorder="little"), (0, room - 8 * array.size))
        each = np.ndarray((*sizes, self.width), np.uint8, bits.data, self.first, (*strides, self.step))
        found: Array = np.zeros(sizes, np.uint8 if self.width <= 8 else np.int64)
        for bit in range(self.width):
            np.bitwise_or(found, np.left_shift(each[..., bit], bit, dtype=found.dtype), out=found)
        whole = found.reshape([across * within for across, within in zip(sizes[::2], sizes[1::2], strict=True)])
        own: Array = whole[tuple(map(slice, self.shape))].astype(np.int16 if self.width <= 8 else np.int64)
        return (own ^ self.half if self.signed else own) - self.half


def weights_of(match: Match) -> str:
    """The value of the layer's weights, where they are constants; empty where there are none, or several."""
    linear = [node for node in match.graph.nodes if isinstance(node.operator, Linear)]
    names = {node.inputs[1] for node in linear} & match.graph.constants.keys()
    return names.pop() if len(names) == 1 else ""


def find_weights(pack: Packer, match: Match) -> tuple[str, StoredWeights] | None:
    """The places a packer gives the weights of a layer, and the constant: found by packing weights that are all 0 but
    one, and all 0 but a line along each axis. It is a guess, that they lie in blocks and in order: `order_of` looks
    whether a layer's own lie so. None where they do not, or where the packer does not take such weights."""
    if not (name := weights_of(match)):
        return None
    held = match.graph.constants[name]
    shape = len(held), prod(held.shape[1:-1]), held.shape[-1]

    def packed(where: tuple[int | slice, ...], value: int) -> Mapping[str, Array]:
        weights = np.zeros(shape, held.dtype)
        weights[where] = value
        constants = {**match.graph.constants, name: weights.reshape(held.shape)}
        return pack(replace(match, graph=replace(match.graph, constants=constants)))

    every = slice(None)
    try:
        zero, one = packed((), 0), packed((0, 0, 0), -1)
        lines = [packed(where, 1) for where in ((every, 0, 0), (0, every, 0), (0, 0, every))]
    except Exception:  # a user's function was given weights that no model has: what it raises is nobody's mistake
        return None
    changing = [each for each, found in one.items() if each in zero and not np.array_equal(found, zero[each])]
    if len(changing) != 1:
        return None
    constant = changing[0]
    places = [_changed(zero, line, constant) for line in (one, *lines)]
    found = _stored(shape, places, zero[constant]) if all(place is not None for place in places) else None
    return (constant, found) if found is not None else None


def _changed(before: Mapping[str, Array], after: Mapping[str, Array], constant: str) -> Array | None:
    """Which bits of a constant changed; None where its length did, or another constant."""
    if any(after[each].shape != found.shape for each, found in before.items()):
        return None
    if any(not np.array_equal(after[each], found) for each, found in before.items() if each != constant):
        return None
    differ = before[constant] ^ after[constant]
    at = np.flatnonzero(differ)
    is_changed = (differ[at, None] >> np.arange(8) & 1).astype(bool)
    places: Array = (at[:, None] * 8 + np.arange(8))[is_changed]
    return places


def _stored(shape: tuple[int, int, int], places: list[Array | None], zero: Array) -> StoredWeights | None:
    """The weights whose first has its bits at the first of `places`, and those along each axis their lowest bits at the
    others."""
    own, *lines = (place for place in places if place is not None)
    lowest = [place for place in own if all(place in line for line in lines)]
    along = [_along(line, count) for line, count in zip(lines, shape, strict=True)]
    outputs, taps, channels = along
    if len(lowest) != 1 or outputs is None or taps is None or channels is None:
        return None
    first, width = int(lowest[0]), len(own)
    order = own if own[0] == first else own[::-1]
    step = int(order[1] - order[0]) if width > 1 else 0
    if not np.array_equal(order, first + step * np.arange(width)):
        return None
    is_set = zero[order[-1] >> 3] >> (order[-1] & 7) & 1
    return StoredWeights(shape, width, step, outputs, taps, channels, signed=not is_set, first=first)


def _along(places: Array, count: int) -> BitRun | None:
    """How bits at these places go along an axis of so many indices, the first first; None where they do not."""
    if len(places) != count:
        return None
    far = places - places[0]
    inner = int(far[1]) if count > 1 else 0
    straight = far == np.arange(count) * inner
    if straight.all():
        return BitRun(1, inner)
    block = int(np.argmin(straight))
    along = BitRun(block, int(far[block]), inner)
    return along if np.array_equal(along.bits(count), far) else None


class WeightOrder(Record):
    """How a kernel has its weights: loops over outputs, taps and channels."""

    lanes: int
    """Outputs that are the innermost loop; 0 for all of them."""

    def of(self, weights: Array) -> Array:
        """The weights [outputs, taps, channels] in this order, one after the other."""
        lanes = self.lanes or len(weights)
        return blocked(weights[:, :, None], lanes).reshape(-1)


def order_of(array: Array, stored: StoredWeights, held: Array) -> WeightOrder | None:
    """The order in which an array is the weights that the engine's array holds; None where it is in none."""
    weights = stored.weights(held) if prod(stored.shape) == array.size else None
    if weights is None:
        return None
    narrow, flat = weights.astype(array.dtype), array.reshape(-1)
    for lanes in (lanes for lanes in (*_LANES, 0) if lanes == 0 or len(weights) % lanes == 0):
        order, first = WeightOrder(lanes), narrow[: lanes or len(narrow)]
        if np.array_equal(order.of(first), flat[: first.size]) and np.array_equal(order.of(narrow), flat):
            return order
    return None


def reading(name: str, place: str, c_type: str, order: WeightOrder, stored: StoredWeights) -> str:
    """C of the function `name`, which gives the weights in an order, taken from `place` when it is called first."""
    outputs, taps, channels = stored.shape
    lanes = order.lanes or outputs
    bits = " | ".join(
        f"(from[(at + {bit * stored.step}) >> 3] >> ((at + {bit * stored.step}) & 7) & 1) << {bit}"
        for bit in range(stored.width)
    )
    far = (
        _far(stored.outputs, f"(block * {lanes} + lane)", outputs),
        _far(stored.taps, "tap", taps),
        _far(stored.channels, "channel", channels),
    )
    at = " + ".join([part for part in (str(stored.first), *far) if part != "0"]) or "0"
    number = f"(({bits}) ^ {stored.half}) - {stored.half}" if stored.signed else f"({bits}) - {stored.half}"
    lines = code(f"""
        static const {c_type} *{name}(void)
        {{
            static {c_type} held[{outputs * taps * channels}];
            static int32_t to;
            const uint8_t *from = {place};
            if (to > 0) {{ return held; }}
            for (int32_t block = 0; block < {outputs // lanes}; block++) {{
                for (int32_t tap = 0; tap < {taps}; tap++) {{
                    for (int32_t channel = 0; channel < {channels}; channel++) {{
                        for (int32_t lane = 0; lane < {lanes}; lane++) {{
                            const int32_t at = {at};
                            held[to++] = ({c_type})({number});
                        }}
                    }}
                }}
            }}
            return held;
        }}
    """)
    return "\n".join([*lines, ""])


def _far(along: BitRun, index: str, count: int) -> str:
    """C for the bits an index goes."""
    if count <= 1:
        return "0"
    if along.block == 1:
        return f"{index} * {along.outer}" if along.outer > 1 else index
    inner = f"{index} % {along.block} * {along.inner}"
    return inner if count <= along.block else f"{index} / {along.block} * {along.outer} + {inner}"
