"""Placement with a constraint solver, started from a schedule that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.place.model import Layer, Schedule, Step
from dovetail.place.schedule import ways
from dovetail.program.ir import CORE


def improve(layers: Sequence[Layer], start: Schedule, bound: int, dma: str, seconds: float) -> tuple[Schedule, int]:
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
    draft = _Draft(model, layers, start, dma)
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
    model.minimize(finish)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start, bound
    picks = tuple(next(pick for pick, here in enumerate(some) if solver.value(here)) for some in draft.picks)
    launches, starts = (
        tuple(tuple(solver.value(time) for time in some[pick]) for some, pick in zip(times, picks, strict=True))
        for times in (draft.launches, draft.begins)
    )
    return Schedule(picks, launches, starts, solver.value(finish)), max(bound, round(solver.best_objective_bound))


@dataclass(frozen=True, slots=True)
class _Held:
    """A stretch in which a queue is busy if a candidate is chosen."""

    interval: Any
    here: Any
    length: int
    layer: int
    is_early: bool
    """True for what may be done before the layer's operands are there."""


class _Draft:
    """The model's variables: which candidate of each layer, when its steps begin, and what keeps each queue busy."""

    def __init__(self, model: Any, layers: Sequence[Layer], start: Schedule, dma: str) -> None:
        self._model, self._dma, self._horizon = model, dma, start.finish
        self.queues: dict[str, list[_Held]] = {}
        self.waiting: dict[str, list[Any]] = {}
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

    def _add(self, layers: Sequence[Layer], index: int, pick: int, start: Schedule) -> None:
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

    def _book(self, step: Step, index: int, begin: Any, launch: Any, here: Any) -> None:
        """Keep the queues of a step busy."""
        model = self._model
        for use in step.uses:
            self._keep(use.queue, begin + use.offset, use.length, here, index)
        if step.launch:
            model.add(launch + step.launch <= begin).only_enforce_if(here)
            self._keep(CORE, launch, step.launch, here, index)
        for engine in step.engines:  # its queue holds one that waits, and works in order
            length = model.new_int_var(0, self._horizon, "")
            until = begin + step.issuing
            waiting = model.new_optional_interval_var(launch, length, until, here, "")
            self.waiting.setdefault(engine, []).append(waiting)
        if step.fetch:
            fetch = model.new_int_var(0, self._horizon, "")
            model.add(fetch + step.fetch <= begin).only_enforce_if(here)
            self._keep(self._dma, fetch, step.fetch, here, index, is_early=True)
            for engine in step.engines:  # its memory holds the constants of one step more
                length = model.new_int_var(0, self._horizon, "")
                ahead = model.new_optional_interval_var(fetch, length, begin, here, "")
                self.waiting.setdefault(f"{engine} constants", []).append(ahead)

    def _keep(self, queue: str, begin: Any, length: int, here: Any, layer: int, is_early: bool = False) -> None:
        """Keep a queue busy if a candidate is chosen."""
        if length:
            interval = self._model.new_optional_fixed_size_interval_var(begin, length, here, "")
            self.queues.setdefault(queue, []).append(_Held(interval, here, length, layer, is_early))
