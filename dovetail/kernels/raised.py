"""Sums that end in one product and one shift, on cores whose kernels hold weights as 16 bits.

A requantisation rounds, shifts, rounds again and adds the zero point. Weights of 8 bits have room in 16: those of a
channel, and the start of its sum, are taken times a power of two, such that the last shift is the same for all
channels and both roundings are part of one number that is added. Then an element is
(upper half of sum * multiplier + offset) >> shift, the same integer as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.ir.graph import Node
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding, fixed_point
from dovetail.ir.types import Array, blocks
from dovetail.kernels.kernel import Expression, Index, KernelScope
from dovetail.kernels.region import RegionParts
from dovetail.kernels.sums import SumConstants, SumNest

_MOST_RAISED = 8
"""Bits by which an int8 may be raised within 16."""
_SHIFTS = (9, 12, 15)
"""Shifts that are preferred: layers of one text share a function."""
_LOWEST, _HIGHEST = -128, 127
"""What the products are made of, beside the weights."""
_EXACT = 1 << 30
"""Multipliers from here on have all their bits; no upper half of a product reaches it."""


@dataclass(frozen=True)
class SumRequantisation:
    """The end of the sums of a layer, of channels or of all alike: arrays of one element or one per channel."""

    node: Node
    """The requantisation that is part of it."""
    powers: Array
    """Bits by which weights and starts are raised."""
    multiplier: Array
    offset: Array
    """Both int32."""
    shift: int
    reach: int
    """No element is larger than this before it is limited."""

    def value(self, scope: KernelScope, text: str) -> Expression:
        """The element of a raised sum, less the operators behind its requantisation."""
        multiplier = scope.parameter(self.node.output, "multiplier", self.multiplier)
        offset = scope.parameter(self.node.output, "offset", self.offset)
        text = f"(multiply_add_upper({text}, {multiplier}, {offset}) >> {self.shift})"
        return Expression(text, "int32_t", -self.reach, self.reach)


def _requantisation(region: RegionParts) -> tuple[Node, Requantize, Clip] | None:
    """What the end of a region's sums begins with; None where that has no form for raised sums."""
    node, graph = next(iter(region.tree), None), region.graph
    if node is None or not isinstance(node.operator, Requantize) or node.inputs[0] != region.node.output:
        return None
    operator = node.operator
    users = [user.operator for user in graph.users()[node.output]]
    clip = users[0] if len(users) == 1 else None
    if not isinstance(clip, Clip) or any(name not in graph.constants for name in node.inputs[1:]):
        return None
    if operator.input_zero_point or operator.left_shift or operator.rounding not in (Rounding.DOUBLE, Rounding.SINGLE):
        return None
    if operator.rounding is Rounding.DOUBLE and clip.low < operator.output_zero_point:
        return None
    return node, operator, clip


def raised_end(region: RegionParts, sums: SumConstants) -> SumRequantisation | None:
    """How the sums of a layer of int8 are raised; None where that is not exact or they do not begin their end so.

    With r the shift to the right, m the multiplier and z the zero point, a sum v >= 0 rounded twice is
    floor((v * m / 2^31 + 1/2 + 2^(r - 1)) / 2^r) + z, as floors of floors are one. Raised by k >= 2 bits, with
    s = r + k - 1, that is floor((2^k * v * m / 2^32 + 2^(k - 2) + 2^(s - 1) + z * 2^s) / 2^s), whose three last terms
    are integers. Sums below 0 give z or less, in both. Rounded once, 1/2 and its term are not there, and v may have
    any sign.
    """
    found = _requantisation(region)
    if found is None:
        return None
    node, operator, clip = found
    constants, zero_point, twice = (
        region.graph.constants,
        operator.output_zero_point,
        operator.rounding is Rounding.DOUBLE,
    )
    multiplier, shift = np.broadcast_arrays(*(constants[name].astype(np.int64) for name in node.inputs[1:]))
    low, high, reach = _bounds(sums, len(multiplier))
    ends = [fixed_point(bound, multiplier, shift, operator.rounding) for bound in (low, high)]
    first, last = (np.clip(end + zero_point, clip.low, clip.high) for end in ends)
    still, right = first == last, -shift
    if still.all() or (multiplier[~still] < _EXACT).any() or right[~still].min() < 1:
        return None
    room = np.minimum(_MOST_RAISED, 31 - np.array([int(most).bit_length() for most in reach]))
    least, most = int(right[~still].max()) + (1 if twice else 0), int((right - 1 + room)[~still].min())
    total = next((one for one in _SHIFTS if least <= one <= most), least)
    if total > most:
        return None
    powers = np.where(still, 0, total + 1 - right)
    half = np.where(still, 0, (1 << powers >> 2 if twice else 0) + (1 << total - 1))
    offset = half + (np.where(still, first, zero_point) << total)
    farthest = int(np.abs(offset).max())
    if farthest >= _EXACT:
        return None
    factors = np.where(still, 0, multiplier).astype(np.int32)
    return SumRequantisation(node, powers, factors, offset.astype(np.int32), total, ((_EXACT + farthest) >> total) + 1)


def _bounds(sums: SumConstants, count: int) -> tuple[Array, Array, Array]:
    """The least and the largest value of the sums, and what no partial sum is larger than; of each channel, or of all
    where `count` is 1."""
    above, below = np.empty((2, len(sums.weights)), np.int64)
    for part in blocks(sums.weights):
        flat = sums.weights[part].reshape(len(sums.weights[part]), -1)
        above[part] = np.maximum(flat, 0).sum(axis=1, dtype=np.int64)
        below[part] = above[part] - flat.sum(axis=1, dtype=np.int64)
    start = sums.inside.astype(np.int64)
    low = start + _LOWEST * above - _HIGHEST * below
    high = start + _HIGHEST * above - _LOWEST * below
    reach = np.abs(start) - _LOWEST * (above + below)
    if count > 1:
        return low, high, reach
    return low.min(keepdims=True), high.max(keepdims=True), reach.max(keepdims=True)


@dataclass(frozen=True)
class RaisedNest(SumNest):
    """The nest of a sum of products of which the weights lie as 16 bits."""

    raised: SumRequantisation | None
    """None for sums that end as ever."""

    def powers(self, array: Array) -> Array:
        """An array of a row per channel as int64, raised."""
        wide = array.astype(np.int64)
        return wide if self.raised is None else wide << self.raised.powers.reshape(-1, *[1] * (array.ndim - 1))

    @property
    def begun(self) -> Array:
        """What each sum begins with."""
        return self.powers(self.sums.inside).astype(np.int32)

    def ended(self, text: str, index: Index) -> tuple[Sequence[Node], tuple[str, Expression]]:
        """The operators behind the C text of a sum at a place, and the value they begin with, by its name."""
        if self.raised is None:
            return self.region.tree, (self.region.node.output, self.sums.value(text))
        self.scope.index = index
        return self.region.tree[1:], (self.raised.node.output, self.raised.value(self.scope, text))
