"""The last word on every choice: the whole network. What does not make it faster is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.errors import DovetailError
from dovetail.plan.tiles import EARLY, PLACEMENT
from dovetail.target.knobs import Choice
from dovetail.tune.file import Entry
from dovetail.tune.log import NETWORK, TrialLog
from dovetail.tune.measure import Task
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


@dataclass
class _Trials:
    """Trials of the whole network, counted."""

    log: TrialLog
    run: Runner
    task: Task
    told: Callable[[int, int | None, int | None], None]
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
                raise DovetailError(f"the network as the planner plans it cannot be measured: {found.error}",
                                    where=self.task.target,
                                    hint="dovetail compile and dovetail run on the same model show the fault")
        self.best = min((c for c in (self.best, found.cycles) if c is not None), default=None)
        self.told(self.made, self.default, self.best)
        return found.cycles


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
    return Settled(kept, default, reached)


def _improved(trials: _Trials, kept: Choices, reached: int, name: str, choice: Choice) -> tuple[Choices, int]:
    """What is kept and its cycles, with a further choice if that takes fewer."""
    tried = {**kept, name: {**kept.get(name, {}), **choice}}
    found = trials.cycles(tried)
    return (tried, found) if found is not None and found < reached else (kept, reached)
