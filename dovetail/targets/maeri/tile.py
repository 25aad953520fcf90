"""Tiles: how a layer lies on the multipliers, the values that ports send to it, and where its sums leave.

A port sends one value per cycle to any of its own multipliers; a value that multipliers of several ports want goes
through each of these ports. Ports have queues and do not wait for each other. A tree without such ports sends as many
values per cycle, each to any multipliers; it counts as a single port here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.feedback import FeedbackLoops
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.tree import Range, TreeExit, leaving


@dataclass(frozen=True, slots=True)
class MultiplierTile:
    """The part of a layer that is on the multipliers at the same time, as a size in each dimension.

    Names are those of the hardware sheet: R, S rows and columns of the kernel, C input channels, K filters, G groups,
    X, Y rows and columns of the result. R x S x C products are one virtual neuron; the other dimensions are virtual
    neurons side by side, in the order G, K, X, Y.
    """

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


@dataclass(frozen=True, slots=True)
class PortTraffic:
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
    width, stride = config.feed_width, layer.stride
    last = (at + (tile.size + carried) * tile.neurons - 1) // width
    weights, inputs, later, back = values = [[set[Hashable]() for _ in range(last + 1)] for _ in range(4)]
    passes = tile.out_columns == stride == 1 and not tile.flat and layer.columns % tile.columns == 0
    place = at
    for neuron in product(*map(range, (tile.groups, tile.filters, tile.out_rows, tile.out_columns))):
        group, filter_, x, y = neuron
        if carried:
            back[place // width].add(neuron)
            place += 1
        for channel, row, column in product(range(tile.channels), range(tile.rows), range(tile.columns)):
            pixel = (x, y, 0, 0) if tile.flat else (0, 0, x * stride + row, y * stride + column)
            port = place // width
            inputs[port].add((group, channel, *pixel))
            weights[port].add((group, filter_, channel, row, column))
            if not passes or column == tile.columns - 1:
                later[port].add((group, channel, *pixel))
            place += 1
    lanes = 1 if config.ports else config.distribution
    return tuple(PortTraffic(*(ceil(len(each) / lanes) for each in port)) for port in zip(*values, strict=True))


def port_traffic(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, at: int = 0) -> tuple[PortTraffic, ...]:
    """Traffic of each port for whole sums of a layer, from the port that feeds multiplier `at` on."""
    return _port_traffic(config, layer, tile, config.carried(steps(layer, tile, layer.taps)), at % config.feed_width)


def traffic(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile) -> tuple[int, int, int]:
    """Values all ports send for a step: weights, inputs of a row's first position, inputs of every other position."""
    ports, lanes = port_traffic(config, layer, tile), 1 if config.ports else config.distribution
    return (
        lanes * sum(port.weights for port in ports),
        lanes * sum(port.first for port in ports),
        lanes * sum(port.later for port in ports),
    )


@dataclass(frozen=True)
class NeuronGroup:
    """Equal virtual neurons side by side on the multipliers."""

    width: int
    """Multipliers of each, the one that carries sums back included."""
    folds: int
    """Steps of a sum."""
    places: tuple[Range, ...]
    exits: tuple[TreeExit, ...]
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
    exits = tuple(leaving(config, place) for place in places)
    ports, loops = _port_traffic(config, layer, tile, carried, at % config.feed_width), None
    if carried:
        feeding, entries = (
            (place.start // config.feed_width for place in places),
            config.multipliers // config.collection,
        )
        loops = FeedbackLoops(exits, tuple(feeding), entries + 1, folds, int(config.shared_ports))
    return NeuronGroup(width, folds, places, exits, ports, loops)
