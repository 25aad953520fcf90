"""Measures Dovetail on the MLPerf Tiny networks: prints tables, and writes them to docs/figures with --write.

Needs the reference models and facts in ../shared (models/mlperf_tiny, hardware).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from bound_tables import bound_table  # noqa: E402
from language_tables import language_tables  # noqa: E402
from parallel_tables import diana_table, joint_table, several_cores  # noqa: E402
from tables import FIGURES, Rows, Sections, read, run  # noqa: E402

from dovetail.codegen.emit import write_project  # noqa: E402
from dovetail.compile import Compiled, Options, compile_model, prepare, sample_inputs  # noqa: E402
from dovetail.guests.report.detail import detail  # noqa: E402
from dovetail.ir.graph import Graph, evaluate  # noqa: E402
from dovetail.ir.operators.activation import FixedSoftmax  # noqa: E402
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected  # noqa: E402
from dovetail.ir.rewrite import simplify  # noqa: E402
from dovetail.kernels import Optimize  # noqa: E402
from dovetail.quantize import quantize  # noqa: E402
from dovetail.read import load_model, own_rounding  # noqa: E402
from dovetail.run import RunResult, open_build, run_build  # noqa: E402
from dovetail.targets import load_target  # noqa: E402

NETWORKS = {
    "ad_autoencoder": ("autoencoder", 65_046),
    "ic_resnet8": ("ResNet8", 227_841),
    "kws_dscnn": ("DS-CNN", 175_723),
    "vww_mobilenetv1": ("MobileNetV1 0.25", 415_924),
}
"""File -> name, and cycles per inference of GAP9 silicon: 240 MHz over the median throughput of MLPerf Tiny v1.0
(mlcommons/tiny_results_v1.0, closed/greenwaves-technologies, gap9_650_240)."""
OTHERS = {
    "ad_autoencoder": (5.26, 4.05),
    "ic_resnet8": (165.1, 167.8),
    "kws_dscnn": (43.2, 47.8),
    "vww_mobilenetv1": (88.9, 98.8),
}
"""Milliseconds published for an STM32L4R5 at 120 MHz (MLPerf Tiny): X-CUBE-AI, and Plumerai (round 1.1)."""
BUDGETS: dict[str, tuple[int | None, ...]] = {
    "ad_autoencoder": (None,),
    "ic_resnet8": (None, 32_768, 28_672, 24_576, 20_480, 19_456),
    "kws_dscnn": (None, 16_896, 13_696),
    "vww_mobilenetv1": (None, 40_960, 36_864, 32_768),
}
"""Memory budgets measured, bytes, the stack's 4,096 among them; None for none."""
CORES = (
    *("riscv", "cortex_m4", "cortex_m7", "riscv_dot4", "riscv_xpulp", "riscv64"),
    *("cortex_m0plus", "cortex_m3", "cortex_m23", "cortex_m55"),
)
"""The cores measured alone. `riscv_imac` takes as long as `riscv`."""
LINEAR = (Conv2d, DepthwiseConv2d, FullyConnected)
COLD = """
import sys
from pathlib import Path
from typing import Any
from dovetail.compile import Options, compile_model
from dovetail.codegen.emit import write_project
from dovetail.targets import load_target
write_project(compile_model(Path(sys.argv[1]), load_target("ne16"), Options()).project, Path(sys.argv[2]))
"""


@dataclass(frozen=True)
class Measured:
    """A network compiled, built and run once on its simulator; its firmware equalled its integer graph."""

    compiled: Compiled
    result: RunResult
    detail: Mapping[str, Any]
    """Its report."""


def model_file(network: str) -> Path:
    """The int8 TFLite file."""
    return SHARED / "models" / "mlperf_tiny" / f"{network}_int8.tflite"


