"""The hardware itself, cycle by cycle: what an item's multipliers, ports, adders and lines do, and when.

Written from the description of the hardware (shared sheet; stonne-simulator/stonne@22634b8 src) and from nothing of the
scheduler's: it reads sizes, places and segments of an order, never how long somebody thinks they take. An event is a
port's queue, an adder tree's or a line's turn; the events of a stretch of positions are one array, and a stretch that
was played before (same shape and place, as many positions) is not played again.

- A sequencer puts the weights of a step, then the inputs of a step, into the ports' queues, one step per cycle; a port
  sends one value per cycle, to any of its own multipliers. A multiplier keeps its weights and multiplies what comes.
- A multiplier passes its input on to its left neighbour, which needs none sent where that is its next one.
- A sum climbs the tree by a link per cycle; then the accumulation buffer, the line, and the memory take a cycle each.
- A line takes one sum per cycle. The memory takes half of the sums that wait, of an item.
- The next filter's weights are sent when the memory has counted this one's sums, or into a second place before that.
- Without an accumulation buffer a sum goes from the memory through a port to the virtual neuron's first multiplier.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Protocol

import numpy as np

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.fabric import Cycles, Fabric, TileShape, Wiring, fabric, port_of, wiring
from dovetail.targets.maeri.network import OrderLayer


class PositionSpan(Protocol):
    """So many positions of an output channel, from the first on (a `Segment`)."""

    @property
    def first(self) -> int:
        """In tiles, rows first."""

    @property
    def count(self) -> int:
        """How many."""


@dataclass(frozen=True, slots=True)
class PositionSequence:
    """Positions computed one after the other with the same weights, in cycles from the first weight's."""

    begins: Cycles
    """When the first input of each position is sent."""
    ends: Cycles
    """The cycle after each position's last product."""
    arrives: Cycles
    """[virtual neuron, position]: when its sum is at its line."""
    exists: Cycles
    """From when all sums of each position are in memory."""
    weights: Cycles
    """When each port has sent its weights."""
    sent: Cycles
    """[port, position]: cycles in which it has sent inputs so far."""
    clear: int
    """The cycle from which further inputs give sums that meet none of these on their lines."""
    counts: tuple[int, ...]
    """Sums of the last position in memory after each cycle up to the last of `exists`."""

    @property
    def spare(self) -> Cycles:
        """Cycles in which each port sends nothing while positions are computed."""
        return np.asarray(np.maximum(self.ends[-1] - self.weights - self.sent[:, -1], 0), np.int64)


_SHORT = 64
"""Positions of a single virtual neuron that are played at least, for the next that has fewer."""


class NeuronSimulator:
    """Plays stretches of virtual neurons that are set up alike, each once."""

    def __init__(
        self,
        wired: Wiring,
        layer: OrderLayer,
        tile: TileShape,
        climbs: tuple[int, ...],
        lines: tuple[int, ...],
        trips: Callable[[int], tuple[Cycles, Cycles]] | None = None,
    ) -> None:
        """`trips`: what `_flow` asks of so many positions, where sums go round."""
        self._set_up, self._trips = (wired, layer, tile, climbs, lines), trips
        self._single = len(climbs) == 1 and trips is None
        self._even = bool((wired.first == wired.later).all())
        self._known: dict[tuple[int, int], PositionSequence] = {}

    def stretch(self, column: int, count: int) -> PositionSequence:
        """So many positions from a column of a row on. Of a single virtual neuron they are the start of what is longer,
        for its sums come one after the other."""
        further = max(1 << (count - 1).bit_length(), _SHORT) if self._single else count
        column = 0 if self._even else column
        played = self._known.get((column, further))
        if played is None:
            trips = self._trips(count) if self._trips else None
            played = self._known[column, further] = _flow(*self._set_up, (column, further), trips)
        if count == further:
            return played
        wired, climbs = self._set_up[0], self._set_up[3]
        taken, ends = int(played.exists[count - 1]) - 1, played.ends[:count]
        return PositionSequence(
            played.begins[:count],
            ends,
            played.arrives[:, :count],
            played.exists[:count],
            played.weights,
            played.sent[:, :count],
            max(int(ends[-1]), taken - climbs[0] + 1 - wired.steps),
            played.counts,
        )


