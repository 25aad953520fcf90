"""Random integer networks, much of which is not needed."""

from __future__ import annotations

import random

import numpy as np

from dovetail.compile import sample_inputs
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.operators.movement import Concat, Pad, Slice, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.types import DType, TensorType


class Drawn:
    """A random integer network that leaves much unread."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.builder = GraphBuilder(f"drawn_{seed}")
        size = (1, self.random.randint(7, 17), self.random.randint(7, 17), self.random.randint(1, 6))
        self.values = [self.builder.input("x", TensorType(size, DType.INT8))]

    def shape(self, value: str) -> tuple[int, ...]:
        return self.builder.type_of(value).shape

    def narrow(self, value: str) -> str:
        """int8 again."""
        channels = self.shape(value)[-1]
        multiplier = self.numbers.integers(1 << 30, (1 << 31) - 1, channels).astype(np.int32)
        names = [self.builder.constant("m", multiplier), self.builder.constant("s", np.full(channels, -3, np.int32))]
        return self.builder.add(Clip(-128, 127, DType.INT8), [self.builder.add(Requantize(), [value, *names])])

    def convolution(self, x: str) -> str:
        depthwise, padded, step = (self.random.random() < p for p in (0.3, 0.6, 0.3))
        if padded:
            x = self.builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 3), [x])
        depth, outputs = self.shape(x)[3], self.random.randint(1, 6)
        shape = (1, 3, 3, depth) if depthwise else (outputs, 3, 3, depth)
        weights = self.builder.constant("w", self.numbers.integers(-9, 9, shape).astype(np.int8))
        kind = DepthwiseConv2d if depthwise else Conv2d
        stride = (1 + step, 1 + step)
        return self.narrow(self.builder.add(kind(stride, input_zero_point=3), [x, weights]))

    def pool(self, x: str) -> str:
        pad = self.random.choice([0, 0, 1])
        return self.builder.add(MaxPool2d((2, 2), (2, 2), ((0, pad), (pad, 0))), [x])

    def average(self, x: str) -> str:
        pad = self.random.choice([0, 1])
        pooled = self.builder.add(AveragePool2d((3, 3), (2, 2), ((pad, pad), (0, pad))), [x])
        return self.builder.add(Clip(-128, 127, DType.INT8), [pooled])

    def slice(self, x: str) -> str:
        start = tuple(self.random.randint(0, size // 3) for size in self.shape(x))
        sizes = zip(start, self.shape(x), strict=True)
        stop = tuple(self.random.randint(max(first + 1, 2 * size // 3), size) for first, size in sizes)
        step = (1, self.random.choice([1, 1, 2]), 1, 1)
        return self.builder.add(Slice((0, *start[1:]), (1, *stop[1:]), step), [x])

    def add(self, x: str) -> str:
        others = [value for value in self.values if self.shape(value) == self.shape(x)]
        return self.narrow(self.builder.add(Add(), [self.wide(x), self.wide(self.random.choice(others))]))

    def wide(self, x: str) -> str:
        names = [self.builder.constant("n", np.array([number], np.int32)) for number in (1 << 30, 4)]
        return self.builder.add(Requantize(), [x, *names])

    def join(self, x: str) -> str:
        rest = [value for value in self.values if self.shape(value)[:3] == self.shape(x)[:3]]
        return self.builder.add(Concat(3), [x, self.random.choice(rest)])

    def turn(self, x: str) -> str:
        return self.builder.add(Transpose((0, 2, 1, 3)), [x])

    def graph(self) -> Graph:
        """Some steps, each of a value there is already, most often the newest."""
        steps = [
            self.convolution,
            self.convolution,
            self.pool,
            self.average,
            self.slice,
            self.slice,
            self.add,
            self.join,
            self.turn,
        ]
        for _ in range(self.random.randint(3, 9)):
            x = self.values[-1] if self.random.random() < 0.7 else self.random.choice(self.values)
            if min(self.shape(x)[1:3]) >= 4:
                self.values.append(self.random.choice(steps)(x))
        outputs = {self.values[-1], *([self.random.choice(self.values[1:])] if self.random.random() < 0.3 else [])}
        return self.builder.finish(sorted(outputs))


def assert_same(graph: Graph, other: Graph) -> None:
    """Same ends, same outputs to the bit."""
    assert [other.types[n] for n in (*other.inputs, *other.outputs)] == [
        graph.types[n] for n in (*graph.inputs, *graph.outputs)
    ]
    for seed in range(2):
        inputs = sample_inputs(graph, seed)
        wanted, found = evaluate(graph, inputs), evaluate(other, inputs)
        for name in graph.outputs:
            np.testing.assert_array_equal(found[name], wanted[name])
