"""Transposed convolutions in MAERI's orders: no product with the zeros between the elements of their image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph
from dovetail.ir.crop import total_macs
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Pad, Reshape, Slice
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import adapt, without_zeros
from dovetail.program.interpret import sample_inputs
from dovetail.run import open_build, run_build
from dovetail.target import OrderRequest
from dovetail.targets import load_target
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import network
from firmware import require_chip
from maeri_trials import simulate


def transposed(size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], lead: tuple[int, int]) -> Graph:
    """A transposed convolution as Keras' reader writes it: of an image with zeros between its elements."""
    random, builder, zero = np.random.default_rng(sum(size)), GraphBuilder("transposed"), -3
    (height, width), channels, filters = size, 3, 4
    x = builder.input("x", TensorType((1, height, width, channels), DType.INT8))
    apart = builder.add(Reshape((1, height, 1, width, 1, channels)), [x])
    zeros = builder.add(Pad((0,) * 6, (0, 0, stride[0] - 1, 0, stride[1] - 1, 0), zero), [apart])
    wide = builder.add(Reshape((1, height * stride[0], width * stride[1], channels)), [zeros])
    stop = (1, (height - 1) * stride[0] + 1, (width - 1) * stride[1] + 1, channels)
    value = builder.add(Slice((0,) * 4, stop, (1,) * 4), [wide])
    around = (0, *lead, 0)
    value = builder.add(Pad(around, (0, kernel[0] - 1, kernel[1] - 1, 0), zero), [value])
    weights = builder.constant("w", random.integers(-5, 6, (filters, *kernel, channels)).astype(np.int8))
    bias = builder.constant("b", random.integers(-50, 50, filters).astype(np.int32))
    sums = builder.add(Conv2d(input_zero_point=zero), [value, weights, bias], origin="Conv2DTranspose (up)")
    scales = [
        builder.constant(name, random.integers(low, high, filters).astype(np.int32)) for name, low, high in SCALES
    ]
    scaled = builder.add(Requantize(output_zero_point=4, rounding=Rounding.DOUBLE), [sums, *scales])
    return builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled])])


SCALES = (("m", 1 << 30, (1 << 31) - 1), ("s", -3, 0))
"""Multipliers and shifts, one for each channel."""


CASES = [
    ((5, 6), (3, 3), (2, 2), (1, 1)),
    ((5, 6), (3, 3), (2, 2), (2, 2)),
    ((4, 7), (4, 2), (2, 1), (0, 1)),
    ((4, 4), (5, 4), (3, 2), (1, 0)),
    ((6, 5), (2, 2), (2, 2), (0, 0)),
]


@pytest.mark.parametrize("case", CASES)
def test_zeros_are_left_out(case: tuple[tuple[int, int], ...]) -> None:
    graph = transposed(*case)
    plain = without_zeros(graph)
    inputs = sample_inputs(graph)
    for name, array in evaluate(graph, inputs).items():
        np.testing.assert_array_equal(evaluate(plain, inputs)[name], array)
    area = case[2][0] * case[2][1]
    assert total_macs(plain) <= 1.3 * total_macs(graph) / area
    order = arrange(network(plain), MaeriConfig())
    assert simulate(order, inputs).products == total_macs(plain)


def test_taps_that_are_zeros_for_some_filters() -> None:
    """As readers write a transposed convolution whose stride does not divide its kernel: all phases as channels."""
    random, builder = np.random.default_rng(1), GraphBuilder("phases")
    x = builder.input("x", TensorType((1, 7, 6, 3), DType.INT8))
    weights = random.integers(1, 6, (8, 2, 2, 3)).astype(np.int8)
    weights[2:4, 0], weights[4:6, :, 1], weights[6:, 0], weights[6:, :, 1] = 0, 0, 0, 0
    names = [builder.constant("w", weights), builder.constant("b", np.arange(8, dtype=np.int32))]
    sums = builder.add(Conv2d(input_zero_point=7), [x, *names])
    graph = builder.finish([builder.add(Clip(-128, 127, DType.INT8), [sums])])
    plain, inputs = without_zeros(graph), sample_inputs(graph)
    for name, array in evaluate(graph, inputs).items():
        np.testing.assert_array_equal(evaluate(plain, inputs)[name], array)
    assert total_macs(plain) == total_macs(graph) * 9 // 16


def test_schedule_leaves_zeros_out() -> None:
    graph, chip = transposed(*CASES[0]), load_target("maeri")
    assert chip.ordering is not None
    ordered = chip.ordering(adapt(graph, chip.policies[0]), OrderRequest(seconds=0.0, inputs=sample_inputs(graph)))
    assert len(ordered.rows) == 4 and "read back and executed: results equal" in ordered.notes[-1]
    assert sum(int(row[6].replace(",", "")) for row in ordered.rows) < total_macs(graph) / 3


@pytest.mark.parametrize("case", CASES)
def test_firmware_leaves_zeros_out(case: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    """The compiled chip computes the phases that `schedule` orders, and puts them together."""
    require_chip()
    graph, chip = transposed(*case), load_target("maeri")
    adapted, inputs = adapt(graph, chip.policies[0]), sample_inputs(graph)
    compiled = compile_graph(adapted, chip, Options())
    assert sum(region.macs for region in compiled.regions) == total_macs(without_zeros(graph))
    assert all(region.engine for region in compiled.regions if region.macs)
    write_project(compiled.project, tmp_path / "build")
    result = run_build(open_build(tmp_path / "build", chip), "iss", [inputs])
    for name, array in evaluate(graph, inputs).items():
        np.testing.assert_array_equal(result.outputs[0][name], array)
