"""Puts layers in time by a constraint solver, where a quick schedule is not proven best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.program.ir import CORE, Queue
from dovetail.records import Record
from dovetail.schedule.assign.costs import ALL_ROOM, CandidateStep, LayerOptions, Schedule
from dovetail.schedule.assign.timetable import ways
from dovetail.schedule.solver import new_model, solve

_PARAMETERS = {
    "use_dynamic_precedence_in_disjunctive": True,
    "use_strong_propagation_in_disjunctive": True,
    "linearization_level": 0,
}
"""With these three most placements are proven that are not in as much time with none of them
(tests/test_two_engines.py)."""


def improve(
    layers: Sequence[LayerOptions], start: Schedule, bound: int, dma: Queue, seconds: float
) -> tuple[Schedule, int]:
    """A schedule that ends no later than the start's, and a time no schedule can end before.

    The start itself comes back when OR-tools is not installed or nothing better is found in time.

    Args:
        layers: the network.
        start: a schedule of it.
        bound: no schedule can end before.
        dma: the queue of copies.
        seconds: limit on deterministic solver time.
    """
    if (model := new_model()) is None:
        return start, bound
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
    if (solver := solve(model, seconds, **_PARAMETERS)) is None:
        return start, bound
    picks = tuple(next(pick for pick, here in enumerate(some) if solver.value(here)) for some in draft.picks)
    launches, starts = (
        tuple(tuple(solver.value(time) for time in some[pick]) for some, pick in zip(times, picks, strict=True))
        for times in (draft.launches, draft.begins)
    )
    return Schedule(picks, launches, starts, solver.value(finish)), max(bound, round(solver.best_objective_bound))


class _OptionalInterval(Record):
    """A stretch in which a queue is busy if a candidate is chosen."""

    interval: Any
    here: Any
    length: int
    layer: int
    is_early: bool
    """True for what may be done before the layer's operands are there."""


class _TimetableModel:
    """The model's variables: the candidate of each layer, when its steps begin, and what keeps each queue busy."""

    def __init__(self, model: Any, layers: Sequence[LayerOptions], start: Schedule, dma: Queue) -> None:
        self._model, self._dma, self._horizon = model, dma, start.finish
        self.queues: dict[Queue, list[_OptionalInterval]] = {}
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
            self.ends.append(self._time(f"end {index}"))
            model.add_exactly_one(self.picks[index])
            for pick in range(len(layer.candidates)):
                self._add(layer, index, pick, start)

    def _time(self, name: str = "") -> Any:
        return self._model.new_int_var(0, self._horizon, name)

    def _add(self, layer: LayerOptions, index: int, pick: int, start: Schedule) -> None:
        """One candidate: its steps in turn, after the layers it reads."""
        model, here = self._model, self.picks[index][pick]
        is_hint = pick == start.picks[index]
        model.add_hint(here, is_hint)
        launches, begins = list[Any](), list[Any]()
        end: Any = None
        for number, step in enumerate(layer.candidates[pick].steps):
            begin = self._time(f"begin {index} {pick} {number}")
            launch = self._time(f"launch {index} {pick} {number}") if step.launch else begin
            if is_hint:
                model.add_hint(begin, start.starts[index][number])
            if is_hint and step.launch:
                model.add_hint(launch, start.launches[index][number])
            if number:
                model.add(launch >= end).only_enforce_if(here)
            end = begin + step.cycles
            launches.append(launch)
            begins.append(begin)
            self._book(step, index, begin, launch, here)
        for one in layer.after:
            model.add(launches[0] >= self.ends[one]).only_enforce_if(here)
        for (one, other, own), delay in layer.delays.items():
            if own == pick:
                both = [here, self.picks[one][other]]
                model.add(launches[0] >= self.ends[one] + delay).only_enforce_if(both)
        model.add(self.ends[index] >= end).only_enforce_if(here)
        self.launches[index].append(launches)
        self.begins[index].append(begins)

    def _book(self, step: CandidateStep, index: int, begin: Any, launch: Any, here: Any) -> None:
        model = self._model
        for use in step.uses:
            self._keep(use.queue, begin + use.offset, use.length, here, index)
        if step.launch:
            model.add(launch + step.launch <= begin).only_enforce_if(here)
            self._keep(CORE, launch, step.launch, here, index)
        for engine in step.engines:  # its queue holds one that waits, and works in order
            waiting = model.new_optional_interval_var(launch, self._time(), begin + step.taken, here, "")
            self.waiting.setdefault(engine, []).append(waiting)
        if step.fetch:
            fetch = self._time()
            model.add(fetch + step.fetch <= begin).only_enforce_if(here)
            self._keep(self._dma, fetch, step.fetch, here, index, is_early=True)
            for engine, filled in zip(step.engines, step.filled, strict=True):
                waiting = model.new_optional_interval_var(fetch, self._time(), begin, here, "")
                self.filled.setdefault(engine, []).append((waiting, filled))

    def _keep(self, queue: Queue, begin: Any, length: int, here: Any, layer: int, is_early: bool = False) -> None:
        if length:
            interval = self._model.new_optional_fixed_size_interval_var(begin, length, here, "")
            self.queues.setdefault(queue, []).append(_OptionalInterval(interval, here, length, layer, is_early))
