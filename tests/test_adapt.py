"""The rewrites that bring an integer graph into a target's form: the exact ones keep every bit, the rest one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dovetail.ir.graph import Graph, GraphBuilder, evaluate, verify
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding, ScaleShift
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Im2col, Slice
from dovetail.ir.requantisation.engine import scale_and_shift
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize import (
    adapt,
    addition_as_convolution,
    convolution_as_im2col,
    engine_requantisation,
    narrow_activations,
    pools_in_words,
    split_bias,
    stride_as_slice,
    unsigned_activations,
)
from dovetail.legalize.ready import SHIFTED
from dovetail.quantize import quantize
from dovetail.read import load_model
from dovetail.target.description import Policy, Rewrite
from dovetail.targets.ne16 import LIMITS
from dovetail.targets.ne16.forms import additions_pay, takes
from networks import Net
from oracles import NETWORKS, network_bytes, references

LINEAR = (Conv2d, DepthwiseConv2d, FullyConnected)


@cache
def _integer(name: str, content: bytes, folder: str) -> Graph:
    path = Path(folder) / f"{name}.tflite"
    path.write_bytes(content)
    return quantize(simplify(load_model(path)), Rounding.DOUBLE)


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Graph]:
    """A real network's integer graph."""
    name = request.param
    return name, _integer(name, network_bytes(name), str(tmp_path_factory.getbasetemp()))


def inputs_of(name: str, graph: Graph) -> list[dict[str, Array]]:
    """Three stored inputs and one that uses the whole range."""
    stored, kind = references(name), graph.types[graph.inputs[0]]
    noise = np.random.default_rng(7).integers(-128, 128, kind.shape).astype(np.int8)
    return [{graph.inputs[0]: array} for array in (stored["in_0"], stored["in_6"], stored["in_12"], noise)]


def assert_equal(name: str, before: Graph, after: Graph) -> None:
    """Both give the same outputs, and the later one keeps the graph's rules."""
    verify(after)
    assert after.inputs == before.inputs and after.outputs == before.outputs
    for value in (*before.inputs, *before.outputs):
        assert after.types[value] == before.types[value]
    for given in inputs_of(name, before):
        expected, found = evaluate(before, given), evaluate(after, given)
        for value in before.outputs:
            np.testing.assert_array_equal(found[value], expected[value])


def largest_step(before: Graph, after: Graph, given: Mapping[str, Array]) -> tuple[int, int]:
    """Largest difference of any 8-bit value both compute, each from the earlier graph's own operands; and how many
    values were compared."""
    shared = [node.output for node in after.nodes if node.output in {other.output for other in before.nodes}]
    shared = [value for value in shared if before.types[value].dtype is DType.UINT8]
    expected = evaluate(before, given, shared)
    values: dict[str, Array] = {**after.constants, **given}
    largest = 0
    for node in after.nodes:
        values[node.output] = node.operator.evaluate([values[value] for value in node.inputs])
        if node.output in shared:
            difference = np.abs(values[node.output].astype(int) - expected[node.output].astype(int))
            largest = max(largest, int(difference.max()))
            values[node.output] = expected[node.output]
    return largest, len(shared)


def test_unsigned_is_exact(network: tuple[str, Graph]) -> None:
    name, graph = network
    after = unsigned_activations(graph)
    assert_equal(name, graph, after)
    layers = [node for node in after.nodes if isinstance(node.operator, LINEAR)]
    assert layers and all(after.types[node.inputs[0]].dtype is DType.UINT8 for node in layers)


def test_patches_are_exact(network: tuple[str, Graph]) -> None:
    name, graph = network
    after = convolution_as_im2col(lambda types, node: True)(graph)
    assert_equal(name, graph, after)
    left = [node for node in after.nodes if isinstance(node.operator, Conv2d)]
    assert all(after.types[node.inputs[1]].shape[1:3] == (1, 1) for node in left)
    if name != "ad_autoencoder":
        assert any(isinstance(node.operator, Im2col) for node in after.nodes)


def test_chosen_patches_only(network: tuple[str, Graph]) -> None:
    assert convolution_as_im2col(lambda types, node: False)(network[1]).nodes == network[1].nodes


def test_stride_as_slice_is_exact(network: tuple[str, Graph]) -> None:
    name, graph = network
    after = stride_as_slice(lambda types, node: True)(graph)
    assert_equal(name, graph, after)
    assert any(isinstance(node.operator, Slice) for node in after.nodes) == (name == "ic_resnet8")


