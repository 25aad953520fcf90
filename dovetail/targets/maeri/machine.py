"""The hardware, event by event: the cycles in which an item's ports, multipliers, adders and lines work.

All times come from here: scheduler, compiler, bound and checks ask for them, and stretches of positions that were
played are kept by shape. An event is a turn of a port's queue, of an adder tree or of a line; the events of a stretch
are one array. (Written from stonne-simulator/stonne@22634b8 src, whose cycles are measured.)

- A sequencer puts the weights of a step, then the inputs of a step, into the ports' queues, one step per cycle; a port
  sends one value per cycle, to any of its own multipliers. A multiplier keeps its weights and multiplies what comes.
- A multiplier passes its input on to its left neighbour, if that is the neighbour's next input.
- A sum climbs the tree by a link per cycle; then the accumulation buffer, the line, and the memory take a cycle each.
- A line takes one sum per cycle. The memory takes half of the waiting sums of an item.
- The next filter's weights are sent when the memory has counted this one's sums, or into a second place before that.
- Without an accumulation buffer a sum goes from the memory through a port to the virtual neuron's first multiplier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from dovetail.errors import TargetError
from dovetail.records import Record
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.tile import (
    ChannelSegment,
    FeedbackLoops,
    Item,
    MultiplierTile,
    NeuronGroup,
    PortTraffic,
    grid,
    neuron_group,
    play_feedback,
    steps,
)
from dovetail.targets.maeri.tree import sums_taken

Cycles = npt.NDArray[np.int64]
_SHORT = 64
"""Positions of a single virtual neuron that are played at least, for later stretches of fewer positions."""
_PLAYED = 600
"""Steps of a virtual neuron that are played at most where sums go round, but two positions at least."""


class PositionSequence(Record, dict=True):
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
    ready: int
    """The cycle from which further weights may be sent: the last product, or, where sums go round, the last input."""

    @cached_property
    def load(self) -> int:
        """Cycles until all weights are sent."""
        return int(self.weights.max())

    @cached_property
    def last(self) -> int:
        """The cycle from which all sums are in memory."""
        return int(self.exists[-1])

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

    @cached_property
    def is_even(self) -> bool:
        """Whether ports send as much for a row's first position as for the others."""
        return all(port.first == port.later for port in self.ports)

    def stretch(self, column: int, count: int) -> PositionSequence:
        """`count` positions from a column of a row on; those of a single virtual neuron, whose sums come one after the
        other, are the start of any longer stretch."""
        key = (0 if self.is_even else column, count)
        if key not in self.played:
            is_single = len(self.climbs) == 1 and self.loops is None
            longer = max(1 << (count - 1).bit_length(), _SHORT) if is_single else count
            self.played[key] = self.play(*key) if count == longer else self._cut(self.stretch(key[0], longer), count)
        return self.played[key]

    def _cut(self, longer: PositionSequence, count: int) -> PositionSequence:
        """The first positions of a single virtual neuron's."""
        arrays = (longer.begins, longer.ends, longer.arrives, longer.exists)
        begins, ends, arrives, exists = (array[..., :count] for array in arrays)
        clear = max(int(ends[-1]), int(exists[-1]) - self.climbs[0] - self.folds)
        more = (longer.weights, longer.sent[:, :count], clear, longer.counts, int(ends[-1]))
        return PositionSequence(begins, ends, arrives, exists, *more)

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
        ends = done.max(axis=0)
        ready = int(ends[-1]) if self.loops is None else int((weights + total[:, -1]).max())
        return PositionSequence(begins, ends, arrives, exists, weights, total, clear, counts, ready)


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


