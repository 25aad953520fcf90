"""Multipliers of few bits that give the results of others: for every sum a layer can have, proven by where its results
change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding, fixed_point
from dovetail.ir.requantisation.bounds import last_where
from dovetail.ir.types import Array
from dovetail.records import Record

HALVES = {Rounding.SINGLE: (1, 1), Rounding.AWAY: (1, 0), Rounding.DOWN: (0, 0)}
"""Roundings of one product and one shift. A result is y or more from (y - half) * 2**shift on, with half a half or 0
(the first number, in halves); of a y of 0 or less that very product too, or only greater ones (the second, 0)."""
_BITS = 34
"""Bits of the numbers a sum may be."""


class LimitedSums(Record):
    """A limited requantisation of sums within a range, per channel."""

    operator: Requantize
    limits: Clip
    multiplier: Array
    shift: Array
    low: Array
    """Least sum, int64 [channels]."""
    high: Array

    def result(self, sums: Array) -> Array:
        """The results of sums int64 [channels]."""
        scaled = fixed_point(sums, self.multiplier, self.shift, self.operator.rounding)
        return np.asarray(np.clip(scaled + self.operator.output_zero_point, self.limits.low, self.limits.high))

    def changes(self) -> Iterator[tuple[int, Array]]:
        """Each result above the least, without the zero point, and the greatest sum that gives less: one below the
        range where all give as much."""
        for result in range(self.limits.low + 1, self.limits.high + 1):
            yield result - self.operator.output_zero_point, self._below(result)

    def _below(self, result: int) -> Array:
        return last_where(lambda sums: self.result(sums) < result, self.low - 1, self.high, _BITS)


def equal_scales(wanted: LimitedSums, rounding: Rounding, bits: int, common: bool) -> tuple[Array, Array] | int:
    """Multipliers of so many bits, and shifts, that give the same result for every sum; where there are none, the
    number of a channel without. Of shifts the largest is taken, `common` to all channels or each its own.

    Multipliers are as `Requantize` has them, with their highest bits below 2**31: bits `bits` to 30 of a factor.
    """
    channels = len(wanted.low)
    changes = [(result, [int(one) for one in below]) for result, below in wanted.changes()]
    factor = np.broadcast_to(wanted.multiplier * 2.0 ** (wanted.shift - 31.0), channels)
    found: list[dict[int, int]] = []
    for channel in range(channels):
        ends = int(wanted.low[channel]), int(wanted.high[channel])
        own = [(result, below[channel]) for result, below in changes]
        most = bits + 31  # the most that `Requantize` has
        most = min(most, bits - int(np.floor(np.log2(factor[channel])))) if factor[channel] > 0 else most
        shifts = range(max(most, 1), max(most - (bits if common else 3), 0), -1)
        found.append(_fits(own, ends, shifts, rounding, bits))
        if not (common or found[-1]):  # few sums are equal with a factor that is far from theirs, too
            found[-1] = _fits(own, ends, range(bits + 31, 0, -1), rounding, bits)
        if not found[-1]:
            return channel
    shared = set.intersection(*(set(one) for one in found)) if common else set[int]()
    if common and not shared:
        return int(factor.argmin())
    chosen = [max(shared) if common else max(one) for one in found]
    multipliers = [one[shift] for one, shift in zip(found, chosen, strict=True)]
    places = np.array(chosen[:1] if common else chosen, np.int64)
    return np.array(multipliers, np.int64) << (31 - bits), bits - places


def _fits(
    changes: list[tuple[int, int]], ends: tuple[int, int], shifts: Sequence[int], rounding: Rounding, bits: int
) -> dict[int, int]:
    """The multiplier of each shift that has one."""
    fits = {shift: _multiplier(changes, ends, shift, rounding, bits) for shift in shifts}
    return {shift: multiplier for shift, multiplier in fits.items() if multiplier is not None}


def _multiplier(
    changes: list[tuple[int, int]], ends: tuple[int, int], shift: int, rounding: Rounding, bits: int
) -> int | None:
    """The least multiplier with which results change where they should; None where there is none."""
    low, high = 0, (1 << bits) - 1
    half, up = HALVES[rounding]
    for result, below in changes:
        # sum * multiplier >= bound, or > bound, gives `result` or more
        bound, strict = (2 * result - half) << shift, result <= 0 and half and not up
        for number, reaches in ((below, False), (below + 1, True)):
            if not ends[0] <= number <= ends[1]:
                continue
            least, most = _interval(2 * number, bound, reaches, bool(strict))
            low, high = max(low, least), min(high, most)
            if low > high:
                return None
    return low


_ANY = 1 << 40


def _interval(number: int, bound: int, reaches: bool, strict: bool) -> tuple[int, int]:
    """The multipliers m, from 0 on, for which number * m >= bound (> bound where `strict`) holds, or does not."""
    if not reaches:  # number * m < bound, or <= bound where strict: the same of the negated numbers
        number, bound, strict = -number, -bound, not strict
    bound += strict
    if number == 0:
        return (0, _ANY) if bound <= 0 else (1, 0)
    if number > 0:
        return -(-bound // number), _ANY
    return 0, bound // number
