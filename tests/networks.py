"""Integer networks with random weights, built layer by layer; and those of published shapes that several tests use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Reshape
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.types import Array, DType, TensorType


@dataclass
class Net:
    """Adds layers; all activations have one type and one zero point.

    A layer's `stem` names its result, and what is computed on the way there after it.
    """

    name: str
    shape: tuple[int, ...]
    """Of the input `x`, without the batch."""
    zero_point: int = 0
    dtype: DType = DType.INT8
    weights: int = 127
    """The largest magnitude of a weight."""
    requantised: bool = True
    """False: sums without a bias are limited to the type, nothing else."""
    seed: int = 0
    builder: GraphBuilder = field(init=False)
    random: np.random.Generator = field(init=False)
    x: str = field(init=False)

    def __post_init__(self) -> None:
        self.builder = GraphBuilder(self.name)
        self.random = np.random.default_rng(self.seed)
        self.x = self.builder.input("x", TensorType((1, *self.shape), self.dtype))

    def convolution(
        self,
        x: str,
        channels: int,
        kernel: int = 3,
        stem: str = "",
        *,
        stride: int = 1,
        pad: int | None = None,
        relu: bool = False,
    ) -> str:
        """A convolution, padded by `pad` (half the kernel unless given) on every side."""
        around = kernel // 2 if pad is None else pad
        if around:
            edge = (0, around, around, 0)
            x = self.builder.add(Pad(edge, edge, self.zero_point), [x], f"{stem or 'value'}_pad")
        shape = (channels, kernel, kernel, self.builder.type_of(x).shape[-1])
        operands = [x, *self._constants(shape)]
        sums = self.builder.add(Conv2d((stride, stride), input_zero_point=self.zero_point), operands, origin="Conv")
        return self.limited(sums, stem, shape, relu)

    def dense(self, x: str, outputs: int, stem: str = "") -> str:
        """A dense layer on whatever the value is."""
        kind = self.builder.type_of(x)
        if len(kind.shape) > 2:
            x = self.builder.add(Reshape((1, kind.elements)), [x], f"{stem or 'value'}_flat")
        operands = [x, *self._constants((outputs, kind.elements))]
        sums = self.builder.add(FullyConnected(self.zero_point), operands, origin="Gemm")
        return self.limited(sums, stem, (outputs, kind.elements), relu=False)

    def limited(self, sums: str, stem: str, shape: tuple[int, ...], relu: bool) -> str:
        """Sums in the network's type again.

        Args:
            sums: int32; stem: as everywhere; relu: whether nothing is below zero.
            shape: of the weights: a multiplier for each of its first axis, a shift for the spread of such sums.
        """
        if self.requantised:
            multiplier = self.random.integers(1 << 30, (1 << 31) - 1, shape[0]).astype(np.int32)
            spread = 75 * 24 * np.sqrt(np.prod(shape[1:])) / 40
            shift = np.full(shape[0], -int(np.ceil(np.log2(spread))), np.int32)
            names = [self.builder.constant("multiplier", multiplier), self.builder.constant("shift", shift)]
            sums = self.builder.add(Requantize(output_zero_point=self.zero_point), [sums, *names])
        low = self.zero_point if relu else self.dtype.low
        return self.builder.add(Clip(low, self.dtype.high, self.dtype), [sums], stem)

    def _constants(self, shape: tuple[int, ...]) -> list[str]:
        drawn = self.random.integers(-self.weights, self.weights + 1, shape).astype(np.int8)
        names = [self.builder.constant("weights", drawn)]
        if self.requantised:
            bias = self.random.integers(-4096, 4096, shape[0]).astype(np.int32)
            names.append(self.builder.constant("bias", bias))
        return names

    def pool(self, x: str, kernel: int = 2, stride: int = 2, padding: int = 0) -> str:
        """The largest of each window."""
        pads = ((padding, padding), (padding, padding))
        return self.builder.add(MaxPool2d((kernel, kernel), (stride, stride), pads), [x], origin="MaxPool")

    def mean(self, x: str, stem: str = "") -> str:
        """The mean over the image."""
        rows, columns = self.builder.type_of(x).shape[1:3]
        mean = self.builder.add(AveragePool2d((rows, columns), (1, 1)), [x], f"{stem or 'value'}_mean", origin="Mean")
        return self.builder.add(Clip(self.dtype.low, self.dtype.high, self.dtype), [mean], stem)

    def addition(self, a: str, b: str, stem: str = "", parameters: int = 1, relu: bool = False) -> str:
        """Half the sum of two values; requantised with parameters per channel if there are several."""
        raised = []
        for value in (a, b):
            names = self._parameters(1, -3)
            operator = Requantize(input_zero_point=self.zero_point, left_shift=6)
            raised.append(self.builder.add(operator, [value, *names]))
        total = self.builder.add(Add(), raised)
        operator = Requantize(output_zero_point=self.zero_point)
        value = self.builder.add(operator, [total, *self._parameters(parameters, -2)])
        low = self.zero_point if relu else self.dtype.low
        return self.builder.add(Clip(low, self.dtype.high, self.dtype), [value], stem)

    def _parameters(self, count: int, shift: int) -> list[str]:
        return [
            self.builder.constant("multiplier", np.full(count, 1 << 30, np.int32)),
            self.builder.constant("shift", np.full(count, shift, np.int32)),
        ]

    def finish(self, *outputs: str) -> Graph:
        """The graph."""
        return self.builder.finish(outputs)

    def inputs(self) -> dict[str, Array]:
        """A random input."""
        drawn = self.random.integers(self.dtype.low, self.dtype.high + 1, (1, *self.shape))
        return {self.x: drawn.astype(self.dtype.numpy)}


Fed = tuple[Graph, Mapping[str, Array]]
"""A network and an input."""


def limited_net(name: str, *shape: int) -> Net:
    """A network whose sums are only limited to int8: what MAERI's simulator of orders computes."""
    return Net(name, shape, weights=3, requantised=False, seed=1)


