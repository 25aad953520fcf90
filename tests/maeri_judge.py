"""Independent models of MAERI's trees, from the published hardware and from nothing of `dovetail.targets.maeri`.

- `added` follows values through words of RN_Config (maeri-project/MAERI_bsv@1351d1b src/reduction_network), switch by
  switch.
- `tree_exit`, `line_input` and `port_values` say where sums leave the reduction tree, on which line they are taken, and
  what ports send (stonne-simulator/stonne@22634b8 src).
- `round_trips` plays sums that go round, sum by sum, without looking for repetition.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from math import ceil, prod

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.tile import MultiplierTile

Value = tuple[int, int]
"""(number of the virtual neuron, number of products)."""
_IDLE, _BOTH, _LEFT, _RIGHT = range(4)
"""Modes of a single switch."""


def added(config: MaeriConfig, words: Sequence[int], places: Sequence[tuple[int, int]]) -> str:
    """Why a configuration does not add up virtual neurons, each alone and whole; empty where it does.

    Args:
        config: the engine's sizes.
        words: of the configuration: double switches, then single ones.
        places: [first, end) of each virtual neuron, in order.
    """
    values: dict[int, Value] = {}
    for number, (first, end) in enumerate(places):
        if any(leaf in values for leaf in (first, end - 1)):
            return f"two virtual neurons lie on multiplier {first}"
        values.update(dict.fromkeys(range(first, end), (number, 1)))
    modes, out = _modes(config, words), dict[int, int]()
    for level in range(config.levels - 1, -1, -1):
        above: dict[int, Value] = {}
        for number, own in _arriving(level, values, modes).items():
            if own is None or len({owner for owner, _ in own}) > 1:
                return f"switch {number} of level {level} does not get what it adds"
            if own:
                above[number] = own[0][0], sum(count for _, count in own)
        for number in list(above):
            fault = _leave(level, number, above, modes, out, places)
            if fault:
                return fault
        values = above
    missing = [place for number, place in enumerate(places) if number not in out]
    if missing or values:
        return f"the sum of [{missing[0][0]}, {missing[0][1]}) never leaves" if missing else "a sum is left at the root"
    return ""


def _modes(config: MaeriConfig, words: Sequence[int]) -> dict[tuple[int, int], tuple[int, bool]]:
    """Mode of each switch by (level, number), and whether it gives its sum out."""
    switches: dict[tuple[int, int], tuple[int, bool]] = {}
    halves = [
        (level, left) for level in range(config.levels) for left in range(1, (1 << level) - 1, 2)
    ]  # left halves of double switches
    alone = [(level, edge) for level in range(config.levels) for edge in sorted({0, (1 << level) - 1})]
    for number, (level, left) in enumerate(halves):
        byte = words[number // 4] >> 8 * (number % 4) & 0xFF
        switches[level, left] = byte >> 6, bool(byte & 8)
        switches[level, left + 1] = byte >> 4 & 3, bool(byte & 4)
    base = -(-len(halves) // 4)
    for number, place in enumerate(alone):
        four = words[base + number // 8] >> 4 * (number % 8) & 0xF
        switches[place] = four >> 2, bool(four & 2)
    return switches


def _arriving(
    level: int, values: dict[int, Value], modes: dict[tuple[int, int], tuple[int, bool]]
) -> dict[int, list[Value] | None]:
    """The values that each switch of a level adds; None where its mode does not fit the values that come."""
    arriving: dict[int, list[Value] | None] = {}
    last = (1 << level) - 1
    for number in range(last + 1):
        mode, own = modes[level, number][0], [2 * number, 2 * number + 1]
        if number in (0, last):
            wanted = {_IDLE: [], _BOTH: own, _LEFT: own[:1], _RIGHT: own[1:]}[mode]
            there = [child for child in own if child in values]
            arriving[number] = [values[child] for child in there] if there in ([], wanted) else None
            continue
        neighbour, sends, gets = (
            (number + 1, own[1], 2 * number + 2) if number % 2 else (number - 1, own[0], own[0] - 1)
        )
        if modes[level, neighbour][0] == 3:
            own.remove(sends)
        if mode == 3:
            own.append(gets)
        adds = [values[child] for child in own if child in values]
        arriving[number] = adds if len(adds) in (0, mode) else None
    return arriving


def _leave(
    level: int,
    number: int,
    above: dict[int, Value],
    modes: dict[tuple[int, int], tuple[int, bool]],
    out: dict[int, int],
    places: Sequence[tuple[int, int]],
) -> str:
    """Let a switch's sum leave, if it gives it out; why that is wrong."""
    if number not in above or not modes[level, number][1]:
        return ""
    owner, count = above.pop(number)
    left_half = number % 2 == 1 and number != (1 << level) - 1
    if left_half and above.get(number + 1, (-1, 0))[0] == owner and not modes[level, number + 1][1]:
        count += above.pop(number + 1)[1]
    first, end = places[owner]
    if count != end - first or owner in out:
        return f"switch {number} of level {level} gives out {count} of the products of [{first}, {end})"
    out[owner] = count
    return ""