@lru_cache(maxsize=8192)
def player(config: MaeriConfig, layer: OrderLayer, tile: TileShape, taps: int, at: int) -> NeuronSimulator:
    """Who plays virtual neurons from a multiplier on. Where sums do not go round, that is the same for all from
    which sums climb as far."""
    made = fabric(config, layer, tile, taps, at)
    if made.back:
        return NeuronSimulator(made.wired, layer, tile, made.climbs, made.lines, partial(_trips, config, made))
    width = config.multipliers // config.distribution if config.ports else config.multipliers
    users = tuple(made.lines.index(line) for line in made.lines)
    return _alike(config, layer, tile, taps, at % width, made.climbs, users)


@lru_cache(maxsize=8192)
def _alike(
    config: MaeriConfig,
    layer: OrderLayer,
    tile: TileShape,
    taps: int,
    at: int,
    climbs: tuple[int, ...],
    users: tuple[int, ...],
) -> NeuronSimulator:
    return NeuronSimulator(wiring(config, layer, tile, taps, at), layer, tile, climbs, users)


def _flow(
    wired: Wiring,
    layer: OrderLayer,
    tile: TileShape,
    climbs: Sequence[int],
    lines: Sequence[int],
    span: tuple[int, int],
    trips: tuple[Cycles, Cycles] | None,
) -> PositionSequence:
    """Play positions as arrays of events. `trips`: cycles of a step in which each port sends sums back, and when those
    of each [virtual neuron, position] let its last product be added, from the last weight on."""
    columns = -(-layer.out_columns // tile.out_columns)
    numbers = np.arange(span[1])
    opens = (numbers == 0) | ((numbers + span[0]) % columns == 0)
    steps, weights = wired.steps, wired.weights * wired.steps
    asked = steps + steps * numbers  # when the sequencer turns to a position
    work = steps * np.where(opens, wired.first[:, None], wired.later[:, None])
    if trips is not None:
        work = work + (steps - 1) * trips[0][:, None]
    sent = _served(asked, work, weights)
    done = np.stack([sent[feeds].max(axis=0) for feeds in wired.feeds])
    turns = steps * numbers  # a multiplier does one step a cycle
    done = np.maximum.accumulate(np.maximum(done, asked + steps) - turns, axis=1) + turns
    if trips is not None:
        done = np.maximum(done, trips[1] + int(weights.max()))
    total = np.cumsum(work, axis=1)
    arrives = done + np.array(climbs)[:, None]
    order = np.empty_like(arrives)
    for line in set(lines):
        users = [number for number, other in enumerate(lines) if other == line]
        order[users] = in_turn(arrives[users])
    begins = np.where(work > 0, sent - work, np.iinfo(np.int64).max).min(axis=0)
    clear = max(int(done.max()), int((order.max(axis=1) - climbs).max()) + 1 - steps)
    late, counts = _taken(order) if trips is None else (0, (len(climbs),))
    return PositionSequence(
        begins, done.max(axis=0), arrives, order.max(axis=0) + 1 + late, weights, total, clear, counts
    )


def _trips(config: MaeriConfig, made: Fabric, positions: int) -> tuple[Cycles, Cycles]:
    """What `_flow` asks of sums that go round."""
    back = np.array([sum(port == each for _, port in made.back) for each in _used(config, made)], np.int64)
    return back if config.ports else -(-back // config.distribution), _round_trips(config, made, positions)


def _used(config: MaeriConfig, made: Fabric) -> list[int]:
    """The ports that send something."""
    return sorted({port_of(config, place) for first, end in made.places for place in range(first, end)})


def _served(asked: Cycles, work: Cycles, busy: Cycles) -> Cycles:
    """[port, job]: when each job of a queue is done, one after the other, none before it is asked for."""
    total = np.cumsum(work, axis=1)
    begins = np.where(work > 0, asked[None, :] - (total - work), np.iinfo(np.int64).min // 2)
    return np.asarray(np.maximum(np.maximum.accumulate(begins, axis=1), busy[:, None]) + total, np.int64)


def in_turn(arrives: Cycles) -> Cycles:
    """When a line has taken each sum: one per cycle, the first that comes first."""
    flat = arrives.reshape(-1)
    sequence = np.argsort(flat, kind="stable")
    turn = np.arange(len(flat))
    found = np.empty_like(flat)
    found[sequence] = np.maximum.accumulate(flat[sequence] - turn) + turn
    return found.reshape(arrives.shape)


def _taken(order: Cycles) -> tuple[int, tuple[int, ...]]:
    """How much later than its line the memory takes the last sum, and its sums of the last position by cycle."""
    if len(order) == 1:
        return 0, (1,)
    last, opens = order[:, -min(order.shape[1], 24) :], int(order[:, -1].min())
    cycles, counts = np.unique(last.reshape(-1), return_counts=True)
    coming = dict(zip(cycles.tolist(), counts.tolist(), strict=True))
    cycle, waiting, total, found = int(cycles[0]), 0, int(counts.sum()), list[tuple[int, int]]()
    own, gone = total - len(order), 0
    while gone < total:
        waiting += coming.get(cycle, 0)
        gone += waiting - waiting // 2
        waiting //= 2
        found.append((cycle, gone - own))
        cycle += 1
    tail = [max(count, 0) for at, count in found if at >= opens]
    return cycle - 1 - int(cycles[-1]), tuple(tail)


@dataclass(frozen=True)
class ItemTimeline:
    """An item from its first weight to its last sum; arrays by position, in its order."""

    begins: Cycles
    """When the first input of each is sent."""
    exists: Cycles
    """From when its sums are in memory, if no other item's meet them on their lines."""
    arrives: Cycles
    """[virtual neuron, position]: when each sum is at its line."""
    lines: tuple[int, ...]
    """Of the virtual neurons."""
    places: tuple[tuple[int, int], ...]
    """[first, end) of the virtual neurons."""
    steps: int
    """Of a sum: weights a multiplier holds."""

    @cached_property
    def until(self) -> int:
        """The cycle from which its multipliers and adders do nothing more."""
        return int(self.exists.max())


def play(
    config: MaeriConfig,
    layer: OrderLayer,
    tile: TileShape,
    taps: int,
    at: int,
    start: int,
    parts: Sequence[PositionSpan],
) -> ItemTimeline:
    """Play an item whose first weight is sent in cycle `start`, on the multipliers from `at` on."""
    made, plays = fabric(config, layer, tile, taps, at), player(config, layer, tile, taps, at)
    columns, rows = -(-layer.out_columns // tile.out_columns), -(-layer.out_rows // tile.out_rows)
    beyond = rows * columns * tile.out_rows * tile.out_columns - layer.out_rows * layer.out_columns
    whole = all(part.first == 0 and part.count == rows * columns for part in parts)
    cycle, found, before, early = start, list[tuple[PositionSequence, int]](), None, 0
    for part in parts:
        own = plays.stretch(part.first % columns, part.count)
        if before is not None and config.prefetch:
            missing = int(np.maximum(own.weights - before.spare, 0).max())
            cycle = found[-1][1] + before.clear + missing - int(own.weights.max())
        found.append((own, cycle))
        early += beyond * tile.filters * tile.groups if whole else 0
        cycle += max(_counted(own, len(made.places), early), _ready(own, bool(made.back)))
        before = own
    later = np.repeat([at_cycle for _, at_cycle in found], [part.count for part in parts])
    joined = {
        name: np.concatenate([getattr(own, name) for own, _ in found], axis=-1) + later
        for name in ("begins", "exists", "arrives")
    }
    return ItemTimeline(**joined, lines=made.lines, places=made.places, steps=made.wired.steps)


def _ready(own: PositionSequence, round_trip: bool) -> int:
    """When the next weights can be sent, if the memory has counted its sums: all inputs are sent; those of sums that
    still go round too."""
    last = int((own.weights + own.sent[:, -1]).max()) if round_trip else int(own.ends[-1])
    return max(last, own.clear - int(own.weights.max()))


def _counted(own: PositionSequence, neurons: int, early: int) -> int:
    """When the memory has counted as many sums as the image has: `early` ones of beyond its edge count as well."""
    wanted = neurons * len(own.ends) - early
    if wanted <= 0:
        return 0
    position, part = divmod(wanted - 1, neurons)
    missing = sum(count <= part for count in own.counts) - len(own.counts) + 1
    return int(own.exists[position]) + missing


_PLAYED = 600
"""Steps of a virtual neuron played as events where sums go round, unless all comes again before."""


def _round_trips(config: MaeriConfig, made: Fabric, positions: int) -> Cycles:
    """[virtual neuron, position]: when its last product can be added, each step's sum having come back before; from the
    last weight on. Where everything is as it was some positions before, it goes on so."""
    shared, steps = int(config.distribution < config.multipliers), made.wired.steps
    if len(made.places) == 1:  # nobody in the way
        each = (steps - 1) * (made.back[0][0] + shared + 2) + 1
        return np.arange(1, positions + 1)[None] * each
    round_ = _FeedbackSimulation(config, made, shared, positions)
    seen: dict[Hashable, tuple[int, list[int]]] = {}
    cycles, sums = 0, [0] * len(round_.taken)
    while not cycles and min(map(len, round_.taken)) < min(steps * positions, max(_PLAYED, 2 * steps)):
        round_.turn()
        if round_.opened:
            counts = [len(own) for own in round_.taken]
            before = seen.setdefault(round_.state(), (round_.cycle, counts))
            cycles = round_.cycle - before[0]
            sums = [(now - then) // steps for now, then in zip(counts, before[1], strict=True)]
    found = np.empty((len(made.places), positions), np.int64)
    for number, own in enumerate(round_.taken):
        ends = own[steps - 1 :: steps][:positions]
        again, later = (sums[number], cycles) if sums[number] else (len(ends) - 1, ends[-1] - ends[0])
        while len(ends) < positions:
            ends.append(ends[-again] + later)
        found[number] = np.array(ends) - made.climbs[number] + shared
    return found


class _FeedbackSimulation:
    """Sums on their way round: at lines' inputs, in the memory's queue, at ports and in the tree."""

    def __init__(self, config: MaeriConfig, made: Fabric, shared: int, positions: int) -> None:
        self.made, self.shared, self.last, self.cycle = made, shared, made.wired.steps * positions, -1
        self.inputs = config.multipliers // config.collection + 1
        self.events = [(climb - shared, number) for number, climb in enumerate(made.climbs)]
        heapq.heapify(self.events)  # (cycle at its line's input, virtual neuron)
        self.queues: dict[int, dict[int, deque[int]]] = {line: {} for line in sorted(set(made.lines))}
        self.next = dict.fromkeys(self.queues, 0)
        self.picked, self.waiting, self.port_free = list[int](), deque[int](), dict[int, int]()
        self.taken = [list[int]() for _ in made.places]
        self.opened = False

    def state(self) -> Hashable:
        """All that what comes next depends on, in cycles from now."""
        ports = sorted((port, free - self.cycle) for port, free in self.port_free.items() if free >= self.cycle)
        queues = [sorted((each, tuple(queue)) for each, queue in own.items() if queue) for own in self.queues.values()]
        parts = tuple(len(own) % self.made.wired.steps for own in self.taken)
        events = tuple(sorted((at - self.cycle, number) for at, number in self.events))
        here = tuple(self.waiting), tuple(self.picked), tuple(self.next.values()), tuple(ports)
        return events, *here, tuple(map(tuple, queues)), parts

    def turn(self) -> None:
        """One cycle: the memory takes half of the sums that wait, and each line one, its inputs asked in turn."""
        busy = self.picked or self.waiting or any(any(own.values()) for own in self.queues.values())
        self.cycle = self.cycle + 1 if busy else max(self.events[0][0], self.cycle + 1)
        self.waiting.extend(self.picked)
        for _ in range(-(-len(self.waiting) // 2)):
            self._take(self.waiting.popleft())
        self.opened = bool(self.taken[0]) and self.taken[0][-1] == self.cycle
        self.opened = self.opened and len(self.taken[0]) % self.made.wired.steps == 0
        while self.events and self.events[0][0] <= self.cycle:
            _, number = heapq.heappop(self.events)
            own = self.queues[self.made.lines[number]]
            own.setdefault(self.made.entries[number], deque()).append(number)
        self.picked = []
        for line, own in self.queues.items():
            asked = (((self.next[line] + further) % self.inputs) for further in range(self.inputs))
            found = next((entry for entry in asked if own.get(entry)), None)
            if found is not None:
                self.picked.append(own[found].popleft())
                self.next[line] = (found + 1) % self.inputs

    def _take(self, number: int) -> None:
        """A sum is in memory, and goes back if more is to be added."""
        own, (links, port), steps = self.taken[number], self.made.back[number], self.made.wired.steps
        own.append(self.cycle)
        if part := len(own) % steps:
            self.port_free[port] = max(self.cycle, self.port_free.get(port, -1) + 1)
            gone = self.port_free[port] + self.shared + links + 1
            heapq.heappush(self.events, (gone, number))
            if part == steps - 1 and len(own) < self.last - 1:  # the next sum begins with a zero
                heapq.heappush(self.events, (gone + 1, number))
