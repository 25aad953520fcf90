"""The search for the best choice of a layer.

It tries the default, the cost model's best few, then batches ranked by a model learned from all trials so far.
A proposal depends on the seed and on the outcomes of the batches before, in their order. So a search that is
repeated with the same outcomes, from a log or from any number of workers, proposes the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from importlib.util import find_spec
from math import log2

import numpy as np
import numpy.typing as npt

from dovetail.errors import MissingExtraError
from dovetail.guests.tune.layers import LayerKind, LayerModel
from dovetail.records import Record
from dovetail.schedule.knobs import CONTEXT, canonical
from dovetail.schedule.tiles.clock import Estimate
from dovetail.target.description import Target
from dovetail.target.pattern import Choice, Space, Value


class TrialOutcome(Record):
    """How a trial ended."""

    cycles: int | None
    """Cycles (on this computer nanoseconds) of an inference; None when it failed."""
    error: str = ""
    """Why it failed."""


def features(choice: Choice, cost: Estimate, knobs: Mapping[str, tuple[Value, ...]]) -> list[float]:
    """A choice as the learned model sees it: settings, their logarithms, and the cost model's figures."""
    row: list[float] = []
    for name, values in knobs.items():
        value = choice.get(name, values[0])
        number = float(value) if isinstance(value, int) else float(values.index(value))
        row += [number, log2(1 + number)]
    return row + [log2(1 + count) for count in (cost.cycles, cost.tiles, cost.nbytes, cost.engine, cost.copying)]


BATCH = 16
"""Trials proposed together, whatever the number of workers."""
EXPLORATION = 0.125
"""Share of a batch drawn at random."""
MOST_CANDIDATES = 20_000
"""Choices looked at; a larger space is sampled."""
_FAILED = 4.0
"""Factor by which a failing trial counts as slower than the slowest that did not fail."""
_PARAMETERS = {
    **{"objective": "l2", "num_leaves": 15, "min_data_in_leaf": 3, "learning_rate": 0.15},
    **{"num_threads": 1, "deterministic": True, "force_row_wise": True, "verbose": -1},
}
_ROUNDS = 60

Floats = npt.NDArray[np.float64]


class Candidates(Record):
    """The choices that may be tried for a layer, the default first."""

    choices: tuple[Choice, ...]
    """Canonical choices; the first is empty: nothing chosen."""
    estimates: npt.NDArray[np.int64]
    """Cycles the cost model thinks each takes."""
    features: Floats
    """One row per choice."""


class Trial(Record):
    """A choice and how it ended."""

    choice: Choice
    outcome: TrialOutcome


def candidates(layer: LayerKind, target: Target, seed: int) -> Candidates:
    """Every allowed choice of a layer that fits the memory, or a sample of them.
    Raises DovetailError where the layer does not fit the target even by default."""
    model = LayerModel.of(layer, target)
    knobs = {knob.name: knob.values for knob in model.space.knobs if knob.name not in CONTEXT}
    space = Space(tuple(knob for knob in model.space.knobs if knob.name in knobs), model.space.problem)
    default = {name: value for name, value in model.default.items() if name in knobs}
    points = [point for point in _points(space, _generator(seed, layer.key, "points")) if point != default]
    rows = [(point, cost) for point in points if (cost := model.estimator(point)) is not None]
    # The planner may have moved an end away to make room; then nothing is known of its own choice but that it exists.
    first = model.planned or Estimate(max(1, model.region.macs))
    costs = [first, *(cost for _, cost in rows)]
    table = [features(point, cost, knobs) for point, cost in ((default, first), *rows)]
    choices = ({}, *(canonical(point) for point, _ in rows))
    return Candidates(choices, np.array([cost.cycles for cost in costs]), np.array(table))


def _points(space: Space, random: np.random.Generator) -> Sequence[dict[str, Value]]:
    """All allowed points of a small space; of a large one, those among a random sample."""
    if space.size <= MOST_CANDIDATES:
        return list(space.points())
    chosen = sorted(set(random.integers(0, space.size, MOST_CANDIDATES).tolist()))
    points = (space.point(index) for index in chosen)
    return [point for point in points if space.problem(point) is None]


def search(
    space: Candidates, trials: int, seed: int, key: str
) -> Generator[tuple[Choice, ...], Sequence[TrialOutcome], tuple[Trial, ...]]:
    """Propose batches and be sent their outcomes; returns all trials, in the order they were proposed.

    Args:
        space: the choices that may be tried.
        trials: how many, the default included; fewer are made when there are no more candidates.
        seed: of the exploration.
        key: of the layer, so that layers explore differently.
    """
    random = _generator(seed, key, "exploration")
    count = min(trials, len(space.choices))
    by_estimate = [0, *(int(index) for index in 1 + np.argsort(space.estimates[1:], kind="stable"))]
    done: list[int] = []
    made: list[Trial] = []
    while len(done) < count:
        size = min(BATCH, count - len(done))
        if not done or count == len(space.choices):  # nothing to rank when all are tried anyway
            batch = by_estimate[len(done) : len(done) + size]
        else:
            batch = _ranked(space, done, [trial.outcome for trial in made], size, random)
        outcomes = yield tuple(space.choices[index] for index in batch)
        done += batch
        made += [Trial(space.choices[i], outcome) for i, outcome in zip(batch, outcomes, strict=True)]
    return tuple(made)


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The fastest trial, of equal ones the first; None when all failed."""
    ended = [trial for trial in trials if trial.outcome.cycles is not None]
    return min(ended, key=lambda trial: trial.outcome.cycles or 0) if ended else None


def _ranked(
    space: Candidates, done: Sequence[int], outcomes: Sequence[TrialOutcome], size: int, random: np.random.Generator
) -> list[int]:
    """The candidates the learned model ranks first, and a few at random."""
    left = np.setdiff1d(np.arange(len(space.choices)), done)
    predicted = _predict(space, done, outcomes, left)
    order = left[np.lexsort((left, space.estimates[left], predicted))]
    explored = min(round(EXPLORATION * size), len(left) - size)
    best, rest = order[: size - explored], order[size - explored :]
    return [int(index) for index in (*best, *random.choice(rest, explored, replace=False))]


def _predict(
    space: Candidates, done: Sequence[int], outcomes: Sequence[TrialOutcome], left: npt.NDArray[np.int64]
) -> Floats:
    """log(cycles) of untried candidates: boosting starts from the cost model's estimate and learns what it misses."""
    import lightgbm

    known = [outcome.cycles for outcome in outcomes if outcome.cycles is not None]
    guess: Floats = np.log(space.estimates.astype(np.float64))
    if not known:
        return guess[left]
    worst = _FAILED * max(known)
    target = np.log([float(o.cycles) if o.cycles is not None else worst for o in outcomes])
    tried = np.array(done)
    data = lightgbm.Dataset(space.features[tried], target, init_score=guess[tried])
    model = lightgbm.train(_PARAMETERS, data, _ROUNDS)
    learned: Floats = np.asarray(model.predict(space.features[left]), dtype=np.float64)
    return learned + guess[left]


def require_learner() -> None:
    """Raises MissingExtraError when LightGBM is not installed."""
    if find_spec("lightgbm") is None:
        raise MissingExtraError("lightgbm", "tune", "tuning")


def _generator(seed: int, *parts: str) -> np.random.Generator:
    digest = hashlib.sha256("\n".join((str(seed), *parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))