def test_split_bias_is_exact(network: tuple[str, Graph]) -> None:
    name, graph = network
    raised = unsigned_activations(graph)
    after = split_bias(takes)(raised)
    assert_equal(name, graph, after)
    split = [n for n in after.nodes if isinstance(n.operator, LINEAR) and takes(after.types, n)]
    assert split and all(len(n.inputs) == 2 and not getattr(n.operator, "input_zero_point", 0) for n in split)


def test_engine_requantisation_is_within_one(
    network: tuple[str, Graph], record_property: Callable[[str, object], None]
) -> None:
    name, graph = network
    before = unsigned_activations(graph)
    after = engine_requantisation(takes, LIMITS)(before)
    verify(after)
    rewritten = sum(isinstance(node.operator, ScaleShift) for node in after.nodes)
    assert rewritten >= sum(isinstance(n.operator, LINEAR) and takes(before.types, n) for n in before.nodes) - 1
    found = [largest_step(before, after, given) for given in inputs_of(name, graph)]
    assert min(count for _, count in found) >= rewritten - 1
    record_property("largest_step", max(step for step, _ in found))
    print(f"{name}: {rewritten} requantisations by the engine, each within {max(step for step, _ in found)}")
    assert max(step for step, _ in found) <= 1


def test_residual_of_the_real_network_is_within_one(tmp_path: Path) -> None:
    graph = _integer("ic_resnet8", network_bytes("ic_resnet8"), str(tmp_path))
    before = unsigned_activations(graph)
    after = addition_as_convolution(LIMITS)(before)
    verify(after)
    count = sum(isinstance(node.operator, Add) for node in before.nodes)
    assert count - sum(isinstance(node.operator, Add) for node in after.nodes) == 3
    for given in inputs_of("ic_resnet8", graph):
        assert largest_step(before, after, given)[0] <= 1


def addition(
    scales: tuple[float, float, float], zeros: tuple[int, int, int], side: int = 16, channels: int = 16
) -> Graph:
    """A quantised addition of two uint8 images [1, side, side, channels] as TFLite defines it (20 bits of
    head-room)."""
    builder = GraphBuilder("addition")
    largest = 2 * max(scales[:2])

    def scaled(value: str, factor: float, zero_in: int, zero_out: int, lift: int) -> str:
        mantissa, exponent = np.frexp(factor)
        multiplier = builder.constant("m", np.array([int(mantissa * 2.0**31)], np.int32))
        shift = builder.constant("s", np.array([exponent], np.int32))
        operator = Requantize(Rounding.DOUBLE, zero_in, zero_out, lift)
        return builder.add(operator, [value, multiplier, shift])

    sides = [
        scaled(builder.input(name, TensorType((1, side, side, channels), DType.UINT8)), scale / largest, zero, 0, 20)
        for name, scale, zero in zip("ab", scales[:2], zeros[:2], strict=True)
    ]
    total = builder.add(Add(), sides)
    result = scaled(total, largest / (scales[2] * 2.0**20), 0, zeros[2], 0)
    return builder.finish([builder.add(Clip(0, 255, DType.UINT8), [result], "sum")])


def test_residuals_of_many_channels_stay_on_the_core() -> None:
    """As a convolution, those of ResNet-50 would have more weights than all its layers."""
    for side, channels, pays in ((56, 256, True), (14, 1024, False), (7, 2048, False)):
        graph = addition((1.0, 1.0, 2.0), (0, 0, 0), side, channels)
        after = addition_as_convolution(LIMITS, additions_pay)(graph)
        assert any(isinstance(node.operator, Conv2d) for node in after.nodes) == pays
        assert pays or after.nodes == graph.nodes


@pytest.mark.parametrize("seed", range(24))
def test_residual_is_within_one(seed: int) -> None:
    """All 65,536 pairs of operands, scales as far apart as 1 to 8."""
    generator = np.random.default_rng(seed)
    left, right = 2.0 ** generator.uniform(-1.5, 1.5, 2)
    low, high = np.sort(generator.choice(256, 2, replace=False))
    graph = addition(
        (float(left), float(right), float(max(left, right) * 2.0 ** generator.uniform(0, 1))),
        (int(low), int(high), int(generator.integers(0, 256))),
    )
    after = addition_as_convolution(LIMITS)(graph)
    verify(after)
    assert any(isinstance(node.operator, Conv2d) for node in after.nodes)
    a, b = np.meshgrid(np.arange(256), np.arange(256))
    for number in range(16):
        rows = slice(number * 16, number * 16 + 16)
        given = {
            "a": a[rows].reshape(1, 16, 16, 16).astype(np.uint8),
            "b": b[rows].reshape(1, 16, 16, 16).astype(np.uint8),
        }
        expected, found = evaluate(graph, given)["sum"], evaluate(after, given)["sum"]
        assert int(np.abs(found.astype(int) - expected.astype(int)).max()) <= 1


