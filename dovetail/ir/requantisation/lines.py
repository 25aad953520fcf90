"""Sums of the MAC array to int8 in few instructions: a line for each channel, exact for every sum it can meet.

Requantisation is a staircase over the sums. Where each of its 255 steps stands is known, so a line
((sum * 2^raise + addition) * factor) / 2^48 whose whole part has the same steps gives the same bytes. Where results up
to zero are rounded another way than those above, what is not negative gains a number of its channel on the way.
`narrow_sums` (kernels/runtime/integers.c) computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from math import ceil, log2

import numpy as np

from dovetail.ir.operators.arithmetic import Requantize
from dovetail.ir.types import Array
from dovetail.records import Record

_NEAR = 3
"""Sums around where a step should be in which it is looked for."""
_LIMIT = 1 << 30
"""More than any sum."""
_FACTORS = 64
"""Factors tried, each way from the nearest."""
_FINER = 3
"""By how many bits more sums are raised at most than they need be."""
_FINE = 16
"""Additions tried within one sum."""


class ChannelLines(Record):
    """The lines of some channels."""

    additions: Array
    """int32 [channels], as are `factors` and `gains`."""
    factors: Array
    gains: Array | None
    """In 2^-16; None where nothing gains."""
    raise_by: int
    """Bits sums are raised by first."""
    centre: int
    """Number added to results at the end, before they are limited to 0 to 255."""

    def of(self, first: int, last: int) -> ChannelLines:
        """The lines of the channels from `first` to before `last`."""
        own = slice(first, last)
        gains = None if self.gains is None else self.gains[own]
        return replace(self, additions=self.additions[own], factors=self.factors[own], gains=gains)

    def numbers(self) -> Array:
        """As `narrow_sums` takes them: four channels after the other, int32."""
        used = (self.additions, self.factors) + (() if self.gains is None else (self.gains,))
        padded = [np.pad(one, (0, -len(one) % 4)).reshape(-1, 4) for one in used]
        return np.concatenate(padded, axis=1).astype(np.int32).reshape(-1)


def lines_of(operator: Requantize, multiplier: Array, shift: Array, folded: Array, reach: Array) -> ChannelLines | None:
    """The lines of `operator` behind the addition of `folded`, limited to int8; None where there are none.

    Args:
        operator: the requantisation.
        multiplier: int32 [1 or channels], and shift: its operands.
        folded: int32 [channels], added to the sums.
        reach: int64 [channels], the most a sum can be, either way.
    """
    given = [np.broadcast_to(np.asarray(one, np.int64), folded.shape) for one in (multiplier, shift, folded, reach)]
    return _lines(operator, *(tuple(one.tolist()) for one in given))


@lru_cache(maxsize=512)
def _lines(
    operator: Requantize, multiplier: Sequence[int], shift: Sequence[int], folded: Sequence[int], reach: Sequence[int]
) -> ChannelLines | None:
    scale = np.array([max(m, 1) * 2.0 ** (s - 31) for m, s in zip(multiplier, shift, strict=True)])
    most = np.array(reach)
    added = np.where(most > 0, folded, 0)
    raise_by = max(0, ceil(17 + log2(scale.max())))  # so that the largest factor is one of 32 bits
    if operator.left_shift or operator.input_zero_point or raise_by > 16 or int((most + np.abs(added)).max()) >= _LIMIT:
        return None
    steps = _steps(operator, np.array(multiplier), np.array(shift), scale, added)
    if steps is None:
        return None
    always = np.asarray(operator.evaluate([np.array(folded), np.array(multiplier), np.array(shift)]))
    results = np.arange(-127, 128)[:, None]
    steps = np.where(most > 0, steps, np.where(results <= always, 0, 1))  # without weights: one result
    given = [(operator, *one) for one in zip(multiplier, shift, folded, reach, strict=True)]
    for centre in (None, 128 + operator.output_zero_point):
        for finer in range(_FINER):
            kind = [_Channel(steps[:, n], float(scale[n]), reach[n], raise_by + finer) for n in range(len(scale))]
            if lines := _all_channels(kind, given, centre):
                return lines
    return None


_KNOWN: dict[tuple[object, ...], tuple[int, int, int] | None] = {}
"""Lines of channels that were looked for: those of a part of a layer are mostly the same."""
_MOST_KNOWN = 1 << 16


def _line_of(
    channel: _Channel, given: tuple[Requantize, int, int, int, int], centre: int | None
) -> tuple[int, ...] | None:
    """The line of a channel, of `given` operator, multiplier, shift, folded sum and reach."""
    key = (*given, channel.raise_by, centre)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = channel.plain() if centre is None else channel.gaining(centre, given[2])
    return _KNOWN[key]


def _all_channels(
    channels: Sequence[_Channel], given: Sequence[tuple[Requantize, int, int, int, int]], centre: int | None
) -> ChannelLines | None:
    """The lines of all channels, of which each gains something above results of 0 where there is a `centre`."""
    found = (_line_of(one, numbers, centre) for one, numbers in zip(channels, given, strict=True))
    numbers_of = list(takewhile(lambda one: one is not None, found))
    if len(numbers_of) < len(channels):
        return None
    raise_by, most = channels[0].raise_by, np.array([one.reach for one in channels])
    additions, factors, gains = (np.array(one, np.int64) for one in zip(*numbers_of, strict=True))
    raised = (most << raise_by) + np.abs(additions)
    whole = ((raised * factors) >> 48) + (np.abs(gains) >> 16) + abs(centre or 0) + 2
    if int(raised.max()) >= 1 << 31 or int(whole.max()) >= 1 << 15 or int(np.abs(gains).max()) >= _LIMIT:
        return None
    narrow = [one.astype(np.int32) for one in (additions, factors, gains)]
    return ChannelLines(narrow[0], narrow[1], None if centre is None else narrow[2], raise_by, centre or 0)


def _steps(operator: Requantize, multiplier: Array, shift: Array, scale: Array, folded: Array) -> Array | None:
    """[255, channels] the least sum of each result above -128; None where they are not where they should be."""
    results = np.arange(-127, 128)[:, None]
    middle = np.round((results - operator.output_zero_point - 0.5) / scale)
    middle = np.clip(middle, -_LIMIT, _LIMIT).astype(np.int64)
    around = middle + np.arange(-_NEAR, _NEAR + 1)[:, None, None]
    reached = np.asarray(operator.evaluate([around, multiplier, shift])) >= results
    near = np.abs(middle) < _LIMIT  # no sum comes near the others
    if (reached[0] & near).any() or not (reached[-1] | ~near).all():
        return None
    return np.asarray(middle - _NEAR + reached.argmax(axis=0) - folded)


class _Channel(Record):
    """A channel whose line is looked for.

    A result is reached where (sum * 2^raise + addition) * factor >= wanted * 2^32, so each step bounds the addition
    from below, and the sum before it from above. Sums beyond `reach` are none.
    """

    steps: Array
    scale: float
    reach: int
    raise_by: int

    def _before(self) -> tuple[Array, Array]:
        """The sums at the steps and before them, within reach, raised."""
        at, before = np.maximum(self.steps, -self.reach), np.minimum(self.steps - 1, self.reach)
        return at << self.raise_by, before << self.raise_by

    def _tightest(self, at: Array, before: Array) -> tuple[int, int]:
        """The largest lower bound and the least upper one."""
        low = at[self.steps <= self.reach].max(initial=-(1 << 62))
        return int(low), int(before[self.steps > -self.reach].min(initial=1 << 62))

    def _bounded(self, factor: int, wanted: Array) -> tuple[int, int]:
        at, before = self._before()
        places = -(-(wanted << 32) // factor)
        low, high = self._tightest(places - at, places - 1 - before)
        return max(low, 1 - (1 << 31)), min(high, (1 << 31) - 1)

    def _factors(self) -> list[int]:
        nearest = round(self.scale * 2.0 ** (48 - self.raise_by))
        if self.reach == 0:
            return [1 << 30]  # always the same sum
        near = range(nearest - _FACTORS, nearest + _FACTORS + 1)
        return [factor for factor in sorted(near, key=lambda one: abs(one - nearest)) if 0 < factor < 1 << 31]

    def plain(self) -> tuple[int, int, int] | None:
        """(addition, factor, 0)."""
        for factor in self._factors():
            low, high = self._bounded(factor, np.arange(1, 256, dtype=np.int64) << 16)
            if low <= high:
                return (low + high) // 2, factor, 0
        return None

    def gaining(self, centre: int, shift: int) -> tuple[int, int, int] | None:
        """(addition, factor, gain): results above 0 gain one unit of the upper product, or all results what fits."""
        results = np.arange(1, 256, dtype=np.int64) - centre
        for factor in self._factors():
            for gain in (1 << max(16 + shift, 0)) + np.array([0, -1, 1, -2, 2]):
                low, high = self._bounded(factor, (results << 16) - gain * (results > 0))
                if low <= high:
                    return (low + high) // 2, factor, int(gain)
        at, before = self._before()
        for factor in self._factors()[:8]:
            for part in range(_FINE):
                addition = (self.reach << self.raise_by) + (part << self.raise_by) // _FINE  # nothing is below zero
                lines = [(results << 16) - ((sums + addition) * factor >> 32) for sums in (at, before)]
                low, high = self._tightest(lines[0], lines[1] - 1)
                if low <= high:
                    return addition, factor, (max(low, -_LIMIT) + min(high, _LIMIT)) // 2
        return None
