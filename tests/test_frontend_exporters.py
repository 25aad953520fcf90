"""What converters and exporters write: fields left out, operands without elements, odd domains, open sizes, zero points
computed at run time. TensorFlow Lite Micro and ONNX Runtime say what the models mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model, prepare
from dovetail.errors import DovetailError, ModelError
from dovetail.ir.boundary import Steps
from dovetail.ir.graph import Graph, evaluate, evaluate_all
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.arithmetic import Dequantize, Quantize, Requantize, Rounding
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType
from dovetail.notes import Note
from dovetail.quantize import quantize
from dovetail.quantize.ends import integer_inputs, integer_outputs
from dovetail.read import load_model
from dovetail.read.onnx import load_onnx
from dovetail.read.tflite import load_tflite
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from oracles import run_litert_often
from recurrent_cases import lstm_model
from tflite_writer import ModelWriter, run_calls

# ---- TFLite


def micro_and_ours(model: bytes, *feeds: Array) -> tuple[Array, Array]:
    """The first result of TensorFlow Lite Micro and of the integer graph."""
    graph = quantize(simplify(load_tflite("net.tflite", model, "net")))
    (found,) = evaluate_all(graph, [dict(zip(graph.given, feeds, strict=True))])
    return run_calls(model, [dict(enumerate(feeds))])[0][0], found[graph.results[0]]


def equal(model: bytes, *feeds: Array) -> None:
    wanted, found = micro_and_ours(model, *feeds)
    np.testing.assert_array_equal(found, wanted)
    assert len(np.unique(wanted)) > 1, "the comparison must be of something"


def changed(model: bytes, change: Callable[[Any], object]) -> bytes:
    """The model after a change to the schema's objects."""
    import flatbuffers

    writer = ModelWriter()
    writer.model = writer.schema.ModelT.InitFromObj(writer.schema.Model.GetRootAs(model, 0))
    change(writer.model)
    assert flatbuffers
    return writer.finish()


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)


def sum_model(**tensor: Any) -> bytes:
    w = ModelWriter()
    a, b, y = (
        w.tensor(name, (1, 4, 4, 2), "INT8", quantised=(0.1, zero)) for name, zero in (("a", 3), ("b", -4), ("y", 0))
    )
    w.operator("ADD", [a, b], [y], "AddOptions")
    w.ends([a, b], [y])
    return w.finish()


def test_operands_without_elements_are_absent() -> None:
    """Converters write the absent weights of an LSTM as tensors of the shape [0]."""
    streamed = lstm_model(3)

    def emptied(model: Any) -> None:
        graph = model.subgraphs[0]
        operator = graph.operators[0]
        inputs = list(operator.inputs)
        assert -1 in inputs
        for place in (at for at, index in enumerate(inputs) if index < 0):
            empty = type(graph.tensors[0])()
            empty.name, empty.shape, empty.type, empty.buffer = f"none_{place}", [0], graph.tensors[0].type, 0
            inputs[place] = len(graph.tensors)
            graph.tensors.append(empty)
        operator.inputs = inputs

    plain, empty = (load_tflite("net.tflite", m, "net") for m in (streamed.model, changed(streamed.model, emptied)))
    assert [type(node.operator) for node in empty.nodes] == [type(node.operator) for node in plain.nodes]
    feeds = [{plain.given[0]: x} for x in streamed.inputs]
    found, wanted = (evaluate_all(quantize(simplify(graph)), feeds) for graph in (empty, plain))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one[empty.results[0]], other[plain.results[0]])


