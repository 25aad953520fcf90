"""What DIANA takes: its limits' sentences, the rewrites that meet them, and how float networks are quantised for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log2
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_graph, compile_model
from dovetail.compile import prepare as prepare_integers
from dovetail.errors import DovetailError, ProgramError
from dovetail.guests.ptq import Samples, Settings, named_widths, prepare, quantise_network
from dovetail.guests.ptq.layers import weighted_layers
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, Requantize, ScaleShift
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize import (
    ConverterLimits,
    adapt,
    addition_by_shift,
    dense_results_of,
    even_borders,
    through_converter,
)
from dovetail.program.verify import verify
from dovetail.read import load_model
from dovetail.run import open_build, run_build
from dovetail.schedule.assign import placement_reasons
from dovetail.schedule.partition import partition
from dovetail.targets import load_target
from ptq_networks import images, varied

TARGET = load_target("diana")
RNG = np.random.default_rng(0)


def build(shape: tuple[int, ...], body: Callable[[GraphBuilder, str], str], dtype: DType = DType.INT8) -> Graph:
    """A graph of one input."""
    builder = GraphBuilder("net")
    return builder.finish([body(builder, builder.input("x", TensorType(shape, dtype)))])


def shifted(builder: GraphBuilder, total: str, shift: object = 7, scale: object = 1, low: int = -128) -> str:
    """What ends a layer on the digital engine."""
    values = (scale, RNG.integers(-500, 500, builder.type_of(total).shape[-1]), shift)
    names = [builder.constant(f"p{i}_{total}", np.atleast_1d(np.asarray(v, np.int32))) for i, v in enumerate(values)]
    scaled = builder.add(ScaleShift(), [total, *names], f"{total}_scaled")
    return builder.add(Clip(low, 127, DType.INT8), [scaled], f"{total}_result")


def weights(*shape: int, low: int = -20, high: int = 20) -> Array:
    """Random ones."""
    return RNG.integers(low, high, shape).astype(np.int8)


def convolution(
    kernel: Array, pads: tuple[int, int] = (1, 1), operator: Conv2d | DepthwiseConv2d | None = None, **ends: object
) -> Callable[[GraphBuilder, str], str]:
    """A padded convolution, as much before as after rows and columns as `pads` says."""

    def body(builder: GraphBuilder, x: str) -> str:
        before, after = (0, pads[0], pads[0], 0), (0, pads[1], pads[1], 0)
        padded = builder.add(Pad(before, after, 0), [x], "padded") if any(pads) else x
        total = builder.add(operator or Conv2d(), [padded, builder.constant("w", kernel)], "total")
        return shifted(builder, total, **ends)  # type: ignore[arg-type]

    return body


def place(graph: Graph) -> tuple[str, str]:
    """Who computes the last region, and why no engine does."""
    region = partition(graph, TARGET)[-1]
    return region.place, region.reason


def test_a_plain_convolution_is_taken() -> None:
    assert place(build((1, 8, 8, 4), convolution(weights(8, 3, 3, 4)))) == ("digital", "")
    assert place(build((1, 8, 8, 4), convolution(weights(1, 3, 3, 4), operator=DepthwiseConv2d()))) == ("digital", "")


@pytest.mark.parametrize(
    ("shape", "body", "sentence"),
    [
        ((1, 8, 8, 4), convolution(weights(8, 2, 2, 4), (0, 0)), "of the kernel must be 1, 3, 5 or 7; here: (2, 2)"),
        ((1, 8, 8, 4), convolution(weights(8, 3, 3, 4), (0, 0)), "half a kernel on every side"),
        ((1, 8, 8, 4), convolution(weights(8, 3, 3, 4), (0, 1), Conv2d((2, 2))), "half a kernel on every side"),
        ((1, 9, 9, 4), convolution(weights(8, 3, 3, 4), operator=Conv2d((3, 3))), "must be 1x1 or 2x2; here: (3, 3)"),
        ((1, 8, 8, 4), convolution(weights(8, 3, 3, 4), operator=Conv2d((1, 1), (2, 2))), "dilation must be 1x1"),
        ((1, 8, 8, 4), convolution(weights(8, 3, 3, 2)), "the groups must be 1; here: 2"),
        ((1, 3, 3, 5), convolution(weights(8, 3, 3, 5)), "must be a multiple of 4; here: [45, 72]"),
        (
            (1, 8, 8, 4),
            convolution(weights(8, 3, 3, 4), shift=range(8)),
            "one right shift by 0 to 31 for the whole layer",
        ),
        ((1, 8, 8, 4), convolution(weights(8, 3, 3, 4), scale=3), "one right shift by 0 to 31 for the whole layer"),
        (
            (1, 8, 8, 4),
            convolution(weights(8, 3, 3, 4), low=-5),
            "limited to -128..127 or 0..127 only, or uint8 to 0..127; here: ('int8', -5, 127)",
        ),
        ((2, 8, 8, 4), convolution(weights(8, 3, 3, 4)), "the batch must be 1; here: 2"),
        (
            (1, 8, 8, 4),
            convolution(weights(1, 3, 3, 8), operator=DepthwiseConv2d()),
            "depth multiplier must be 1; here: 2",
        ),
        (
            (1, 8, 8, 4),
            convolution(weights(8, 3, 3, 4), operator=Conv2d(input_zero_point=3)),
            "symmetric (zero point 0)",
        ),
    ],
)
def test_every_limit_has_its_sentence(
    shape: tuple[int, ...], body: Callable[[GraphBuilder, str], str], sentence: str
) -> None:
    where, reason = place(build(shape, body))
    assert where == "core" and sentence in reason, reason


def added(offset: int, shape: tuple[int, ...] = (1, 4, 4, 4)) -> Graph:
    """A sum of two values, with a bias."""

    def body(builder: GraphBuilder, x: str) -> str:
        wide = [
            builder.add(Offset(0, DType.INT32), [name], f"{name}_wide")
            for name in (x, builder.input("y", TensorType(shape, DType.INT8)))
        ]
        total = builder.add(Add(), wide, "total")
        names = [builder.constant(f"p{i}", np.array([v], np.int32)) for i, v in enumerate((1, offset, 1))]
        return builder.add(Clip(-128, 127, DType.INT8), [builder.add(ScaleShift(), [total, *names], "s")], "out")

    return build(shape, body)


def test_limits_of_sums() -> None:
    assert place(added(0)) == ("digital", "")
    assert "a sum has no bias, so it is rounded down; here: [1]" in place(added(1))[1]
    assert "images of one type" in place(added(0, (1, 16)))[1]


def test_requantisation_by_multipliers_is_the_cores() -> None:
    def body(builder: GraphBuilder, x: str) -> str:
        total = builder.add(FullyConnected(), [x, builder.constant("w", weights(8, 16))], "total")
        names = [builder.constant(n, np.array([v], np.int32)) for n, v in (("m", 1500000000), ("s", -6))]
        return builder.add(Clip(-128, 127, DType.INT8), [builder.add(Requantize(), [total, *names], "r")], "out")

    graph = build((1, 16), body)
    where, reason = place(graph)
    assert where == "core" and "no right shift; dovetail quantize makes networks of shifts" in reason
    left = adapt(graph, TARGET.policies[0])
    assert [region.reason for region in partition(left, TARGET)] == [
        "requantisation: the multiplier of channel 0 is no power of two (0.0109139); "
        "dovetail quantize makes networks of shifts"
    ]


def ternary(
    channels: int = 16, kernel: Array | None = None, clip: tuple[int, int] = (-64, 63), scale: int = 1, code: int = 31
) -> Graph:
    """What the analog engine computes."""
    found = weights(8, 3, 3, channels, low=-1, high=2) if kernel is None else kernel
    half = found.shape[1] // 2

    def body(builder: GraphBuilder, x: str) -> str:
        value = builder.add(Clip(*clip, DType.INT8), [x], "seven")
        value = builder.add(Pad((0, half, half, 0), (0, half, half, 0), 0), [value], "padded") if half else value
        total = builder.add(Conv2d(), [value, builder.constant("w", found)], "total")
        names = [builder.constant(f"g{i}", np.array([v], np.int32)) for i, v in enumerate((1, 0, 4))]
        gained = builder.add(ScaleShift(), [total, *names], "gained")
        return shifted(builder, builder.add(Clip(-32, code, DType.INT8), [gained], "code"), 2, scale)

    return build((1, 8, 8, channels), body)


@pytest.mark.parametrize(
    ("graph", "sentence"),
    [
        (ternary(kernel=weights(8, 3, 3, 16)), "weights must be -1, 0 or 1; here: (-20, 19)"),
        (ternary(132), "at most 128 channels; here: 132"),
        (
            ternary(kernel=weights(8, 5, 5, 16, low=-1, high=2)),
            "of the array, of which every tap takes at least 64; here: 1600",
        ),
        (ternary(clip=(-128, 127)), "operands must be limited to 7 bits; here: (-128, 127)"),
        (ternary(code=30), "the converter must give 6 bits; here: (-32, 30)"),
        (ternary(scale=1023), "keep within 16 bits; here: 33"),
    ],
)
def test_limits_of_the_array(graph: Graph, sentence: str) -> None:
    where, reason = place(graph)
    assert where == "core" and sentence in reason and reason.startswith("analog ternary convolution: "), reason


def test_int8_networks_of_tflite_are_the_cores(shared: Path) -> None:
    """The compiled program is interpreted and compared with the integer graph."""
    path = shared / "models" / "mlperf_tiny" / "kws_dscnn_int8.tflite"
    regions = compile_model(path, TARGET, Options()).regions
    reasons = [region.reason for region in regions if region.macs]
    assert len(reasons) == 10 and all("dovetail quantize makes networks of shifts" in reason for reason in reasons)


def test_constants_lie_in_the_memory_of_their_engine(network: Graph, tmp_path: Path) -> None:
    found = quantise_network(network, Samples({"image": images(4)}, None), TARGET, Settings(integer_ends=True))
    path = tmp_path / "net.onnx"
    path.write_bytes(found.model.SerializeToString())
    program = compile_model(path, TARGET, Options()).plan.program
    held = [name for name in program.buffers if "constants_" in name and program.buffers[name].memory == "WEIGHTS"]
    assert held
    moved = {**program.buffers, held[0]: replace(program.buffers[held[0]], memory="L1", address=0x10030000)}
    with pytest.raises(ProgramError, match="digital reaches WEIGHTS only"):
        verify(replace(program, buffers=moved), TARGET)


def test_the_array_takes_what_fits() -> None:
    assert place(ternary())[0] == "analog"


def test_the_array_on_the_host(tmp_path: Path) -> None:
    """There the 7 bits of the operand are a kernel of their own, before the layer's."""
    graph = ternary()
    write_project(compile_graph(graph, TARGET, Options()).project, tmp_path / "build")
    given = random_inputs(graph)
    result = run_build(open_build(tmp_path / "build", TARGET), "host", [given])
    np.testing.assert_array_equal(result.outputs[0][graph.outputs[0]], only_output(graph, given))


