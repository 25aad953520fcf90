"""Networks that are float, or float in part, compiled with --float and run on both simulators, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dovetail.cli.main import all_commands, command_line
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model
from dovetail.errors import ModelError
from dovetail.ir.graph import evaluate
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.types import Array
from dovetail.run import open_build, run_build
from dovetail.targets import load_target

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle")
helper, numpy_helper = onnx.helper, onnx.numpy_helper

RANDOM = np.random.default_rng(8)


def real(*shape: int) -> Array:
    return RANDOM.normal(0, 0.4, shape).astype(np.float32)


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(op_type, inputs.split(), [output], name=output, **attributes)


def model(
    nodes: list[Any], constants: dict[str, Array], shape: tuple[int, ...], outputs: dict[str, tuple[int, int]]
) -> Any:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, kind, [None] * rank) for name, (kind, rank) in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def float_network() -> Any:
    """Convolutions with groups and borders, normalisation, activations, pools, a dense layer, its best class."""
    nodes = [
        node("Conv", "x w1 b1", "c1", pads=[1, 1, 1, 1], strides=[2, 1]),
        node("BatchNormalization", "c1 scale offset mean variance", "n1"),
        node("HardSwish", "n1", "a1"),
        node("Conv", "a1 w2", "c2", group=6, auto_pad="SAME_UPPER"),
        node("Add", "c2 a1", "sum"),
        node("Conv", "sum w3", "c3", group=2, dilations=[1, 2]),
        node("Sigmoid", "c3", "gate"),
        node("Mul", "c3 gate", "a3"),
        node("MaxPool", "a3", "pooled", kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", "pooled", "mean_value"),
        node("Flatten", "mean_value", "flat"),
        node("Gemm", "flat w4 b4", "scores", transB=1),
        node("Softmax", "scores", "shares"),
        node("ArgMax", "scores", "best", axis=1, keepdims=0),
    ]
    constants = {
        "w1": real(6, 3, 3, 3),
        "b1": real(6),
        "w2": real(6, 1, 3, 3),
        "w3": real(8, 3, 2, 2),
        "w4": real(5, 8),
        "b4": real(5),
        "scale": real(6),
        "offset": real(6),
        "mean": real(6),
        "variance": real(6) ** 2 + 0.5,
    }
    kinds = {"shares": (onnx.TensorProto.FLOAT, 2), "best": (onnx.TensorProto.INT64, 1)}
    return model(nodes, constants, (1, 3, 12, 10), kinds)


def mixed_network() -> Any:
    """A quantised convolution, then layers in float."""
    nodes = [
        node("QuantizeLinear", "x sx z", "xq"),
        node("DequantizeLinear", "xq sx z", "xr"),
        node("DequantizeLinear", "wq sw z", "wr"),
        node("Conv", "xr wr", "c", pads=[1, 1, 1, 1]),
        node("QuantizeLinear", "c sc z", "cq"),
        node("DequantizeLinear", "cq sc z", "cr"),
        node("Tanh", "cr", "t"),
        node("MatMul", "t m", "y"),
    ]
    constants = {
        "sx": np.array(0.02, np.float32),
        "sw": np.array(0.01, np.float32),
        "sc": np.array(0.05, np.float32),
        "z": np.array(0, np.int8),
        "wq": RANDOM.integers(-90, 90, (4, 3, 3, 3)).astype(np.int8),
        "m": real(6, 7),
    }
    return model(nodes, constants, (1, 3, 6, 6), {"y": (onnx.TensorProto.FLOAT, 4)})


NETWORKS = {"float": float_network(), "mixed": mixed_network()}
STEPS = {"float": 2e-6, "mixed": 0.1}
"""How far from ONNX Runtime a result may be: a requantisation may differ by one step, which the matrix multiplies."""


@pytest.mark.parametrize("name", NETWORKS)
def test_both_simulators_compute_what_onnx_runtime_does(name: str, tmp_path: Path) -> None:
    path, target = tmp_path / f"{name}.onnx", load_target("riscv")
    onnx.save(NETWORKS[name], path)
    with pytest.raises(ModelError, match=r"not quantised(?s:.*)--float"):
        compile_model(path, target, Options())
    compiled = compile_model(path, target, Options(allow_float=True))
    write_project(compiled.project, tmp_path / "build")
    build = open_build(tmp_path / "build")
    assert build.manifest.uses_float
    shape = compiled.graph.types["x"].shape
    feeds = [{"x": RANDOM.normal(0, 1, shape).astype(np.float32)} for _ in range(3)]
    session = runtime_session(path, optimised=False)
    names = [output.name for output in session.get_outputs()]
    for simulator in ("host", "iss"):
        results = run_build(build, simulator, feeds).outputs
        for feed, outputs in zip(feeds, results, strict=True):
            for output, expected in evaluate(compiled.graph, feed).items():
                np.testing.assert_allclose(outputs[output], expected, rtol=2e-5, atol=2e-6)
            for output, expected in zip(names, session.run(None, feed), strict=True):
                np.testing.assert_allclose(outputs[output], expected, rtol=2e-5, atol=STEPS[name])


def test_borders_and_what_follows_are_computed_with_their_layer(tmp_path: Path) -> None:
    path = tmp_path / "float.onnx"
    onnx.save(NETWORKS["float"], path)
    regions = compile_model(path, load_target("riscv"), Options(allow_float=True)).regions
    names = [region.name.rpartition("_")[0] for region in regions]
    assert "pad" not in names and "add" not in names and "unary" not in names, names


def test_a_quantised_layer_stays_with_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "mixed.onnx"
    onnx.save(NETWORKS["mixed"], path)
    compiled = compile_model(path, load_target("ne16"), Options(allow_float=True))
    assert any(region.engine is not None for region in compiled.regions)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "float.onnx"
    onnx.save(NETWORKS["float"], path)
    arguments = ["compile", str(path), "--target", "riscv", "-o", str(tmp_path / "build")]
    assert CliRunner().invoke(command_line(all_commands()), arguments).exit_code != 0
    assert CliRunner().invoke(command_line(all_commands()), [*arguments, "--float"]).exit_code == 0
    assert (tmp_path / "build" / "dovetail.json").is_file()