def test_data_behind_the_flatbuffer() -> None:
    """AI Edge's quantiser puts constants behind the tables, with offset and size in the buffer."""
    w = ModelWriter()
    x = w.tensor("x", (1, 6), "INT8", quantised=(0.1, 0))
    weights = numbers(3, 6)
    k = w.tensor("w", (3, 6), "INT8", weights, quantised=(0.05, 0))
    y = w.tensor("y", (1, 3), "INT8", quantised=(0.2, 0))
    w.operator("FULLY_CONNECTED", [x, k], [y], "FullyConnectedOptions")
    w.ends([x], [y])
    plain = w.finish()

    def moved(offset: int) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            model.buffers[1].data, model.buffers[1].offset, model.buffers[1].size = None, offset, weights.size

        return change

    start = len(changed(plain, moved(1 << 20)))
    outside = changed(plain, moved(start)) + weights.tobytes()
    wanted = micro_and_ours(plain, numbers(1, 6, seed=1))[0]
    graph = quantize(simplify(load_tflite("net.tflite", outside, "net")))
    np.testing.assert_array_equal(evaluate(graph, {"x": numbers(1, 6, seed=1)})["y"], wanted)
    with pytest.raises(ModelError, match=f"wants bytes {start} to {start + 18} of the file's {start + 17}"):
        load_tflite("net.tflite", outside[:-1], "net")


def test_an_operator_code_in_the_new_field_alone() -> None:
    """The schema's accessor reads 0 there; the larger of both fields counts."""
    w = ModelWriter()
    x, y = (w.tensor(name, (1, 4, 4, 2), "INT8", quantised=(0.1, 3)) for name in "xy")
    w.operator("RELU", [x], [y])
    w.ends([x], [y])

    def alone(model: Any) -> None:
        model.operatorCodes[0].deprecatedBuiltinCode = 0

    model = changed(w.finish(), alone)
    equal(model, numbers(1, 4, 4, 2))


def test_options_left_out_are_the_defaults() -> None:
    """So are those of another operator."""

    def without(model: Any) -> None:
        operator = model.subgraphs[0].operators[0]
        operator.builtinOptions, operator.builtinOptionsType = None, 0

    def another(model: Any) -> None:
        model.operatorCodes[0].builtinCode = model.operatorCodes[0].deprecatedBuiltinCode = 41  # SUB

    for change in (without, another):
        equal(changed(sum_model(), change), numbers(1, 4, 4, 2), numbers(1, 4, 4, 2, seed=1))


def test_the_axis_of_a_row_means_nothing() -> None:
    """person_detect's biases are [8] with scales along axis 3."""
    w = ModelWriter()
    x = w.tensor("x", (1, 5, 5, 3), "INT8", quantised=(0.1, 2))
    k = w.tensor("w", (2, 3, 3, 3), "INT8", numbers(2, 3, 3, 3), quantised=(0.05, 0))
    b = w.tensor("b", (2,), "INT32", np.array([500, -300], np.int32), quantised=(0.005, 0))
    y = w.tensor("y", (1, 5, 5, 2), "INT8", quantised=(0.4, -3))
    w.operator("CONV_2D", [x, k, b], [y], "Conv2DOptions", strideH=1, strideW=1, dilationHFactor=1, dilationWFactor=1)
    w.ends([x], [y])

    def channels(axis: int) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            for index, steps in ((k, [0.05, 0.02]), (b, [0.1 * 0.05, 0.1 * 0.02])):
                form = model.subgraphs[0].tensors[index].quantization
                form.scale, form.zeroPoint = [float(np.float32(step)) for step in steps], [0, 0]
            form.quantizedDimension = axis

        return change

    feed = numbers(1, 5, 5, 3)
    equal(changed(w.finish(), channels(0)), feed)
    odd = quantize(simplify(load_tflite("net.tflite", changed(w.finish(), channels(3)), "net")))
    np.testing.assert_array_equal(
        evaluate(odd, {"x": feed})["y"], micro_and_ours(changed(w.finish(), channels(0)), feed)[0]
    )


@pytest.mark.parametrize(
    ("strides", "begin", "end", "masks", "shape"),
    [
        ((1, -2, -1, 1), (0, 6, 4, 0), (1, 0, 0, 3), (0, 4), (1, 3, 5, 3)),
        ((1, 1, -1, 1), (0, 0, -1, 0), (1, 7, -6, 3), (0, 0), (1, 7, 5, 3)),
        ((1, -3, 2, -1), (0, -1, 0, 2), (1, 0, 5, 0), (0, 10), (1, 3, 3, 3)),
    ],
)
def test_slices_run_backwards(
    strides: tuple[int, ...],
    begin: tuple[int, ...],
    end: tuple[int, ...],
    masks: tuple[int, int],
    shape: tuple[int, ...],
) -> None:
    w = ModelWriter()
    x, y = (w.tensor(name, size, "INT8", quantised=(0.1, 3)) for name, size in (("x", (1, 7, 5, 3)), ("y", shape)))
    bounds = [
        w.tensor(f"b{at}", (4,), "INT32", np.array(one, np.int32)) for at, one in enumerate((begin, end, strides))
    ]
    w.operator("STRIDED_SLICE", [x, *bounds], [y], "StridedSliceOptions", beginMask=masks[0], endMask=masks[1])
    w.ends([x], [y])
    equal(w.finish(), numbers(1, 7, 5, 3))


