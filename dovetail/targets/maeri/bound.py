"""The search for good tiles; lower bounds on the cycles of a layer and of a network, and the resource that binds.

A sum of a layer costs multipliers, sends and a place on a line; how much depends on its tile. Let a weight w go to the
multipliers and 1 - w to the ports. Then an order takes at least as many cycles as the sum over layers of the cheapest
tile's w * (multiplier cycles / multipliers) + (1 - w) * (sends / ports), for it has no more than all multipliers and
all ports in a cycle, whichever tiles it mixes. The bound is the largest over w. (This is the dual of the linear program
that shares the work out between tiles.)

Multiplier cycles of a tile are those of products, of weights where a multiplier has no place for further weights, and
of waiting until the last sum of a filter has left; sends are weights, once, and the inputs of every position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import ceil, prod

from dovetail.records import Record
from dovetail.targets.maeri.config import TAIL_CYCLES, MaeriConfig
from dovetail.targets.maeri.machine import clock, unfit
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer, OrderNetwork
from dovetail.targets.maeri.rules import Rules
from dovetail.targets.maeri.tile import ChannelSegment, MultiplierTile, grid, port_traffic, rounds, steps, traffic
from dovetail.targets.maeri.tree import Range, leaving, sums_by_cycle

_PLAYED = 16
"""Tiles that the machine plays, of those with the best estimates."""


def addition_cycles(config: MaeriConfig, elements: int) -> int:
    """Cycles to add two images: both operands are sent, and each line's stage scales three numbers per element."""
    return max(ceil(2 * elements / config.distribution), ceil(3 * elements / config.collection)) + TAIL_CYCLES


def uniform_cycles(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> int:
    """Cycles of a layer that one tile computes, filter after filter.

    Raises:
        TargetError: the tile does not fit the multipliers, or needs several steps per sum where folding is off.
    """
    own = clock(config, layer, tile, layer.taps)
    return own.end((ChannelSegment(0, 0, own.positions),) * rounds(layer, tile))


def best_tile(layer: OrderLayer, config: MaeriConfig) -> tuple[MultiplierTile, int]:
    """The tile with the fewest cycles, and these cycles.

    Raises:
        TargetError: no tile fits.
    """
    best = fastest(layer, config, config.multipliers, config.multipliers)
    if best is None:
        raise unfit(config, layer.taps, config.multipliers, "MAERI")
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
        tile for tile in _tiles(layer, config, neurons, room, whole) if not divide or not divide % along(tile, layer)
    ]
    folds = {tile: steps(layer, tile, layer.taps) for tile in tiles}
    if whole:
        fewest = min(folds.values(), default=0)
        tiles = [tile for tile in tiles if folds[tile] == fewest]
    least = [folds[tile] * rounds(layer, tile) * prod(grid(layer, tile)) for tile in tiles]
    guesses = list[tuple[float, int]]()
    for number in sorted(range(len(tiles)), key=least.__getitem__):
        if len(guesses) >= _PLAYED and least[number] >= guesses[_PLAYED - 1][0]:
            break
        guesses = sorted([*guesses[: _PLAYED - 1], (_estimate(layer, tiles[number], config)[1], number)])
    exact = ((uniform_cycles(layer, tiles[number], config), number) for _, number in guesses)
    cycles, number = min(exact, default=(0, -1))
    return (tiles[number], cycles) if tiles else None


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


