"""Makes the points of a sweep, several at once: compiled for the target as it would be, run, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from dovetail.errors import DovetailError, ModelError, PlanError, ProgramError, SimulationError, TargetError
from dovetail.farm import LOST, farm
from dovetail.fields import Axis, Value, points
from dovetail.files import keep_file, kept_file

_TELLING = (ModelError, PlanError, ProgramError, SimulationError, TargetError)
"""Errors that belong to the point and would come again; others may be of the moment, such as a missing compiler."""
_SOURCES = ("*.py", "*.c", "*.h", "*.S", "*.v", "*.sv")


@dataclass(frozen=True, slots=True)
class SweepTask:
    """Model, target and options of a sweep; may be sent to another process."""

    model: str
    """Path of the model."""
    target: str
    """Name of a target, or the path of a target file."""
    policy: str | None
    allow_float: bool
    optimize: str


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """The result of a point; figures are None where it failed."""

    error: str = ""
    """Why it cannot be compiled or run; empty where it can."""
    cycles: int | None = None
    macs: int | None = None
    macs_per_cycle: float | None = None
    offloaded_share: float | None = None
    """Part of the MACs on engines."""
    bytes_moved: int | None = None
    firmware: int | None = None
    """Bytes of text, rodata, data and bss."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    """Bytes of activations and tiles at the peak, by memory."""
    lasting: bool = True
    """Whether the same would come of it another time."""


def key_of(task: SweepTask, settings: Mapping[str, Value]) -> str:
    """The key a point's outcome is kept under: a digest of everything it depends on."""
    content = {
        "model": hashlib.sha256(Path(task.model).read_bytes()).hexdigest(),
        "target": task.target if not task.target.endswith(".py") else _digest(Path(task.target).parent, ""),
        "options": [task.policy, task.allow_float, task.optimize],
        "settings": {name: [type(value).__name__, value] for name, value in sorted(settings.items())},
        "dovetail": _package(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def _package() -> str:
    """Digest of Dovetail itself."""
    import dovetail

    return _digest(Path(dovetail.__file__).parent, "**/")


def _digest(root: Path, pattern: str) -> str:
    """Digest of the sources in a folder."""
    found = hashlib.sha256()
    for path in sorted(path for name in _SOURCES for path in root.glob(pattern + name)):
        found.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def kept(folder: Path, key: str) -> SweepOutcome | None:
    """The outcome of an earlier run; None when there is none, or its file is damaged."""
    try:
        return SweepOutcome(**json.loads(kept_file(folder / f"{key}.json") or b""))
    except (ValueError, TypeError):
        return None


def measure(task: SweepTask, settings: Mapping[str, Value]) -> SweepOutcome:
    """Compile and run a point; whatever goes wrong is its outcome."""
    try:
        return _measured(task, settings)
    except DovetailError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        return SweepOutcome(error=what, lasting=isinstance(error, _TELLING))
    except Exception as error:  # a bug met by one point must not end the others
        return SweepOutcome(error=f"an error of Dovetail's own: {type(error).__name__}: {error}", lasting=False)


def _measured(task: SweepTask, settings: Mapping[str, Value]) -> SweepOutcome:
    import numpy as np

    from dovetail.arrays import built, seeded_inputs
    from dovetail.compile import Options, compile_model
    from dovetail.fields import changed
    from dovetail.ir.graph import evaluate_all
    from dovetail.kernels import Optimize
    from dovetail.report import make_report
    from dovetail.run import run_build
    from dovetail.target.registry import load_target

    target = changed(load_target(task.target), settings)
    options = Options(policy=task.policy, allow_float=task.allow_float, optimize=Optimize(task.optimize))
    compiled = compile_model(Path(task.model), target, options)
    with built(compiled, target) as build:
        inputs = seeded_inputs(build.manifest.inputs)
        result = run_build(build, "iss", [inputs])
    (expected,) = evaluate_all(compiled.graph, [inputs])
    for name, array in result.outputs[0].items():
        if expected[name].dtype.kind != "f" and not np.array_equal(array, expected[name]):
            fault = "the driver, the device model or the target file is wrong for this setting"
            hint = f"{fault}: dovetail check finds where"
            raise SimulationError(f"the output '{name}' differs from the integer graph", where="iss", hint=hint)
    return _outcome(make_report(result).to_json())


def _outcome(report: Mapping[str, Any]) -> SweepOutcome:
    cycles, macs = report["cycles"]["total"], report["macs"]["total"]
    return SweepOutcome(
        cycles=cycles,
        macs=macs,
        macs_per_cycle=round(macs / cycles, 4) if cycles else None,
        offloaded_share=round(1 - report["macs"]["core"] / macs, 4) if macs else 0.0,
        bytes_moved=sum(layer["bytes_moved"] for layer in report["layers"]),
        firmware=sum(report["sizes"].values()),
        peaks={name: use["peak"] for name, use in report["memory"].items()},
    )


SCHEMA = 1
"""Version of the JSON. It grows when a field is removed or changes its meaning."""

Settings = Mapping[str, Value]
Told = Callable[[int, int, Settings, SweepOutcome], None]
"""Told of every point as it ends: how many have ended, of how many, which it was, and what became of it."""


def sweep(
    task: SweepTask, axes: Sequence[Axis], jobs: int, folder: Path, told: Told, scheduler: str | None = None
) -> tuple[list[SweepOutcome], int]:
    """The outcome of every point, in the order of `points`, and how many were made earlier.

    Args:
        task: model and target.
        axes: what is set.
        jobs: processes.
        folder: where outcomes are kept.
        told: told of every point as it ends.
        scheduler: address of a Dask scheduler to use instead; its workers find model and target under the same paths.

    Raises:
        DovetailError: `jobs` is below 1, the scheduler does not answer, or the model cannot be read.
    """
    every = points(axes)
    try:
        keys = [key_of(task, settings) for settings in every]
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        hint = "check the spelling and the permission to read"
        raise DovetailError(what, where=str(error.filename or task.model), hint=hint) from None
    earlier = [kept(folder, key) for key in keys]
    found = {number: outcome for number, outcome in enumerate(earlier) if outcome is not None}
    repeated = len(found)
    wanted = [number for number in range(len(every)) if number not in found]
    with farm(jobs, scheduler) as run:
        for place, made in run(partial(measure, task), [every[number] for number in wanted]):
            number = wanted[place]
            outcome = SweepOutcome(error=LOST.value, lasting=False) if made is LOST else made
            if outcome.lasting:
                keep_file(folder / f"{keys[number]}.json", json.dumps(asdict(outcome)).encode())
            found[number] = outcome
            told(len(found), len(every), every[number], outcome)
    return [found[number] for number in range(len(every))], repeated


def to_json(
    model: str, target: str, policy: str, axes: Sequence[Axis], outcomes: Sequence[SweepOutcome]
) -> dict[str, Any]:
    """The sweep as plain values (docs/report.md); model, target and policy by name, outcomes of `sweep`."""
    every = points(axes)
    cycles = [outcome.cycles for outcome in outcomes if outcome.cycles is not None]
    best = min(cycles, default=None)
    rows = []
    for settings, outcome in zip(every, outcomes, strict=True):
        row: dict[str, Any] = {"settings": dict(settings), "error": outcome.error}
        for name in ("cycles", "macs", "macs_per_cycle", "offloaded_share", "bytes_moved", "firmware"):
            row[name] = getattr(outcome, name)
        row["peaks"] = dict(outcome.peaks)
        row["by_best"] = round(outcome.cycles / best, 4) if outcome.cycles is not None and best else None
        rows.append(row)
    head = {"schema": SCHEMA, "model": model, "target": target, "policy": policy}
    pairs = [(axis.field, list(axis.values)) for axis in axes]
    return {
        **head,
        "fields": [{"name": f.name, "about": f.about, "present": f.present, "values": v} for f, v in pairs],
        "memories": list(dict.fromkeys(name for outcome in outcomes for name, peak in outcome.peaks.items() if peak)),
        "points": rows,
        "best": next((n for n, row in enumerate(rows) if best is not None and row["cycles"] == best), None),
    }