@pytest.mark.parametrize(
    ("begin", "end", "strides", "masks", "shape"),
    [
        ((0, 1), (0, 3), (1, 2), {"ellipsisMask": 1}, (2, 5, 4, 1)),
        ((1, 0, -1), (2, 0, -9), (1, 1, -2), {"ellipsisMask": 2, "endMask": 4}, (1, 5, 4, 2)),
        ((0, 0, 2), (0, 0, 3), (1, 1, 1), {"ellipsisMask": 1, "newAxisMask": 2, "shrinkAxisMask": 4}, (2, 5, 4, 1)),
        ((0, 1), (0, 2), (1, 1), {"newAxisMask": 1, "shrinkAxisMask": 2}, (1, 5, 4, 3)),
        ((1,), (2,), (1,), {}, (1, 5, 4, 3)),
    ],
)
def test_slices_with_ellipsis_and_new_axes(
    begin: tuple[int, ...],
    end: tuple[int, ...],
    strides: tuple[int, ...],
    masks: dict[str, int],
    shape: tuple[int, ...],
) -> None:
    """As LiteRT's reference kernels; TensorFlow Lite Micro has no such masks."""
    w = ModelWriter()
    x, y = (w.tensor(name, size, "INT8", quantised=(0.1, 3)) for name, size in (("x", (2, 5, 4, 3)), ("y", shape)))
    bounds = [
        w.tensor(f"b{at}", (len(one),), "INT32", np.array(one, np.int32))
        for at, one in enumerate((begin, end, strides))
    ]
    w.operator("STRIDED_SLICE", [x, *bounds], [y], "StridedSliceOptions", **masks)
    w.ends([x], [y])
    feed = numbers(2, 5, 4, 3)
    ((wanted,),) = run_litert_often(w.finish(), [[feed]], reference=True)
    graph = quantize(simplify(load_tflite("net.tflite", w.finish(), "net")), Rounding.DOUBLE)
    np.testing.assert_array_equal(evaluate(graph, {"x": feed})["y"], wanted)


def test_the_first_of_several_signatures_is_read() -> None:
    """What no operator runs is of another signature: told, and left."""
    w = ModelWriter()
    x, y = (w.tensor(name, (1, 4), "INT8", quantised=(0.1, 3)) for name in "xy")
    w.operator("ABS", [x], [y], "AbsOptions")
    w.ends([x], [y])
    w.subgraph()
    other, result = (w.tensor(name, (1, 9), "INT8", quantised=(0.1, 3)) for name in ("p", "q"))
    w.operator("WHILE", [other], [result], "WhileOptions")
    w.ends([other], [result])
    told = list[Note]()
    graph = load_tflite("net.tflite", w.finish(), "net", tell=told.append)
    assert graph.inputs == ("x",) and ["only its first signature is compiled" in one.text for one in told] == [True]


def test_softmax_of_bytes_as_int16() -> None:
    w = ModelWriter()
    x = w.tensor("x", (3, 9), "INT8", quantised=(0.06, 3))
    y = w.tensor("y", (3, 9), "INT16", quantised=(2.0**-16, -(1 << 15)))
    w.operator("SOFTMAX", [x], [y], "SoftmaxOptions", beta=1.0)
    w.ends([x], [y])
    equal(w.finish(), numbers(3, 9))