def _estimate(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> tuple[int, float]:
    """Ports that a tile takes, and about how many cycles of the layer."""
    folds, (rows, columns), ports = steps(layer, tile, layer.taps), grid(layer, tile), port_traffic(config, layer, tile)
    size, carried = tile.size + config.carried(folds), config.carried(folds)
    lines = (leaving(config, Range(number * size, size)).line for number in range(tile.neurons))
    step = (folds - 1) * (size.bit_length() + 3) + 1 if carried else max(folds, len(sums_by_cycle(lines)))
    first, later = (
        max(step, folds * max(sent)) for sent in zip(*((port.first, port.later) for port in ports), strict=True)
    )
    weights = max(port.weights for port in ports)
    whole = folds * weights + rows * (first + (columns - 1) * later) + size.bit_length() + 5
    return ceil(size * tile.neurons / config.port_width), float(rounds(layer, tile) * whole)


def along(tile: MultiplierTile, layer: OrderLayer) -> int:
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


_WEIGHTS = tuple(part / 20 for part in range(21))
"""Weights of the multipliers that are tried."""


class MakespanBound(Record):
    """Lower bounds of the makespan, in cycles."""

    reasons: Mapping[str, int]
    """The bound for each reason of its own, by name."""

    @property
    def cycles(self) -> int:
        """The largest."""
        return max(self.reasons.values())

    @property
    def binds(self) -> str:
        """The reason of the largest bound."""
        return max(self.reasons, key=self.reasons.__getitem__)


def bound(network: OrderNetwork, config: MaeriConfig, rules: Rules | None = None) -> MakespanBound:
    """The lower bounds of a network; of orders that keep each filter whole, where rules want that."""
    costs = [_costs(work.layer, config) for work in network.works]
    weighted = [sum(cost[number] for cost in costs) for number in range(len(_WEIGHTS))]
    collected = sum(work.channels * (1 if work.turned else work.positions) for work in network.works)
    reasons = {
        "products": weighted[-1],  # all multipliers multiply, get weights or wait for last sums, whatever must be sent
        "distribution": weighted[0],  # every port sends in every cycle, however the multipliers are used
        "collection": ceil(collected / config.collection),  # every line takes a sum in every cycle
        "products and distribution": max(weighted),  # a tile that is easy on one is hard on the other
        "the way through the network": _path(network, config, rules or Rules()),
    }
    return MakespanBound({reason: int(cycles) for reason, cycles in reasons.items()})


@lru_cache(maxsize=4096)
def _costs(layer: OrderLayer, config: MaeriConfig) -> tuple[float, ...]:
    """The cheapest tile's cycles for each weight of the multipliers."""
    if not config.shared_ports:
        return tuple(weight * _multiplier_cycles(layer, config) / config.multipliers for weight in _WEIGHTS)
    costs = {_cost(layer, tile, config) for tile in every_tile(layer, config)} or {(0.0, 0.0)}
    return tuple(min(weight * cycles + (1 - weight) * sends for cycles, sends in costs) for weight in _WEIGHTS)


def _multiplier_cycles(layer: OrderLayer, config: MaeriConfig) -> float:
    """Multiplier cycles that a layer takes at least, on virtual neurons of any size."""
    filters, positions = layer.filters * layer.groups, layer.out_rows * layer.out_columns
    waits = 0 if config.prefetch else layer.taps + 2 * _drain(config, min(2, layer.taps))
    if config.accumulation_buffer:
        return float(filters * (positions * layer.taps + waits))
    best = float("inf")
    for folds in range(1, layer.taps + 1):
        size = ceil(layer.taps / folds) + config.carried(folds)
        if size <= config.multipliers:
            step = _fewest_links(config, size) + 2 + config.shared_ports
            best = min(best, filters * (positions * size * ((folds - 1) * step + 1) + waits))
    return best if best < float("inf") else 0.0


@lru_cache(maxsize=4096)
def _fewest_links(config: MaeriConfig, size: int) -> int:
    """The fewest links from a first multiplier to where its sum leaves the tree."""
    places = range(config.multipliers - size + 1)
    return min((leaving(config, Range(place, size)).first for place in places), default=1)


def _drain(config: MaeriConfig, size: int) -> int:
    """Cycles until a last sum has left, at least."""
    return max(size - 1, 1).bit_length() + 2 + config.accumulation_buffer


def _cost(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> tuple[float, float]:
    """(cycles of all multipliers, cycles of all ports) of a layer on a tile, both as if always in use; the last filters
    on other tiles, if they do not fill this tile."""
    folds, (rows, columns) = steps(layer, tile, layer.taps), grid(layer, tile)
    rounds = layer.filters / tile.filters * (layer.groups / tile.groups)
    weights, first, later = traffic(config, layer, tile)
    waits = 0 if config.prefetch else folds + _drain(config, tile.size)
    products = rounds * (tile.size * tile.neurons) * (rows * columns * folds + waits)
    sends = rounds * folds * (weights + rows * (first + (columns - 1) * later))
    return products / config.multipliers, sends / config.distribution


def _path(network: OrderNetwork, config: MaeriConfig, rules: Rules) -> int:
    """Cycles of the longest way through the network."""
    ends: list[int] = []
    for number, work in enumerate(network.works):
        # The last sum of a layer reads what exists last of some layer before, or of all of them at the same time.
        last = max((ends[earlier] for earlier in network.earlier(number)), default=0)
        whole = rules.whole_filters is True or work.name in (rules.whole_filters or ())
        alone = max(_alone(work, config), _one_filter(work.layer, config) if whole and not work.turned else 0)
        ends.append(max(alone, last + 1 + _drain(config, 2)))
    return max(ends)


@lru_cache(maxsize=4096)
def _one_filter(layer: OrderLayer, config: MaeriConfig) -> int:
    """Cycles of one filter on one virtual neuron as large as its kernel, wherever it begins."""
    if layer.taps > config.multipliers:
        return 0
    tile = MultiplierTile(layer.rows, layer.columns, layer.channels)
    starts = range(0, config.multipliers - layer.taps + 1, config.port_width if config.ports else 1)
    whole = (ChannelSegment(0, 0, layer.out_rows * layer.out_columns),)
    return min(clock(config, layer, tile, layer.taps, at).end(whole) for at in starts)


def _alone(work: MultiplierLayer, config: MaeriConfig) -> int:
    """Cycles of a layer that has everything for itself; cycles of multipliers include the last sums of filters."""
    drain, costs = _drain(config, 2), _costs(work.layer, config)
    waits = [drain if config.prefetch else (1 - weight) * drain for weight in _WEIGHTS]
    return int(max(cost + wait for cost, wait in zip(costs, waits, strict=True)))
