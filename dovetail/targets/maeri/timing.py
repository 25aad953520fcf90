"""What virtual neurons take: adders of the reduction tree, sends of the distribution tree, and cycles.

Reduction. Level 0 of the augmented tree is the root, level l has 2^l adder switches, the last level adds pairs of
multipliers. Besides the link to its parent, switch j of a level (j odd) has a link to switch j + 1, which has another
parent; the two then are one double switch. All others are single ones. A virtual neuron is a range of neighbouring
multipliers. Level by level its products are added in a range of neighbouring switches. Where one half of a double
switch gets two of its values and the other half one, the one goes over the link, and three are added; the half that is
free then serves the next virtual neuron. A sum that is in one switch, or in the two halves of a double one, is complete
and leaves the tree there. (After the MAERI paper, Kwon et al., ASPLOS 2018, section 4; for equal virtual neurons it
gives the configurations published with the RTL, maeri-project/MAERI_bsv configs/rn.)

Distribution. A port sends one value per cycle to any of its own multipliers; a value wanted by multipliers of several
ports goes through each of them. A tree without such ports sends so many values per cycle, each to any multipliers.

Equal virtual neurons only, as the public simulator runs them: filters one after the other; for each of them rows,
columns and then the steps of one sum. All weights of a filter come first, and the next filter's wait until its last sum
has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import TAIL_CYCLES, MaeriConfig
from dovetail.targets.maeri.network import OrderLayer

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
    return Tree(tuple(outputs), loads, links, children)


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


def line(multipliers: int, lines: int, output: Switch) -> int:
    """The line of the collection bus a switch gives its sums to.

    The two halves of a double switch share one; lines are dealt out from the root to the leaves, left to right, first
    to double switches, then to single ones (as the public simulator wires them).
    """
    level, number = output
    if not is_single(output):
        return (sum(_doubles(upper) for upper in range(level)) + (number - 1) // 2) % lines
    doubles = 2 * sum(_doubles(each) for each in range(multipliers.bit_length() - 1))
    return (doubles + max(2 * level - 1, 0) + (1 if number else 0)) % lines


def is_single(place: Switch) -> bool:
    """Whether a switch stands alone: the first and the last of a level do."""
    return place[1] in (0, (1 << place[0]) - 1)


def _doubles(level: int) -> int:
    """Double switches of a level."""
    return max((1 << level) - 2, 0) // 2


@lru_cache(maxsize=65536)
def line_of(multipliers: int, lines: int, place: Range) -> int:
    """The line a virtual neuron gives its sums to: where a sum leaves the tree depends on its own place only."""
    return line(multipliers, lines, configure(multipliers, [place]).outputs[0])


def collisions(multipliers: int, lines: int, outputs: Sequence[Switch]) -> int:
    """Cycles the bus needs for one sum of every virtual neuron: the most that share a line."""
    counts = Counter(line(multipliers, lines, output) for output in outputs)
    return max(counts.values(), default=1)


@dataclass(frozen=True, slots=True)
class Tile:
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

    @property
    def size(self) -> int:
        """Products of one virtual neuron."""
        return self.rows * self.columns * self.channels

    @property
    def neurons(self) -> int:
        """Virtual neurons side by side."""
        return self.filters * self.groups * self.out_rows * self.out_columns


Want = tuple[Hashable, int]
"""(what value, which multiplier wants it)."""


def _sends(config: MaeriConfig, tile: Tile, stride: int, extra: int) -> tuple[int, int, int]:
    """Cycles of distribution: for one set of weights, one per multiplier; for the inputs of a step; and for those of a
    step beside the one before in a row, where neighbours pass inputs on if the result moves by one column.

    `extra` multipliers at the start of each virtual neuron carry sums.
    """
    weights: list[Want] = []
    inputs: list[Want] = []
    edge: list[Want] = []
    place = 0
    sizes = (tile.groups, tile.filters, tile.out_rows, tile.out_columns)
    for group, filter_, x, y in product(*map(range, sizes)):
        place += extra
        for channel, row, column in product(range(tile.channels), range(tile.rows), range(tile.columns)):
            want = (group, channel, x * stride + row, y * stride + column), place
            weights.append(((group, filter_, channel, row, column), place))
            inputs.append(want)
            if column == tile.columns - 1:
                edge.append(want)
            place += 1
    passes = tile.out_columns == 1 and tile.columns > 1 and stride == 1
    first = _busiest(config, inputs)
    return _busiest(config, weights), first, _busiest(config, edge) if passes else first


def _busiest(config: MaeriConfig, wants: Iterable[Want]) -> int:
    """Cycles of the port that has the most distinct values to send."""
    if not config.ports:
        return -(-len({value for value, _ in wants}) // config.distribution)
    ports: dict[int, set[Hashable]] = {}
    for value, multiplier in wants:
        ports.setdefault(multiplier // config.port_width, set()).add(value)
    return max((len(values) for values in ports.values()), default=0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Of an item on a configuration."""

    size: int
    """Multipliers of a virtual neuron, the one that carries sums back included."""
    folds: int
    """Steps of one sum."""
    load: int
    """Cycles to send a segment's weights."""
    first: int
    """Cycles of a position at the start of a row."""
    later: int
    """Cycles of every other one."""
    tail: int
    """Cycles from a sum's last product until it exists."""
    idle: int
    """Cycles of a position in which the next segment's weights may be sent; 0 without a place for them."""

    def load_after(self, positions: int) -> int:
        """Cycles a segment waits for its weights after one of so many positions (0: it is the first)."""
        return max(self.load - self.idle * positions, 0)

    def positions(self, columns: int, first: int, count: int) -> int:
        """Cycles of `count` positions from `first` on, in rows of so many. The first of them counts as a row's."""
        if not count:
            return 0
        starts = 1 + (first + count - 1) // columns - first // columns
        return starts * self.first + (count - starts) * self.later


