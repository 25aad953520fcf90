"""Orders as data: items of equal virtual neurons, when they end, and the bytes of memory they need.

The feature memory holds the network's inputs and every layer's results, from the first weight of the items that compute
them until the last item that reads them has ended; results are bytes behind the stage, else 32-bit sums. The prefetch
buffer is the memory that ports send from: of every item at work it holds the weights of its filters, twice where a
multiplier has a place for further weights, and the rows of its input that a window lies on; of a layer never more than
all it has. Weights in a multiplier are counted in `machine.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from dovetail.errors import TargetError
from dovetail.ir.types import TensorType
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.item import ChannelSegment as ChannelSegment
from dovetail.targets.maeri.item import Item as Item
from dovetail.targets.maeri.item import sweep
from dovetail.targets.maeri.machine import Cycles, NeuronClock, clock_of, play, waits
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork, Times
from dovetail.targets.maeri.tile import grid


@dataclass(frozen=True)
class NetworkOrder:
    """A valid order of a network."""

    network: OrderNetwork
    config: MaeriConfig
    items: tuple[Item, ...]
    """By start, then place."""
    makespan: int
    """Cycles until the last result exists."""

    def work(self, item: Item) -> MultiplierLayer:
        """The layer an item belongs to."""
        return self.network.works[item.work]

    def end(self, item: Item) -> int:
        """The cycle after an item's last sum has left."""
        return self.ends[item]

    @cached_property
    def ends(self) -> Mapping[Item, int]:
        """The cycle after each item's last sum has left."""
        return {item: item.start + self.clock(item).end(item.segments) for item in dict.fromkeys(self.items)}

    @property
    def spans(self) -> list[tuple[Item, int, int]]:
        """Every item, the cycle of its first weight, and the cycle after its last sum has left."""
        return [(item, item.start, self.end(item)) for item in self.items]

    def clock(self, item: Item) -> NeuronClock:
        """Times of an item's virtual neurons."""
        return clock_of(self.config, self.work(item).layer, item)

    def of(self, number: int) -> list[Item]:
        """The items of a layer."""
        return [item for item in self.items if item.work == number]


@dataclass(frozen=True)
class LayerItems:
    """Items of one layer, laid out."""

    items: tuple[Item, ...]
    ends: tuple[int, ...]
    """The cycle after each item's last sum has left."""
    times: Times
    """Cycle from which results of the layer exist, by [channel, row]; 0 where these items compute none."""

    @property
    def finish(self) -> int:
        """The cycle after the last sum has left."""
        return max(self.ends)

    @property
    def exists(self) -> int:
        """The cycle from which all their results exist."""
        return int(self.times.max())


def laid_out(items: Sequence[Item], work: MultiplierLayer, config: MaeriConfig) -> LayerItems:
    """Items of a layer that the machine plays beside each other."""
    played = [play(config, work.layer, item) for item in items]
    exists = [each.exists + late for each, late in zip(played, waits(played), strict=True)]
    return LayerItems(tuple(items), tuple(each.until for each in played), results(work, items, exists))


def results(work: MultiplierLayer, items: Sequence[Item], exists: Sequence[Cycles]) -> Times:
    """Cycle from which each channel and row of a layer's result exists: that of the last of its sums.

    Args:
        work: the layer.
        items: some of its items.
        exists: of each item the cycle from which the sums of each position exist.
    """
    times, layer = np.zeros((work.outputs, work.layer.out_rows), np.int64), work.layer
    for item, own in zip(items, exists, strict=True):
        tile, channels, rows = item.tile, item.channels, item.positions // grid(layer, item.tile)[1]
        begins = np.flatnonzero((np.diff(channels, prepend=-1) != 0) | (np.diff(rows, prepend=-1) != 0))
        latest, channels, rows = np.maximum.reduceat(own, begins), channels[begins], rows[begins] * tile.out_rows
        groups, filters = np.divmod(channels, layer.filters)
        for g, k, x in product(range(tile.groups), range(tile.filters), range(tile.out_rows)):
            inside = (groups + g < layer.groups) & (filters + k < layer.filters) & (rows + x < layer.out_rows)
            places = (channels + g * layer.filters + k)[inside], (rows + x)[inside]
            np.maximum.at(times, places, latest[inside])
    return work.of_result(times)


ItemSpan = tuple[Item, int, int]
"""(item, cycle of its first weight, the cycle after its last sum has left)."""
_LISTED = 6
"""Contents of a memory that an error names."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes of a memory that are in use at the same time."""

    used: int
    """Bytes."""
    cycle: int
    """The first cycle of the peak."""
    holds: tuple[str, ...]
    """Contents with their bytes, the largest first."""


def features(network: OrderNetwork, config: MaeriConfig, spans: Sequence[ItemSpan]) -> Peak:
    """Bytes of inputs and results that are alive at the same time."""
    numbers, types, contents = range(len(network.works)), network.graph.types, []
    begins = [min(begin for item, begin, _ in spans if item.work == number) for number in numbers]
    ends = [max(end for item, _, end in spans if item.work == number) for number in numbers]
    for number, work in enumerate(network.works):
        last = max((ends[reader] for reader in numbers if number in network.earlier(reader)), default=max(ends))
        contents.append((work.name, _result_bytes(network, work, config), begins[number], last))
    for name in network.graph.inputs:
        if readers := [ends[reader] for reader in numbers if name in network.inputs(reader)]:
            contents.append((name, types[name].elements * _width(types[name]), 0, max(readers)))
    return _peak(contents, {})


