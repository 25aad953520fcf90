"""Dead computation: what nobody reads is not computed, and every bit that is read stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, sample_inputs
from dovetail.ir.crop import part, total_macs, trim, work
from dovetail.ir.graph import Graph, GraphBuilder, evaluate, verify
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Pad, Slice
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import DType, TensorType
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from drawn import Drawn, assert_same
from firmware import require_chip


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
