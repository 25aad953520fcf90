"""The augmented reduction tree: which adders virtual neurons take, where their sums leave it, and how late.

Level 0 is the root, level l has 2^l adder switches, the last level adds pairs of multipliers. Besides the link to its
parent, switch j of a level (j odd) has a link to switch j + 1, which has another parent; the two then are one double
switch. All others are single ones. A virtual neuron is a range of neighbouring multipliers. Level by level its products
are added in a range of neighbouring switches. Where one half of a double switch gets two of its values and the other
half one, the one goes over the link, and three are added; the half that is free then serves the next virtual neuron. A
sum that is in one switch, or in the two halves of a double one, is complete and leaves the tree there. (After the MAERI
paper, Kwon et al., ASPLOS 2018, section 4; for equal virtual neurons it gives the configurations published with the
RTL, maeri-project/MAERI_bsv configs/rn.)

The public simulator (stonne-simulator/stonne src/CompilerART.cpp) lets a half that adds two values send their sum over
the link as well. Words are those of the RTL; how late a sum leaves, and on which line, follows the simulator, whose
cycles are measured: `leaving`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dovetail.errors import TargetError

Switch = tuple[int, int]
"""(level from the root, number from the left)."""


@dataclass(frozen=True, slots=True)
class Range:
    """Neighbouring multipliers: [start, start + size)."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """One past the last."""
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class TreeConfiguration:
    """A configuration of the tree."""

    outputs: tuple[Switch, ...]
    """Where each virtual neuron's sum leaves, in the order of the ranges."""
    loads: dict[Switch, dict[int, int]]
    """How many values of each virtual neuron, by its number, a switch adds up or passes on; what goes over the link to
    the neighbour counts there."""
    links: dict[Switch, Switch]
    """Sender -> receiver of every link in use."""
    children: dict[Switch, set[int]]
    """Which of its children (numbers on the level below, multipliers under the last) give a switch a value."""


