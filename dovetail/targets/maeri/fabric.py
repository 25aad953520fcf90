"""The machine's parts, set up: which port sends what to which multiplier, and where sums leave the tree.

As `machine.py`, written from the description of the hardware (shared sheet; stonne-simulator/stonne@22634b8 src) and
from nothing of the scheduler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer

Cycles = npt.NDArray[np.int64]


class TileShape(Hashable, Protocol):
    """How many of each dimension are computed at a time (a `Tile`)."""

    @property
    def rows(self) -> int:
        """Of the kernel."""

    @property
    def columns(self) -> int:
        """Of the kernel."""

    @property
    def channels(self) -> int:
        """Of the input."""

    @property
    def filters(self) -> int:
        """Of one group."""

    @property
    def groups(self) -> int:
        """Side by side."""

    @property
    def out_rows(self) -> int:
        """Of the result."""

    @property
    def out_columns(self) -> int:
        """Of the result."""

    @property
    def flat(self) -> bool:
        """Whether a step is any `channels` products rather than a box."""


@dataclass(frozen=True)
class Wiring:
    """What ports send to an item's multipliers; the same from every multiplier that is as far from its port's first."""

    width: int
    """Multipliers of a virtual neuron."""
    steps: int
    """Of a sum."""
    weights: Cycles
    """Values of weights of a step, by port."""
    first: Cycles
    """Inputs of a step at the start of a row."""
    later: Cycles
    """Of a step beside the position before."""
    feeds: npt.NDArray[np.bool_]
    """[virtual neuron, port]: whether one sends to the other."""


@dataclass(frozen=True)
class Fabric:
    """An item's multipliers, set up."""

    wired: Wiring
    places: tuple[tuple[int, int], ...]
    """[first, end) of each virtual neuron."""
    lines: tuple[int, ...]
    """The line of each virtual neuron."""
    entries: tuple[int, ...]
    """Which of the line's inputs."""
    climbs: tuple[int, ...]
    """Cycles from its last product to its line."""
    back: tuple[tuple[int, int], ...]
    """(links from the first multiplier, port) of sums that go round; none with an accumulation buffer."""


