"""The augmented reduction tree: the adders that virtual neurons use, and where and how late their sums leave.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import MaeriConfig

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


@dataclass(frozen=True, slots=True)
class TreeExit:
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