def test_floor_division_of_integers(tmp_path: Path) -> None:
    w = ModelWriter()
    a, b, y = (w.tensor(name, (9,), "INT32") for name in "aby")
    w.operator("FLOOR_DIV", [a, b], [y], "FloorDivOptions")
    w.ends([a, b], [y])
    left = np.array([7, -7, 7, -7, 0, 6, -6, 2**31 - 1, -(2**31)], np.int32)
    right = np.array([2, 2, -2, -2, 5, 3, 3, 2, 2], np.int32)
    (found,) = run_firmware(tmp_path, w.finish(), ".tflite", {"a": left, "b": right})
    np.testing.assert_array_equal(found, left // right)


SCALES = (1e-45, 1e-38, 1e-3, 1.0, 1e30, 3e38)


@pytest.mark.parametrize("opcode", ["ADD", "MUL", "DIV", "LEAKY_RELU", "HARD_SWISH", "LOG_SOFTMAX", "LOGISTIC", "TANH"])
def test_scales_at_the_ends_of_float32(opcode: str) -> None:
    """Compiled or refused, never an OverflowError."""
    kinds = {"ADD": "AddOptions", "MUL": "MulOptions", "DIV": "DivOptions", "LEAKY_RELU": "LeakyReluOptions"}
    for first in SCALES:
        for second in SCALES:
            w = ModelWriter()
            ins = [w.tensor(name, (1, 8), "INT8", quantised=(first, 0)) for name in ("ab" if opcode in kinds else "a")]
            ins = ins[:1] if opcode == "LEAKY_RELU" else ins
            y = w.tensor("y", (1, 8), "INT8", quantised=(second, 0))
            w.operator(opcode, ins, [y], kinds.get(opcode, ""))
            w.ends(ins, [y])
            try:
                quantize(simplify(load_tflite("net.tflite", w.finish(), "net")))
            except ModelError as error:
                assert "report" not in str(error)


# ---- ONNX


def onnx_model(nodes: Any, inputs: Any, outputs: Any, constants: dict[str, Array], domains: Any = ()) -> Any:
    held = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "net", inputs, outputs, held)
    opsets = [helper.make_opsetid("", 18), *(helper.make_opsetid(*domain) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def value(name: str, kind: int, *shape: int | str) -> Any:
    return helper.make_tensor_value_info(name, kind, list(shape))


def runtime(model: Any, feeds: dict[str, Array]) -> Array:
    return np.asarray(runtime_session(model, optimised=False).run(None, feeds)[0])


def run_firmware(folder: Path, model: bytes, suffix: str, feed: dict[str, Array], **options: Any) -> list[Array]:
    """The results of one inference of the C on this computer."""
    path, target = folder / f"net{suffix}", load_target("riscv")
    path.write_bytes(model)
    write_project(compile_model(path, target, Options(**options)).project, folder / "build")
    build = open_build(folder / "build", target)
    (found,) = run_build(build, "host", [feed]).outputs
    return [found[port.name] for port in build.manifest.outputs]


@pytest.mark.parametrize("right", ["constant", "computed", "per column"])
def test_matrix_products_with_computed_zero_points(right: str, tmp_path: Path) -> None:
    """MatMulInteger behind DynamicQuantizeLinear: the zero point is known at run time only."""
    rng = np.random.default_rng(5)
    b = rng.integers(-128, 128, (6, 5)).astype(np.int8)
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])]
    inputs, constants = [value("x", TensorProto.FLOAT, 4, 6)], {}
    feeds = {"x": rng.normal(0.3, 1, (4, 6)).astype(np.float32)}
    if right == "computed":
        inputs.append(value("w", TensorProto.FLOAT, 6, 5))
        feeds["w"] = rng.normal(-0.4, 1, (6, 5)).astype(np.float32)
        nodes.append(helper.make_node("DynamicQuantizeLinear", ["w"], ["b", "t", "c"]))
    else:
        c = np.array(-7, np.int8) if right == "constant" else rng.integers(-9, 9, 5).astype(np.int8)
        constants = {"b": b, "c": c}
    nodes.append(helper.make_node("MatMulInteger", ["q", "b", "z", "c"], ["y"]))
    model = onnx_model(nodes, inputs, [value("y", TensorProto.INT32, 4, 5)], constants)
    wanted = runtime(model, feeds)
    (found,) = run_firmware(tmp_path, model.SerializeToString(), ".onnx", feeds, allow_float=True)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 2, 1]])
