"""The hardware, event by event: the cycles in which an item's ports, multipliers, adders and lines work.

It reads sizes, places and segments of an order, and none of its times. An event is a turn of a port's queue, of an
adder tree or of a line; the events of a stretch of positions are one array. (Written from stonne-simulator/
stonne@22634b8 src, whose cycles are measured.)

- A sequencer puts the weights of a step, then the inputs of a step, into the ports' queues, one step per cycle; a port
  sends one value per cycle, to any of its own multipliers. A multiplier keeps its weights and multiplies what comes.
- A multiplier passes its input on to its left neighbour, if that is the neighbour's next input.
- A sum climbs the tree by a link per cycle; then the accumulation buffer, the line, and the memory take a cycle each.
- A line takes one sum per cycle. The memory takes half of the waiting sums of an item.
- The next filter's weights are sent when the memory has counted this one's sums, or into a second place before that.
- Without an accumulation buffer a sum goes from the memory through a port to the virtual neuron's first multiplier.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.order import Item, group_of
from dovetail.targets.maeri.tile import FeedbackLoops, NeuronGroup, PortTraffic, grid, play_feedback
from dovetail.targets.maeri.tree import sums_taken

Cycles = npt.NDArray[np.int64]
_SHORT = 64
"""Positions of a single virtual neuron that are played at least, for later stretches of fewer positions."""
_PLAYED = 600
"""Steps of a virtual neuron that are played at most where sums go round, but two positions at least."""


@dataclass(frozen=True, slots=True)
class PositionSequence:
    """Positions computed one after the other with the same weights, in cycles from the first weight's."""

    begins: Cycles
    """The cycle in which the first input of each position is sent."""
    ends: Cycles
    """The cycle after each position's last product."""
    arrives: Cycles
    """[virtual neuron, position]: the cycle in which its sum is at its line."""
    exists: Cycles
    """The cycle from which all sums of each position are in memory."""
    weights: Cycles
    """The cycle in which each port has sent its weights."""
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


@dataclass(frozen=True)
class NeuronSimulator:
    """Virtual neurons of a layer that are set up alike; plays each stretch of positions once."""

    columns: int
    """Positions of a row."""
    folds: int
    """Steps of a sum."""
    ports: tuple[PortTraffic, ...]
    fed_by: tuple[tuple[int, int], ...]
    """The first of these ports that feeds each virtual neuron, and one past the last."""
    climbs: tuple[int, ...]
    """Cycles from the last product of each virtual neuron to its line."""
    lines: tuple[int, ...]
    """The first virtual neuron on the line of each."""
    loops: FeedbackLoops | None
    played: dict[tuple[int, int], PositionSequence] = field(default_factory=dict, compare=False)

    def stretch(self, column: int, count: int) -> PositionSequence:
        """`count` positions from a column of a row on; those of a single virtual neuron, whose sums come one after the
        other, are the start of any longer stretch."""
        is_single = len(self.climbs) == 1 and self.loops is None
        longer = max(1 << (count - 1).bit_length(), _SHORT) if is_single else count
        key = (0 if all(port.first == port.later for port in self.ports) else column, longer)
        if key not in self.played:
            self.played[key] = self.play(*key)
        all_ = self.played[key]
        if count == longer:
            return all_
        clear = max(int(all_.ends[count - 1]), int(all_.exists[count - 1]) - self.climbs[0] - self.folds)
        ends, arrives, exists, sent = (
            array[..., :count] for array in (all_.ends, all_.arrives, all_.exists, all_.sent)
        )
        return PositionSequence(all_.begins[:count], ends, arrives, exists, all_.weights, sent, clear, all_.counts)

    def play(self, column: int, count: int) -> PositionSequence:
        """Play `count` positions from a column of a row on, as arrays of events."""
        folds, numbers = self.folds, np.arange(count)
        opens = (numbers == 0) | ((numbers + column) % self.columns == 0)
        load, first, later, back = np.array([astuple(port) for port in self.ports]).T[..., None]
        weights = folds * load[:, 0]
        asked = folds + folds * numbers  # the cycle in which the sequencer turns to a position
        work = folds * np.where(opens, first, later) + (folds - 1) * back
        sent = _served(asked, work, weights)
        done = np.stack([sent[begin:end].max(axis=0) for begin, end in self.fed_by])
        turns = folds * numbers  # a multiplier does one step per cycle
        done = np.maximum.accumulate(np.maximum(done, asked + folds) - turns, axis=1) + turns
        if self.loops is not None:
            done = np.maximum(done, _round_trips(self.loops, count) + int(weights.max()))
        climbs = np.array(self.climbs)
        arrives = done + climbs[:, None]
        order = np.empty_like(arrives)
        for line in set(self.lines):
            users = [number for number, other in enumerate(self.lines) if other == line]
            order[users] = in_turn(arrives[users])
        begins = np.where(work > 0, sent - work, np.iinfo(np.int64).max).min(axis=0)
        clear = max(int(done.max()), int((order.max(axis=1) - climbs).max()) + 1 - folds)
        late, counts = _in_memory(order) if self.loops is None else (0, (len(climbs),))
        exists, total = order.max(axis=0) + 1 + late, np.cumsum(work, axis=1)
        return PositionSequence(begins, done.max(axis=0), arrives, exists, weights, total, clear, counts)


