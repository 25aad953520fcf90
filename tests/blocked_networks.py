"""Builds small int8 networks of layers that the made-up engine, and the core beside it, compute."""

from __future__ import annotations

import numpy as np

from dovetail.graph.graph import Graph, GraphBuilder
from dovetail.graph.types import DType, TensorType
from dovetail.operators.arithmetic import Add, Clip, Requantize
from dovetail.operators.linear import Conv2d, FullyConnected
from dovetail.operators.movement import Pad, Reshape
from dovetail.operators.pooling import AveragePool2d


class Network:
    """Builds a small int8 network."""

    def __init__(self, *shape: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.builder = GraphBuilder("small")
        self.x = self.builder.input("x", TensorType(shape, DType.INT8))

    def requantised(self, sums: str, stem: str, channels: int) -> str:
        """int8 again, with parameters per channel (or one for all)."""
        multiplier = self.random.integers(1 << 30, (1 << 31) - 1, channels).astype(np.int32)
        names = [self.builder.constant("m", multiplier), self.builder.constant("s", np.full(channels, -9, np.int32))]
        scaled = self.builder.add(Requantize(output_zero_point=int(self.random.integers(-9, 9))), [sums, *names])
        return self.builder.add(Clip(-128, 127, DType.INT8), [scaled], stem)

    def convolution(self, x: str, channels: int, kernel: int, stem: str, stride: int = 1, pad: bool = True) -> str:
        """A convolution on the engine, padded where the kernel is 3."""
        depth = self.builder.type_of(x).shape[-1]
        if kernel == 3 and pad:
            x = self.builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 5), [x], f"{stem}_pad")
        shape = (channels, kernel, kernel, depth)
        weights = self.builder.constant("weights", self.random.integers(-127, 128, shape).astype(np.int8))
        bias = self.builder.constant("bias", self.random.integers(-3000, 3000, channels).astype(np.int32))
        sums = self.builder.add(Conv2d((stride, stride), input_zero_point=5), [x, weights, bias])
        return self.requantised(sums, stem, channels)

    def addition(self, a: str, b: str, stem: str, parameters: int = 1) -> str:
        """Two values added on the core; requantised with parameters per channel if there are several."""
        raised = []
        for value in (a, b):
            names = [self.builder.constant("m", np.array([1 << 30], np.int32)),
                     self.builder.constant("s", np.array([9], np.int32))]  # fmt: skip
            raised.append(self.builder.add(Requantize(), [value, *names]))
        return self.requantised(self.builder.add(Add(), raised), stem, parameters)

    def pooled(self, x: str, stem: str) -> str:
        """The mean over the image, on the core."""
        size = self.builder.type_of(x).shape[1:3]
        mean = self.builder.add(AveragePool2d((size[0], size[1]), (1, 1)), [x], f"{stem}_mean")
        return self.builder.add(Clip(-128, 127, DType.INT8), [mean], stem)

    def dense(self, x: str, channels: int, stem: str) -> str:
        """A dense layer on the engine."""
        depth = self.builder.type_of(x).elements
        flat = self.builder.add(Reshape((1, depth)), [x], f"{stem}_flat")
        weights = self.builder.constant("weights", self.random.integers(-127, 128, (channels, depth)).astype(np.int8))
        bias = self.builder.constant("bias", self.random.integers(-999, 999, channels).astype(np.int32))
        sums = self.builder.add(FullyConnected(input_zero_point=-3), [flat, weights, bias])
        return self.requantised(sums, stem, channels)

    def finish(self, *outputs: str) -> Graph:
        """The graph."""
        return self.builder.finish(outputs)
