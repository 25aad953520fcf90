"""Sums that go round without an accumulation buffer: through the tree, a line, the memory, and a port back to the
virtual neuron's first multiplier, which adds them to the next step's products.

How long that takes depends on who meets whom on lines, in the memory's queue and at ports, so it is played through,
cycle by cycle, until all is as it was some positions before, and goes on so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

MOST_STEPS = 300
"""Steps of a virtual neuron that are played through at most, but two positions at least."""
SHORT = 120
"""Steps after which who is done sooner, and out of the others' way, no longer counts."""


@dataclass(frozen=True, slots=True)
class FeedbackLoop:
    """The way of one virtual neuron's sums."""

    first: int
    """Links from its first multiplier to where its sum leaves the tree."""
    most: int
    """Links from its farthest multiplier."""
    line: int
    """Of the bus."""
    entry: int
    """Which input of the line."""
    port: int
    """Of the distribution tree, that feeds its first multiplier."""


@dataclass(frozen=True, slots=True)
class FeedbackTiming:
    """How long sums of some virtual neurons go round together."""

    circles: tuple[FeedbackLoop, ...]
    """One per virtual neuron."""
    entries: int
    """Inputs of a line, asked in turn."""
    folds: int
    """Steps of a sum, at least 2."""
    delay: int
    """Cycles between a port and its multipliers."""
    positions: int
    """Sums of each virtual neuron for one filter."""

    def until(self, count: int) -> int:
        """Cycles from the first product until so many sums of each virtual neuron have left the tree."""
        if len(self.circles) == 1:
            return count * self._alone
        played = _played(self, count if count * self.folds <= SHORT else 0)
        return max(played.end(number, count) for number in range(len(self.circles)))

    @property
    def pace(self) -> tuple[int, int]:
        """(cycles, positions) of the slowest on the long run."""
        if len(self.circles) == 1:
            return self._alone, 1
        if self.positions * self.folds <= SHORT:
            return self.until(self.positions), self.positions
        played = _played(self, 0)
        return max(zip(played.later, played.again, strict=True), key=lambda pair: pair[0] / pair[1])

    @property
    def _alone(self) -> int:
        """Cycles of a position where nobody is in the way."""
        return (self.folds - 1) * (self.circles[0].first + 2 + self.delay) + 1


@dataclass(frozen=True, slots=True)
class _SumExits:
    """When sums leave the tree."""

    ends: tuple[tuple[int, ...], ...]
    """Of each virtual neuron: cycles from the first product until its first sums have, one after the other."""
    again: tuple[int, ...]
    """So many of its last ones come again ..."""
    later: tuple[int, ...]
    """... so many cycles later, over and over."""

    def end(self, number: int, count: int) -> int:
        """Cycles from the first product until so many of a virtual neuron's sums have."""
        own = self.ends[number]
        if count <= len(own):
            return own[count - 1]
        rounds = -(-(count - len(own)) // self.again[number])
        return own[count - rounds * self.again[number] - 1] + rounds * self.later[number]


@lru_cache(maxsize=4096)
def _played(going: FeedbackTiming, count: int) -> _SumExits:
    """Play until all comes again, or so many positions (0: on and on)."""
    done, cycles, again = _play(going.circles, going.entries, going.folds, going.delay, count)
    off = max(circle.most for circle in going.circles) + 1
    ends = tuple(tuple(cycle - off for cycle in own[going.folds - 1 :: going.folds]) for own in done)
    if cycles:
        return _SumExits(ends, tuple(again), (cycles,) * len(ends))
    return _SumExits(ends, tuple(max(len(own) - 1, 1) for own in ends), tuple(own[-1] - own[0] for own in ends))


def _play(
    circles: Sequence[FeedbackLoop], entries: int, steps: int, delay: int, count: int
) -> tuple[list[list[int]], int, list[int]]:
    """The cycles in which the memory takes each one's sums, and after how many all is as it was how many positions
    before (0: not seen); every first step begins in cycle 0 with its zero."""
    coming: dict[int, list[int]] = {}  # at the bus, by cycle
    for number, circle in enumerate(circles):
        coming.setdefault(circle.most, []).append(number)
    lines: dict[int, dict[int, deque[int]]] = {circle.line: {} for circle in circles}
    turn = dict.fromkeys(lines, 0)
    taken: dict[int, list[int]] = {}  # by the lines, by cycle
    waiting, ports = deque[int](), {circle.port: deque[int]() for circle in circles}
    sent: dict[int, list[int]] = {}  # by ports, by the cycle they reach their multiplier
    begun, done, cycle = [0] * len(circles), [list[int]() for _ in circles], 0
    most = steps * count if count else max(MOST_STEPS, 2 * steps)
    seen: dict[Hashable, tuple[int, list[int]]] = {}
    while min(map(len, done)) < most:
        waiting.extend(sorted(taken.pop(cycle, ()), key=lambda number: circles[number].line))
        opens = False
        for _ in range(-(-len(waiting) // 2)):  # the memory takes half of what waits
            number = waiting.popleft()
            done[number].append(cycle)
            if len(done[number]) % steps:
                ports[circles[number].port].append(number)
            opens |= number == 0 and len(done[0]) % steps == 0
        for queue in ports.values():
            if queue:
                sent.setdefault(cycle + delay, []).append(queue.popleft())
        for number in coming.pop(cycle - 1, ()):
            lines[circles[number].line].setdefault(circles[number].entry, deque()).append(number)
        for name, inputs in lines.items():
            if any(inputs.values()):
                while not inputs.get(turn[name]):
                    turn[name] = (turn[name] + 1) % entries
                taken.setdefault(cycle + 1, []).append(inputs[turn[name]].popleft())
                turn[name] = (turn[name] + 1) % entries
        for number in sent.pop(cycle, ()):
            coming.setdefault(cycle + circles[number].first, []).append(number)
            begun[number] = (begun[number] + 1) % steps
            if begun[number] == steps - 1 and (not count or len(done[number]) < most - 2):
                coming.setdefault(cycle + 1 + circles[number].first, []).append(number)  # the next sum's zero
                begun[number] = 0
        if opens:
            moving = [sorted((at - cycle, tuple(own)) for at, own in each.items()) for each in (coming, taken, sent)]
            still = [[tuple(queue) for _, queue in sorted(own.items())] for own in (ports, *lines.values())]
            key = repr((moving, still, waiting, turn, begun, [len(own) % steps for own in done]))
            before = seen.setdefault(key, (cycle, [len(own) for own in done]))
            if before[0] < cycle:
                again = [(len(own) - then) // steps for own, then in zip(done, before[1], strict=True)]
                return done, cycle - before[0], again
        cycle += 1
    return done, 0, []