@lru_cache(maxsize=8192)
def fabric(config: MaeriConfig, layer: OrderLayer, tile: TileShape, taps: int, at: int) -> Fabric:
    """Set up virtual neurons from multiplier `at` on that add up `taps` products of each sum."""
    wired = wiring(config, layer, tile, taps, at % (config.multipliers // config.distribution) if config.ports else 0)
    starts = range(at, at + len(wired.feeds) * wired.width, wired.width)
    places = tuple((start, start + wired.width) for start in starts)
    exits = [_exit(config.multipliers, config.collection, *place) for place in places]
    distance = 1 + config.accumulation_buffer + (config.distribution < config.multipliers)
    round_trip = wired.steps > 1 and not config.accumulation_buffer
    return Fabric(
        wired,
        places,
        tuple(line for (line, _), _, _ in exits),
        tuple(entry for (_, entry), _, _ in exits),
        tuple(links + distance for _, _, links in exits),
        tuple((own, port_of(config, first)) for first, (_, own, _) in zip(starts, exits, strict=True))
        if round_trip
        else (),
    )


@lru_cache(maxsize=8192)
def wiring(config: MaeriConfig, layer: OrderLayer, tile: TileShape, taps: int, at: int) -> Wiring:
    box = tile.rows * tile.columns * tile.channels
    area = layer.rows * layer.columns
    across = (layer.rows / tile.rows, layer.columns / tile.columns, taps / area / tile.channels)
    steps = int(np.ceil(taps / box)) if tile.flat else int(np.prod(np.ceil(across)))
    round_trip = steps > 1 and not config.accumulation_buffer
    width = box + round_trip
    owner, held, now, before = [], [], [], []
    for number in range(tile.groups * tile.filters * tile.out_rows * tile.out_columns):
        rest, column = divmod(number, tile.out_columns)
        rest, row = divmod(rest, tile.out_rows)
        group, filter_ = divmod(rest, tile.filters)
        for tap in range(box):
            owner.append((number, at + number * width + round_trip + tap))
            channel, inside = divmod(tap, tile.rows * tile.columns)
            r, s = divmod(inside, tile.columns)
            held.append((group, filter_, tap))
            y = column * layer.stride + s
            seen: tuple[Hashable, ...] = (number, tap) if tile.flat else (group, channel, row * layer.stride + r, y)
            now.append(seen)
            before.append(seen if tile.flat else (*seen[:3], y - layer.stride * tile.out_columns))
    given = [place + 1 < len(now) and _passes(owner, now, before, place) for place in range(len(now))]
    if tile.flat or layer.columns % tile.columns:  # a row of the kernel ends within a step
        given = [False] * len(now)
    ports = [port_of(config, multiplier) for _, multiplier in owner]
    every = sorted({*ports, *(port_of(config, at + number * width) for number in range(owner[-1][0] + 1))})
    feeds = np.zeros((owner[-1][0] + 1, len(every)), bool)
    feeds[[number for number, _ in owner], [every.index(port) for port in ports]] = True
    return Wiring(
        width,
        steps,
        _sent(config, every, ports, held, [False] * len(now)),
        _sent(config, every, ports, now, [False] * len(now)),
        _sent(config, every, ports, now, given),
        feeds,
    )


def _passes(owner: Sequence[tuple[int, int]], now: Sequence[Hashable], before: Sequence[Hashable], place: int) -> bool:
    """Whether the right neighbour had, a position ago, what this multiplier wants."""
    return owner[place][0] == owner[place + 1][0] and before[place + 1] == now[place]


def port_of(config: MaeriConfig, multiplier: int) -> int:
    return multiplier * config.distribution // config.multipliers if config.ports else 0


def _sent(
    config: MaeriConfig, every: Sequence[int], ports: Sequence[int], values: Sequence[Hashable], given: Sequence[bool]
) -> Cycles:
    """Cycles in which each port sends these values once."""
    found = {(port, value) for port, value, own in zip(ports, values, given, strict=True) if not own}
    by_port = Counter(port for port, _ in found)
    counts = np.array([by_port[each] for each in every], np.int64)
    return counts if config.ports else -(-counts // config.distribution)


def tree_of(multipliers: int, first: int, end: int) -> tuple[int, int, int, int]:
    """Level and number of the switch a range's sum leaves from; links to there from its first and its farthest
    multiplier. Neighbouring switches under different parents have a link: the one with fewer values below sends over
    it, unless its other neighbour works for the same sum."""
    level = multipliers.bit_length() - 1
    width = {place: 1 for place in range(first, end)}  # what comes up, and how many links it has come
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


@lru_cache(maxsize=8192)
def _exit(multipliers: int, lines: int, first: int, end: int) -> tuple[tuple[int, int], int, int]:
    """A range's line and which of its inputs, and links to where its sum leaves the tree from its first and its
    farthest multiplier."""
    level, switch, own, links = tree_of(multipliers, first, end)
    return _wired_to(multipliers, lines)[level, switch], own, links


@lru_cache(maxsize=64)
def _wired_to(multipliers: int, lines: int) -> Mapping[tuple[int, int], tuple[int, int]]:
    """(line, input of it) of each adder (level, switch). Lines are dealt out to double switches from the root down, two
    inputs each, then to those that stand alone."""
    levels = range(multipliers.bit_length() - 1)
    doubles = [(upper, left) for upper in levels for left in range(1, (1 << upper) - 1, 2)]
    alone = [(upper, edge) for upper in levels for edge in sorted({0, (1 << upper) - 1})]
    found = {
        (upper, left + half): (number % lines, number // lines * 2 + half)
        for number, (upper, left) in enumerate(doubles)
        for half in (0, 1)
    }
    for number, place in enumerate(alone):
        found[place] = (2 * len(doubles) + number) % lines, 2 * len(doubles) // lines + 1 + number // lines
    return found
