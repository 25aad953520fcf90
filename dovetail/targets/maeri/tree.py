"""The augmented reduction tree: the adders that virtual neurons use, and where and how late their sums leave.

Level 0 is the root, level l has 2^l adder switches, the last level adds pairs of multipliers. Besides the link to its
parent, switch j of a level (j odd) has a link to switch j + 1, which has another parent; the two then are one double
switch. All others are single switches. A virtual neuron is a range of neighbouring multipliers. Level by level its
products are added in a range of neighbouring switches. Where one half of a double switch gets two of its values and the
other half one, the one goes over the link, and three are added; the half that is free then serves the next virtual
neuron. A sum that is in one switch, or in the two halves of a double one, is complete and leaves the tree there. (After
the MAERI paper, Kwon et al., ASPLOS 2018, section 4; for equal virtual neurons it gives the configurations published
with the RTL, maeri-project/MAERI_bsv configs/rn.)

The public simulator (stonne-simulator/stonne src/CompilerART.cpp) lets a half that adds two values send their sum over
the link as well. Words are those of the RTL; how late a sum leaves, and on which line, follows the simulator, whose
cycles are measured: `leaving`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat

from dovetail.errors import TargetError
from dovetail.records import Record
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.words import Count, Natural

Switch = tuple[int, int]
"""(level from the root, number from the left)."""


class Range(Record):
    """Neighbouring multipliers: [start, start + size)."""

    start: Natural
    size: Count

    @property
    def end(self) -> int:
        """One past the last."""
        return self.start + self.size

    def __str__(self) -> str:
        """The range as messages have it."""
        return f"[{self.start}, {self.end})"


class TreeConfiguration(Record):
    """A configuration of the tree."""

    outputs: tuple[Switch, ...]
    """The switch that gives out each virtual neuron's sum, in the order of the ranges."""
    loads: Mapping[Switch, Mapping[int, int]]
    """Values of each virtual neuron, by its number, that a switch adds up or passes on; a value that goes over the link
    to the neighbour counts there."""
    children: Mapping[Switch, set[int]]
    """The children of a switch that give it a value: numbers on the level below, or of multipliers."""