def random_inputs(graph: Graph) -> dict[str, Array]:
    """Of all values of the type."""
    return {name: RNG.integers(-128, 128, graph.types[name].shape).astype(np.int8) for name in graph.inputs}


def only_output(graph: Graph, given: Mapping[str, Array]) -> Array:
    """Of a graph with one."""
    return evaluate(graph, dict(given))[graph.outputs[0]]


@pytest.mark.parametrize(
    ("kernel", "pads", "size", "operator"),
    [
        (weights(8, 3, 3, 4), (0, 1), 8, Conv2d((2, 2))),
        (weights(1, 3, 3, 4), (0, 1), 8, DepthwiseConv2d((2, 2))),
        (weights(4, 4, 4, 4), (1, 2), 9, Conv2d()),
        (weights(4, 2, 2, 4), (0, 0), 6, Conv2d((2, 2))),
    ],
)
def test_even_borders_are_exact(kernel: Array, pads: tuple[int, int], size: int, operator: Conv2d) -> None:
    before = build((1, size, size, 4), convolution(kernel, pads, operator))
    after = even_borders(7)(before)
    given = random_inputs(before)
    np.testing.assert_array_equal(only_output(after, given), only_output(before, given))
    assert place(before)[0] == "core" and place(after)[0] == "digital"


