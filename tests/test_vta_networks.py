"""Whole networks on the VTA: model file to firmware on the simulated chip, compared with the integer graph."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.codegen.emit.project import defines
from dovetail.compile import Compiled, Options, compile_graph, compile_model, prepare, sample_inputs
from dovetail.guests import zoo
from dovetail.ir.graph import Graph, Node, evaluate
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Array
from dovetail.program.ir import Copy
from dovetail.run import RunResult, open_build, run_build
from dovetail.target import Target
from dovetail.targets import load_target
from firmware import require_chip
from oracles import derived_file
from test_end_to_end import integer_graph, network_file, output_step, run, stored

pytestmark = pytest.mark.oracles

MOST_LSB = {"ic_resnet8": 6, "kws_dscnn": 4, "vww_mobilenetv1": 4}
"""Largest difference from `tflm` before the softmax, in steps of the logits, as measured."""
LEAST_AGREED = {"ic_resnet8": 12, "kws_dscnn": 13, "vww_mobilenetv1": 13}
"""Inputs of 13 for which the decision is the reference's, as measured; the inputs are seeded noise, with near ties."""
MOST_STEPS = 4
"""Of the ONNX model's output, as measured."""
RUN = 4
"""Stored inputs run on the simulated chip; the integer graph, which it equals, is evaluated on all of them."""
SMALL = """
from dovetail.targets.vta import target
from dovetail.targets.vta.config import VtaConfig

TARGET = target(VtaConfig(block=8, inp_bytes=8192, wgt_bytes=65536, acc_bytes=32768), "small")
"""


@cache
def compiled_network(name: str) -> Compiled:
    """A network for `vta`, its logits a second output."""
    target, graph = load_target("vta"), integer_graph(network_file(name))
    for rewrite in target.policy(None).rewrites:
        graph = rewrite.apply(graph)
    return compile_graph(graph, target, Options(), model=network_file(name))


def assert_equals_graph(compiled: Compiled, inputs: list[dict[str, Array]], result: RunResult) -> None:
    """Every output byte."""
    for given, outputs in zip(inputs, result.outputs, strict=True):
        expected = evaluate(compiled.graph, given)
        for value in compiled.graph.outputs:
            np.testing.assert_array_equal(outputs[value], expected[value])


def on_core(compiled: Compiled) -> list[Node]:
    """Operators of the network that are not on the engine."""
    return [node for region in compiled.regions if region.engine is None for node in region.graph.nodes]


def macs_on_core(compiled: Compiled) -> list[Node]:
    """Linear layers among them."""
    return [node for node in on_core(compiled) if isinstance(node.operator, Conv2d | DepthwiseConv2d | FullyConnected)]


@pytest.mark.parametrize("name", MOST_LSB)
def test_networks_equal_the_integer_graph(name: str, tmp_path: Path) -> None:
    """On the simulated chip; everything that multiplies is on the engine."""
    require_chip()
    compiled = compiled_network(name)
    inputs, _ = stored(name, compiled)
    inputs = inputs[:RUN]
    result = run(compiled, tmp_path / "build", inputs)
    assert_equals_graph(compiled, inputs, result)
    assert macs_on_core(compiled) == []
    copies = [one for one in compiled.plan.program.statements if isinstance(one, Copy)]
    moved = [one for one in copies if not one.strips and one.source.layout == one.destination.layout]
    assert not moved, "operands and bands lie where they belong; only changes of layout and borders are left"
    inference = result.simulation.inferences[0]
    macs = sum(activity.macs for activity in inference.activities["vta"])
    print(f"{name}: {inference.total_cycles} cycles, {len(inference.activities['vta'])} launches, {macs} MACs on vta")
    assert macs > 0


