"""Quantised models quantised anew: what their integers stand for, and scales an engine takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import dovetail
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.guests import zoo
from dovetail.guests.ptq import finds_two_bits, input_steps, prepare
from dovetail.guests.ptq.preparation import as_reals, is_quantised, unquantised
from dovetail.guests.ptq.steps import TensorQuantisation
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.arithmetic import Dequantize, Quantize
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType, TensorType
from dovetail.read import load_model
from dovetail.run import open_build, run_build
from dovetail.target import Policy
from dovetail.targets import load_target
from firmware import require_chip

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "mlperf_tiny"
needs_models = pytest.mark.skipif(not MODELS.is_dir(), reason="../shared/models is not there")


def test_integers_become_the_numbers_they_stand_for() -> None:
    for graph in (quantised(), simplify(quantised())):  # the latter moves integers
        assert is_quantised(graph)
        made = unquantised(graph)
        x = np.random.default_rng(0).integers(-128, 128, (1, 4, 4, 2)).astype(np.int8)
        real = as_reals(x, STEPS).astype(np.float32)
        found, wanted = evaluate(made, {"x": real}), evaluate(graph, {"x": x})
        assert np.array_equal(found[made.outputs[0]], wanted["y"])
        assert not is_quantised(made)
    assert input_steps(quantised()) == {"x": STEPS}
    assert any(isinstance(node.operator, Clamp) for node in made.nodes), "the ReLU that was in the rounding"


STEPS = TensorQuantisation(DType.INT8, 0.25, -7)


def quantised() -> Graph:
    """x dequantised, padded, pooled, rounded."""
    builder = GraphBuilder("net")
    x = builder.input("x", TensorType((1, 4, 4, 2), DType.INT8))
    of_x = [builder.constant("s", np.array([0.25], np.float32)), builder.constant("z", np.array([-7], np.int32))]
    real = builder.add(Dequantize(), [x, *of_x], "real")
    padded = builder.add(Pad((0, 1, 1, 0), (0, 0, 0, 0), 0.0), [real])
    pooled = builder.add(MaxPool2d((2, 2), (1, 1)), [padded])
    of_y = [builder.constant("t", np.array([0.25], np.float32)), builder.constant("u", np.array([-128], np.int32))]
    whole = builder.add(Quantize(DType.INT8), [pooled, *of_y], "whole")
    return builder.finish([builder.add(Dequantize(), [whole, *of_y], "y")])


def test_a_quantised_zoo_model(tmp_path: Path) -> None:
    path = tmp_path / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    graph = prepare(load_model(path), path.name)
    assert not any(isinstance(node.operator, Quantize | Dequantize) for node in graph.nodes)


def test_a_port_without_the_rewrite_is_told_of_two_bits() -> None:
    target = load_target("ne16")
    assert finds_two_bits(target)
    assert not finds_two_bits(replace(target, policies=(Policy("bare", "nothing is rewritten", ()),)))


def many(model: str) -> tuple[Array, list[Array]]:
    """The model's 12 inputs, and what TensorFlow Lite Micro computes of each."""
    file = np.load(MODELS / f"{model}.many.npz")
    return np.stack([file[f"in_{n}"] for n in range(12)]), [file[f"out_{n}__tflm"] for n in range(12)]


def sixteen(model: str) -> Array:
    """The 12 inputs, and four that lie between two of them."""
    inputs, _ = many(model)
    between = (inputs[:4].astype(np.int16) + inputs[4:8]) // 2
    return np.concatenate([inputs, between.astype(np.int8)])


@needs_models
@pytest.mark.parametrize(
    ("model", "sums"),
    [("ic_resnet8_int8", 6), ("kws_dscnn_int8", 0), ("vww_mobilenetv1_int8", 0), ("ad_autoencoder_int8", 0)],
)
def test_an_int8_file_gets_onto_an_engine_of_shifts(tmp_path: Path, model: str, sums: int) -> None:
    """Per channel in the file, one shift per layer on the engine: every layer with weights goes there. Of ResNet8's
    three sums the last, before the pool, is computed in four parts."""
    np.savez(tmp_path / "x.npz", x=sixteen(model))
    wish = ["quantize", str(MODELS / f"{model}.tflite"), "--target", "diana", "--data", str(tmp_path / "x.npz")]
    assert dovetail(*wish, "-o", str(tmp_path / "made.onnx")) == 0
    compiled = compile_model(tmp_path / "made.onnx", load_target("diana"), Options())
    assert all(region.engine is not None for region in compiled.regions if region.macs)
    assert sum(region.offload is not None and region.offload.name == "sum" for region in compiled.regions) == sums
    assert compiled.graph.types[compiled.graph.inputs[0]].dtype is DType.INT8
    if model == "ic_resnet8_int8":
        require_chip()
        write_project(compiled.project, tmp_path / "build")
        build = open_build(tmp_path / "build")
        (one,) = run_build(build, "iss", [sample_inputs(compiled.graph)]).simulation.inferences
        assert 100_000 < (one.total_cycles or 0) <= 160_000
