"""Tunes ten single layers on ne16 that no heuristic was made with, and prints default and tuned cycles.

    python scripts/tuning_benchmark.py [--trials N] [--jobs N] [--seed N]

Every layer is a network of its own with input and output in L2, random weights, the engine's requantisation; cycles
are those of the `iss` simulator, outputs compared with the integer graph. "bound" is what no choice can beat: the
engine busy with the layer in one piece, or the DMA moving every byte once, whichever is longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dovetail.graph.graph import Graph, GraphBuilder
from dovetail.graph.types import DType, TensorType
from dovetail.operators.arithmetic import Clip, Requantize
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad


@dataclass(frozen=True)
class Shape:
    """A layer: kind, input rows, columns, channels, output channels, kernel, stride."""

    kind: str
    height: int
    width: int
    depth: int
    outputs: int
    kernel: int = 1
    stride: int = 1

    @property
    def text(self) -> str:
        """One line."""
        if self.kind == "dense":
            return f"dense {self.depth} -> {self.outputs}"
        stride = f" stride {self.stride}" if self.stride > 1 else ""
        kernel = f"{self.kernel}x{self.kernel}"
        return f"{self.kind} {kernel}{stride} {self.height}x{self.width}x{self.depth} -> {self.outputs}"


LAYERS = (
    Shape("conv", 28, 28, 48, 96, 3),
    Shape("conv", 19, 31, 24, 40, 3),
    Shape("conv", 57, 57, 16, 24, 3, 2),
    Shape("conv", 14, 14, 160, 64, 1),
    Shape("conv", 35, 35, 32, 64, 1),
    Shape("conv", 7, 7, 192, 128, 3),
    Shape("depthwise", 45, 45, 48, 48, 3),
    Shape("depthwise", 40, 24, 64, 64, 3, 2),
    Shape("dense", 1, 1, 784, 144),
    Shape("conv", 11, 9, 320, 80, 1),
)


def network(shape: Shape, seed: int = 7) -> Graph:
    """The layer as an integer graph: padding where the kernel is 3x3, uint8 in and out."""
    random, builder = np.random.default_rng(seed), GraphBuilder("layer")
    dense, deep = shape.kind == "dense", shape.kind != "depthwise"
    form = (1, shape.depth) if dense else (1, shape.height, shape.width, shape.depth)
    value = builder.input("x", TensorType(form, DType.UINT8))
    if shape.kernel == 3:
        value = builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 0), [value])
    window = (shape.kernel, shape.kernel)
    size = (shape.outputs, shape.depth) if dense else (shape.outputs if deep else 1, *window, shape.depth)
    weights = builder.constant("weights", random.integers(-127, 128, size).astype(np.int8))
    bias = builder.constant("bias", random.integers(-3000, 3000, shape.outputs).astype(np.int32))
    stride = (shape.stride, shape.stride)
    operator = FullyConnected() if dense else Conv2d(stride) if deep else DepthwiseConv2d(stride)
    sums = builder.add(operator, [value, weights, bias])
    taps = shape.kernel**2 * (shape.depth if deep else 1)
    multiplier = builder.constant("m", random.integers(1 << 30, (1 << 31) - 1, shape.outputs).astype(np.int32))
    shift = builder.constant("s", np.full(shape.outputs, -7 - int(np.log2(taps) / 2), np.int32))
    scaled = builder.add(Requantize(output_zero_point=100), [sums, multiplier, shift])
    graph = builder.finish([builder.add(Clip(0, 255, DType.UINT8), [scaled])])
    return replace(graph, nodes=tuple(replace(node, origin="layer") for node in graph.nodes))