def measure(
    network: str, target: str, policy: str | None, optimize: Optimize = Optimize.SPEED, budget: int | None = None
) -> Measured:
    """Compile, build and run one inference; raises RuntimeError when the firmware differs from the integer graph."""
    options = Options(policy, optimize=optimize, memory_budget=budget)
    compiled = compile_model(model_file(network), load_target(target), options)
    given = sample_inputs(compiled.graph)
    with tempfile.TemporaryDirectory() as folder:
        write_project(compiled.project, Path(folder) / "build")
        result = run_build(open_build(Path(folder) / "build"), None, [given])
        found = detail(result, compiled.project.graph)
    expected = evaluate(compiled.graph, given)
    for value in compiled.graph.outputs:
        if not np.array_equal(result.outputs[0][value], expected[value]):
            raise RuntimeError(f"{network} on {target}: the firmware differs from the integer graph")
    return Measured(compiled, result, found)


def macs_by_origin(graph: Graph) -> dict[str, int]:
    """Multiply-accumulates of each operator of the user's model, padded taps counted."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        if isinstance(node.operator, LINEAR):
            count = node.operator.macs([graph.types[value] for value in node.inputs])
            found[node.origin] = found.get(node.origin, 0) + count
    return found


@cache
def macs_of_model(network: str) -> dict[str, int]:
    """Multiply-accumulates of each operator of the model, dead ones too: what figures per MAC are for."""
    return macs_by_origin(prepare(model_file(network), load_target("riscv"), Options(keep_dead=True)))


def engine_share(network: str, measured: Measured) -> float:
    """Percent of the user's multiply-accumulates done by the engine; rewrites' own (additions) do not count."""
    plain = macs_of_model(network)
    on_core = {
        node.origin
        for region in measured.compiled.regions
        if region.engine is None
        for node in region.graph.nodes
        if isinstance(node.operator, LINEAR)
    }
    return 100.0 * sum(count for origin, count in plain.items() if origin not in on_core) / sum(plain.values())


def difference_from_micro(network: str, target: str, policy: str) -> tuple[int, int]:
    """Largest difference from TensorFlow Lite Micro before the softmax, in LSB, and over how many inputs.

    Computed with the integer graph, which the firmware equals bit for bit.
    """
    from oracles import references

    graph = quantize(simplify(load_model(model_file(network))), own_rounding(model_file(network)))
    logits = [node.inputs[0] for node in graph.nodes if isinstance(node.operator, FixedSoftmax)]
    graph = replace(graph, outputs=(*graph.outputs, *logits))
    for rewrite in load_target(target).policy(policy).rewrites:
        graph = rewrite.apply(graph)
    stored, largest, count = references(network), 0, 0
    key = "pretail" if logits else "out"
    for index in range(sum(name.startswith("in_") for name in stored)):
        if f"{key}_{index}__tflm" in stored:
            found = evaluate(graph, {graph.inputs[0]: stored[f"in_{index}"]})[graph.outputs[-1]]
            largest = max(largest, int(np.abs(found.astype(int) - stored[f"{key}_{index}__tflm"]).max()))
            count += 1
    return largest, count


def cold_seconds(network: str) -> float:
    """Wall time of compiling and writing the project in a new process, its start included."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [sys.executable, "-c", COLD, str(model_file(network)), str(Path(folder) / "build")]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        return time.perf_counter() - began


def cores_table() -> dict[str, Rows]:
    """Cores alone, beside the bound of products and of words that go through memory."""
    rows = []
    for target in CORES:
        for network, (name, _) in NETWORKS.items():
            measured = measure(network, target, None)
            cycles, instructions = (
                measured.detail["cycles"]["total"],
                measured.result.simulation.inferences[0].instructions or 0,
            )
            per_mac = f"{instructions / sum(macs_of_model(network).values()):.3f}"
            sizes = measured.result.sizes
            bound = f"{cycles / measured.detail['bound']:.2f}"
            rows.append([target, name, cycles, bound, instructions, per_mac, sizes["text"], sizes["rodata"]])
    head = ["core", "network", "cycles", "times the bound", "instructions", "per MAC", "text", "rodata"]
    return {"cores": [head, *rows]}


