"""MAERI's orders hold all of a network's products, whatever its strides and dilations, or refuse it by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import shared_dir
from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, prepare, sample_inputs
from dovetail.errors import ModelError
from dovetail.ir.crop import total_macs
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, MatrixProduct
from dovetail.ir.types import DType, TensorType
from dovetail.run import open_build, run_build
from dovetail.target import OrderRequest
from dovetail.targets import load_target
from dovetail.targets.maeri import target
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import network
from firmware import require_chip
from maeri_trials import simulate
from test_maeri_schedule import CONFIGS, check


def fault(name: str) -> Graph:
    """A network that once showed a fault, as `dovetail schedule` reads it."""
    return prepare(shared_dir() / "faults" / "maeri" / name, load_target("maeri"), Options(allow_float=True))


@pytest.mark.parametrize("name", ["dil2.onnx", "stride21.onnx", "four.onnx", "lit.onnx"])
def test_no_product_is_left_out(name: str) -> None:
    graph = fault(name)
    order = arrange(network(graph), MaeriConfig())
    result = simulate(order, sample_inputs(graph))
    assert result.products == total_macs(graph)


def windows(seed: int) -> Graph:
    """A convolution and a depthwise one with any strides and dilations."""
    random, builder = np.random.default_rng(seed), GraphBuilder("windows")
    channels = int(random.integers(1, 6))
    x = builder.input(
        "x", TensorType((1, int(random.integers(20, 30)), int(random.integers(20, 30)), channels), DType.INT8)
    )
    for kind in (DepthwiseConv2d, Conv2d):
        stride, dilation = ((int(number) for number in random.integers(1, 4, 2)) for _ in range(2))
        shape = (1, 3, 2, channels) if kind is DepthwiseConv2d else (int(random.integers(2, 9)), 2, 3, channels)
        weights = builder.constant("weights", random.integers(-3, 4, shape).astype(np.int8))
        if kind is Conv2d:
            dilation = (1, int(random.integers(1, 3)))
            stride = (1, 1)
        sums = builder.add(kind(tuple(stride), tuple(dilation)), [x, weights])
        x = builder.add(Clip(-128, 127, DType.INT8), [sums])
    return builder.finish([x])


@pytest.mark.parametrize("name", CONFIGS)
def test_strides_and_dilations(name: str) -> None:
    for seed in range(4):
        graph = windows(seed)
        order = arrange(network(graph), CONFIGS[name])
        check(graph, sample_inputs(graph), order)
        assert sum(work.layer.macs for work in order.network.works) == total_macs(graph)


def test_strides_and_dilations_on_the_chip(tmp_path: Path) -> None:
    require_chip()
    chip = target(MaeriConfig(64, 16, 16))
    graph = windows(1)
    compiled, inputs = compile_graph(graph, chip, Options()), sample_inputs(graph)
    assert all(region.engine for region in compiled.regions if region.macs)
    write_project(compiled.project, tmp_path / "build")
    result = run_build(open_build(tmp_path / "build", chip), "iss", [inputs])
    for name, array in evaluate(graph, inputs).items():
        np.testing.assert_array_equal(result.outputs[0][name], array)


def test_what_no_order_holds_is_refused_by_name() -> None:
    builder = GraphBuilder("attention")
    x = builder.input("x", TensorType((1, 4, 4), DType.FLOAT32))
    graph = builder.finish([builder.add(MatrixProduct(), [x, x], origin="MatMul 3 (scores)")])
    with pytest.raises(ModelError, match=r"MatMul 3 \(scores\).*64 products would be in no order") as error:
        network(graph)
    assert error.value.hint
    builder = GraphBuilder("pair")
    x = builder.input("x", TensorType((2, 5, 5, 1), DType.INT8))
    sums = builder.add(Conv2d(), [x, builder.constant("w", np.ones((1, 2, 2, 1), np.int8))], origin="Conv 0 (first)")
    with pytest.raises(ModelError, match=r"Conv 0 \(first\).*2 images"):
        network(builder.finish([sums]))


def test_a_float_network_is_told_to_quantise() -> None:
    graph = fault("lit.onnx")
    ordering = load_target("maeri").ordering
    assert ordering is not None
    ordered = ordering(graph, OrderRequest(seconds=0.0))
    assert any("No image for an FPGA" in note and "dovetail quantize" in note for note in ordered.notes)
