"""Makes the points of a sweep, several at once; what was made before is taken from the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dovetail.errors import DovetailError
from dovetail.sweep.fields import Value
from dovetail.sweep.grid import Axis, points
from dovetail.sweep.point import Outcome, Task, keep, kept, key_of, measure
from dovetail.tune.workers import begin_worker

SCHEMA = 1
"""Version of the JSON. It grows when a field is removed or changes its meaning."""

Settings = Mapping[str, Value]
Told = Callable[[int, int, Settings, Outcome], None]
"""Told of every point as it ends: how many have ended, of how many, which it was, and what became of it."""


def sweep(task: Task, axes: Sequence[Axis], jobs: int, folder: Path, told: Told) -> tuple[list[Outcome], int]:
    """The outcome of every point, in the order of `points`, and how many were made earlier.

    Args:
        task: model and target.
        axes: what is set.
        jobs: processes.
        folder: where outcomes are kept.
        told: told of every point as it ends.

    Raises:
        DovetailError: `jobs` is below 1, or the model cannot be read.
    """
    if jobs < 1:
        raise DovetailError(f"{jobs} jobs are too few: the least is 1", where="--jobs", hint="give 1 or more")
    every = points(axes)
    try:
        keys = [key_of(task, settings) for settings in every]
    except OSError as error:
        raise DovetailError(f"cannot be read: {error.strerror}", where=str(error.filename or task.model),
                            hint="check the spelling and the permission to read") from None
    found: dict[int, Outcome] = {}
    for number, key in enumerate(keys):
        outcome = kept(folder, key)
        if outcome is not None:
            found[number] = outcome
    repeated = len(found)
    wanted = [number for number in range(len(every)) if number not in found]
    for number, outcome in _made(task, every, wanted, min(jobs, max(len(wanted), 1))):
        if outcome.lasting:
            keep(folder, keys[number], outcome)
        found[number] = outcome
        told(len(found), len(every), every[number], outcome)
    return [found[number] for number in range(len(every))], repeated


def _made(task: Task, every: Sequence[Settings], wanted: Sequence[int], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Points as they end. Where a process dies, those it takes with it are made again, each in a process of its own."""
    lost: list[int] = []
    for number, outcome in _pooled(task, every, wanted, jobs):
        if outcome is None:
            lost.append(number)
        else:
            yield number, outcome
    for number in sorted(lost):
        for _, outcome in _pooled(task, every, [number], 1):
            yield number, outcome or Outcome(error="the process that made it died, perhaps of memory", lasting=False)


def _pooled(
    task: Task, every: Sequence[Settings], wanted: Sequence[int], jobs: int
) -> Iterator[tuple[int, Outcome | None]]:
    """Points as they end, None for those that were lost when a process died."""
    if not wanted:
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=begin_worker)
    try:
        numbers = {pool.submit(measure, task, every[number]): number for number in wanted}
        for future in as_completed(numbers):
            try:
                yield numbers[future], future.result()
            except BrokenProcessPool:
                yield numbers[future], None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def to_json(
    model: str, target: str, policy: str, axes: Sequence[Axis], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """The sweep as plain values (docs/report.md).

    Args:
        model: what the model is called; target and policy likewise.
        axes: what was set.
        outcomes: of `sweep`.
    """
    every = points(axes)
    cycles = [outcome.cycles for outcome in outcomes if outcome.cycles is not None]
    best = min(cycles, default=None)
    rows = []
    for settings, outcome in zip(every, outcomes, strict=True):
        row: dict[str, Any] = {"settings": dict(settings), "error": outcome.error}
        row |= {name: getattr(outcome, name) for name in (
            "cycles", "macs", "macs_per_cycle", "offloaded_share", "bytes_moved", "firmware")}  # fmt: skip
        row["peaks"] = dict(outcome.peaks)
        row["by_best"] = round(outcome.cycles / best, 4) if outcome.cycles is not None and best else None
        rows.append(row)
    return {
        "schema": SCHEMA,
        "model": model,
        "target": target,
        "policy": policy,
        "fields": [
            {"name": axis.field.name, "about": axis.field.about, "present": axis.field.present,
             "values": list(axis.values)}
            for axis in axes
        ],
        "memories": list(dict.fromkeys(name for outcome in outcomes for name, peak in outcome.peaks.items() if peak)),
        "points": rows,
        "best": next((n for n, row in enumerate(rows) if best is not None and row["cycles"] == best), None),
    }  # fmt: skip
