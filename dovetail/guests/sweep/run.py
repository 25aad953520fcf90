"""Makes the points of a sweep, several at once: compiled for the target as it would be, run, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.errors import DovetailError, ModelError, PlanError, ProgramError, SimulationError, TargetError
from dovetail.farm import LOST, farm
from dovetail.fields import Axis, Value, points
from dovetail.files import keep_file, kept_file
from dovetail.names import names
from dovetail.options import Options
from dovetail.records import Record
from dovetail.report import Report

_TELLING = (ModelError, PlanError, ProgramError, SimulationError, TargetError)
"""Errors that belong to the point and would come again; others may be of the moment, such as a missing compiler."""
_SOURCES = ("*.py", "*.c", "*.h", "*.S", "*.v", "*.sv")


class SweepTask(Record):
    """Model, target and options of a sweep; may be sent to another process."""

    model: Path
    target: str
    """Name of a target, or the path of a target file."""
    options: Options
    """Policy, kind of code, and whether the core may compute in float32."""


class SweepOutcome(msgspec.Struct, frozen=True):
    """The result of a point; figures are None where it failed."""

    error: str = ""
    """Why it cannot be compiled or run; empty where it can."""
    cycles: int | None = None
    macs: int | None = None
    macs_per_cycle: float | None = None
    offloaded_share: float | None = None
    """Part of the MACs on engines."""
    bytes_moved: int | None = None
    energy: float | None = None
    """uJ of an inference; None where the target says nothing."""
    firmware: int | None = None
    """Bytes of text, rodata, data and bss."""
    peaks: dict[str, int] = {}
    """Bytes of activations and tiles at the peak, by memory."""
    lasting: bool = True
    """Whether another run would give the same."""


def key_of(task: SweepTask, settings: Mapping[str, Value]) -> str:
    """The key a point's outcome is kept under: a digest of everything it depends on."""
    options = task.options
    content = {
        "model": hashlib.sha256(task.model.read_bytes()).hexdigest(),
        "target": _digest(Path(task.target).parent, "") if task.target.endswith(".py") else task.target,
        "options": [options.policy, options.allow_float, options.optimize],
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
    digest = hashlib.sha256()
    for path in sorted(path for name in _SOURCES for path in root.glob(pattern + name)):
        digest.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(folder: Path, key: str) -> SweepOutcome | None:
    """The outcome of an earlier run; None when there is none, or its file is damaged."""
    try:
        return msgspec.json.decode(kept_file(folder / f"{key}.json") or b"", type=SweepOutcome)
    except msgspec.DecodeError:
        return None


def measure(task: SweepTask, settings: Mapping[str, Value]) -> SweepOutcome:
    """Compile and run a point; whatever goes wrong is its outcome."""
    try:
        return _outcome(_report(task, settings))
    except DovetailError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        return SweepOutcome(error=what, lasting=isinstance(error, _TELLING))
    except Exception as error:  # a bug met by one point must not end the others
        return SweepOutcome(error=f"an error of Dovetail's own: {type(error).__name__}: {error}", lasting=False)


def _report(task: SweepTask, settings: Mapping[str, Value]) -> Report:
    from dovetail.arrays import built, seeded_inputs
    from dovetail.compile import compile_model
    from dovetail.fields import changed
    from dovetail.prove import difference
    from dovetail.report import make_report
    from dovetail.run import chip_simulator, run_build
    from dovetail.target.registry import load_target

    target = changed(load_target(task.target), settings)
    compiled = compile_model(task.model, target, task.options)
    with built(compiled, target) as build:
        inputs = seeded_inputs(build.manifest.inputs)
        result = run_build(build, chip_simulator(target), [inputs])
        report = make_report(result)
    if wrong := difference(compiled.graph, [inputs], result.outputs):
        fault = "the driver, the device model or the target file is wrong for this setting"
        hint = f"{fault}: dovetail check finds where"
        raise SimulationError(f"the outputs are not those of the integer graph: {wrong}", where="iss", hint=hint)
    return report


def _outcome(report: Report) -> SweepOutcome:
    cycles, macs = report.cycles["total"], report.macs["total"]
    return SweepOutcome(
        cycles=cycles,
        macs=macs,
        macs_per_cycle=round(macs / cycles, 4) if cycles else None,
        offloaded_share=round(1 - report.macs["core"] / macs, 4) if macs else 0.0,
        bytes_moved=sum(layer.bytes_moved for layer in report.layers),
        energy=round(sum(report.energy.values()), 6) if report.energy else None,
        firmware=sum(report.sizes.values()),
        peaks={name: use.peak for name, use in report.memory.items()},
    )


SCHEMA = 1
"""Version of the JSON. It grows when a field is removed or changes its meaning."""

Told = Callable[[int, int, Mapping[str, Value], SweepOutcome], None]
"""Told of every point as it ends: how many have ended, of how many, its settings, and its outcome."""


def sweep(
    task: SweepTask, axes: Sequence[Axis], jobs: int, folder: Path, told: Told, scheduler: str | None = None
) -> tuple[list[SweepOutcome], int]:
    """The outcome of every point, in the order of `points`, and how many were made earlier.

    Args:
        task: model and target.
        axes: fields of the target and their values.
        jobs: processes.
        folder: where outcomes are kept.
        told: told of every point as it ends.
        scheduler: address of a Dask scheduler to use instead; its workers find model and target under the same paths.

    Raises:
        DovetailError: `jobs` is below 1, the scheduler does not answer, or the model cannot be read.
    """
    if not task.model.is_file():
        raise DovetailError("there is no such model", where=str(task.model), hint="give a .tflite or .onnx file")
    every = points(axes)
    try:
        keys = [key_of(task, settings) for settings in every]
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        hint = "check the spelling and the permission to read"
        raise DovetailError(what, where=str(error.filename or task.model), hint=hint) from None
    outcomes = [kept(folder, key) for key in keys]
    missing = [number for number, outcome in enumerate(outcomes) if outcome is None]
    repeated = len(every) - len(missing)
    with farm(jobs, scheduler) as run:
        results = run(partial(measure, task), [every[number] for number in missing])
        for done, (place, result) in enumerate(results, repeated + 1):
            number = missing[place]
            outcome = SweepOutcome(error=LOST.value, lasting=False) if result is LOST else result
            if outcome.lasting:
                keep_file(folder / f"{keys[number]}.json", msgspec.json.encode(outcome))
            outcomes[number] = outcome
            told(done, len(every), every[number], outcome)
    return [outcome for outcome in outcomes if outcome is not None], repeated


def to_json(
    model: str, target: str, policy: str, axes: Sequence[Axis], outcomes: Sequence[SweepOutcome]
) -> dict[str, Any]:
    """The sweep as plain values (docs/reference/report_json.md): names, and outcomes of `sweep`."""
    best = min((outcome.cycles for outcome in outcomes if outcome.cycles is not None), default=None)
    rows = list(_rows(axes, outcomes, best))
    return {
        "schema": SCHEMA,
        "model": model,
        "target": target,
        "policy": policy,
        "fields": [
            {
                "name": axis.field.name,
                "about": axis.field.about,
                "present": axis.field.present,
                "values": [*axis.values],
            }
            for axis in axes
        ],
        "memories": list(dict.fromkeys(name for outcome in outcomes for name, peak in outcome.peaks.items() if peak)),
        "points": rows,
        "best": next((number for number, row in enumerate(rows) if best is not None and row["cycles"] == best), None),
    }


def _rows(axes: Sequence[Axis], outcomes: Sequence[SweepOutcome], best: int | None) -> Iterator[dict[str, Any]]:
    for settings, outcome in zip(points(axes), outcomes, strict=True):
        figures = msgspec.structs.asdict(outcome)
        del figures["lasting"]
        by_best = round(outcome.cycles / best, 4) if outcome.cycles is not None and best else None
        yield {"settings": dict(settings), **figures, "by_best": by_best}


if not TYPE_CHECKING:
    __getattr__ = names(__name__, Task="SweepTask", Outcome="SweepOutcome")
