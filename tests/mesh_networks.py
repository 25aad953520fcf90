"""Networks of the shapes of VGG-16 and ResNet-50 as integer graphs, with random int8 weights."""

from __future__ import annotations

import numpy as np

from dovetail.graph.graph import Graph, GraphBuilder
from dovetail.graph.types import DType, TensorType
from dovetail.operators.arithmetic import Add, Clip, Requantize
from dovetail.operators.linear import Conv2d, FullyConnected
from dovetail.operators.movement import Pad, Reshape
from dovetail.operators.pooling import AveragePool2d, MaxPool2d


class Builder:
    """Adds quantised layers; activations are int8 with the zero point -3."""

    def __init__(self, name: str, size: int, channels: int = 3, seed: int = 0) -> None:
        self.graph = GraphBuilder(name)
        self.random = np.random.default_rng(seed)
        self.value = self.graph.input("image", TensorType((1, size, size, channels), DType.INT8))

    def channels(self, value: str) -> int:
        """Channels of a value."""
        return self.graph.type_of(value).shape[-1]

    def _requantised(self, value: str, depth: int, low: int) -> str:
        channels = self.channels(value)
        multiplier = self.random.integers(1 << 30, (1 << 31) - 1, channels).astype(np.int32)
        # keeps the spread of sums of `depth` products of random bytes within int8
        shift = np.full(channels, -int(np.ceil(np.log2(75 * 24 * np.sqrt(depth) / 40))), np.int32)
        parameters = [self.graph.constant("multiplier", multiplier), self.graph.constant("shift", shift)]
        value = self.graph.add(Requantize(output_zero_point=-3), [value, *parameters])
        return self.graph.add(Clip(low, 127, DType.INT8), [value])

    def _constants(self, shape: tuple[int, ...]) -> list[str]:
        weights = self.random.integers(-127, 128, shape).astype(np.int8)
        bias = self.random.integers(-4096, 4096, shape[0]).astype(np.int32)
        return [self.graph.constant("weights", weights), self.graph.constant("bias", bias)]

    def convolution(self, value: str, outputs: int, kernel: int = 3, stride: int = 1, relu: bool = True) -> str:
        """A convolution of the same size (over the stride), requantised."""
        margin = (kernel - 1) // 2
        inputs = self.channels(value)
        if margin:
            value = self.graph.add(Pad((0, margin, margin, 0), (0, margin, margin, 0), -3), [value])
        operands = [value, *self._constants((outputs, kernel, kernel, inputs))]
        value = self.graph.add(Conv2d((stride, stride), input_zero_point=-3), operands, origin="Conv")
        return self._requantised(value, kernel * kernel * inputs, -3 if relu else -128)

    def dense(self, value: str, outputs: int) -> str:
        """A dense layer on whatever the value is."""
        elements = self.graph.type_of(value).elements
        flat = self.graph.add(Reshape((1, elements)), [value])
        value = self.graph.add(FullyConnected(-3), [flat, *self._constants((outputs, elements))], origin="Gemm")
        return self._requantised(value, elements, -128)

    def pool(self, value: str, kernel: int = 2, stride: int = 2, padding: int = 0) -> str:
        """A maximum pool."""
        pads = ((padding, padding), (padding, padding))
        return self.graph.add(MaxPool2d((kernel, kernel), (stride, stride), pads), [value], origin="MaxPool")

    def mean(self, value: str) -> str:
        """The mean over the image."""
        size = self.graph.type_of(value).shape[1]
        value = self.graph.add(AveragePool2d((size, size), (size, size)), [value], origin="Mean")
        return self.graph.add(Clip(-128, 127, DType.INT8), [value])

    def residual(self, a: str, b: str) -> str:
        """The sum of two values, halved, with a ReLU."""
        terms = []
        for value in (a, b):
            parameters = [self.graph.constant("m", np.array([1 << 30], np.int32)),
                          self.graph.constant("s", np.array([-3], np.int32))]  # fmt: skip
            terms.append(self.graph.add(Requantize(input_zero_point=-3, left_shift=6), [value, *parameters]))
        total = self.graph.add(Add(), terms)
        parameters = [self.graph.constant("m", np.array([1 << 30], np.int32)),
                      self.graph.constant("s", np.array([-2], np.int32))]  # fmt: skip
        value = self.graph.add(Requantize(output_zero_point=-3), [total, *parameters])
        return self.graph.add(Clip(-3, 127, DType.INT8), [value])

    def finish(self, value: str) -> Graph:
        """The network that gives a value."""
        return self.graph.finish([value])


def vgg16(size: int = 224, width: float = 1.0, classes: int = 1000) -> Graph:
    """VGG-16 (configuration D of arXiv 1409.1556)."""
    net = Builder("vgg16", size)
    value = net.value
    for channels, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            value = net.convolution(value, int(channels * width))
        value = net.pool(value)
    for outputs in (int(4096 * width), int(4096 * width), classes):
        value = net.dense(value, outputs)
    return net.finish(value)


def resnet50(size: int = 224, width: float = 1.0, classes: int = 1000) -> Graph:
    """ResNet-50 (arXiv 1512.03385), the stride in the 3x3 convolution of a block."""
    net = Builder("resnet50", size)
    value = net.pool(net.convolution(net.value, int(64 * width), 7, 2), 3, 2, 1)
    for channels, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        narrow = int(channels * width)
        for block in range(blocks):
            stride = first if block == 0 else 1
            inner = net.convolution(net.convolution(value, narrow, 1), narrow, 3, stride)
            inner = net.convolution(inner, 4 * narrow, 1, relu=False)
            kept = net.convolution(value, 4 * narrow, 1, stride, relu=False) if block == 0 else value
            value = net.residual(kept, inner)
    return net.finish(net.dense(net.mean(value), classes))


def single(size: int, inputs: int, outputs: int) -> Graph:
    """One 3x3 convolution with a ReLU."""
    net = Builder("single", size, inputs)
    return net.finish(net.convolution(net.value, outputs))
