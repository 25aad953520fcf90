"""Stages as ONNX: saved, opened by others, read back, and compared with ONNX Runtime and with each other."""

from __future__ import annotations

import builtins
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dovetail.errors import DovetailError, MissingExtraError, ModelError
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.onnx_file import check_graph, check_stages, from_model, load_graph, save_graph, to_model
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.types import DType, TensorType
from dovetail.quantize import quantize
from dovetail.read.tflite import load_tflite
from oracles import NETWORKS, network_bytes, references
from test_operators import CASES, Case


def network(name: str) -> tuple[Graph, Graph]:
    """A reference network in QDQ form and as integers."""
    before = load_tflite(name, network_bytes(name), name)
    return before, quantize(before)


def small_graph() -> Graph:
    """A dense layer with int4 weights, requantised."""
    builder = GraphBuilder("small")
    x = builder.input("x", TensorType((2, 6), DType.INT8))
    w = builder.constant("w", (np.arange(24, dtype=np.int8) % 16 - 8).reshape(4, 6), DType.INT4)
    total = builder.add(FullyConnected(-3), [x, w], "total", "FULLY_CONNECTED 0 (y)")
    parameters = [builder.constant("m", np.array([1 << 30], np.int32)), builder.constant("s", np.array([-3], np.int32))]
    scaled = builder.add(Requantize(Rounding.SINGLE, 0, 5), [total, *parameters], "scaled")
    return builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled], "y")])


def assert_same(left: Graph, right: Graph) -> None:
    """Equal in every field."""
    assert (left.name, left.inputs, left.outputs) == (right.name, right.inputs, right.outputs)
    assert left.nodes == right.nodes
    assert dict(left.types) == dict(right.types)
    assert list(left.constants) == list(right.constants)
    for name, array in left.constants.items():
        assert array.dtype == right.constants[name].dtype
        np.testing.assert_array_equal(array, right.constants[name])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    for index, graph in enumerate(network(name)):
        path = tmp_path / f"{index}.onnx"
        save_graph(graph, path)
        assert_same(load_graph(path), graph)
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert model.ir_version <= 13
        save_graph(load_graph(path), tmp_path / "again.onnx")
        assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", NETWORKS)
def test_every_value_of_the_networks_equals_onnx_runtime(name: str) -> None:
    """Translation validation of the integer graph, for both roundings, exactly."""
    pytest.importorskip("onnxruntime")
    before, after = network(name)
    stored = references(name)
    for index, graph in ((3, after), (12, quantize(before, Rounding.SINGLE))):
        values = [node.output for node in graph.nodes]
        assert check_graph(graph, {graph.inputs[0]: stored[f"in_{index}"]}, values) == len(values)


def test_the_qdq_graph_runs_in_onnx_runtime_too() -> None:
    """In float the two differ in the last bits, which at a tie moves an integer: the outputs must not move here."""
    pytest.importorskip("onnxruntime")
    before, _ = network("kws_dscnn")
    assert check_graph(before, {before.inputs[0]: references("kws_dscnn")["in_3"]}) == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_operator_comes_back_as_it_was(case: Case) -> None:
    builder = GraphBuilder("case")
    names = [builder.input(f"x{index}", kind) for index, kind in enumerate(case.operands)]
    graph = builder.finish([builder.add(case.operator, names, "y", "ORIGIN")])
    model = onnx.ModelProto.FromString(to_model(graph).SerializeToString())
    onnx.checker.check_model(model, full_check=True)
    assert_same(from_model(model), graph)


def test_names_attributes_and_narrow_types_can_be_read() -> None:
    graph = small_graph()
    model = to_model(graph)
    assert [node.name for node in model.graph.node] == ["total", "scaled", "y"]
    assert [function.name for function in model.functions] == ["FullyConnected", "Requantize", "Clip"]
    attributes = {attribute.name: attribute.i for attribute in model.graph.node[0].attribute}
    assert attributes == {"input_zero_point": -3, "weight_zero_point": 0}
    assert from_model(model).types["w"] == TensorType((4, 6), DType.INT4)
    assert from_model(model).nodes[0].origin == "FULLY_CONNECTED 0 (y)"


def test_equal_bodies_share_a_function_and_others_do_not() -> None:
    builder = GraphBuilder("shared")
    x = builder.input("x", TensorType((1, 4, 4, 2), DType.INT8))
    w = builder.constant("w", np.ones((2, 1, 1, 2), np.int8))
    wider = builder.constant("wider", np.ones((5, 1, 1, 2), np.int8))
    outputs = [builder.add(Conv2d(), [x, w]), builder.add(Conv2d(), [x, wider]), builder.add(Conv2d((2, 2)), [x, w])]
    model = to_model(builder.finish(outputs))
    assert [node.op_type for node in model.graph.node] == ["Conv2d", "Conv2d", "Conv2d_2"]


def changed(graph: Graph, output: str, operator: Any) -> Graph:
    """The graph with another operator at one node."""
    nodes = [replace(node, operator=operator) if node.output == output else node for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def inputs_of(graph: Graph) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(-128, 128, graph.types[name].shape).astype(np.int8) for name in graph.inputs}


