"""The distinct layers of a network, and the search for the best choice of one.

The search tries the default, the cost model's best few, then batches ranked by a model learned from all trials so far.
What is proposed depends on the seed and on the outcomes of the batches before, in their order; so a search that is
repeated with the same outcomes, from a log or from any number of workers, proposes the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from dovetail.compile import reserved
from dovetail.errors import DovetailError, MissingExtraError
from dovetail.guests.tune.cost import Estimate, estimator
from dovetail.guests.tune.floor import Floor, core_floor
from dovetail.ir.graph import Graph
from dovetail.kernels import core_traits, offered
from dovetail.schedule.assign import assign
from dovetail.schedule.knobs import CONTEXT, canonical, region_space
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import Plan, plan
from dovetail.schedule.region import LaidRegion, Region
from dovetail.schedule.shipped import key_of, signature
from dovetail.schedule.tiles.tile import BUFFERS, EARLY, ORDER, PLACEMENT, TILE, offload_choice
from dovetail.target.description import Target
from dovetail.target.pattern import Choice, Space, Value


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a trial ended."""

    cycles: int | None
    """Cycles (on this computer nanoseconds) of an inference; None when it failed."""
    error: str = ""
    """Why it failed."""


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer: all regions of the network with the same computation, between the same memories."""

    key: str
    """Names it in the log: the signature, and the ends that lie in the engine's memory."""
    signature: str
    graph: Graph
    """The first such region as a network of its own, weights kept."""
    near: tuple[str, ...]
    """Inputs and outputs of `graph` that lie in the engine's memory in the network's default plan."""
    names: tuple[str, ...]
    """The regions, in the network's order."""


def region_alone(graph: Graph, target: Target) -> Region:
    """The one region of a layer's own network.
    Raises DovetailError where by itself it is not computed as one region."""
    regions = partition(graph, target)
    if len(regions) != 1:
        hint = "tune the whole network instead, or another layer"
        raise DovetailError("by itself this layer is not one region", where=graph.name, hint=hint)
    return regions[0]


def distinct_layers(regions: Sequence[Region], default: Plan, target: Target) -> tuple[LayerKind, ...]:
    """The layers that have something to choose, each kind once, in the network's order; `default` is its default
    plan, which says in which memory values lie."""
    program, found = default.program, dict[str, LayerKind]()
    for region in regions:
        if region.engine is None and not region_space(region, target).knobs:
            continue
        alone = replace(region.graph, name=region.name)
        ends = (*alone.inputs, *alone.outputs)
        memories = {value: program.buffers[program.values[value].buffer].memory for value in ends}
        home = region.engine.memory if region.engine else None
        near = tuple(value for value in ends if memories[value] == home)
        key = key_of(alone, frozenset(near))
        if key in found:
            found[key] = replace(found[key], names=(*found[key].names, region.name))
        elif _stands_alone(alone, region, target):
            found[key] = LayerKind(key, signature(alone), alone, near, (region.name,))
    return tuple(found.values())


def tunable_layers(
    graph: Graph, target: Target, near: Collection[str] = ()
) -> tuple[tuple[Region, ...], tuple[LayerKind, ...]]:
    """The regions of a network with nothing chosen, and its distinct layers that have something to choose; the inputs
    and outputs `near` lie in the engine's memory."""
    regions = partition(graph, target)
    return regions, distinct_layers(regions, planned(graph, regions, target, near), target)


def planned(graph: Graph, regions: Sequence[Region], target: Target, near: Collection[str] = ()) -> Plan:
    """The plan of a network's regions; raises PlanError where it does not fit."""
    return plan(choose_layouts(graph, regions, target, near), target, reserved(graph, target), near)


def _stands_alone(graph: Graph, region: Region, target: Target) -> bool:
    """Whether the region by itself goes to the same offload as in the network, or to the core as there."""
    try:
        alone = region_alone(graph, target)
    except DovetailError:
        return False
    if alone.offload is None or region.offload is None:
        return alone.engine is region.engine is None
    return alone.offload.name == region.offload.name


