"""The augmented reduction tree: which adders sum which virtual neurons, and where the sums come out.

Level 0 is the root, level l has 2^l adder switches, the last level adds pairs of multipliers. Besides the link to its
parent, switch j of a level (j odd) has a link to switch j + 1, which has another parent; the two then are one double
switch. All others are single ones.

A virtual neuron is a range of neighbouring multipliers. Level by level its products are added in a range of
neighbouring switches. Where one half of a double switch gets two of its values and the other half one, the one goes
over the link, and three are added; the half that is free then serves the next virtual neuron. A sum that is in one
switch, or in the two halves of a double one, is complete and leaves the tree there. (After the MAERI paper, Kwon et
al., ASPLOS 2018, section 4; for equal virtual neurons it gives the configurations published with the RTL,
maeri-project/MAERI_bsv configs/rn.)
"""

from __future__ import annotations

from collections.abc import Sequence
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
class Tree:
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


def configure(multipliers: int, ranges: Sequence[Range]) -> Tree:
    """Map virtual neurons onto the tree.

    Args:
        multipliers: leaves, a power of two.
        ranges: one per virtual neuron, in any order.

    Raises:
        TargetError: two overlap, one lies outside, or two need the same adder.
    """
    _check(multipliers, ranges)
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
            raise TargetError(f"the virtual neurons {_text(ranges[one])} and {_text(ranges[other])} both need adder "
                              f"{place[1]} of level {place[0]}", where="reduction tree", hint="place them elsewhere")
    return Tree(tuple(outputs), loads, links, children)


def _check(multipliers: int, ranges: Sequence[Range]) -> None:
    end = 0
    for leaf in sorted(ranges, key=lambda each: each.start):
        if leaf.size < 1 or leaf.start < end or leaf.end > multipliers:
            raise TargetError(f"the virtual neuron {_text(leaf)} overlaps another or leaves the {multipliers} "
                              "multipliers", where="reduction tree",
                              hint="place virtual neurons side by side within the multipliers")
        end = leaf.end


def _text(leaf: Range) -> str:
    return f"[{leaf.start}, {leaf.end})"


def _over_links(
    level: int, first: int, last: int, links: dict[Switch, Switch], loads: dict[Switch, dict[int, int]], number: int
) -> tuple[int, int]:
    """Send single values over the links at both ends; the range of switches that go on."""
    if last == first + 1 and first % 2 and loads[(level, first)][number] == loads[(level, last)][number]:
        links[(level, last)] = (level, first)  # a whole double switch: its left half gives out the sum of both
        return first, first
    if first < last and first % 2 and loads[(level, first)][number] == 1:
        _link(level, first, first + 1, links, loads, number)
        first += 1
    if first < last and last % 2 == 0 and loads[(level, last)][number] == 1:
        _link(level, last, last - 1, links, loads, number)
        last -= 1
    return first, last


def _link(
    level: int, sender: int, receiver: int, links: dict[Switch, Switch], loads: dict[Switch, dict[int, int]],
    number: int,
) -> None:  # fmt: skip
    links[(level, sender)] = (level, receiver)
    loads[(level, receiver)][number] += loads[(level, sender)].pop(number)


def depth(levels: int, output: Switch) -> int:
    """Levels a product passes until its sum leaves at `output`."""
    return levels - output[0]


def line(multipliers: int, lines: int, output: Switch) -> int:
    """The line of the collection bus a switch gives its sums to.

    The two halves of a double switch share one; lines are dealt out from the root to the leaves, left to right, first
    to double switches, then to single ones (as the public simulator wires them).
    """
    level, number = output
    if _is_double(output):
        return (sum(_doubles(upper) for upper in range(level)) + (number - 1) // 2) % lines
    doubles = 2 * sum(_doubles(each) for each in range(multipliers.bit_length() - 1))
    before = sum(_singles(upper) for upper in range(level))
    return (doubles + before + (1 if number else 0)) % lines


@lru_cache(maxsize=65536)
def line_of(multipliers: int, lines: int, place: Range) -> int:
    """The line a virtual neuron gives its sums to: where a sum leaves the tree depends on its own place only."""
    return line(multipliers, lines, configure(multipliers, [place]).outputs[0])


def collisions(multipliers: int, lines: int, outputs: Sequence[Switch]) -> int:
    """Cycles the bus needs for one sum of every virtual neuron: the most that share a line."""
    counts: dict[int, int] = {}
    for output in outputs:
        place = line(multipliers, lines, output)
        counts[place] = counts.get(place, 0) + 1
    return max(counts.values(), default=1)


def _is_double(output: Switch) -> bool:
    return output[1] not in (0, (1 << output[0]) - 1)


def _doubles(level: int) -> int:
    """Double switches of a level."""
    return max((1 << level) - 2, 0) // 2


def _singles(level: int) -> int:
    return 1 if level == 0 else 2
