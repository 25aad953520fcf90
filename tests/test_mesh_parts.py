"""Elements as ONNX models: in ONNX Runtime they are the network, and read they are the partition they came from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.utils
import pytest

from command_line import dovetail
from conftest import shared_dir
from dovetail.compile import sample_inputs
from dovetail.errors import DovetailError, ModelError, PlanError
from dovetail.guests.mesh.layers import image_of, layers_of
from dovetail.guests.mesh.own import read_mapping
from dovetail.guests.mesh.partition import Objective
from dovetail.guests.mesh.parts import part_graphs, read_parts
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.guests.mesh.reporting import mapping_yaml
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.onnx_file import graph_bytes, save_graph
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.schedule.partition import partition
from dovetail.targets.spinnaker2 import TARGET
from networks import image_net
from test_mesh_mapping import check_exact, tiny
from test_mesh_own import HAND, check_own, own, own_of, regions, topology


def network() -> Graph:
    """Convolutions of which one is added to what it is computed from, sums that are cut, a view, dense layers."""
    net = image_net("small", 4, 16)
    value = net.convolution(net.x, 24, relu=True)
    value = net.addition(value, net.convolution(value, 24, 1), relu=True)
    value = net.pool(net.convolution(value, 16, stride=2, relu=True), 2, 1)
    return net.finish(net.dense(net.dense(value, 40), 7))


ASKED = """schema: 2
layers:
  conv_0: {cut: [2, 1, 1, 1]}
  conv_1: {pieces: [{box: [[0, 1], [0, 4], [0, 24]]}, {box: [[1, 4], [0, 3], [0, 24]]}]}
  conv_2: {cut: [1, 1, 2, 2]}
  max_pool_3: {on: [0, 0, 100]}
  dense_5: {on: [0, 0, 100]}
  dense_6: {on: [0, 0, 100]}
"""


def read(folder: Path, graph: Graph, file: Path | None = None) -> MeshMapping:
    """A network as the parts in a folder say."""
    found = partition(graph, TARGET)
    return read_mapping(file, graph, found, topology(), Objective.THROUGHPUT, read_parts(folder, {}))


def written(mapped: MeshMapping, folder: Path) -> list[str]:
    """The parts of a mapping in a folder, in the order of their first pieces."""
    folder.mkdir()
    for name, part in part_graphs(mapped):
        save_graph(part, folder / f"{name}.onnx")
    return [name for name, _ in part_graphs(mapped)]


def test_onnx_runtime_computes_the_network_part_by_part(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    graph = network()
    names = written(own_of(graph, ASKED), tmp_path / "parts")
    given = sample_inputs(graph)
    values: dict[str, Any] = {name: array.reshape(image_of(array.shape)) for name, array in given.items()}
    for name in names:
        session = runtime_session(tmp_path / "parts" / f"{name}.onnx")
        brought = {}
        for one in session.get_inputs():
            base, box = _split(one.name)
            array = values[one.name if one.name in values else base]
            brought[one.name] = (array if one.name in values else array[box]).reshape(one.shape)
        results = session.run(None, brought)
        for one, result in zip(session.get_outputs(), results, strict=True):
            base, box = _split(one.name)
            end = re.search(r"\{\d+:(\d+)\}$", one.name)
            if end is None or int(end[1]) == 24:
                place = values.setdefault(base, np.zeros(image_of(graph.types[base].shape), result.dtype))
                place[box] = result.reshape(place[box].shape)
            values[one.name] = result if one.name != base else values[base]
        views = {node.output: node.inputs[0] for node in graph.nodes if type(node.operator).__name__ == "Reshape"}
        values |= {view: values[source] for view, source in views.items() if source in values}
    expected = evaluate(graph, given)
    for output in graph.outputs:
        assert np.array_equal(values[output].reshape(expected[output].shape), expected[output])


def _split(name: str) -> tuple[str, tuple[slice, ...]]:
    """A value's name and the part of it."""
    match = re.fullmatch(r"(.*?)\[([\d:,]+)\](\{\d+:\d+\})?", name)
    if match is None:
        return name, (slice(None),) * 3
    return match[1], tuple(slice(*map(int, span.split(":"))) for span in match[2].split(","))


