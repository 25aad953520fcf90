"""Tables of docs/figures about several cores and several engines. Each output is compared with the integer
graph before a number is printed."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from tables import Rows

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, prepare, sample_inputs
from dovetail.ir.graph import Graph, evaluate
from dovetail.program.ir import side_by_side
from dovetail.run import open_build, run_build
from dovetail.target.description import Target, with_cores
from dovetail.targets import load_target
from dovetail.targets.maeri import target as maeri
from dovetail.targets.maeri.config import MaeriConfig

INPUTS = 3
"""Successive inputs given to a pipeline."""


def cycles(path: Path, target: Target, pipeline: bool = False) -> int:
    """Cycles of an inference; in a pipeline those from one input to the next, when all stages work.

    Raises:
        RuntimeError: the firmware differs from the integer graph.
    """
    options = Options(pipeline=pipeline)
    graph = prepare(path, target, options)
    given = [sample_inputs(graph, seed) for seed in range(INPUTS if pipeline else 1)]
    compiled = compile_graph(graph, target, options, interpret=False)
    with tempfile.TemporaryDirectory() as folder:
        write_project(compiled.project, Path(folder) / "build")
        result = run_build(open_build(Path(folder) / "build", target), "iss", given)
    for inputs, outputs in zip(given, result.outputs, strict=True):
        for name, expected in evaluate(graph, inputs).items():
            if not np.array_equal(outputs[name], expected):
                raise RuntimeError(f"{path.name} on {target.name}: the firmware differs from the integer graph")
    return result.simulation.inferences[-1].total_cycles or 0


def several_cores(models: dict[str, Path]) -> dict[str, Rows]:
    """Layers shared by like cores, and stages on a big and a small one beside the balance bound."""
    rows = []
    for name, path in models.items():
        riscv, pair = load_target("riscv"), load_target("riscv_big_small")
        one = cycles(path, riscv)
        faster = [one / cycles(path, with_cores(riscv, count)) for count in (2, 4)]
        bound = one / sum(core.speed for core in pair.cores)
        streamed = cycles(path, pair, pipeline=True)
        rows.append([name, one, *(f"{found:.3f}" for found in faster), streamed, f"{streamed / bound:.4f}"])
    head = [
        "network",
        "cycles, 1 core",
        "2 cores: times as fast",
        "4 cores: times as fast",
        "big and small: cycles per input",
        "over the balance bound",
    ]
    return {"several_cores": [head, *rows]}


def joint_table(resnet: Path) -> dict[str, Rows]:
    """MAERI with branches of a network side by side, and one layer after the other."""
    from networks import branches, mixed_kernels

    networks = {
        "ResNet8": prepare(resnet, load_target("maeri"), Options()),
        "Inception block": branches(),
        "small Inception block": branches(8, 16, (16, 8, 16, 8, 16)),
        "3x3, 4x4 and 5x5": mixed_kernels(),
    }
    rows: list[list[object]] = []
    for sizes in ((64, 64, 64), (64, 16, 16), (128, 16, 16)):
        config = MaeriConfig(*sizes)
        for name, graph in networks.items():
            alone, _, _ = _with_jobs(graph, maeri(replace(config, joint=1)))
            beside, launches, both = _with_jobs(graph, maeri(config))
            saved = f"{100 * (alone - beside) / alone:.2f} %"
            rows.append(["/".join(map(str, sizes)), name, alone, beside, saved, launches, both])
    head = ["multipliers/in/out", "network", "one after the other", "side by side", "saved", "joint launches"]
    return {"joint": [[*head, "cycles of two at once"], *rows]}


def _with_jobs(graph: Graph, target: Target) -> tuple[int, int, int]:
    """Cycles of an inference, how many launches carry several layers, and cycles in which two of them are computed."""
    compiled, given = compile_graph(graph, target, Options()), sample_inputs(graph)
    with tempfile.TemporaryDirectory() as folder:
        write_project(compiled.project, Path(folder) / "build")
        result = run_build(open_build(Path(folder) / "build", target), "iss", [given])
    for name, expected in evaluate(graph, given).items():
        if not np.array_equal(result.outputs[0][name], expected):
            raise RuntimeError(f"{graph.name} on {target.name}: the firmware differs from the integer graph")
    first, joint = result.simulation.inferences[0], side_by_side(compiled.plan.program.statements)
    ends, both = 0, 0
    for job in sorted(first.activities["maeri"], key=lambda job: (job.start, job.end)):
        both += max(min(job.end, ends) - job.start, 0)
        ends = max(ends, job.end)
    return first.total_cycles or 0, len(set(joint.values())), both


def diana_table() -> dict[str, Rows]:
    """DIANA, digital alone and with ternary layers on the analog array."""
    from diana_networks import FILES, quantised, run

    rows = []
    for name in FILES:
        for policy in ("digital", "analog"):
            found = run(name, policy)
            for given, outputs in zip(found.inputs, found.outputs, strict=True):
                expected = evaluate(found.graph, given)
                if not all(np.array_equal(outputs[value], expected[value]) for value in found.graph.outputs):
                    raise RuntimeError(f"{name} on diana: the firmware differs from the integer graph")
            ternary = sum(bits == 2 for bits in quantised(name, policy == "analog").widths.values())
            busy = [sum(job.end - job.start for job in found.jobs[engine]) for engine in ("digital", "analog")]
            between = sum(
                c.maker in found.jobs and bool(set(c.readers) & set(found.jobs)) for c in found.report.conversions
            )
            rows.append(
                [
                    name,
                    policy,
                    ternary,
                    found.report.cycles["total"] or 0,
                    *busy,
                    len(found.report.conversions),
                    between,
                ]
            )
    head = [
        "network",
        "policy",
        "ternary layers",
        "cycles",
        "digital busy",
        "analog busy",
        "conversions",
        "between engines",
    ]
    return {"diana": [head, *rows]}