@pytest.mark.parametrize("seed", range(8))
def test_scale_and_shift_stays_near_the_real_product(seed: int) -> None:
    """Against float64: within 1 and what rounding the scale costs; the int32 limits hold throughout."""
    generator = np.random.default_rng(seed)
    channels = 12
    real = 2.0 ** generator.uniform(-16, -5, channels)
    low, high = -generator.integers(1000, 1 << 20, channels), generator.integers(1000, 1 << 20, channels)
    bias, correction = (generator.integers(-30000, 30000, channels).astype(float) for _ in range(2))
    zero = int(generator.integers(0, 256))
    parts = scale_and_shift(real, bias, correction, low.astype(float), high.astype(float), zero, LIMITS)
    assert parts is not None
    for channel, (scale, offset, shift) in enumerate(zip(*(part.astype(np.int64) for part in parts), strict=True)):
        sums = np.linspace(low[channel], high[channel], 4001).astype(np.int64)
        assert 0 <= scale < 256 and 0 <= shift <= LIMITS.most_shift
        assert np.abs(sums * scale).max() < 1 << 31 and np.abs(sums * scale + offset).max() < 1 << 31
        wanted = (sums + bias[channel] + correction[channel]) * real[channel] + zero
        found = (sums * scale + offset) >> shift
        inside = (wanted > -1) & (wanted < 256)
        if inside.any():
            allowed = 1 + abs(scale / 2.0**shift - real[channel]) * np.abs(sums + correction[channel])
            assert (np.abs(np.clip(found, 0, 255) - np.clip(np.rint(wanted), 0, 255)) <= allowed)[inside].all()


def test_scale_and_shift_gives_up_beyond_32_bits() -> None:
    wide = np.array([float(1 << 31)])
    assert scale_and_shift(np.array([0.5]), np.zeros(1), np.zeros(1), -wide, wide, 0, LIMITS) is None


def test_a_second_reader_keeps_the_sums(tmp_path: Path) -> None:
    """Sums that something else reads too are not taken away from it."""
    builder = GraphBuilder("shared sums")
    x = builder.input("x", TensorType((1, 4, 4, 16), DType.UINT8))
    w = builder.constant("w", np.ones((16, 1, 1, 16), np.int8))
    sums = builder.add(Conv2d(input_zero_point=3), [x, w], "sums")
    parameters = [builder.constant("p", np.array([value], np.int32)) for value in (1 << 30, -6)]
    result = builder.add(Clip(0, 255, DType.UINT8), [builder.add(Requantize(), [sums, *parameters])], "y")
    graph = builder.finish([result])
    shared = replace(graph, outputs=(result, "sums"))
    assert any(isinstance(n.operator, ScaleShift) for n in engine_requantisation(takes, LIMITS)(graph).nodes)
    assert not any(isinstance(n.operator, ScaleShift) for n in engine_requantisation(takes, LIMITS)(shared).nodes)


def test_a_reason_stays_through_the_rewrites_behind_it() -> None:
    """Some build the graph anew, others give the value to another operator, or have a reason of their own."""
    net = Net("net", (6, 6, 4), zero_point=-128)
    graph = net.builder.finish([net.addition(net.convolution(net.x, 8, stem="first"), net.convolution(net.x, 8), "y")])
    limits = replace(LIMITS, activations=DType.INT8)
    shifts = Rewrite("shifts", SHIFTED.rewrite().apply, lsb=1)
    requantisation = Rewrite("requantisation", engine_requantisation(lambda types, node: False, limits), lsb=2)
    narrow, words = Rewrite("narrow", narrow_activations(), lsb=0), Rewrite("words", pools_in_words, lsb=0)
    alone = adapt(graph, Policy("one", "", (requantisation,))).left
    assert alone["first"] == "requantisation: the engine has no layer of this shape or window"
    assert len(alone) == 2 and adapt(graph, Policy("more", "", (requantisation, narrow, words))).left == alone
    both = adapt(graph, Policy("both", "", (requantisation, shifts))).left["first"]
    assert both.startswith("shifts: the multiplier of channel 0 is no power of two")
    assert both.endswith("; requantisation: the engine has no layer of this shape or window"), "the nearest is first"
