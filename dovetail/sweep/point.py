"""One point of a sweep: the model compiled for the target as it would be, and run."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dovetail.errors import DovetailError, ModelError, PlanError, ProgramError, SimulationError, TargetError
from dovetail.sweep.fields import Value

_TELLING = (ModelError, PlanError, ProgramError, SimulationError, TargetError)
"""Errors that belong to the point and would come again; others may be of the moment, such as a missing compiler."""
_SOURCES = ("*.py", "*.c", "*.h", "*.S", "*.v", "*.sv")


@dataclass(frozen=True, slots=True)
class Task:
    """What all points of a sweep share; may be sent to another process."""

    model: str
    """Path of the model."""
    target: str
    """Name of a target, or the path of a target file."""
    policy: str | None
    allow_float: bool
    optimize: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a point; figures are None where it failed."""

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


def key_of(task: Task, settings: Mapping[str, Value]) -> str:
    """What a point's outcome is kept under: a digest of everything it depends on."""
    content = {
        "model": hashlib.sha256(Path(task.model).read_bytes()).hexdigest(),
        "target": task.target if not task.target.endswith(".py") else _folder(Path(task.target)),
        "options": [task.policy, task.allow_float, task.optimize],
        "settings": {name: [type(value).__name__, value] for name, value in sorted(settings.items())},
        "dovetail": _package(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def _package() -> str:
    """Digest of Dovetail itself."""
    import dovetail

    root = Path(dovetail.__file__).parent
    return _digest([path for name in _SOURCES for path in root.rglob(name)], root)


def _folder(target: Path) -> str:
    """Digest of a target file and the sources beside it."""
    return _digest([path for name in _SOURCES for path in target.parent.glob(name)], target.parent)


def _digest(paths: list[Path], root: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def kept(folder: Path, key: str) -> Outcome | None:
    """The outcome of an earlier run; None when there is none, or its file is damaged."""
    try:
        return Outcome(**json.loads((folder / f"{key}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def keep(folder: Path, key: str, outcome: Outcome) -> None:
    """Put an outcome where `kept` finds it; a folder that cannot be written only costs time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w") as stream:
            stream.write(json.dumps(asdict(outcome)))
        os.replace(name, folder / f"{key}.json")
    except OSError:
        return


def measure(task: Task, settings: Mapping[str, Value]) -> Outcome:
    """Compile and run a point; whatever goes wrong is its outcome."""
    try:
        return _measured(task, settings)
    except DovetailError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        return Outcome(error=what, lasting=isinstance(error, _TELLING))
    except Exception as error:  # a bug met by one point must not end the others
        return Outcome(error=f"an error of Dovetail's own: {type(error).__name__}: {error}", lasting=False)


def _measured(task: Task, settings: Mapping[str, Value]) -> Outcome:
    import numpy as np

    from dovetail.cli.arrays import seeded_inputs
    from dovetail.compile import Options, compile_model
    from dovetail.emit.project import write_project
    from dovetail.graph.graph import evaluate_all
    from dovetail.kernels import Optimize
    from dovetail.report import make_report
    from dovetail.run import open_build, run_build
    from dovetail.sweep.fields import changed
    from dovetail.targets import load_target

    target = changed(load_target(task.target), settings)
    options = Options(policy=task.policy, allow_float=task.allow_float, optimize=Optimize(task.optimize))
    compiled = compile_model(Path(task.model), target, options)
    with tempfile.TemporaryDirectory(prefix="dovetail-sweep-") as folder:
        write_project(compiled.project, Path(folder) / "build")
        build = open_build(Path(folder) / "build", target)
        inputs = seeded_inputs(build.manifest["inputs"])
        result = run_build(build, "iss", [inputs])
    (expected,) = evaluate_all(compiled.graph, [inputs])
    for name, array in result.outputs[0].items():
        if expected[name].dtype.kind != "f" and not np.array_equal(array, expected[name]):
            raise SimulationError(f"the output '{name}' differs from the integer graph", where="iss",
                                  hint="the driver, the device model or the target file is wrong for this setting: "
                                       "dovetail check finds where")
    return _outcome(make_report(result).to_json())


def _outcome(report: Mapping[str, Any]) -> Outcome:
    cycles, macs = report["cycles"]["total"], report["macs"]["total"]
    return Outcome(
        cycles=cycles,
        macs=macs,
        macs_per_cycle=round(macs / cycles, 4) if cycles else None,
        offloaded_share=round(1 - report["macs"]["core"] / macs, 4) if macs else 0.0,
        bytes_moved=sum(layer["bytes_moved"] for layer in report["layers"]),
        firmware=sum(report["sizes"].values()),
        peaks={name: use["peak"] for name, use in report["memory"].items()},
    )
