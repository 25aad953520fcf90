"""Orders, and the list scheduler: layer after layer, each spread over all multipliers so that they end together.

A layer's sums are dealt out to virtual neurons of one size, output channel after output channel, so that every one
works until the same cycle, whenever it could begin. How large they are is tried out: products of a sum that do not fill
the last step, and multipliers that are left over, are what is lost. Where ports are shared, the whole engine works in
step instead, so that what is sent is shared too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import MaeriConfig, Rules
from dovetail.targets.maeri.network import Network, Times, Work, check_rules, exists_from
from dovetail.targets.maeri.timing import Range, Tile, Timing, best_tile, collisions, configure, line_of, timing


@dataclass(frozen=True, slots=True)
class Segment:
    """Some sums of one output channel, or of neighbouring ones where a tile has several filters."""

    channel: int
    """The (first) output channel."""
    first: int
    """The first position of the result, rows first; counted in tiles of positions."""
    count: int
    """So many positions from there."""


@dataclass(frozen=True, slots=True)
class Item:
    """Equal virtual neurons side by side that work in step, from their first weight to their last product."""

    work: int
    """Which layer, counted in the network's order."""
    tile: Tile
    """Of one virtual neuron, or of several that share what is sent."""
    place: Range
    """All its multipliers."""
    start: int
    """Cycle its first weight is sent."""
    segments: tuple[Segment, ...]
    """In order; all weights of a segment come before its first input."""
    taps: tuple[int, int]
    """The products of each sum it adds up: [first, end) in the order channel, row, column of the kernel. Where that is
    not all of them, other items add the rest in the accumulation buffer."""


def timing_of(item: Item, work: Work, config: MaeriConfig) -> Timing:
    """What an item's virtual neurons take."""
    return timing(config, work.layer, item.tile, item.taps[1] - item.taps[0])


