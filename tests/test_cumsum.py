"""Running sums: CumSum against ONNX Runtime, CUMSUM against TFLite Micro, firmware against the integer graph."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model
from dovetail.ir.graph import Graph, evaluate, verify
from dovetail.ir.onnx_file import check_graph
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.notes import Note
from dovetail.quantize import quantize
from dovetail.read import load_model
from dovetail.read.tflite import load_tflite
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from oracles import SingleOperator, TensorEntry, run_micro, tflite_bytes

SHAPE = (2, 5, 3)
WAYS = tuple(product((0, 1, 2, -1), (False, True), (False, True)))
"""Axis, exclusive, reverse."""


def onnx_model(element: int, way: tuple[int, bool, bool], quantised: bool = False) -> onnx.ModelProto:
    axis, exclusive, reverse = way
    constants = [numpy_helper.from_array(np.array(axis, np.int64), "axis")]
    call = helper.make_node("CumSum", ["x", "axis"], ["y"], exclusive=int(exclusive), reverse=int(reverse))
    nodes = [call]
    if quantised:
        entries = (("s", np.float32(0.05)), ("z", np.int8(7)), ("s2", np.float32(0.11)), ("z2", np.int8(-9)))
        constants += [numpy_helper.from_array(np.array(value), name) for name, value in entries]
        call.input[0], call.output[0] = "x_real", "y_real"
        nodes = [
            helper.make_node("DequantizeLinear", ["x", "s", "z"], ["x_real"]),
            call,
            helper.make_node("QuantizeLinear", ["y_real", "s2", "z2"], ["y"]),
        ]
    ends = [helper.make_tensor_value_info(name, element, SHAPE) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "sums", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def load(model: onnx.ModelProto, folder: Path) -> Graph:
    onnx.save(model, folder / "sums.onnx")
    return load_model(folder / "sums.onnx")


@pytest.mark.parametrize("element", (TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64))
def test_sums_are_those_of_onnx_runtime(element: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    dtype = helper.tensor_dtype_to_np_dtype(element)
    whole = np.iinfo(dtype).max // 3 if dtype.kind == "i" else 0
    x = rng.integers(-whole, whole, SHAPE).astype(dtype) if whole else rng.normal(0, 9, SHAPE).astype(dtype)
    for way in WAYS:
        model = onnx_model(element, way)
        graph = load(model, tmp_path)
        verify(graph)
        (expected,) = runtime_session(model).run(None, {"x": x})
        found = evaluate(graph, {"x": x})[graph.outputs[0]]
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=0 if whole else 1e-5, atol=0 if whole else 1e-5)
        assert check_graph(graph, {"x": x}) == 1


def test_quantised_sums_are_integers_near_onnx_runtimes(tmp_path: Path) -> None:
    x = np.random.default_rng(4).integers(-128, 128, SHAPE).astype(np.int8)
    for way in WAYS:
        model = onnx_model(TensorProto.INT8, way, quantised=True)
        graph = quantize(load(model, tmp_path))
        verify(graph)
        assert not any(kind.dtype.text == "float32" for kind in graph.types.values())
        (expected,) = runtime_session(model).run(None, {"x": x})
        found = evaluate(graph, {"x": x})[graph.outputs[0]]
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1
        assert check_graph(graph, {"x": x}) == 1


def micro_model(dtype: str, zero_point: int, way: tuple[int, bool, bool]) -> bytes:
    axis, exclusive, reverse = way
    form = [((0.05,), zero_point), ((0.11,), -9)] if dtype == "int8" else [((), 0)] * 2
    tensors = [TensorEntry(name, SHAPE, dtype, *own) for name, own in zip("xy", form, strict=True)]
    tensors.insert(1, TensorEntry("axis", (1,), "int32", data=np.array([axis], np.int32)))
    options = {"exclusive": exclusive, "reverse": reverse}
    return tflite_bytes(SingleOperator("CUMSUM", tensors, options, "CumsumOptions"))


@pytest.mark.parametrize("dtype", ("float32", "int8"))
def test_sums_are_those_of_tflite_micro(dtype: str) -> None:
    rng = np.random.default_rng(5)
    for way in WAYS:
        model = micro_model(dtype, 0, way)
        graph = quantize(load_tflite("single", model, "single"), allow_float=dtype == "float32")
        x = (rng.normal(0, 3, SHAPE) if dtype == "float32" else rng.integers(-128, 128, SHAPE)).astype(dtype)
        found, expected = evaluate(graph, {graph.inputs[0]: x})[graph.outputs[0]], run_micro(model, [x])
        np.testing.assert_allclose(found, expected, rtol=1e-5 if dtype == "float32" else 0, atol=0)


def test_a_zero_point_is_taken_off_each_element_once() -> None:
    told = list[Note]()
    model = micro_model("int8", 7, (1, False, False))
    graph = quantize(load_tflite("single", model, "single", tell=told.append))
    x = np.random.default_rng(7).integers(-128, 128, SHAPE).astype(np.int8)
    found, micro = evaluate(graph, {graph.inputs[0]: x})[graph.outputs[0]], run_micro(model, [x])
    sums = np.cumsum((x.astype(int) - 7) * 0.05, axis=1) / 0.11 - 9
    assert np.abs(found - np.clip(sums, -128, 127)).max() <= 0.51
    assert np.abs(micro - np.clip(sums - 7 * 0.05 / 0.11, -128, 127)).max() <= 0.51, "no longer what the note says"
    assert [note for note in told if "CUMSUM 0 (y)" in note.text and "once too often" in note.text]


@pytest.mark.parametrize("element", (TensorProto.INT8, TensorProto.INT32, TensorProto.FLOAT))
def test_firmware_computes_the_integer_graph(element: int, tmp_path: Path) -> None:
    model = onnx_model(element, WAYS[0], quantised=element == TensorProto.INT8)
    node = next(node for node in model.graph.node if node.op_type == "CumSum")
    ends = [node.output[0]]
    for number, way in enumerate(WAYS[1:12]):  # one behind the other
        axis, exclusive, reverse = way
        model.graph.initializer.append(numpy_helper.from_array(np.array(axis, np.int64), f"axis{number}"))
        ways = {"exclusive": int(exclusive), "reverse": int(reverse)}
        model.graph.node.append(helper.make_node("CumSum", [node.input[0], f"axis{number}"], [f"y{number}"], **ways))
        kind = TensorProto.FLOAT if element == TensorProto.INT8 else element
        model.graph.output.append(helper.make_tensor_value_info(f"y{number}", kind, SHAPE))
        ends.append(f"y{number}")
    if element == TensorProto.INT8:
        for number in range(len(ends) - 1):
            name = f"y{number}_8"
            model.graph.node.append(helper.make_node("QuantizeLinear", [f"y{number}", "s2", "z2"], [name]))
            model.graph.output[number + 1].CopyFrom(helper.make_tensor_value_info(name, element, SHAPE))
    onnx.save(model, tmp_path / "sums.onnx")
    compiled = compile_model(
        tmp_path / "sums.onnx", load_target("riscv"), Options(allow_float=element == TensorProto.FLOAT)
    )
    write_project(compiled.project, tmp_path / "build")
    rng, kind = np.random.default_rng(6), compiled.graph.types["x"].dtype
    x = rng.integers(kind.low, kind.high + 1, SHAPE) if kind.is_integer else rng.normal(0, 4, SHAPE)
    feed = {"x": x.astype(kind.numpy)}
    expected = evaluate(compiled.graph, feed)
    (outputs,) = run_build(open_build(tmp_path / "build"), "iss", [feed]).outputs
    assert len(outputs) == len(ends)
    for name, array in outputs.items():
        np.testing.assert_allclose(array, expected[name], rtol=0 if kind.is_integer else 1e-5, atol=1e-5)
