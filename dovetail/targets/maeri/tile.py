"""Virtual neurons of a tile: their places, the values that ports send them, and sums that go round; and items, equal
virtual neurons that compute some sums of a layer, as records.

A port sends one value per cycle to any of its own multipliers; a value that multipliers of several ports want goes
through each of these ports. Ports have queues and do not wait for each other. A tree without such ports sends as many
values per cycle, each to any multipliers; it counts as a single port here.

Without an accumulation buffer a sum of several steps goes from the tree through a line, the memory and a port back to
the first multiplier of its virtual neuron, which adds it to the products of the next step. The time of that depends on
which sums meet on lines, in the queue of the memory and at ports. So it is played cycle by cycle until the state is
that of some positions before; from then on it repeats.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from itertools import product
from math import ceil

import numpy as np
import numpy.typing as npt

from dovetail.records import Record
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.tree import Range, TreeExit, leaving
from dovetail.targets.maeri.words import Count, Natural, Size


class MultiplierTile(Record):
    """The part of a layer that is on the multipliers at the same time, as a size in each dimension.

    Names are those of the hardware sheet: R, S rows and columns of the kernel, C input channels, K filters, G groups,
    X, Y rows and columns of the result. R x S x C products are one virtual neuron; the other dimensions are virtual
    neurons side by side, in the order G, K, X, Y.
    """

    rows: Size = 1
    columns: Size = 1
    channels: Size = 1
    filters: Size = 1
    groups: Size = 1
    out_rows: Size = 1
    out_columns: Size = 1
    flat: bool = False
    """Whether a step is any `channels` products of a sum, counted by channel, row and column of the kernel, rather than
    a box of them. Neighbours then cannot pass inputs on."""

    @property
    def size(self) -> int:
        """Products of one virtual neuron."""
        return self.rows * self.columns * self.channels

    @property
    def neurons(self) -> int:
        """Virtual neurons side by side."""
        return self.filters * self.groups * self.out_rows * self.out_columns


def tile_of(layer: OrderLayer, size: int) -> MultiplierTile:
    """The tile of one virtual neuron of `size` products, as a box where a box takes as many steps."""
    area = layer.rows * layer.columns
    if size % area == 0:
        return MultiplierTile(layer.rows, layer.columns, size // area)
    if size % layer.columns == 0 and layer.rows % (size // layer.columns) == 0:
        return MultiplierTile(size // layer.columns, layer.columns)
    if layer.columns % size == 0:
        return MultiplierTile(1, size)
    return MultiplierTile(channels=size, flat=True)


def steps(layer: OrderLayer, tile: MultiplierTile, taps: int) -> int:
    """Steps of one sum of `taps` products: all of a sum's products, or those of whole input channels."""
    if tile.flat:
        return ceil(taps / tile.size)
    channels = taps // (layer.rows * layer.columns)
    return ceil(layer.rows / tile.rows) * ceil(layer.columns / tile.columns) * ceil(channels / tile.channels)


def grid(layer: OrderLayer, tile: MultiplierTile) -> tuple[int, int]:
    """Rows and columns of positions of the result, in tiles."""
    return ceil(layer.out_rows / tile.out_rows), ceil(layer.out_columns / tile.out_columns)


def rounds(layer: OrderLayer, tile: MultiplierTile) -> int:
    """How often the tile moves over filters and groups."""
    return ceil(layer.filters / tile.filters) * ceil(layer.groups / tile.groups)


class PortTraffic(Record):
    """Cycles in which a port sends values for one step of the virtual neurons."""

    weights: int
    first: int
    """Inputs of a row's first position."""
    later: int
    """Inputs of every other position."""
    back: int
    """Sums that go back through the port; none with an accumulation buffer."""