def test_borders_that_stay() -> None:
    for kernel, pads in ((weights(4, 3, 3, 4), (1, 1)), (weights(4, 3, 3, 4), (0, 0)), (weights(4, 5, 5, 4), (0, 4))):
        before = build((1, 8, 8, 4), convolution(kernel, pads))
        assert even_borders(7)(before).nodes == before.nodes


def test_dense_results_fill_words() -> None:
    def body(builder: GraphBuilder, x: str) -> str:
        return shifted(builder, builder.add(FullyConnected(), [x, builder.constant("w", weights(10, 16))], "total"))

    before = build((1, 16), body)
    after = dense_results_of(4)(before)
    given = random_inputs(before)
    np.testing.assert_array_equal(only_output(after, given), only_output(before, given))
    assert "digital" in [region.place for region in partition(after, TARGET)]
    assert "multiple of 4; here: [16, 10]" in place(before)[1]


def test_sums_of_one_scale_become_shifts() -> None:
    def body(builder: GraphBuilder, x: str) -> str:
        values = {"m": 1 << 30, "s": 0, "t": -19}
        one, twenty, last = (builder.constant(n, np.array([v], np.int32)) for n, v in values.items())
        other = builder.input("y", TensorType((1, 4, 4, 4), DType.INT8))
        sides = [builder.add(Requantize(left_shift=20), [v, one, twenty], f"{v}_wide") for v in (x, other)]
        total = builder.add(Requantize(), [builder.add(Add(), sides, "sum"), one, last], "scaled")
        return builder.add(Clip(-128, 127, DType.INT8), [total], "out")

    before = build((1, 4, 4, 4), body)
    after = addition_by_shift(31)(before)
    given = random_inputs(before)
    difference = only_output(before, given).astype(int) - only_output(after, given)
    assert set(np.unique(difference)) == {0, 1}, "rounded down instead of to the nearest"
    assert place(after)[0] == "digital"


