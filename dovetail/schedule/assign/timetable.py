"""Puts layers in time: each step where its queues are free first, and where that is not proven best, by a solver."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

from dovetail.program.ir import CORE
from dovetail.schedule.assign.costs import ALL_ROOM, Candidate, CandidateStep, LayerOptions, QueueUse, Schedule
from dovetail.schedule.region import Slot
from dovetail.schedule.tiles.tiling import LAUNCH_CYCLES

_MOST_TRIES, _MOST_PLACED = 2000, 50_000
"""Schedules the search for a better placement may make, and layers it may place in all of them."""
_TRIES_NEAR = 600
"""Schedules made near one that a solver found."""


def heuristic(layers: Sequence[LayerOptions], dma: str) -> Schedule:
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
    ways_on = [(some, places) for places in (range(len(layers)), order) for some in (free, fastest, sole)]
    best = min((_timed(layers, places, some, dma) for some, places in ways_on), key=_merit)
    return _searched(layers, best, ranks, dma, _MOST_TRIES)


def settled(layers: Sequence[LayerOptions], found: Schedule, dma: str) -> Schedule:
    """A schedule, or one near it that ends sooner or whose steps begin sooner: a solver sees the end only, and gives up
    after its time."""
    order = _issued(layers, found)
    wishes = [0.0] * len(order)
    for place, index in enumerate(order):
        wishes[index] = float(len(order) - place)
    near = _timed(layers, order, _picked(layers, found.picks), dma)
    return min(found, _searched(layers, near, wishes, dma, _TRIES_NEAR), key=_merit)


def _searched(layers: Sequence[LayerOptions], best: Schedule, ranks: Sequence[float], dma: str, tries: int) -> Schedule:
    """A schedule made by order of these ranks, improved by small changes of candidates and order."""
    source, bound = Random(0), lower_bound(layers, dma)
    wishes: list[float] = list(ranks)
    choices = [index for index, layer in enumerate(layers) if len(layer.candidates) > 1]
    for _ in range(min(tries, _MOST_PLACED // max(len(layers), 1))):
        if best.finish <= bound:
            break
        trial, picks = list(wishes), list(best.picks)
        if choices and source.random() < 0.5:
            index = choices[int(source.random() * len(choices))]
            picks[index] = int(source.random() * len(layers[index].candidates))
        if source.random() < 0.7:
            trial[int(source.random() * len(layers))] = source.random() * max(ranks)
        found = _timed(layers, _ordered(layers, trial), _picked(layers, picks), dma)
        if _merit(found) <= _merit(best):
            best, wishes = found, trial
    return best


def _issued(layers: Sequence[LayerOptions], found: Schedule) -> list[int]:
    """The layers in the order a schedule starts them."""
    return sorted(range(len(layers)), key=lambda index: (min(found.launches[index], default=0), index))


def _merit(found: Schedule) -> tuple[int, int]:
    """The less, the better: of schedules that end at one time the one whose steps begin sooner, since what is thought
    to bind at the end may not."""
    return found.finish, sum(start for some in found.starts for start in some)


def _picked(layers: Sequence[LayerOptions], picks: Sequence[int]) -> list[tuple[Candidate, ...]]:
    """One candidate for each layer."""
    return [(layer.candidates[pick],) for layer, pick in zip(layers, picks, strict=True)]


def in_order(layers: Sequence[LayerOptions], found: Schedule, dma: str) -> Schedule:
    """The same order, everything as early as it can be, each layer where it takes fewest cycles if the network ends no
    later."""
    order, best = _issued(layers, found), found
    trials = [list(found.picks)]
    for index, layer in enumerate(layers):
        cheaper = sorted(range(len(layer.candidates)), key=lambda pick: (layer.candidates[pick].cycles, pick))
        for pick in cheaper[: cheaper.index(best.picks[index])]:
            trials.append([*best.picks[:index], pick, *best.picks[index + 1 :]])
        for picks in trials:
            again = _timed(layers, order, _picked(layers, picks), dma)
            if again.finish <= found.finish:
                best = again
                break
        trials = []
    return best


def lower_bound(layers: Sequence[LayerOptions], dma: str) -> int:
    """Cycles no schedule can be below: the longest way through, and what each queue, or all engines, must do."""
    ahead, behind = ways(layers)
    least = [min(one.cycles for one in layer.candidates) for layer in layers]
    longest = max((a + own + b for a, own, b in zip(ahead, least, behind, strict=True)), default=0)
    loads = [[load(one, dma) for one in layer.candidates] for layer in layers]
    queues = sorted({queue for some in loads for one in some for queue in one})
    each = [sum(min(one.get(queue, 0) for one in some) for some in loads) for queue in queues]
    together = sum(min(sum(one.values()) for one in some) for some in loads)
    return max(longest, *each, -(-together // max(len(queues), 1))) if queues else longest


def ways(layers: Sequence[LayerOptions]) -> tuple[list[int], list[int]]:
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
        for use in (*step.uses, QueueUse(dma, 0, step.fetch), QueueUse(CORE, 0, step.launch)):
            found[use.queue] = found.get(use.queue, 0) + use.length
    return found


def _ordered(layers: Sequence[LayerOptions], ranks: Sequence[float]) -> list[int]:
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


def _timed(
    layers: Sequence[LayerOptions], order: Sequence[int], allowed: Sequence[Sequence[Candidate]], dma: str
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
                before = (ends[one] + layer.delays.get((one, picks[one], pick), 0) for one in layer.after)
                found = queues.times(candidate.steps, max(before, default=0))
                trials.append((found[-1].start + candidate.steps[-1].cycles, pick, found))
        ends[index], picks[index], times[index] = min(trials, key=lambda trial: trial[:2])
        queues.book(layer.candidates[picks[index]].steps, times[index])
    launches = tuple(tuple(one.launch for one in some) for some in times)
    starts = tuple(tuple(one.start for one in some) for some in times)
    return Schedule(tuple(picks), launches, starts, max(ends, default=0))


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
        self._filled: dict[str, list[tuple[int, int]]] = {}
        """Engine -> until when the constants of each step so far wait, and how much of the room they take."""

    def times(self, steps: Sequence[CandidateStep], ready: int) -> list[_Times]:
        """When each of some steps can begin, one after the other, none started before `ready`."""
        found: list[_Times] = []
        for step in steps:
            fetch = self._first((QueueUse(self._dma, 0, step.fetch),), self._room(step) if step.fetch else 0)
            taken = max((self._issued.get(engine, 0) for engine in step.engines), default=0)
            launch = self._first((QueueUse(CORE, 0, step.launch),), max(ready, taken))
            fetched = fetch + step.fetch + self._lead(step) if step.fetch else 0
            start = self._first(step.uses, max(launch + step.launch, fetched))
            found.append(_Times(fetch, launch if step.launch else start, start))
            ready = start + step.cycles
        return found

    def _lead(self, step: CandidateStep) -> int:
        """How long before it begins a step wants the queue its constants come by."""
        return max([0, *(-use.offset for use in step.uses if use.queue == self._dma)])

    def book(self, steps: Sequence[CandidateStep], times: Sequence[_Times]) -> None:
        for step, when in zip(steps, times, strict=True):
            self._take((QueueUse(self._dma, 0, step.fetch),), when.fetch)
            self._take((QueueUse(CORE, 0, step.launch),), when.launch)
            self._take(step.uses, when.start)
            self._issued |= dict.fromkeys(step.engines, when.start + step.taken)
            for engine, filled in zip(step.engines, step.filled, strict=True):
                self._filled.setdefault(engine, []).append((when.start, filled))

    def _room(self, step: CandidateStep) -> int:
        """From when on a step's engines have room for its constants."""
        found = 0
        for engine, own in zip(step.engines, step.filled, strict=True):
            held = self._filled.get(engine, [])
            while held and sum(filled for end, filled in held if end > found) + own > ALL_ROOM:
                found = min(end for end, _ in held if end > found)
        return found

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