@lru_cache(maxsize=65536)
def _port_traffic(
    config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, carried: int, at: int
) -> tuple[PortTraffic, ...]:
    """Traffic of each port, from the one that feeds multiplier `at` on, where the tile begins.

    Neighbouring multipliers pass inputs on where the window moves by one column. Then all positions but a row's first
    need only the last column of the window.
    """
    width, (down, across), (lower, further) = config.feed_width, layer.strides, layer.dilations
    last = (at + (tile.size + carried) * tile.neurons - 1) // width
    weights, inputs, later, back = values = [[set[Hashable]() for _ in range(last + 1)] for _ in range(4)]
    passes = tile.out_columns == 1 and across == further and not tile.flat and layer.columns % tile.columns == 0
    place = at
    for neuron in product(*map(range, (tile.groups, tile.filters, tile.out_rows, tile.out_columns))):
        group, filter_, x, y = neuron
        if carried:
            back[place // width].add(neuron)
            place += 1
        for channel, row, column in product(range(tile.channels), range(tile.rows), range(tile.columns)):
            pixel = (0, 0, x * down + row * lower, y * across + column * further)
            pixel = (x, y, 0, 0) if tile.flat else pixel
            port = place // width
            inputs[port].add((group, channel, *pixel))
            weights[port].add((group, filter_, channel, row, column))
            if not passes or column == tile.columns - 1:
                later[port].add((group, channel, *pixel))
            place += 1
    return tuple(PortTraffic(*(ceil(len(each) / config.lanes) for each in port)) for port in zip(*values, strict=True))


def port_traffic(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile) -> tuple[PortTraffic, ...]:
    """Traffic of each port for a step of whole sums of a layer, the tile at the first multiplier."""
    return _port_traffic(config, layer, tile, config.carried(steps(layer, tile, layer.taps)), 0)


def traffic(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile) -> tuple[int, int, int]:
    """Values all ports send for a step: weights, inputs of a row's first position, inputs of every other position."""
    ports = port_traffic(config, layer, tile)
    weights, first, later = zip(*((port.weights, port.first, port.later) for port in ports), strict=True)
    return config.lanes * sum(weights), config.lanes * sum(first), config.lanes * sum(later)


class NeuronGroup(Record, eq=False):
    """Equal virtual neurons side by side on the multipliers."""

    width: int
    """Multipliers of each, the one that carries sums back included."""
    folds: int
    """Steps of a sum."""
    places: tuple[Range, ...]
    exits: tuple[TreeExit, ...]
    lines: tuple[int, ...]
    """The line of the collection bus that takes each one's sums."""
    ports: tuple[PortTraffic, ...]
    """Traffic of each port, from the one that feeds the first multiplier on."""
    loops: FeedbackLoops | None
    """The way sums go back to the virtual neurons between steps; None where they stay in the accumulation buffer."""


@lru_cache(maxsize=65536)
def neuron_group(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, taps: int, at: int) -> NeuronGroup:
    """Virtual neurons of a tile from multiplier `at` on, which add up `taps` products of each sum."""
    folds = steps(layer, tile, taps)
    carried = config.carried(folds)
    width = tile.size + carried
    places = tuple(Range(at + number * width, width) for number in range(tile.neurons))
    exits, loops = tuple(leaving(config, place) for place in places), None
    if carried:
        ports = tuple(place.start // config.feed_width for place in places)
        entries = config.multipliers // config.collection + 1
        loops = FeedbackLoops(exits, ports, entries, folds, int(config.shared_ports))
    sent = _port_traffic(config, layer, tile, carried, at % config.feed_width)
    return NeuronGroup(width, folds, places, exits, tuple(exit_.line for exit_ in exits), sent, loops)


class FeedbackRun(Record):
    """Cycles in which the memory takes the finished sums of some virtual neurons."""

    ends: tuple[tuple[int, ...], ...]
    """Cycles of the first sums of each virtual neuron."""
    repeated: tuple[int, ...]
    """Number of last sums of each virtual neuron that repeat over and over."""
    period: tuple[int, ...]
    """Cycles between one repetition and the next."""

    def end(self, number: int, count: int) -> int:
        """The cycle in which the memory takes sum `count` (from 1) of a virtual neuron."""
        ends = self.ends[number]
        if count <= len(ends):
            return ends[count - 1]
        repetitions = ceil((count - len(ends)) / self.repeated[number])
        return ends[count - repetitions * self.repeated[number] - 1] + repetitions * self.period[number]


class FeedbackLoops(Record):
    """The way round of the sums of virtual neurons side by side."""

    exits: tuple[TreeExit, ...]
    """Exit of each virtual neuron."""
    ports: tuple[int, ...]
    """The port that feeds the first multiplier of each."""
    entries: int
    """Inputs of a line, asked in turn."""
    folds: int
    """Steps of a sum, at least 2."""
    delay: int
    """Cycles between a port and its multipliers."""

    @property
    def alone(self) -> int:
        """Cycles of a position of the first virtual neuron, if no other sums are in its way."""
        return (self.folds - 1) * (self.exits[0].first + 2 + self.delay) + 1


def play_feedback(loops: FeedbackLoops, positions: int, horizon: int) -> FeedbackRun:
    """Play sums from cycle 0 on, in which every virtual neuron multiplies for the first time.

    Args:
        loops: the way of the sums.
        positions: sums of each virtual neuron; 0 if there is always a next one.
        horizon: steps of each virtual neuron to play at most, if the state does not repeat before.
    """
    play, folds, period, repeated = _FeedbackPlay(loops, loops.folds * positions), loops.folds, 0, list[int]()
    seen: dict[str, tuple[int, list[int]]] = {}
    while not period and min(map(len, play.taken)) < horizon:
        if play.turn():
            counts = [len(cycles) for cycles in play.taken]
            cycle, before = seen.setdefault(play.state(), (play.cycle, counts))
            period = play.cycle - cycle
            repeated = [(now - then) // folds for now, then in zip(counts, before, strict=True)]
    ends = tuple(tuple(cycles[folds - 1 :: folds]) for cycles in play.taken)
    if period:
        return FeedbackRun(ends, tuple(repeated), (period,) * len(ends))
    return FeedbackRun(ends, tuple(max(len(own) - 1, 1) for own in ends), tuple(own[-1] - own[0] for own in ends))


class _FeedbackPlay:
    """Sums on their way round, as numbers of their virtual neurons, by the cycle in which they get somewhere."""

    def __init__(self, loops: FeedbackLoops, last: int) -> None:
        """`last`: sums of all steps that each virtual neuron gives; 0 if there is no last one."""
        self.loops, self.last, self.cycle = loops, last, -1
        self.taken = [list[int]() for _ in loops.exits]
        """Cycles in which the memory took the sums of each virtual neuron."""
        self.at_lines, self.at_multipliers = dict[int, list[int]](), dict[int, list[int]]()
        self.inputs: dict[int, dict[int, deque[int]]] = {exit_.line: {} for exit_ in loops.exits}
        self.turns = dict.fromkeys(self.inputs, 0)
        """The input of each line that is asked next."""
        self.on_lines, self.waiting = list[int](), deque[int]()
        self.ports: dict[int, deque[int]] = {port: deque() for port in loops.ports}
        self.begun = [0] * len(loops.exits)
        """Steps of the present sum that each virtual neuron has begun."""
        for number, exit_ in enumerate(loops.exits):
            self.at_lines.setdefault(exit_.most + 1, []).append(number)

    def state(self) -> str:
        """Everything that decides what comes next, with cycles counted from now."""
        parts, moving = [len(cycles) % self.loops.folds for cycles in self.taken], (self.at_lines, self.at_multipliers)
        events = [sorted((at - self.cycle, each) for at, each in own.items()) for own in moving]
        queues = [[tuple(own) for _, own in sorted(each.items())] for each in (self.ports, *self.inputs.values())]
        return repr((events, queues, self.on_lines, self.waiting, self.turns, self.begun, parts))

    def turn(self) -> bool:
        """Play one cycle; whether the first virtual neuron has finished a sum."""
        self.cycle += 1
        self.waiting.extend(sorted(self.on_lines, key=lambda number: self.loops.exits[number].line))
        is_finished = False
        for _ in range(ceil(len(self.waiting) / 2)):  # the memory takes half of the sums that wait
            number = self.waiting.popleft()
            self.taken[number].append(self.cycle)
            if len(self.taken[number]) % self.loops.folds:
                self.ports[self.loops.ports[number]].append(number)
            else:
                is_finished |= number == 0
        for queue in filter(None, self.ports.values()):
            self.at_multipliers.setdefault(self.cycle + self.loops.delay, []).append(queue.popleft())
        self._serve_lines()
        for number in self.at_multipliers.pop(self.cycle, ()):
            self._multiply(number)
        return is_finished

    def _serve_lines(self) -> None:
        """Each line takes one sum; its inputs are asked in turn."""
        for number in self.at_lines.pop(self.cycle, ()):
            exit_ = self.loops.exits[number]
            self.inputs[exit_.line].setdefault(exit_.entry, deque()).append(number)
        self.on_lines = []
        for line, inputs in self.inputs.items():
            if any(inputs.values()):
                while not inputs.get(self.turns[line]):
                    self.turns[line] = (self.turns[line] + 1) % self.loops.entries
                self.on_lines.append(inputs[self.turns[line]].popleft())
                self.turns[line] = (self.turns[line] + 1) % self.loops.entries

    def _multiply(self, number: int) -> None:
        """Add the products of the next step to a sum that has come back."""
        at_line = self.cycle + self.loops.exits[number].first + 1
        self.at_lines.setdefault(at_line, []).append(number)
        self.begun[number] = (self.begun[number] + 1) % self.loops.folds
        is_last = self.last and len(self.taken[number]) >= self.last - 2
        if self.begun[number] == self.loops.folds - 1 and not is_last:
            self.at_lines.setdefault(at_line + 1, []).append(number)  # the next sum begins with a zero
            self.begun[number] = 0


Numbers = npt.NDArray[np.int64]


class ChannelSegment(Record):
    """Some sums of one output channel, or of neighbouring ones where a tile has several filters."""

    channel: Natural
    """The (first) output channel."""
    first: Natural
    """The first position of the result, rows first; counted in tiles of positions."""
    count: Count
    """Number of positions."""


class Item(Record):
    """Equal virtual neurons side by side that work in step, from their first weight until their last sum has left."""

    work: Natural
    """Number of the layer, in the network's order."""
    start: Natural
    """The cycle in which its first weight is sent."""
    place: Range
    """All its multipliers."""
    tile: MultiplierTile
    """One virtual neuron, or several that share what is sent."""
    taps: tuple[Natural, Natural]
    """The products of each sum it adds up: [first, end) in the order channel, row, column of the kernel. Where that is
    not all of them, other items add the rest in the accumulation buffer."""
    segments: tuple[ChannelSegment, ...]
    """In order; all weights of a segment come before its first input."""

    @property
    def products(self) -> int:
        """Products of each sum."""
        return self.taps[1] - self.taps[0]

    def fault(self, layer: OrderLayer, config: MaeriConfig) -> str:
        """Why it is no item of a layer on the engine; empty if it is one."""
        low, high, tile = *self.taps, self.tile
        width = tile.size + config.carried(-(-self.products // tile.size))
        end = max(self.place.end, self.place.start + tile.neurons * width)
        if min(self.start, self.place.start) < 0 or end > config.multipliers:
            what = f"{tile.neurons} virtual neurons of {width} are not on the multipliers {self.place}"
            return f"{what}: there are {config.multipliers} multipliers, from cycle 0 on"
        if not 0 <= low < high <= layer.taps:
            return f"there are no products [{low}, {high}) among the {layer.taps} of a sum"
        if high - low < layer.taps and not config.accumulation_buffer:
            return "a sum in parts needs the accumulation buffer"
        if not self.segments:
            return "an item without work"
        (rows, columns), channels = grid(layer, tile), layer.filters * layer.groups
        for part in self.segments:
            if part.channel >= channels or part.first + part.count > rows * columns:
                what = f"channel {part.channel}, positions {part.first} to {part.first + part.count} are not of"
                return f"{what} {channels} channels of {rows * columns} positions (in tiles)"
        return ""

    @property
    def channels(self) -> Numbers:
        """The (first) output channel of each position."""
        return np.repeat([part.channel for part in self.segments], [part.count for part in self.segments])

    @property
    def positions(self) -> Numbers:
        """Numbers of the positions, in tiles, rows first."""
        return np.concatenate([np.arange(part.first, part.first + part.count) for part in self.segments])


def in_order(items: Iterable[Item]) -> tuple[Item, ...]:
    """Items by start, then place."""
    return tuple(sorted(items, key=lambda item: (item.start, item.place.start)))


def sweep(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, set[int]]]:
    """Every cycle in which a span [begin, end) begins or ends, with the numbers of the spans at work from then on."""
    begins, ends = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for number, (begin, end) in enumerate(spans):
        begins[begin].add(number)
        ends[end].add(number)
    working = set[int]()
    for cycle in sorted({*begins, *ends}):
        working = (working - ends[cycle]) | begins[cycle]
        yield cycle, working