@pytest.mark.parametrize("shift", [2, 5])
def test_the_converter_loses_only_what_lies_below_its_bits(shift: int) -> None:
    kernel = weights(8, 3, 3, 16, low=-1, high=2)
    before = build((1, 8, 8, 16), convolution(kernel, shift=shift))
    limits = ConverterLimits((-64, 63), (-32, 31), 31, 16)
    after = through_converter(lambda types, node: True, limits)(before)
    assert place(after)[0] == "analog" and place(before)[0] == "digital"
    gains = [after.constants[n.inputs[3]] for n in after.nodes if isinstance(n.operator, ScaleShift)]
    given = {"x": RNG.integers(-64, 64, (1, 8, 8, 16)).astype(np.int8)}
    largest = np.abs(only_output(before, given).astype(int) - only_output(after, given)).max()
    step = 2.0 ** (int(gains[0][0]) - shift)
    assert largest <= step / 2 + 1, "half a step of the converter, and its rounding"
    print(f"a step of the converter is {step} of the result's; largest difference {largest}")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """A float network with a sum, a concatenation and a depthwise layer."""
    path = tmp_path_factory.mktemp("float") / "varied.onnx"
    path.write_bytes(varied().SerializeToString())
    return prepare(load_model(path), path.name)


def scales(graph: Graph) -> list[float]:
    """Of all quantisations."""
    return [float(array.reshape(-1)[0]) for name, array in graph.constants.items() if name.endswith("_scale")]


