"""Tunes a network: every distinct layer by itself, then the network as a whole with the best choices.

The network has the last word on every choice: a choice that does not make it faster is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dovetail.bounds import model_bound
from dovetail.compile import Options, operator_work, prepare, rounding_of
from dovetail.errors import DovetailError, TargetError
from dovetail.guests.tune.layers import LayerKind, region_alone, tunable_layers
from dovetail.guests.tune.log import LOG_SCHEMA, NETWORK, TrialLog, open_log
from dovetail.guests.tune.measure import MEASURES, Choices, MeasureTask, Runner, make_task, runner
from dovetail.guests.tune.search import Trial, TrialOutcome, best_trial, candidates, require_learner, search
from dovetail.ir.graph import Graph
from dovetail.records import Record, field
from dovetail.schedule.region import Region
from dovetail.schedule.tiles.tile import EARLY, PLACEMENT
from dovetail.schedule.tuning import Tuning, TuningEntry, identity
from dovetail.sim.line import Board
from dovetail.target.description import Target
from dovetail.target.pattern import Choice
from dovetail.target.registry import load_target

MOST_TRIALS = 48
"""Trials of the whole network."""


class TuningRequest(Record):
    """A model to tune, and how."""

    model: Path
    target: str
    """Name of a target, or the path of a target file."""
    log: Path
    """File that keeps all trials; tuning goes on with one that exists."""
    trials: int = 64
    """Trials of each distinct layer, the default included."""
    options: Options = field(default_factory=Options)
    """Policy and rounding."""
    measure: str = "iss"
    """One of `MEASURES`."""
    layers: tuple[str, ...] = ()
    """Names of the only layers to tune; none for all."""
    seed: int = 0
    jobs: int = 1
    """Processes on this machine."""
    scheduler: str | None = None
    """Address of a Dask scheduler used instead."""
    boards: tuple[Board, ...] = ()
    """Boards for `measure` "board"; trials are spread over several."""


class Progress(Record):
    """The state of tuning a layer, or the network in the end."""

    layer: str
    """Name of the first region of the layer, or "the network"."""
    number: int
    """Number of the layer, from 1."""
    count: int
    """Layers to tune."""
    done: int = 0
    """Trials that have ended."""
    trials: int = 0
    """Trials to make; 0 where their number is not known."""
    default: int | None = None
    """Cycles by default; None when that trial has not ended or has failed."""
    best: int | None = None


Show = Callable[[Progress], None]


@dataclass
class TrialTally:
    """Counts trials as they end, and shows each."""

    progress: Progress
    show: Show

    def ended(self, choice: Mapping[str, Any], outcome: TrialOutcome) -> None:
        """Count a trial; an empty choice is the default."""
        now = self.progress
        best = min((cycles for cycles in (now.best, outcome.cycles) if cycles is not None), default=None)
        default = now.default if choice else outcome.cycles
        self.progress = replace(now, done=now.done + 1, default=default, best=best)
        self.show(self.progress)


class TrialRunner(Record):
    """Makes trials: takes them from the log, or lets the workers make them and writes them to the log."""

    log: TrialLog
    run: Runner

    def batch(
        self, task: MeasureTask, key: str, choices: Sequence[Mapping[str, Any]], tally: TrialTally, region: str = ""
    ) -> list[TrialOutcome]:
        """The outcomes of trials, in their order.

        Args:
            task: the network of a layer, or the whole network.
            key: of the layer in the log, or `NETWORK`.
            choices: for the only region of the layer; of the whole network by region.
            tally: counts the trials.
            region: name of the layer's region in its own network; empty for the whole network.
        """
        outcomes: dict[int, TrialOutcome] = {}
        for number, choice in enumerate(choices):
            if (known := self.log.find(key, choice)) is not None:
                outcomes[number] = known
                tally.ended(choice, known)
        missing = [number for number in range(len(choices)) if number not in outcomes]
        trials: list[Choices] = [{region: choices[number]} if region else choices[number] for number in missing]
        for place, outcome in self.run(task, trials):
            choice = choices[missing[place]]
            self.log.add(key, choice, outcome)
            outcomes[missing[place]] = outcome
            tally.ended(choice, outcome)
        return [outcomes[number] for number in range(len(choices))]


class LayerResult(Record):
    """The result of tuning a layer."""

    layer: LayerKind
    trials: tuple[Trial, ...]
    """The default first."""

    @property
    def default(self) -> int | None:
        """Cycles by default; None when that failed."""
        return self.trials[0].outcome.cycles

    @property
    def best(self) -> Trial | None:
        """The fastest trial; None when all failed."""
        return best_trial(self.trials)

    def entry(self, region: str, choice: Choice) -> TuningEntry:
        """An entry of the tuning file; with an empty choice the layer takes as long as by default.

        A choice of when constants are fetched, which the network makes, costs the layer itself nothing.
        """
        best = self.best
        tuned = best.outcome.cycles if choice and best is not None else self.default
        return TuningEntry(region, self.layer.signature, self.default or tuned or 0, tuned or 0, choice)


def tune_layer(
    trials: TrialRunner, request: TuningRequest, target: Target, layer: LayerKind, place: tuple[int, int], show: Show
) -> LayerResult:
    """Search one layer; `place` is its number, from 1, and the number of all."""
    space = candidates(layer, target, request.seed)
    region, task = region_alone(layer.graph, target).name, _task(request, layer.graph, layer.near)
    tally = TrialTally(Progress(layer.names[0], *place, trials=min(request.trials, len(space.choices))), show)
    show(tally.progress)
    steps = search(space, request.trials, request.seed, layer.key)
    batch = next(steps)
    while True:
        outcomes = trials.batch(task, layer.key, batch, tally, region)
        try:
            batch = steps.send(outcomes)
        except StopIteration as stop:
            return LayerResult(layer, stop.value)


def _task(request: TuningRequest, graph: Graph, near: Sequence[str] = ()) -> MeasureTask:
    """The task of measuring a graph as a request says."""
    return make_task(graph, near, request.target, request.options.policy, request.measure)


class AcceptedChoices(Record):
    """The choices that make the network faster."""

    choices: Choices
    """By region name."""
    default: int
    """Cycles of the network, nothing chosen."""
    tuned: int
    """Cycles of the network with the choices; never more."""


def settle(
    trials: TrialRunner, task: MeasureTask, names: Sequence[str], gains: Mapping[str, TuningEntry], tally: TrialTally
) -> AcceptedChoices:
    """Try all choices together, then build up from the default one layer at a time, the largest gain first.

    Args:
        trials: makes trials.
        task: the whole network.
        names: the regions on engines that may be changed, in the network's order.
        gains: the best choice of each layer by itself, by region name.
        tally: counts trials.

    Raises:
        DovetailError: the network cannot be measured even by default.
    """
    (default,) = trials.batch(task, NETWORK, [{}], tally)
    if default.cycles is None:
        what = f"the network as the planner plans it cannot be measured: {default.error}"
        hint = "dovetail compile and dovetail run on the same model show the fault"
        raise DovetailError(what, where=task.target, hint=hint)

    def cycles(choices: Choices) -> int | None:
        """Cycles of the network; None when the trial failed, or there were enough of them."""
        return trials.batch(task, NETWORK, [choices], tally)[0].cycles if tally.progress.done < MOST_TRIALS else None

    best = AcceptedChoices({}, default.cycles, default.cycles)

    def improved(name: str, choice: Choice) -> AcceptedChoices:
        """The best choices, with a further one if that takes fewer cycles."""
        more = {**best.choices, name: {**best.choices.get(name, {}), **choice}}
        tuned = cycles(more)
        return best if tuned is None or tuned >= best.tuned else replace(best, choices=more, tuned=tuned)

    together: Choices = {name: entry.choice for name, entry in gains.items()}
    everything = cycles(together) if together else None
    for entry in sorted(gains.values(), key=lambda entry: entry.tuned_cycles - entry.default_cycles):  # stable
        best = improved(entry.name, entry.choice)
    if everything is not None and everything < best.tuned:
        best = replace(best, choices=together, tuned=everything)
    for name in names:
        if best.choices.get(name, {}).get(PLACEMENT) != "core":
            best = improved(name, {EARLY: "no"})
    return best


class TuningResult(Record):
    """The result of tuning a network."""

    tuning: Tuning
    layers: tuple[LayerResult, ...]
    dropped: tuple[str, ...]
    """Regions whose choice was good for the layer by itself and not in the network."""
    repeated: int
    """Trials that an earlier run had left in the log."""
    bound: int
    """Cycles of the network that no schedule is below (`dovetail.bounds`); 0 where that is not known."""


def tune(
    request: TuningRequest,
    show: Show = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> TuningResult:
    """Tune a model; all trials are in the log whatever happens.

    Args:
        request: what to tune.
        show: told after each trial.
        note: told what is worth a line of its own.

    Raises:
        DovetailError: the model, target, log or workers do not allow it; says what, where and what to do.
    """
    _check(request)
    target = load_target(request.target)
    graph = prepare(request.model, target, request.options)
    regions, every = tunable_layers(graph, target)
    layers = _selected(every, regions, request.layers)
    policy, rounding = target.policy(request.options.policy).name, rounding_of(request.model, target, request.options)
    content = request.model.read_bytes()
    of = msgspec.structs.asdict(identity(graph.name, content, target.name, policy, rounding.value))
    header = {"dovetail_tuning_log": LOG_SCHEMA, **of, "seed": request.seed, "measure": request.measure}
    with open_log(request.log, header, note) as log, runner(request.jobs, request.scheduler, request.boards) as run:
        trials, count = TrialRunner(log, run), len(layers)
        results = [tune_layer(trials, request, target, layer, (i, count), show) for i, layer in enumerate(layers, 1)]
        by_region = {name: result for result in results for name in result.layer.names}
        gains = {
            name: result.entry(name, best.choice)
            for name, result in by_region.items()
            if (best := result.best) is not None and best.choice
        }
        on_engines = [region.name for region in regions if region.name in by_region and region.engine is not None]
        tally = TrialTally(Progress("the network", count, count), show)
        kept = settle(trials, _task(request, graph), on_engines, gains, tally)
    entries = [
        msgspec.structs.replace(gains.get(name) or by_region[name].entry(name, {}), choice=kept.choices[name])
        for name in (region.name for region in regions)
        if name in kept.choices
    ]
    tuning = Tuning(
        **of,
        measure=request.measure,
        default_cycles=kept.default,
        tuned_cycles=kept.tuned,
        layers=tuple(entries),
    )
    bound = round(model_bound(operator_work(request.model, target, request.options), target).cycles)
    dropped = tuple(name for name in gains if name not in kept.choices)
    return TuningResult(tuning, tuple(results), dropped, len(log.used), bound)


def _check(request: TuningRequest) -> None:
    require_learner()
    boards, measures = request.boards, ", ".join(MEASURES)
    faults = [
        (
            request.trials < 1,
            f"{request.trials} trials are too few: the least is 1, the default",
            "--trials",
            "give 1 or more",
        ),
        (request.seed < 0, f"a seed is 0 or more, not {request.seed}", "--seed", "give 0 or more"),
        (
            boards and (request.jobs != 1 or request.scheduler is not None),
            f"{request.jobs} jobs cannot share one board",
            "--on",
            "leave out --jobs and --scheduler",
        ),
        (
            request.measure not in MEASURES,
            f"'{request.measure}' cannot be measured",
            "--measure",
            f"use one of {measures}",
        ),
    ]
    for board in boards:
        what = "every trial is another firmware, and nothing says how it is made for the board"
        faults.append((not board.io, what, board.where, "give --board-io FILE.c, and --load but for gdb and an agent"))
        faults.append((boards.count(board) > 1, "this board is named twice", board.where, "name each board once"))
    for is_wrong, what, where, hint in faults:
        if is_wrong:
            raise DovetailError(what, where=where, hint=hint)


def _selected(layers: Sequence[LayerKind], regions: Sequence[Region], wanted: Sequence[str]) -> tuple[LayerKind, ...]:
    """The layers to tune, of each only the regions that are wanted; all for none."""
    tunable = {name for layer in layers for name in layer.names}
    if not tunable:
        what = "there is nothing to choose: no layer goes to an engine, or to a kernel of the core, that can be tuned"
        hint = "dovetail explain says why; choose a model or target whose layers have knobs"
        raise TargetError(what, where="--target", hint=hint)
    if unknown := [name for name in wanted if name not in tunable]:
        is_region = any(region.name == unknown[0] for region in regions)
        what = "nothing can be chosen for the layer" if is_region else "there is no layer"
        hint = f"choose among {', '.join(sorted(tunable))}"
        raise DovetailError(f"{what} '{unknown[0]}'", where="--layers", hint=hint)
    selected = set(wanted or tunable)
    kept = (replace(layer, names=tuple(name for name in layer.names if name in selected)) for layer in layers)
    return tuple(layer for layer in kept if layer.names)
