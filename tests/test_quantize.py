"""The quantize stage against TensorFlow Lite Micro and XNNPACK, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dovetail.ir.graph import Graph, evaluate, verify
from dovetail.ir.onnx_file import check_stages
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.types import Array, DType
from dovetail.quantize import quantize
from dovetail.quantize.rules import softmax_parameters
from dovetail.read.tflite import load_tflite
from oracles import (
    NETWORKS,
    SingleOperator,
    TensorEntry,
    network_bytes,
    references,
    run_micro,
    tflite_bytes,
)

SEEDS = range(4)


def network(name: str, rounding: Rounding = Rounding.DOUBLE) -> tuple[Graph, Graph]:
    """A reference network in QDQ form and as integers."""
    before = load_tflite(name, network_bytes(name), name)
    after = quantize(before, rounding)
    verify(after)
    return before, after


def logits_of(graph: Graph) -> list[str]:
    """The operand of the final softmax, where there is one."""
    return [node.inputs[0] for node in graph.nodes if isinstance(node.operator, FixedSoftmax)]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_equal_tflite_micro_in_every_byte(name: str) -> None:
    """13 inputs per network: the outputs, and the logits before the softmax."""
    _, graph = network(name)
    stored, keep = references(name), logits_of(graph)
    assert bool(keep) == (name != "ad_autoencoder")
    for index in range(13):
        found = evaluate(graph, {graph.inputs[0]: stored[f"in_{index}"]}, keep)
        np.testing.assert_array_equal(found[graph.outputs[0]], stored[f"out_{index}__tflm"])
        for value in keep if index < 12 else []:
            np.testing.assert_array_equal(found[value], stored[f"pretail_{index}__tflm"])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_rounded_once_equal_xnnpack(name: str) -> None:
    """All of each network, not only its convolutions and dense layers."""
    _, graph = network(name, Rounding.SINGLE)
    stored = references(name)
    for index in range(13):
        found = evaluate(graph, {graph.inputs[0]: stored[f"in_{index}"]})
        np.testing.assert_array_equal(found[graph.outputs[0]], stored[f"out_{index}__xnnpack"])


def test_the_two_roundings_can_be_told_apart() -> None:
    """Without this the two tests above could pass with either rounding."""
    stored = {name: references(name) for name in NETWORKS}
    differ = [
        name
        for name in NETWORKS
        for i in range(13)
        if not np.array_equal(stored[name][f"out_{i}__tflm"], stored[name][f"out_{i}__xnnpack"])
    ]
    assert len(differ) > 10


@pytest.mark.parametrize("name", NETWORKS)
def test_integers_stay_within_one_step_of_the_floats(name: str) -> None:
    before, after = network(name)
    inputs = {before.inputs[0]: references(name)["in_12"]}
    assert check_stages(before, after, inputs, lsb=1) >= 10


def activation(name: str, shape: tuple[int, ...], rng: np.random.Generator, dtype: str = "int8") -> TensorEntry:
    """A tensor with a random scale and zero point."""
    zero_point = 0 if dtype == "int16" else int(rng.integers(-60, 60))
    scale = float(np.exp(rng.uniform(-5, -2))) / (256 if dtype == "int16" else 1)
    return TensorEntry(name, shape, dtype, (scale,), zero_point)


def weights(shape: tuple[int, ...], channels: int, rng: np.random.Generator, axis: int) -> TensorEntry:
    """int8 weights with `channels` scales along an axis."""
    data = rng.integers(-127, 128, shape).astype(np.int8)
    scales = tuple(float(scale) for scale in np.exp(rng.uniform(-7, -5, channels)))
    return TensorEntry("w", shape, "int8", scales, 0, data, axis)


def bias(x: TensorEntry, w: TensorEntry, size: int, rng: np.random.Generator, dtype: str) -> TensorEntry:
    """A bias in steps of input scale * weight scale."""
    scales = tuple(float(np.float32(x.scale[0]) * np.float32(scale)) for scale in w.scale)
    data = rng.integers(-3000, 3000, size).astype(dtype)
    return TensorEntry("b", (size,), dtype, scales, 0, data)


def summed(name: str, shape: tuple[int, ...], x: TensorEntry, w: TensorEntry, taps: int) -> TensorEntry:
    """A tensor whose range fits sums of products of random integers."""
    fine = 256 if x.dtype == "int16" else 1
    spread = 74 * fine * x.scale[0] * 74 * max(w.scale) * taps**0.5
    return TensorEntry(name, shape, x.dtype, (spread / (60 * fine),), 0 if x.dtype == "int16" else -17)


def compare_with_micro(single: SingleOperator, rng: np.random.Generator, dtype: str = "int8") -> Graph:
    """Run a model of one operator both ways on all and on random integers; returns the integer graph."""
    model = tflite_bytes(single)
    graph = quantize(load_tflite("single", model, "single"))
    verify(graph)
    inputs: list[Array] = []
    for name in graph.inputs:
        shape, limits = graph.types[name].shape, np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
        if dtype == "int8" and values.size >= 256:
            values.reshape(-1)[:256] = np.arange(-128, 128)
        inputs.append(values)
    found = evaluate(graph, dict(zip(graph.inputs, inputs, strict=True)))[graph.outputs[0]]
    assert np.unique(found).size > 4, "nearly every element is saturated: this compares nothing"
    np.testing.assert_array_equal(found, run_micro(model, inputs))
    return graph


def unary(opcode: str, seed: int, options: dict[str, Any], kind: str, result: tuple[float, int] | None) -> None:
    rng = np.random.default_rng(seed)
    x = activation("x", (1, 300), rng)
    y = activation("y", (1, 300), rng) if result is None else TensorEntry("y", (1, 300), "int8", result[:1], result[1])
    compare_with_micro(SingleOperator(opcode, [x, y], options, kind), rng)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("opcode", "options", "kind", "result"),
    [
        ("LOGISTIC", {}, "", (1 / 256, -128)),
        ("TANH", {}, "", (1 / 128, 0)),
        ("LEAKY_RELU", {"alpha": 0.1}, "LeakyReluOptions", None),
        ("LEAKY_RELU", {"alpha": -0.3}, "LeakyReluOptions", None),
        ("RELU", {}, "", None),
        ("QUANTIZE", {}, "QuantizeOptions", None),
    ],
)
def test_functions_of_one_value(
    opcode: str, options: dict[str, Any], kind: str, result: tuple[float, int] | None, seed: int
) -> None:
    unary(opcode, seed, options, kind, result)


@pytest.mark.parametrize(("opcode", "result"), [("LOGISTIC", (1 / 256, -128)), ("TANH", (1 / 128, 0))])
def test_steps_so_large_that_every_element_saturates(opcode: str, result: tuple[float, int]) -> None:
    x, y = TensorEntry("x", (256,), "int8", (9.25,), -94), TensorEntry("y", (256,), "int8", result[:1], result[1])
    model = tflite_bytes(SingleOperator(opcode, [x, y], {}))
    graph, values = quantize(load_tflite("single", model, "single")), np.arange(-128, 128).astype(np.int8)
    found = evaluate(graph, {graph.inputs[0]: values})[graph.outputs[0]]
    np.testing.assert_array_equal(found, run_micro(model, [values]))


@pytest.mark.parametrize("seed", SEEDS)
def test_requantisation_of_16_bits(seed: int) -> None:
    """Every int16 value, so that the last bits of the factor show."""
    rng = np.random.default_rng(seed)
    x, y = activation("x", (1, 65536), rng, "int16"), activation("y", (1, 65536), rng, "int16")
    y = replace(y, scale=(x.scale[0] * float(rng.uniform(0.7, 2.0)),))
    model = tflite_bytes(SingleOperator("QUANTIZE", [x, y], {}, "QuantizeOptions", 2))
    graph = quantize(load_tflite("single", model, "single"))
    values = np.arange(-32768, 32768).astype(np.int16)[None]
    found = evaluate(graph, {graph.inputs[0]: values})[graph.outputs[0]]
    np.testing.assert_array_equal(found, run_micro(model, [values]))


@pytest.mark.parametrize("seed", SEEDS)
def test_hard_swish(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = activation("x", (1, 300), rng)
    y = TensorEntry("y", (1, 300), "int8", (x.scale[0] * float(rng.uniform(0.5, 1.5)),), int(rng.integers(-128, 0)))
    compare_with_micro(SingleOperator("HARD_SWISH", [x, y], {}, "HardSwishOptions"), rng)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("activation_kind", [0, 1, 3])
def test_addition(dtype: str, activation_kind: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = [activation(name, (1, 6, 7, 8), rng, dtype) for name in ("a", "b", "y")]
    tensors[2] = replace(tensors[2], scale=(max(tensors[0].scale[0], tensors[1].scale[0]) * 1.1,))
    options = {"fusedActivationFunction": activation_kind}
    compare_with_micro(SingleOperator("ADD", tensors, options, "AddOptions", 2), rng, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_addition_with_broadcasting(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = ((1, 6, 7, 8), (1, 1, 1, 8), (1, 6, 7, 8))
    tensors = [activation(name, shape, rng) for name, shape in zip("aby", shapes, strict=True)]
    tensors[2] = replace(tensors[2], scale=(max(tensors[0].scale[0], tensors[1].scale[0]) * 1.1,))
    compare_with_micro(SingleOperator("ADD", tensors, {}, "AddOptions", 2), rng)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("opcode", ["SUB", "MUL"])
@pytest.mark.parametrize("row", [False, True])
def test_differences_and_products(row: bool, opcode: str, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = ((1, 6, 7, 8), (1, 1, 1, 8) if row else (1, 6, 7, 8), (1, 6, 7, 8))
    tensors = [activation(name, shape, rng, dtype) for name, shape in zip("aby", shapes, strict=True)]
    a, b = (entry.scale[0] for entry in tensors[:2])
    wanted = max(a, b) * 1.1 if opcode == "SUB" else a * b * (4e4 if dtype == "int16" else 60.0)
    tensors[2] = replace(tensors[2], scale=(wanted * float(rng.uniform(0.3, 1.0)) if opcode == "MUL" else wanted,))
    options = {"fusedActivationFunction": int(rng.choice([0, 1, 3]))}
    compare_with_micro(SingleOperator(opcode, tensors, options, f"{opcode.title()}Options", 2), rng, dtype)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("opcode", ["MAXIMUM", "MINIMUM"])
def test_larger_and_smaller(opcode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = activation("a", (1, 6, 7, 8), rng)
    tensors = [x, replace(x, name="b", shape=(1, 1, 7, 8)), replace(x, name="y")]
    compare_with_micro(SingleOperator(opcode, tensors, {}, "MaximumMinimumOptions", 2), rng)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("opcode", ["ARG_MAX", "ARG_MIN"])
def test_places_of_extremes(opcode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    axis = TensorEntry("axis", (1,), "int32", data=np.array([seed % 3], np.int32))
    x = activation("x", (4, 5, 6), rng)
    y = TensorEntry("y", tuple(np.delete(x.shape, seed % 3).tolist()), "int32")
    kind = "ArgMaxOptions" if opcode == "ARG_MAX" else "ArgMinOptions"
    model = tflite_bytes(SingleOperator(opcode, [x, axis, y], {"outputType": 2}, kind, 2))
    graph = quantize(load_tflite("single", model, "single"))
    values = rng.integers(-3, 4, x.shape).astype(np.int8)
    found = evaluate(graph, {graph.inputs[0]: values})[graph.outputs[0]]
    np.testing.assert_array_equal(found, run_micro(model, [values]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_softmax(beta: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = TensorEntry("x", (5, 60), "int8", (float(np.exp(rng.uniform(-5, -2))) / beta,), 3)
    y = TensorEntry("y", (5, 60), "int8", (2.0**-8,), -128)
    graph = compare_with_micro(SingleOperator("SOFTMAX", [x, y], {"beta": beta}, "SoftmaxOptions", 2), rng)
    assert [type(node.operator) for node in graph.nodes] == [FixedSoftmax]


@pytest.mark.parametrize("seed", SEEDS)
def test_softmax_with_a_finer_result(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scale = float(np.float32(np.exp(rng.uniform(-6, 1))))
    x = TensorEntry("x", (5, 60), "int8", (scale,), 3)
    y = TensorEntry("y", (5, 60), "int16", (2.0**-16,), -32768)
    model = tflite_bytes(SingleOperator("SOFTMAX", [x, y], {"beta": 1.0}, "SoftmaxOptions", 2))
    values = rng.integers(-128, 128, (5, 60)).astype(np.int8)
    found = FixedSoftmax(*softmax_parameters(scale, 1.0), DType.INT16).evaluate([values])
    np.testing.assert_array_equal(found, run_micro(model, [values]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("opcode", ["AVERAGE_POOL_2D", "MAX_POOL_2D"])
@pytest.mark.parametrize("padding", [0, 1])
def test_pools(opcode: str, padding: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = activation("x", (1, 9, 11, 4), rng)
    height, width = ((9 + 1) // 2, 11) if padding == 0 else ((9 - 3) // 2 + 1, 11 - 2 + 1)
    y = TensorEntry("y", (1, height, width, 4), "int8", x.scale, x.zero_point)
    options = {"padding": padding, "strideH": 2, "strideW": 1, "filterHeight": 3, "filterWidth": 2}
    options["fusedActivationFunction"] = int(rng.integers(0, 2))
    compare_with_micro(SingleOperator(opcode, [x, y], options, "Pool2DOptions", 2), rng)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("same", [True, False])
def test_mean(same: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    axes = TensorEntry("axes", (2,), "int32", (), 0, np.array([1, 2], np.int32))
    shape = (1, int(rng.integers(2, 10)), int(rng.integers(2, 10)), 60)
    x = activation("x", shape, rng)
    scale = x.scale if same else (x.scale[0] * float(rng.uniform(0.1, 1.5)),)
    y = TensorEntry("y", (1, 60), "int8", scale, x.zero_point if same else 11)
    model = tflite_bytes(SingleOperator("MEAN", [x, axes, y], {"keepDims": False}, "ReducerOptions", 2))
    graph = quantize(load_tflite("single", model, "single"))
    values = rng.integers(-128, 128, shape).astype(np.int8)
    found = evaluate(graph, {graph.inputs[0]: values})[graph.outputs[0]]
    np.testing.assert_array_equal(found, run_micro(model, [values]))


@pytest.mark.parametrize("seed", SEEDS)
def test_movement(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, other = activation("x", (1, 4, 5, 20), rng), TensorEntry("z", (1, 4, 5, 20), "int8", (0.1,), 2)
    x = TensorEntry("x", x.shape, "int8", other.scale, other.zero_point)
    y = TensorEntry("y", (1, 4, 10, 20), "int8", x.scale, x.zero_point)
    compare_with_micro(SingleOperator("CONCATENATION", [x, other, y], {"axis": 2}, "ConcatenationOptions", 2), rng)
    pads = TensorEntry("pads", (4, 2), "int32", (), 0, np.array([[0, 0], [1, 2], [0, 3], [0, 0]], np.int32))
    y = TensorEntry("y", (1, 7, 8, 20), "int8", x.scale, x.zero_point)
    compare_with_micro(SingleOperator("PAD", [x, pads, y], {}, "PadOptions", 2), rng)


DENSE = [("int8", "int32", 1), ("int8", "int32", 5), ("int16", "int64", 1), ("int16", "int32", 1)]
"""Activations, bias and number of weight scales that TensorFlow Lite Micro has a dense layer for."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("dtype", "bias_dtype", "channels"), DENSE)
def test_fully_connected(dtype: str, bias_dtype: str, channels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = activation("x", (6, 37), rng, dtype), weights((5, 37), channels, rng, 0)
    y = summed("y", (6, 5), x, w, 37)
    tensors = [x, w, bias(x, w, 5, rng, bias_dtype), y]
    compare_with_micro(SingleOperator("FULLY_CONNECTED", tensors, {}, "FullyConnectedOptions", 4), rng, dtype)


WINDOWS = [
    ("CONV_2D", "int8", "int32"),
    ("CONV_2D", "int16", "int64"),
    ("CONV_2D", "int16", "int32"),
    ("DEPTHWISE_CONV_2D", "int8", "int32"),
    ("DEPTHWISE_CONV_2D", "int16", "int64"),
]
"""Convolutions that TensorFlow Lite Micro has: operator, activations, bias."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("opcode", "dtype", "bias_dtype"), WINDOWS)
def test_convolutions(opcode: str, dtype: str, bias_dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    deep = opcode == "CONV_2D"
    x = activation("x", (1, 9, 8, 3), rng, dtype)
    w = weights((6, 3, 2, 3) if deep else (1, 3, 2, 6), 6, rng, 0 if deep else 3)
    y = summed("y", (1, 5, 8, 6), x, w, 18 if deep else 6)
    options = {"padding": 0, "strideH": 2, "strideW": 1, "fusedActivationFunction": int(rng.integers(0, 2))}
    options |= {"dilationHFactor": 1, "dilationWFactor": 1}
    if not deep:
        options["depthMultiplier"] = 2
    kind = "Conv2DOptions" if deep else "DepthwiseConv2DOptions"
    tensors = [x, w, bias(x, w, 6, rng, bias_dtype), y]
    compare_with_micro(SingleOperator(opcode, tensors, options, kind, 3), rng, dtype)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("channels", "biased"), [(1, True), (1, False), (90, True), (90, False)])
def test_multipliers_are_exact_to_the_last_bit(channels: int, biased: bool, seed: int) -> None:
    """16-bit results of 32-bit sums: a factor rounded otherwise (float32 or double product) shows in some of 18,000."""
    rng = np.random.default_rng(seed)
    x, dense = activation("x", (1, 200, 1, 60), rng, "int16"), channels == 1
    if dense:
        x = replace(x, shape=(200, 60))
    w = weights((90, 60) if dense else (90, 1, 1, 60), channels, rng, 0)
    y = summed("y", (200, 90) if dense else (1, 200, 1, 90), x, w, 60)
    tensors = [x, w, *([bias(x, w, 90, rng, "int32")] if biased else []), y]
    opcode, kind, options = ("FULLY_CONNECTED", "FullyConnectedOptions", {})
    if not dense:
        opcode, kind, options = ("CONV_2D", "Conv2DOptions", {"padding": 1, "strideH": 1, "strideW": 1})
        options |= {"dilationHFactor": 1, "dilationWFactor": 1}
    compare_with_micro(SingleOperator(opcode, tensors, options, kind, 4), rng, "int16")
