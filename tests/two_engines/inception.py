"""A small Inception network: two blocks of four branches (1x1, 3x3, twice 3x3, pooled), joined; random weights."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dovetail.ir.types import Array

SCALE = 0.05
"""Of every activation, so that branches are joined as they are."""


class _Maker:
    """Nodes and constants as they are added."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(seed)
        self.constant("scale", np.float32(SCALE))
        self.constant("zero", np.uint8(0))
        self.constant("weight_zero", np.int8(0))

    def constant(self, name: str, value: Array | np.generic) -> str:
        """A constant of that name."""
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, kind: str, name: str, inputs: list[str], **attributes: object) -> str:
        """A node with one result, both of that name."""
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def convolution(self, name: str, x: str, depth: int, channels: int, kernel: int) -> str:
        """A convolution that keeps the image's size, with ReLU by its result's zero point."""
        weights = self._random.integers(-127, 128, (channels, depth, kernel, kernel)).astype(np.int8)
        spread = 1.0 / (50 * np.sqrt(depth * kernel * kernel))
        bias = self._random.integers(-2000, 2000, channels).astype(np.int32)
        inputs = [
            x,
            "scale",
            "zero",
            self.constant(f"{name}_w", weights),
            self.constant(f"{name}_s", np.float32(spread)),
            "weight_zero",
            "scale",
            "zero",
            self.constant(f"{name}_b", bias),
        ]
        return self.node("QLinearConv", name, inputs, kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4)

    def block(self, name: str, x: str, depth: int, width: int) -> str:
        """Four branches of `width` channels each, joined."""
        one = self.convolution(f"{name}/1x1", x, depth, width, 1)
        three = self.convolution(f"{name}/3x3_in", x, depth, width, 1)
        three = self.convolution(f"{name}/3x3", three, width, width, 3)
        five = self.convolution(f"{name}/5x5_in", x, depth, width, 1)
        five = self.convolution(f"{name}/5x5_a", five, width, width, 3)
        five = self.convolution(f"{name}/5x5_b", five, width, width, 3)
        pool = self.node("MaxPool", f"{name}/pool", [x], kernel_shape=[3, 3], pads=[1] * 4)
        pool = self.convolution(f"{name}/pool_out", pool, depth, width, 1)
        return self.node("Concat", f"{name}/joined", [one, three, five, pool], axis=1)


def inception(size: int = 9, width: int = 48, seed: int = 0) -> bytes:
    """The network as an ONNX file: an image of `size` x `size` and 8 channels, 4 * `width` channels of each block."""
    maker = _Maker(seed)
    x = maker.convolution("stem", "input", 8, 4, 3)
    x = maker.block("a", x, 4, width)
    x = maker.convolution("between", x, 4 * width, 4, 1)
    x = maker.block("b", x, 4, width)
    maker.convolution("head", x, 4 * width, 10, 1)
    shape = [1, 8, size, size]
    graph = helper.make_graph(
        maker.nodes,
        "inception",
        [helper.make_tensor_value_info("input", TensorProto.UINT8, shape)],
        [helper.make_tensor_value_info("head", TensorProto.UINT8, [1, 10, size, size])],
        maker.constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    onnx.checker.check_model(model)
    return model.SerializeToString()
