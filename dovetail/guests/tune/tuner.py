"""Tunes a network: every distinct layer by itself, then what was found in the network as a whole.

The network has the last word on every choice: what does not make it faster is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import msgspec

from dovetail.compile import Options, prepare, reserved, rounding_of
from dovetail.errors import DovetailError, TargetError
from dovetail.guests.tune.floor import Floor, network_floor
from dovetail.guests.tune.log import LOG_SCHEMA, NETWORK, TrialLog, open_log
from dovetail.guests.tune.measure import MEASURES, MeasureTask, Runner, make_task, runner
from dovetail.guests.tune.search import (
    LayerKind,
    Trial,
    TrialOutcome,
    best_trial,
    candidates,
    distinct_layers,
    region_alone,
    require_learner,
    search,
)
from dovetail.ir.graph import Graph
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import plan
from dovetail.schedule.region import Region
from dovetail.schedule.tiles.tile import EARLY, PLACEMENT
from dovetail.schedule.tuning import Identity, Tuning, TuningEntry, identity
from dovetail.sim.line import Board
from dovetail.target.description import Target
from dovetail.target.pattern import Choice
from dovetail.target.registry import load_target

MOST_TRIALS = 48
"""Trials of the whole network."""

Choices = Mapping[str, Choice]
ToldTrial = Callable[[int, int | None, int | None], None]
"""Told after each trial of the network: how many were made, the default's cycles, the best."""


@dataclass(frozen=True, slots=True)
class AcceptedChoices:
    """What is kept."""

    choices: Choices
    """By region name."""
    default: int
    """Cycles of the network, nothing chosen."""
    tuned: int
    """Cycles of the network with the choices; never more."""


@dataclass
class _Trials:
    """Trials of the whole network, counted."""

    log: TrialLog
    run: Runner
    task: MeasureTask
    told: ToldTrial
    made: int = 0
    default: int | None = None
    best: int | None = None

    def cycles(self, choices: Choices) -> int | None:
        """Cycles of the network with these choices; None when the trial failed, or there were enough of them."""
        if self.made >= MOST_TRIALS:
            return None
        found = self.log.find(NETWORK, choices)
        if found is None:
            _, found = next(iter(self.run(self.task, [choices])))
            self.log.add(NETWORK, choices, found)
        self.made += 1
        if not choices:
            self.default = found.cycles
            if found.cycles is None:
                what = f"the network as the planner plans it cannot be measured: {found.error}"
                hint = "dovetail compile and dovetail run on the same model show the fault"
                raise DovetailError(what, where=self.task.target, hint=hint)
        self.best = min((c for c in (self.best, found.cycles) if c is not None), default=None)
        self.told(self.made, self.default, self.best)
        return found.cycles


def settle(
    log: TrialLog,
    run: Runner,
    task: MeasureTask,
    names: Sequence[str],
    gains: Mapping[str, TuningEntry],
    told: ToldTrial,
) -> AcceptedChoices:
    """Try all choices together, then build up from the default one layer at a time, the largest gain first.

    Args:
        log: where trials are found and kept.
        run: makes trials.
        task: the whole network.
        names: the regions on engines that may be changed, in the network's order.
        gains: the best choice of each layer by itself, by region name.
        told: after each trial.

    Raises:
        DovetailError: the network cannot be measured even by default.
    """
    trials = _Trials(log, run, task, told)
    default = trials.cycles({})
    assert default is not None
    together: Choices = {name: entry.choice for name, entry in gains.items()}
    everything = trials.cycles(together) if together else None
    kept: Choices = {}
    reached = default
    for entry in sorted(gains.values(), key=lambda entry: entry.tuned_cycles - entry.default_cycles):  # stable
        kept, reached = _improved(trials, kept, reached, entry.name, entry.choice)
    if everything is not None and everything < reached:
        kept, reached = together, everything
    for name in names:
        if kept.get(name, {}).get(PLACEMENT) != "core":
            kept, reached = _improved(trials, kept, reached, name, {EARLY: "no"})
    return AcceptedChoices(kept, default, reached)


def _improved(trials: _Trials, kept: Choices, reached: int, name: str, choice: Choice) -> tuple[Choices, int]:
    """What is kept and its cycles, with a further choice if that takes fewer."""
    tried = {**kept, name: {**kept.get(name, {}), **choice}}
    found = trials.cycles(tried)
    return (tried, found) if found is not None and found < reached else (kept, reached)


@dataclass(frozen=True)
class TuningRequest:
    """What to tune and how."""

    model: Path
    target: str
    """Name of a target, or the path of a target file."""
    log: Path
    """Where trials are kept; one that exists is gone on with."""
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
    """What is measured on, with `measure` "board"; trials are spread over several."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where tuning is."""

    layer: str
    """Name of the first region of the layer, or "the network"."""
    number: int
    """Of the layer, from 1."""
    count: int
    """Layers to tune."""
    done: int
    trials: int
    """Of this layer; 0 where their number is not known."""
    default: int | None
    """Cycles by default; None when that trial has not ended or has failed."""
    best: int | None


