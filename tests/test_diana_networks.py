"""The four MLPerf Tiny networks on DIANA's simulated chip, digital alone and with the analog array."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest

from diana_networks import FILES, Run, dense, quantised, run, run_model
from dovetail.bounds import model_bound
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, operator_work, sample_inputs
from dovetail.guests import zoo
from dovetail.guests.ptq import Samples, Settings, named_widths, prepare, quantise_network
from dovetail.ir.graph import GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip, Lookup, ScaleShift
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat, Pad, Relayout
from dovetail.ir.types import DType, TensorType
from dovetail.program.ir import Copy, LaunchStatement
from dovetail.read import load_model
from dovetail.report import make_report, totals
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from firmware import require_chip

pytestmark = pytest.mark.oracles

NETWORKS = [(name, policy) for name in FILES for policy in ("digital", "analog")]
CONVERSIONS = {"resnet8": 4, "ds_cnn": 4, "mobilenet_v1": 4, "autoencoder": 2}
"""Changes of layout: input, around the pool, output."""
PARTS = {
    ("resnet8", "digital"): 2 + 4,
    ("ds_cnn", "digital"): 3 + 4,
    ("mobilenet_v1", "digital"): 4 + 3,
}
"""Bands of the rows that the first layers are computed in, and parts of the channels that a pool is: each band and part
is brought into the other layout before it. Others are in one each."""
PUBLISHED = {
    "plinio": (4160, 13312, 13312, 6144, 11264, 2048, 9984, 19456, 1792, 73),
    "match": (4292, 16512, 16512, 8096, 15456, 2272, 7408, 14448, 1904, 215),
    "analog": (4875, 5811, 5811, 2317, 3469, 710, 2595, 4899, 402, 514),
}
"""Cycles of ResNet-8's layers, as the fact sheet lists them: PLiNIO and MATCH of the digital engine, PLiNIO of the
analog one. The first convolution, each stage's two and its shortcut, the dense layer."""
TOTALS = {"plinio": 81545, "match": 87115, "analog": 31404}


@pytest.fixture(scope="module", autouse=True)
def _chip() -> None:
    require_chip()


def launches(found: Run) -> list[LaunchStatement]:
    """The program's launches."""
    return [statement for statement in found.compiled.plan.program.statements if isinstance(statement, LaunchStatement)]


@pytest.mark.parametrize(("name", "policy"), NETWORKS)
def test_firmware_is_the_integer_graph(name: str, policy: str) -> None:
    found = run(name, policy)
    for given, outputs in zip(found.inputs, found.outputs, strict=True):
        expected = evaluate(found.graph, given)
        for output in found.graph.outputs:
            np.testing.assert_array_equal(outputs[output], expected[output])
    assert len({array.tobytes() for outputs in found.outputs for array in outputs.values()}) > 1


@pytest.mark.parametrize(("name", "policy"), NETWORKS)
def test_no_conversion_between_engines(name: str, policy: str) -> None:
    found = run(name, policy)
    between = [c for c in found.report.conversions if c.maker in found.jobs and set(c.readers) & set(found.jobs)]
    assert between == []
    conversions = CONVERSIONS[name] + PARTS.get((name, policy), 2) - 2
    assert len(found.report.conversions) == conversions
    line = next(line for line in totals(found.report) if line.startswith("conversions"))
    assert f" {conversions} of layouts" in line and line.endswith("0 between engines")
    neighbours = [(a.engine, b.engine) for a, b in zip(launches(found), launches(found)[1:], strict=False)]
    assert (("digital", "analog") in neighbours) == (policy == "analog")


@pytest.mark.parametrize(("name", "policy"), NETWORKS)
def test_all_sums_of_products_are_on_the_engines(name: str, policy: str) -> None:
    found = run(name, policy)
    assert found.report.macs["core"] == 0
    assert (found.report.macs["analog"] > 0) == (policy == "analog")
    ternary = sum(bits == 2 for bits in quantised(name, policy == "analog").widths.values())
    regions = [region for region in found.compiled.regions if region.place == "analog"]
    assert len(regions) == ternary, "each layer that was allowed, and no other"


@pytest.mark.parametrize(("name", "policy"), NETWORKS)
def test_each_job_takes_the_published_cycles(name: str, policy: str) -> None:
    found = run(name, policy)
    for engine, jobs in found.jobs.items():
        expected = []
        for launch in launches(found):
            offload = found.compiled.regions[launch.layer].offload
            if launch.engine == engine and offload is not None:
                expected.append(offload.cycles(launch.match))
        assert [job.end - job.start for job in jobs] == expected