def test_convolutions_with_computed_zero_points(pads: list[int], tmp_path: Path) -> None:
    """ConvInteger: the border is the zero point, which is known at run time only."""
    rng = np.random.default_rng(6)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("ConvInteger", ["q", "w", "z", "c"], ["y"], pads=pads),
    ]
    constants = {"w": rng.integers(0, 256, (4, 3, 3, 3)).astype(np.uint8), "c": np.array(120, np.uint8)}
    size = 6 + pads[0] + pads[2], 6 + pads[1] + pads[3]
    result = value("y", TensorProto.INT32, 1, 4, size[0] - 2, size[1] - 2)
    model = onnx_model(nodes, [value("x", TensorProto.FLOAT, 1, 3, 6, 6)], [result], constants)
    feeds = {"x": rng.normal(0.3, 1, (1, 3, 6, 6)).astype(np.float32)}
    (found,) = run_firmware(tmp_path, model.SerializeToString(), ".onnx", feeds, allow_float=True)
    np.testing.assert_array_equal(found, runtime(model, feeds))


def quantised_net(batch: int | str = 1, rows: int | str = 8, kind: Any = np.int8) -> Any:
    """x -> QDQ -> a dense layer -> QDQ -> y."""
    rng = np.random.default_rng(7)
    scale, point = np.array(0.02, np.float32), np.array(3, kind)
    weights = {"w": rng.integers(-127, 128, (8, 5)).astype(np.int8), "ws": np.array(0.01, np.float32)}
    constants = {"s": scale, "z": point, "t": np.array(0.07, np.float32), "wz": np.array(0, np.int8), **weights}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
        helper.make_node("MatMul", ["d", "wd"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "t", "z"], ["r"]),
        helper.make_node("DequantizeLinear", ["r", "t", "z"], ["y"]),
    ]
    ends = [value(name, TensorProto.FLOAT, batch, rows, size) for name, size in (("x", 8), ("y", 5))]
    return onnx_model(nodes, ends[:1], ends[1:], constants)


def read(model: Any, shapes: dict[str, tuple[int, ...]] | None = None) -> tuple[Graph, list[str]]:
    told = list[Note]()
    return load_onnx("net.onnx", model.SerializeToString(), "net", Path(), shapes, told.append), told


def test_an_open_batch_is_one_and_said() -> None:
    graph, told = read(quantised_net("batch_size"))
    assert graph.types["x"].shape == (1, 8, 8) and len(told) == 1
    assert "'batch_size' of the input 'x' is taken as 1" in told[0].text and "--shape" in told[0].text
    assert read(quantised_net())[1] == []


def test_open_sizes_are_given() -> None:
    graph, told = read(quantised_net("N", "rows"), {"x": (2, 4, 8)})
    assert graph.types["x"].shape == (2, 4, 8) and graph.types["y"].shape == (2, 4, 5) and told == []


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": (1, 8, 8)}, "has no input 'z'"),
        ({"x": (8, 8)}, "gives the input 'x' 3 sizes"),
        ({"x": (1, 4, 9)}, "cannot be 9"),
        ({}, r"has the shape \[1, 'rows', 8\], which is not fixed"),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(quantised_net("N", "rows"), shapes)


def test_a_domain_that_is_not_imported() -> None:
    """As Brevitas writes its files."""
    numbers = {"s": np.array(0.1, np.float32), "z": np.array(0, np.float32), "b": np.array(4, np.float32)}
    node = helper.make_node("Quant", ["x", "s", "z", "b"], ["y"], domain="onnx.brevitas", signed=1, narrow=0)
    ends = [value(name, TensorProto.FLOAT, 1, 8) for name in "xy"]
    graph, _ = read(onnx_model([node], ends[:1], ends[1:], numbers))
    x = np.linspace(-1, 1, 8, dtype=np.float32)[None]
    wanted = np.clip(np.rint(x / np.float32(0.1)), -8, 7) * np.float32(0.1)
    np.testing.assert_allclose(evaluate(graph, {"x": x})["y"], wanted, rtol=1e-6)


