"""The last word on every choice: the whole network. What does not make it faster is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.errors import DovetailError
from dovetail.plan.tiles import EARLY, PLACEMENT
from dovetail.target.knobs import Choice
from dovetail.tune.file import Entry
from dovetail.tune.log import NETWORK, TrialLog
from dovetail.tune.measure import Outcome, Task
from dovetail.tune.workers import Runner

MOST_TRIALS = 48
"""Trials of the whole network."""

Choices = Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class Settled:
    """What is kept."""

    choices: Choices
    """By region name."""
    default: int
    """Cycles of the network, nothing chosen."""
    tuned: int
    """Cycles of the network with the choices; never more."""


def settle(
    log: TrialLog,
    run: Runner,
    task: Task,
    names: Sequence[str],
    gains: Mapping[str, Entry],
    told: Callable[[int, int | None, int | None], None],
) -> Settled:
    """Try all choices together, then build up from the default one layer at a time, the largest gain first.

    Args:
        log: where trials are found and kept.
        run: makes trials.
        task: the whole network.
        names: the regions that may be changed, in the network's order.
        gains: the best choice of each layer by itself, by region name.
        told: after each trial: how many were made, the default's cycles, the best.

    Raises:
        DovetailError: the network cannot be measured even by default.
    """
    made = 0
    default: int | None = None
    best: int | None = None

    def cycles(choices: Choices) -> int | None:
        nonlocal made, best
        outcome = _trial(log, run, task, choices)
        made += 1
        if outcome.cycles is not None:
            best = outcome.cycles if best is None else min(best, outcome.cycles)
        elif not choices:
            raise DovetailError(f"the network as the planner plans it cannot be measured: {outcome.error}")
        told(made, default, best)
        return outcome.cycles

    default = cycles({})
    assert default is not None
    together: Choices = {name: entry.choice for name, entry in gains.items()}
    everything = cycles(together) if together else None
    kept: Choices = {}
    reached = default

    def improve(name: str, choice: Choice) -> None:
        nonlocal kept, reached
        tried = {**kept, name: {**kept.get(name, {}), **choice}}
        found = cycles(tried) if made < MOST_TRIALS else None
        if found is not None and found < reached:
            kept, reached = tried, found

    for entry in sorted(gains.values(), key=lambda entry: entry.tuned_cycles - entry.default_cycles):  # stable
        improve(entry.name, entry.choice)
    if everything is not None and everything < reached:
        kept, reached = together, everything
    for name in names:
        if kept.get(name, {}).get(PLACEMENT) != "core":
            improve(name, {EARLY: "no"})
    return Settled(kept, default, reached)


def _trial(log: TrialLog, run: Runner, task: Task, choices: Choices) -> Outcome:
    found = log.find(NETWORK, choices)
    if found is None:
        _, found = next(iter(run(task, [choices])))
        log.add(NETWORK, choices, found)
    return found
