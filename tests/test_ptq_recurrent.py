"""Recurrent layers and transformers from `dovetail quantize`: integers alone, near the float network; the firmware is
the integer graph."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model
from dovetail.errors import ModelError
from dovetail.guests.ptq import Samples, Settings, quantise_network
from dovetail.guests.ptq.preparation import prepare
from dovetail.ir.graph import Graph, evaluate, evaluate_all
from dovetail.ir.onnx_file import check_graph
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.fixed import FixedStandard
from dovetail.ir.operators.recurrent import FixedLstm, FixedRecurrent
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType
from dovetail.quantize import quantize
from dovetail.read.onnx import load_onnx
from dovetail.run import open_build, run_build
from dovetail.targets import load_target

STEPS, BATCH, DEPTH, HIDDEN = 6, 2, 5, 7
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
KINDS = [
    *product(("LSTM", "RNN"), (0,), ("forward", "reverse", "bidirectional")),
    *product(("GRU",), (0, 1), ("forward", "bidirectional")),
]


def layer(kind: str, reset_after: int, direction: str, seed: int = 0, outputs: str = "y") -> Any:
    """A recurrent layer as an ONNX model of floats."""
    rng, count = np.random.default_rng(seed), 2 if direction == "bidirectional" else 1
    rows = GATES[kind] * HIDDEN
    constants = {
        "w": rng.normal(0, 0.5, (count, rows, DEPTH)).astype(np.float32),
        "r": rng.normal(0, 0.4, (count, rows, HIDDEN)).astype(np.float32),
        "b": rng.normal(0, 0.3, (count, 2 * rows)).astype(np.float32),
    }
    more = {"linear_before_reset": reset_after} if kind == "GRU" else {}
    node = helper.make_node(
        kind, ["x", "w", "r", "b"], outputs.split(), direction=direction, hidden_size=HIDDEN, **more
    )
    shapes = {"y": [STEPS, count, BATCH, HIDDEN], "c": [count, BATCH, HIDDEN]}
    return onnx_model(
        [node], {"x": [STEPS, BATCH, DEPTH]}, {n: shapes[n] for n in outputs.split() if n in shapes}, constants
    )


def onnx_model(nodes: Any, inputs: dict[str, Any], outputs: dict[str, Any], constants: dict[str, Array]) -> Any:
    ends = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in one.items()] for one in (inputs, outputs)
    ]
    held = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "net", *ends, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def runtime(model: Any, x: Array) -> Array:
    session = runtime_session(model)
    return np.stack([session.run(None, {"x": one})[0] for one in x])


def quantised(model: Any, data: Array) -> bytes:
    """What `dovetail quantize` writes."""
    graph = prepare(load_onnx("net.onnx", model.SerializeToString(), "net", Path()), "net.onnx")
    made = quantise_network(graph, Samples({"x": data}, None), load_target("riscv"), Settings())
    return bytes(made.model.SerializeToString())


def integers(model: bytes) -> Graph:
    graph = quantize(simplify(load_onnx("net.onnx", model, "net", Path())))
    inner = [node for node in graph.nodes if graph.types[node.output].dtype is DType.FLOAT32]
    assert [node.output for node in inner] == list(graph.results), "only the end is a float"
    return graph


def decibel(found: Array, wanted: Array) -> float:
    return float(10 * np.log10((wanted**2).sum() / ((found - wanted) ** 2).sum()))


def found_by(graph: Graph, x: Array) -> Array:
    return np.stack([out[graph.results[0]] for out in evaluate_all(graph, [{graph.given[0]: one} for one in x])])


@pytest.mark.parametrize(("kind", "reset_after", "direction"), KINDS)
def test_recurrent_layers_are_near_the_float_ones(kind: str, reset_after: int, direction: str, tmp_path: Path) -> None:
    model = layer(kind, reset_after, direction)
    data = np.random.default_rng(1).normal(0, 1, (16, STEPS, BATCH, DEPTH)).astype(np.float32)
    graph = integers(quantised(model, data))
    assert any(isinstance(node.operator, FixedLstm | FixedRecurrent) for node in graph.nodes)
    wanted, found = runtime(model, data), found_by(graph, data)
    assert decibel(found, wanted) > 30, decibel(found, wanted)
    check_graph(graph, {"x": data[0]})


@pytest.mark.parametrize(("kind", "reset_after"), [("LSTM", 0), ("GRU", 0), ("GRU", 1), ("RNN", 0)])
def test_their_firmware_is_the_integer_graph(kind: str, reset_after: int, tmp_path: Path) -> None:
    data = np.random.default_rng(2).normal(0, 1, (3, STEPS, BATCH, DEPTH)).astype(np.float32)
    path, target = tmp_path / "net.onnx", load_target("riscv")
    path.write_bytes(quantised(layer(kind, reset_after, "forward", 3), data))
    compiled = compile_model(path, target, Options())
    write_project(compiled.project, tmp_path / "build")
    build = open_build(tmp_path / "build", target)
    outputs = run_build(build, "host", [{"x": one} for one in data]).outputs
    for one, out in zip(data, outputs, strict=True):
        (wanted,) = evaluate(compiled.graph, {"x": one}).values()
        np.testing.assert_array_equal(next(iter(out.values())), wanted)


def test_a_normalisations_firmware_is_the_integer_graph(tmp_path: Path) -> None:
    """With a factor per channel, and so a multiplier and a shift of each behind the rows."""
    data = np.random.default_rng(5).normal(0.3, 1.5, (2, 4, 24)).astype(np.float32)
    path, target = tmp_path / "net.onnx", load_target("riscv")
    path.write_bytes(quantised(written_out("normalisation"), data))
    compiled = compile_model(path, target, Options())
    write_project(compiled.project, tmp_path / "build")
    outputs = run_build(open_build(tmp_path / "build", target), "host", [{"x": one} for one in data]).outputs
    for one, out in zip(data, outputs, strict=True):
        (wanted,) = evaluate(compiled.graph, {"x": one}).values()
        np.testing.assert_array_equal(next(iter(out.values())), wanted)


@pytest.mark.parametrize("swapped", [(0, 1), (1, 2)])
def test_gates_in_another_order_are_found(swapped: tuple[int, int]) -> None:
    """The comparison with the float layer finds weights of the wrong gate."""
    model = layer("GRU", 1, "forward")
    data = np.random.default_rng(1).normal(0, 1, (8, STEPS, BATCH, DEPTH)).astype(np.float32)
    wanted = runtime(model, data)
    array = numpy_helper.to_array(model.graph.initializer[0]).copy()
    parts = array.reshape(3, HIDDEN, DEPTH)
    parts[list(swapped)] = parts[list(swapped[::-1])]
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, "w"))
    assert decibel(found_by(integers(quantised(model, data)), data), wanted) < 20


def test_cells_that_are_read_stay_floats() -> None:
    """They have other steps than hidden values."""
    model = layer("LSTM", 0, "forward", outputs="y h c")
    data = np.random.default_rng(1).normal(0, 1, (4, STEPS, BATCH, DEPTH)).astype(np.float32)
    with pytest.raises(ModelError):
        integers(quantised(model, data))


def written_out(kind: str) -> Any:
    """Layer normalisation and Gelu in the operators older exporters write."""
    rng = np.random.default_rng(4)
    constants = {"two": np.float32(2), "eps": np.float32(1e-5), "one": np.float32(1), "half": np.float32(0.5)}
    constants |= {
        "root": np.float32(np.sqrt(2)),
        "last": np.array([-1], np.int64),
        "g": rng.normal(1, 0.4, 24),
        "b": rng.normal(0, 0.4, 24),
    }
    constants = {name: np.asarray(a, np.int64 if name == "last" else np.float32) for name, a in constants.items()}
    if kind == "normalisation":
        steps = [
            *(("ReduceMean", "x last", "m"), ("Sub", "x m", "d"), ("Pow", "d two", "p"), ("ReduceMean", "p last", "v")),
            *(("Add", "v eps", "e"), ("Sqrt", "e", "s"), ("Div", "d s", "n"), ("Mul", "n g", "k"), ("Add", "k b", "y")),
        ]
    else:
        steps = [
            *(
                ("Div", "x root", "d"),
                ("Erf", "d", "e"),
                ("Add", "e one", "a"),
                ("Mul", "x a", "m"),
                ("Mul", "m half", "y"),
            ),
        ]
    nodes = [helper.make_node(op, ins.split(), [out]) for op, ins, out in steps]
    return onnx_model(nodes, {"x": [4, 24]}, {"y": [4, 24]}, constants)


@pytest.mark.parametrize(("kind", "operator"), [("normalisation", "FixedStandard"), ("gelu", "Lookup")])
def test_what_exporters_write_out_is_rounded_once(kind: str, operator: str) -> None:
    model = written_out(kind)
    data = np.random.default_rng(5).normal(0.3, 1.5, (32, 4, 24)).astype(np.float32)
    file = quantised(model, data)
    graph = integers(file)
    assert [type(node.operator).__name__ for node in graph.nodes].count(operator) == 1
    wanted, found = runtime(model, data), found_by(graph, data)
    step = max(float(a.reshape(-1)[0]) for name, a in graph.constants.items() if name.startswith("y_scale"))
    limit = 2.0 if kind == "gelu" else 3.0  # the operand's own rounding comes in, magnified by the slope
    assert np.abs(found - wanted).max() < limit * step
    check_graph(graph, {"x": data[0]})


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("dtype", [DType.INT8, DType.UINT8, DType.INT16])
def test_rows_with_deviation_one(dtype: DType, centred: bool) -> None:
    """Against the same in float64: at most half a step and what 28 bits of a root leave."""
    rng = np.random.default_rng(6)
    for size, epsilon in product((1, 2, 3, 7, 64, 999), (0, 1, 10**6)):
        operator = FixedStandard(size, 3, epsilon, centred)
        spans = (1, 5, dtype.high)
        x = np.stack([rng.integers(max(dtype.low, -span), min(span, dtype.high) + 1, size) for span in spans])
        q = x.astype(np.float64) - 3
        total = q.sum(axis=1, keepdims=True) if centred else 0.0
        under = size * (q * q).sum(axis=1, keepdims=True) - total**2 + epsilon
        wanted = (size * q - total) / np.sqrt(np.maximum(under, 1e-30)) / operator.scale
        (found,) = [operator.evaluate([x.astype(dtype.numpy)])]
        assert np.abs(found - np.clip(wanted, -32768, 32767)).max() <= 0.51
