"""Cycles of virtual neurons in step, by formulas, and the search for good tiles: for scheduler, compiler and bound.

`machine.py` plays the same hardware event by event. Both take traffic and places from `tile.py`, and the way round of
sums from `feedback.py`.

All weights of a filter come first, at most one step of them per cycle; then positions, rows first, at most one step per
cycle. The next filter's weights wait until the last sum has left, unless multipliers have a place for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil, prod

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import TAIL_CYCLES, MaeriConfig
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.tile import FeedbackLoops, MultiplierTile, grid, neuron_group, port_traffic, rounds, steps
from dovetail.targets.maeri.tree import sums_by_cycle, sums_taken


@dataclass(frozen=True, slots=True)
class ItemTiming:
    """Cycles of the virtual neurons of a tile, from one place on."""

    size: int
    """Multipliers of a virtual neuron, the one that carries sums back included."""
    folds: int
    """Steps of one sum."""
    load: int
    """Cycles to send a segment's weights."""
    lead: int
    """Cycles from the first weight until some input may be sent."""
    rates: tuple[tuple[int, int], ...]
    """Cycles in which ports send the inputs of a row's first position, and of every other position."""
    pace: tuple[int, int]
    """(cycles, positions): the least that so many positions take in the long run, whatever is sent."""
    loops: FeedbackLoops | None
    """The way of sums back to the virtual neuron between steps; None where they stay in the accumulation buffer."""
    counted: tuple[int, ...]
    """Sums of a position in memory after each of the last cycles of `tail`; all of them after the last."""
    tail: int
    """Cycles from a position's last product until all its sums are in memory."""
    prefetch: bool
    """Whether multipliers have a place for the next segment's weights, which else wait for the last sum."""

    @property
    def later(self) -> int:
        """Cycles of a position that is not a row's first, in the long run."""
        return max(ceil(self.pace[0] / self.pace[1]), *(later for _, later in self.rates))

    @property
    def idle(self) -> int:
        """Cycles of a position in which the next segment's weights may be sent."""
        return max(self.pace[0] // self.pace[1] - max(first for first, _ in self.rates), 0) if self.prefetch else 0

    def fitting(self, cycles: int) -> int:
        """Positions, all alike, that end within so many cycles."""
        if cycles < self.folds:
            return 0
        return min(cycles // max(later for _, later in self.rates), cycles * self.pace[1] // self.pace[0])

    def load_after(self, positions: int) -> int:
        """Cycles from the last product of a segment of `positions` (0: there is none) to the first of the next."""
        if not positions:
            return self.load
        if not self.prefetch:
            return self.tail + self.load
        return max(self.load - self.idle * positions, ceil(self.pace[0] / self.pace[1]) - self.folds, 0)

    def positions(self, columns: int, first: int, count: int) -> int:
        """Cycles of `count` positions from `first` on, in rows of `columns`; the first of them counts as a row's."""
        if not count:
            return 0
        rows = 1 + (first + count - 1) // columns - first // columns
        row = count if rows == 1 else (first + count - 1) % columns + 1
        cycles = self.loops.until(count) if self.loops else self.folds + self._paced(count - 1)
        for start, later in self.rates:
            cycles = max(cycles, rows * start + (count - rows) * later)
            cycles = max(cycles, self._paced(count - row) + start + (row - 1) * later)  # a row's burst comes last
            for number, opens in ((1, 0), (2, columns - first % columns), (rows, count - row)):
                if number <= rows:  # after a row's burst, a step per cycle
                    sent = number * start + (opens - number + 1) * later
                    cycles = max(cycles, sent + (count - 1 - opens) * self.folds)
        return cycles

    def _paced(self, count: int) -> int:
        if self.loops:
            return self.loops.until(count) if count else 0
        return -(-count * self.pace[0] // self.pace[1])


@lru_cache(maxsize=65536)
def timing(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, taps: int, at: int = 0) -> ItemTiming:
    """Times of virtual neurons from multiplier `at` on, which add up `taps` products of each sum.

    Raises:
        TargetError: the tile does not fit the multipliers, a sum needs more steps than a multiplier holds weights, or
            several where folding is off.
    """
    _check(config, tile, taps, steps(layer, tile, taps))
    group = neuron_group(config, layer, tile, taps, at)
    folds, (rows, columns) = group.folds, grid(layer, tile)
    together = sums_by_cycle(group.lines)
    sent = ((port, (folds - 1) * port.back) for port in group.ports)
    rates = {(folds * port.first + back, folds * port.later + back) for port, back in sent}
    if group.loops:
        pace, counted = group.loops.pace(rows * columns), [tile.neurons]
    else:
        pace = (max(folds, len(together)), 1)
        counted = _sums_in_memory(together, max(pace[0], *(later for _, later in rates)), rows * columns)
    loads = [folds * port.weights for port in group.ports]
    tail = max(exit_.most for exit_ in group.exits) + config.bus_delay + len(counted)
    paces = (max(loads), min(loads), tuple(sorted(rates)), pace)
    return ItemTiming(group.width, folds, *paces, group.loops, tuple(counted), tail, config.prefetch > 0)


def _check(config: MaeriConfig, tile: MultiplierTile, taps: int, folds: int) -> None:
    used = (tile.size + config.carried(folds)) * tile.neurons
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


def _sums_in_memory(together: Sequence[int], period: int, positions: int) -> list[int]:
    """Sums of the last position that the memory has taken after each cycle, from the first that comes.

    Args:
        together: sums that come in each cycle of one position.
        period: cycles between positions.
        positions: number of them; a few are enough.
    """
    waiting = 0
    for _ in range(min(positions - 1, 30)):
        for cycle in range(max(len(together), min(period, 40))):
            waiting = (waiting + (together[cycle] if cycle < len(together) else 0)) // 2
    return [max(count - waiting, 0) for count in sums_taken(together, waiting)]


def addition_cycles(config: MaeriConfig, elements: int) -> int:
    """Cycles to add two images: both operands are sent, and each line's stage scales three numbers per element."""
    return max(ceil(2 * elements / config.distribution), ceil(3 * elements / config.collection)) + TAIL_CYCLES


def uniform_cycles(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> int:
    """Cycles of a layer that one tile computes, filter after filter.

    The memory counts sums, those beyond the image's edge too: where tiles jut out, the next filter's weights are sent
    before the last sums of this one have come, and where these go round, as soon as ports have sent all inputs.

    Raises:
        TargetError: the tile does not fit the multipliers, or needs several steps per sum where folding is off.
    """
    time, moves, (rows, columns) = timing(config, layer, tile, layer.taps), rounds(layer, tile), grid(layer, tile)
    count = rows * columns
    whole = time.load + time.positions(columns, 0, count)
    beyond = count * tile.out_rows * tile.out_columns - layer.out_rows * layer.out_columns
    if not beyond or config.prefetch:
        return moves * (whole + time.tail)
    each, least = tile.filters * tile.groups, whole
    if time.loops:
        sent = max(rows * first + rows * (columns - 1) * later for first, later in time.rates)
        least = max(time.load + sent, whole - time.load)
    cycles = whole + time.tail
    for number in range(1, moves):
        wanted = tile.neurons * count - number * each * beyond
        position = max(ceil(wanted / tile.neurons), 0)
        missing = sum(done < wanted - (position - 1) * tile.neurons for done in time.counted) - len(time.counted) + 1
        early = time.load + time.positions(columns, 0, position) + time.tail + missing if position else 0
        cycles += max(least, min(early, whole + time.tail))
    return cycles


def best_tile(layer: OrderLayer, config: MaeriConfig) -> tuple[MultiplierTile, int]:
    """The tile with the fewest cycles, and these cycles.

    Raises:
        TargetError: no tile fits.
    """
    best = fastest(layer, config, config.multipliers, config.multipliers)
    if best is None:
        what = f"no tile of a sum of {layer.taps} products fits {config.multipliers} multipliers"
        raise TargetError(what, where="MAERI", hint="allow folding, or take more multipliers")
    return best


@lru_cache(maxsize=4096)
def fastest(
    layer: OrderLayer, config: MaeriConfig, neurons: int, room: int, whole: bool = False, divide: int = 0
) -> tuple[MultiplierTile, int] | None:
    """The tile with the fewest cycles, and these cycles; None where no tile fits.

    Args:
        layer: the layer.
        config: the engine.
        neurons: virtual neurons at most.
        room: multipliers at most.
        whole: whether each sum of a filter comes from the same virtual neuron, as large as the kernel where that fits.
        divide: a number that the tile's size along the channels (rows, of a dense layer) must divide; 0 for any size.
    """
    tiles = [
        tile for tile in _tiles(layer, config, neurons, room, whole) if not divide or not divide % _along(layer, tile)
    ]
    folds = {tile: steps(layer, tile, layer.taps) for tile in tiles}
    if whole:
        fewest = min(folds.values(), default=0)
        tiles = [tile for tile in tiles if folds[tile] == fewest]
    least = [folds[tile] * rounds(layer, tile) * prod(grid(layer, tile)) for tile in tiles]
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
    widths = {max(ports * part // 8, 1) for part in range(1, 9)} | {1, min(2, ports)}
    tiles = dict[MultiplierTile, None]()
    for count in sorted(widths, reverse=True):
        width = count * (config.multipliers // ports)
        tiles |= dict.fromkeys(_tiles(layer, config, width, width, False))
    return tuple(tiles)


@lru_cache(maxsize=1024)
def by_ports(layer: OrderLayer, config: MaeriConfig, single: bool) -> tuple[tuple[MultiplierTile, ...], ...]:
    """For each number of ports, the tiles that side by side compute the layer soonest, each some of its positions.

    Args:
        layer: the layer.
        config: the engine.
        single: whether tiles have one position each.
    """
    fastest_of: dict[int, tuple[float, MultiplierTile]] = {}
    for tile in every_tile(layer, config):
        if not (single and tile.out_rows * tile.out_columns > 1):
            ports, cycles = _estimate(layer, tile, config)
            if cycles < fastest_of.get(ports, (float("inf"), tile))[0]:
                fastest_of[ports] = cycles, tile
    best: list[tuple[float, tuple[MultiplierTile, ...]]] = [(0.0, ())]
    for room in range(1, config.distribution + 1):
        speed, tiles = best[-1]
        for ports, (cycles, tile) in sorted(fastest_of.items()):
            if ports <= room and best[room - ports][0] + 1 / cycles > speed * (1 + 1e-9):
                speed, tiles = best[room - ports][0] + 1 / cycles, (*best[room - ports][1], tile)
        best.append((speed, tiles))
    return tuple(tiles for _, tiles in best)


def _estimate(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> tuple[int, float]:
    """Ports that a tile takes, and about how many cycles of the layer."""
    folds, (rows, columns), ports = steps(layer, tile, layer.taps), grid(layer, tile), port_traffic(config, layer, tile)
    size = tile.size + config.carried(folds)
    step = (folds - 1) * (size.bit_length() + 3) + 1 if config.carried(folds) else folds
    first, later = (
        max(step, folds * max(sent)) for sent in zip(*((port.first, port.later) for port in ports), strict=True)
    )
    weights = max(port.weights for port in ports)
    whole = folds * weights + rows * (first + (columns - 1) * later) + size.bit_length() + 5
    return ceil(size * tile.neurons / config.port_width), float(rounds(layer, tile) * whole)


def _along(layer: OrderLayer, tile: MultiplierTile) -> int:
    """Channels of the result that a tile computes at a time."""
    return tile.out_rows if layer.filters == layer.groups == 1 else tile.filters * tile.groups


def _tiles(layer: OrderLayer, config: MaeriConfig, neurons: int, room: int, whole: bool) -> Iterator[MultiplierTile]:
    """Whole kernels, rows of them or single taps, of some channels; as many filters, rows and columns as fit."""
    kernels = [(layer.rows, layer.columns), (1, layer.columns), (1, 1)]
    for rows, columns in dict.fromkeys(kernels):
        for channels in range(1, min(layer.channels, room // max(rows * columns, 1)) + 1):
            shape = MultiplierTile(rows, columns, channels)
            folds = steps(layer, shape, layer.taps)
            size = shape.size + config.carried(folds)
            if folds > 1 and (not config.fold or folds > config.weight_depth):
                continue
            most = min(room // size, neurons) if size > 1 else 1  # neighbours share an adder
            for split in _splits(layer, most, whole):
                yield MultiplierTile(rows, columns, channels, *split)


def _splits(layer: OrderLayer, most: int, whole: bool) -> Iterator[tuple[int, int, int, int]]:
    """(filters, groups, rows, columns) side by side: as many as fit, or as few as take as many rounds."""
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
    return ceil(size / ceil(size / most))