def configure(multipliers: int, ranges: Sequence[Range]) -> TreeConfiguration:
    """Map virtual neurons onto the tree.

    Args:
        multipliers: leaves, a power of two.
        ranges: one per virtual neuron, in any order.

    Raises:
        TargetError: two overlap, one lies outside, or two need the same adder.
    """
    end = 0
    for place in sorted(ranges, key=lambda each: each.start):
        if place.size < 1 or place.start < end or place.end > multipliers:
            what = f"the virtual neuron {place} overlaps another or leaves the {multipliers} multipliers"
            hint = "place virtual neurons side by side within the multipliers"
            raise TargetError(what, where="reduction tree", hint=hint)
        end = place.end
    outputs, loads, children = list[Switch](), dict[Switch, dict[int, int]](), dict[Switch, set[int]]()
    for number, place in enumerate(ranges):
        level, first, last = multipliers.bit_length() - 1, place.start, place.end - 1
        while len(outputs) == number:
            level, values = level - 1, Counter(child // 2 for child in range(first, last + 1))
            for child in range(first, last + 1):
                children.setdefault((level, child // 2), set()).add(child)
            first, last = first // 2, last // 2
            if last == first + 1 and first % 2 and values[first] == values[last]:
                last = first  # a whole double switch: its left half gives out the sum of both
            if first < last and first % 2 and values[first] == 1:
                values[first + 1] += values.pop(first)
                first += 1
            if first < last and last % 2 == 0 and values[last] == 1:
                values[last - 1] += values.pop(last)
                last -= 1
            for switch, count in values.items():
                loads.setdefault((level, switch), {})[number] = count
            if first == last:
                outputs.append((level, first))
    for (level, switch), load in loads.items():
        if len(load) > 1:
            one, other = (ranges[number] for number in sorted(load)[:2])
            what = f"the virtual neurons {one} and {other} both need adder {switch} of level {level}"
            raise TargetError(what, where="reduction tree", hint="place them elsewhere")
    return TreeConfiguration(tuple(outputs), loads, children)


def is_single(switch: Switch) -> bool:
    """True for the first and the last switch of a level; all others are halves of double switches."""
    return switch[1] in (0, (1 << switch[0]) - 1)


def double_switches(levels: int) -> list[Switch]:
    """The left halves of all double switches, from the root down, left to right."""
    return [(level, left) for level in range(levels) for left in range(1, (1 << level) - 1, 2)]


def single_switches(levels: int) -> list[Switch]:
    """The switches that stand alone, from the root down, left to right."""
    return [(level, edge) for level in range(levels) for edge in sorted({0, (1 << level) - 1})]


@lru_cache(maxsize=64)
def _line_inputs(multipliers: int, lines: int) -> Mapping[Switch, tuple[int, int]]:
    """The line each switch gives its sums to, and which of that line's inputs.

    The halves of a double switch share a line. Lines are dealt out to double switches, then to single ones, as the
    public simulator wires them.
    """
    levels = multipliers.bit_length() - 1
    doubles, inputs = double_switches(levels), dict[Switch, tuple[int, int]]()
    for number, (level, left) in enumerate(doubles):
        for half in (0, 1):
            inputs[level, left + half] = number % lines, number // lines * 2 + half
    for number, switch in enumerate(single_switches(levels)):
        inputs[switch] = (2 * len(doubles) + number) % lines, 2 * len(doubles) // lines + 1 + number // lines
    return inputs


class TreeExit(Record):
    """How a virtual neuron's sum leaves the tree."""

    switch: Switch
    first: int
    """Links from the virtual neuron's first multiplier to the switch."""
    most: int
    """Links from its farthest multiplier."""
    line: int
    """The line of the collection bus that takes the sum."""
    entry: int
    """Which input of the line."""


def leaving(config: MaeriConfig, place: Range) -> TreeExit:
    """How the sum of a virtual neuron leaves the tree; its own place alone decides that."""
    return _leaving(config.multipliers, config.collection, place)


@lru_cache(maxsize=65536)
def _leaving(multipliers: int, lines: int, place: Range) -> TreeExit:
    level, first, last = multipliers.bit_length() - 1, place.start, place.end - 1
    links = dict.fromkeys(range(first, last + 1), 0)
    start, start_links = first, 0
    while True:
        level, total, values = level - 1, last - first + 1, Counter(number // 2 for number in links)
        above: dict[int, int] = {}
        for number, count in links.items():
            above[number // 2] = max(above.get(number // 2, 0), count + 1)
        links, start, start_links = above, start // 2, start_links + 1
        first, last = first // 2, last // 2
        moves = []
        if first < last and first % 2 and values[first] < total - values[first]:
            moves.append((first, first + 1))
            first += 1
        if first < last and last % 2 == 0 and values[last] <= total - values[last]:
            moves.append((last, last - 1))
            last -= 1
        for sender, receiver in moves:
            links[receiver] = max(links[receiver], links.pop(sender) + 1)
            if start == sender:
                start, start_links = receiver, start_links + 1
        if first == last:
            return TreeExit((level, first), start_links, links[first], *_line_inputs(multipliers, lines)[level, first])


def sums_by_cycle(lines: Iterable[int]) -> list[int]:
    """Sums that the bus takes in each cycle of one round, if every virtual neuron gives one sum to its line."""
    counts = Counter(lines)
    return [sum(count > cycle for count in counts.values()) for cycle in range(max(counts.values(), default=1))]


def sums_taken(coming: Sequence[int], waiting: int = 0) -> list[int]:
    """Sums that the memory has taken after each cycle, until none is left.

    It takes half of the sums that wait, as in the public simulator, whose cycles are measured: of those that come in
    each cycle, and of those that wait from before.
    """
    counts, done, total = list[int](), 0, waiting + sum(coming)
    for sums in chain(coming, repeat(0)):
        if done == total:
            return counts
        waiting += sums
        done += waiting - waiting // 2
        waiting //= 2
        counts.append(done)
    return counts