def budget(network: str, most: int | None) -> list[object]:
    """A row on a core alone: the memory budget, bytes alive and placed, multiply-accumulates more, text and rodata."""
    measured = measure(network, "riscv", None, budget=most)
    striped, sizes = measured.compiled.striped, measured.result.sizes
    placed = {p.memory: p for p in measured.compiled.plan.placements}["ram"]
    extra = striped.extra_macs if striped else 0
    macs = sum(macs_by_origin(measured.compiled.graph).values()) - extra
    instructions = measured.result.simulation.inferences[0].instructions or 0
    stripes = sum(segment.count for segment in striped.stripes) if striped else 0
    return [
        most or "none",
        placed.lower_bound,
        placed.peak,
        placed.peak + sizes["stack"],
        stripes,
        f"{100 * extra / macs:.2f} %",
        instructions,
        sizes["text"],
        sizes["rodata"],
    ]


def budget_table() -> dict[str, Rows]:
    """The activations of a core alone: whole, and in stripes within memory budgets."""
    rows = [[name, *budget(network, most)] for network, (name, _) in NETWORKS.items() for most in BUDGETS[network]]
    header = [
        "network",
        "memory budget",
        "bytes alive",
        "peak",
        "with the stack",
        "stripes",
        "more MACs",
        "instructions",
        "text",
        "rodata",
    ]
    return {"budget": [header, *rows]}


def busy(measured: Measured, device: str) -> int:
    """Cycles in which a device worked."""
    activities = measured.result.simulation.inferences[0].activities.get(device, ())
    return sum(activity.end - activity.start for activity in activities)


def engine_tables() -> dict[str, Rows]:
    """The NE16 with its own requantisation: time, then memory and compile time."""
    times, places = [], []
    for network, (name, published) in NETWORKS.items():
        measured = measure(network, "ne16", "engine")
        inference = measured.result.simulation.inferences[0]
        largest, count = difference_from_micro(network, "ne16", "engine")
        share, difference = f"{engine_share(network, measured):.1f} %", f"{largest} ({count} inputs)"
        total, core = inference.total_cycles or 0, inference.core_cycles or 0
        times.append([name, total, published, core, busy(measured, "ne16"), busy(measured, "dma"), share, difference])
        found = {p.memory: p for p in measured.compiled.plan.placements}
        peaks = [value for memory in ("L2", "L1") for value in (found[memory].peak, found[memory].lower_bound)]
        places.append([name, *peaks, measured.result.sizes["rodata"], f"{cold_seconds(network):.1f}"])
    head = [
        "network",
        "cycles",
        "GAP9, published",
        "core busy",
        "engine busy",
        "DMA busy",
        "MACs on the engine",
        "largest LSB from TFLM",
    ]
    second = ["network", "L2 peak", "L2 bound", "L1 peak", "L1 bound", "rodata", "compile, wall s"]
    return {"ne16": [head, *times], "ne16_memory": [second, *places]}


def exact_table() -> dict[str, Rows]:
    """The NE16 with TensorFlow Lite Micro's requantisation on the core."""
    rows = []
    for network, (name, _) in NETWORKS.items():
        measured = measure(network, "ne16", "exact")
        largest, count = difference_from_micro(network, "ne16", "exact")
        inference = measured.result.simulation.inferences[0]
        rows.append([name, inference.total_cycles or 0, inference.core_cycles or 0, f"{largest} ({count} inputs)"])
    return {"ne16_exact": [["network", "cycles", "core busy", "largest LSB from TFLM"], *rows]}


