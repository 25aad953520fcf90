"""Cycles of a layer computed by equal virtual neurons only, as the public simulator runs it, and the best such tile.

Filters one after the other; for each of them rows, columns and then the steps of one sum. All weights of a filter come
first, and the next filter's wait until its last sum has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import TAIL_CYCLES, MaeriConfig
from dovetail.targets.maeri.delivery import Tile, steps
from dovetail.targets.maeri.tree import Range, collisions, configure


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution; a dense layer is one of 1x1 over a 1x1 image. Sizes of the input are with its padding."""

    rows: int
    """Of the kernel."""
    columns: int
    channels: int
    """Input channels of one group."""
    filters: int
    """Output channels of one group."""
    in_rows: int
    in_columns: int
    groups: int = 1
    stride: int = 1

    @property
    def out_rows(self) -> int:
        """Rows of the result."""
        return (self.in_rows - self.rows) // self.stride + 1

    @property
    def out_columns(self) -> int:
        """Columns of the result."""
        return (self.in_columns - self.columns) // self.stride + 1

    @property
    def taps(self) -> int:
        """Products of one sum."""
        return self.rows * self.columns * self.channels

    @property
    def macs(self) -> int:
        """Products of the layer."""
        return self.taps * self.filters * self.groups * self.out_rows * self.out_columns


def uniform_cycles(layer: Layer, tile: Tile, config: MaeriConfig) -> int:
    """Cycles of a layer.

    Raises:
        TargetError: the tile does not fit the multipliers, or needs several steps per sum where that is off.
    """
    folds = _blocks(layer.rows, tile.rows) * _blocks(layer.columns, tile.columns)
    folds *= _blocks(layer.channels, tile.channels)
    extra = 0 if config.accumulation_buffer or folds == 1 else 1
    _check(layer, tile, config, folds, extra)
    size = tile.size + extra
    tree = configure(config.multipliers, [Range(number * size, size) for number in range(tile.neurons)])
    bus = collisions(config.multipliers, config.collection, tree.outputs)
    needed = steps(config, tile, layer.stride, extra)
    rounds = _blocks(layer.filters, tile.filters) * _blocks(layer.groups, tile.groups)
    rows, columns = _blocks(layer.out_rows, tile.out_rows), _blocks(layer.out_columns, tile.out_columns)
    depth = (size - 1).bit_length()
    if extra:
        loop = depth + 1 + (config.shared_ports)  # the sum so far shares its port with inputs
        computing = rows * columns * ((folds - 1) * loop + 1)
    else:
        first, later = (max(_one_or(cycles), -(-bus // folds)) for cycles in (needed.first, needed.later))
        computing = rows * (first + (columns - 1) * later) * folds
    return rounds * (folds * needed.weights + computing + depth + TAIL_CYCLES)


def utilisation(layer: Layer, tile: Tile, config: MaeriConfig) -> float:
    """Products per multiplier and cycle."""
    return layer.macs / (uniform_cycles(layer, tile, config) * config.multipliers)


def best_tile(layer: Layer, config: MaeriConfig) -> tuple[Tile, int]:
    """The tile with the fewest cycles, and those; the first of equals in the order they are tried.

    Raises:
        TargetError: none fits.
    """
    best: tuple[Tile, int] | None = None
    for tile in _tiles(layer, config):
        ideal = layer.macs // (tile.size * tile.neurons)
        if best is None or ideal < best[1]:
            cycles = uniform_cycles(layer, tile, config)
            best = (tile, cycles) if best is None or cycles < best[1] else best
    if best is None:
        raise TargetError(f"no tile of a sum of {layer.taps} products fits {config.multipliers} multipliers",
                          where="MAERI", hint="allow folding, or take more multipliers")
    return best


def _tiles(layer: Layer, config: MaeriConfig) -> Iterator[Tile]:
    """Whole kernels, rows of them or single taps, of some channels; as many filters, rows and columns as fit."""
    kernels = [(layer.rows, layer.columns), (1, layer.columns), (1, 1)]
    room = config.multipliers - (0 if config.accumulation_buffer else 1)
    for rows, columns in dict.fromkeys(kernels):
        for channels in range(1, min(layer.channels, room // max(rows * columns, 1)) + 1):
            taps = rows * columns * channels
            size = taps + (0 if config.accumulation_buffer else 1)
            folds = config.fold and layer.taps <= taps * config.weight_depth
            if size > 1 and (taps == layer.taps or folds):
                for split in _splits(layer, config.multipliers // size):
                    yield Tile(rows, columns, channels, *split)


def _splits(layer: Layer, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(filters, groups, rows, columns) side by side, as many as fit."""
    sizes = (range(1, min(size, most, 8) + 1) for size in (layer.out_rows, layer.out_columns))
    for rows, columns in product(*sizes):
        left = most // (rows * columns)
        if not left:
            continue
        filters = min(layer.filters, left)
        yield filters, min(layer.groups, left // filters), rows, columns


def _check(layer: Layer, tile: Tile, config: MaeriConfig, folds: int, extra: int) -> None:
    used = (tile.size + extra) * tile.neurons
    if used > config.multipliers:
        raise TargetError(f"the tile needs {used} multipliers, there are {config.multipliers}", where="MAERI")
    if folds > 1 and not config.fold:
        raise TargetError(f"a sum of {layer.taps} products does not fit a virtual neuron of {tile.size}, and folding "
                          "is off", where="MAERI")
    if folds > config.weight_depth:
        raise TargetError(f"a sum needs {folds} steps, a multiplier holds {config.weight_depth} weights", where="MAERI")


def _blocks(size: int, step: int) -> int:
    return -(-size // step)


def _one_or(cycles: int) -> int:
    return max(cycles, 1)
