"""Small float networks of many operators: quantised, run by ONNX Runtime, and compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from dovetail.compile import Options, compile_model
from dovetail.guests.ptq import Samples, Settings, prepare, quantise_network
from dovetail.guests.ptq.execute import run
from dovetail.ir.types import Array
from dovetail.read import load_model
from dovetail.targets import load_target
from ptq_networks import onnx_runtime

pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle here (dovetail[check])")
IMAGE = [1, 4, 6, 6]
GENERATOR = np.random.default_rng(0)


def draw(*shape: int) -> Array:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def node(kind: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


CONV = node("Conv", "x w", "c", pads=[1, 1, 1, 1])
RELU = node("Relu", "c", "r")
W = {"w": draw(4, 4, 3, 3)}
NORM = {"s": draw(4), "b": draw(4), "m": draw(4), "v": np.abs(draw(4)) + np.float32(0.5)}
Case = tuple[list[NodeProto], dict[str, Array], list[int], list[int], bool]
"""Nodes from x to y, constants, the shapes of x and y, and whether everything has an integer form."""
CASES: dict[str, Case] = {
    "scaled and shifted": (
        [CONV, node("Div", "c d", "e"), node("Mul", "e f", "g"), node("Add", "g a", "y")],
        {**W, "d": np.float32(3), "f": draw(4, 1, 1), "a": draw(1, 4, 1, 1)},
        IMAGE,
        IMAGE,
        True,
    ),
    "constants behind ReLU": (
        [CONV, RELU, node("Mul", "r f", "g"), node("Sub", "g a", "y")],
        {**W, "f": draw(4, 1, 1), "a": np.array(0.5, np.float32)},
        IMAGE,
        IMAGE,
        True,
    ),
    "PReLU": ([CONV, node("PRelu", "c s", "y")], {**W, "s": draw(4, 1, 1)}, IMAGE, IMAGE, False),
    "hard swish and mean": (
        [CONV, node("HardSwish", "c", "h"), node("ReduceMean", "h axes", "y", keepdims=0)],
        {**W, "axes": np.array([2, 3])},
        IMAGE,
        [1, 4],
        True,
    ),
    **{
        f"{mode} resize, {walk}": (
            [
                CONV,
                RELU,
                helper.make_node("Resize", ["r", "", "", "z"], ["y"], mode=mode, coordinate_transformation_mode=walk),
            ],
            {**W, "z": np.array([1, 4, 9, 12])},
            IMAGE,
            [1, 4, 9, 12],
            True,
        )
        for mode, walk in (("linear", "half_pixel"), ("linear", "align_corners"), ("cubic", "asymmetric"))
    },
    "split and concatenated": (
        [
            CONV,
            helper.make_node("Split", ["c"], ["p", "q"], axis=1, num_outputs=2),
            node("Relu", "p", "r"),
            node("Concat", "r q", "k", axis=1),
            node("Conv", "k w2", "y"),
        ],
        {**W, "w2": draw(3, 4, 1, 1)},
        IMAGE,
        [1, 3, 6, 6],
        True,
    ),
    "transposed convolution": (
        [node("ConvTranspose", "x w", "y", strides=[2, 2])],
        {"w": draw(4, 3, 2, 2)},
        IMAGE,
        [1, 3, 12, 12],
        True,
    ),
    "resized": (
        [
            CONV,
            helper.make_node(
                "Resize",
                ["c", "", "s"],
                ["y"],
                mode="nearest",
                nearest_mode="floor",
                coordinate_transformation_mode="asymmetric",
            ),
        ],
        {**W, "s": np.array([1, 1, 2, 2], np.float32)},
        IMAGE,
        [1, 4, 12, 12],
        True,
    ),
    "one axis": (
        [node("Conv", "x w", "c", pads=[1, 1]), node("Relu", "c", "y")],
        {"w": draw(4, 4, 3)},
        [1, 4, 9],
        [1, 4, 9],
        True,
    ),
    "grouped and pooled": (
        [node("Conv", "x w b", "c", group=2), node("MaxPool", "c", "y", kernel_shape=[2, 2])],
        {"w": draw(6, 2, 3, 3), "b": draw(6)},
        IMAGE,
        [1, 6, 3, 3],
        True,
    ),
    "dense and normalised": (
        [node("Gemm", "x w", "g", transB=1), node("BatchNormalization", "g s b m v", "n"), node("Relu", "n", "y")],
        {"w": draw(4, 8), **NORM},
        [1, 8],
        [1, 4],
        True,
    ),
    "normalised first": (
        [node("BatchNormalization", "x s b m v", "n"), node("Conv", "n w", "y")],
        {**W, **NORM},
        IMAGE,
        [1, 4, 4, 4],
        True,
    ),
    "padded and limited": (
        [node("Pad", "x p", "q"), node("Conv", "q w", "c"), node("Clip", "c low high", "y")],
        {**W, "p": np.array([0, 0, 1, 2, 0, 0, 0, 1]), "low": np.float32(0), "high": np.float32(6)},
        IMAGE,
        [1, 4, 5, 7],
        True,
    ),
    "log softmax": (
        [node("Gemm", "x w", "g"), node("LogSoftmax", "g", "y", axis=1)],
        {"w": draw(8, 5)},
        [1, 8],
        [1, 5],
        False,
    ),
    "a product of computed matrices": (
        [node("Gemm", "x w", "g"), node("Transpose", "g", "t", perm=[1, 0]), node("MatMul", "g t", "y")],
        {"w": draw(8, 5)},
        [3, 8],
        [3, 3],
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_quantised_written_and_compiled(name: str, tmp_path: Path) -> None:
    nodes, constants, source, result, integer = CASES[name]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", source), ("y", result))]
    tensors = [numpy_helper.from_array(np.asarray(array), key) for key, array in constants.items()]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], tensors)
    original = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = tmp_path / "net.onnx"
    onnx.save(original, path)
    data = np.random.default_rng(1).standard_normal((32, *source)).astype(np.float32)
    wanted = onnx_runtime(original, {"x": data})
    found = quantise_network(
        prepare(load_model(path), path.name), Samples({"x": data}, None), load_target("ne16"), Settings()
    )
    onnx.checker.check_model(found.model, full_check=True)
    got = onnx_runtime(found.model, {"x": data})
    assert np.abs(got - wanted).max() <= 0.06 * np.abs(wanted).max()
    ours = run(found.graph, {"x": data})["y"].reshape(got.shape)
    assert np.abs(got - ours).max() <= 0.02 * np.abs(wanted).max()
    onnx.save(found.model, path)
    compile_model(path, load_target("ne16"), Options(allow_float=not integer))