def test_an_operator_for_floats_on_integers() -> None:
    ends = [value(name, TensorProto.INT32, 1, 8) for name in "xy"]
    graph, _ = read(onnx_model([helper.make_node("Floor", ["x"], ["y"])], ends[:1], ends[1:], {}))
    x = np.arange(-4, 4, dtype=np.int32)[None]
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], x)


def test_int64_and_back(tmp_path: Path) -> None:
    """What NEMO writes: floats that are integers, floored by a detour over int64."""
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        helper.make_node("Div", ["i", "k"], ["d"]),
        helper.make_node("Cast", ["d"], ["y"], to=TensorProto.FLOAT),
    ]
    ends = [value(name, TensorProto.FLOAT, 1, 8) for name in "xy"]
    model = onnx_model(nodes, ends[:1], ends[1:], {"k": np.array(8, np.int64)})
    feeds = {"x": np.array([[0, 7, 8, 1e6, -1, -8, -9, 3e9]], np.float32)}
    (found,) = run_firmware(tmp_path, model.SerializeToString(), ".onnx", feeds, allow_float=True)
    np.testing.assert_array_equal(found, runtime(model, feeds))


def test_bool_inputs(tmp_path: Path) -> None:
    """A mask that chooses, and one that is all there is."""
    kinds = {"c": TensorProto.BOOL, "x": TensorProto.FLOAT, "k": TensorProto.FLOAT}
    ends = [value(name, kind, 2, 8) for name, kind in kinds.items()]
    chosen = onnx_model(
        [helper.make_node("Where", ["c", "x", "k"], ["y"])], ends, [value("y", TensorProto.FLOAT, 2, 8)], {}
    )
    rng = np.random.default_rng(4)
    feeds = {"c": rng.random((2, 8)) < 0.5, "x": rng.normal(size=(2, 8)).astype(np.float32)}
    feeds["k"] = -feeds["x"]
    (found,) = run_firmware(tmp_path, chosen.SerializeToString(), ".onnx", feeds, allow_float=True)
    np.testing.assert_array_equal(found, runtime(chosen, feeds))
    alone = onnx_model([helper.make_node("Not", ["c"], ["y"])], ends[:1], [value("y", TensorProto.BOOL, 2, 8)], {})
    (tmp_path / "alone").mkdir()
    (found,) = run_firmware(tmp_path / "alone", alone.SerializeToString(), ".onnx", {"c": feeds["c"]})
    np.testing.assert_array_equal(found, ~feeds["c"])


# ---- how a model's own requantisations round


def roundings(graph: Graph) -> set[Rounding]:
    return {node.operator.rounding for node in graph.nodes if isinstance(node.operator, Requantize)}


def test_rounding_is_that_of_the_formats_runtime(tmp_path: Path) -> None:
    """ONNX Runtime rounds once, TensorFlow Lite Micro twice; asked for otherwise, or by a policy, otherwise."""
    (tmp_path / "net.onnx").write_bytes(quantised_net().SerializeToString())
    (tmp_path / "net.tflite").write_bytes(sum_model())
    riscv, array = load_target("riscv"), load_target("macarray")
    assert roundings(prepare(tmp_path / "net.onnx", riscv, Options())) == {Rounding.SINGLE}
    assert roundings(prepare(tmp_path / "net.tflite", riscv, Options())) == {Rounding.DOUBLE}
    assert roundings(prepare(tmp_path / "net.onnx", riscv, Options(rounding=Rounding.DOUBLE))) == {Rounding.DOUBLE}
    assert roundings(prepare(tmp_path / "net.onnx", array, Options())) == {Rounding.DOUBLE}
    for name, word in (("net.onnx", "once"), ("net.tflite", "twice")):
        project = compile_model(tmp_path / name, riscv, Options()).project
        assert f"requantisations round {word}" in next(
            text for file, text in project.files.items() if file == "src/net.h"
        )


# ---- the ends


