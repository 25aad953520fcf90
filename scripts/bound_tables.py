"""The table of docs/benchmarks.md that puts whole networks beside whoever is busy longest, and beside the bound that no
schedule goes below, on every target that comes with Dovetail. Each output is compared with the integer graph before a
number is printed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from tables import table

from dovetail.cli.main import main
from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.errors import PlanError
from dovetail.guests.report.detail import detail
from dovetail.ir.graph import evaluate
from dovetail.run import open_build, run_build
from dovetail.target import Target
from dovetail.targets import BUILT_IN, load_target
from dovetail.targets.maeri import target as maeri
from dovetail.targets.maeri.config import MaeriConfig

SAMPLES = 16


def bound_table(models: Mapping[str, Path]) -> list[str]:
    """Cycles of each network on each target, who is busy longest, and how many times as long the whole takes."""
    rows = []
    for name, target, quantised in _targets():
        row: list[object] = [name]
        for path in models.values():
            with tempfile.TemporaryDirectory() as folder:
                row += _measured(shifts(path, target.name, Path(folder)) if quantised else path, target, Path(folder))
        rows.append(row)
    head = [
        "target",
        *(text for name in models for text in (f"{name}: cycles", "busy longest", "times that", "times the bound")),
    ]
    return ["### Whole networks beside whoever is busy longest, and the bound", "", *table(head, rows)]


def _targets() -> Iterator[tuple[str, Target, bool]]:
    """Name, target, and whether the models are quantised for it."""
    for name in BUILT_IN:
        target = load_target(name)
        if instruction_set(target.core.isa).is_host:
            continue  # there are no cycles
        yield name, target, False
        if name == "maeri":
            yield "maeri without its stage", maeri(MaeriConfig(requantise=False), "maeri_sums"), False
        if name == "diana":
            yield f"diana after `quantize` with {SAMPLES} samples", target, True


def shifts(path: Path, target: str, folder: Path) -> Path:
    """The model quantised anew, from its stored inputs and what lies between two of them."""
    stored = np.load(path.with_suffix(".many.npz"))
    inputs = np.stack([stored[f"in_{number}"] for number in range(12)])
    between = (inputs[:4].astype(np.int16) + inputs[4:8]) // 2
    np.savez(folder / "data.npz", x=np.concatenate([inputs, between.astype(np.int8)]))
    made = folder / f"{path.stem}.onnx"
    try:
        main(["quantize", str(path), "--target", target, "--data", str(folder / "data.npz"), "-o", str(made)])
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{path.name} was not quantised for {target}") from None
    return made


def _measured(path: Path, target: Target, folder: Path) -> list[object]:
    """Cycles, who is busy longest, and the cycles over those in which it is and over the bound; of what has no room,
    that.

    Raises:
        RuntimeError: the firmware differs from the integer graph.
    """
    try:
        compiled = compile_model(path, target, Options())
    except PlanError:
        return ["too large", "", "", ""]
    write_project(compiled.project, folder / "build")
    given = sample_inputs(compiled.graph)
    result = run_build(open_build(folder / "build", target), "iss", [given])
    for value, expected in evaluate(compiled.graph, given).items():
        if not np.array_equal(result.outputs[0][value], expected):
            raise RuntimeError(f"{path.name} on {target.name}: the firmware differs from the integer graph")
    found = detail(result)
    cycles, least = found["cycles"], found["bound"]
    longest = max((name for name, count in cycles.items() if name != "total" and count), key=lambda name: cycles[name])
    return [cycles["total"], longest, f"{cycles['total'] / cycles[longest]:.3f}", f"{cycles['total'] / least:.2f}"]
