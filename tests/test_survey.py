"""`dovetail explain MODEL` without a target: what is in a model, and all it is refused for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from command_line import dovetail
from dovetail.options import Options
from dovetail.survey import survey
from tflite_writer import ModelWriter


def three_unknown(path: Path, typed: bool) -> Path:
    """Two operators nobody knows, and a slice of nothing behind the first, whose type the file says or not."""
    kinds = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "a", "b", "y")}
    nodes = [
        helper.make_node("Det", ["x"], ["a"]),
        helper.make_node("Slice", ["a", "five", "six", "one"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Det", ["c"], ["y"]),
    ]
    held = [numpy_helper.from_array(np.array([n], np.int64), name) for name, n in (("five", 5), ("six", 6), ("one", 1))]
    inner = [kinds["a"], kinds["b"]] if typed else []
    graph = helper.make_graph(nodes, "g", [kinds["x"]], [kinds["y"]], held, value_info=inner)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize(("typed", "count"), [(True, 3), (False, 2)])
def test_all_reasons_are_told_at_once(tmp_path: Path, typed: bool, count: int) -> None:
    found = survey(three_unknown(tmp_path / "unknown.onnx", typed), Options())
    assert len(found.faults) == count and found.outlook == f"it is refused, for {count} reasons"
    assert list(found.inputs) == ["x float32[1x4]"]
    reasons = found.reasons()
    assert reasons[0].startswith("unknown.onnx, Det 0 (a) and 1 more: the operator Det of the domain ai.onnx is not")
    assert any("is empty" in text for text in reasons) == typed


def test_a_refused_model_ends_with_1_and_json_has_the_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dovetail("explain", three_unknown(tmp_path / "unknown.onnx", True), "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["refused"]) == 3


def test_what_is_in_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = ModelWriter()
    x, y = (writer.tensor(name, (1, 6), "INT8", quantised=(0.05, 3)) for name in "xy")
    writer.operator("LOGISTIC", [x], [y])
    writer.ends([x], [y])
    (path := tmp_path / "net.tflite").write_bytes(writer.finish())
    found = survey(path, Options())
    assert found.operators == {"LOGISTIC": 1} and not found.faults
    assert found.outlook == "it computes on integers, as the model says"
    assert dovetail("explain", path) == 0
    printed = capsys.readouterr().out
    assert "1 LOGISTIC" in printed and "x int8[1x6]" in printed


def test_a_float_model_is_told_what_it_needs(tmp_path: Path) -> None:
    kinds = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "g", kinds[:1], kinds[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "t.onnx")
    outlook = survey(tmp_path / "t.onnx", Options()).outlook
    assert outlook.startswith("it needs --float, which computes 1 of 1 operators in float32 on the core")
