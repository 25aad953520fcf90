"""Cycles of a layer computed by equal virtual neurons only, as the public simulator runs it, and the best such tile.

Filters one after the other; for each of them rows, columns and then the steps of one sum. All weights of a filter come
first, and the next filter's wait until its last sum has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.delivery import Tile
from dovetail.targets.maeri.layer import Layer
from dovetail.targets.maeri.timing import timing


def uniform_cycles(layer: Layer, tile: Tile, config: MaeriConfig) -> int:
    """Cycles of a layer.

    Raises:
        TargetError: the tile does not fit the multipliers, or needs several steps per sum where that is off.
    """
    time = timing(config, layer, tile, _folds(layer, tile) * tile.size)
    rounds, rows, columns = _rounds(layer, tile)
    return rounds * (time.load + rows * time.positions(columns, 0, columns) + time.tail)


def _folds(layer: Layer, tile: Tile) -> int:
    kernel = zip((layer.rows, layer.columns, layer.channels), (tile.rows, tile.columns, tile.channels), strict=True)
    return prod(-(-size // step) for size, step in kernel)


def _rounds(layer: Layer, tile: Tile) -> tuple[int, int, int]:
    """How many times the tile is moved over filters and groups, rows, and columns."""
    rounds = -(-layer.filters // tile.filters) * -(-layer.groups // tile.groups)
    return rounds, -(-layer.out_rows // tile.out_rows), -(-layer.out_columns // tile.out_columns)


def utilisation(layer: Layer, tile: Tile, config: MaeriConfig) -> float:
    """Products per multiplier and cycle."""
    return layer.macs / (uniform_cycles(layer, tile, config) * config.multipliers)


def best_tile(layer: Layer, config: MaeriConfig, neurons: int | None = None) -> tuple[Tile, int]:
    """The tile with the fewest cycles, and those.

    Args:
        layer: what to compute.
        config: of the engine.
        neurons: the most virtual neurons side by side; None for as many as fit.

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
        raise TargetError(f"no tile of a sum of {layer.taps} products fits {config.multipliers} multipliers",
                          where="MAERI", hint="allow folding, or take more multipliers")
    return best


def _tiles(layer: Layer, config: MaeriConfig, neurons: int) -> Iterator[Tile]:
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


def _splits(layer: Layer, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(filters, groups, rows, columns) side by side, as many as fit."""
    sizes = (range(1, min(size, most, 8) + 1) for size in (layer.out_rows, layer.out_columns))
    for rows, columns in product(*sizes):
        left = most // (rows * columns)
        if not left:
            continue
        filters = min(layer.filters, left)
        yield filters, min(layer.groups, left // filters), rows, columns
