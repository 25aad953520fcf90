"""Sums that go round without an accumulation buffer: through the tree, a line, the memory, and a port back to the
virtual neuron's first multiplier, which adds them to the next step's products.

How long that takes depends on who meets whom on lines, in the memory's queue and at ports, so it is played through,
cycle by cycle, for a few hundred steps; longer runs are scaled up from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

MOST_STEPS = 400
"""Steps of a virtual neuron that are played through."""


@dataclass(frozen=True, slots=True)
class Circle:
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


@lru_cache(maxsize=1024)
def feedback(circles: tuple[Circle, ...], entries: int, folds: int, delay: int, positions: int) -> int:
    """Cycles from the first product until the last sum of so many positions leaves the tree.

    Args:
        circles: one per virtual neuron.
        entries: inputs of a line, asked in turn.
        folds: steps of a sum, at least 2.
        delay: cycles between a port and its multipliers.
        positions: sums of each virtual neuron.
    """
    steps = min(folds, MOST_STEPS // 2)
    played = max(1, min(positions, MOST_STEPS // steps))
    last = _play(circles, entries, steps, delay, played)
    least = min(circle.first for circle in circles) + 2 + delay
    span = last - max(circle.most for circle in circles) - 1
    return -(-span * positions * ((folds - 1) * least + 1) // (played * ((steps - 1) * least + 1)))


def _play(circles: Sequence[Circle], entries: int, steps: int, delay: int, positions: int) -> int:
    """The cycle in which the memory takes the last sum; every first step begins in cycle 0 with its zero."""
    numbers = range(len(circles))
    coming: dict[int, list[int]] = {}  # at the bus, by cycle
    for number in numbers:
        coming.setdefault(circles[number].most, []).append(number)
    lines: dict[int, dict[int, deque[int]]] = {circle.line: {} for circle in circles}
    turn = dict.fromkeys(lines, 0)
    taken: dict[int, list[int]] = {}  # by the lines, by cycle
    waiting, ports = deque[int](), {circle.port: deque[int]() for circle in circles}
    sent: dict[int, list[int]] = {}  # by ports, by the cycle they reach their multiplier
    begun, done, cycle, missing = [0] * len(circles), [0] * len(circles), 0, len(circles) * steps * positions
    while missing:
        waiting.extend(sorted(taken.pop(cycle, ()), key=lambda number: circles[number].line))
        for _ in range(-(-len(waiting) // 2)):  # the memory takes half of what waits
            number = waiting.popleft()
            done[number] += 1
            missing -= done[number] <= steps * positions
            if done[number] % steps:
                ports[circles[number].port].append(number)
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
            begun[number] += 1
            if begun[number] % steps == steps - 1 and begun[number] < steps * positions:
                coming.setdefault(cycle + 1 + circles[number].first, []).append(number)  # the next sum's zero
                begun[number] += 1
        cycle += 1
    return cycle - 1
