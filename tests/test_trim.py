"""Dead computation: what nobody reads is not computed, and every bit that is read stays."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, sample_inputs
from dovetail.ir.crop import part, total_macs, trim, work
from dovetail.ir.graph import Graph, GraphBuilder, evaluate, verify
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.operators.movement import Concat, Pad, Slice, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.types import DType, TensorType
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from firmware import require_chip


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


@pytest.mark.parametrize("group", range(6))
def test_random_graphs_stay_exact(group: int) -> None:
    smaller = 0
    for seed in range(group * 80, group * 80 + 80):
        graph = Drawn(seed).graph()
        trimmed = trim(graph)
        verify(trimmed)
        assert_same(graph, trimmed)
        assert work(trimmed) <= work(graph) and total_macs(trimmed) <= total_macs(graph)
        smaller += total_macs(trimmed) < total_macs(graph)
        again = trim(trimmed)
        assert work(again) <= work(trimmed)
    print(f"{smaller} of 80 graphs have fewer MACs")
    assert smaller >= 8


def test_random_parts_equal_the_whole() -> None:
    """Bands of rows of the output, each from slices of the input."""
    parts = refused = 0
    for seed in range(150):
        graph = replace(drawn := Drawn(seed).graph(), outputs=drawn.outputs[:1])
        (output,) = graph.outputs
        shape, inputs = graph.types[output].shape, sample_inputs(graph, seed)
        wanted = evaluate(graph, inputs)[output]
        for first in range(0, shape[1], 3):
            box = ((0, 1), (first, min(first + 3, shape[1])), (0, shape[2]), (0, shape[3]))
            try:
                made = part(graph, {output: box})
            except ValueError:
                refused += 1
                continue
            verify(made)
            np.testing.assert_array_equal(evaluate(made, inputs)[output], wanted[:, slice(*box[1])])
            parts += 1
    print(f"{parts} parts, {refused} refused")
    assert parts > 5 * refused


def odd_convolution_and_pool() -> Graph:
    """15x15 after a padded convolution; a 2x2 pool of stride 2 reads 14x14 of it, and two of five channels are read."""
    drawn = Drawn(1)
    drawn.builder = GraphBuilder("odd")
    x = drawn.builder.input("x", TensorType((1, 15, 15, 3), DType.INT8))
    padded = drawn.builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 3), [x])
    weights = drawn.builder.constant("w", drawn.numbers.integers(-9, 9, (5, 3, 3, 3)).astype(np.int8))
    value = drawn.narrow(drawn.builder.add(Conv2d(input_zero_point=3), [padded, weights]))
    pooled = drawn.builder.add(MaxPool2d((2, 2), (2, 2)), [value])
    return drawn.builder.finish([drawn.builder.add(Slice((0, 0, 0, 1), (1, 7, 7, 3), (1, 1, 1, 1)), [pooled])])


def test_a_pool_and_a_slice_reach_the_convolution() -> None:
    graph = odd_convolution_and_pool()
    trimmed = trim(graph)
    assert total_macs(graph) == 15 * 15 * 5 * 27
    assert total_macs(trimmed) == 14 * 14 * 2 * 27
    assert not [node for node in trimmed.nodes if isinstance(node.operator, Slice)], "the slice is the convolution now"
    assert_same(graph, trimmed)


def test_the_whole_way(tmp_path: Path) -> None:
    """Firmware of the trimmed network equals the untrimmed graph, in fewer instructions."""
    require_chip()
    graph, target = odd_convolution_and_pool(), load_target("riscv")
    counts = []
    for number, chosen in enumerate((graph, trim(graph))):
        folder = tmp_path / str(number)
        write_project(compile_graph(chosen, target, Options()).project, folder)
        inputs = sample_inputs(graph)
        result = run_build(open_build(folder), "iss", [inputs])
        wanted = evaluate(graph, inputs)[graph.outputs[0]]
        np.testing.assert_array_equal(result.outputs[0][graph.outputs[0]], wanted)
        counts.append(result.simulation.inferences[0].instructions or 0)
    print(f"{counts[0]} instructions, trimmed {counts[1]}")
    assert counts[1] < 0.6 * counts[0]


def test_a_branch_that_reads_more_keeps_it() -> None:
    """Two readers of different parts: computed over the smallest box that holds both."""
    drawn = Drawn(2)
    drawn.builder = GraphBuilder("two")
    x = drawn.builder.input("x", TensorType((1, 12, 12, 2), DType.INT8))
    value = drawn.convolution(x)
    _, rows, columns, channels = drawn.shape(value)
    tops = [(0, 5), (3, 7)]
    ends = [Slice((0, a, 0, 0), (1, b, columns, channels), (1, 1, 1, 1)) for a, b in tops]
    graph = drawn.builder.finish(
        [drawn.builder.add(MaxPool2d((2, 2), (1, 1)), [drawn.builder.add(e, [value])]) for e in ends]
    )
    trimmed = trim(graph)
    assert trimmed.types[value].shape == (1, 7, columns, channels) and rows > 7
    assert_same(graph, trimmed)
