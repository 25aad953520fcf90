"""What layers cost on the target: the simulated cycles of the network at each width of its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.calibrate.onnx_writer import plain_onnx
from dovetail.graph.graph import Graph
from dovetail.report import make_report
from dovetail.report.report import Report
from dovetail.target.description import Target


@dataclass(frozen=True)
class Measured:
    """Cycles of one inference with seeded inputs."""

    total: int
    layers: Mapping[str, int]
    """By result of the layer: busy cycles of the engine, or the core's time."""


def simulate(graph: Graph, target: Target, layers: Sequence[str]) -> Measured:
    """Compile a QDQ graph and run it on the simulated chip.

    Raises:
        DovetailError: it does not compile, or the simulator is not installed.
    """
    report = run_report(graph, target)
    return Measured(int(report.cycles["total"] or 0), {name: _cycles(report, name) for name in layers})


def run_report(graph: Graph, target: Target) -> Report:
    """The report of one inference on the simulated chip."""
    from dovetail.compile import Options, compile_model, sample_inputs
    from dovetail.emit.project import write_project
    from dovetail.run import open_build, run_build

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"{graph.name}.onnx"
        model.write_bytes(plain_onnx(graph).SerializeToString(deterministic=True))
        compiled = compile_model(model, target, Options(allow_float=True))
        write_project(compiled.project, Path(folder) / "build", replace=False)
        build = open_build(Path(folder) / "build", target)
        return make_report(run_build(build, "iss", [sample_inputs(compiled.graph)]))


def _cycles(report: Report, name: str) -> int:
    """Cycles of what computes an operator written under this name."""
    total = 0
    for layer in report.layers:
        if any(operator.endswith(f"({name})") for operator in layer.operators):
            busy = layer.engine_cycles if layer.ideal_macs_per_cycle is not None else layer.cycles
            total += busy or 0
    return total
