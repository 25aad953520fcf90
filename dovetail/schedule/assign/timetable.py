"""Puts layers in time: each step where its queues are free first, improved by small changes of candidates and order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from random import Random

from dovetail.program.ir import CORE, Queue
from dovetail.records import Record
from dovetail.schedule.assign.costs import ALL_ROOM, Candidate, CandidateStep, LayerOptions, QueueUse, Schedule
from dovetail.schedule.region import Slot

_MOST_TRIES, _MOST_PLACED = 2000, 50_000
"""Schedules the search for a better placement may make, and layers it may place in all of them."""
_TRIES_NEAR = 600
"""Schedules made near one that a solver found."""

Allowed = Sequence[Sequence[Candidate]]
"""By layer, the candidates that may be taken."""


def heuristic(layers: Sequence[LayerOptions], dma: Queue) -> Schedule:
    """A good placement: the best of a few, then improved by small changes of candidates and order.

    Args:
        layers: in an order that computes every value before it is read.
        dma: the queue of copies.
    """
    _, behind = ways(layers)
    ranks = [least + after for least, after in zip(_least(layers), behind, strict=True)]
    free = [layer.candidates for layer in layers]
    sole = [tuple(one for one in some if len(one.members) == 1) or some for some in free]
    fastest = [(min(some, key=lambda one: one.cycles),) for some in free]
    orders = (range(len(layers)), _ordered(layers, ranks))
    drafts = (_timed(layers, order, allowed, dma) for order in orders for allowed in (free, fastest, sole))
    return _searched(layers, min(drafts, key=_merit), ranks, dma, _MOST_TRIES)


def settled(layers: Sequence[LayerOptions], schedule: Schedule, dma: Queue) -> Schedule:
    """A schedule, or one near it that ends sooner or whose steps begin sooner: a solver sees the end only, and gives up
    after its time."""
    order = _issued(layers, schedule)
    ranks = [0.0] * len(order)
    for place, index in enumerate(order):
        ranks[index] = float(len(order) - place)
    near = _timed(layers, order, _picked(layers, schedule.picks), dma)
    return min(schedule, _searched(layers, near, ranks, dma, _TRIES_NEAR), key=_merit)


def _searched(
    layers: Sequence[LayerOptions], best: Schedule, ranks: Sequence[float], dma: Queue, tries: int
) -> Schedule:
    """A schedule made by order of these ranks, improved by small changes of candidates and order."""
    source, bound = Random(0), lower_bound(layers, dma)
    kept: list[float] = list(ranks)
    choices = [index for index, layer in enumerate(layers) if len(layer.candidates) > 1]
    for _ in range(min(tries, _MOST_PLACED // max(len(layers), 1))):
        if best.finish <= bound:
            break
        trial, picks = list(kept), list(best.picks)
        if choices and source.random() < 0.5:
            index = choices[int(source.random() * len(choices))]
            picks[index] = int(source.random() * len(layers[index].candidates))
        if source.random() < 0.7:
            trial[int(source.random() * len(layers))] = source.random() * max(ranks)
        schedule = _timed(layers, _ordered(layers, trial), _picked(layers, picks), dma)
        if _merit(schedule) <= _merit(best):
            best, kept = schedule, trial
    return best


def _issued(layers: Sequence[LayerOptions], schedule: Schedule) -> list[int]:
    """The layers in the order a schedule starts them."""
    return sorted(range(len(layers)), key=lambda index: (min(schedule.launches[index], default=0), index))


def _merit(schedule: Schedule) -> tuple[int, int]:
    """Sort key: the end, then the sum of all begins, since what is thought to bind at the end may not."""
    return schedule.finish, sum(start for starts in schedule.starts for start in starts)


def _picked(layers: Sequence[LayerOptions], picks: Sequence[int]) -> Allowed:
    return [(layer.candidates[pick],) for layer, pick in zip(layers, picks, strict=True)]


def in_order(layers: Sequence[LayerOptions], schedule: Schedule, dma: Queue) -> Schedule:
    """The same order, everything as early as it can be, each layer where it takes fewest cycles if the network ends no
    later."""
    order, best = _issued(layers, schedule), schedule
    trials = [list(schedule.picks)]
    for index, layer in enumerate(layers):
        cheaper = sorted(range(len(layer.candidates)), key=lambda pick: (layer.candidates[pick].cycles, pick))
        for pick in cheaper[: cheaper.index(best.picks[index])]:
            trials.append([*best.picks[:index], pick, *best.picks[index + 1 :]])
        for picks in trials:
            again = _timed(layers, order, _picked(layers, picks), dma)
            if again.finish <= schedule.finish:
                best = again
                break
        trials = []
    return best


def lower_bound(layers: Sequence[LayerOptions], dma: Queue) -> int:
    """Cycles no schedule can be below: the longest way through, and what each queue, or all engines, must do."""
    ahead, behind = ways(layers)
    longest = max(map(sum, zip(ahead, _least(layers), behind, strict=True)), default=0)
    loads = [[load(one, dma) for one in layer.candidates] for layer in layers]
    queues = {queue for some in loads for one in some for queue in one}
    each = [sum(min(one.get(queue, 0) for one in some) for some in loads) for queue in queues]
    together = sum(min(sum(one.values()) for one in some) for some in loads)
    return max(longest, *each, -(-together // max(len(queues), 1))) if queues else longest


def _least(layers: Sequence[LayerOptions]) -> list[int]:
    """Cycles of each layer's fastest candidate."""
    return [min(one.cycles for one in layer.candidates) for layer in layers]


