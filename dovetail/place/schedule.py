"""Puts layers in time: each step where its queues are free first. Gives good placements fast, and bounds for all."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from random import Random

from dovetail.partition.regions import Slot
from dovetail.place.model import Candidate, Layer, Schedule, Step, Use
from dovetail.plan.tiles import LAUNCH_CYCLES
from dovetail.program.ir import CORE

_MOST_TRIES, _MOST_PLACED = 2000, 50_000
"""Schedules the search for a better placement may make, and layers it may place in all of them."""


def heuristic(layers: Sequence[Layer], dma: str) -> Schedule:
    """A good placement: the best of a few, then improved by small changes of candidates and order.

    Args:
        layers: in an order that computes every value before it is read.
        dma: name of the queue of copies.
    """
    _, behind = ways(layers)
    ranks = [min(one.cycles for one in layer.candidates) + after for layer, after in zip(layers, behind, strict=True)]
    free = [layer.candidates for layer in layers]
    sole = [tuple(one for one in some if len(one.members) == 1) or some for some in free]
    fastest = [(min(some, key=lambda one: one.cycles),) for some in free]
    order = _ordered(layers, ranks)
    starts = [_place(layers, order, some, dma) for some in (free, fastest, sole)]
    return _improved(layers, min(starts, key=lambda found: found.finish), ranks, dma)


def _improved(layers: Sequence[Layer], best: Schedule, ranks: Sequence[float], dma: str) -> Schedule:
    """The schedule after changes that did not make it later: another candidate for a layer, another rank."""
    source, order = Random(0), list(ranks)
    bound = lower_bound(layers, dma)
    choices = [index for index, layer in enumerate(layers) if len(layer.candidates) > 1]
    for _ in range(min(_MOST_TRIES, _MOST_PLACED // max(len(layers), 1))):
        if best.finish <= bound:
            break
        trial, picks = list(order), list(best.picks)
        if choices and source.random() < 0.5:
            index = choices[int(source.random() * len(choices))]
            picks[index] = int(source.random() * len(layers[index].candidates))
        if source.random() < 0.7:
            trial[int(source.random() * len(layers))] = source.random() * max(ranks)
        allowed = [(layer.candidates[pick],) for layer, pick in zip(layers, picks, strict=True)]
        found = _place(layers, _ordered(layers, trial), allowed, dma)
        if found.finish <= best.finish:
            best, order = found, trial
    return best


def in_order(layers: Sequence[Layer], found: Schedule, dma: str) -> Schedule:
    """The same order, everything as early as it can be, each layer where it takes fewest cycles if the network ends no
    later."""
    order = sorted(range(len(layers)), key=lambda index: (min(found.launches[index], default=0), index))
    best = found
    trials = [list(found.picks)]
    for index, layer in enumerate(layers):
        cheaper = sorted(range(len(layer.candidates)), key=lambda pick: (layer.candidates[pick].cycles, pick))
        for pick in cheaper[: cheaper.index(best.picks[index])]:
            trials.append([*best.picks[:index], pick, *best.picks[index + 1 :]])
        for picks in trials:
            some = [(other.candidates[pick],) for other, pick in zip(layers, picks, strict=True)]
            again = _place(layers, order, some, dma)
            if again.finish <= found.finish:
                best = again
                break
        trials = []
    return best


def lower_bound(layers: Sequence[Layer], dma: str) -> int:
    """Cycles no schedule can be below: the longest way through, and what each queue, or all engines, must do."""
    ahead, behind = ways(layers)
    least = [min(one.cycles for one in layer.candidates) for layer in layers]
    longest = max((a + own + b for a, own, b in zip(ahead, least, behind, strict=True)), default=0)
    loads = [[load(one, dma) for one in layer.candidates] for layer in layers]
    queues = sorted({queue for some in loads for one in some for queue in one})
    each = [sum(min(one.get(queue, 0) for one in some) for some in loads) for queue in queues]
    together = sum(min(sum(one.values()) for one in some) for some in loads)
    return max(longest, *each, -(-together // max(len(queues), 1))) if queues else longest


def ways(layers: Sequence[Layer]) -> tuple[list[int], list[int]]:
    """The fewest cycles before each layer begins, and after it ends."""
    least = [min(one.cycles for one in layer.candidates) for layer in layers]
    ahead, behind = [0] * len(layers), [0] * len(layers)
    for index, layer in enumerate(layers):
        ahead[index] = max((ahead[one] + least[one] for one in layer.after), default=0)
    for index in reversed(range(len(layers))):
        for one in layers[index].after:
            behind[one] = max(behind[one], behind[index] + least[index])
    return ahead, behind


def load(candidate: Candidate, dma: str) -> dict[str, int]:
    """Cycles a candidate keeps each queue busy."""
    found: dict[str, int] = {}
    for step in candidate.steps:
        for use in (*step.uses, Use(dma, 0, step.fetch), Use(CORE, 0, step.launch)):
            found[use.queue] = found.get(use.queue, 0) + use.length
    return found


def _ordered(layers: Sequence[Layer], ranks: Sequence[float]) -> list[int]:
    """Layers by falling rank, none before those it reads."""
    waiting = [len(layer.after) for layer in layers]
    readers: list[list[int]] = [[] for _ in layers]
    for index, layer in enumerate(layers):
        for one in layer.after:
            readers[one].append(index)
    ready = [(-ranks[index], index) for index, count in enumerate(waiting) if not count]
    heapify(ready)
    found: list[int] = []
    while ready:
        found.append(heappop(ready)[1])
        for reader in readers[found[-1]]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heappush(ready, (-ranks[reader], reader))
    return found


def _place(
    layers: Sequence[Layer], order: Sequence[int], allowed: Sequence[Sequence[Candidate]], dma: str
) -> Schedule:
    """Layers in an order, each with the candidate that ends first."""
    queues = _Queues(dma)
    picks, ends = [0] * len(layers), [0] * len(layers)
    times: list[list[_Times]] = [[] for _ in layers]
    for index in order:
        layer = layers[index]
        trials = []
        for pick, candidate in enumerate(layer.candidates):
            if any(candidate is one for one in allowed[index]):
                found = queues.times(candidate.steps, _ready(layer, pick, picks, ends))
                trials.append((found[-1].start + candidate.steps[-1].cycles, pick, found))
        ends[index], picks[index], times[index] = min(trials, key=lambda trial: trial[:2])
        queues.book(layer.candidates[picks[index]].steps, times[index])
    launches, starts = (
        tuple(tuple(getattr(one, name) for one in some) for some in times) for name in ("launch", "start")
    )
    return Schedule(tuple(picks), launches, starts, max(ends, default=0))


def _ready(layer: Layer, pick: int, picks: Sequence[int], ends: Sequence[int]) -> int:
    return max((ends[one] + layer.delays.get((one, picks[one], pick), 0) for one in layer.after), default=0)


@dataclass(frozen=True, slots=True)
class _Times:
    """When a step's constants are fetched, when the core starts it, and when it begins."""

    fetch: int
    launch: int
    start: int