@pytest.mark.parametrize("name", MOST_LSB)
def test_decisions_are_those_of_micro(name: str) -> None:
    """The class the network decides for, and how far it is from TensorFlow Lite Micro before the softmax.

    A decision may differ only where the reference's own margin is within the difference on both sides.
    """
    compiled = compiled_network(name)
    inputs, reference = stored(name, compiled)
    largest, agreed, margins = 0, 0, []
    for index, given in enumerate(inputs):
        found = evaluate(compiled.graph, given)
        answer = int(found[compiled.graph.outputs[0]].reshape(-1).argmax())
        micro = reference[f"out_{index}__tflm"].reshape(-1)
        agreed += bool(micro[answer] == micro.max())
        if f"pretail_{index}__tflm" in reference:
            wanted = reference[f"pretail_{index}__tflm"].reshape(-1).astype(int)
            largest = max(largest, int(np.abs(found[compiled.graph.outputs[1]].reshape(-1) - wanted).max()))
            margins.append(int(wanted.max() - wanted[answer]))
        else:
            assert micro[answer] == micro.max()
    print(
        f"{name}: decides as tflm for {agreed} of {len(inputs)} inputs, the others within {max(margins)} LSB of it, "
        f"largest difference {largest} LSB before the softmax"
    )
    assert len(inputs) == 13 and agreed >= LEAST_AGREED[name]
    assert largest <= MOST_LSB[name]
    assert max(margins) <= 2 * largest


def test_quantised_onnx(tmp_path: Path) -> None:
    """DS-CNN as QDQ ONNX: the firmware equals the graph, which is near ONNX Runtime's output."""
    require_chip()
    compiled = compile_model(derived_file("kws_dscnn_qdq_s8s8_perchannel.onnx"), load_target("vta"), Options())
    with np.load(derived_file("kws_dscnn_qdq_s8s8_perchannel.onnx.ref.npz")) as archive:
        image, expected = archive["in_0"], archive["out_0__ort_precise"]
    (value,), (output,) = compiled.graph.inputs, compiled.graph.outputs
    inputs = [{value: image.reshape(compiled.graph.types[value].shape)}]
    result = run(compiled, tmp_path / "build", inputs)
    assert_equals_graph(compiled, inputs, result)
    assert macs_on_core(compiled) == []
    difference = np.abs(result.outputs[0][output].reshape(expected.shape) - expected)
    steps = float(difference.max()) / output_step(compiled.graph)
    print(f"{steps:.2f} steps of the output from ONNX Runtime")
    assert steps <= MOST_STEPS + 1e-3


def digits_model(folder: Path) -> Path:
    """The small network of the zoo."""
    path = folder / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    return path


def linear_share(graph: Graph, compiled: Compiled) -> float:
    """Part of a network's multiply-accumulates in regions of the engine."""
    linear = (Conv2d, DepthwiseConv2d, FullyConnected)
    total = {
        node.origin: node.operator.macs([graph.types[v] for v in node.inputs])
        for node in graph.nodes
        if isinstance(node.operator, linear)
    }
    core = {
        node.origin
        for region in compiled.regions
        if region.engine is None
        for node in region.graph.nodes
        if isinstance(node.operator, linear)
    }
    return 1 - sum(total[origin] for origin in core) / sum(total.values())


@pytest.mark.parametrize("small", [False, True], ids=["vta", "a user's block of 8"])
def test_zoo_network(small: bool, tmp_path: Path) -> None:
    """Built in, and by a target file of the user's; the driver is told the lanes."""
    require_chip()
    target = user_target(tmp_path) if small else load_target("vta")
    compiled = compile_model(digits_model(tmp_path), target, Options())
    inputs = [sample_inputs(compiled.graph, seed) for seed in range(2)]
    write_project(compiled.project, tmp_path / "build")
    result = run_build(open_build(tmp_path / "build", target), "iss", inputs)
    assert_equals_graph(compiled, inputs, result)
    assert linear_share(prepare(digits_model(tmp_path), load_target("riscv"), Options()), compiled) == 1.0
    assert defines("digits", target)["VTA_BLOCK"] == ("0x8u" if small else "0x10u")


def user_target(folder: Path) -> Target:
    """A target file beside the model."""
    path = folder / "small.py"
    path.write_text(SMALL)
    target = load_target(str(path))
    assert (target.name, target.engines[0].device.arguments["block"]) == ("small", 8)
    return target
