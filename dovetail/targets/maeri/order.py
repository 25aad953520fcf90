"""Orders as data: items of equal virtual neurons, when they end, and the bytes of memory they need; and their checks.

The feature memory holds the network's inputs and every layer's results, from the first weight of the items that compute
them until the last item that reads them has ended; results are bytes behind the stage, else 32-bit sums. The prefetch
buffer is the memory that ports send from: of every item at work it holds the weights of its filters, twice where a
multiplier has a place for further weights, and the rows of its input that a window lies on; of a layer never more than
all it has. Weights in a multiplier are counted in `machine.py`.

`check` plays an order. The cycle of every product is what the hardware makes of the items (`machine.py`). Checked are:
multipliers and ports are used by one item at a time, until its last sum has left; the tree can be configured for every
set of virtual neurons that works together, and the bus takes all their sums; every input exists when it is sent; every
product of every sum is added exactly once. `broken` checks the user's rules, by the items and their cycles alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from dovetail.errors import SimulationError, TargetError
from dovetail.ir.types import TensorType
from dovetail.records import Record
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.machine import ItemTimeline, NeuronClock, beside_each_other, clock_of, play
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer, OrderNetwork, Times, exists_from
from dovetail.targets.maeri.rules import ChannelRange, Pin, Rules, unit_rules
from dovetail.targets.maeri.tile import ChannelSegment as ChannelSegment
from dovetail.targets.maeri.tile import Item as Item
from dovetail.targets.maeri.tile import Numbers, grid, sweep
from dovetail.targets.maeri.tree import Range, configure


class NetworkOrder(Record, dict=True):
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

    def clock(self, item: Item) -> NeuronClock:
        """Times of an item's virtual neurons."""
        return clock_of(self.config, self.work(item).layer, item)

    def of(self, number: int) -> list[Item]:
        """The items of a layer."""
        return [item for item in self.items if item.work == number]


class LayerItems(Record):
    """Items of one layer, laid out."""

    items: tuple[Item, ...]
    ends: tuple[int, ...]
    """The cycle after each item's last sum has left."""
    times: Times
    """Cycle from which results of the layer exist, by [channel, row]; 0 where these items compute none."""

    @property
    def start(self) -> int:
        """The cycle of the first weight."""
        return min(item.start for item in self.items)

    @property
    def finish(self) -> int:
        """The cycle after the last sum has left."""
        return max(self.ends)

    @property
    def exists(self) -> int:
        """The cycle from which all their results exist."""
        return int(self.times.max())


def _runs(items: Sequence[Item], works: Sequence[MultiplierLayer], config: MaeriConfig) -> list[ItemTimeline]:
    """Every item played beside the others."""
    for item in items:
        if wrong := item.fault(works[item.work].layer, config):
            raise _wrong(wrong, _name(item, works))
    return beside_each_other([play(config, works[item.work].layer, item) for item in items])


def laid_out(items: Sequence[Item], works: Sequence[MultiplierLayer], config: MaeriConfig) -> LayerItems:
    """Items of a layer that the machine plays beside each other."""
    runs = _runs(items, works, config)
    return LayerItems(tuple(items), tuple(run.until for run in runs), _results(works[items[0].work], runs))


def _results(work: MultiplierLayer, runs: Sequence[ItemTimeline]) -> Times:
    """Cycle from which each channel and row of a layer's result exists: that of the last of its sums in some items."""
    times = np.zeros((work.outputs, work.layer.out_rows), np.int64)
    for run in runs:
        for inside, channels, rows, _ in _computed(work, run.item):
            np.maximum.at(times, (channels, rows), run.exists[inside])
    return work.of_result(times)


def _computed(work: MultiplierLayer, item: Item) -> Iterator[tuple[Numbers, Numbers, Numbers, Numbers]]:
    """For each virtual neuron of an item the positions that it computes, by their places in the item, and the channel,
    row and column of each."""
    layer, tile = work.layer, item.tile
    groups, filters = np.divmod(item.channels, layer.filters)
    rows, columns = np.divmod(item.positions, grid(layer, tile)[1])
    for g, k, x, y in product(*map(range, (tile.groups, tile.filters, tile.out_rows, tile.out_columns))):
        group, filter_, row, column = groups + g, filters + k, rows * tile.out_rows + x, columns * tile.out_columns + y
        inside = (group < layer.groups) & (filter_ < layer.filters) & (row < layer.out_rows)
        kept = np.flatnonzero(inside & (column < layer.out_columns)).astype(np.int64)
        yield kept, (group * layer.filters + filter_)[kept], row[kept], column[kept]


