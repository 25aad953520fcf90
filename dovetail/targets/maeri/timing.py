"""Cycles of virtual neurons that work in step: weights, positions, and the way of a sum out of the trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import TAIL_CYCLES, MaeriConfig
from dovetail.targets.maeri.delivery import Tile, steps
from dovetail.targets.maeri.layer import Layer
from dovetail.targets.maeri.tree import Range, collisions, configure


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
def timing(config: MaeriConfig, layer: Layer, tile: Tile, taps: int) -> Timing:
    """What virtual neurons of a tile take that begin at the first multiplier, or at a multiple of a port's.

    Args:
        config: of the engine.
        layer: what they compute.
        tile: how it lies on the multipliers.
        taps: products they add up of each sum.

    Raises:
        TargetError: the tile does not fit the multipliers, a sum needs more steps than a multiplier holds weights, or
            several where folding is off.
    """
    folds = -(-taps // tile.size)
    extra = 0 if config.accumulation_buffer or folds == 1 else 1
    _check(config, tile, taps, folds, extra)
    size = tile.size + extra
    needed = steps(config, tile, layer.stride, extra)
    tree = configure(config.multipliers, [Range(number * size, size) for number in range(tile.neurons)])
    bus = -(-collisions(config.multipliers, config.collection, tree.outputs) // folds)
    depth = (size - 1).bit_length()
    # without the buffer each further step waits for the sum so far, which shares its port with inputs
    loop = (folds - 1) * (depth + 1 + config.shared_ports) + 1
    first, later = (loop if extra else folds * max(cycles, bus, 1) for cycles in (needed.first, needed.later))
    idle = later - folds * needed.later if config.prefetch else 0
    return Timing(size, folds, folds * needed.weights, first, later, depth + TAIL_CYCLES, idle)


def _check(config: MaeriConfig, tile: Tile, taps: int, folds: int, extra: int) -> None:
    used = (tile.size + extra) * tile.neurons
    if used > config.multipliers:
        raise TargetError(f"the tile needs {used} multipliers, there are {config.multipliers}", where="MAERI",
                          hint="take smaller virtual neurons, or more multipliers")
    if folds > 1 and not config.fold:
        raise TargetError(f"a sum of {taps} products does not fit a virtual neuron of {tile.size}, and folding is off",
                          where="MAERI", hint="allow folding, or take more multipliers")
    if folds > config.weight_depth:
        raise TargetError(f"a sum needs {folds} steps, a multiplier holds {config.weight_depth} weights",
                          where="MAERI", hint="take larger virtual neurons")
