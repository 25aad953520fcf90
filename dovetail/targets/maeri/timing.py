"""What virtual neurons take: sends of the distribution tree, sums on the bus, and cycles. Everything that orders,
compiles or bounds goes by this module; `machine.py` finds the same cycles without it.

Distribution. A port sends one value per cycle to any of its own multipliers; a value wanted by multipliers of several
ports goes through each of them. Ports have queues and do not wait for each other. A tree without such ports sends so
many values per cycle, each to any multipliers.

Time. All weights of a filter come first, a step of them per cycle at most; then positions, rows first, a step per cycle
at most. The next filter's weights wait until its last sum has left, unless there is a place for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import TAIL_CYCLES, MaeriConfig
from dovetail.targets.maeri.feedback import FeedbackLoop, FeedbackTiming
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.tree import Range, entry_of, leaving, line_of, meeting


@dataclass(frozen=True, slots=True)
class MultiplierTile:
    """How a layer lies on the multipliers: so many of each dimension at the same time (names as in the hardware
    sheet: R, S rows and columns of the kernel, C input channels, K filters, G groups, X, Y rows and columns of the
    result). R x S x C are one virtual neuron; the others are virtual neurons side by side, in the order G, K, X, Y."""

    rows: int = 1
    columns: int = 1
    channels: int = 1
    filters: int = 1
    groups: int = 1
    out_rows: int = 1
    out_columns: int = 1
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


def shaped(layer: OrderLayer, size: int) -> MultiplierTile:
    """So many products of a sum at a time, as a box where that gives the same steps."""
    area = layer.rows * layer.columns
    if size % area == 0:
        return MultiplierTile(layer.rows, layer.columns, size // area)
    if size % layer.columns == 0 and layer.rows % (size // layer.columns) == 0:
        return MultiplierTile(size // layer.columns, layer.columns)
    if layer.columns % size == 0:
        return MultiplierTile(1, size)
    return MultiplierTile(channels=size, flat=True)


def steps(layer: OrderLayer, tile: MultiplierTile, taps: int) -> int:
    """Steps of one sum of so many products: of all, or of whole input channels."""
    if tile.flat:
        return -(-taps // tile.size)
    kernel = (
        (layer.rows, tile.rows),
        (layer.columns, tile.columns),
        (taps // (layer.rows * layer.columns), tile.channels),
    )
    return prod(-(-size // step) for size, step in kernel)


def forwards(layer: OrderLayer, tile: MultiplierTile) -> bool:
    """Whether neighbouring multipliers pass inputs on, so that beside a row's first position only a window's last
    column is sent."""
    moves = tile.out_columns == 1 and layer.stride == 1 and not tile.flat
    return moves and tile.columns > 1 and layer.columns % tile.columns == 0


Want = tuple[Hashable, int]
"""(what value, which multiplier wants it)."""


@dataclass(frozen=True, slots=True)
class PortTraffic:
    """Values a port sends."""

    weights: int
    """For one step."""
    first: int
    """Inputs of a step of a row's first position."""
    later: int
    """Of a step of every other position."""
    back: int
    """Virtual neurons whose sums go back through it, where there is no accumulation buffer."""


def traffic(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile) -> tuple[int, int, int]:
    """Sends of all ports together for a step: weights, inputs of a row's first position, inputs of every other one."""
    extra = 0 if config.accumulation_buffer or steps(layer, tile, layer.taps) == 1 else 1
    weights, first, later, _ = (sum(each.values()) for each in _counted(config, layer, tile, extra, 0))
    scale = 1 if config.ports else config.distribution
    return weights * scale, first * scale, later * scale


def _sends(
    config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, extra: int, at: int
) -> tuple[PortTraffic, ...]:
    """Of every port that has something to send, without repetition.

    `extra` multipliers at the start of each virtual neuron carry sums; the first one is multiplier `at`.
    """
    counts = _counted(config, layer, tile, extra, at if config.ports else 0)
    ports = set().union(*counts)
    return tuple(sorted({PortTraffic(*(count.get(port, 0) for count in counts)) for port in ports}, key=repr))