def slots(layers: Sequence[LayerOptions], found: Schedule, dma: str) -> Mapping[str, Slot]:
    """Region name -> when it is computed, its constants fetched as late as they can be."""
    result: dict[str, Slot] = {}
    late = _Queues(dma)
    chosen = zip(layers, found.picks, found.starts, found.launches, strict=True)
    some = (zip(*times, layer.candidates[pick].steps, strict=True) for layer, pick, *times in chosen)
    steps: list[tuple[int, int, CandidateStep]] = [step for several in some for step in several]
    for begin, _, step in steps:
        late.book([replace(step, fetch=0)], [_Times(0, 0, begin)])
    for begin, issue, step in sorted(steps, key=lambda one: -one[0]):
        fetch = late.fetched_by(begin, step.fetch)
        slot = Slot(issue, begin, begin + step.cycles, max(0, fetch - LAUNCH_CYCLES), begin + step.issuing)
        if step.region.copied_by:  # the queue of copies is in order
            slot = replace(slot, issue=begin - step.launch, issued=begin - step.launch)
        elif not step.region.shares:
            slot = replace(slot, issued=slot.end)
        result[step.region.name] = slot
    return result


def improve(
    layers: Sequence[LayerOptions], start: Schedule, bound: int, dma: str, seconds: float
) -> tuple[Schedule, int]:
    """A schedule that ends no later than the start's, and a time no schedule can end before.

    The start itself comes back when OR-tools is not installed or nothing better is found in time.

    Args:
        layers: the network.
        start: a schedule of it.
        bound: no schedule can end before.
        dma: name of the queue of copies.
        seconds: limit on deterministic solver time.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return start, bound
    model = cp_model.CpModel()
    draft = _TimetableModel(model, layers, start, dma)
    finish = model.new_int_var(bound, start.finish, "finish")
    for end in draft.ends:
        model.add(end <= finish)
    ahead, behind = ways(layers)
    for held in (draft.queues[queue] for queue in sorted(draft.queues)):
        model.add_no_overlap([one.interval for one in held])
        around = min(0 if one.is_early else ahead[one.layer] for one in held) + min(behind[one.layer] for one in held)
        model.add(sum(one.length * one.here for one in held) + around <= finish)  # what follows, and helps the solver
    for engine in sorted(draft.waiting):
        model.add_no_overlap(draft.waiting[engine])
    for engine in sorted(draft.filled):
        intervals, filled = zip(*draft.filled[engine], strict=True)
        if min(filled) == ALL_ROOM:
            model.add_no_overlap(intervals)
        else:
            model.add_cumulative(intervals, filled, ALL_ROOM)
    model.minimize(finish)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.use_dynamic_precedence_in_disjunctive = True  # with these three most
    solver.parameters.use_strong_propagation_in_disjunctive = True  # placements are proven that are not in as much
    solver.parameters.linearization_level = 0  # time with none of them (tests/test_two_engines.py)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start, bound
    picks = tuple(next(pick for pick, here in enumerate(some) if solver.value(here)) for some in draft.picks)
    launches, starts = (
        tuple(tuple(solver.value(time) for time in some[pick]) for some, pick in zip(times, picks, strict=True))
        for times in (draft.launches, draft.begins)
    )
    return Schedule(picks, launches, starts, solver.value(finish)), max(bound, round(solver.best_objective_bound))


@dataclass(frozen=True, slots=True)
class _OptionalInterval:
    """A stretch in which a queue is busy if a candidate is chosen."""

    interval: Any
    here: Any
    length: int
    layer: int
    is_early: bool
    """True for what may be done before the layer's operands are there."""


