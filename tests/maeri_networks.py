"""Networks of published shapes with random int8 weights, for MAERI's tests and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dovetail.graph.graph import Graph, GraphBuilder
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.arithmetic import Clip
from dovetail.operators.linear import Conv2d, FullyConnected
from dovetail.operators.movement import Concat, Pad, Reshape
from dovetail.operators.pooling import MaxPool2d


@dataclass
class Shapes:
    """Builds a network layer by layer; every layer's sums are limited to int8."""

    name: str
    image: tuple[int, int, int]
    """Rows, columns, channels."""
    builder: GraphBuilder = field(init=False)
    random: np.random.Generator = field(init=False)
    input: str = field(init=False)

    def __post_init__(self) -> None:
        self.builder = GraphBuilder(self.name)
        self.random = np.random.default_rng(1)
        self.input = self.builder.input("image", TensorType((1, *self.image), DType.INT8))

    def weights(self, *shape: int) -> str:
        """Small random weights."""
        return self.builder.constant("weights", self.random.integers(-3, 4, shape).astype(np.int8))

    def convolution(self, x: str, kernel: int, filters: int, stride: int = 1, pad: int | None = None) -> str:
        """Zeros around, a convolution, int8."""
        around = kernel // 2 if pad is None else pad
        if around:
            edge = (0, around, around, 0)
            x = self.builder.add(Pad(edge, edge, 0), [x])
        depth = self.builder.type_of(x).shape[3]
        sums = self.builder.add(Conv2d((stride, stride)), [x, self.weights(filters, kernel, kernel, depth)])
        return self.builder.add(Clip(0, 127, DType.INT8), [sums], origin="")

    def pool(self, x: str, kernel: int = 2, stride: int = 2) -> str:
        """Largest of each window."""
        return self.builder.add(MaxPool2d((kernel, kernel), (stride, stride)), [x])

    def dense(self, x: str, outputs: int) -> str:
        """Flat, a dense layer, int8."""
        kind = self.builder.type_of(x)
        if len(kind.shape) > 2:
            x = self.builder.add(Reshape((1, kind.elements)), [x])
        sums = self.builder.add(FullyConnected(), [x, self.weights(outputs, kind.elements)])
        return self.builder.add(Clip(-128, 127, DType.INT8), [sums])

    def inputs(self) -> Mapping[str, Array]:
        """A random image."""
        return {self.input: self.random.integers(-128, 128, (1, *self.image)).astype(np.int8)}


def lenet() -> tuple[Graph, Mapping[str, Array]]:
    """LeNet-5 (LeCun et al., 1998), pooling by maximum."""
    net = Shapes("lenet", (28, 28, 1))
    x = net.pool(net.convolution(net.input, 5, 6))
    x = net.pool(net.convolution(x, 5, 16, pad=0))
    for outputs in (120, 84, 10):
        x = net.dense(x, outputs)
    return net.builder.finish([x]), net.inputs()


def alexnet() -> tuple[Graph, Mapping[str, Array]]:
    """AlexNet's convolutions (Krizhevsky et al., 2012) in the one-tower form."""
    net = Shapes("alexnet", (227, 227, 3))
    x = net.pool(net.convolution(net.input, 11, 96, stride=4, pad=0), 3)
    x = net.pool(net.convolution(x, 5, 256), 3)
    for filters in (384, 384, 256):
        x = net.convolution(x, 3, filters)
    return net.builder.finish([x]), net.inputs()


def vgg16() -> tuple[Graph, Mapping[str, Array]]:
    """All convolutions of VGG-16 (Simonyan and Zisserman, 2014)."""
    net = Shapes("vgg16", (224, 224, 3))
    x = net.input
    for filters, times in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(times):
            x = net.convolution(x, 3, filters)
        x = net.pool(x)
    return net.builder.finish([x]), net.inputs()


def inception() -> tuple[Graph, Mapping[str, Array]]:
    """The first Inception block of GoogLeNet (Szegedy et al., 2014): 1x1, 3x3 and 5x5 side by side."""
    net = Shapes("inception", (28, 28, 192))
    parts = [net.convolution(net.input, 1, 64)]
    for kernel, reduced, filters in ((3, 96, 128), (5, 16, 32)):
        parts.append(net.convolution(net.convolution(net.input, 1, reduced), kernel, filters))
    edge = (0, 1, 1, 0)
    padded = net.builder.add(Pad(edge, edge, -128), [net.input])
    parts.append(net.convolution(net.pool(padded, 3, 1), 1, 32))
    return net.builder.finish([net.builder.add(Concat(3), parts)]), net.inputs()


NETWORKS: Mapping[str, Callable[[], tuple[Graph, Mapping[str, Array]]]] = {
    "LeNet": lenet,
    "AlexNet": alexnet,
    "VGG-16": vgg16,
    "Inception": inception,
}
