"""What is computed twice and what changes nothing is left out, exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import dovetail
from dovetail.compile import Options, prepare
from dovetail.ir.graph import Graph, GraphBuilder, Node, verify
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, Requantize
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.redundant import without_redundant
from dovetail.ir.types import DType, TensorType
from dovetail.targets import load_target
from drawn import Drawn, assert_same

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"


def doubled(graph: Graph) -> Graph:
    """The graph with all of it computed again, from constants of the same content, and every narrow value limited to
    what its type holds; the outputs are those of the copy, one of which no copy gives."""
    again = {name: f"{name}_again" for name in graph.types if name not in graph.inputs}
    types = graph.types | {new: graph.types[old] for old, new in again.items()}
    nodes = list(graph.nodes)
    for node in graph.nodes:
        inputs = tuple(again.get(name, name) for name in node.inputs)
        copy, kind = again[node.output], types[node.output].dtype
        if kind is DType.INT8:
            nodes += [Node(node.operator, inputs, f"{copy}_free"), Node(Clip(-128, 127, kind), (f"{copy}_free",), copy)]
            types[f"{copy}_free"] = types[copy]
        else:
            nodes.append(Node(node.operator, inputs, copy))
    constants = graph.constants | {again[name]: array for name, array in graph.constants.items()}
    ends = tuple(again[name] for name in graph.outputs)
    return replace(graph, outputs=(*graph.outputs, *ends), nodes=tuple(nodes), types=types, constants=constants)


@pytest.mark.parametrize("group", range(4))
def test_a_graph_twice_is_computed_once(group: int) -> None:
    for seed in range(group * 20, group * 20 + 20):
        graph = Drawn(seed).graph()
        twice = doubled(graph)
        verify(twice)
        found = without_redundant(twice)
        verify(found.graph)
        assert_same(twice, found.graph)
        once = without_redundant(graph)
        assert_same(graph, once.graph)
        ends = sum(name in graph.outputs for name in {node.output for node in graph.nodes})
        wide = {type(node.operator) for node in found.graph.nodes}
        assert len(found.graph.nodes) <= len(once.graph.nodes) + 8 * ends, wide
        assert found.idle >= len([n for n in graph.nodes if graph.types[n.output].dtype is DType.INT8]) - ends
        assert without_redundant(found.graph).graph is found.graph


def chain(*steps: tuple[object, list[np.ndarray]], before: tuple[int, int] = (-128, 127)) -> Graph:
    """A clip, and one operator after the other; the last result is doubled, so that none is an output."""
    builder = GraphBuilder("chain")
    value = builder.input("x", TensorType((1, 4, 4, 3), DType.INT8))
    value = builder.add(Clip(*before, DType.INT8), [value])
    for operator, arrays in steps:
        value = builder.add(operator, [value, *(builder.constant("c", one) for one in arrays)])  # type: ignore[arg-type]
    return builder.finish([builder.add(Offset(128, DType.UINT8), [value])])


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


ONE = [numbers(1 << 30), numbers(1)]
"""Multiplier and shift of the factor 1."""


@pytest.mark.parametrize(
    ("graph", "left"),
    [
        (chain((Clip(-128, 127, DType.INT8), [])), 1),
        (chain((Clip(-5, 90, DType.INT8), []), before=(-5, 90)), 1),
        (chain((Clip(-5, 89, DType.INT8), []), before=(-5, 90)), 0),
        (chain((Clip(-4, 90, DType.INT8), []), before=(-5, 90)), 0),
        (chain((Requantize(), ONE), (Clip(-128, 127, DType.INT8), [])), 2),
        (chain((Requantize(), ONE), (Clip(-128, 126, DType.INT8), [])), 0),
        (chain((Requantize(), ONE), (Clip(0, 126, DType.INT8), []), before=(0, 126)), 2),
        (chain((Requantize(output_zero_point=1), ONE), (Clip(-128, 127, DType.INT8), [])), 0),
        (chain((Requantize(input_zero_point=7, output_zero_point=7), ONE), (Clip(-128, 127, DType.INT8), [])), 2),
        (chain((Requantize(), [numbers(1 << 30, 1 << 30, 1 << 30), numbers(1)]), (Clip(-128, 127, DType.INT8), [])), 2),
        (chain((Requantize(), [numbers(1 << 30, 1 << 29, 1 << 30), numbers(1)]), (Clip(-128, 127, DType.INT8), [])), 0),
        (chain((Requantize(), [numbers((1 << 30) + 4), numbers(1)]), (Clip(-128, 127, DType.INT8), [])), 2),
        (chain((Offset(128, DType.UINT8), []), (Offset(-128, DType.INT8), [])), 2),
        (chain((MaxPool2d((2, 2), (1, 1)), []), (Clip(0, 9, DType.INT8), []), before=(0, 9)), 1),
        (
            chain(
                (MaxPool2d((2, 2), (1, 1), padding=((1, 0), (0, 0))), []), (Clip(0, 9, DType.INT8), []), before=(0, 9)
            ),
            1,
        ),
        (chain((Pad((0, 1, 1, 0), (0, 1, 1, 0), 9), []), (Clip(0, 9, DType.INT8), []), before=(0, 9)), 1),
        (chain((Pad((0, 1, 1, 0), (0, 1, 1, 0), 10), []), (Clip(0, 9, DType.INT8), []), before=(0, 9)), 0),
    ],
)
def test_what_changes_nothing(graph: Graph, left: int) -> None:
    """Counted by hand: to the last value a channel can have, and no further."""
    idle_ends = sum(isinstance(n.operator, Clip) and n.operator == Clip(-128, 127, DType.INT8) for n in graph.nodes[:1])
    found = without_redundant(graph)
    verify(found.graph)
    assert (found.twice, found.idle) == (0, left + idle_ends)
    assert_same(graph, found.graph)


def test_wide_sums_and_movement_are_no_places_to_join() -> None:
    """Two sums that go on differently stay two; so do pads."""
    builder = GraphBuilder("net")
    x = builder.input("x", TensorType((1, 4, 4, 3), DType.INT8))
    ends = []
    for high in (90, 91):
        padded = builder.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 0), [x])
        weights = builder.constant("w", np.ones((2, 3, 3, 3), np.int8))
        sums = builder.add(Conv2d(), [padded, weights])
        ends.append(builder.add(Clip(-128, high, DType.INT8), [sums]))
    wide = [builder.add(Requantize(), [end, *(builder.constant("c", one) for one in ONE)]) for end in ends]
    graph = builder.finish([builder.add(Clip(-128, 127, DType.INT8), [builder.add(Add(), wide)])])
    assert without_redundant(graph).graph is graph


@pytest.mark.skipif(not MODELS.is_dir(), reason="../shared is not there")
def test_real_networks_have_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS / "field" / "model_mobilenetv2_160_035.tflite"
    if not model.is_file():
        pytest.skip(f"{model.name} is not there")
    riscv = load_target("riscv")
    all_of_it, slim = (prepare(model, riscv, Options(keep_dead=keep)) for keep in (True, False))
    assert len(all_of_it.nodes) - len(slim.nodes) == 8
    given = ["compile", model, "--target", "riscv", "--set", "ram.size=4M", "--set", "flash.size=8M"]
    assert dovetail(*given, "-o", tmp_path / "net") == 0
    assert "0 computed twice, 8 that change nothing" in " ".join(capsys.readouterr().err.split())