@lru_cache(maxsize=8192)
def simulator(config: MaeriConfig, columns: int, size: int, group: NeuronGroup) -> NeuronSimulator:
    """The simulator of virtual neurons of `size` products, of a layer with so many positions in a row; it is the same
    for all that are set up alike."""
    width, base = config.feed_width, group.places[0].start // config.feed_width
    fed_by = tuple(((place.end - size) // width - base, (place.end - 1) // width - base + 1) for place in group.places)
    climbs = tuple(exit_.most + config.bus_delay for exit_ in group.exits)
    lines = tuple(map(group.lines.index, group.lines))
    return _alike(NeuronSimulator(columns, group.folds, group.ports, fed_by, climbs, lines, group.loops))


@lru_cache(maxsize=8192)
def _alike(simulator: NeuronSimulator) -> NeuronSimulator:
    return simulator


def _served(asked: Cycles, work: Cycles, busy: Cycles) -> Cycles:
    """[port, job]: the cycle in which each job of a queue is done, one after the other, none before it is asked for."""
    total = np.cumsum(work, axis=1)
    begins = np.where(work > 0, asked[None, :] - (total - work), np.iinfo(np.int64).min // 2)
    return np.asarray(np.maximum(np.maximum.accumulate(begins, axis=1), busy[:, None]) + total, np.int64)


def in_turn(arrives: Cycles) -> Cycles:
    """The cycle in which a line has taken each sum: one sum per cycle, in the order they arrive."""
    flat = arrives.reshape(-1)
    sequence, turn = np.argsort(flat, kind="stable"), np.arange(len(flat))
    order = np.empty_like(flat)
    order[sequence] = np.maximum.accumulate(flat[sequence] - turn) + turn
    return order.reshape(arrives.shape)


def _in_memory(order: Cycles) -> tuple[int, tuple[int, ...]]:
    """Cycles that the memory takes the last sum later than its line, and its sums of the last position by cycle."""
    if len(order) == 1:
        return 0, (1,)
    last, opens = order[:, -min(order.shape[1], 24) :], int(order[:, -1].min())
    first, end = int(last.min()), int(last.max())
    counts = sums_taken(np.bincount(last.reshape(-1) - first).tolist())
    earlier = last.size - len(order)
    tail = (max(count - earlier, 0) for count in counts[max(opens - first, 0) :])
    return first + len(counts) - 1 - end, tuple(tail)


def _round_trips(loops: FeedbackLoops, positions: int) -> Cycles:
    """[virtual neuron, position]: the cycle in which its last product can be added, from the last weight on, since each
    step waits for the sum of the one before."""
    if len(loops.exits) == 1:
        return np.arange(1, positions + 1)[None] * loops.alone
    run = play_feedback(loops, positions, min(loops.folds * positions, max(_PLAYED, 2 * loops.folds)))
    ends = [[run.end(number, count + 1) for count in range(positions)] for number in range(len(loops.exits))]
    climbs = np.array([[exit_.most + 1] for exit_ in loops.exits])
    return np.asarray(np.array(ends) - climbs, np.int64)


@dataclass(frozen=True)
class ItemTimeline:
    """An item from its first weight to its last sum; arrays by position, in its order."""

    group: NeuronGroup
    begins: Cycles
    """The cycle in which the first input of each position is sent."""
    exists: Cycles
    """The cycle from which its sums are in memory, if no other item's meet them on their lines."""
    arrives: Cycles
    """[virtual neuron, position]: the cycle in which each sum is at its line."""

    @cached_property
    def until(self) -> int:
        """The cycle from which its multipliers and adders do nothing more."""
        return int(self.exists.max())


def play(config: MaeriConfig, layer: OrderLayer, item: Item) -> ItemTimeline:
    """Play an item of a layer, from the cycle in which its first weight is sent."""
    tile, group, (rows, columns) = item.tile, group_of(item, layer, config), grid(layer, item.tile)
    plays = simulator(config, columns, tile.size, group)
    beyond = rows * columns * tile.out_rows * tile.out_columns - layer.out_rows * layer.out_columns
    is_whole = all(part.first == 0 and part.count == rows * columns for part in item.segments)
    cycle, sequences, starts, early = item.start, list[PositionSequence](), list[int](), 0
    for part in item.segments:
        own = plays.stretch(part.first % columns, part.count)
        load = int(own.weights.max())
        if sequences and config.prefetch:
            missing = int(np.maximum(own.weights - sequences[-1].spare, 0).max())
            cycle = starts[-1] + sequences[-1].clear + missing - load
        sequences.append(own)
        starts.append(cycle)
        early += beyond * tile.filters * tile.groups if is_whole else 0
        # The next weights can be sent when all inputs are, those of sums that still go round too.
        ready = int((own.weights + own.sent[:, -1]).max()) if group.loops else int(own.ends[-1])
        cycle += max(_counted(own, tile.neurons, early), ready, own.clear - load)
    later = np.repeat(starts, [part.count for part in item.segments])
    begins, exists, arrives = (
        np.concatenate([getattr(own, name) for own in sequences], axis=-1) + later
        for name in ("begins", "exists", "arrives")
    )
    return ItemTimeline(group, begins, exists, arrives)


def _counted(own: PositionSequence, neurons: int, early: int) -> int:
    """The cycle in which the memory has counted as many sums as the image has; `early` sums of beyond its edge, which
    have come by then, count as well."""
    wanted = neurons * len(own.ends) - early
    if wanted <= 0:
        return 0
    position, part = divmod(wanted - 1, neurons)
    return int(own.exists[position]) + sum(count <= part for count in own.counts) - len(own.counts) + 1