def fed(net: Net, *outputs: str) -> Fed:
    """The network that gives these values, and an input."""
    return net.finish(*outputs), net.inputs()


def lenet() -> Fed:
    """LeNet-5 (LeCun et al., 1998), pooling by maximum."""
    net = limited_net("lenet", 28, 28, 1)
    x = net.pool(net.convolution(net.x, 6, 5, relu=True))
    x = net.pool(net.convolution(x, 16, 5, pad=0, relu=True))
    for outputs in (120, 84, 10):
        x = net.dense(x, outputs)
    return fed(net, x)


def alexnet() -> Fed:
    """AlexNet's convolutions (Krizhevsky et al., 2012) in the one-tower form."""
    net = limited_net("alexnet", 227, 227, 3)
    x = net.pool(net.convolution(net.x, 96, 11, stride=4, pad=0, relu=True), 3)
    x = net.pool(net.convolution(x, 256, 5, relu=True), 3)
    for filters in (384, 384, 256):
        x = net.convolution(x, filters, relu=True)
    return fed(net, x)


def inception() -> Fed:
    """The first Inception block of GoogLeNet (Szegedy et al., 2014): 1x1, 3x3 and 5x5 side by side."""
    net = limited_net("inception", 28, 28, 192)
    parts = [net.convolution(net.x, 64, 1, relu=True)]
    for kernel, reduced, filters in ((3, 96, 128), (5, 16, 32)):
        parts.append(net.convolution(net.convolution(net.x, reduced, 1, relu=True), filters, kernel, relu=True))
    edge = (0, 1, 1, 0)
    padded = net.builder.add(Pad(edge, edge, -128), [net.x])
    parts.append(net.convolution(net.pool(padded, 3, 1), 32, 1, relu=True))
    return fed(net, net.builder.add(Concat(3), parts))


