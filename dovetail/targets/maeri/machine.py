"""The hardware, event by event: the cycles in which an item's ports, multipliers, adders and lines work.

It reads sizes, places and segments of an order, and none of its times. An event is a turn of a port's queue, of an
adder tree or of a line. The events of a stretch of positions are one array; a stretch of the same shape, place and
length is played once. (Written from stonne-simulator/stonne@22634b8 src, whose cycles are measured.)

- A sequencer puts the weights of a step, then the inputs of a step, into the ports' queues, one step per cycle; a port
  sends one value per cycle, to any of its own multipliers. A multiplier keeps its weights and multiplies what comes.
- A multiplier passes its input on to its left neighbour, if that is the neighbour's next input.
- A sum climbs the tree by a link per cycle; then the accumulation buffer, the line, and the memory take a cycle each.
- A line takes one sum per cycle. The memory takes half of the waiting sums of an item.
- The next filter's weights are sent when the memory has counted this one's sums, or into a second place before that.
- Without an accumulation buffer a sum goes from the memory through a port to the virtual neuron's first multiplier.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.feedback import FeedbackLoops, play_feedback
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.order import Item
from dovetail.targets.maeri.tile import MultiplierTile, NeuronGroup, PortTraffic, grid, neuron_group
from dovetail.targets.maeri.tree import Range

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
class _Setup:
    """Everything that decides how virtual neurons of a layer work, and is the same wherever they begin alike."""

    columns: int
    """Positions of a row."""
    folds: int
    ports: tuple[PortTraffic, ...]
    fed_by: tuple[tuple[int, int], ...]
    """The first of these ports that feeds each virtual neuron, and one past the last."""
    climbs: tuple[int, ...]
    """Cycles from the last product of each virtual neuron to its line."""
    lines: tuple[int, ...]
    """The first virtual neuron on the line of each; they share a line if it is the same."""
    loops: FeedbackLoops | None


class NeuronSimulator:
    """Plays stretches of virtual neurons that are set up alike, each stretch once."""

    def __init__(self, setup: _Setup) -> None:
        self.setup = setup
        self._single = len(setup.climbs) == 1 and setup.loops is None
        self._even = all(port.first == port.later for port in setup.ports)
        self._played: dict[tuple[int, int], PositionSequence] = {}

    def stretch(self, column: int, count: int) -> PositionSequence:
        """Positions from a column of a row on.

        The sums of a single virtual neuron come one after the other, so its positions are the start of any longer
        stretch.
        """
        further = max(1 << (count - 1).bit_length(), _SHORT) if self._single else count
        key = (0 if self._even else column, further)
        if key not in self._played:
            self._played[key] = play_stretch(self.setup, *key)
        played = self._played[key]
        if count == further:
            return played
        return PositionSequence(
            played.begins[:count],
            played.ends[:count],
            played.arrives[:, :count],
            played.exists[:count],
            played.weights,
            played.sent[:, :count],
            max(int(played.ends[count - 1]), int(played.exists[count - 1]) - self.setup.climbs[0] - self.setup.folds),
            played.counts,
        )


@lru_cache(maxsize=8192)
def simulator(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, taps: int, at: int) -> NeuronSimulator:
    """The simulator of virtual neurons from multiplier `at` on; one for all that are set up alike."""
    return _simulator(setup_of(config, layer, tile, neuron_group(config, layer, tile, taps, at)))


@lru_cache(maxsize=8192)
def _simulator(setup: _Setup) -> NeuronSimulator:
    return NeuronSimulator(setup)


def setup_of(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, group: NeuronGroup) -> _Setup:
    """How virtual neurons of a layer are set up."""
    width, lines = config.feed_width, [exit_.line for exit_ in group.exits]
    base, first = group.places[0].start // width, group.width - tile.size
    return _Setup(
        grid(layer, tile)[1],
        group.folds,
        group.ports,
        tuple(((place.start + first) // width - base, (place.end - 1) // width - base + 1) for place in group.places),
        tuple(exit_.most + config.bus_delay for exit_ in group.exits),
        tuple(map(lines.index, lines)),
        group.loops,
    )


def play_stretch(setup: _Setup, column: int, count: int) -> PositionSequence:
    """Play `count` positions from a column of a row on, as arrays of events."""
    folds, numbers = setup.folds, np.arange(count)
    opens = (numbers == 0) | ((numbers + column) % setup.columns == 0)
    load, first, later, back = np.array([astuple(port) for port in setup.ports]).T[..., None]
    weights = folds * load[:, 0]
    asked = folds + folds * numbers  # the cycle in which the sequencer turns to a position
    work = folds * np.where(opens, first, later) + (folds - 1) * back
    sent = _served(asked, work, weights)
    done = np.stack([sent[begin:end].max(axis=0) for begin, end in setup.fed_by])
    turns = folds * numbers  # a multiplier does one step per cycle
    done = np.maximum.accumulate(np.maximum(done, asked + folds) - turns, axis=1) + turns
    if setup.loops is not None:
        done = np.maximum(done, _round_trips(setup.loops, count) + int(weights.max()))
    climbs = np.array(setup.climbs)
    arrives = done + climbs[:, None]
    order = np.empty_like(arrives)
    for line in set(setup.lines):
        users = [number for number, other in enumerate(setup.lines) if other == line]
        order[users] = in_turn(arrives[users])
    begins = np.where(work > 0, sent - work, np.iinfo(np.int64).max).min(axis=0)
    clear = max(int(done.max()), int((order.max(axis=1) - climbs).max()) + 1 - folds)
    late, counts = _taken(order) if setup.loops is None else (0, (len(climbs),))
    exists = order.max(axis=0) + 1 + late
    return PositionSequence(begins, done.max(axis=0), arrives, exists, weights, np.cumsum(work, axis=1), clear, counts)


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


def _taken(order: Cycles) -> tuple[int, tuple[int, ...]]:
    """Cycles that the memory takes the last sum later than its line, and its sums of the last position by cycle."""
    if len(order) == 1:
        return 0, (1,)
    last, opens = order[:, -min(order.shape[1], 24) :], int(order[:, -1].min())
    cycles, counts = np.unique(last.reshape(-1), return_counts=True)
    coming = dict(zip(cycles.tolist(), counts.tolist(), strict=True))
    cycle, waiting, total, in_memory = int(cycles[0]), 0, int(counts.sum()), list[tuple[int, int]]()
    earlier, gone = total - len(order), 0
    while gone < total:
        waiting += coming.get(cycle, 0)
        gone += waiting - waiting // 2
        waiting //= 2
        in_memory.append((cycle, gone - earlier))
        cycle += 1
    return cycle - 1 - int(cycles[-1]), tuple(max(count, 0) for at, count in in_memory if at >= opens)


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

    begins: Cycles
    """The cycle in which the first input of each position is sent."""
    exists: Cycles
    """The cycle from which its sums are in memory, if no other item's meet them on their lines."""
    arrives: Cycles
    """[virtual neuron, position]: the cycle in which each sum is at its line."""
    lines: tuple[int, ...]
    """Of the virtual neurons."""
    places: tuple[Range, ...]
    """Of the virtual neurons."""
    folds: int
    """Steps of a sum: weights that a multiplier holds."""

    @cached_property
    def until(self) -> int:
        """The cycle from which its multipliers and adders do nothing more."""
        return int(self.exists.max())