class _TimetableModel:
    """The model's variables: which candidate of each layer, when its steps begin, and what keeps each queue busy."""

    def __init__(self, model: Any, layers: Sequence[LayerOptions], start: Schedule, dma: str) -> None:
        self._model, self._dma, self._horizon = model, dma, start.finish
        self.queues: dict[str, list[_OptionalInterval]] = {}
        self.waiting: dict[str, list[Any]] = {}
        self.filled: dict[str, list[tuple[Any, int]]] = {}
        self.picks: list[list[Any]] = []
        self.launches: list[list[list[Any]]] = []
        self.begins: list[list[list[Any]]] = []
        self.ends: list[Any] = []
        for index, layer in enumerate(layers):
            self.picks.append([model.new_bool_var(f"{index} {pick}") for pick in range(len(layer.candidates))])
            self.launches.append([])
            self.begins.append([])
            self.ends.append(model.new_int_var(0, self._horizon, f"end {index}"))
            model.add_exactly_one(self.picks[index])
            for pick in range(len(layer.candidates)):
                self._add(layers, index, pick, start)

    def _add(self, layers: Sequence[LayerOptions], index: int, pick: int, start: Schedule) -> None:
        """One candidate: its steps in turn, after what it reads."""
        model, here, layer = self._model, self.picks[index][pick], layers[index]
        chosen = pick == start.picks[index]
        model.add_hint(here, chosen)
        steps = layer.candidates[pick].steps
        launches, begins = self.launches[index], self.begins[index]
        launches.append([])
        begins.append([])
        for number, step in enumerate(steps):
            begin = model.new_int_var(0, self._horizon, f"begin {index} {pick} {number}")
            launch = model.new_int_var(0, self._horizon, f"launch {index} {pick} {number}") if step.launch else begin
            if chosen:
                model.add_hint(begin, start.starts[index][number])
            if chosen and step.launch:
                model.add_hint(launch, start.launches[index][number])
            if number:
                model.add(launch >= begins[pick][-1] + steps[number - 1].cycles).only_enforce_if(here)
            launches[pick].append(launch)
            begins[pick].append(begin)
            self._book(step, index, begin, launch, here)
        for one in layer.after:
            model.add(launches[pick][0] >= self.ends[one]).only_enforce_if(here)
        for (one, other, own), delay in layer.delays.items():
            if own == pick:
                both = [here, self.picks[one][other]]
                model.add(launches[pick][0] >= self.ends[one] + delay).only_enforce_if(both)
        model.add(self.ends[index] >= begins[pick][-1] + steps[-1].cycles).only_enforce_if(here)

    def _book(self, step: CandidateStep, index: int, begin: Any, launch: Any, here: Any) -> None:
        model = self._model
        for use in step.uses:
            self._keep(use.queue, begin + use.offset, use.length, here, index)
        if step.launch:
            model.add(launch + step.launch <= begin).only_enforce_if(here)
            self._keep(CORE, launch, step.launch, here, index)
        for engine in step.engines:  # its queue holds one that waits, and works in order
            length = model.new_int_var(0, self._horizon, "")
            until = begin + step.taken
            waiting = model.new_optional_interval_var(launch, length, until, here, "")
            self.waiting.setdefault(engine, []).append(waiting)
        if step.fetch:
            fetch = model.new_int_var(0, self._horizon, "")
            model.add(fetch + step.fetch <= begin).only_enforce_if(here)
            self._keep(self._dma, fetch, step.fetch, here, index, is_early=True)
            for engine, filled in zip(step.engines, step.filled, strict=True):
                length = model.new_int_var(0, self._horizon, "")
                waiting = model.new_optional_interval_var(fetch, length, begin, here, "")
                self.filled.setdefault(engine, []).append((waiting, filled))

    def _keep(self, queue: str, begin: Any, length: int, here: Any, layer: int, is_early: bool = False) -> None:
        if length:
            interval = self._model.new_optional_fixed_size_interval_var(begin, length, here, "")
            self.queues.setdefault(queue, []).append(_OptionalInterval(interval, here, length, layer, is_early))
