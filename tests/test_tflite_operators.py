"""TFLite operators against TensorFlow Lite Micro: the integer graph, and the emitted C on this computer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_graph
from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, evaluate, verify
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType, TensorType
from dovetail.quantize import quantize
from dovetail.read.tflite import load_tflite
from onnx_nodes import Prepared, joined, roomy
from oracles import SingleOperator, run_litert_often, run_micro_often, tflite_bytes
from tflite_cases import Draw
from tflite_tables import CLOSE, COMPARISONS, EXACT, LITE

SEEDS = 6
"""Models of each kind."""


def values(rng: np.random.Generator, kind: TensorType) -> Array:
    """Elements over the whole range of a type; floats around 0 that are no denormals."""
    if kind.dtype is DType.FLOAT32:
        return rng.uniform(0.1, 4.0, kind.shape).astype(np.float32) * rng.choice([-1.0, 1.0, 1.0], kind.shape).astype(
            np.float32
        )
    if kind.dtype is DType.BOOL:
        return rng.integers(0, 2, kind.shape).astype(np.bool_)
    found = rng.integers(kind.dtype.low, kind.dtype.high + 1, kind.shape).astype(kind.dtype.numpy)
    if kind.dtype is DType.INT8 and found.size >= 256:
        found.reshape(-1)[:256] = np.arange(-128, 128)
    return found


def admitted(name: str, place: int, array: Array, single: SingleOperator) -> Array:
    """The elements, less those an operator is not defined for; for comparisons few different ones."""
    if array.dtype == np.float32:
        positive = name in ("LOG", "SQRT", "RSQRT") or (name == "POW" and place == 0)
        coarse = np.round(array) if name in COMPARISONS else array
        return np.abs(array) if positive else coarse
    if name in COMPARISONS:
        return (array // 32).astype(array.dtype)
    if name == "DIV" and place == 1:
        return np.maximum(array, -127)
    return array


def made(name: str, draw: Draw, seed: int) -> tuple[Prepared, list[Array]]:
    """A model as an integer graph, its inputs, and what the oracle computes from them."""
    rng = np.random.default_rng((seed, *name.encode()))
    single = draw(rng)
    model = tflite_bytes(single)
    graph = quantize(simplify(load_tflite("single", model, "single")), allow_float=True)
    verify(graph)
    feeds = {value: values(rng, graph.types[value]) for value in graph.inputs}
    feeds = {value: admitted(name, place, array, single) for place, (value, array) in enumerate(feeds.items())}
    given = [list(feeds.values())]
    expected = run_litert_often(model, given, reference=True) if name in LITE else run_micro_often(model, given)
    return Prepared(None, graph, feeds), expected[0]  # type: ignore[arg-type]


def integer_only(graph: Graph) -> bool:
    """True where no value is float."""
    return all(kind.dtype is not DType.FLOAT32 for name, kind in graph.types.items() if name not in graph.constants)


def agree(found: Array, expected: Array, exact: bool, what: str) -> None:
    if exact:
        np.testing.assert_array_equal(found, expected, what)
    else:
        reach = max(1.0, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=2e-6 * reach, err_msg=what)


@pytest.mark.parametrize("name", EXACT)
def test_integer_graphs_equal_tflite_micro(name: str) -> None:
    for number, draw in enumerate(EXACT[name]):
        spread = 0
        for seed in range(SEEDS * 2):
            case, expected = made(name, draw, seed * 10 + number)
            inputs = list(case.feeds.values())
            assert integer_only(case.graph) or any(array.dtype == np.float32 for array in inputs), name
            found = evaluate(case.graph, case.feeds)
            for output, wanted in zip(case.graph.outputs, expected, strict=True):
                agree(found[output], wanted, True, f"{name} {number} seed {seed}: {case.graph.types}")
                spread = max(spread, np.unique(wanted).size)
        assert spread > 1, "every element is saturated: this compares nothing"


@pytest.mark.parametrize("kinds", ["exact", "close"])
def test_emitted_c_equals_tflite_micro(kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All operators beside each other in one network."""
    from dovetail.run import open_build, run_build

    def as_found(sizes: Mapping[str, int], _clashes: object, start: Mapping[str, int], *_: object) -> object:
        """No search for the fewest bytes: tests side by side have nothing to share."""
        return dict(start), max(start[name] + sizes[name] for name in start)

    monkeypatch.setattr(import_module("dovetail.schedule.plan.allocate"), "improve", as_found)
    table = EXACT if kinds == "exact" else CLOSE
    drawn = [
        (f"{name} {number}", *made(name, draw, seed * 10 + number))
        for name, draws in table.items()
        for number, draw in enumerate(draws)
        for seed in range(2)
    ]
    target = roomy()
    graph = joined([case for _, case, _ in drawn])
    compiled = compile_graph(graph, target, Options(allow_float=True), interpret=False)
    write_project(compiled.project, tmp_path / "build")
    feeds = {
        f"t{number}_{name}": array for number, (_, case, _) in enumerate(drawn) for name, array in case.feeds.items()
    }
    result = run_build(open_build(tmp_path / "build", target), "host", [feeds], tmp_path / "cache").outputs[0]
    for number, (name, case, expected) in enumerate(drawn):
        for output, wanted in zip(case.graph.outputs, expected, strict=True):
            agree(result[f"t{number}_{output}"], wanted, kinds == "exact", f"{name}: {case.graph.types}")


SPOILT: dict[str, tuple[str, int, Array, str]] = {
    "blocks of nothing": ("BATCH_TO_SPACE_ND", 1, np.array([0, 2], np.int32), "do not fit"),
    "a negative border": ("SPACE_TO_BATCH_ND", 2, np.array([[-1, 0], [0, 0]], np.int32), "do not fit"),
    "an endless result": ("TILE", 1, np.array([1 << 30, 1, 1], np.int32), "the model declares"),
    "a wide mirror": ("MIRROR_PAD", 1, np.full((3, 2), 1 << 30, np.int32), "the model declares"),
    "no image": ("RESIZE_BILINEAR", 1, np.array([0, 0], np.int32), "the model declares"),
    "no nearest image": ("RESIZE_NEAREST_NEIGHBOR", 1, np.array([0, 3], np.int32), "the model declares"),
    "an axis outside": ("SPLIT", 0, np.array([7], np.int32), "outside the 3 axes"),
    "parts of nothing": ("SPLIT_V", 1, np.array([0], np.int32), "do not make up"),
    "an axis to sum outside": ("SUM", 1, np.array([9], np.int32), "outside the 4 axes"),
}
"""Which operand of a model is replaced by what, and the refusal."""


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_operands_are_refused(what: str) -> None:
    name, position, array, sentence = SPOILT[what]
    single = EXACT[name][0](np.random.default_rng(1))
    tensors = list(single.tensors)
    tensors[position] = replace(tensors[position], shape=array.shape, data=array)
    with pytest.raises(ModelError, match=sentence):
        load_tflite("spoilt", tflite_bytes(replace(single, tensors=tensors)), "spoilt")