@lru_cache(maxsize=4096)
def timing(config: MaeriConfig, layer: OrderLayer, tile: Tile, taps: int) -> Timing:
    """What virtual neurons of a tile take that begin at the first multiplier, or at a multiple of a port's, and add up
    `taps` products of each sum.

    Raises:
        TargetError: the tile does not fit the multipliers, a sum needs more steps than a multiplier holds weights, or
            several where folding is off.
    """
    folds = -(-taps // tile.size)
    extra = 0 if config.accumulation_buffer or folds == 1 else 1
    _check(config, tile, taps, folds, extra)
    size = tile.size + extra
    weights, first, later = _sends(config, tile, layer.stride, extra)
    tree = configure(config.multipliers, [Range(number * size, size) for number in range(tile.neurons)])
    bus = -(-collisions(config.multipliers, config.collection, tree.outputs) // folds)
    depth = (size - 1).bit_length()
    # without the buffer each further step waits for the sum so far, which shares its port with inputs
    loop = (folds - 1) * (depth + 1 + config.shared_ports) + 1
    idle_without = folds * later
    first, later = (loop if extra else folds * max(cycles, bus, 1) for cycles in (first, later))
    idle = later - idle_without if config.prefetch else 0
    return Timing(size, folds, folds * weights, first, later, depth + TAIL_CYCLES, idle)


def _check(config: MaeriConfig, tile: Tile, taps: int, folds: int, extra: int) -> None:
    used = (tile.size + extra) * tile.neurons
    if used > config.multipliers:
        what = f"the tile needs {used} multipliers, there are {config.multipliers}"
        raise TargetError(what, where="MAERI", hint="take smaller virtual neurons, or more multipliers")
    if folds > 1 and not config.fold:
        what = f"a sum of {taps} products does not fit a virtual neuron of {tile.size}, and folding is off"
        raise TargetError(what, where="MAERI", hint="allow folding, or take more multipliers")
    if folds > config.weight_depth:
        what = f"a sum needs {folds} steps, a multiplier holds {config.weight_depth} weights"
        raise TargetError(what, where="MAERI", hint="take larger virtual neurons")


def addition_cycles(config: MaeriConfig, elements: int) -> int:
    """Cycles of adding two images: both operands are sent, and each line's stage scales three numbers per element."""
    return max(-(-2 * elements // config.distribution), -(-3 * elements // config.collection)) + TAIL_CYCLES


def uniform_cycles(layer: OrderLayer, tile: Tile, config: MaeriConfig) -> int:
    """Cycles of a layer.

    Raises:
        TargetError: the tile does not fit the multipliers, or needs several steps per sum where that is off.
    """
    time = timing(config, layer, tile, _folds(layer, tile) * tile.size)
    rounds, rows, columns = _rounds(layer, tile)
    return rounds * (time.load + rows * time.positions(columns, 0, columns) + time.tail)


def _folds(layer: OrderLayer, tile: Tile) -> int:
    kernel = zip((layer.rows, layer.columns, layer.channels), (tile.rows, tile.columns, tile.channels), strict=True)
    return prod(-(-size // step) for size, step in kernel)


def _rounds(layer: OrderLayer, tile: Tile) -> tuple[int, int, int]:
    """How many times the tile is moved over filters and groups, rows, and columns."""
    rounds = -(-layer.filters // tile.filters) * -(-layer.groups // tile.groups)
    return rounds, -(-layer.out_rows // tile.out_rows), -(-layer.out_columns // tile.out_columns)


def best_tile(layer: OrderLayer, config: MaeriConfig, neurons: int | None = None) -> tuple[Tile, int]:
    """The tile with the fewest cycles, and those; with at most so many virtual neurons side by side.

    Raises:
        TargetError: none fits.
    """
    tiles = list(_tiles(layer, config, neurons or config.multipliers))
    least = [_folds(layer, tile) * prod(_rounds(layer, tile)) for tile in tiles]
    best: tuple[Tile, int] | None = None
    for number in sorted(range(len(tiles)), key=least.__getitem__):
        if best is not None and least[number] >= best[1]:
            break
        cycles = uniform_cycles(layer, tiles[number], config)
        best = (tiles[number], cycles) if best is None or cycles < best[1] else best
    if best is None:
        what = f"no tile of a sum of {layer.taps} products fits {config.multipliers} multipliers"
        raise TargetError(what, where="MAERI", hint="allow folding, or take more multipliers")
    return best


def _tiles(layer: OrderLayer, config: MaeriConfig, neurons: int) -> Iterator[Tile]:
    """Whole kernels, rows of them or single taps, of some channels; as many filters, rows and columns as fit."""
    kernels = [(layer.rows, layer.columns), (1, layer.columns), (1, 1)]
    room = config.multipliers - (0 if config.accumulation_buffer else 1)
    for rows, columns in dict.fromkeys(kernels):
        for channels in range(1, min(layer.channels, room // max(rows * columns, 1)) + 1):
            taps = rows * columns * channels
            size = taps + (0 if config.accumulation_buffer or taps == layer.taps else 1)
            folds = config.fold and layer.taps <= taps * config.weight_depth
            if taps == layer.taps or folds:
                most = min(config.multipliers // size, neurons) if size > 1 else 1  # neighbours share an adder
                for split in _splits(layer, most):
                    yield Tile(rows, columns, channels, *split)


def _splits(layer: OrderLayer, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(filters, groups, rows, columns) side by side, as many as fit."""
    sizes = (range(1, min(size, most, 8) + 1) for size in (layer.out_rows, layer.out_columns))
    for rows, columns in product(*sizes):
        left = most // (rows * columns)
        if not left:
            continue
        filters = min(layer.filters, left)
        yield filters, min(layer.groups, left // filters), rows, columns
