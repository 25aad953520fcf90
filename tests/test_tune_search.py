"""The search: deterministic, the default first, better than chance, whole where the space is small, and quick."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from dovetail.bounds import model_bound
from dovetail.codegen.emit.plan_file import model_work
from dovetail.guests.tune.cost import estimator
from dovetail.guests.tune.layers import region_alone
from dovetail.guests.tune.measure import TrialOutcome, make_task, measure, measured
from dovetail.guests.tune.search import Candidates, Trial, best_trial, candidates, search
from dovetail.schedule.partition import partition
from dovetail.targets import load_target
from firmware import require_chip
from networks import Net
from tuning_cases import layer_graph, tunable

pytest.importorskip("lightgbm", reason="the search needs lightgbm (dovetail[tune])")


def searched(found: Candidates, trials: int, cost: Callable[[int], TrialOutcome], seed: int = 0) -> tuple[Trial, ...]:
    """All trials of a search in which candidate i costs `cost(i)`."""
    index = {id(choice): number for number, choice in enumerate(found.choices)}
    steps = search(found, trials, seed, "layer")
    batch = next(steps)
    while True:
        try:
            batch = steps.send([cost(index[id(choice)]) for choice in batch])
        except StopIteration as stop:
            made: tuple[Trial, ...] = stop.value
            return made


def invented(count: int) -> tuple[Candidates, np.ndarray]:
    """Candidates with four knobs, and true costs the estimate knows only half of."""
    random = np.random.default_rng(0)
    knobs = random.integers(0, 8, (count, 4)).astype(float)
    known = 10_000 + 900 * knobs[:, 0] + 100 * np.abs(knobs[:, 1] - 3)
    hidden = 2500 * (knobs[:, 2] != 5) + 700 * np.abs(knobs[:, 3] - 6)
    estimates = known.astype(np.int64)
    choices = tuple({"number": number} for number in range(count))
    return Candidates(choices, estimates, np.c_[knobs, np.log2(estimates)]), (known + hidden).astype(int)


def test_the_search_learns_what_the_cost_model_misses() -> None:
    found, costs = invented(4000)
    trials = searched(found, 200, lambda i: TrialOutcome(int(costs[i])))
    best = best_trial(trials)
    assert best is not None and trials[0].choice == {"number": 0} and len(trials) == 200
    chance = [min(costs[np.random.default_rng(seed).choice(4000, 200, replace=False)]) for seed in range(20)]
    rank = int((costs < best.outcome.cycles).sum())
    print(f"search {best.outcome.cycles} (rank {rank}), best {costs.min()}, chance {np.mean(chance):.0f}")
    assert rank <= 4 and best.outcome.cycles < np.mean(chance)
    assert len({str(trial.choice) for trial in trials}) == 200, "nothing is tried twice"
    assert trials == searched(found, 200, lambda i: TrialOutcome(int(costs[i])))
    assert trials != searched(found, 200, lambda i: TrialOutcome(int(costs[i])), seed=1)


def test_a_small_space_is_tried_whole_and_failures_are_never_chosen() -> None:
    found, costs = invented(40)
    trials = searched(found, 500, lambda i: TrialOutcome(None, "no") if i % 3 else TrialOutcome(int(costs[i])))
    best = best_trial(trials)
    assert len(trials) == 40 and best is not None
    assert best.outcome.cycles == min(costs[::3])
    assert best_trial(searched(found, 10, lambda i: TrialOutcome(None, "no"))) is None
    ties = searched(found, 40, lambda i: TrialOutcome(7))
    assert best_trial(ties) == ties[0], "of equal ones the default"


def test_failing_trials_do_not_stop_learning() -> None:
    found, costs = invented(1000)
    bad = np.arange(1000) % 5 == 0
    trials = searched(found, 80, lambda i: TrialOutcome(None, "no") if bad[i] else TrialOutcome(int(costs[i])))
    best = best_trial(trials)
    assert best is not None and (costs[~bad] < best.outcome.cycles).mean() < 0.02


def test_500_trials_of_the_cost_model_take_seconds() -> None:
    target = load_target("ne16")
    layer = tunable(layer_graph((28, 28, 48), 96, 3), target)
    start = time.process_time()
    found = candidates(layer, target, 0)
    task = make_task(layer.graph, layer.near, "ne16", None, "model")
    name = region_alone(layer.graph, target).name
    trials = searched(found, 500, lambda i: measure(task, {name: found.choices[i]}))
    seconds = time.process_time() - start
    print(f"500 of {len(found.choices)} choices in {seconds:.1f} s (20 s wanted)")
    assert len(trials) == 500 and not any(trial.outcome.error for trial in trials)
    assert min(trial.outcome.cycles or 0 for trial in trials) == found.estimates.min()
    assert seconds < 60


@pytest.mark.parametrize("name", ["riscv", "riscv_big_small"])
def test_the_model_and_the_bound_know_how_many_cores_share_a_layer(name: str) -> None:
    """Against `iss`, which computes it on all of them."""
    require_chip()
    target = load_target(name)
    net = Net("shared", (16, 16, 16))
    graph = net.finish(net.convolution(net.x, 32))
    (region,) = (one for one in partition(graph, target) if not one.is_view)
    bound, estimate = model_bound(model_work(graph), target).cycles, estimator(region, target, ())({})
    cycles = measured(graph, target, None, {})
    assert estimate is not None
    print(f"{name}: bound {bound:.0f}, estimated {estimate.cycles}, {cycles} in iss")
    assert 0 < bound < cycles and abs(estimate.cycles / cycles - 1) < 0.1


@pytest.mark.parametrize(("rows", "outputs"), [(3, 32), (8, 24), (5, 16)])
def test_the_model_knows_the_part_of_each_core(rows: int, outputs: int) -> None:
    """Whole rows are dealt out, and parts of the same weights read them in one order."""
    require_chip()
    target, net = load_target("riscv_big_small"), Net("shared", (rows, rows, 28))
    graph = net.finish(net.convolution(net.x, outputs, 1 if rows == 3 else 3))
    (region,) = (one for one in partition(graph, target) if not one.is_view)
    estimate, cycles = estimator(region, target, ())({}), measured(graph, target, None, {})
    assert estimate is not None
    print(f"{rows} rows: estimated {estimate.cycles}, {cycles} in iss")
    assert abs(estimate.cycles / cycles - 1) < 0.08