class NeuronClock(Record, eq=False, dict=True):
    """Times of the virtual neurons of a tile at a place, in cycles from their first weight on."""

    group: NeuronGroup
    plays: NeuronSimulator
    positions: int
    """Positions of a filter, in tiles."""
    beyond: int
    """Sums of a filter beyond the image's edge, which the memory counts too."""
    prefetch: bool
    """Whether multipliers have a place for the next segment's weights, which else wait for the last sum."""

    @property
    def size(self) -> int:
        """Multipliers of a virtual neuron, the one that carries sums back included."""
        return self.group.width

    @property
    def folds(self) -> int:
        """Steps of one sum."""
        return self.group.folds

    @cached_property
    def first(self) -> PositionSequence:
        """A single position."""
        return self.plays.stretch(0, 1)

    @property
    def lead(self) -> int:
        """Cycles from the first weight until some input may be sent."""
        return int(self.first.begins[0])

    @cached_property
    def sends(self) -> tuple[int, int]:
        """Cycles in which the busiest port sends for a row's first position, and for every other position."""
        ports = [(each.first, each.later, (self.folds - 1) * each.back) for each in self.group.ports]
        return max(self.folds * one + back for one, _, back in ports), max(
            self.folds * n + back for _, n, back in ports
        )

    @cached_property
    def pace(self) -> int:
        """Cycles of a position in the long run, whatever is sent."""
        if self.group.loops is None:
            return max(self.folds, *Counter(self.group.lines).values())
        ends = self.plays.stretch(0, min(self.positions, _SHORT)).ends
        return -(-int(ends[-1] - ends[0]) // max(len(ends) - 1, 1)) if len(ends) > 1 else self.first.last

    @property
    def later(self) -> int:
        """Cycles of a position that is not a row's first, in the long run."""
        return max(self.pace, self.sends[1])

    def about(self, count: int) -> int:
        """About how many cycles a segment of `count` positions takes, weights and last sums included."""
        rows = min(count, count // self.plays.columns + 1)
        return self.first.last + (count - rows) * self.later + rows * max(self.pace, self.sends[0])

    def after(self, own: PositionSequence, before: PositionSequence | None = None) -> int:
        """Cycles from a segment's first weight to the next one's, alike unless it is given."""
        if not self.prefetch:
            return max(own.last, own.ready, own.clear - own.load)
        following = before or own
        return own.clear + int(np.maximum(following.weights - own.spare, 0).max()) - following.load

    def segments(self, parts: Sequence[ChannelSegment]) -> Iterator[tuple[int, PositionSequence]]:
        """The cycle of the first weight of each segment, and its positions."""
        beyond = self.beyond if all(part.first == 0 and part.count == self.positions for part in parts) else 0
        cycle, columns, before = 0, self.plays.columns, None
        for number, part in enumerate(parts):
            own = self.plays.stretch(part.first % columns, part.count)
            if before is not None:
                cycle += (
                    self.after(before, own) if self.prefetch or not beyond else self._early(before, number * beyond)
                )
            yield cycle, own
            before = own

    def _early(self, own: PositionSequence, early: int) -> int:
        """As `after`, where the memory has counted `early` sums of beyond the image's edge by then."""
        neurons, counted = len(own.arrives), 0
        wanted = neurons * len(own.ends) - early
        if wanted > 0:
            position, part = divmod(wanted - 1, neurons)
            counted = int(own.exists[position]) + sum(count <= part for count in own.counts) - len(own.counts) + 1
        return max(counted, own.ready, own.clear - own.load)

    def end(self, parts: Sequence[ChannelSegment]) -> int:
        """The cycle from which multipliers and adders do nothing more."""
        return max(cycle + own.last for cycle, own in self.segments(parts))


@lru_cache(maxsize=65536)
def clock(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, taps: int, at: int = 0) -> NeuronClock:
    """The clock of virtual neurons from multiplier `at` on, which add up `taps` products of each sum.

    Raises:
        TargetError: the tile does not fit the multipliers, a sum needs more steps than a multiplier holds weights, or
            several where folding is off.
    """
    folds, (rows, columns) = steps(layer, tile, taps), grid(layer, tile)
    used = (tile.size + config.carried(folds)) * tile.neurons
    if used > config.multipliers:
        what = f"the tile needs {used} multipliers, there are {config.multipliers}"
        raise TargetError(what, where="MAERI", hint="take smaller virtual neurons, or more multipliers")
    if folds > (config.weight_depth if config.fold else 1):
        raise unfit(config, taps, tile.size, "MAERI")
    group = neuron_group(config, layer, tile, taps, at)
    beyond = rows * columns * tile.out_rows * tile.out_columns - layer.out_rows * layer.out_columns
    beyond *= tile.filters * tile.groups
    return NeuronClock(group, simulator(config, columns, tile.size, group), rows * columns, beyond, config.prefetch > 0)


def unfit(config: MaeriConfig, taps: int, multipliers: int, where: str) -> TargetError:
    """The error of sums of `taps` products that have no order on so many multipliers: what stands in the way."""
    what, room = f"a sum of {taps} products does not fit {multipliers} multipliers", multipliers
    if taps > multipliers:
        room -= not config.accumulation_buffer
        steps = -(-taps // max(room, 1))
        if not config.fold:
            return TargetError(f"{what}, and folding is off", where=where, hint="--set fold=1, or more multipliers")
        if not room or steps > config.weight_depth:
            what = f"{what}: it takes {steps} steps, and a multiplier holds {config.weight_depth} weights"
            return TargetError(what, where=where, hint=f"--set weight_depth={steps}, or more multipliers")
    hint = "more multipliers, fewer rules for this layer, or let its filters be divided"
    return TargetError(f"{what} beside the others'", where=where, hint=hint)


def clock_of(config: MaeriConfig, layer: OrderLayer, item: Item) -> NeuronClock:
    """The clock of an item's virtual neurons."""
    return clock(config, layer, item.tile, item.products, item.place.start)


class ItemTimeline(Record, dict=True):
    """An item of a layer from its first weight to its last sum; arrays by position, in its order."""

    layer: OrderLayer
    item: Item
    group: NeuronGroup
    begins: Cycles
    """The cycle in which the first input of each position is sent."""
    alone: Cycles
    """The cycle from which its sums are in memory, if no other item's meet them on their lines."""
    arrives: Cycles
    """[virtual neuron, position]: the cycle in which each sum is at its line."""
    late: Cycles | int = 0
    """Cycles that each position's sums wait for those of other items on their lines."""

    @cached_property
    def until(self) -> int:
        """The cycle from which its multipliers and adders do nothing more."""
        return int(self.alone.max())

    @cached_property
    def exists(self) -> Cycles:
        """The cycle from which each position's sums are in memory."""
        return self.alone + self.late

    @cached_property
    def period(self) -> float:
        """Cycles between positions: in the long run at least one for each sum of its fullest line, though sums of the
        first few positions may overtake each other."""
        if len(self.alone) == 1:
            return float(self.until)
        fullest = max(Counter(self.group.lines).values())
        return max(float(self.alone[-1] - self.alone[0]) / (len(self.alone) - 1), float(fullest))


def play(config: MaeriConfig, layer: OrderLayer, item: Item) -> ItemTimeline:
    """Play an item of a layer, from the cycle in which its first weight is sent.

    Raises:
        TargetError: its virtual neurons do not fit the engine.
    """
    own = clock_of(config, layer, item)
    starts, sequences = zip(*own.segments(item.segments), strict=True)
    later = np.repeat(starts, [part.count for part in item.segments]) + item.start
    begins, alone, arrives = (
        np.concatenate([getattr(sequence, name) for sequence in sequences], axis=-1) + later
        for name in ("begins", "exists", "arrives")
    )
    return ItemTimeline(layer, item, own.group, begins, alone, arrives)


def beside_each_other(played: Sequence[ItemTimeline]) -> list[ItemTimeline]:
    """Items that were played alone, their sums as late as the lines they share make them."""
    late = [np.zeros_like(each.alone) for each in played]
    users: dict[int, dict[int, list[int]]] = {}
    """Line -> item -> virtual neurons that use it."""
    for number, each in enumerate(played):
        for neuron, line in enumerate(each.group.lines):
            users.setdefault(line, {}).setdefault(number, []).append(neuron)
    for sharing in users.values():
        if len(sharing) > 1:
            arrives = [played[number].arrives[neurons] for number, neurons in sharing.items()]
            together = in_turn(np.concatenate([each.reshape(-1) for each in arrives]))
            parts = np.split(together, np.cumsum([each.size for each in arrives])[:-1])
            for number, alone, taken in zip(sharing, arrives, parts, strict=True):
                wait = (taken.reshape(alone.shape) - in_turn(alone)).max(axis=0)
                np.maximum(late[number], wait, out=late[number])
    return [replace(each, late=own) for each, own in zip(played, late, strict=True)]