def test_ends_as_the_networks_own_integers(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(quantised_net().SerializeToString())
    graph = quantize(simplify(load_model(tmp_path / "net.onnx")), Rounding.SINGLE)
    inner, inputs = integer_inputs(graph)
    inner, outputs = integer_outputs(inner)
    assert (inputs, outputs) == ({"x": Steps(float(np.float32(0.02)), 3)}, {"y": Steps(float(np.float32(0.07)), 3)})
    assert inner.types["x"].dtype is inner.types["y"].dtype is DType.INT8
    assert not any(isinstance(node.operator, Quantize | Dequantize) for node in inner.nodes)
    x = np.random.default_rng(1).normal(size=(1, 8, 8)).astype(np.float32)
    steps = np.clip(np.rint(x / np.float32(0.02)) + 3, -128, 127).astype(np.int8)
    real = (evaluate(inner, {"x": steps})["y"].astype(np.float32) - 3) * np.float32(0.07)
    np.testing.assert_array_equal(real, evaluate(graph, {"x": x})["y"])


def test_an_input_that_is_read_as_a_float_too_stays_one() -> None:
    model = quantised_net()
    model.graph.node.append(helper.make_node("QuantizeLinear", ["x", "t", "z"], ["other"]))
    model.graph.node.append(helper.make_node("DequantizeLinear", ["other", "t", "z"], ["o"]))
    model.graph.output.append(value("o", TensorProto.FLOAT, 1, 8, 8))
    graph = quantize(simplify(read(model)[0]), Rounding.SINGLE)
    assert integer_inputs(graph) == (graph, {})


# ---- inputs nothing reads, constants that are joined


def test_an_input_that_nothing_reads(tmp_path: Path) -> None:
    model = quantised_net()
    model.graph.input.append(value("idle", TensorProto.FLOAT, 1, 3))
    x = np.random.default_rng(2).normal(size=(1, 8, 8)).astype(np.float32)
    feeds = {"x": x, "idle": np.ones((1, 3), np.float32)}
    (found,) = run_firmware(tmp_path, model.SerializeToString(), ".onnx", feeds)
    np.testing.assert_allclose(found, runtime(model, feeds), rtol=1e-6)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("kind", [np.float32, np.int8])
def test_a_constant_is_joined(axis: int, kind: Any, tmp_path: Path) -> None:
    """Several constants, and one twice."""
    rng = np.random.default_rng(3)
    held = {name: rng.integers(-9, 9, (1, 3, 4)).astype(kind) for name in "kl"}
    number = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    node = helper.make_node("Concat", ["k", "x", "l", "k"], ["y"], axis=axis)
    result = (1, 12, 4) if axis == 1 else (1, 3, 16)
    model = onnx_model([node], [value("x", number, 1, 3, 4)], [value("y", number, *result)], held)
    feeds = {"x": rng.integers(-9, 9, (1, 3, 4)).astype(kind)}
    (found,) = run_firmware(tmp_path, model.SerializeToString(), ".onnx", feeds, allow_float=True)
    np.testing.assert_array_equal(found, np.concatenate([held["k"], feeds["x"], held["l"], held["k"]], axis))


def test_numbers_of_the_target_are_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was set is noted in the build, so that it runs on the target it was made for."""
    from command_line import dovetail

    (tmp_path / "net.onnx").write_bytes(quantised_net("N", "rows").SerializeToString())
    given = ("compile", tmp_path / "net.onnx", "-t", "riscv", "-o", tmp_path / "build")
    assert dovetail(*given, "--set", "ram.size=1K", "--shape", "x=1,64,8") == 1
    assert "short" in capsys.readouterr().err
    assert dovetail(*given, "--set", "ram.size=16M", "--set", "flash.size=4M", "--shape", "x=1,64,8") == 0
    target = open_build(tmp_path / "build").target
    assert (target.memory("ram").size, target.memory("flash").size) == (16 << 20, 4 << 20)
    for wrong in ("ram.size", "ram.size=1K,2K", "moon.size=3"):
        assert dovetail(*given, "--force", "--set", wrong, "--shape", "x=1,64,8") == 1
    for wrong in ("x", "x=1,a", "=1,2", "x=0,1"):
        assert dovetail(*given, "--force", "--shape", wrong) == 1
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(DovetailError):
        load_target("moon")