@pytest.mark.parametrize("which", ["hand", "small"])
def test_parts_give_the_partition_they_came_from(which: str, tmp_path: Path) -> None:
    graph = tiny("ic_resnet8") if which == "hand" else network()
    first = own(HAND) if which == "hand" else own_of(graph, ASKED)
    written(first, tmp_path / "parts")
    second = read(tmp_path / "parts", graph)
    assert second.whole[0].element.tolist() == first.whole[0].element.tolist()
    for a, b in zip(first.sections[0].stages, second.sections[0].stages, strict=True):
        assert np.array_equal(a.boxes, b.boxes) and a.free == b.free
    check_exact(graph, second)


def test_a_network_cut_by_another_tool(tmp_path: Path) -> None:
    """Subgraphs of a saved stage as `onnx.utils` cuts them; what they leave out is chosen, positions are in a file."""
    graph, folder = tiny("ic_resnet8"), tmp_path / "parts"
    folder.mkdir()
    save_graph(graph, tmp_path / "net.onnx")
    results = [layer.graph.outputs[0] for layer in layers_of(graph, regions())]
    onnx.utils.extract_model(str(tmp_path / "net.onnx"), str(folder / "tail.onnx"), [results[8]], list(graph.outputs))
    operands = sorted({results[5], results[7]})
    onnx.utils.extract_model(str(tmp_path / "net.onnx"), str(folder / "0_0_9.onnx"), operands, [results[8]])
    (tmp_path / "own.yaml").write_text("schema: 2\nelements: {tail: [0, 0, 77]}\nlayers: {conv_0: {cut: [8, 1, 1, 1]}}")
    found = read(folder, graph, tmp_path / "own.yaml")
    tenants = found.whole[0].tenants
    assert len(tenants[77]) == 3 and len(tenants[9]) == 1
    assert found.sections[0].stages[0].pieces == 8
    check_own(found)


def test_a_part_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    graph = network()
    names = written(own_of(graph, ASKED), tmp_path / "parts")
    part = dict(part_graphs(own_of(graph, ASKED)))[names[0]]
    weights = next(name for name, array in part.constants.items() if array.ndim == 4)
    wrong = part.constants[weights].copy()
    wrong[0, 0, 0, 0] ^= 1
    save_graph(replace(part, constants={**part.constants, weights: wrong}), tmp_path / "parts" / f"{names[0]}.onnx")
    with pytest.raises(ModelError, match=rf"{names[0]}.onnx: '.*' is not what conv_0 of the network computes there"):
        read(tmp_path / "parts", graph)


def test_parts_that_cannot_be(tmp_path: Path) -> None:
    graph = network()
    written(own_of(graph, ASKED), tmp_path / "parts")
    layers = layers_of(graph, partition(graph, TARGET))
    file = tmp_path / "own.yaml"
    file.write_text("schema: 2\nlayers:\n  conv_0: {cut: [4, 1, 1, 1]}\n")
    with pytest.raises(
        PlanError, match=r"own.yaml:3: .*conv_0 is cut here and in a part \(clashes with \d_\d_\d+.onnx\)"
    ):
        read(tmp_path / "parts", graph, file)
    with pytest.raises(PlanError, match="0 ONNX files are here"):
        read(tmp_path, graph)
    save_graph(graph, tmp_path / "net.onnx")
    inside = layers[1].graph.nodes[0].output  # of a layer of several operators
    for name, ends, sentence in (
        ("half", (list(graph.inputs), [inside]), "belongs to no layer|no value in it is the result"),
        ("9_9_9", (list(graph.inputs), [layers[0].graph.outputs[0]]), r"the element \[9, 9, 9\] does not exist"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        onnx.utils.extract_model(str(tmp_path / "net.onnx"), str(folder / f"{name}.onnx"), *ends)
        with pytest.raises(DovetailError, match=sentence):
            read(folder, graph)
    content = bytearray(graph_bytes(graph))
    (tmp_path / "half" / "half.onnx").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError):
        read(tmp_path / "half", graph)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shared_dir() / "models" / "mlperf_tiny" / "ic_resnet8_int8.tflite"
    (tmp_path / "own.yaml").write_text(HAND)
    base = ("mesh", model, "--target", "spinnaker2", "--chips", 1, "--inputs", 3)
    wishes = ("--mapping", tmp_path / "own.yaml", "--save-parts", tmp_path / "parts")
    assert dovetail(*base, *wishes, "-o", tmp_path / "a") == 0
    count, text = len(list((tmp_path / "parts").glob("*.onnx"))), capsys.readouterr().out
    assert f"{count} models" in text and f"{count} of 152 elements" in text and count > 40
    assert dovetail(*base, "--parts", tmp_path / "parts") == 0
    assert (tmp_path / "a" / "mapping.yaml").read_bytes() == mapping_yaml(own(HAND))
