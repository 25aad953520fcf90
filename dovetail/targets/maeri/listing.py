"""The list scheduler: layer after layer, each spread over all multipliers so that they end together.

A layer's sums are dealt out to virtual neurons of one size, output channel after output channel, so that every one
works until the same cycle, whenever it could begin. How large they are is tried out: products of a sum that do not fill
the last step, and multipliers that are left over, are what is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.deal import Laid, Lane, deal, gang, laid_out
from dovetail.targets.maeri.rules import Rules, check
from dovetail.targets.maeri.schedule import Item, Schedule, busy, neurons, ordered
from dovetail.targets.maeri.timing import timing
from dovetail.targets.maeri.tree import Range, collisions, configure, line_of
from dovetail.targets.maeri.work import Network, Times, Work, exists_from

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
        config, works = self.config, self.network.works
        added = [(item, end) for item, end in zip(items, ends, strict=True)]
        first = min(item.start for item in items)
        others = [(item, end) for laid in self.done.values() for item, end in zip(laid.items, laid.ends, strict=True)
                  if end > first]  # fmt: skip
        busy_lines: dict[int, list[tuple[int, int, int]]] = {}
        for item, end in (*added, *others):
            time = timing(config, works[item.work].layer, item.tile, item.taps[1] - item.taps[0])
            for place in neurons(item, time):
                number = line_of(config.multipliers, config.collection, place)
                busy_lines.setdefault(number, []).append((item.start, end, time.later))
        return all(
            sum(1.0 / period for other, until, period in users if other < end and until > start) <= 1.0 + 1e-9
            for users in busy_lines.values()
            for start, end, _ in users
        )

    def add(self, number: int, laid: Laid) -> None:
        """Take a layer's multipliers."""
        for item, finish in zip(laid.items, laid.ends, strict=True):
            part = self.free[item.place.start : item.place.end]
            np.maximum(part, finish, out=part)
        self.done[number] = laid


def arrange(
    network: Network, config: MaeriConfig, rules: Rules | None = None, sizes: Mapping[int, int] | None = None
) -> Schedule:
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
    check(rules, network)
    floor, waiting = _Floor(network, config, rules), set(range(len(network.works)))
    before = [_before(network, rules, number) for number in range(len(network.works))]
    while waiting:
        possible = [number for number in sorted(waiting) if not before[number] & waiting]
        starts = {number: floor.ready(number) for number in possible}
        number = min(possible, key=lambda each: (starts[each], each))
        floor.add(number, _lay(floor, number, starts[number], (sizes or {}).get(number)))
        waiting.remove(number)
    items = [item for laid in floor.done.values() for item in laid.items]
    return Schedule(network, config, ordered(items), max(laid.exists for laid in floor.done.values()))


def _before(network: Network, rules: Rules, number: int) -> set[int]:
    """Layers that must be laid out before."""
    work = network.works[number]
    names = {earlier.name for earlier in network.before(work)} | {x for x, y in rules.before if y == work.name}
    return {index for index, each in enumerate(network.works) if each.name in names}


def _lay(floor: _Floor, number: int, ready: int, size: int | None) -> Laid:
    """Lay out a layer: what ends first."""
    work, config, rules = floor.network.works[number], floor.config, floor.rules
    barred = floor.barred(number)
    if config.shared_ports and not rules.whole_filters:
        start = max(int(floor.free.max()), barred)
        return laid_out((gang(number, work, config, start, ready, rules.at_most),), work, config)
    best: tuple[int, tuple[Item, ...]] | None = None
    for spacing in _SPACINGS:
        for candidate in [size] if size else tried_sizes(work, config, rules, spacing):
            for lanes in _lanes(floor, work, max(candidate, 2) * spacing, barred):
                items = deal(number, work, config, candidate, lanes, ready, rules.whole_filters)
                ends = [item.start + busy(item, floor.network, config) for item in items]
                if (best is None or max(ends) < best[0]) and floor.drains(items, ends):
                    best = (max(ends), items)
        if best is not None:
            break
    else:
        raise TargetError(f"a sum of {work.layer.taps} products does not fit {config.multipliers} multipliers",
                          where=work.name, hint="allow folding, take more multipliers, or let filters be divided")
    return laid_out(best[1], work, config)


def _lanes(floor: _Floor, work: Work, width: int, barred: int) -> list[list[Lane]]:
    """Room for virtual neurons, each from when its multipliers are free: side by side from the left, and where it is
    free first."""
    config = floor.config
    count = min(config.multipliers // width, floor.rules.at_most or config.multipliers)
    sums = work.outputs * (1 if floor.rules.whole_filters else work.positions)
    free = np.maximum(floor.free, barred)
    grid = [Range(number * width, width) for number in range(count)]
    ways = [[Lane(place, int(free[place.start : place.end].max())) for place in grid]]
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
    """Sizes of virtual neurons worth trying, the best guess first.

    Args:
        work: the layer.
        config: of the engine.
        rules: the user's own.
        spacing: each takes so many times its own multipliers, so that fewer sums meet on the collection bus.
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
