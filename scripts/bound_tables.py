"""Tables of docs/figures that put whole networks beside two bounds, on every target that comes with Dovetail:
each layer at its engine's own least, and what model and hardware ask for; and what is between the two. Each output is
compared with the integer graph before a number is printed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tables import Rows

from dovetail.cli.main import main
from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.errors import PlanError
from dovetail.guests.report.detail import detail
from dovetail.guests.report.least import BETWEEN
from dovetail.ir.graph import evaluate
from dovetail.run import open_build, run_build
from dovetail.target import Target
from dovetail.targets import BUILT_IN, load_target
from dovetail.targets.maeri import target as maeri
from dovetail.targets.maeri.config import MaeriConfig


def bound_table(models: Mapping[str, Path]) -> dict[str, Rows]:
    """Cycles of each network on each target with an engine beside the two bounds, and where an engine's least goes."""
    rows: list[list[object]] = []
    parts: list[list[object]] = []
    for name, target, quantised in _targets():
        for title, path in models.items():
            with tempfile.TemporaryDirectory() as folder:
                model = shifts(path, target.name, Path(folder)) if quantised else path
                found = _measured(model, target, Path(folder))
            if found is None:
                continue  # the network has no room
            total, least, bound = found["cycles"]["total"], found["least"], found["bound"]
            rows.append([name, title, total, f"{total / least:.3f}", f"{total / bound:.2f}", found["bound_by"]])
            if any(layer["least"] for layer in found["layers"]):
                parts.append([name, title, *_parts(found["layers"])])
    head = ["target", "network", "cycles", "times the engine's least", "times the bound", "the bound is set by"]
    second = ["target", "network", "engine's layers at their least", *BETWEEN.values()]
    return {"bounds": [head, *rows], "least": [second, *parts]}


def _parts(layers: Sequence[Mapping[str, Any]]) -> list[object]:
    """The least cycles of the layers on engines, and the share of each part."""
    known = [layer for layer in layers if layer["least"]]
    least = sum(layer["least"] for layer in known)
    shares = (sum(layer["least_parts"][part] for layer in known) / least for part in BETWEEN)
    return [least, *(f"{100 * share:.1f} %" for share in shares)]


def _targets() -> Iterator[tuple[str, Target, bool]]:
    """Name, target, and whether the models are quantised for it with 16 samples."""
    for name in BUILT_IN:
        target = load_target(name)
        if not target.engines or instruction_set(target.core.isa).is_host:
            continue  # there are no cycles on a host
        yield name, target, name == "diana"
        if name == "maeri":
            yield "maeri without its stage", maeri(MaeriConfig(requantise=False), "maeri_sums"), False


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


def _measured(path: Path, target: Target, folder: Path) -> dict[str, Any] | None:
    """The report of a network; None where it has no room.

    Raises:
        RuntimeError: the firmware differs from the integer graph, or a bound is none.
    """
    try:
        compiled = compile_model(path, target, Options())
    except PlanError:
        return None
    write_project(compiled.project, folder / "build")
    given = sample_inputs(compiled.graph)
    result = run_build(open_build(folder / "build", target), "iss", [given])
    for value, expected in evaluate(compiled.graph, given).items():
        if not np.array_equal(result.outputs[0][value], expected):
            raise RuntimeError(f"{path.name} on {target.name}: the firmware differs from the integer graph")
    found = detail(result, compiled.project.graph)
    if found["cycles"]["total"] < max(found["least"], found["bound"]):
        raise RuntimeError(f"{path.name} on {target.name} takes fewer cycles than a bound says")
    return found