def ways(layers: Sequence[LayerOptions]) -> tuple[list[int], list[int]]:
    """The fewest cycles before each layer begins, and after it ends."""
    least = _least(layers)
    ahead, behind = [0] * len(layers), [0] * len(layers)
    for index, layer in enumerate(layers):
        ahead[index] = max((ahead[one] + least[one] for one in layer.after), default=0)
    for index in reversed(range(len(layers))):
        for one in layers[index].after:
            behind[one] = max(behind[one], behind[index] + least[index])
    return ahead, behind


def load(candidate: Candidate, dma: Queue) -> dict[Queue, int]:
    """Cycles a candidate keeps each queue busy."""
    busy: dict[Queue, int] = {}
    for step in candidate.steps:
        for use in (*step.uses, QueueUse(dma, 0, step.fetch), QueueUse(CORE, 0, step.launch)):
            busy[use.queue] = busy.get(use.queue, 0) + use.length
    return busy


def _ordered(layers: Sequence[LayerOptions], ranks: Sequence[float]) -> list[int]:
    """Layers by falling rank, none before those it reads."""
    waiting = [len(layer.after) for layer in layers]
    readers: list[list[int]] = [[] for _ in layers]
    for index, layer in enumerate(layers):
        for one in layer.after:
            readers[one].append(index)
    ready = [(-ranks[index], index) for index, count in enumerate(waiting) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heappop(ready)[1])
        for reader in readers[order[-1]]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heappush(ready, (-ranks[reader], reader))
    return order


def _timed(layers: Sequence[LayerOptions], order: Sequence[int], allowed: Allowed, dma: Queue) -> Schedule:
    """Layers in an order, each with the candidate that ends first."""
    queues = _QueueTimes(dma)
    picks, ends = [0] * len(layers), [0] * len(layers)
    times: list[list[_StepTimes]] = [[] for _ in layers]
    for index in order:
        layer = layers[index]
        trials = []
        for pick, candidate in enumerate(layer.candidates):
            if any(candidate is one for one in allowed[index]):
                before = (ends[one] + layer.delays.get((one, picks[one], pick), 0) for one in layer.after)
                own = queues.times(candidate.steps, max(before, default=0))
                trials.append((own[-1].start + candidate.steps[-1].cycles, pick, own))
        ends[index], picks[index], times[index] = min(trials, key=lambda trial: trial[:2])
        queues.book(layer.candidates[picks[index]].steps, times[index])
    launches = tuple(tuple(one.launch for one in some) for some in times)
    starts = tuple(tuple(one.start for one in some) for some in times)
    return Schedule(tuple(picks), launches, starts, max(ends, default=0))


class _StepTimes(Record):
    """Cycles in which a step's constants are fetched, the core starts it, and it begins."""

    fetch: int
    launch: int
    start: int