_LISTED = 6
"""Contents of a memory that an error names."""


class Peak(Record):
    """The most bytes of a memory that are in use at the same time."""

    used: int
    """Bytes."""
    cycle: int
    """The first cycle of the peak."""
    holds: tuple[str, ...]
    """Contents with their bytes, the largest first."""


def features(order: NetworkOrder) -> Peak:
    """Bytes of inputs and results that are alive at the same time."""
    network, numbers, contents = order.network, range(len(order.network.works)), []
    types, ends = network.graph.types, [max(map(order.end, order.of(number))) for number in numbers]
    for number, work in enumerate(network.works):
        last = max((ends[reader] for reader in numbers if number in network.earlier(reader)), default=max(ends))
        begin = min(item.start for item in order.of(number))
        contents.append((work.name, _result_bytes(network, work, order.config), begin, last))
    for name in network.graph.inputs:
        if readers := [ends[reader] for reader in numbers if name in network.inputs(reader)]:
            contents.append((name, types[name].elements * _width(types[name]), 0, max(readers)))
    return _peak(contents, {})


def prefetched(order: NetworkOrder) -> Peak:
    """Bytes that ports send from at the same time."""
    contents, most = [], dict[str, int]()
    for item in order.items:
        for name, size, whole in _sent(order.network, item, order.config):
            contents.append((name, size, item.start, order.end(item)))
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


NEEDS = {"feature_memory": features, "prefetch_buffer": prefetched}
"""Bytes of each memory that an order needs, by the field of `MaeriConfig`."""


def shortage(order: NetworkOrder, others: Sequence[NetworkOrder] = ()) -> TargetError | None:
    """The error of a memory that is too small for an order, with the bytes, what they are and what to change; None if
    it fits.

    Args:
        order: the order.
        others: orders that would be there with a larger memory; the error says their cycles.
    """
    fewer = "let fewer virtual neurons work at the same time (rules at_most, apart)"
    fewer += ", or turn prefetch off" if order.config.prefetch else ""
    later = "order layers that hold much one after the other (rules before, apart), or take a smaller input"
    for (memory, need), advice in zip(NEEDS.items(), (later, fewer), strict=True):
        size = getattr(order.config, memory)
        if size and (peak := need(order)).used > size:
            ways = {need(each).used: f" ({each.makespan:,} cycles)" for each in others} or {peak.used: ""}
            levers = [f"--set {memory}={wanted}{cycles}" for wanted, cycles in sorted(ways.items())]
            listed = ", ".join(peak.holds[:_LISTED]) + (", ..." if len(peak.holds) > _LISTED else "")
            what = f"the {memory.replace('_', ' ')} needs {peak.used:,} bytes and has {size:,}"
            return TargetError(
                f"{what}: {peak.used - size:,} bytes short",
                where=f"cycle {peak.cycle:,}, where it holds {listed}",
                hint=f"{' or '.join(levers)}; or {advice}",
            )
    return None


def check(order: NetworkOrder) -> int:
    """Cycles until the last result of an order exists.

    Raises:
        SimulationError: the engine cannot do what the order says; names the item, its place and the cycle.
        TargetError: the engine cannot compute an item.
    """
    network = order.network
    runs = _runs(order.items, network.works, order.config)
    _check_places(order, runs)
    if short := shortage(order):
        raise SimulationError(short.what, where=short.where, hint=short.hint)
    _check_phases(order.config, runs)
    exists: dict[str, Times] = {}
    for number, work in enumerate(network.works):
        own = _of_layer(runs, number)
        _check_sums(work, own)
        _check_inputs(network.works, number, exists_from(network.graph, work.node.inputs[0], exists), own)
        exists[work.node.output] = _results(work, own)
    return max(int(times.max()) for times in exists.values())


def _of_layer(runs: Sequence[ItemTimeline], number: int) -> list[ItemTimeline]:
    return [run for run in runs if run.item.work == number]


def _wrong(what: str, where: str) -> SimulationError:
    hint = "report this with the network and the rules; --rules may avoid the order meanwhile"
    return SimulationError(what, where=where, hint=hint)


def _name(item: Item, works: Sequence[MultiplierLayer]) -> str:
    return f"{works[item.work].name} on multipliers {item.place} from cycle {item.start}"