def vgg16_convolutions(net: Net, width: float = 1.0) -> str:
    """All convolutions of VGG-16 (configuration D of arXiv 1409.1556)."""
    value = net.x
    for channels, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            value = net.convolution(value, int(channels * width), relu=True)
        value = net.pool(value)
    return value


def limited_vgg16() -> Fed:
    """VGG-16 without its dense layers."""
    net = limited_net("vgg16", 224, 224, 3)
    return fed(net, vgg16_convolutions(net))


ORDERED: Mapping[str, Callable[[], Fed]] = {
    "LeNet": lenet,
    "AlexNet": alexnet,
    "VGG-16": limited_vgg16,
    "Inception": inception,
}
"""Networks that are put in order for MAERI."""


def image_net(name: str, size: int, channels: int = 3) -> Net:
    """A quantised network on images, its activations with the zero point -3."""
    return Net(name, (size, size, channels), zero_point=-3)


def branches(size: int = 28, channels: int = 192, filters: Sequence[int] = (64, 96, 128, 16, 32)) -> Graph:
    """An Inception block, quantised: 1x1, and 3x3 and 5x5 behind a 1x1 each, of one input, joined; and a classifier. As
    given, the first block of GoogLeNet without its pool.

    Args:
        size: rows and columns. channels: of the input.
        filters: of 1x1, of the 1x1 before 3x3 and of that, of the 1x1 before 5x5 and of that.
    """
    net, (one, *others) = image_net("branches", size, channels), filters
    parts = [net.convolution(net.x, one, 1, "one", relu=True)]
    for kernel, reduced, wide in ((3, *others[:2]), (5, *others[2:])):
        narrow = net.convolution(net.x, reduced, 1, f"to_{kernel}", relu=True)
        parts.append(net.convolution(narrow, wide, kernel, f"by_{kernel}", relu=True))
    joined = net.builder.add(Concat(3), parts, "joined")
    return net.finish(net.dense(net.mean(net.convolution(joined, one, 1, "after", relu=True)), 10, "scores"))


def mixed_kernels(size: int = 28, channels: int = 3, filters: int = 8) -> Graph:
    """Filters of 3x3, 4x4 and 5x5 on one image, behind a layer of 3x3."""
    net = image_net("mixed", size, channels)
    image = net.convolution(net.x, channels, 3, "image", relu=True)
    return net.finish(*(net.convolution(image, filters, side, f"by_{side}", pad=0) for side in (3, 4, 5)))


def vgg16(size: int = 224, width: float = 1.0, classes: int = 1000) -> Graph:
    """VGG-16, quantised."""
    net = image_net("vgg16", size)
    value = vgg16_convolutions(net, width)
    for outputs in (int(4096 * width), int(4096 * width), classes):
        value = net.dense(value, outputs)
    return net.finish(value)


def resnet50(size: int = 224, width: float = 1.0, classes: int = 1000) -> Graph:
    """ResNet-50 (arXiv 1512.03385), quantised, the stride in the 3x3 convolution of a block."""
    net = image_net("resnet50", size)
    value = net.pool(net.convolution(net.x, int(64 * width), 7, stride=2, relu=True), 3, 2, 1)
    for channels, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        narrow = int(channels * width)
        for block in range(blocks):
            stride = first if block == 0 else 1
            inner = net.convolution(value, narrow, 1, relu=True)
            inner = net.convolution(inner, narrow, stride=stride, relu=True)
            inner = net.convolution(inner, 4 * narrow, 1)
            kept = net.convolution(value, 4 * narrow, 1, stride=stride) if block == 0 else value
            value = net.addition(kept, inner, relu=True)
    return net.finish(net.dense(net.mean(value), classes))


def single(size: int, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, dtype: DType = DType.INT8) -> Graph:
    """One layer: a convolution with a ReLU, or a dense layer for a size of 1."""
    net = Net("single", (size, size, inputs), zero_point=-3 if dtype is DType.INT8 else 100, dtype=dtype)
    return net.finish(net.convolution(net.x, outputs, kernel, stride=stride, relu=True))