class _QueueTimes:
    """The stretches of time in which each queue is busy."""

    def __init__(self, dma: Queue) -> None:
        self._dma = dma
        self._busy: dict[Queue, list[tuple[int, int]]] = {}
        self._issued: dict[str, int] = {}
        """Engine -> when its queue has taken the last tile so far: it holds one that waits, and works in order."""
        self._filled: dict[str, list[tuple[int, int]]] = {}
        """Engine -> until when the constants of each step so far wait, and how much of the room they take."""

    def times(self, steps: Sequence[CandidateStep], ready: int) -> list[_StepTimes]:
        """The soonest times of some steps, one after the other, none started before `ready`."""
        times: list[_StepTimes] = []
        for step in steps:
            fetch = self._first((QueueUse(self._dma, 0, step.fetch),), self._room(step) if step.fetch else 0)
            taken = max((self._issued.get(engine, 0) for engine in step.engines), default=0)
            launch = self._first((QueueUse(CORE, 0, step.launch),), max(ready, taken))
            # a step may want the queue its constants come by before it begins
            lead = max([0, *(-use.offset for use in step.uses if use.queue == self._dma)])
            fetched = fetch + step.fetch + lead if step.fetch else 0
            start = self._first(step.uses, max(launch + step.launch, fetched))
            times.append(_StepTimes(fetch, launch if step.launch else start, start))
            ready = start + step.cycles
        return times

    def book(self, steps: Sequence[CandidateStep], times: Sequence[_StepTimes]) -> None:
        """Keep queues busy with some steps."""
        for step, when in zip(steps, times, strict=True):
            self._take((QueueUse(self._dma, 0, step.fetch),), when.fetch)
            self._take((QueueUse(CORE, 0, step.launch),), when.launch)
            self._take(step.uses, when.start)
            self._issued |= dict.fromkeys(step.engines, when.start + step.taken)
            for engine, filled in zip(step.engines, step.filled, strict=True):
                self._filled.setdefault(engine, []).append((when.start, filled))

    def _room(self, step: CandidateStep) -> int:
        """The cycle from which a step's engines have room for its constants."""
        soonest = 0
        for engine, own in zip(step.engines, step.filled, strict=True):
            held = self._filled.get(engine, [])
            while held and sum(filled for end, filled in held if end > soonest) + own > ALL_ROOM:
                soonest = min(end for end, _ in held if end > soonest)
        return soonest

    def fetched_by(self, end: int, length: int) -> int:
        """The last time from which the DMA has so many free cycles before an end; 0 where there is none."""
        start, busy = end - length, self._busy.get(self._dma, [])
        while start > 0 and (ahead := [b for b, e in busy if b < start + length and start < e]):
            start = min(ahead) - length
        start = max(start, 0)
        self._take((QueueUse(self._dma, 0, length),), start)
        return start

    def _take(self, uses: Sequence[QueueUse], start: int) -> None:
        for use in uses:
            if use.length:
                insort(self._busy.setdefault(use.queue, []), (start + use.offset, start + use.offset + use.length))

    def _first(self, uses: Sequence[QueueUse], start: int) -> int:
        """The first time from `start` on at which nothing is in the way."""
        wanted, moved = [use for use in uses if use.length], True
        while moved:
            moved = False
            for use in wanted:
                for begin, end in self._busy.get(use.queue, ()):
                    if begin < start + use.offset + use.length and start + use.offset < end:
                        start, moved = end - use.offset, True
        return start


def slots(layers: Sequence[LayerOptions], schedule: Schedule, dma: Queue) -> Mapping[str, Slot]:
    """Region name -> when it is computed, its constants fetched as late as they can be."""
    queues = _QueueTimes(dma)
    steps: list[tuple[int, int, CandidateStep]] = []
    for layer, pick, *times in zip(layers, schedule.picks, schedule.starts, schedule.launches, strict=True):
        steps += zip(*times, layer.candidates[pick].steps, strict=True)
    for begin, _, step in steps:
        queues.book([replace(step, fetch=0)], [_StepTimes(0, 0, begin)])
    by_name: dict[str, Slot] = {}
    for begin, issue, step in sorted(steps, key=lambda one: -one[0]):
        fetch = queues.fetched_by(begin, step.fetch)
        slot = Slot(issue, begin, begin + step.cycles, max(0, fetch - step.launch), begin + step.issuing)
        if step.region.copied_by:  # the queue of copies is in order
            slot = replace(slot, issue=begin - step.launch, issued=begin - step.launch)
        elif not step.region.shares:
            slot = replace(slot, issued=slot.end)
        by_name[step.region.name] = slot
    return by_name