@pytest.mark.parametrize("model", list(PUBLISHED))
def test_layers_of_resnet8_cost_what_is_published(model: str) -> None:
    """With even borders, as the published figures have it, every layer maps one to one."""
    network = onnx.load_from_string(zoo.build_float("resnet8"))
    for node in network.graph.node:
        if node.op_type == "Conv":
            (kernel,) = (a.ints for a in node.attribute if a.name == "kernel_shape")
            (pads,) = (a.ints for a in node.attribute if a.name == "pads")
            pads[:] = [size // 2 for size in (*kernel, *kernel)]
    engine = "analog" if model == "analog" else "digital"
    costs = "match" if model == "match" else "plinio"
    found = run_model(_quantised(network, engine == "analog"), engine, whole=True, costs=costs, count=1)
    jobs = [job.end - job.start for job in found.jobs[engine] if job.macs]
    # Jobs take whole cycles, and the dense layer has 12 results instead of 10: one cycle more at most.
    # A shortcut may come before or after what it goes around.
    pairs = zip(sorted(jobs), sorted(PUBLISHED[model]), strict=True)
    assert all(0 <= job - cycles <= 1 for job, cycles in pairs)
    assert 0 <= sum(jobs) - TOTALS[model] <= (10 if engine == "analog" else 1)
    for given, outputs in zip(found.inputs, found.outputs, strict=True):
        (expected,) = evaluate(found.graph, given).values()
        np.testing.assert_array_equal(*outputs.values(), expected)
    print(f"{model}: {sum(jobs)} cycles, published {TOTALS[model]}")


@pytest.mark.parametrize("name", ["resnet8", "ds_cnn"])
def test_no_network_takes_less_than_its_bound(name: str, tmp_path: Path) -> None:
    """Nor is it so far above it that the bound says nothing."""
    model, target = tmp_path / "net.onnx", load_target("diana")
    model.write_bytes(quantised(name, False).model.SerializeToString())
    bound = model_bound(operator_work(model, target, Options()), target).cycles
    assert 0 < bound <= (run(name, "digital").report.cycles["total"] or 0) < 20 * bound


def _quantised(network: onnx.ModelProto, ternary: bool) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        path.write_bytes(network.SerializeToString())
        graph = prepare(load_model(path), path.name)
    (name,) = graph.inputs
    data = np.random.default_rng(0).uniform(0, 255, (4, *graph.types[name].shape)).astype(np.float32)
    settings = Settings(widths=named_widths(graph, ["*=int2"] if ternary else []), integer_ends=True)
    found = quantise_network(graph, Samples({name: data}, None), load_target("diana"), settings)
    return found.model.SerializeToString()


def test_ternary_layers_are_ternary() -> None:
    found = run("resnet8", "analog")
    analog = [region for region in found.compiled.regions if region.place == "analog"]
    for region in analog:
        assert region.match is not None
        weights = region.match.array("weights")
        assert set(np.unique(weights)) <= {-1, 0, 1} and np.abs(weights).mean() > 0.1
        assert region.graph.types[region.output].dtype is DType.INT8


def test_elementwise_operators_pass_through(tmp_path: Path) -> None:
    """A table between two layers is looked up on the core in the engines' byte order: nothing is converted there."""
    builder = GraphBuilder("net")
    rng = np.random.default_rng(0)
    value = builder.input("x", TensorType((1, 6, 9, 8), DType.INT8))
    for name in ("first", "second"):
        if name == "second":
            value = builder.add(Lookup(), [value, builder.constant("table", rng.permutation(256).astype(np.int8))], "t")
        weights = builder.constant(f"{name}_w", rng.integers(-90, 90, (8, 3, 3, 8)).astype(np.int8))
        padded = builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 0), [value], f"{name}_padded")
        total = builder.add(Conv2d(), [padded, weights], f"{name}_total")
        parameters = [builder.constant(f"{name}_{i}", np.array([v], np.int32)) for i, v in enumerate((1, 99, 8))]
        scaled = builder.add(ScaleShift(), [total, *parameters], f"{name}_scaled")
        value = builder.add(Clip(-128, 127, DType.INT8), [scaled], name)
    graph, target = builder.finish([value]), load_target("diana")
    compiled = compile_graph(graph, target, Options())
    assert [region.place for region in compiled.regions] == ["dma", "digital", "core", "digital", "dma"]
    write_project(compiled.project, tmp_path / "build")
    inputs = sample_inputs(graph)
    result = run_build(open_build(tmp_path / "build", target), "iss", [inputs])
    np.testing.assert_array_equal(result.outputs[0][value], evaluate(graph, inputs)[value])
    assert [(c.maker, c.readers) for c in make_report(result).conversions] == [
        ("input", ("digital",)),
        ("digital", ("output",)),
    ]


@pytest.mark.parametrize(("name", "copied"), [("resnet8", 0), ("ds_cnn", 0), ("mobilenet_v1", 1)])
def test_parts_of_a_pool_are_computed_where_they_belong(name: str, copied: int) -> None:
    """But for one that does not begin at a multiple of 8 bytes, as kernels take it."""
    compiled = run(name, "digital").compiled
    joints = {
        index
        for index, region in enumerate(compiled.regions)
        if isinstance(region.graph.nodes[0].operator, Concat) and region.graph.types[region.output].shape[1:3] == (1, 1)
    }
    copies = [one for one in compiled.plan.program.statements if isinstance(one, Copy) and one.layer in joints]
    assert len(joints) == 1 and len(copies) == copied


@pytest.mark.parametrize(("size", "place"), [(4, "core"), (12, "core"), (128, "dma")])
def test_few_bytes_change_their_layout_on_the_core(size: int, place: str) -> None:
    regions = compile_graph(dense(128, size), load_target("diana"), Options()).regions
    assert [one.place for one in regions if isinstance(one.graph.nodes[0].operator, Relayout)] == ["dma", place]