class _Queues:
    """When each queue is busy."""

    def __init__(self, dma: str) -> None:
        self._dma = dma
        self._busy: dict[str, list[tuple[int, int]]] = {}
        self._issued: dict[str, int] = {}
        """Engine -> when its queue has taken the last tile so far: it holds one that waits, and works in order."""
        self._begun: dict[str, int] = {}
        """Engine -> when its last step begins: there is room for the constants of one step more."""

    def times(self, steps: Sequence[Step], ready: int) -> list[_Times]:
        """When each of some steps can begin, one after the other, none started before `ready`."""
        found: list[_Times] = []
        for step in steps:
            begun = max((self._begun.get(engine, 0) for engine in step.engines), default=0)
            fetch = self._first((Use(self._dma, 0, step.fetch),), begun)
            taken = max((self._issued.get(engine, 0) for engine in step.engines), default=0)
            launch = self._first((Use(CORE, 0, step.launch),), max(ready, taken))
            start = self._first(step.uses, max(launch + step.launch, fetch + step.fetch if step.fetch else 0))
            found.append(_Times(fetch, launch if step.launch else start, start))
            ready = start + step.cycles
        return found

    def book(self, steps: Sequence[Step], times: Sequence[_Times]) -> None:
        """Keep the queues busy with steps at their times."""
        for step, when in zip(steps, times, strict=True):
            self._take((Use(self._dma, 0, step.fetch),), when.fetch)
            self._take((Use(CORE, 0, step.launch),), when.launch)
            self._take(step.uses, when.start)
            self._issued |= dict.fromkeys(step.engines, when.start + step.issuing)
            self._begun |= dict.fromkeys(step.engines, when.start)

    def fetched_by(self, end: int, length: int) -> int:
        """The last time from which the DMA has so many free cycles before an end; 0 where there is none."""
        start, busy = end - length, self._busy.get(self._dma, [])
        while start > 0 and (ahead := [b for b, e in busy if b < start + length and start < e]):
            start = min(ahead) - length
        start = max(start, 0)
        self._take((Use(self._dma, 0, length),), start)
        return start

    def _take(self, uses: Sequence[Use], start: int) -> None:
        for use in uses:
            if use.length:
                insort(self._busy.setdefault(use.queue, []), (start + use.offset, start + use.offset + use.length))

    def _first(self, uses: Sequence[Use], start: int) -> int:
        """The first time from `start` on at which nothing is in the way."""
        wanted, moved = [use for use in uses if use.length], True
        while moved:
            moved = False
            for use in wanted:
                for begin, end in self._busy.get(use.queue, ()):
                    if begin < start + use.offset + use.length and start + use.offset < end:
                        start, moved = end - use.offset, True
        return start


def slots(layers: Sequence[Layer], found: Schedule, dma: str) -> Mapping[str, Slot]:
    """Region name -> when it is computed, its constants fetched as late as they can be."""
    result: dict[str, Slot] = {}
    late = _Queues(dma)
    steps = [
        (found.starts[index][number], found.launches[index][number], step)
        for index, (layer, pick) in enumerate(zip(layers, found.picks, strict=True))
        for number, step in enumerate(layer.candidates[pick].steps)
    ]
    for begin, _, step in steps:
        late.book([replace(step, fetch=0)], [_Times(0, 0, begin)])
    for begin, issue, step in sorted(steps, key=lambda one: -one[0]):
        fetch = late.fetched_by(begin, step.fetch)
        result[step.region.name] = Slot(issue, begin, begin + step.cycles, max(0, fetch - LAUNCH_CYCLES))
    return result
