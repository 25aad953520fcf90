"""ONNX operators between QuantizeLinear and DequantizeLinear: as integers alone, near ONNX Runtime's floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.ir.graph import evaluate, verify
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType
from dovetail.kernels import supports
from dovetail.quantize import quantize
from dovetail.read.onnx import load_onnx
from dovetail.schedule.partition import partition
from dovetail.targets import load_target

Shape = tuple[int, ...]
SCALES = {"x": 0.03, "b": 0.02}
ZERO_POINTS = {"x": 7, "b": -11}


def qdq(
    kind: str, shapes: dict[str, Shape], scale: float, constants: dict[str, Array], **attributes: object
) -> onnx.ModelProto:
    """A model of one operator with quantised int8 operands x and b (those in `shapes`), constants and result."""
    nodes, inputs, weights, names = [], [], [], []

    def quantised(name: str, step: Array, offset: int, axis: int) -> str:
        parameters = [(f"{name}_scale", step.astype(np.float32)), (f"{name}_zp", np.full(step.shape, offset, np.int8))]
        weights.extend(numpy_helper.from_array(array, entry) for entry, array in parameters)
        operands = [name, *(entry for entry, _ in parameters)]
        nodes.append(helper.make_node("DequantizeLinear", operands, [f"{name}_real"], axis=axis))
        return f"{name}_real"

    for name, shape in shapes.items():
        inputs.append(helper.make_tensor_value_info(name, TensorProto.INT8, shape))
        names.append(quantised(name, np.array(SCALES[name]), ZERO_POINTS[name], 1))
    for name, array in constants.items():
        weights.append(numpy_helper.from_array(array, name))
        channels = array.shape[1] if name == "w" else 1
        step = np.linspace(0.004, 0.01, channels) if channels > 1 else np.array(0.01)
        names.append(quantised(name, step, 0, 1) if array.dtype == np.int8 else name)
    nodes.append(helper.make_node(kind, names, ["real"], **attributes))
    weights += [numpy_helper.from_array(np.array(scale, np.float32), "s"), numpy_helper.from_array(np.int8(3), "z")]
    nodes.append(helper.make_node("QuantizeLinear", ["real", "s", "z"], ["y"]))
    graph = helper.make_graph(
        nodes, "qdq", inputs, [helper.make_tensor_value_info("y", TensorProto.INT8, None)], weights
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


RNG = np.random.default_rng(4)
WEIGHTS = RNG.integers(-127, 128, (4, 3, 3, 2)).astype(np.int8)
SLOPES = RNG.integers(-60, 60, (3, 1, 1)).astype(np.int8)
EMPTY = np.zeros(0, np.float32)
IMAGE: Shape = (1, 4, 5, 6)
LINEAR = {"roi": EMPTY, "scales": np.array([1, 1, 2.0, 1.5], np.float32)}
NEAREST = {"roi": EMPTY, "scales": np.array([1, 1, 2, 3], np.float32)}
CASES: dict[str, tuple[onnx.ModelProto, int]] = {
    "ConvTranspose": (qdq("ConvTranspose", {"x": IMAGE}, 0.2, {"w": WEIGHTS}, strides=[2, 1], pads=[1, 0, 0, 1]), 1),
    "ConvTranspose in groups": (
        qdq("ConvTranspose", {"x": IMAGE}, 0.1, {"v": WEIGHTS}, strides=[2, 3], group=2, output_padding=[1, 0]),
        1,
    ),
    "PRelu": (qdq("PRelu", {"x": (1, 3, 4, 5)}, 0.03, {"a": SLOPES}), 1),
    "MatMul": (qdq("MatMul", {"x": (2, 5, 7), "b": (2, 7, 4)}, 0.09, {}), 1),
    "Resize linear": (
        qdq("Resize", {"x": IMAGE}, 0.03, LINEAR, mode="linear"),
        1,
    ),
    "Resize nearest": (
        qdq("Resize", {"x": IMAGE}, 0.03, NEAREST, mode="nearest"),
        1,
    ),
    "Div": (qdq("Div", {"x": (3, 40), "b": (3, 40)}, 0.5, {}), 1),
    "Softmax": (qdq("Softmax", {"x": (4, 9)}, 1 / 256, {}, axis=-1), 1),
    "LogSoftmax": (qdq("LogSoftmax", {"x": (4, 9)}, 0.05, {}, axis=-1), 2),
    "ReduceMax": (qdq("ReduceMax", {"x": (3, 4, 5)}, 0.03, {"axes": np.array([1])}), 1),
}
"""A model and how many steps its result may differ from the float result rounded."""


@pytest.mark.parametrize("name", CASES)
def test_integers_alone_stay_near_onnx_runtime(name: str) -> None:
    pytest.importorskip("onnxruntime")
    model, steps = CASES[name]
    data = model.SerializeToString()
    graph = quantize(simplify(load_onnx("qdq", data, "qdq", Path())))
    verify(graph)
    assert all(graph.types[node.output].dtype is not DType.FLOAT32 for node in graph.nodes)
    for region in partition(graph, load_target("riscv")):
        assert region.is_view or supports(region.graph) is None
    session = runtime_session(data, optimised=False)  # floats between the rounding
    for seed in range(3):
        rng = np.random.default_rng(seed)
        feeds = {value: rng.integers(-128, 128, graph.types[value].shape).astype(np.int8) for value in graph.inputs}
        if name == "Div":
            feeds["b"] = np.where(np.abs(feeds["b"].astype(int) + 11) < 4, 40, feeds["b"]).astype(np.int8)
        expected = session.run(None, feeds)[0].astype(int)
        found = evaluate(graph, feeds)[graph.outputs[0]].astype(int)
        assert np.unique(expected).size > 4
        assert np.abs(found - expected).max() <= steps