def prefetched(network: OrderNetwork, config: MaeriConfig, spans: Iterable[ItemSpan]) -> Peak:
    """Bytes that ports send from at the same time."""
    contents, most = [], dict[str, int]()
    for item, begin, end in spans:
        for name, size, whole in _sent(network, item, config):
            contents.append((name, size, begin, end))
            most[name] = whole
    return _peak(contents, most)


def _sent(network: OrderNetwork, item: Item, config: MaeriConfig) -> Iterator[tuple[str, int, int]]:
    """(name, bytes of it an item has in the prefetch buffer, bytes of all of it), for weights and inputs."""
    work, tile = network.works[item.work], item.tile
    layer, taps = work.layer, item.products
    inputs, weights = (_width(network.graph.types[name]) for name in work.node.inputs[:2])
    if work.turned:  # the vector stays in the multipliers, and weights are sent past it
        inputs, weights = weights, inputs
    sets = 1 + (config.prefetch > 0 and len(item.segments) > 1)
    yield f"weights of {work.name}", sets * tile.groups * tile.filters * taps * weights, work.weights * weights
    rows = min((tile.out_rows - 1) * layer.strides[0] + layer.span[0], layer.in_rows)
    channels = -(-taps // (layer.rows * layer.columns))
    image = layer.in_rows * layer.in_columns * layer.channels * layer.groups
    yield f"inputs of {work.name}", rows * layer.in_columns * channels * tile.groups * inputs, image * inputs


def _width(kind: TensorType) -> int:
    """Bytes of an element; 1 for floats, which stand for the engine's 8 bits."""
    return -(-kind.dtype.bits // 8) if kind.dtype.is_integer else 1


def _result_bytes(network: OrderNetwork, work: MultiplierLayer, config: MaeriConfig) -> int:
    name, graph = work.node.output, network.graph
    sums = not config.requantise or (name in graph.outputs and graph.types[name].dtype.is_integer)
    return work.channels * (1 if work.turned else work.positions) * (4 if sums else 1)


def _peak(contents: Sequence[tuple[str, int, int, int]], most: Mapping[str, int]) -> Peak:
    """The peak of (name, bytes, begin, end); of one name never more bytes than `most` says."""
    peak = Peak(0, 0, ())
    for cycle, alive in sweep([(begin, end) for _, _, begin, end in contents]):
        sizes = Counter[str]()
        for number in alive:
            sizes[contents[number][0]] += contents[number][1]
        sizes = Counter({name: min(size, most.get(name, size)) for name, size in sizes.items()})
        if sizes.total() > peak.used:
            listed = sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0]))
            peak = Peak(sizes.total(), cycle, tuple(f"{name} {size:,}" for name, size in listed))
    return peak


@dataclass(frozen=True, slots=True)
class Shortage:
    """A memory that is too small for an order."""

    memory: str
    """Field of `MaeriConfig`."""
    size: int
    peak: Peak
    other: str
    """Further advice."""

    def error(self, orders: Sequence[NetworkOrder]) -> TargetError:
        """The error: bytes, contents, and what to change, with the cycles of orders that would then be there."""
        need = NEEDS[self.memory]
        ways = {need(each.network, each.config, each.spans).used: each.makespan for each in orders}
        levers = [f"--set {self.memory}={size} ({cycles:,} cycles)" for size, cycles in sorted(ways.items())]
        listed = ", ".join(self.peak.holds[:_LISTED]) + (", ..." if len(self.peak.holds) > _LISTED else "")
        what = f"the {self.memory.replace('_', ' ')} needs {self.peak.used:,} bytes and has {self.size:,}"
        return TargetError(
            f"{what}: {self.peak.used - self.size:,} bytes short",
            where=f"cycle {self.peak.cycle:,}, where it holds {listed}",
            hint=f"{' or '.join(levers) or f'--set {self.memory}={self.peak.used}'}; or {self.other}",
        )


NEEDS = {"feature_memory": features, "prefetch_buffer": prefetched}
"""Bytes of each memory that an order needs, by the field of `MaeriConfig`."""


def shortage(network: OrderNetwork, config: MaeriConfig, spans: Sequence[ItemSpan]) -> Shortage | None:
    """The memory that an order does not fit; None if it fits."""
    fewer = "let fewer virtual neurons work at the same time (rules at_most, apart)"
    fewer += ", or turn prefetch off" if config.prefetch else ""
    other = "order layers that hold much one after the other (rules before, apart), or take a smaller input"
    for name, advice in (("feature_memory", other), ("prefetch_buffer", fewer)):
        size = getattr(config, name)
        if size and (peak := NEEDS[name](network, config, spans)).used > size:
            return Shortage(name, size, peak, advice)
    return None
