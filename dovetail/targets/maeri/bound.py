"""What no order of a network can beat, and what stands in the way.

A sum of a layer costs multipliers, sends and a place on a line; how much depends on the tile it is computed with. Let a
share w of attention go to the multipliers and 1 - w to the ports. Then an order takes at least as many cycles as the
sum over layers of the cheapest tile's w * (multiplier cycles / multipliers) + (1 - w) * (sends / ports), for it has
no more than all multipliers and all ports in a cycle, whichever tiles it mixes. The bound is the largest over w. (This
is the dual of the linear program that shares the work out between tiles.)

Multiplier cycles of a tile are those of products, of weights where a multiplier has no place for further ones, and of
waiting until the last sum of a filter has left; sends are those of weights once and of every position's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer, OrderNetwork
from dovetail.targets.maeri.rules import Rules
from dovetail.targets.maeri.timing import MultiplierTile, every_tile, steps, timing, traffic
from dovetail.targets.maeri.tree import Range, leaving

_SHARES = tuple(part / 20 for part in range(21))
"""Tried shares of attention to the multipliers."""


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
    """Multipliers and ports together: what is easy on one is hard on the other."""
    path: int
    """One layer after the other as they depend on each other, each with everything for itself."""

    @property
    def cycles(self) -> int:
        """The largest."""
        return max(self.products, self.distribution, self.collection, self.mixed, self.path)

    @property
    def binds(self) -> str:
        """What the largest is for."""
        names = {
            "products": self.products,
            "distribution": self.distribution,
            "collection": self.collection,
            "products and distribution": self.mixed,
            "the way through the network": self.path,
        }
        return max(names, key=lambda name: names[name])


def bound(network: OrderNetwork, config: MaeriConfig, rules: Rules | None = None) -> MakespanBound:
    """The lower bounds of a network; of orders that keep each filter whole, where rules ask for that."""
    works = network.works
    costs = [_costs(work.layer, work.turned, config) for work in works]
    of_share = [sum(cost[number] for cost in costs) for number in range(len(_SHARES))]
    collected = sum(work.channels * (1 if work.turned else work.positions) for work in works)
    return MakespanBound(
        int(of_share[-1]),
        int(of_share[0]),
        -(-collected // config.collection),
        int(max(of_share)),
        max(_path(network, config, rules or Rules()).values()),
    )


@lru_cache(maxsize=4096)
def _costs(layer: OrderLayer, turned: bool, config: MaeriConfig) -> tuple[float, ...]:
    """The cheapest tile's cycles for each share of attention."""
    if not config.shared_ports:
        return tuple(share * _multiplied(layer, config) / config.multipliers for share in _SHARES)
    pairs = {_cost(layer, tile, config) for tile in every_tile(layer, config)}
    if not pairs:
        return tuple(0.0 for _ in _SHARES)
    return tuple(min(share * cycles + (1 - share) * sends for cycles, sends in pairs) for share in _SHARES)


def _multiplied(layer: OrderLayer, config: MaeriConfig) -> float:
    """Multiplier cycles a layer takes at least, on virtual neurons of any size."""
    filters = layer.filters * layer.groups
    positions = layer.out_rows * layer.out_columns
    waits = 0 if config.prefetch else layer.taps + 2 * _drain(config, min(2, layer.taps))
    if config.accumulation_buffer:
        return float(filters * (positions * layer.taps + waits))
    best = float("inf")
    for folds in range(1, layer.taps + 1):
        size = -(-layer.taps // folds) + (folds > 1)
        if size <= config.multipliers:
            step = _links(config, size) + 2 + config.shared_ports
            best = min(best, filters * (positions * size * ((folds - 1) * step + 1) + waits))
    return best if best < float("inf") else 0.0


@lru_cache(maxsize=4096)
def _links(config: MaeriConfig, size: int) -> int:
    """The fewest links from a first multiplier to where its sum leaves the tree."""
    places = range(config.multipliers - size + 1)
    return min((leaving(config.multipliers, Range(place, size)).first for place in places), default=1)


def _drain(config: MaeriConfig, size: int) -> int:
    """Cycles until a last sum has left, at least."""
    return max(size - 1, 1).bit_length() + 2 + config.accumulation_buffer


def _cost(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> tuple[float, float]:
    """(cycles of all multipliers, cycles of all ports) a layer takes on a tile, both as if always in use; the last
    filters on other tiles, if they do not fill this one."""
    folds = steps(layer, tile, layer.taps)
    rounds = layer.filters / tile.filters * (layer.groups / tile.groups)
    rows, columns = -(-layer.out_rows // tile.out_rows), -(-layer.out_columns // tile.out_columns)
    weights, first, later = traffic(config, layer, tile)
    used = tile.size * tile.neurons
    waits = 0 if config.prefetch else folds + _drain(config, tile.size)
    products = rounds * used * (rows * columns * folds + waits)
    sends = rounds * folds * (weights + rows * (first + (columns - 1) * later))
    return products / config.multipliers, sends / config.distribution


def _path(network: OrderNetwork, config: MaeriConfig, rules: Rules) -> Mapping[int, int]:
    done: dict[int, int] = {}
    numbers = {work.name: number for number, work in enumerate(network.works)}
    for number, work in enumerate(network.works):
        earlier = [numbers[each.name] for each in network.before(work)]
        # The last sum of a layer reads what exists last of some layer before, or of all of them at the same time.
        last = max((done[each] for each in earlier), default=0)
        whole = rules.whole_filters is True or work.name in (rules.whole_filters or ())
        alone = max(_alone(work, config), _one_filter(work.layer, config) if whole and not work.turned else 0)
        done[number] = max(alone, last + 1 + _drain(config, 2))
    return done


@lru_cache(maxsize=4096)
def _one_filter(layer: OrderLayer, config: MaeriConfig) -> int:
    """Cycles of one filter on one virtual neuron as large as its kernel, wherever it begins."""
    if layer.taps > config.multipliers:
        return 0
    tile = MultiplierTile(layer.rows, layer.columns, layer.channels)
    starts = range(min(config.port_width, config.multipliers - layer.taps + 1))
    times = [timing(config, layer, tile, layer.taps, at) for at in starts]
    positions = layer.out_rows * layer.out_columns
    return min(time.load + time.positions(layer.out_columns, 0, positions) + time.tail for time in times)


def _alone(work: MultiplierLayer, config: MaeriConfig) -> int:
    """Cycles of a layer that has everything for itself; multipliers' cycles contain what filters' last sums take."""
    drain, costs = _drain(config, 2), _costs(work.layer, work.turned, config)
    waits = [drain if config.prefetch else (1 - share) * drain for share in _SHARES]
    return int(max(cost + wait for cost, wait in zip(costs, waits, strict=True)))