def resolved_default(region: Region, target: Target, near: Collection[str]) -> dict[str, Value]:
    """The whole choice that stands for the planner's own, for a region that is a network by itself.
    Raises PlanError where the layer does not fit."""
    if region.engine is None:
        return dict(offered(region.graph, core_traits(target.core)).default)
    (part,) = LaidRegion.of(region).parts
    own = {PLACEMENT: region.engine.name, **offload_choice(part, part.match)}
    if target.works_in_place(region.engine):
        return own
    tiling = plan(choose_layouts(region.graph, [region], target), target, {}, near).tilings[region.name]
    sizes = tiling.shape[1:] if len(tiling.shape) == 4 else tiling.shape[-1:]
    names = TILE if len(tiling.shape) == 4 else TILE[2:]
    buffers = tiling.buffers if len(tiling.tiles) > 1 else 2
    order = "channels" if tiling.channels_outer else "positions"
    return {**own, **dict(zip(names, sizes, strict=True)), BUFFERS: buffers, ORDER: order, EARLY: "yes"}


def placed(region: Region, default: Choice, target: Target) -> Choice:
    """A default, or the core where a compile that is told nothing computes the layer there; nothing chosen of a kernel,
    of which cores that share it choose for themselves."""
    if region.engine is None:
        return {}
    if assign(region.graph, (region,), target, {}).regions[0].engine is not None:
        return default
    return {PLACEMENT: "core"}


def features(choice: Mapping[str, Value], found: Estimate, knobs: Mapping[str, tuple[Value, ...]]) -> list[float]:
    """What the learned model sees of a choice: settings, their logarithms, and what the cost model thinks of it."""
    from math import log2

    row: list[float] = []
    for name, values in knobs.items():
        value = choice.get(name, values[0])
        number = float(value) if isinstance(value, int) else float(values.index(value))
        row += [number, log2(1 + number)]
    return row + [log2(1 + count) for count in (found.cycles, found.tiles, found.nbytes, found.engine, found.copying)]


BATCH = 16
"""Trials proposed together, whatever the number of workers."""
EXPLORATION = 0.125
"""Share of a batch drawn at random."""
MOST_CANDIDATES = 20_000
"""Choices looked at; a larger space is sampled."""
_FAILED = 4.0
"""What a failing trial counts as, times the slowest that did not fail."""
_PARAMETERS = {
    **{"objective": "l2", "num_leaves": 15, "min_data_in_leaf": 3, "learning_rate": 0.15},
    **{"num_threads": 1, "deterministic": True, "force_row_wise": True, "verbose": -1},
}
_ROUNDS = 60

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """What may be tried for a layer, the default first."""

    choices: tuple[Choice, ...]
    """Canonical choices; the first is empty: nothing chosen."""
    estimates: npt.NDArray[np.int64]
    """Cycles the cost model thinks each takes."""
    features: Floats
    """One row per choice."""
    floor: Floor | None = None
    """None where no choice is on the engine. Of a sampled space, that of the sample."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A choice and how it ended."""

    choice: Choice
    outcome: TrialOutcome


def candidates(layer: LayerKind, target: Target, seed: int) -> Candidates:
    """Every allowed choice of a layer that fits the memory, or a sample of them.
    Raises DovetailError where the layer does not fit the target even by default."""
    region = region_alone(layer.graph, target)
    space = region_space(region, target)
    space = Space(tuple(knob for knob in space.knobs if knob.name not in CONTEXT), space.problem)
    model = estimator(region, target, layer.near)
    default = resolved_default(region, target, layer.near)
    ranges = {knob.name: knob.values for knob in space.knobs}
    rows: list[tuple[Choice, Estimate]] = []
    # The planner may have moved an end away to make room; then nothing is known of its own choice but that it exists.
    first = model.estimate(placed(region, default, target)) or Estimate(max(1, region.macs), 1, 0, 0, 0)
    same = {name: value for name, value in default.items() if name in ranges}
    for point in _points(space, _generator(seed, layer.key, "points")):
        found = model.estimate(point) if point != same else None
        if found is not None:
            rows.append((point, found))
    known = [first, *(found for _, found in rows)] if model.estimate(default) else [found for _, found in rows]
    table = [features(same, first, ranges), *(features(point, found, ranges) for point, found in rows)]
    estimates = np.array([first.cycles, *(found.cycles for _, found in rows)])
    floor = _floor([found for found in known if found.engine], region) if region.engine else core_floor(region, target)
    return Candidates(({}, *(canonical(point) for point, _ in rows)), estimates, np.array(table), floor)