def test_quantised_networks_need_shifts_only(network: Graph, tmp_path: Path) -> None:
    widths = named_widths(network, ["conv2=int2"])
    settings = Settings(widths=widths, integer_ends=True)
    found = quantise_network(network, Samples({"image": images(16)}, None), TARGET, settings)
    assert all(log2(scale).is_integer() for scale in scales(found.graph))
    narrow = [array for array in found.graph.constants.values() if array.dtype == np.int8 and array.size == 64]
    assert any(set(np.unique(array)) == {-1, 0, 1} for array in narrow)
    path = tmp_path / "net.onnx"
    path.write_bytes(found.model.SerializeToString())
    for policy, engines in (("digital", {"digital"}), ("analog", {"digital", "analog"})):
        graph = prepare_integers(path, TARGET, Options(policy=policy))
        linear = [r for r in partition(graph, TARGET) if r.macs]
        assert {region.place for region in linear} == engines
        assert any(region.offload and region.offload.name == "sum" for region in partition(graph, TARGET))


def test_widths_by_name(network: Graph) -> None:
    names = [node.output for node in weighted_layers(network)]
    assert named_widths(network, ["[cs]*=int2", "conv?=int8"]) == {"conv2": 8, "scores": 2}
    assert set(named_widths(network, ["*=int2"])) == set(names)
    with pytest.raises(DovetailError, match="no layer with weights is named 'stem'"):
        named_widths(network, ["stem=int2"])
    with pytest.raises(DovetailError, match="'conv2=ternary' does not say a width"):
        named_widths(network, ["conv2=ternary"])


def test_ternary_layers_are_named(network: Graph) -> None:
    with pytest.raises(DovetailError, match="within 7 bits: they are named, not searched for"):
        quantise_network(network, Samples({"image": images(4)}, None), TARGET, Settings(bits=2))


def test_a_layer_whose_weights_fit_no_tile(tmp_path: Path) -> None:
    """16 results of 4800 operands have more weights than the digital engine's memory: the core computes it."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    constants = [
        numpy_helper.from_array(array, name)
        for name, array in (("w", RNG.normal(size=(16, 4800)).astype(np.float32)), ("b", np.zeros(16, np.float32)))
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 4800]), ("y", [1, 16]))]
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    model = helper.make_model(
        helper.make_graph([node], "wide", ends[:1], ends[1:], constants),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    path = tmp_path / "wide.onnx"
    onnx.save(model, path)
    graph = prepare(load_model(path), path.name)
    data = RNG.normal(size=(4, 1, 4800)).astype(np.float32)
    found = quantise_network(graph, Samples({"x": data}, None), TARGET, Settings(integer_ends=True))
    path.write_bytes(found.model.SerializeToString())
    compiled = compile_model(path, TARGET, Options())
    assert compiled.assignment.schedule is not None
    refused = placement_reasons(compiled.assignment.layers, compiled.assignment.schedule)["dense_0"].refused["digital"]
    assert re.search(r"no tile of dense_0 is one digital can .*, with constants that fit WEIGHTS", refused)
    assert [region.place for region in compiled.regions if region.macs] == ["core"]


def test_constants_of_one_tile_at_a_time_where_those_of_two_do_not_fit() -> None:
    """256 channels of 16 windows of 3x3: 36,864 of the 64,000 bytes that the engine has for weights."""
    made = compile_graph(build((1, 6, 6, 256), convolution(weights(32, 3, 3, 256))), TARGET, Options())
    assert {region.place for region in made.regions if region.macs} == {"digital"}


def test_tiles_begin_where_blocks_do() -> None:
    """A stride of 2 reads from column 31 on for the second 16 of 28 columns, which no tile may."""
    layer = convolution(weights(128, 3, 3, 64), (1, 0), Conv2d((2, 2)))
    larger = tuple(replace(one, size=1 << 20) if one.name == "L2" else one for one in TARGET.memories)
    made = compile_graph(build((1, 56, 56, 64), layer), replace(TARGET, memories=larger), Options())
    assert {region.place for region in made.regions if region.macs} == {"digital"}
