"""Loop, Scan and If of ONNX: turns that are known are written out, ways that are not are both computed; as in ONNX
Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.compile import Options, prepare
from dovetail.errors import ModelError
from dovetail.ir.graph import evaluate
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.targets import load_target
from user_operators import compiled_from

pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle")

RISCV = load_target("riscv")
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Kind = tuple[str, int, Sequence[int | str]]
"""Name, element type and sizes."""


def graph(nodes: Sequence[Any], takes: Sequence[Kind], gives: Sequence[Kind], **constants: Any) -> Any:
    ends = [[helper.make_tensor_value_info(*kind) for kind in kinds] for kinds in (takes, gives)]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    return helper.make_graph(nodes, "g", *ends, held)


def model(nodes: Sequence[Any], takes: Sequence[Kind], gives: Sequence[Kind], **constants: Any) -> Any:
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph(nodes, takes, gives, **constants), opset_imports=opsets, ir_version=9)


def check(tmp_path: Path, proto: Any, inputs: Mapping[str, Any]) -> None:
    """What Dovetail computes is what ONNX Runtime computes, and the whole network compiles."""
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    read = prepare(path, RISCV, Options(allow_float=True))
    found = evaluate(read, inputs)
    wanted = runtime_session(path, optimised=False).run(None, dict(inputs))
    for name, array in zip(read.outputs, wanted, strict=True):
        assert found[name].shape == array.shape and np.allclose(found[name], array, atol=1e-5), name
    compiled_from(path.read_bytes(), tmp_path, "again.onnx", RISCV, Options(allow_float=True))


X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
ROW, ROWS = ("x", FLOAT, [5, 3]), ("y", FLOAT, [5, 3])
ONE = ("i", INT64, []), ("go", BOOL, [])


def body(test: Sequence[Any] = (), **constants: Any) -> Any:
    """A turn: s * 0.5 + x * the turn's number, and s itself as a part of what is gathered."""
    nodes = [
        helper.make_node("Cast", ["i"], ["n"], to=FLOAT),
        helper.make_node("Mul", ["x", "n"], ["share"]),
        helper.make_node("Mul", ["s", "half"], ["halved"]),
        helper.make_node("Add", ["halved", "share"], ["more"]),
        *(test or [helper.make_node("Identity", ["go"], ["going"])]),
    ]
    gives = [("going", BOOL, []), ("more", FLOAT, [5, 3]), ("s", FLOAT, [5, 3])]
    return graph(nodes, [*ONE, ("s", FLOAT, [5, 3])], gives, half=np.float32(0.5), **constants)


def test_a_loop_of_known_turns(tmp_path: Path) -> None:
    loop = helper.make_node("Loop", ["turns", "", "x"], ["y", "all"], body=body())
    gives = [ROWS, ("all", FLOAT, [4, 5, 3])]
    check(tmp_path, model([loop], [ROW], gives, turns=np.int64(4)), {"x": X})


def test_a_loop_that_ends_by_its_counter(tmp_path: Path) -> None:
    test = [helper.make_node("Less", ["i", "most"], ["going"])]
    loop = helper.make_node("Loop", ["", "start", "x"], ["y", "all"], body=body(test, most=np.int64(2)))
    check(tmp_path, model([loop], [ROW], [ROWS, ("all", FLOAT, [3, 5, 3])], start=np.array(True)), {"x": X})


def test_a_loop_that_ends_by_what_is_computed_is_refused(tmp_path: Path) -> None:
    test = [
        helper.make_node("ReduceSum", ["more"], ["total"], keepdims=0),
        helper.make_node("Less", ["total", "most"], ["going"]),
    ]
    loop = helper.make_node("Loop", ["", "start", "x"], ["y", ""], body=body(test, most=np.float32(2)))
    path = tmp_path / "model.onnx"
    onnx.save(model([loop], [ROW], [ROWS], start=np.array(True)), path)
    with pytest.raises(ModelError, match=r"Loop 0 \(y\): turns until a value of run time says so") as caught:
        prepare(path, RISCV, Options(allow_float=True))
    assert "unroll the loop" in caught.value.hint


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan_along_any_axis_either_way(tmp_path: Path, axis: int, backwards: int) -> None:
    width, turns = (3, 5) if axis == 0 else (5, 3)
    nodes = [
        helper.make_node("Add", ["s", "e"], ["t"]),
        helper.make_node("Mul", ["t", "e"], ["p"]),
    ]
    line = [width]
    turn = graph(nodes, [("s", FLOAT, line), ("e", FLOAT, line)], [("t", FLOAT, line), ("p", FLOAT, line)])
    attributes = {"scan_input_axes": [axis], "scan_input_directions": [backwards]}
    given = {"scan_output_axes": [1], "scan_output_directions": [1 - backwards]}
    node = helper.make_node("Scan", ["z", "x"], ["last", "y"], body=turn, num_scan_inputs=1, **attributes, **given)
    gives = [("last", FLOAT, line), ("y", FLOAT, [width, turns])]
    check(tmp_path, model([node], [ROW], gives, z=np.ones(width, np.float32)), {"x": X})


def ways(condition: Sequence[Any], takes: Sequence[Kind], **constants: Any) -> Any:
    """x + 1, or x times x; both read x from around them."""
    one, two = (
        graph([node], [], [("r", FLOAT, [5, 3])])
        for node in (helper.make_node("Add", ["x", "one"], ["r"]), helper.make_node("Mul", ["x", "x"], ["r"]))
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=one, else_branch=two)
    return model([*condition, node], takes, [ROWS], one=np.float32(1), **constants)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_condition_of_shapes_takes_one_way(tmp_path: Path, rank: int) -> None:
    """As torch writes a squeeze whose axis it does not know."""
    asked = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "last"], ["size"]),
        helper.make_node("Equal", ["size", "wanted"], ["c"]),
    ]
    check(tmp_path, ways(asked, [ROW], last=np.int64(1), wanted=np.int64(rank)), {"x": X})


@pytest.mark.parametrize("condition", [True, False])
def test_a_condition_of_run_time_chooses(tmp_path: Path, condition: bool) -> None:
    check(tmp_path, ways([], [ROW, ("c", BOOL, [1])]), {"x": X, "c": np.array([condition])})


def test_a_condition_in_a_loop_reads_what_is_around_both(tmp_path: Path) -> None:
    then, other = (
        graph([node], [], [("r", FLOAT, [5, 3])])
        for node in (helper.make_node("Add", ["s", "x"], ["r"]), helper.make_node("Identity", ["s"], ["r"]))
    )
    nodes = [
        helper.make_node("Equal", ["i", "second"], ["c"]),
        helper.make_node("If", ["c"], ["more"], then_branch=then, else_branch=other),
        helper.make_node("Identity", ["go"], ["going"]),
    ]
    gives = [("going", BOOL, []), ("more", FLOAT, [5, 3])]
    turn = graph(nodes, [*ONE, ("s", FLOAT, [5, 3])], gives, second=np.int64(1))
    loop = helper.make_node("Loop", ["turns", "", "x"], ["y"], body=turn)
    check(tmp_path, model([loop], [ROW], [ROWS], turns=np.int64(3)), {"x": X})