def _floor(estimates: Sequence[Estimate], region: Region) -> Floor | None:
    """The floor of a layer by the estimates of its choices on the engine."""
    if not estimates:
        return None
    engine, copying = min(found.engine for found in estimates), min(found.copying for found in estimates)
    cycles = min(max(found.engine, found.copying) for found in estimates)
    if region.offload is not None and region.match is not None and region.offload.floor is not None:
        engine = cycles = region.offload.floor(region.match)
    return Floor(engine, copying, cycles, min(found.fetching for found in estimates))


def _points(space: Space, random: np.random.Generator) -> Sequence[dict[str, Value]]:
    """All allowed points of a small space; of a large one, those among a random sample."""
    if space.size <= MOST_CANDIDATES:
        return list(space.points())
    chosen = sorted(set(random.integers(0, space.size, MOST_CANDIDATES).tolist()))
    points = (space.point(index) for index in chosen)
    return [point for point in points if space.problem(point) is None]


def search(
    found: Candidates, trials: int, seed: int, key: str
) -> Generator[tuple[Choice, ...], Sequence[TrialOutcome], tuple[Trial, ...]]:
    """Propose batches and be sent their outcomes; returns all trials, in the order they were proposed.

    Args:
        found: what may be tried.
        trials: how many, the default included; fewer are made when there are no more candidates.
        seed: of the exploration.
        key: of the layer, so that layers explore differently.
    """
    random = _generator(seed, key, "exploration")
    count = min(trials, len(found.choices))
    by_estimate = [0, *(int(index) for index in 1 + np.argsort(found.estimates[1:], kind="stable"))]
    done: list[int] = []
    made: list[Trial] = []
    while len(done) < count:
        size = min(BATCH, count - len(done))
        if not done or count == len(found.choices):  # nothing to rank when all are tried anyway
            batch = by_estimate[len(done) : len(done) + size]
        else:
            batch = _ranked(found, done, [trial.outcome for trial in made], size, random)
        outcomes = yield tuple(found.choices[index] for index in batch)
        done += batch
        made += [Trial(found.choices[i], outcome) for i, outcome in zip(batch, outcomes, strict=True)]
    return tuple(made)


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The fastest trial, of equal ones the first; None when all failed."""
    ended = [trial for trial in trials if trial.outcome.cycles is not None]
    return min(ended, key=lambda trial: trial.outcome.cycles or 0) if ended else None


def _ranked(
    found: Candidates, done: Sequence[int], outcomes: Sequence[TrialOutcome], size: int, random: np.random.Generator
) -> list[int]:
    """The candidates the learned model ranks first, and a few at random."""
    left = np.setdiff1d(np.arange(len(found.choices)), done)
    predicted = _predict(found, done, outcomes, left)
    order = left[np.lexsort((left, found.estimates[left], predicted))]
    explored = min(round(EXPLORATION * size), len(left) - size)
    best, rest = order[: size - explored], order[size - explored :]
    return [int(index) for index in (*best, *random.choice(rest, explored, replace=False))]


def _predict(
    found: Candidates, done: Sequence[int], outcomes: Sequence[TrialOutcome], left: npt.NDArray[np.int64]
) -> Floats:
    """log(cycles) of untried candidates: boosting starts from the cost model's estimate and learns what it misses."""
    import lightgbm

    known = [outcome.cycles for outcome in outcomes if outcome.cycles is not None]
    guess: Floats = np.log(found.estimates.astype(np.float64))
    if not known:
        return guess[left]
    worst = _FAILED * max(known)
    target = np.log([float(o.cycles) if o.cycles is not None else worst for o in outcomes])
    tried = np.array(done)
    data = lightgbm.Dataset(found.features[tried], target, init_score=guess[tried])
    model = lightgbm.train(_PARAMETERS, data, _ROUNDS)
    learned: Floats = np.asarray(model.predict(found.features[left]), dtype=np.float64)
    return learned + guess[left]


def require_learner() -> None:
    """Raises MissingExtraError when LightGBM is not installed."""
    if find_spec("lightgbm") is None:
        raise MissingExtraError("lightgbm", "tune", "tuning")


def _generator(seed: int, *parts: str) -> np.random.Generator:
    digest = hashlib.sha256("\n".join((str(seed), *parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))
