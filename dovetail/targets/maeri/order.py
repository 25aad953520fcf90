"""Orders as data: items of equal virtual neurons, when they end by `timing.py`, and the bytes of memory they need.

The feature memory holds the network's inputs and every layer's results, from the first weight of the items that compute
them until the last item that reads them has ended; results are bytes behind the stage, else 32-bit sums. The prefetch
buffer is the memory that ports send from: of every item at work it holds the weights of its filters, twice where a
multiplier has a place for further weights, and the rows of its input that a window lies on; of a layer never more than
all it has. Weights in a multiplier are counted in `timing.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.errors import TargetError
from dovetail.ir.types import TensorType
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer, OrderNetwork, Times
from dovetail.targets.maeri.tile import MultiplierTile, NeuronGroup, grid, neuron_group
from dovetail.targets.maeri.timing import ItemTiming, timing
from dovetail.targets.maeri.tree import Range
from dovetail.targets.maeri.words import Count, Natural


@dataclass(frozen=True, slots=True)
class ChannelSegment:
    """Some sums of one output channel, or of neighbouring ones where a tile has several filters."""

    channel: Natural
    """The (first) output channel."""
    first: Natural
    """The first position of the result, rows first; counted in tiles of positions."""
    count: Count
    """Number of positions."""


@dataclass(frozen=True, slots=True)
class Item:
    """Equal virtual neurons side by side that work in step, from their first weight until their last sum has left."""

    work: Natural
    """Number of the layer, in the network's order."""
    start: Natural
    """The cycle in which its first weight is sent."""
    place: Range
    """All its multipliers."""
    tile: MultiplierTile
    """One virtual neuron, or several that share what is sent."""
    taps: tuple[Natural, Natural]
    """The products of each sum it adds up: [first, end) in the order channel, row, column of the kernel. Where that is
    not all of them, other items add the rest in the accumulation buffer."""
    segments: tuple[ChannelSegment, ...]
    """In order; all weights of a segment come before its first input."""

    @property
    def products(self) -> int:
        """Products of each sum."""
        return self.taps[1] - self.taps[0]


def in_order(items: Iterable[Item]) -> tuple[Item, ...]:
    """Items by start, then place."""
    return tuple(sorted(items, key=lambda item: (item.start, item.place.start)))


def sweep(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, set[int]]]:
    """Every cycle in which a span [begin, end) begins or ends, with the numbers of the spans at work from then on."""
    begins, ends = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for number, (begin, end) in enumerate(spans):
        begins[begin].add(number)
        ends[end].add(number)
    working = set[int]()
    for cycle in sorted({*begins, *ends}):
        working = (working - ends[cycle]) | begins[cycle]
        yield cycle, working


def channels_of(work: MultiplierLayer, tile: MultiplierTile, first: int) -> list[int]:
    """The filters of a segment, by its first."""
    group, filter_ = divmod(first, work.layer.filters)
    return [
        (group + g) * work.layer.filters + filter_ + f
        for g in range(min(tile.groups, work.layer.groups - group))
        for f in range(min(tile.filters, work.layer.filters - filter_))
    ]


def group_of(item: Item, layer: OrderLayer, config: MaeriConfig) -> NeuronGroup:
    """An item's virtual neurons."""
    return neuron_group(config, layer, item.tile, item.products, item.place.start)


def timing_of(item: Item, work: MultiplierLayer, config: MaeriConfig) -> ItemTiming:
    """Times of an item's virtual neurons."""
    return timing(config, work.layer, item.tile, item.products, item.place.start)


def _products(item: Item, columns: int, time: ItemTiming) -> tuple[list[int], int]:
    """Cycles from an item's start to the first product of each segment, and to the last product of all."""
    firsts, cycle, earlier = list[int](), 0, 0
    for part in item.segments:
        cycle += time.load_after(earlier)
        firsts.append(cycle)
        cycle += time.positions(columns, part.first, part.count)
        earlier = part.count
    return firsts, cycle


def _margin(time: ItemTiming, item: Item) -> int:
    """Cycles added where sums of several virtual neurons go round, queue at lines, or follow those of the filter before
    at once: which of them meet is not known to the cycle."""
    if item.tile.neurons == 1:
        return 0
    crowded = 4 if time.loops or time.pace[0] > time.folds else 0
    return crowded + (2 * len(item.segments) + 8 if time.prefetch else 0)


def end_of(item: Item, work: MultiplierLayer, config: MaeriConfig) -> int:
    """The cycle after an item's last sum has left."""
    time = timing_of(item, work, config)
    last = _products(item, grid(work.layer, item.tile)[1], time)[1]
    return item.start + last + time.tail + _margin(time, item)


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
        return end_of(item, self.work(item), self.config)

    @property
    def spans(self) -> list[tuple[Item, int, int]]:
        """Every item, the cycle of its first weight, and the cycle after its last sum has left."""
        return [(item, item.start, self.end(item)) for item in self.items]

    def timing(self, item: Item) -> ItemTiming:
        """Times of an item's virtual neurons."""
        return timing_of(item, self.work(item), self.config)

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


def laid_out(items: Sequence[Item], work: MultiplierLayer, config: MaeriConfig, slack: int = 0) -> LayerItems:
    """Items of a layer with their ends; results exist `slack` cycles later, where others' sums may be in the way."""
    times, ends = np.zeros((work.outputs, work.layer.out_rows), np.int64), []
    for item in items:
        time, columns = timing_of(item, work, config), grid(work.layer, item.tile)[1]
        firsts, end = _products(item, columns, time)
        behind = item.start + time.tail + _margin(time, item)
        ends.append(behind + end)
        for part, begin in zip(item.segments, firsts, strict=True):
            channels, last = channels_of(work, item.tile, part.channel), part.first + part.count - 1
            for row in range(part.first // columns, last // columns + 1):
                count = min((row + 1) * columns - 1, last) - part.first + 1
                exists = begin + time.positions(columns, part.first, count) + behind + slack
                rows = slice(row * item.tile.out_rows, (row + 1) * item.tile.out_rows)
                for channel in channels:
                    np.maximum(times[channel, rows], exists, out=times[channel, rows])
    return LayerItems(tuple(items), tuple(ends), work.of_result(times))


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


def shortage(network: OrderNetwork, config: MaeriConfig, spans: Sequence[ItemSpan]) -> TargetError | None:
    """The error of an order that does not fit the memories: bytes, contents, and what to change; None if it fits."""
    fewer = "let fewer virtual neurons work at the same time (rules at_most, apart)"
    fewer += ", or turn prefetch off" if config.prefetch else ""
    other = "order layers that hold much one after the other (rules before, apart), or take a smaller input"
    memories = (
        ("feature_memory", config.feature_memory, features, other),
        ("prefetch_buffer", config.prefetch_buffer, prefetched, fewer),
    )
    for name, size, need, hint in memories:
        if size and (peak := need(network, config, spans)).used > size:
            listed = ", ".join(peak.holds[:_LISTED]) + (", ..." if len(peak.holds) > _LISTED else "")
            what = f"the {name.replace('_', ' ')} needs {peak.used:,} bytes and has {size:,}"
            return TargetError(
                f"{what}: {peak.used - size:,} bytes short",
                where=f"cycle {peak.cycle:,}, where it holds {listed}",
                hint=f"--set {name}={peak.used}; or {hint}",
            )
    return None