def _check_places(order: NetworkOrder, runs: Sequence[ItemTimeline]) -> None:
    """One item per multiplier at a time, and per port."""
    config, works = order.config, order.network.works
    width = config.feed_width if config.ports or config.shared_ports else 1
    owners: dict[int, ItemTimeline] = {}
    for run in sorted(runs, key=lambda each: each.item.start):
        place, end = run.item.place, run.group.places[-1].end
        if end > place.end or (config.ports and place.start % width):
            what = f"{run.item.tile.neurons} virtual neurons up to multiplier {end} do not fit"
            raise _wrong(f"{what}, or do not begin at a multiple of {width}", _name(run.item, works))
        for multiplier in range(place.start // width * width, -(-place.end // width) * width):
            owner = owners.get(multiplier)
            if owner is not None and owner.until > run.item.start:
                what = f"multiplier {multiplier} is in use until cycle {owner.until} by {_name(owner.item, works)}"
                raise _wrong(what, _name(run.item, works))
            owners[multiplier] = run


_configure = lru_cache(maxsize=4096)(configure)


def _check_phases(config: MaeriConfig, runs: Sequence[ItemTimeline]) -> None:
    """The tree can be configured for every set of virtual neurons that works at the same time, and no line gets more
    than one sum per cycle."""
    checked = set[tuple[tuple[Range, int, float], ...]]()
    for cycle, working in sweep([(run.item.start, run.until) for run in runs]):
        neurons = [
            (place, line, runs[number].period)
            for number in working
            for place, line in zip(runs[number].group.places, runs[number].group.lines, strict=True)
        ]
        phase = tuple(sorted(neurons, key=lambda neuron: neuron[0].start))
        if phase in checked:
            continue
        checked.add(phase)
        _configure(config.multipliers, tuple(place for place, _, _ in phase))
        load = dict.fromkeys((line for _, line, _ in phase), 0.0)
        for _, line, period in phase:
            load[line] += 1.0 / max(period, 1.0)
        for line, sums in load.items():
            if sums > 1.0 + 1e-2:  # items keep to this themselves; inputs of the first position shift it a little
                what = f"line {line} of the collection bus would get {sums:.2f} sums per cycle"
                raise _wrong(what, f"from cycle {cycle}")


def _check_inputs(works: Sequence[MultiplierLayer], number: int, times: Times, runs: Sequence[ItemTimeline]) -> None:
    """Every input of a layer exists in the cycle it is first multiplied in."""
    work, layer = works[number], works[number].layer
    if work.turned:
        for run in runs:
            if run.item.start < times.max(initial=0):
                what = f"the vector is sent in cycle {run.item.start}; its inputs exist from cycle {times.max()}"
                raise _wrong(what, _name(run.item, works))
        return
    if not work.is_image:
        times = np.broadcast_to(times.max(axis=1, keepdims=True), (times.shape[0], layer.in_rows))
    needs: dict[tuple[tuple[int, int], int], Times] = {}
    for run in runs:
        key = run.item.taps, run.item.tile.out_rows
        if key not in needs:
            needs[key] = _needed(layer, times, *key)
        groups, rows = run.item.channels // layer.filters, run.item.positions // grid(layer, run.item.tile)[1]
        wanted = needs[key][groups, rows]
        for further in range(1, run.item.tile.groups):
            wanted = np.maximum(wanted, needs[key][np.minimum(groups + further, layer.groups - 1), rows])
        early = np.flatnonzero(run.begins < wanted)
        if early.size:
            at = int(early[0])
            what = f"position {run.item.positions[at]} of channel {run.item.channels[at]} is begun in cycle"
            what += f" {run.begins[at]}; its inputs exist from cycle {wanted[at]}"
            raise _wrong(what, _name(run.item, works))


def _needed(layer: OrderLayer, times: Times, taps: tuple[int, int], height: int) -> Times:
    """Cycle from which the inputs of each group exist, by [group, `height` rows of the result at a time]."""
    rows, area = -(-layer.out_rows // height), layer.rows * layer.columns
    channels = slice(taps[0] // area, -(-taps[1] // area))  # of one group, those that the products read
    by_group = times.reshape(layer.groups, layer.channels, -1)[:, channels].max(axis=1)
    need = np.zeros((layer.groups, rows), np.int64)
    for row in range(rows):
        last = min((row + 1) * height, layer.out_rows) - 1
        first, stride = row * height, layer.strides[0]
        need[:, row] = by_group[:, first * stride : last * stride + layer.span[0]].max(axis=1)
    return need


def _check_sums(work: MultiplierLayer, runs: Sequence[ItemTimeline]) -> None:
    """Every product of every sum is added exactly once."""
    layer, parts = work.layer, sorted({run.item.taps for run in runs})
    ends = [0, *(taps[1] for taps in parts)]
    if [taps[0] for taps in parts] != ends[:-1] or ends[-1] != layer.taps:
        raise _wrong(f"the parts {parts} of a sum do not make up its {layer.taps} products", work.name)
    for taps in parts:
        computed = (each for run in runs if run.item.taps == taps for each in _computed(work, run.item))
        places = np.concatenate(
            [(r * layer.out_columns + c) * work.outputs + channels for _, channels, r, c in computed]
        )
        count = np.bincount(places, minlength=work.positions * work.outputs).reshape(work.positions, work.outputs)
        wrong = np.argwhere(count != 1)
        if wrong.size:
            position, channel = wrong[0]
            what = f"products {list(taps)} of position {position} of channel {channel}"
            raise _wrong(f"{what} are added {count[position, channel]} times", work.name)


def broken(order: NetworkOrder, rules: Rules) -> list[str]:
    """The rules that an order breaks, in words."""
    told, end = unit_rules(rules, order.network), order.end
    items = {unit: _items_of(order, unit) for unit in told.units}
    begins = {unit: min(item.start for item in own) for unit, own in items.items()}
    ends = {unit: max(map(end, own)) for unit, own in items.items()}
    wrong = [why for (x, y), why in told.before.items() if begins[y] < ends[x]]
    wrong += [why for (x, y), why in told.no_later.items() if begins[x] > begins[y]]
    wrong += [why for group, why in told.together.items() if len({begins[unit] for unit in group}) > 1]
    for (x, y), why in told.apart.items():
        pairs = product(items[x], items[y])
        wrong += [why] * any(one.start < end(other) and other.start < end(one) for one, other in pairs)
    for (unit, pin), why in told.pins.items():
        wrong += [why] * any(not _is_within(order, item, pin) for item in items[unit])
    for (units, most), why in told.limits.items():
        own = list(dict.fromkeys(item for unit in units for item in items[unit]))
        working = (numbers for _, numbers in sweep((item.start, end(item)) for item in own))
        wrong += [why] * any(sum(own[number].tile.neurons for number in numbers) > most for numbers in working)
    divided = [f"whole_filters: {text}" for number in sorted(told.whole) for text in _divided(order, number)]
    return [*map(rules.in_words, dict.fromkeys(wrong)), *divided]


def _items_of(order: NetworkOrder, unit: ChannelRange) -> list[Item]:
    """The items that compute channels of a unit."""
    work, own, channels = order.network.works[unit.work], order.of(unit.work), range(unit.first, unit.end)
    return own if len(channels) == work.channels else [i for i in own if not _channels(work, i).isdisjoint(channels)]


def _channels(work: MultiplierLayer, item: Item) -> set[int]:
    """The channels of a layer's result that an item computes."""
    return {number for _, channels, rows, _ in _computed(work, item) for number in (rows if work.turned else channels)}


def _is_within(order: NetworkOrder, item: Item, pin: Pin) -> bool:
    """Whether an item is at the place and in the time of a pin."""
    (low, high), places = pin.multipliers or (0, order.config.multipliers), order.clock(item).group.places
    in_time = pin.begin <= item.start and (pin.end is None or order.end(item) <= pin.end)
    return in_time and low <= places[0].start and places[-1].end <= high


def _divided(order: NetworkOrder, number: int) -> Iterator[str]:
    """How an order breaks a layer's `whole_filters`."""
    work, places = order.network.works[number], set[tuple[int, Range]]()
    for item in order.of(number):
        tile = item.tile
        if item.products != work.layer.taps or (not work.turned and tile.out_rows * tile.out_columns > 1):
            yield f"{work.name} has sums in parts, or on several virtual neurons"
        for (_, channels, _, _), place in zip(_computed(work, item), order.clock(item).group.places, strict=True):
            places |= {(channel, place) for channel in ([] if work.turned else np.unique(channels).tolist())}
    if len(places) > len({channel for channel, _ in places}):
        yield f"an output channel of {work.name} is on several virtual neurons"
