"""Float networks and data for the tests of quantisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dovetail.guests import zoo
from dovetail.guests.ptq import prepare
from dovetail.ir.graph import Graph
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.types import Array
from dovetail.read import load_model


def digits(folder: Path) -> tuple[Path, Graph]:
    """The zoo's digits network as a float file, and prepared."""
    path = folder / "digits.onnx"
    path.write_bytes(zoo.build_float("digits"))
    return path, prepare(load_model(path), path.name)


def varied(seed: int = 0) -> onnx.ModelProto:
    """A float network with batch normalisation, a depthwise layer, a residual addition, a concatenation, pools, a
    sigmoid and a dense layer; its channels differ a lot in size."""
    generator = np.random.default_rng(seed)
    nodes, constants = [], []

    def constant(name: str, array: Array) -> str:
        """Add a constant."""
        constants.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def convolution(source: str, name: str, inputs: int, outputs: int, size: int, group: int = 1) -> str:
        """Add a convolution whose channels span a factor of 30."""
        spread = 10.0 ** generator.uniform(-0.75, 0.75, outputs)
        weights = generator.standard_normal((outputs, inputs // group, size, size)) * spread.reshape(-1, 1, 1, 1)
        parameters = [constant(f"{name}.w", weights / 4), constant(f"{name}.b", generator.standard_normal(outputs))]
        pads = [size // 2] * 4
        nodes.append(helper.make_node("Conv", [source, *parameters], [name], pads=pads, group=group, name=name))
        return name

    def node(kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        """Add any other operator."""
        nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    x = convolution("image", "conv1", 3, 8, 3)
    rows = [constant(f"bn.{key}", generator.uniform(0.5, 1.5, 8)) for key in ("scale", "shift", "mean", "variance")]
    x = node("Relu", [node("BatchNormalization", [x, *rows], "bn")], "relu1")
    shortcut = x
    x = node("Relu", [convolution(x, "depthwise", 8, 8, 3, group=8)], "relu2")
    x = node("Add", [convolution(x, "conv2", 8, 8, 1), shortcut], "sum")
    left = node("MaxPool", [x], "max", kernel_shape=[2, 2], strides=[2, 2])
    right = node("Sigmoid", [node("AveragePool", [x], "mean", kernel_shape=[2, 2], strides=[2, 2])], "gate")
    x = node("Concat", [left, right], "both", axis=1)
    x = node("Flatten", [node("Relu", [x], "relu3")], "flat")
    dense = [constant("dense.w", generator.standard_normal((5, 256)) / 16), constant("dense.b", np.zeros(5))]
    node("Gemm", [x, *dense], "scores", transB=1)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("image", [1, 3, 8, 8]), ("scores", [1, 5]))
    ]
    graph = helper.make_graph(nodes, "varied", [ends[0]], [ends[1]], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def images(count: int, seed: int = 1) -> Array:
    """Samples for `varied`, float32 [count, 1, 3, 8, 8]."""
    generator = np.random.default_rng(seed)
    coarse = generator.standard_normal((count, 1, 3, 4, 4)).repeat(2, 3).repeat(2, 4)
    return (coarse + 0.3 * generator.standard_normal((count, 1, 3, 8, 8))).astype(np.float32)


def onnx_runtime(model: onnx.ModelProto | bytes, inputs: dict[str, Array], optimised: bool = True) -> Array:
    """The first output of every sample in ONNX Runtime [N, elements]."""
    session = runtime_session(model, optimised)
    count = len(next(iter(inputs.values())))
    found = [session.run(None, {name: array[index] for name, array in inputs.items()})[0] for index in range(count)]
    return np.stack(found).reshape(count, -1)
