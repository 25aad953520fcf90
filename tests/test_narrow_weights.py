"""Weights of 4 and 2 bits share bytes in the firmware's constants, and nothing holds them unpacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_graph
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import DType, TensorType
from dovetail.kernels import generate
from dovetail.kernels.sums import packed
from dovetail.quantize import quantize
from dovetail.read.tflite import load_tflite
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from oracles import derived_file

LAYERS: tuple[tuple[Operator, tuple[int, ...], tuple[int, ...]], ...] = (
    (Conv2d(), (1, 6, 6, 8), (10, 3, 3, 8)),
    (DepthwiseConv2d(), (1, 9, 9, 7), (1, 5, 5, 7)),
    (FullyConnected(), (2, 60), (11, 60)),
)


def layer(operator: Operator, shape: tuple[int, ...], kernel: tuple[int, ...], dtype: DType, real: bool) -> Graph:
    builder = GraphBuilder("layer")
    x = builder.input("x", TensorType(shape, DType.FLOAT32 if real else DType.INT8))
    reach = 1 << (dtype.bits - 1)
    weights = np.random.default_rng(1).integers(-reach, reach, kernel).astype(np.int8)
    return builder.finish([builder.add(operator, [x, builder.constant("w", weights, dtype)])])


@pytest.mark.parametrize("bits", [2, 4])
def test_packing_keeps_every_value(bits: int) -> None:
    values = np.random.default_rng(2).integers(-(1 << (bits - 1)), 1 << (bits - 1), (3, 7)).astype(np.int8)
    share = 8 // bits
    found = packed(values, bits)
    assert found.shape == (3, -(-7 // share))
    fields = (found[..., None].astype(np.int64) >> (bits * np.arange(share))) & ((1 << bits) - 1)
    signed = np.where(fields >> (bits - 1), fields - (1 << bits), fields).reshape(3, -1)
    np.testing.assert_array_equal(signed[:, :7], values)


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize(("operator", "shape", "kernel"), LAYERS)
def test_constants_take_a_half_and_a_quarter(
    operator: Operator, shape: tuple[int, ...], kernel: tuple[int, ...], real: bool
) -> None:
    sizes = {}
    for dtype in (DType.INT8, DType.INT4, DType.INT2):
        constants = generate(layer(operator, shape, kernel, dtype, real), "kernel").constants
        sizes[dtype] = sum(array.nbytes for name, array in constants.items() if name.startswith("weights"))
    assert sizes[DType.INT8] >= np.prod(kernel)
    assert sizes[DType.INT4] <= sizes[DType.INT8] * 0.56 + 1
    assert sizes[DType.INT2] <= sizes[DType.INT8] * 0.31 + 1


def test_a_network_with_int4_weights(tmp_path: Path) -> None:
    """A float network with int4 weights: near LiteRT, which rounds the activations to 8 bits too."""
    path = derived_file("conv_fc_mnist_dynamic_wi4.tflite")
    stored = np.load(f"{path}.ref.npz")
    graph = quantize(simplify(load_tflite(path.name, path.read_bytes(), "int4")), allow_float=True)
    weights = sum(kind.elements for name, kind in graph.types.items() if kind.dtype is DType.INT4)
    assert weights > 50_000
    target = load_target("riscv")
    compiled = compile_graph(graph, target, Options(allow_float=True))
    constants = sum(array.nbytes for _, array in compiled.unit.constants.values())
    assert weights / 2 <= constants < weights / 2 + 1000
    write_project(compiled.project, tmp_path / "build")
    feeds = {graph.inputs[0]: stored["in_0"]}
    (result,) = (
        run_build(open_build(tmp_path / "build", target), "host", [feeds], tmp_path / "cache").outputs[0].values()
    )
    assert np.abs(result - stored["out_0__builtin_ref"]).max() < 0.03