def test_check_stages_names_the_first_value_that_differs() -> None:
    graph = small_graph()
    inputs = inputs_of(graph)
    assert check_stages(graph, graph, inputs, 0) == 3
    moved = changed(graph, "scaled", Requantize(Rounding.SINGLE, 0, 6))
    assert check_stages(graph, moved, inputs, 1) == 1
    with pytest.raises(DovetailError, match=r"^scaled: 8 of 8 elements differ, by up to 1 .*allowed is 0"):
        check_stages(graph, moved, inputs, 0)
    with pytest.raises(DovetailError, match=r"^total: .*allowed is 0"):
        check_stages(graph, changed(graph, "total", FullyConnected(-4)), inputs, 0)
    with pytest.raises(DovetailError, match=r"^y: .*allowed is 1"):
        check_stages(graph, changed(graph, "total", FullyConnected(-40)), inputs, 1)


def test_sums_are_compared_where_they_end() -> None:
    """Where values may move by a step, a sum may by thousands, or have another scale; an output may not."""
    graph = small_graph()
    weights = np.asarray(graph.constants["w"])
    graph, larger = (
        replace(graph, constants={**graph.constants, "w": factor * (weights // 4), "m": np.array([m], np.int32)})
        for factor, m in ((1, 1 << 30), (2, 1 << 29))
    )
    with pytest.raises(DovetailError, match=r"^total: .*allowed is 0"):
        check_stages(graph, larger, inputs_of(graph), 0)
    assert check_stages(graph, larger, inputs_of(graph), 1) == 1
    ends = (replace(one, outputs=("total",), nodes=one.nodes[:1]) for one in (graph, larger))
    with pytest.raises(DovetailError, match=r"^total: .*allowed is 1"):
        check_stages(*ends, inputs_of(graph), 1)


def test_differences_do_not_grow_from_layer_to_layer() -> None:
    """The value after the changed one is computed from the stage before, so it agrees."""
    graph = small_graph()
    moved = changed(graph, "scaled", Requantize(Rounding.SINGLE, 0, 40))
    try:
        check_stages(graph, moved, inputs_of(graph), 40)
    except DovetailError as error:
        pytest.fail(str(error))


def test_check_graph_finds_a_wrong_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ONNX form that rounds otherwise is noticed at its node."""
    pytest.importorskip("onnxruntime")
    graph = small_graph()
    inputs = inputs_of(graph)
    assert check_graph(graph, inputs, ["total", "scaled", "w", "x"]) == 3

    def floored(self: Requantize, body: Any, names: Sequence[str], _types: Sequence[TensorType]) -> str:
        wide = [body.cast(name, DType.INT64) for name in names]
        shift = body.add("Sub", [body.scalar(31, DType.INT64), wide[2]])
        total = body.shift_right(body.add("Mul", wide[:2]), shift)
        return str(body.cast(body.add("Add", [total, body.scalar(5, DType.INT64)]), DType.INT32))

    monkeypatch.setattr(Requantize, "onnx", floored)
    with pytest.raises(DovetailError, match=r"^scaled: .*numpy and ONNX Runtime"):
        check_graph(graph, inputs, ["total", "scaled"])


def test_a_missing_onnxruntime_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    graph = small_graph()
    with pytest.raises(MissingExtraError, match="onnxruntime"):
        check_graph(graph, inputs_of(graph))


def written(path: Path) -> onnx.ModelProto:
    """The small graph saved; the model to edit and save again."""
    save_graph(small_graph(), path)
    return onnx.load(path)


def refused(path: Path, model: onnx.ModelProto, words: str) -> None:
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=words):
        load_graph(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    with pytest.raises(ModelError, match="cannot read the model"):
        load_graph(path)
    path.write_bytes(b"\xff\xff not a model")
    with pytest.raises(ModelError, match="not an ONNX model"):
        load_graph(path)
    with pytest.raises(DovetailError, match="cannot write the model"):
        save_graph(small_graph(), tmp_path / "absent" / "graph.onnx")
    model = written(path)
    model.producer_name = "onnx.utils.extract_model"  # tools that cut models out leave the functions
    path.write_bytes(model.SerializeToString())
    load_graph(path)
    model.producer_name = "pytorch"
    del model.functions[:]
    refused(path, model, "written by 'pytorch'")
    model = written(path)
    model.graph.node[0].op_type = "Clip"
    refused(path, model, "has no attribute 'input_zero_point'")
    model = written(path)
    del model.graph.node[1].attribute[0]
    refused(path, model, "lacks its attribute 'rounding'")
    model = written(path)
    model.graph.node[1].attribute[0].s = b'"TRIPLE"'
    refused(path, model, "'rounding' holds 'TRIPLE'")
    model = written(path)
    model.functions[0].metadata_props[0].value = "system"
    refused(path, model, "is no operator of Dovetail")
    model = written(path)
    model.graph.node[0].input[1] = "nowhere"
    refused(path, model, "reads 'nowhere' before it is defined")
    model = written(path)
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    refused(path, model, "lies outside the file")


def test_damaged_files_never_break_the_reader(tmp_path: Path) -> None:
    """Bytes changed or cut at random: the file loads or a ModelError says why not."""
    path = tmp_path / "graph.onnx"
    written(path)
    intact, rng, refusals = path.read_bytes(), random.Random(0), 0
    for _ in range(400):
        data = bytearray(intact[: rng.randrange(len(intact))] if rng.random() < 0.2 else intact)
        for _ in range(rng.randrange(1, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        try:
            load_graph(path)
        except ModelError:
            refusals += 1
    assert refusals > 100


def test_a_loaded_graph_computes_the_same(tmp_path: Path) -> None:
    graph = small_graph()
    save_graph(graph, tmp_path / "graph.onnx")
    inputs = inputs_of(graph)
    loaded = evaluate(load_graph(tmp_path / "graph.onnx"), inputs)
    np.testing.assert_array_equal(loaded["y"], evaluate(graph, inputs)["y"])
