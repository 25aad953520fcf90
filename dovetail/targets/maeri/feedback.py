"""Sums that go round without an accumulation buffer.

A sum goes from the tree through a line, the memory and a port back to the first multiplier of its virtual neuron, which
adds it to the products of the next step. The time of that depends on which sums meet on lines, in the queue of the
memory and at ports. So it is played cycle by cycle until the state is that of some positions before; from then on it
repeats.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from dovetail.targets.maeri.tree import TreeExit

MOST_STEPS = 300
"""Steps of a virtual neuron that are played at most for the long run, but two positions at least."""
SHORT = 120
"""Sums of at most so many steps are played to their end; later, the end of the first virtual neurons no longer
counts."""


@dataclass(frozen=True)
class FeedbackRun:
    """Cycles in which the memory takes the finished sums of some virtual neurons."""

    ends: tuple[tuple[int, ...], ...]
    """Cycles of the first sums of each virtual neuron."""
    repeated: tuple[int, ...]
    """Number of last sums of each virtual neuron that repeat over and over."""
    period: tuple[int, ...]
    """Cycles between one repetition and the next."""

    def end(self, number: int, count: int) -> int:
        """The cycle in which the memory takes sum `count` (from 1) of a virtual neuron."""
        ends = self.ends[number]
        if count <= len(ends):
            return ends[count - 1]
        repetitions = -(-(count - len(ends)) // self.repeated[number])
        return ends[count - repetitions * self.repeated[number] - 1] + repetitions * self.period[number]


@dataclass(frozen=True, slots=True)
class FeedbackLoops:
    """The way round of the sums of virtual neurons side by side."""

    exits: tuple[TreeExit, ...]
    """Of each virtual neuron."""
    ports: tuple[int, ...]
    """The port that feeds the first multiplier of each."""
    entries: int
    """Inputs of a line, asked in turn."""
    folds: int
    """Steps of a sum, at least 2."""
    delay: int
    """Cycles between a port and its multipliers."""

    @property
    def alone(self) -> int:
        """Cycles of a position of the first virtual neuron, if no other sums are in its way."""
        return (self.folds - 1) * (self.exits[0].first + 2 + self.delay) + 1

    def until(self, count: int) -> int:
        """Cycles from the first product until every virtual neuron has given `count` sums to the bus."""
        if len(self.exits) == 1:
            return count * self.alone
        run = _played(self, count if count * self.folds <= SHORT else 0)
        return max(run.end(number, count) for number in range(len(self.exits))) - self._climb

    def pace(self, positions: int) -> tuple[int, int]:
        """(cycles, positions) of the slowest virtual neuron in the long run, where each has `positions` in all."""
        if len(self.exits) == 1:
            return self.alone, 1
        if positions * self.folds <= SHORT:
            return self.until(positions), positions
        run = _played(self, 0)
        return max(zip(run.period, run.repeated, strict=True), key=lambda pair: pair[0] / pair[1])

    @property
    def _climb(self) -> int:
        """Cycles that the sum of a first product takes to the memory, on the longest way."""
        return max(exit_.most for exit_ in self.exits) + 1


@lru_cache(maxsize=4096)
def _played(loops: FeedbackLoops, count: int) -> FeedbackRun:
    """Play until the state repeats, or until `count` positions have ended (0: without an end)."""
    return play_feedback(loops, count, loops.folds * count or max(MOST_STEPS, 2 * loops.folds))


def play_feedback(loops: FeedbackLoops, positions: int, horizon: int) -> FeedbackRun:
    """Play sums from cycle 0 on, in which every virtual neuron multiplies for the first time.

    Args:
        loops: the way of the sums.
        positions: sums of each virtual neuron; 0 if there is always a next one.
        horizon: steps of each virtual neuron to play at most, if the state does not repeat before.
    """
    play, steps, period, repeated = _FeedbackPlay(loops, loops.folds * positions), loops.folds, 0, list[int]()
    seen: dict[str, tuple[int, list[int]]] = {}
    while not period and min(map(len, play.taken)) < horizon:
        if play.turn():
            counts = [len(cycles) for cycles in play.taken]
            cycle, before = seen.setdefault(play.state(), (play.cycle, counts))
            period, repeated = (
                play.cycle - cycle,
                [(now - then) // steps for now, then in zip(counts, before, strict=True)],
            )
    ends = tuple(tuple(cycles[steps - 1 :: steps]) for cycles in play.taken)
    if period:
        return FeedbackRun(ends, tuple(repeated), (period,) * len(ends))
    return FeedbackRun(ends, tuple(max(len(own) - 1, 1) for own in ends), tuple(own[-1] - own[0] for own in ends))


class _FeedbackPlay:
    """Sums on their way round, as numbers of their virtual neurons, by the cycle in which they get somewhere."""

    def __init__(self, loops: FeedbackLoops, last: int) -> None:
        """`last`: sums of all steps that each virtual neuron gives; 0 if there is no last one."""
        self.loops, self.last, self.cycle = loops, last, -1
        self.taken = [list[int]() for _ in loops.exits]
        """Cycles in which the memory took the sums of each virtual neuron."""
        self.at_lines, self.at_multipliers = dict[int, list[int]](), dict[int, list[int]]()
        self.inputs: dict[int, dict[int, deque[int]]] = {exit_.line: {} for exit_ in loops.exits}
        self.turns = dict.fromkeys(self.inputs, 0)
        """The input of each line that is asked next."""
        self.on_lines, self.waiting = list[int](), deque[int]()
        self.ports: dict[int, deque[int]] = {port: deque() for port in loops.ports}
        self.begun = [0] * len(loops.exits)
        """Steps of the present sum that each virtual neuron has begun."""
        for number, exit_ in enumerate(loops.exits):
            self.at_lines.setdefault(exit_.most + 1, []).append(number)

    def state(self) -> str:
        """Everything that decides what comes next, with cycles counted from now."""
        parts = [len(cycles) % self.loops.folds for cycles in self.taken]
        moving = (self.at_lines, self.at_multipliers)
        events = [sorted((at - self.cycle, each) for at, each in own.items()) for own in moving]
        queues = [[tuple(own) for _, own in sorted(each.items())] for each in (self.ports, *self.inputs.values())]
        return repr((events, queues, self.on_lines, self.waiting, self.turns, self.begun, parts))

    def turn(self) -> bool:
        """Play one cycle; whether the first virtual neuron has finished a sum."""
        self.cycle += 1
        self.waiting.extend(sorted(self.on_lines, key=lambda number: self.loops.exits[number].line))
        finished = [self._take(self.waiting.popleft()) for _ in range(-(-len(self.waiting) // 2))]
        for queue in self.ports.values():
            if queue:
                self.at_multipliers.setdefault(self.cycle + self.loops.delay, []).append(queue.popleft())
        self._serve_lines()
        for number in self.at_multipliers.pop(self.cycle, ()):
            self._multiply(number)
        return 0 in finished

    def _take(self, number: int) -> int | None:
        """Take one of the sums that wait, of which the memory takes half in a cycle; its number if it is finished."""
        self.taken[number].append(self.cycle)
        if len(self.taken[number]) % self.loops.folds == 0:
            return number
        self.ports[self.loops.ports[number]].append(number)
        return None

    def _serve_lines(self) -> None:
        """Each line takes one sum; its inputs are asked in turn."""
        for number in self.at_lines.pop(self.cycle, ()):
            exit_ = self.loops.exits[number]
            self.inputs[exit_.line].setdefault(exit_.entry, deque()).append(number)
        self.on_lines = []
        for line, inputs in self.inputs.items():
            if any(inputs.values()):
                while not inputs.get(self.turns[line]):
                    self.turns[line] = (self.turns[line] + 1) % self.loops.entries
                self.on_lines.append(inputs[self.turns[line]].popleft())
                self.turns[line] = (self.turns[line] + 1) % self.loops.entries

    def _multiply(self, number: int) -> None:
        """Add the products of the next step to a sum that has come back."""
        at_line = self.cycle + self.loops.exits[number].first + 1
        self.at_lines.setdefault(at_line, []).append(number)
        self.begun[number] = (self.begun[number] + 1) % self.loops.folds
        is_last = self.last and len(self.taken[number]) >= self.last - 2
        if self.begun[number] == self.loops.folds - 1 and not is_last:
            self.at_lines.setdefault(at_line + 1, []).append(number)  # the next sum begins with a zero
            self.begun[number] = 0