def configure(multipliers: int, ranges: Sequence[Range]) -> TreeConfiguration:
    """Map virtual neurons onto the tree.

    Args:
        multipliers: leaves, a power of two.
        ranges: one per virtual neuron, in any order.

    Raises:
        TargetError: two overlap, one lies outside, or two need the same adder.
    """
    _check_ranges(multipliers, ranges)
    levels = multipliers.bit_length() - 1
    loads: dict[Switch, dict[int, int]] = {}
    children: dict[Switch, set[int]] = {}
    links: dict[Switch, Switch] = {}
    outputs: list[Switch] = [(0, 0)] * len(ranges)
    for number, leaf in enumerate(ranges):
        first, last = leaf.start, leaf.end - 1
        for level in range(levels - 1, -1, -1):
            for child in range(first, last + 1):
                values = loads.setdefault((level, child // 2), {})
                values[number] = values.get(number, 0) + 1
                children.setdefault((level, child // 2), set()).add(child)
            first, last = first // 2, last // 2
            first, last = _over_links(level, first, last, links, loads, number)
            if first == last:
                outputs[number] = (level, first)
                break
    for place, values in loads.items():
        if len(values) > 1:
            one, other = sorted(values)[:2]
            what = f"the virtual neurons {_text(ranges[one])} and {_text(ranges[other])} both need adder"
            what += f" {place[1]} of level {place[0]}"
            raise TargetError(what, where="reduction tree", hint="place them elsewhere")
    return TreeConfiguration(tuple(outputs), loads, links, children)


def _check_ranges(multipliers: int, ranges: Sequence[Range]) -> None:
    end = 0
    for leaf in sorted(ranges, key=lambda each: each.start):
        if leaf.size < 1 or leaf.start < end or leaf.end > multipliers:
            what = f"the virtual neuron {_text(leaf)} overlaps another or leaves the {multipliers} multipliers"
            hint = "place virtual neurons side by side within the multipliers"
            raise TargetError(what, where="reduction tree", hint=hint)
        end = leaf.end


def _text(leaf: Range) -> str:
    return f"[{leaf.start}, {leaf.end})"


def _over_links(
    level: int, first: int, last: int, links: dict[Switch, Switch], loads: dict[Switch, dict[int, int]], number: int
) -> tuple[int, int]:
    """Send single values over the links at both ends; the range of switches that go on."""

    def send(sender: int, receiver: int) -> None:
        links[(level, sender)] = (level, receiver)
        loads[(level, receiver)][number] += loads[(level, sender)].pop(number)

    if last == first + 1 and first % 2 and loads[(level, first)][number] == loads[(level, last)][number]:
        links[(level, last)] = (level, first)  # a whole double switch: its left half gives out the sum of both
        return first, first
    if first < last and first % 2 and loads[(level, first)][number] == 1:
        send(first, first + 1)
        first += 1
    if first < last and last % 2 == 0 and loads[(level, last)][number] == 1:
        send(last, last - 1)
        last -= 1
    return first, last


def line(multipliers: int, lines: int, output: Switch) -> int:
    """The line of the collection bus a switch gives its sums to.

    The two halves of a double switch share one; lines are dealt out from the root to the leaves, left to right, first
    to double switches, then to single ones (as the public simulator wires them).
    """
    level, number = output
    if not is_single(output):
        return (sum(_doubles(upper) for upper in range(level)) + (number - 1) // 2) % lines
    doubles = 2 * sum(_doubles(each) for each in range(multipliers.bit_length() - 1))
    return (doubles + max(2 * level - 1, 0) + (1 if number else 0)) % lines


def entry_of(multipliers: int, lines: int, output: Switch) -> int:
    """Which input of its line a switch has; halves of a double switch have neighbouring ones (wired as `line` says)."""
    level, number = output
    doubles = sum(_doubles(each) for each in range(multipliers.bit_length() - 1))
    if is_single(output):
        return 2 * doubles // lines + 1 + (max(2 * level - 1, 0) + (1 if number else 0)) // lines
    return 2 * ((sum(_doubles(upper) for upper in range(level)) + (number - 1) // 2) // lines) + (number + 1) % 2


def is_single(place: Switch) -> bool:
    """Whether a switch stands alone: the first and the last of a level do."""
    return place[1] in (0, (1 << place[0]) - 1)


def _doubles(level: int) -> int:
    """Double switches of a level."""
    return max((1 << level) - 2, 0) // 2


@dataclass(frozen=True, slots=True)
class TreeExit:
    """How a virtual neuron's sum leaves the tree."""

    switch: Switch
    """Where."""
    first: int
    """Links from its first multiplier to there."""
    most: int
    """Links from its farthest multiplier."""


@lru_cache(maxsize=65536)
def leaving(multipliers: int, place: Range) -> TreeExit:
    """How a virtual neuron's sum leaves the tree; that depends on its own place only."""
    level, first, last = multipliers.bit_length() - 1, place.start, place.end - 1
    late, start, hops = dict.fromkeys(range(first, last + 1), 0), first, 0
    while True:
        level, values = level - 1, Counter(number // 2 for number in late)
        above: dict[int, int] = {}
        for number, links in late.items():
            above[number // 2] = max(above.get(number // 2, 0), links + 1)
        late, start, hops, total = above, start // 2, hops + 1, last - first + 1
        first, last = first // 2, last // 2
        moves = []
        if first < last and first % 2 and values[first] < total - values[first]:
            moves.append((first, first + 1))
            first += 1
        if first < last and last % 2 == 0 and values[last] <= total - values[last]:
            moves.append((last, last - 1))
            last -= 1
        for sender, receiver in moves:
            late[receiver] = max(late[receiver], late.pop(sender) + 1)
            if start == sender:
                start, hops = receiver, hops + 1
        if first == last:
            return TreeExit((level, first), hops, late[first])


def line_of(multipliers: int, lines: int, place: Range) -> int:
    """The line a virtual neuron gives its sums to."""
    return line(multipliers, lines, leaving(multipliers, place).switch)


def meeting(multipliers: int, lines: int, places: Iterable[Range]) -> list[int]:
    """How many sums of virtual neurons in step are taken in each of the cycles the bus needs for one of each."""
    counts = Counter(line_of(multipliers, lines, place) for place in places)
    return [sum(count > cycle for count in counts.values()) for cycle in range(max(counts.values(), default=1))]


def collisions(multipliers: int, lines: int, outputs: Sequence[Switch]) -> int:
    """Cycles the bus needs for one sum of every virtual neuron: the most that share a line."""
    counts = Counter(line(multipliers, lines, output) for output in outputs)
    return max(counts.values(), default=1)
