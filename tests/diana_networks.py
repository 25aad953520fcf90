"""The four MLPerf Tiny networks as DIANA takes them: quantised from the float files, perhaps with ternary layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from conftest import shared_dir
from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_graph, sample_inputs
from dovetail.compile import prepare as prepare_integers
from dovetail.guests.ptq import QuantisedNetwork, Samples, Settings, named_widths, prepare, quantise_network
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Clip, ScaleShift
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.types import Array, DType, TensorType
from dovetail.read import load_model
from dovetail.report import Report, make_report
from dovetail.run import open_build, run_build
from dovetail.sim.device import Activity
from dovetail.target import Target
from dovetail.targets import load_target
from dovetail.targets.diana import APART, BANDS, diana

FILES = {
    "resnet8": "ic_resnet8_f32",
    "ds_cnn": "kws_dscnn_f32",
    "mobilenet_v1": "vww_mobilenetv1_f32",
    "autoencoder": "ad_autoencoder_f32",
}
TERNARY = {
    "resnet8": ("*conv2d_[12458]/BiasAdd;*",),
    "ds_cnn": ("*;functional_1/conv2d_[1234]/BiasAdd;*",),
    "mobilenet_v1": ("*;model/conv2d_[23456]/BiasAdd;*",),
    "autoencoder": ("*/dense_[67]/*",),
}
"""The layers the tests allow ternary weights, by pattern."""


@dataclass(frozen=True)
class Run:
    """A network compiled and run on the simulated chip."""

    graph: Graph
    """The integer graph."""
    compiled: Compiled
    inputs: tuple[dict[str, Array], ...]
    outputs: tuple[dict[str, Array], ...]
    report: Report
    jobs: dict[str, tuple[Activity, ...]]
    """Of the first inference, by engine."""


def samples(path: Path, graph: Graph, count: int = 8) -> Samples:
    """The one real input there is, as it is and with noise and other contrasts."""
    generator = np.random.default_rng(0)
    (name,) = graph.inputs
    real = np.load(f"{path}.ref.npz")["in_0"].astype(np.float32).reshape(graph.types[name].shape)
    spread = real.std()
    made = [real * scale + generator.normal(0, 0.2 * spread, real.shape) for scale in np.linspace(0.4, 1.0, count - 1)]
    return Samples({name: np.stack([real, *made]).astype(np.float32)}, None)


@cache
def quantised(name: str, ternary: bool) -> QuantisedNetwork:
    """A network with integers at both ends."""
    path = shared_dir() / "models" / "mlperf_tiny" / f"{FILES[name]}.tflite"
    graph = prepare(load_model(path), path.name)
    widths = named_widths(graph, [f"{pattern}=int2" for pattern in TERNARY[name]]) if ternary else {}
    settings = Settings(widths=widths, integer_ends=True)
    return quantise_network(graph, samples(path, graph), load_target("diana"), settings)


@cache
def run(name: str, policy: str) -> Run:
    """A network of MLPerf Tiny under a policy; ternary layers with `analog`."""
    return run_model(quantised(name, policy == "analog").model.SerializeToString(), policy)


def without_parts(target: Target) -> Target:
    """The target without the rewrites that compute a layer in parts."""
    policies = (
        replace(policy, rewrites=tuple(one for one in policy.rewrites if one not in (APART, BANDS)))
        for policy in target.policies
    )
    return replace(target, policies=tuple(policies))


def run_model(model: bytes, policy: str, whole: bool = False, costs: str = "plinio", count: int = 2) -> Run:
    """Compile a model and run seeded inputs.

    Args:
        model: ONNX.
        policy: of the target.
        whole: every layer in one launch.
        costs: model of the digital engine's cycles.
        count: inferences.
    """
    target = without_parts(diana(costs)) if whole else diana(costs)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        path.write_bytes(model)
        options = Options(policy=policy)
        graph = prepare_integers(path, target, options)
        choices = _whole(graph) if whole else {}
        compiled = compile_graph(graph, target, options, model=path, choices=choices, interpret=False)
        write_project(compiled.project, Path(folder) / "build")
        inputs = tuple(sample_inputs(graph, seed) for seed in range(count))
        result = run_build(open_build(Path(folder) / "build", target), "iss", inputs)
    first = result.simulation.inferences[0]
    jobs = {engine.name: tuple(first.activities[engine.name]) for engine in target.engines}
    return Run(graph, compiled, inputs, tuple(dict(found) for found in result.outputs), make_report(result), jobs)


def _whole(graph: Graph) -> dict[str, dict[str, int]]:
    from dovetail.schedule.partition import partition

    regions = [region for region in partition(graph, load_target("diana")) if region.name.startswith("conv")]
    knobs = ("tile_rows", "tile_columns", "tile_channels")
    return {region.name: dict(zip(knobs, graph.types[region.output].shape[1:], strict=True)) for region in regions}


def dense(*widths: int, equal: bool = False) -> Graph:
    """Dense layers one behind the other, of shifts as DIANA takes them; `equal`: all results are one and the same."""
    builder, random = GraphBuilder("chain"), np.random.default_rng(7)
    value = builder.input("x", TensorType((1, widths[0]), DType.INT8))
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        weights = random.integers(-20, 21, (outputs, inputs)).astype(np.int8)
        offset = random.integers(-500, 500, outputs).astype(np.int32)
        if equal:
            weights, offset = np.tile(weights[:1], (outputs, 1)), np.tile(offset[:1], outputs)
        total = builder.add(FullyConnected(), [value, builder.constant(f"w{number}", weights)], f"sum{number}")
        ends = [
            builder.constant(f"{name}{number}", array)
            for name, array in (("scale", np.int32([1])), ("offset", offset), ("shift", np.int32([6])))
        ]
        scaled = builder.add(ScaleShift(), [total, *ends], f"scaled{number}")
        value = builder.add(Clip(-128, 127, DType.INT8), [scaled], f"y{number}")
    return builder.finish([value])
