"""What passes the distribution tree: cycles for one step of the virtual neurons that work together.

A port sends one value per cycle to any of its own multipliers; a value wanted by multipliers of several ports goes
through each of them. A tree without such ports sends so many values per cycle, each to any multipliers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from dovetail.targets.maeri.config import MaeriConfig

Want = tuple[Hashable, int]
"""(what value, which multiplier wants it)."""


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


@dataclass(frozen=True, slots=True)
class Steps:
    """Cycles of distribution."""

    weights: int
    """For one set of weights: one per multiplier."""
    first: int
    """For the inputs of a step."""
    later: int
    """For those of a step beside the one before in a row: where the result moves by one column, neighbouring
    multipliers pass inputs on, and only the window's last column is new."""


def steps(config: MaeriConfig, tile: Tile, stride: int, extra: int) -> Steps:
    """Cycles the distribution tree needs.

    Args:
        config: of the engine.
        tile: how the layer lies.
        stride: of the window, the same along rows and columns.
        extra: multipliers at the start of each virtual neuron that carry sums.
    """
    weights: list[Want] = []
    inputs: list[Want] = []
    edge: list[Want] = []
    place = 0
    for group, filter_, x, y in _neurons(tile):
        place += extra
        for channel in range(tile.channels):
            for row in range(tile.rows):
                for column in range(tile.columns):
                    want = (group, channel, x * stride + row, y * stride + column), place
                    weights.append(((group, filter_, channel, row, column), place))
                    inputs.append(want)
                    if column == tile.columns - 1:
                        edge.append(want)
                    place += 1
    passes = tile.out_columns == 1 and tile.columns > 1 and stride == 1
    first = busiest(config, inputs)
    return Steps(busiest(config, weights), first, busiest(config, edge) if passes else first)


def busiest(config: MaeriConfig, wants: Iterable[Want]) -> int:
    """Cycles of the port that has the most distinct values to send."""
    if not config.ports:
        return -(-len({value for value, _ in wants}) // config.distribution)
    ports: dict[int, set[Hashable]] = {}
    for value, multiplier in wants:
        ports.setdefault(multiplier // config.port_width, set()).add(value)
    return max((len(values) for values in ports.values()), default=0)


def _neurons(tile: Tile) -> Iterable[tuple[int, int, int, int]]:
    return (
        (group, filter_, x, y)
        for group in range(tile.groups)
        for filter_ in range(tile.filters)
        for x in range(tile.out_rows)
        for y in range(tile.out_columns)
    )