def tree_exit(multipliers: int, first: int, end: int) -> tuple[int, int, int, int]:
    """Level and number of the switch that the sum of multipliers [first, end) leaves from; links to there from its
    first and its farthest multiplier.

    Neighbouring switches under different parents have a link: the one with fewer values below sends over it, unless its
    other neighbour works for the same sum.
    """
    level = multipliers.bit_length() - 1
    width = {place: 1 for place in range(first, end)}
    height, mine, own = dict.fromkeys(width, 0), first, 0
    while len(width) > 1 or level == multipliers.bit_length() - 1:
        level -= 1
        up = sorted({place // 2 for place in width})
        values = {place: sum(child in width for child in (2 * place, 2 * place + 1)) for place in up}
        height = {place: 1 + max(height.get(2 * place, 0), height.get(2 * place + 1, 0)) for place in up}
        mine, own, total = mine // 2, own + 1, len(width)
        width = dict.fromkeys(up, 1)
        for sender, receiver in ((up[0], up[0] + 1), (up[-1], up[-1] - 1)):
            linked = max(sender, receiver) % 2 == 0
            fewer = values[sender] < total - values[sender] or (receiver < sender and values[sender] * 2 == total)
            if linked and fewer and sender in width and receiver in width and len(width) > 1:
                height[receiver] = max(height[receiver], height.pop(sender) + 1)
                del width[sender]
                if mine == sender:
                    mine, own = receiver, own + 1
    (switch,) = width
    return level, switch, own, height[switch]


def line_input(multipliers: int, lines: int, level: int, number: int) -> tuple[int, int]:
    """The line that a switch gives its sums to, and which of its inputs.

    The halves of a double switch share a line, with neighbouring inputs; lines are dealt out from the root to the
    leaves, left to right, first to double switches, then to the switches that stand alone.
    """

    def doubles(upper: int) -> int:
        """Double switches of a level."""
        return max((1 << upper) - 2, 0) // 2

    total = sum(map(doubles, range(multipliers.bit_length() - 1)))
    if number in (0, (1 << level) - 1):
        alone = max(2 * level - 1, 0) + (1 if number else 0)
        return (2 * total + alone) % lines, 2 * total // lines + 1 + alone // lines
    place = sum(map(doubles, range(level))) + (number - 1) // 2
    return place % lines, 2 * (place // lines) + (number + 1) % 2


def port_values(
    config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, at: int
) -> list[tuple[int, int, int, int]]:
    """Values of each port for a step of virtual neurons from multiplier `at` on: weights, inputs of a row's first
    position, inputs of every other position, sums that go back; in cycles."""
    box, area = tile.rows * tile.columns * tile.channels, layer.rows * layer.columns
    across = (layer.rows / tile.rows, layer.columns / tile.columns, layer.taps / area / tile.channels)
    steps = ceil(layer.taps / box) if tile.flat else prod(map(ceil, across))
    carried = int(steps > 1 and not config.accumulation_buffer)
    (down, across), (lower, further) = layer.strides, layer.dilations
    owner, weights, now, before = list[tuple[int, int]](), list[Hashable](), list[Hashable](), list[Hashable]()
    for number in range(tile.groups * tile.filters * tile.out_rows * tile.out_columns):
        rest, column = divmod(number, tile.out_columns)
        rest, row = divmod(rest, tile.out_rows)
        group, filter_ = divmod(rest, tile.filters)
        for tap in range(box):
            owner.append((number, at + number * (box + carried) + carried + tap))
            channel, inside = divmod(tap, tile.rows * tile.columns)
            r, s = divmod(inside, tile.columns)
            x, y = row * down + r * lower, column * across + s * further
            weights.append((group, filter_, tap))
            now.append((number, tap) if tile.flat else (group, channel, x, y))
            before.append((number, tap) if tile.flat else (group, channel, x, y - across * tile.out_columns))
    passed = [  # the right neighbour had, a position ago, what this multiplier wants
        here[0] == there[0] and had == wants
        for here, there, had, wants in zip(owner, owner[1:], before[1:], now, strict=False)
    ]
    passed = [*passed, False]
    if tile.flat or layer.columns % tile.columns:  # a row of the kernel ends within a step
        passed = [False] * len(now)
    width = config.multipliers // config.distribution if config.ports else config.multipliers
    first = {number: at + number * (box + carried) for number, _ in owner}
    ports = sorted({place // width for _, place in owner} | {place // width for place in first.values()})

    def sent(values: Sequence[Hashable], left_out: Sequence[bool]) -> Counter[int]:
        """Different values by port."""
        pairs = zip(owner, values, left_out, strict=True)
        return Counter(port for port, _ in {(place // width, value) for (_, place), value, out in pairs if not out})

    nothing = [False] * len(now)
    back = Counter(place // width for place in first.values() if carried)
    counts = (sent(weights, nothing), sent(now, nothing), sent(now, passed), back)
    lanes = 1 if config.ports else config.distribution
    rows = [tuple(ceil(count[port] / lanes) for count in counts) for port in ports]
    return [(row[0], row[1], row[2], row[3]) for row in rows]


def round_trips(
    config: MaeriConfig, neurons: Sequence[tuple[int, int, int, int, int]], steps: int, positions: int
) -> list[list[int]]:
    """Cycles in which the memory takes the sums of virtual neurons that go round.

    Args:
        config: the engine.
        neurons: of each virtual neuron links from its first and its farthest multiplier to where its sum leaves the
            tree, its line and which input of it, and the port that feeds its first multiplier.
        steps: of a sum.
        positions: sums of each virtual neuron.
    """
    shared, last = int(config.distribution < config.multipliers), steps * positions
    inputs = config.multipliers // config.collection + 1
    events = [(most + 1, number) for number, (_, most, *_) in enumerate(neurons)]
    heapq.heapify(events)
    queues: dict[int, dict[int, deque[int]]] = {line: {} for line in sorted({each[2] for each in neurons})}
    turn, free, taken = dict.fromkeys(queues, 0), dict[int, int](), [list[int]() for _ in neurons]
    picked, waiting, cycle = list[int](), deque[int](), 0
    while min(map(len, taken)) < last:
        waiting.extend(picked)
        for _ in range(ceil(len(waiting) / 2)):  # the memory takes half of the sums that wait
            number = waiting.popleft()
            own, (links, _, _, _, port) = taken[number], neurons[number]
            own.append(cycle)
            if part := len(own) % steps:
                free[port] = max(cycle, free.get(port, -1) + 1)
                gone = free[port] + shared + links + 1
                heapq.heappush(events, (gone, number))
                if part == steps - 1 and len(own) < last - 1:  # the next sum begins with a zero
                    heapq.heappush(events, (gone + 1, number))
        while events and events[0][0] <= cycle:
            _, number = heapq.heappop(events)
            queues[neurons[number][2]].setdefault(neurons[number][3], deque()).append(number)
        picked = []
        for line, own_queues in queues.items():  # each line takes a sum, its inputs asked in turn
            asked = ((turn[line] + further) % inputs for further in range(inputs))
            entry = next((each for each in asked if own_queues.get(each)), None)
            if entry is not None:
                picked.append(own_queues[entry].popleft())
                turn[line] = (entry + 1) % inputs
        cycle += 1
    return taken