@dataclass(frozen=True, slots=True)
class LayerResult:
    """How tuning a layer went."""

    layer: LayerKind
    trials: tuple[Trial, ...]
    default: int | None
    """Cycles by default; None when that failed."""
    best: Trial | None
    """The fastest trial; None when all failed."""
    floor: Floor | None
    """What no choice does without; None where that is not known, or nanoseconds are measured."""


@dataclass(frozen=True, slots=True)
class TuningResult:
    """What tuning gave."""

    tuning: Tuning
    layers: tuple[LayerResult, ...]
    dropped: tuple[str, ...]
    """Regions whose choice was good for the layer by itself and not in the network."""
    repeated: int
    """Trials that an earlier run had left in the log."""
    floor: int
    """Cycles no choices of the layers tuned can bring the network below; 0 where none is known."""


def tune(
    request: TuningRequest,
    show: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> TuningResult:
    """Tune a model; what has been tried is in the log whatever happens.

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
    regions = partition(graph, target)
    default = plan(choose_layouts(graph, regions, target), target, reserved(graph, target))
    layers = _selected(distinct_layers(regions, default, target), regions, request.layers)
    policy = target.policy(request.options.policy).name
    of = identity(
        graph.name,
        request.model.read_bytes(),
        target.name,
        policy,
        rounding_of(request.model, target, request.options).value,
    )
    header = {
        "dovetail_tuning_log": LOG_SCHEMA,
        **msgspec.structs.asdict(of),
        "seed": request.seed,
        "measure": request.measure,
    }
    with open_log(request.log, header, note) as log, runner(request.jobs, request.scheduler, request.boards) as run:
        bench = TrialRunner(request, target, log, run)
        results = [bench.tune_layer(layer, (i, len(layers)), show) for i, layer in enumerate(layers, 1)]
        return _finish(bench, graph, regions, results, of, show)


def undivided(target: Target) -> Target:
    """The target without the rewrites that compute something in parts."""
    policies = (replace(p, rewrites=tuple(r for r in p.rewrites if not r.divides)) for p in target.policies)
    return replace(target, policies=tuple(policies))


def least_cycles(
    model: Path, target: Target, options: Options, known: Mapping[str, Floor | None] = MappingProxyType({})
) -> int:
    """The floor of a network, whose layers may be computed in parts or not: the lower of both; 0 where none is known.

    Args:
        model: its file.
        target: the machine.
        options: of compiling it.
        known: floors of layers by their keys; others are found.

    Raises:
        DovetailError: the network cannot be compiled for the target; says why.
    """
    found, each = list[int](), dict(known)
    for graph in (prepare(model, way, options) for way in (target, undivided(target))):
        regions = partition(graph, target)
        default = plan(choose_layouts(graph, regions, target), target, reserved(graph, target))
        layers = distinct_layers(regions, default, target)
        each |= {layer.key: candidates(layer, target, 0).floor for layer in layers if layer.key not in each}
        floors = {name: own for layer in layers if (own := each[layer.key]) for name in layer.names}
        found.append(network_floor(regions, floors, target))
    return min(found)


@dataclass(frozen=True)
class TrialRunner:
    """Makes trials: from the log where they are, else by the workers, which are then written to the log."""

    request: TuningRequest
    target: Target
    log: TrialLog
    run: Runner

    def task(self, graph: Graph, near: Sequence[str]) -> MeasureTask:
        """The task of measuring a graph as this request says."""
        request = self.request
        return make_task(graph, near, request.target, request.options.policy, request.measure)

    def batch(
        self, task: MeasureTask, key: str, choices: Sequence[Choice], name: str, ended: Callable[[TrialOutcome], None]
    ) -> list[TrialOutcome]:
        """Outcomes of a batch of choices for one layer (named `name` in its own network), in its order."""
        found = [self.log.find(key, choice) for choice in choices]
        missing = [index for index, outcome in enumerate(found) if outcome is None]
        for outcome in found:
            if outcome is not None:
                ended(outcome)
        for number, outcome in self.run(task, [{name: choices[index]} for index in missing]):
            index = missing[number]
            self.log.add(key, choices[index], outcome)
            found[index] = outcome
            ended(outcome)
        return [outcome for outcome in found if outcome is not None]

    def tune_layer(self, layer: LayerKind, place: tuple[int, int], show: Callable[[Progress], None]) -> LayerResult:
        """Search one layer."""
        request = self.request
        space = candidates(layer, self.target, request.seed)
        name, task = region_alone(layer.graph, self.target).name, self.task(layer.graph, layer.near)
        total = min(request.trials, len(space.choices))
        progress = Progress(layer.names[0], *place, 0, total, None, None)

        def ended(outcome: TrialOutcome) -> None:
            nonlocal progress
            known = [c for c in (progress.best, outcome.cycles) if c is not None]
            progress = replace(progress, done=progress.done + 1, best=min(known, default=None))
            show(progress)

        show(progress)
        steps = search(space, request.trials, request.seed, layer.key)
        batch = next(steps)
        while True:
            outcomes = self.batch(task, layer.key, batch, name, ended)
            if progress.default is None and not batch[0]:
                progress = replace(progress, default=outcomes[0].cycles)
            try:
                batch = steps.send(outcomes)
            except StopIteration as stop:
                trials: tuple[Trial, ...] = stop.value
                floor = space.floor if request.measure != "host" else None
                return LayerResult(layer, trials, trials[0].outcome.cycles, best_trial(trials), floor)


def _check(request: TuningRequest) -> None:
    require_learner()
    if request.trials < 1:
        raise DovetailError(
            f"{request.trials} trials are too few: the least is 1, the default", where="--trials", hint="give 1 or more"
        )
    if request.seed < 0:
        raise DovetailError(f"a seed is 0 or more, not {request.seed}", where="--seed", hint="give 0 or more")
    if request.boards and (request.jobs != 1 or request.scheduler is not None):
        raise DovetailError(
            f"{request.jobs} jobs cannot share one board", where="--on", hint="leave out --jobs and --scheduler"
        )
    for board in request.boards:
        if not board.io:
            what = "every trial is another firmware, and nothing says how it is made for the board"
            hint = "give --board-io FILE.c, and --load but for gdb and an agent"
            raise DovetailError(what, where=board.where, hint=hint)
        if request.boards.count(board) > 1:
            raise DovetailError("this board is named twice", where=board.where, hint="name each board once")
    if request.measure not in MEASURES:
        raise DovetailError(
            f"'{request.measure}' cannot be measured", where="--measure", hint=f"use one of {', '.join(MEASURES)}"
        )


def _selected(layers: Sequence[LayerKind], regions: Sequence[Region], wanted: Sequence[str]) -> tuple[LayerKind, ...]:
    """The layers to tune, of each only the regions asked for."""
    tunable = {name for layer in layers for name in layer.names}
    if not tunable:
        raise TargetError(
            "there is nothing to choose: no layer goes to an engine, or to a kernel of the core, that can be tuned",
            where="--target",
            hint="dovetail explain says why; choose a model or target whose layers have knobs",
        )
    for name in wanted:
        if name not in tunable:
            known = {region.name for region in regions}
            what = f"nothing can be chosen for the layer '{name}'" if name in known else f"there is no layer '{name}'"
            raise DovetailError(what, where="--layers", hint=f"choose among {', '.join(sorted(tunable))}")
    if not wanted:
        return tuple(layers)
    kept = (replace(layer, names=tuple(name for name in layer.names if name in wanted)) for layer in layers)
    return tuple(layer for layer in kept if layer.names)


def _finish(
    bench: TrialRunner,
    graph: Graph,
    regions: Sequence[Region],
    results: Sequence[LayerResult],
    of: Identity,
    show: Callable[[Progress], None],
) -> TuningResult:
    """Keep of the best choices what makes the network faster."""
    gains: dict[str, TuningEntry] = {}
    for result in results:
        best = result.best
        if best is None or best.outcome.cycles is None or not best.choice:
            continue
        before = result.default if result.default is not None else best.outcome.cycles
        for name in result.layer.names:
            gains[name] = TuningEntry(name, result.layer.signature, before, best.outcome.cycles, best.choice)

    def told(done: int, before: int | None, best: int | None) -> None:
        show(Progress("the network", len(results), len(results), done, 0, before, best))

    names = [region.name for region in regions if any(region.name in result.layer.names for result in results)]
    cut = [region.name for region in regions if region.name in names and region.engine is not None]
    kept = settle(bench.log, bench.run, bench.task(graph, ()), cut, gains, told)
    same = {
        n: TuningEntry(n, r.layer.signature, r.default or 0, r.default or 0, {}) for r in results for n in r.layer.names
    }
    # one that only says when constants are fetched costs the layer itself nothing
    entries = {name: gains.get(name, same[name]) for name in kept.choices}
    layers = tuple(
        msgspec.structs.replace(entries[region.name], choice=kept.choices[region.name])
        for region in regions
        if region.name in entries
    )
    identified = msgspec.structs.asdict(of)
    tuning = Tuning(
        **identified,
        measure=bench.request.measure,
        default_cycles=kept.default,
        tuned_cycles=kept.tuned,
        layers=layers,
    )
    dropped = tuple(name for name in gains if name not in entries)
    floors = {name: each.floor for each in results if each.floor for name in each.layer.names}
    known = {each.layer.key: each.floor for each in results if bench.request.measure != "host"}
    floor = min(
        network_floor(regions, floors, bench.target),
        least_cycles(bench.request.model, bench.target, bench.request.options, known),
    )
    return TuningResult(tuning, tuple(results), dropped, len(bench.log.used), floor)