def vta_table() -> dict[str, Rows]:
    """The VTA with its own requantisation."""
    rows = []
    for network, (name, _) in NETWORKS.items():
        measured = measure(network, "vta", "engine")
        inference = measured.result.simulation.inferences[0]
        largest, count = difference_from_micro(network, "vta", "engine")
        placed = {p.memory: p for p in measured.compiled.plan.placements}["DRAM"]
        rows.append(
            [
                name,
                inference.total_cycles or 0,
                inference.core_cycles or 0,
                busy(measured, "vta"),
                f"{engine_share(network, measured):.1f} %",
                f"{largest} ({count} inputs)",
                placed.peak,
                placed.lower_bound,
                measured.result.sizes["rodata"],
            ]
        )
    head = [
        "network",
        "cycles",
        "core busy",
        "engine busy",
        "MACs on the engine",
        "largest LSB from TFLM",
        "DRAM peak",
        "DRAM bound",
        "rodata",
    ]
    return {"vta": [head, *rows]}


def rtl_table() -> dict[str, Rows]:
    """The MAC array's Verilog beside its model: cycles, and how fast the simulation is."""
    from rtl_networks import built, layer, million_cycles_per_second

    rows = []
    whole = prepare(model_file("ic_resnet8"), load_target("macarray"), Options())
    for name, graph in (("ResNet8, second layer", layer(model_file("ic_resnet8"), 1)), ("ResNet8", whole)):
        with tempfile.TemporaryDirectory() as folder:
            build, given = built(graph, Path(folder) / "build"), sample_inputs(graph)
            cycles, speeds = [], []
            for simulator in ("iss", "rtl"):
                result, expected = run_build(build, simulator, [given]), evaluate(graph, given)
                if any(not np.array_equal(result.outputs[0][value], expected[value]) for value in graph.outputs):
                    raise RuntimeError(f"{name} on {simulator}: the firmware differs from the integer graph")
                cycles.append(result.simulation.inferences[0].total_cycles or 0)
                speeds.append(million_cycles_per_second(build, graph, simulator, 100 if graph is not whole else 5))
        difference = f"{100 * (cycles[1] - cycles[0]) / cycles[1]:+.2f} %"
        rows.append([name, *cycles, difference, *(f"{speed:.1f}" for speed in speeds)])
    header = ["network", "cycles, model", "cycles, Verilog", "difference", "M cycles/s, model", "M cycles/s, Verilog"]
    return {"rtl": [header, *rows]}


def summary_table() -> dict[str, Rows]:
    """The first page's comparison with others' products, of what the sections `cores` and `engine` have measured."""
    cells = {(row[0], row[1]): int(row[2]) for row in read(FIGURES / "cores.csv")[1:]}
    engine = {row[0]: int(row[1]) for row in read(FIGURES / "ne16.csv")[1:]}
    head = ["network", "Cortex-M4 at 120 MHz, ms", "X-CUBE-AI, ms", "Plumerai, ms", "NE16, cycles", "GAP9, cycles"]
    rows = [
        [name, f"{cells['cortex_m4', name] / 120_000:.1f}", *OTHERS[network], engine[name], published]
        for network, (name, published) in NETWORKS.items()
    ]
    return {"summary": [head, *rows]}


SECTIONS: Sections = {
    "cores": cores_table,
    "budget": budget_table,
    "engine": engine_tables,
    "exact": exact_table,
    "vta": vta_table,
    "several": lambda: several_cores({name: model_file(network) for network, (name, _) in NETWORKS.items()}),
    "bound": lambda: bound_table({name: model_file(network) for network, (name, _) in NETWORKS.items()}),
    "diana": diana_table,
    "joint": lambda: joint_table(model_file("ic_resnet8")),
    "rtl": rtl_table,
    "language": lambda: language_tables(SHARED / "models" / "lm"),
    "summary": summary_table,
}


if __name__ == "__main__":
    run(__doc__.splitlines()[0], "scripts/benchmarks.py", SECTIONS, [SHARED / "models" / "mlperf_tiny"])