@lru_cache(maxsize=65536)
def _counted(
    config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, extra: int, at: int
) -> tuple[dict[int, int], ...]:
    """Weights, inputs of a row's first position, of every other one, and sums that go back: sends by port."""
    weights: list[Want] = []
    inputs: list[Want] = []
    edge: list[Want] = []
    back: list[Want] = []
    place, passes, stride = at, forwards(layer, tile), layer.stride
    sizes = (tile.groups, tile.filters, tile.out_rows, tile.out_columns)
    for group, filter_, x, y in product(*map(range, sizes)):
        back += [((group, filter_, x, y), place)] * extra
        place += extra
        for channel, row, column in product(range(tile.channels), range(tile.rows), range(tile.columns)):
            seen = (x, y, 0, 0) if tile.flat else (0, 0, x * stride + row, y * stride + column)
            inputs.append(((group, channel, *seen), place))
            weights.append(((group, filter_, channel, row, column), place))
            if not passes or column == tile.columns - 1:
                edge.append(inputs[-1])
            place += 1
    return tuple(_by_port(config, wants) for wants in (weights, inputs, edge, back))


def _by_port(config: MaeriConfig, wants: Iterable[Want]) -> dict[int, int]:
    """Cycles in which each port sends; a tree without ports is one."""
    if not config.ports:
        return {0: -(-len({value for value, _ in wants}) // config.distribution)}
    ports: dict[int, set[Hashable]] = {}
    for value, multiplier in wants:
        ports.setdefault(multiplier // config.port_width, set()).add(value)
    return {port: len(values) for port, values in ports.items()}


@dataclass(frozen=True, slots=True)
class ItemTiming:
    """Of an item on a configuration."""

    size: int
    """Multipliers of a virtual neuron, the one that carries sums back included."""
    folds: int
    """Steps of one sum."""
    load: int
    """Cycles to send a segment's weights."""
    lead: int
    """Cycles from the first weight until some input may be sent."""
    rates: tuple[tuple[int, int], ...]
    """Cycles in which ports send the inputs of a row's first position, and of every other one."""
    pace: tuple[int, int]
    """(cycles, positions): what so many positions take at least on the long run, whatever is sent."""
    going: FeedbackTiming | None
    """How sums go back to the virtual neuron between steps; None where they do not."""
    tail: int
    """Cycles from a position's last product until all its sums are in memory."""
    idle: int
    """Cycles of a position in which the next segment's weights may be sent; 0 without a place for them."""
    counted: tuple[int, ...]
    """How many of a position's sums are in memory each cycle of the end of `tail`; all of them in its last."""
    drains: bool
    """Whether the next segment's weights wait until the last sum is in memory."""

    @property
    def later(self) -> int:
        """Cycles of a position that is not a row's first, on the long run."""
        return max(-(-self.pace[0] // self.pace[1]), *(later for _, later in self.rates))

    def fitting(self, cycles: int) -> int:
        """How many positions that are all alike are done in so many cycles."""
        if cycles < self.folds:
            return 0
        return min(cycles // max(later for _, later in self.rates), cycles * self.pace[1] // self.pace[0])

    def load_after(self, positions: int) -> int:
        """Cycles between the last product of one of so many positions and the next segment's first (0: it is the
        first)."""
        drained = self.tail if positions and self.drains else 0
        space = max(-(-self.pace[0] // self.pace[1]) - self.folds, 0) if positions and not self.drains else 0
        return drained + max(self.load - self.idle * positions, space)

    def positions(self, columns: int, first: int, count: int) -> int:
        """Cycles of `count` positions from `first` on, in rows of so many. The first of them counts as a row's."""
        if not count:
            return 0
        rows = 1 + (first + count - 1) // columns - first // columns
        row = count if rows == 1 else (first + count - 1) % columns + 1
        cycles = self.going.until(count) if self.going else self.folds + self._paced(count - 1)
        for start, later in self.rates:
            cycles = max(cycles, rows * start + (count - rows) * later)
            cycles = max(cycles, self._paced(count - row) + start + (row - 1) * later)  # a row's burst comes last
            for number, opens in ((1, 0), (2, columns - first % columns), (rows, count - row)):
                if number <= rows:  # what follows a row's burst takes a step per cycle
                    sent = number * start + (opens - number + 1) * later
                    cycles = max(cycles, sent + (count - 1 - opens) * self.folds)
        return cycles

    def apart(self, count: int) -> int:
        """Cycles of `count` positions, at least one, each of which is its row's only one: `positions(1, 0, count)`,
        where of what follows a burst only the last and the first can be the slowest."""
        burst, rest = max(self.rates)[0], self._paced(count - 1)
        cycles = self.going.until(count) if self.going else self.folds + rest
        return max(cycles, count * burst, burst + rest, burst + (count - 1) * self.folds)

    def _paced(self, count: int) -> int:
        if self.going:
            return self.going.until(count) if count else 0
        return -(-count * self.pace[0] // self.pace[1])


@lru_cache(maxsize=65536)
def timing(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, taps: int, at: int = 0) -> ItemTiming:
    """What virtual neurons of a tile take whose first multiplier is `at`, and that add up `taps` products of each sum.

    Raises:
        TargetError: the tile does not fit the multipliers, a sum needs more steps than a multiplier holds weights, or
            several where folding is off.
    """
    folds = steps(layer, tile, taps)
    extra = 0 if config.accumulation_buffer or folds == 1 else 1
    _check(config, tile, taps, folds, extra)
    size, shared = tile.size + extra, int(config.shared_ports)
    sends = _sends(config, layer, tile, extra, at)
    places = [Range(at + number * size, size) for number in range(tile.neurons)]
    meet = meeting(config.multipliers, config.collection, places)
    most = max(leaving(config.multipliers, place).most for place in places)
    rates = tuple(
        sorted(
            {(folds * each.first + back, folds * each.later + back) for each in sends for back in [_back(each, folds)]}
        )
    )
    positions = -(-layer.out_rows // tile.out_rows) * -(-layer.out_columns // tile.out_columns)
    pace, left, round_ = (max(folds, len(meet)), 1), [tile.neurons], None
    if extra:
        circles = tuple(_circle(config, place) for place in places)
        entries = config.multipliers // config.collection + 1
        round_ = FeedbackTiming(circles, entries, folds, shared, positions)
        pace = round_.pace
    else:
        left = taken(meet, max(pace[0], *(later for _, later in rates)), positions)
    idle = max(pace[0] // pace[1] - max(first for first, _ in rates), 0)
    load, tail = (
        folds * max(each.weights for each in sends),
        most + 2 + config.accumulation_buffer + shared + len(left) - 1,
    )
    lead = folds * min(each.weights for each in sends)
    return ItemTiming(
        size,
        folds,
        load,
        lead,
        rates,
        pace,
        round_,
        tail,
        idle if config.prefetch else 0,
        tuple(left),
        not config.prefetch,
    )


def _back(sends: PortTraffic, folds: int) -> int:
    """Cycles of a position in which a port sends sums back."""
    return (folds - 1) * sends.back


def _circle(config: MaeriConfig, place: Range) -> FeedbackLoop:
    found = leaving(config.multipliers, place)
    where = line_of(config.multipliers, config.collection, place)
    entry = entry_of(config.multipliers, config.collection, found.switch)
    return FeedbackLoop(found.first, found.most, where, entry, place.start // config.port_width if config.ports else 0)


def taken(meet: Sequence[int], period: int, positions: int) -> list[int]:
    """How many of the last position's sums the memory has taken after each cycle, from the first that comes.

    It takes half of those that wait, in the public simulator, whose cycles are measured.

    Args:
        meet: sums that come in the cycles of one position.
        period: cycles between positions.
        positions: how many there are; a few are enough.
    """
    waiting = 0
    for _ in range(min(positions - 1, 30)):
        for cycle in range(max(len(meet), min(period, 40))):
            waiting += meet[cycle] if cycle < len(meet) else 0
            waiting //= 2
    found, total, done, cycle = list[int](), waiting + sum(meet), 0, 0
    before = waiting
    while done < total:
        waiting += meet[cycle] if cycle < len(meet) else 0
        done += waiting - waiting // 2
        waiting //= 2
        found.append(max(done - before, 0))
        cycle += 1
    return found


def _check(config: MaeriConfig, tile: MultiplierTile, taps: int, folds: int, extra: int) -> None:
    used = (tile.size + extra) * tile.neurons
    if used > config.multipliers:
        what = f"the tile needs {used} multipliers, there are {config.multipliers}"
        raise TargetError(what, where="MAERI", hint="take smaller virtual neurons, or more multipliers")
    if folds > 1 and not config.fold:
        what = f"a sum of {taps} products does not fit a virtual neuron of {tile.size}, and folding is off"
        raise TargetError(what, where="MAERI", hint="allow folding, or take more multipliers")
    if folds > config.weight_depth:
        what = f"a sum needs {folds} steps, a multiplier holds {config.weight_depth} weights"
        hint = f"take larger virtual neurons, or --set weight_depth={folds}"
        raise TargetError(what, where="MAERI", hint=hint)


def addition_cycles(config: MaeriConfig, elements: int) -> int:
    """Cycles of adding two images: both operands are sent, and each line's stage scales three numbers per element."""
    return max(-(-2 * elements // config.distribution), -(-3 * elements // config.collection)) + TAIL_CYCLES


def uniform_cycles(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> int:
    """Cycles of a layer.

    The memory counts sums, those beyond the image's edge too: where tiles jut out, the next filter's weights are sent
    before the last sums of this one have come, and where these go round, as soon as ports have sent all inputs.

    Raises:
        TargetError: the tile does not fit the multipliers, or needs several steps per sum where that is off.
    """
    time = timing(config, layer, tile, layer.taps)
    rounds, rows, columns = _rounds(layer, tile)
    count = rows * columns
    whole = time.load + time.positions(columns, 0, count)
    beyond = count * tile.out_rows * tile.out_columns - layer.out_rows * layer.out_columns
    if not beyond or config.prefetch:
        return rounds * (whole + time.tail)
    each, least = tile.filters * tile.groups, whole
    if time.going:
        sent = max(rows * first + rows * (columns - 1) * later for first, later in time.rates)
        least = max(time.load + sent, whole - time.load)
    cycles = whole + time.tail
    for number in range(1, rounds):
        wanted = tile.neurons * count - number * each * beyond
        position = max(-(-wanted // tile.neurons), 0)
        missing = sum(done < wanted - (position - 1) * tile.neurons for done in time.counted) - len(time.counted) + 1
        early = time.load + time.positions(columns, 0, position) + time.tail + missing if position else 0
        cycles += max(least, min(early, whole + time.tail))
    return cycles


def _rounds(layer: OrderLayer, tile: MultiplierTile) -> tuple[int, int, int]:
    """How many times the tile is moved over filters and groups, rows, and columns."""
    rounds = -(-layer.filters // tile.filters) * -(-layer.groups // tile.groups)
    return rounds, -(-layer.out_rows // tile.out_rows), -(-layer.out_columns // tile.out_columns)


def best_tile(layer: OrderLayer, config: MaeriConfig, neurons: int | None = None) -> tuple[MultiplierTile, int]:
    """The tile with the fewest cycles, and those; with at most so many virtual neurons side by side.

    Raises:
        TargetError: none fits.
    """
    found = fastest(layer, config, neurons or config.multipliers, config.multipliers)
    if found is None:
        what = f"no tile of a sum of {layer.taps} products fits {config.multipliers} multipliers"
        raise TargetError(what, where="MAERI", hint="allow folding, or take more multipliers")
    return found


@lru_cache(maxsize=4096)
def fastest(
    layer: OrderLayer, config: MaeriConfig, neurons: int, room: int, whole: bool = False, divide: int = 0
) -> tuple[MultiplierTile, int] | None:
    """The tile with the fewest cycles, and those; None where none fits.

    Args:
        layer: what is computed.
        config: on what.
        neurons: virtual neurons at most.
        room: multipliers at most.
        whole: whether each sum of a filter comes from the same virtual neuron, as large as the kernel where that fits.
        divide: what tiles along the channels (rows, of a dense layer) must divide; 0 for anything.
    """
    tiles = [
        tile for tile in _tiles(layer, config, neurons, room, whole) if not divide or divide % _along(layer, tile) == 0
    ]
    least = [steps(layer, tile, layer.taps) * prod(_rounds(layer, tile)) for tile in tiles]
    if whole:  # as few steps as can be
        fewest = min((steps(layer, tile, layer.taps) for tile in tiles), default=0)
        tiles = [tile for tile in tiles if steps(layer, tile, layer.taps) == fewest]
        least = [fewest * prod(_rounds(layer, tile)) for tile in tiles]
    best: tuple[MultiplierTile, int] | None = None
    for number in sorted(range(len(tiles)), key=least.__getitem__):
        if best is not None and least[number] >= best[1]:
            break
        cycles = uniform_cycles(layer, tiles[number], config)
        best = (tiles[number], cycles) if best is None or cycles < best[1] else best
    return best


@lru_cache(maxsize=1024)
def every_tile(layer: OrderLayer, config: MaeriConfig) -> tuple[MultiplierTile, ...]:
    """Tiles of all shapes, as wide as all multipliers, seven eighths of them, and so on, and as a port or two."""
    ports = config.distribution if config.ports else 1
    rooms = {max(ports * part // 8, 1) for part in range(1, 9)} | {1, min(2, ports)}
    found = dict[MultiplierTile, None]()
    for room in sorted(rooms, reverse=True):
        width = room * (config.multipliers // ports)
        found |= dict.fromkeys(_tiles(layer, config, width, width, False))
    return tuple(found)


@lru_cache(maxsize=1024)
def by_ports(layer: OrderLayer, config: MaeriConfig, single: bool) -> tuple[tuple[MultiplierTile, ...], ...]:
    """For each number of ports, tiles that side by side compute the layer soonest, each some of its positions; by the
    speed each has alone. `single`: of tiles of one position."""
    fastest_of: dict[int, tuple[float, MultiplierTile]] = {}
    for tile in every_tile(layer, config):
        if single and tile.out_rows * tile.out_columns > 1:
            continue
        ports, cycles = _estimate(layer, tile, config)
        if cycles < fastest_of.get(ports, (float("inf"), tile))[0]:
            fastest_of[ports] = cycles, tile
    best: list[tuple[float, tuple[MultiplierTile, ...]]] = [(0.0, ())]
    for room in range(1, config.distribution + 1):
        found = best[-1]
        for ports, (cycles, tile) in sorted(fastest_of.items()):
            if ports <= room and best[room - ports][0] + 1 / cycles > found[0] * (1 + 1e-9):
                found = best[room - ports][0] + 1 / cycles, (*best[room - ports][1], tile)
        best.append(found)
    return tuple(tiles for _, tiles in best)


def _estimate(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> tuple[int, float]:
    """Ports a tile takes, and about how many cycles of the layer."""
    folds = steps(layer, tile, layer.taps)
    extra = 0 if config.accumulation_buffer or folds == 1 else 1
    weights, first, later, _ = (max(each.values(), default=0) for each in _counted(config, layer, tile, extra, 0))
    rounds, rows, columns = _rounds(layer, tile)
    size = tile.size + extra
    step = folds if not extra else (folds - 1) * (size.bit_length() + 3) + 1
    position = max(step, folds * later)
    whole = folds * weights + rows * (max(step, folds * first) + (columns - 1) * position) + size.bit_length() + 5
    return -(-size * tile.neurons // config.port_width), float(rounds * whole)


def _along(layer: OrderLayer, tile: MultiplierTile) -> int:
    """Channels of the result a tile computes at a time."""
    return tile.out_rows if layer.filters == layer.groups == 1 else tile.filters * tile.groups


def _tiles(layer: OrderLayer, config: MaeriConfig, neurons: int, room: int, whole: bool) -> Iterator[MultiplierTile]:
    """Whole kernels, rows of them or single taps, of some channels; as many filters, rows and columns as fit."""
    kernels = [(layer.rows, layer.columns), (1, layer.columns), (1, 1)]
    for rows, columns in dict.fromkeys(kernels):
        for channels in range(1, min(layer.channels, room // max(rows * columns, 1)) + 1):
            shape = MultiplierTile(rows, columns, channels)
            folds = steps(layer, shape, layer.taps)
            size = shape.size + (0 if config.accumulation_buffer or folds == 1 else 1)
            if folds > 1 and (not config.fold or folds > config.weight_depth):
                continue
            most = min(room // size, neurons) if size > 1 else 1  # neighbours share an adder
            for split in _splits(layer, most, whole):
                yield MultiplierTile(rows, columns, channels, *split)


def _splits(layer: OrderLayer, most: int, whole: bool) -> Iterator[tuple[int, int, int, int]]:
    """(filters, groups, rows, columns) side by side, as many as fit, and as few as take as many rounds."""
    wide = most if layer.filters == layer.groups == 1 else 8
    sizes = [range(1, 2 if whole else min(size, most, wide) + 1) for size in (layer.out_rows, layer.out_columns)]
    for rows, columns in product(*sizes):
        left = most // (rows * columns)
        if left:
            filters = _even(layer.filters, left)
            yield filters, _even(layer.groups, left // filters), rows, columns
            for fewer in {min(layer.filters, left)} - {filters}:
                yield fewer, _even(layer.groups, left // fewer), rows, columns


def _even(size: int, most: int) -> int:
    """The fewest at a time that take no more rounds than the most."""
    return -(-size // -(-size // most))
