"""Lower bounds on the cycles of a layer and of a network, and the resource that binds.

A sum of a layer costs multipliers, sends and a place on a line; how much depends on its tile. Let a weight w go to the
multipliers and 1 - w to the ports. Then an order takes at least as many cycles as the sum over layers of the cheapest
tile's w * (multiplier cycles / multipliers) + (1 - w) * (sends / ports), for it has no more than all multipliers and
all ports in a cycle, whichever tiles it mixes. The bound is the largest over w. (This is the dual of the linear program
that shares the work out between tiles.)

Multiplier cycles of a tile are those of products, of weights where a multiplier has no place for further weights, and
of waiting until the last sum of a filter has left; sends are weights, once, and the inputs of every position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.item import ChannelSegment
from dovetail.targets.maeri.machine import clock
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer, OrderNetwork
from dovetail.targets.maeri.rules import Rules
from dovetail.targets.maeri.tile import MultiplierTile, grid, steps, traffic
from dovetail.targets.maeri.timing import every_tile
from dovetail.targets.maeri.tree import Range, leaving

_WEIGHTS = tuple(part / 20 for part in range(21))
"""Weights of the multipliers that are tried."""


@dataclass(frozen=True, slots=True)
class MakespanBound:
    """Lower bounds of the makespan, in cycles, each for a reason of its own."""

    products: int
    """All multipliers multiply, get weights or wait for a filter's last sums, whatever must be sent."""
    distribution: int
    """Every port sends in every cycle, however the multipliers are used."""
    collection: int
    """Every line takes a sum in every cycle."""
    mixed: int
    """Multipliers and ports together: a tile that is easy on one is hard on the other."""
    path: int
    """One layer after the other as they depend on each other, each with everything for itself."""

    @property
    def cycles(self) -> int:
        """The largest."""
        return max(self.products, self.distribution, self.collection, self.mixed, self.path)

    @property
    def binds(self) -> str:
        """The resource of the largest bound."""
        names = {
            "products": self.products,
            "distribution": self.distribution,
            "collection": self.collection,
            "products and distribution": self.mixed,
            "the way through the network": self.path,
        }
        return max(names, key=lambda name: names[name])


def bound(network: OrderNetwork, config: MaeriConfig, rules: Rules | None = None) -> MakespanBound:
    """The lower bounds of a network; of orders that keep each filter whole, where rules want that."""
    costs = [_costs(work.layer, config) for work in network.works]
    weighted = [sum(cost[number] for cost in costs) for number in range(len(_WEIGHTS))]
    collected = sum(work.channels * (1 if work.turned else work.positions) for work in network.works)
    return MakespanBound(
        products=int(weighted[-1]),
        distribution=int(weighted[0]),
        collection=ceil(collected / config.collection),
        mixed=int(max(weighted)),
        path=_path(network, config, rules or Rules()),
    )


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