def grid(work: Work, tile: Tile) -> tuple[int, int]:
    """Rows and columns of positions, in tiles."""
    return -(-work.layer.out_rows // tile.out_rows), -(-work.layer.out_columns // tile.out_columns)


def busy(item: Item, network: Network, config: MaeriConfig) -> int:
    """Cycles an item takes, from its first weight to its last product."""
    work = network.works[item.work]
    time, columns, cycles, before = timing_of(item, work, config), grid(work, item.tile)[1], 0, 0
    for part in item.segments:
        cycles += time.load_after(before) + time.positions(columns, part.first, part.count)
        before = part.count
    return cycles


@dataclass(frozen=True)
class Order:
    """A valid order of a network, and what it rests on."""

    network: Network
    config: MaeriConfig
    items: tuple[Item, ...]
    """By start, then place."""
    makespan: int
    """Cycles until the last result exists."""

    def work(self, item: Item) -> Work:
        """The layer an item belongs to."""
        return self.network.works[item.work]

    def end(self, item: Item) -> int:
        """The cycle after an item's last product."""
        return item.start + busy(item, self.network, self.config)

    def timing(self, item: Item) -> Timing:
        """What an item's virtual neurons take."""
        return timing_of(item, self.work(item), self.config)


def neurons(item: Item, time: Timing) -> list[Range]:
    """The virtual neurons of an item."""
    return [Range(item.place.start + number * time.size, time.size) for number in range(item.tile.neurons)]


def ordered(items: Sequence[Item]) -> tuple[Item, ...]:
    """Items by start, then place."""
    return tuple(sorted(items, key=lambda item: (item.start, item.place.start)))


@dataclass(frozen=True, slots=True)
class Lane:
    """Room for one virtual neuron, and the cycle from which it is free."""

    place: Range
    free: int


@dataclass(frozen=True)
class Laid:
    """A layer laid out."""

    items: tuple[Item, ...]
    ends: tuple[int, ...]
    """The cycle after the last product of each."""
    times: Times
    """When its results exist, by [channel, row]."""

    @property
    def finish(self) -> int:
        """The cycle after the last product."""
        return max(self.ends)

    @property
    def exists(self) -> int:
        """The cycle from which all results exist."""
        return int(self.times.max())


def _deal(
    number: int, work: Work, config: MaeriConfig, size: int, lanes: Sequence[Lane], ready: int, whole: bool
) -> tuple[Item, ...]:
    """Deal a layer's sums out to virtual neurons of a size so that all end together; weights may come before `ready`,
    from when all inputs exist. `whole`: each output channel stays on one virtual neuron."""
    tile = Tile(channels=size)
    time = timing(config, work.layer, tile, work.layer.taps)
    starts = [max(lane.free, ready - time.load) for lane in lanes]
    if whole:
        parts = _whole_filters(work, time, starts)
    else:
        latest = max(starts) + time.later * work.outputs * work.positions + time.load * work.outputs
        dealt = bisect_left(
            range(latest), 1, min(starts), key=lambda each: not _deal_until(work, time, starts, each)[1]
        )
        parts = _deal_until(work, time, starts, dealt)[0]
    return tuple(
        Item(number, tile, lane.place, start, tuple(segments), (0, work.layer.taps))
        for lane, start, segments in zip(lanes, starts, parts, strict=True)
        if segments
    )


def _deal_until(work: Work, time: Timing, starts: Sequence[int], until: int) -> tuple[list[list[Segment]], int]:
    """Deal out what can be done until a cycle, channel after channel; the shares and how many sums are left."""
    channel, first, shares = 0, 0, []
    for start in starts:
        room, share, count = until - start - time.load, list[Segment](), 0
        while channel < work.outputs and room >= time.later:
            count = min(work.positions - first, room // time.later)
            share.append(Segment(channel, first, count))
            room -= count * time.later + time.load_after(count)
            first += count
            if first == work.positions:
                channel, first = channel + 1, 0
        shares.append(share)
    return shares, (work.outputs - channel) * work.positions - first


def _whole_filters(work: Work, time: Timing, starts: Sequence[int]) -> list[list[Segment]]:
    """Give each channel to the virtual neuron that is free first."""
    ends, shares = list(starts), [list[Segment]() for _ in starts]
    for channel in range(work.outputs):
        lane = min(range(len(ends)), key=lambda each: (ends[each], each))
        shares[lane].append(Segment(channel, 0, work.positions))
        ends[lane] += time.load_after(work.positions if shares[lane][1:] else 0)
        ends[lane] += time.positions(work.layer.out_columns, 0, work.positions)
    return shares


def _gang(number: int, work: Work, config: MaeriConfig, free: int, ready: int, neurons: int | None) -> Item:
    """The whole engine in step: the tile with the fewest cycles, of at most so many virtual neurons side by side."""
    tile, _ = best_tile(work.layer, config, neurons)
    time = timing(config, work.layer, tile, work.layer.taps)
    rows, columns = grid(work, tile)
    segments = tuple(
        Segment(group * work.layer.filters + filter_, 0, rows * columns)
        for group in range(0, work.layer.groups, tile.groups)
        for filter_ in range(0, work.layer.filters, tile.filters)
    )
    place = Range(0, time.size * tile.neurons)
    return Item(number, tile, place, max(free, ready - time.load), segments, (0, work.layer.taps))


def laid_out(items: tuple[Item, ...], work: Work, config: MaeriConfig) -> Laid:
    """When items of a layer end and their results exist."""
    times = np.zeros((work.outputs, work.layer.out_rows), np.int64)
    ends = []
    for item in items:
        time = timing_of(item, work, config)
        columns, cycle, before = grid(work, item.tile)[1], item.start, 0
        for part in item.segments:
            cycle += time.load_after(before)
            before = part.count
            channels = channels_of(work, item.tile, part.channel)
            last = part.first + part.count - 1
            for row in range(part.first // columns, last // columns + 1):
                upto = min((row + 1) * columns - 1, last) - part.first + 1
                exists = cycle + time.positions(columns, part.first, upto) + time.tail
                rows = slice(row * item.tile.out_rows, (row + 1) * item.tile.out_rows)
                for channel in channels:
                    np.maximum(times[channel, rows], exists, out=times[channel, rows])
            cycle += time.positions(columns, part.first, part.count)
        ends.append(cycle)
    return Laid(items, tuple(ends), times if work.is_image else times.max(axis=1, keepdims=True))


def channels_of(work: Work, tile: Tile, first: int) -> list[int]:
    """The output channels of a segment that begins at one."""
    group, filter_ = divmod(first, work.layer.filters)
    return [
        (group + g) * work.layer.filters + filter_ + f
        for g in range(min(tile.groups, work.layer.groups - group))
        for f in range(min(tile.filters, work.layer.filters - filter_))
    ]


_SPACINGS = (1, 2, 4)
"""How far apart virtual neurons are put, in their own size, where the collection bus cannot take more sums."""
_TRIED = 6
"""Sizes of virtual neurons tried per layer, of those that look best."""


class _Floor:
    """What is known while layers are laid out one after the other."""

    def __init__(self, network: Network, config: MaeriConfig, rules: Rules) -> None:
        self.network, self.config, self.rules = network, config, rules
        self.free = np.zeros(config.multipliers, np.int64)
        self.done: dict[int, Laid] = {}
        self.numbers = {work.name: number for number, work in enumerate(network.works)}

    def ready(self, number: int) -> int:
        """From when all inputs of a layer exist and no rule holds it back."""
        work = self.network.works[number]
        known = {self.network.works[done].node.output: laid.times for done, laid in self.done.items()}
        latest = int(exists_from(self.network.graph, work.node.inputs[0], known).max(initial=0))
        for x, y in self.rules.before:
            if y == work.name:
                latest = max(latest, self.done[self.numbers[x]].exists)
        return latest

    def barred(self, number: int) -> int:
        """From when nothing works any more that a layer must not meet."""
        if self.rules.at_most is not None:
            return max((laid.finish for laid in self.done.values()), default=0)
        name, latest = self.network.works[number].name, 0
        for pair in self.rules.apart:
            if name in pair:
                other = self.numbers[pair[0] if pair[1] == name else pair[1]]
                latest = max(latest, self.done[other].finish if other in self.done else 0)
        return latest

    def drains(self, items: Sequence[Item], ends: Sequence[int]) -> bool:
        """Whether the collection bus takes the sums of items besides those of all that is laid out already."""
        first = min(item.start for item in items)
        laid = [pair for laid in self.done.values() for pair in zip(laid.items, laid.ends, strict=True)]
        users: dict[int, list[tuple[int, int, int]]] = {}
        for item, end in (*zip(items, ends, strict=True), *(pair for pair in laid if pair[1] > first)):
            time = timing_of(item, self.network.works[item.work], self.config)
            for place in neurons(item, time):
                number = line_of(self.config.multipliers, self.config.collection, place)
                users.setdefault(number, []).append((item.start, end, time.later))
        return all(
            sum(1.0 / period for other, until, period in each if other < end and until > start) <= 1.0 + 1e-9
            for each in users.values()
            for start, end, _ in each
        )

    def add(self, number: int, laid: Laid) -> None:
        """Take a layer's multipliers."""
        for item, finish in zip(laid.items, laid.ends, strict=True):
            part = self.free[item.place.start : item.place.end]
            np.maximum(part, finish, out=part)
        self.done[number] = laid


def arrange(
    network: Network, config: MaeriConfig, rules: Rules | None = None, sizes: Mapping[int, int] | None = None
) -> Order:
    """An order of a network.

    Args:
        network: what to compute.
        config: on what.
        rules: the user's own.
        sizes: how large virtual neurons are, by layer number, where that is chosen already.

    Raises:
        ModelError: the rules name no layer, or contradict each other.
        TargetError: a layer does not fit.
    """
    rules = rules or Rules()
    check_rules(rules, network)
    floor, waiting = _Floor(network, config, rules), set(range(len(network.works)))
    before = [
        {floor.numbers[each.name] for each in network.before(work)}
        | {floor.numbers[x] for x, y in rules.before if y == work.name}
        for work in network.works
    ]
    while waiting:
        possible = [number for number in sorted(waiting) if not before[number] & waiting]
        starts = {number: floor.ready(number) for number in possible}
        number = min(possible, key=lambda each: (starts[each], each))
        floor.add(number, _lay(floor, number, starts[number], (sizes or {}).get(number)))
        waiting.remove(number)
    items = [item for laid in floor.done.values() for item in laid.items]
    return Order(network, config, ordered(items), max(laid.exists for laid in floor.done.values()))


def _lay(floor: _Floor, number: int, ready: int, size: int | None) -> Laid:
    """Lay out a layer: what ends first."""
    work, config, rules = floor.network.works[number], floor.config, floor.rules
    barred = floor.barred(number)
    if config.shared_ports and not rules.whole_filters:
        start = max(int(floor.free.max()), barred)
        return laid_out((_gang(number, work, config, start, ready, rules.at_most),), work, config)
    best: tuple[int, tuple[Item, ...]] | None = None
    for spacing in _SPACINGS:
        for candidate in [size] if size else tried_sizes(work, config, rules, spacing):
            for lanes in _lanes(floor, work, max(candidate, 2) * spacing, barred):
                items = _deal(number, work, config, candidate, lanes, ready, rules.whole_filters)
                ends = [item.start + busy(item, floor.network, config) for item in items]
                if (best is None or max(ends) < best[0]) and floor.drains(items, ends):
                    best = (max(ends), items)
        if best is not None:
            break
    else:
        what = f"a sum of {work.layer.taps} products does not fit {config.multipliers} multipliers"
        hint = "allow folding, take more multipliers, or let filters be divided"
        raise TargetError(what, where=work.name, hint=hint)
    return laid_out(best[1], work, config)


def _lanes(floor: _Floor, work: Work, width: int, barred: int) -> list[list[Lane]]:
    """Room for virtual neurons, each from when its multipliers are free: side by side from the left, and where it is
    free first."""
    config = floor.config
    count = min(config.multipliers // width, floor.rules.at_most or config.multipliers)
    sums = work.outputs * (1 if floor.rules.whole_filters else work.positions)
    free = np.maximum(floor.free, barred)
    places = [Range(number * width, width) for number in range(count)]
    ways = [[Lane(place, int(free[place.start : place.end].max())) for place in places]]
    if sums < count:
        ways.append(_first_free(free, width, min(sums, count)))
    return ways


def _first_free(free: Times, width: int, count: int) -> list[Lane]:
    """Places of a width, those that are free first."""
    lanes: list[Lane] = []
    until = free.astype(np.int64)
    for _ in range(count):
        starts = np.lib.stride_tricks.sliding_window_view(until, width).max(axis=1)
        place = int(starts.argmin())
        if starts[place] > free.max():  # what is left are pieces
            break
        lanes.append(Lane(Range(place, width), int(starts[place])))
        until[place : place + width] = int(free.max()) + 1
    return lanes


def tried_sizes(work: Work, config: MaeriConfig, rules: Rules, spacing: int = 1) -> list[int]:
    """Sizes of virtual neurons worth trying for a layer, the best guess first.

    Each takes `spacing` times its own multipliers, so that fewer sums meet on the collection bus.
    """
    taps = work.layer.taps
    if rules.whole_filters:
        folds = -(-taps // config.multipliers)
        return [-(-taps // folds)] if folds == 1 or (config.fold and config.accumulation_buffer) else []
    least = -(-taps // config.multipliers)
    most = min(taps, config.weight_depth) if config.fold and config.accumulation_buffer else 1
    sizes = dict.fromkeys(max(-(-taps // folds), min(taps, 2)) for folds in range(least, most + 1))
    fitting = [size for size in sizes if _drains(config, size, max(size, 2) * spacing, -(-taps // size))]
    guessed = sorted((_guess(work, config, size), size) for size in fitting)
    return [size for _, size in guessed[:_TRIED]]


def _guess(work: Work, config: MaeriConfig, size: int) -> int:
    """Cycles of a layer, all virtual neurons beginning together."""
    folds, lanes = -(-work.layer.taps // size), config.multipliers // max(size, 2)
    sums = -(-work.outputs * work.positions // lanes)
    return folds * (sums + -(-sums // work.positions)) + (size - 1).bit_length()


def _drains(config: MaeriConfig, size: int, width: int, folds: int) -> bool:
    """Whether the collection bus takes all sums of virtual neurons, one every `width` multipliers, as they come."""
    places = [Range(number * width, size) for number in range(config.multipliers // width)]
    return collisions(config.multipliers, config.collection, configure(config.multipliers, places).outputs) <= folds