def play(config: MaeriConfig, layer: OrderLayer, item: Item) -> ItemTimeline:
    """Play an item of a layer, from the cycle in which its first weight is sent."""
    tile, at = item.tile, (config, layer, item.tile, item.taps[1] - item.taps[0], item.place.start)
    group, plays, (rows, columns) = neuron_group(*at), simulator(*at), grid(layer, tile)
    beyond = rows * columns * tile.out_rows * tile.out_columns - layer.out_rows * layer.out_columns
    whole = all(part.first == 0 and part.count == rows * columns for part in item.segments)
    cycle, sequences, starts, early = item.start, list[PositionSequence](), list[int](), 0
    for part in item.segments:
        own = plays.stretch(part.first % columns, part.count)
        if sequences and config.prefetch:
            missing = int(np.maximum(own.weights - sequences[-1].spare, 0).max())
            cycle = starts[-1] + sequences[-1].clear + missing - int(own.weights.max())
        sequences.append(own)
        starts.append(cycle)
        early += beyond * tile.filters * tile.groups if whole else 0
        cycle += max(_counted(own, tile.neurons, early), _ready(own, group.loops is not None))
    later = np.repeat(starts, [part.count for part in item.segments])
    begins, exists, arrives = (
        np.concatenate([getattr(own, name) for own in sequences], axis=-1) + later
        for name in ("begins", "exists", "arrives")
    )
    lines = tuple(exit_.line for exit_ in group.exits)
    return ItemTimeline(begins, exists, arrives, lines, group.places, group.folds)


def _ready(own: PositionSequence, goes_round: bool) -> int:
    """The cycle in which the next weights can be sent, if the memory has counted these sums: all inputs are sent, those
    of sums that still go round too."""
    last = int((own.weights + own.sent[:, -1]).max()) if goes_round else int(own.ends[-1])
    return max(last, own.clear - int(own.weights.max()))


def _counted(own: PositionSequence, neurons: int, early: int) -> int:
    """The cycle in which the memory has counted as many sums as the image has; `early` sums of beyond its edge, which
    have come by then, count as well."""
    wanted = neurons * len(own.ends) - early
    if wanted <= 0:
        return 0
    position, part = divmod(wanted - 1, neurons)
    missing = sum(count <= part for count in own.counts) - len(own.counts) + 1
    return int(own.exists[position]) + missing
