"""A user's own mapping: kept piece by piece, completed where it is silent, refused with both lines where it clashes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from dovetail.errors import DovetailError, PlanError
from dovetail.guests.mesh.layers import MeshLayer, layers_of, network_of
from dovetail.guests.mesh.mapping import measure
from dovetail.guests.mesh.mapping_file import MappingWishes, PartWishes, read_wishes
from dovetail.guests.mesh.own import complete, read_mapping
from dovetail.guests.mesh.partition import Objective
from dovetail.guests.mesh.pieces import check_covered
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.guests.mesh.reporting import mapping_json, mapping_yaml
from dovetail.guests.mesh.topology import Topology, build_topology
from dovetail.ir.graph import Graph
from dovetail.schedule.partition import partition
from dovetail.schedule.region import Region
from dovetail.target.mesh import Grid, Mesh
from dovetail.targets.spinnaker2 import MESH, TARGET
from networks import image_net
from test_mesh_mapping import check_exact, cyclic, dependencies, mapped, tiny

CHIP = MESH.resized(chips=1)
HAND = """schema: 2
network: ic_resnet8_int8
elements:
  left: [0, 0, 3]
  right: [0, 0, 90]
  tail: [0, 0, 151]
groups:
  front: {chip: [0, 0], elements: [0, 24]}
  middle: 20
  back: [right, tail, [0, 0, 91], [0, 0, 92], [0, 0, 93]]
layers:
  conv_0: {group: front, cut: [4, 1, 1, 1], on: [left, [0, 0, 4], [0, 0, 5], [0, 0, 6]]}
  conv_1: {group: front}
  conv_2: {group: front}
  conv_3: {group: middle}
  conv_4:
    group: middle
    pieces:
      - {box: [[0, 5], [0, 16], [0, 32]]}
      - {box: [[5, 16], [0, 9], [0, 7]], on: [0, 0, 40]}
  conv_5: {group: middle}
  conv_6: {group: back}
  conv_7: {group: back, slots: [1]}
  conv_8: {group: back}
  average_pool_9: {on: tail}
  dense_11: {on: tail}
  softmax_12: {on: tail}
"""
"""Three groups of elements; positions; a layer in boxes that are no grid, part left out; three layers on `tail`."""


@lru_cache
def regions(name: str = "resnet8") -> list[Region]:
    """Of ResNet8, or of `small`."""
    return list(partition(small() if name == "small" else tiny("ic_resnet8"), TARGET))


@lru_cache
def topology(chips: int = 1) -> Topology:
    """Of some chips."""
    return build_topology(MESH.resized(chips=chips))


def own(text: str, where: Topology | None = None, objective: Objective = Objective.THROUGHPUT) -> MeshMapping:
    """ResNet8 as a file asks."""
    return own_of(tiny("ic_resnet8"), text, where, objective)


def own_of(
    graph: Graph, text: str, where: Topology | None = None, objective: Objective = Objective.THROUGHPUT
) -> MeshMapping:
    """A network as a file asks."""
    known = {id(tiny("ic_resnet8")): "resnet8", id(small()): "small"}.get(id(graph))
    mesh, found = where or topology(), regions(known) if known else partition(graph, TARGET)
    network = network_of(graph, found)
    return complete(wishes_in(text.encode(), graph.name, network.layers, mesh), network, mesh, objective)


def wishes_in(content: bytes, network: str, layers: Sequence[MeshLayer], mesh: Topology) -> MappingWishes:
    """The wishes of a file."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "own.yaml"
        file.write_bytes(content)
        return read_wishes(file, network, layers, mesh, PartWishes())


def elements_of(found: MeshMapping, name: str) -> set[int]:
    """Elements on which pieces of a layer are."""
    stage = next(stage for stage in found.sections[0].stages if stage.layer.name == name)
    return set(found.whole[0].element[stage.first : stage.first + stage.pieces].tolist())


def check_own(found: MeshMapping) -> None:
    """Exact, everything is sent, nothing waits in a ring, and the model comes to an end."""
    placed, _ = found.whole
    check_exact(tiny("ic_resnet8"), found)
    assert check_covered(found.sections[0], placed.traffic) > 0
    assert not cyclic(dependencies(placed))
    assert set(placed.element.tolist()) <= found.topology.usable
    assert measure(found, 3).interval > 0


def test_a_partition_by_hand_is_honoured() -> None:
    found = own(HAND)
    check_own(found)
    stages = {stage.layer.name: stage for stage in found.sections[0].stages}
    front, back = set(range(24)), {90, 91, 92, 93, 151}
    assert all(elements_of(found, name) <= front for name in ("conv_0", "conv_1", "conv_2"))
    middle = set().union(*(elements_of(found, name) for name in ("conv_3", "conv_4", "conv_5")))
    assert len(middle) <= 20 and not middle & (front | back)
    assert all(elements_of(found, name) <= back for name in ("conv_6", "conv_7", "conv_8"))
    assert all(elements_of(found, name) == {151} for name in ("average_pool_9", "dense_11", "softmax_12"))
    placed = found.whole[0]
    assert placed.element[: stages["conv_0"].pieces].tolist() == [3, 4, 5, 6]
    assert stages["conv_4"].free and [0, 5, 0, 16, 0, 32, 0, 32] in stages["conv_4"].boxes.tolist()
    number = stages["conv_4"].boxes.tolist().index([5, 16, 0, 9, 0, 7, 0, 32])
    assert placed.element[stages["conv_4"].first + number] == 40
    assert stages["conv_7"].slots == (1,)


@pytest.mark.parametrize(
    "text", [HAND, "", "layers: {conv_3: {cut: [3, 1, 2, 1]}}", "layers: {conv_8: {cut: [1, 1, 1, 2]}}"]
)
def test_there_and_back_byte_for_byte(text: str, tmp_path: Path) -> None:
    first = own(text if text == HAND else f"schema: 2\n{text}\n", topology(2))
    file = tmp_path / "mapping.yaml"
    file.write_bytes(mapping_yaml(first))
    second = read_mapping(file, tiny("ic_resnet8"), regions(), topology(2), Objective.LATENCY)
    assert mapping_yaml(second) == mapping_yaml(first) and mapping_json(second) == mapping_json(first)
    assert second.objective is Objective.THROUGHPUT


def test_our_own_mapping_comes_back(tmp_path: Path) -> None:
    for chips, objective in ((1, Objective.LATENCY), (6, Objective.THROUGHPUT)):
        first = mapped(tiny("ic_resnet8"), MESH.resized(chips=chips), objective)
        file = tmp_path / "mapping.yaml"
        file.write_bytes(mapping_yaml(first))
        second = read_mapping(file, tiny("ic_resnet8"), regions(), first.topology, Objective.LATENCY)
        assert mapping_json(second) == mapping_json(first) and mapping_yaml(second) == mapping_yaml(first)


def test_an_empty_file_is_our_own_mapping(tmp_path: Path) -> None:
    file = tmp_path / "mapping.yaml"
    file.write_text("schema: 2\n")
    found = read_mapping(file, tiny("ic_resnet8"), regions(), topology(), Objective.THROUGHPUT)
    assert mapping_json(found) == mapping_json(mapped(tiny("ic_resnet8"), CHIP))


def test_a_small_wish_on_many_chips_costs_nothing() -> None:
    """What is left out is as without a file, slabs of chips included; a wish is kept beside it."""
    usual = mapped(tiny("ic_resnet8"), MESH.resized(chips=6))
    slots = list(usual.sections[0].stages[0].slots)
    assert mapping_json(own(f"schema: 2\nlayers: {{conv_0: {{slots: {slots}}}}}", topology(6))) == mapping_json(usual)
    here = list(usual.topology.position(int(usual.whole[0].element[40])))
    found = own(f"schema: 2\nlayers: {{softmax_12: {{on: {here}}}}}", topology(6))
    moved = found.whole[0].element != usual.whole[0].element
    assert elements_of(found, "softmax_12") == {int(usual.whole[0].element[40])} and moved.sum() == 2
    check_own(found)


def layered(lines: str, head: str = "") -> str:
    """A file with some layers; the first of `lines` is line 3 where there is no head."""
    return f"schema: 2\n{head}layers:\n{lines}"


CLASHES = [
    ("elements:\n  a: [0, 0, 1]\n  b: [0, 0, 1]\n", "", r"own.yaml:4: .*two names.*\(clashes with own.yaml:3\)"),
    ("groups:\n  f: [[0, 0, 1]]\n  b: [[0, 0, 1]]\n", "", r"own.yaml:4: .*'f' and 'b' \(clashes with own.yaml:3\)"),
    ("groups:\n  f: [[0, 0, 1],\n    [0, 0, 1]]\n", "", r"own.yaml:4: .*twice.*\(clashes with own.yaml:3\)"),
    ("groups:\n  f: [[0, 0, 2]]\n", "  conv_0:\n    group: f\n    on: [0, 0, 7]\n", r":7: .*not in the group.*:6\)"),
    ("groups:\n  f: 3\n", "  conv_0: {group: f, cut: [4, 1, 1, 1]}\n", r"yaml:5: .*4 pieces .* 3 elements .*yaml:3\)"),
    (
        "",
        "  conv_0:\n    pieces:\n    - {box: [[0, 9], [0, 32], [0, 16]]}\n    - {box: [[8, 32], [0, 4], [0, 16]]}\n",
        r"own.yaml:6: .*the box \[\[8.*overlaps \[\[0, 9.*\(clashes with own.yaml:5\)",
    ),
    (
        "",
        "  conv_0:\n    cut: [1, 1, 1, 1]\n    pieces: []\n",
        r"yaml:5: .*'cut' and 'pieces'.*\(clashes with own.yaml:4\)",
    ),
    (
        "",
        "  conv_0:\n    cut: [2, 1, 1, 1]\n    on: [0, 0, 1]\n",
        r"yaml:5: .*1 elements for the 2 pieces.*own.yaml:4\)",
    ),
    (
        "",
        "  conv_0: {}\n  conv_1: {}\n  conv_0: {}\n",
        r"own.yaml:5: .*'conv_0' stands here twice \(clashes with own.yaml:3\)",
    ),
    (
        "",
        "  conv_6: {on: [0, 0, 1]}\n  conv_7: {on: [0, 0, 1]}\n",
        r"yaml:4: .*the 2 pieces .* of conv_6 and conv_7 .*yaml:3\)",
    ),
]


@pytest.mark.parametrize(("head", "lines", "sentence"), CLASHES, ids=range(len(CLASHES)))
def test_contradictions_are_refused_with_both_lines(head: str, lines: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        own(layered(lines, head))


WRONG = [
    ("schema: 1", "own.yaml:1: schema: is 1, expected 2"),
    ("- 1", "own.yaml: this must be a mapping"),
    ("schema: 2\nnetwork: other", "own.yaml:2: .*the network here is 'ic_resnet8_int8'"),
    ("schema: 2\nobjective: beauty", "own.yaml:2: objective: must be 'latency' or 'throughput', not 'beauty'"),
    ("schema: 2\nlayer: {}", "own.yaml:2: layer: there is no such entry, perhaps 'layers'"),
    ("schema: 2\nlayers:\n  conv_99: {}", "own.yaml:3: .*there is no layer 'conv_99'"),
    ("schema: 2\nlayers:\n  conv_1: {cut: [1, 1, 1]}", "own.yaml:3: .*cut: must be a cut: 4 whole numbers"),
    ("schema: 2\nlayers:\n  conv_1: {cut: [33, 1, 1, 1]}", r"a cut .* \(1 to 32, 1 to 32, 1 to 16, 1 to 4\)"),
    ("schema: 2\nlayers:\n  softmax_12: {cut: [1, 1, 2, 1]}", r"\(1, 1, 1, 1\)"),
    ("schema: 2\nlayers:\n  conv_1: {slots: [900]}", r"own.yaml:3: .*conv_1 .* takes \d+ bytes, an element has"),
    ("schema: 2\nlayers:\n  conv_1: {on: nowhere}", "own.yaml:3: .*there is no element 'nowhere'"),
    ("schema: 2\nlayers:\n  conv_1: {on: [0, 0, 152]}", r"own.yaml:3: .*the element \[0, 0, 152\] does not exist"),
    ("schema: 2\nlayers:\n  conv_1: {group: none}", "own.yaml:3: .*there is no group 'none'"),
    (
        "schema: 2\nlayers:\n  conv_1: {pieces: [{box: [[0, 2], [0, 2]]}]}",
        "own.yaml:3: .*box: must be a box: rows, columns",
    ),
    ("schema: 2\nlayers:\n  conv_1: {pieces: [{on: [0, 0, 0]}]}", "own.yaml:3: .*'box' is missing"),
    ("schema: 2\ngroups: {f: 153}", "own.yaml:2: .*a group of 153 elements"),
    ("schema: 2\ngroups: {f: 100, g: 100}\nlayers: {}", "own.yaml:2: .*the file takes 200 elements, the mesh has 152"),
    ("schema: 2\ngroups: {f: 1}\nlayers: {conv_6: {group: f}, conv_7: {group: f}}", "too few|take .* bytes"),
    ("schema: 2\nroutes: [[[0, 0], [5, 5]]]", r"own.yaml:2: .*there is no chip \[5, 5\]"),
    ("schema: 2\nlayers: &a\n  conv_1: *a", "own.yaml:2: .*an alias or anchor"),
    ("schema: !!python/object:os.system {}", "own.yaml:1: the tag"),
    ("[" * 5000, "nested more than|not YAML"),
    ("schema: 2\n\tx: 1", "own.yaml:2: this is not YAML"),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG, ids=range(len(WRONG)))
def test_wrong_files_are_refused_with_their_line(text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence) as caught:
        own(text)
    assert len(str(caught.value)) < 800


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_mapping(tmp_path / "absent.yaml", tiny("ic_resnet8"), regions(), topology(), Objective.LATENCY)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not text in UTF-8"):
        read_mapping(tmp_path / "binary.yaml", tiny("ic_resnet8"), regions(), topology(), Objective.LATENCY)


def test_faulty_elements_are_refused() -> None:
    from dovetail.guests.mesh.topology import random_faults

    mesh: Mesh = random_faults(CHIP, 0.05, 1)
    dead = min(number for _, number in mesh.faults.elements)
    with pytest.raises(PlanError, match=r"own.yaml:3: .* is faulty or reserved"):
        own(layered(f"  conv_0: {{on: [0, 0, {dead}]}}\n"), build_topology(mesh))


def test_routes_are_taken() -> None:
    """All of conv_0 on one chip, its reader on another: the messages go where the file says."""
    head = "routes:\n  - [[1, 1], [1, 0], [0, 0]]\n"
    lines = "  conv_0: {cut: [2, 1, 1, 1], on: [[1, 1, 0], [1, 1, 1]]}\n"
    lines += "  conv_1: {cut: [1, 1, 2, 1], on: [[0, 0, 0], [0, 0, 1]]}\n"
    usual, found = own(layered(lines), topology(4)), own(layered(lines, head), topology(4))
    chips = found.topology.chips
    assert usual.topology.between.parent[chips[1, 1], chips[0, 0]] != chips[1, 0]
    assert found.topology.between.parent[chips[1, 1], chips[0, 0]] == chips[1, 0]
    assert found.whole[0].links[chips[1, 1]].sum() > 0
    check_own(found)


@pytest.mark.parametrize(
    ("routes", "sentence"),
    [
        ("  - [[1, 1], [1, 0], [0, 0]]\n  - [[1, 1], [0, 0]]\n", r"yaml:4: .*reached by two ways.*yaml:3\)"),
        ("  - [[0, 0], [1, 0], [0, 1]]\n", r"yaml:3: .*there is no working link from \[1, 0\] to \[0, 1\]"),
        ("  - [[0, 0]]\n", "yaml:3: .*a route leads over two places"),
        (
            "  - {chip: [0, 0], routers: [[0, 0], [1, 0], [1, 1]]}\n"
            "  - {chip: [0, 0], routers: [[1, 0], [1, 1], [0, 1]]}\n"
            "  - {chip: [0, 0], routers: [[1, 1], [0, 1], [0, 0]]}\n"
            "  - {chip: [0, 0], routers: [[0, 1], [0, 0], [1, 0]]}\n",
            r"wait for one another in a ring.*\(clashes with own.yaml:\d",
        ),
    ],
)
def test_wrong_routes_are_refused(routes: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        own(f"schema: 2\nroutes:\n{routes}", topology(4))


NAMES = st.sampled_from(["conv_0", "conv_3", "dense_11", "softmax_12", "a", "f", "left", "x"])
NUMBERS = st.integers(-2, 40) | st.sampled_from([152, 10**11])
VALUES = st.recursive(
    st.none() | NAMES | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
BOXES = st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=2, max_size=4)
REFS = NAMES | st.lists(NUMBERS, min_size=3, max_size=3) | st.lists(st.just(0), min_size=3, max_size=3)
PIECES = st.lists(st.fixed_dictionaries({}, optional={"box": BOXES | VALUES, "on": REFS | VALUES}), max_size=3)
LAYERS = st.fixed_dictionaries(
    {},
    optional={
        "group": NAMES,
        "cut": st.lists(NUMBERS, min_size=3, max_size=4) | VALUES,
        "slots": st.lists(NUMBERS, max_size=2) | VALUES,
        "on": REFS | st.lists(REFS, max_size=3) | VALUES,
        "pieces": PIECES | VALUES,
    },
)
FILES = st.fixed_dictionaries(
    {"schema": st.just(2)},
    optional={
        "elements": st.dictionaries(NAMES, REFS | st.none(), max_size=3) | VALUES,
        "groups": st.dictionaries(NAMES, NUMBERS | st.lists(REFS, max_size=3) | VALUES, max_size=2) | VALUES,
        "layers": st.dictionaries(NAMES, LAYERS | VALUES, max_size=3) | VALUES,
        "routes": st.lists(BOXES | VALUES, max_size=2) | VALUES,
    },
)


@settings(max_examples=60, deadline=None)
@given(FILES)
@example({"schema": 2, "layers": {"conv_0": {"pieces": [{"box": [[0, 2], [0, 2], [0, 2]]}]}}})
def test_any_file_is_kept_or_refused_in_words(content: dict[str, Any]) -> None:
    import yaml  # type: ignore[import-untyped]

    try:
        found = own(yaml.safe_dump(content), topology(2))
    except DovetailError as error:
        assert "own.yaml" in str(error) or "mesh" in error.where, error
        assert len(str(error)) < 900 and error.hint
        return
    placed, _ = found.whole
    total = sum(np.prod(stage.boxes[:, 1::2] - stage.boxes[:, ::2], axis=1).sum() for stage in placed.section.stages)
    assert total == sum(int(np.prod([*stage.layer.image, stage.layer.summed])) for stage in placed.section.stages)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet="{}[]:,- \n&*!|>'\"#%@0a", max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        wishes_in(content, "net", (), topology())
    except PlanError as error:
        assert "own.yaml" in str(error)


@lru_cache
def small() -> Graph:
    """A residual network with a stride, a pool and dense layers."""
    net = image_net("small", 6, 8)
    value = net.convolution(net.x, 12, relu=True)
    value = net.addition(value, net.convolution(value, 12), relu=True)
    value = net.pool(net.convolution(value, 16, stride=2, relu=True), 2, 2)
    return net.finish(net.dense(net.dense(value, 40), 7))


@lru_cache
def small_layers() -> tuple[MeshLayer, ...]:
    """Of `small`."""
    return layers_of(small(), regions("small"))


FEW = replace(MESH.resized(chips=2), grid=Grid(2, 2, 4, gate=(1, 0), dram=(0, 1)))
"""Two chips of 16 elements."""


def split(draw: Any, box: list[list[int]], free: Sequence[bool], depth: int) -> list[list[list[int]]]:
    """A box cut in two somewhere, and each part again."""
    axes = [axis for axis in range(3) if free[axis] and box[axis][1] - box[axis][0] > 1]
    if not axes or not depth or not draw(st.booleans()):
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(box[axis][0] + 1, box[axis][1] - 1))
    halves = [[*box[:axis], span, *box[axis + 1 :]] for span in ([box[axis][0], at], [at, box[axis][1]])]
    return [part for half in halves for part in split(draw, half, free, depth - 1)]


@st.composite
def partitions(draw: Any) -> dict[str, Any]:
    """A mapping of `small`: boxes that are no grid, some left out; pieces on few elements, some left to us."""
    places = [[*place, number] for place in FEW.places() for number in range(16)]
    layers: dict[str, Any] = {}
    for layer in small_layers():
        kind = draw(st.sampled_from(["ours", "cut", "boxes", "boxes"]))
        asked: dict[str, Any] = {}
        if kind == "cut":
            most = [size if free else 1 for size, free in zip(layer.image, layer.cuttable, strict=True)]
            asked["cut"] = [draw(st.integers(1, min(size, 3))) for size in (*most, -(-layer.summed // layer.unit))]
        elif kind == "boxes":
            boxes = split(draw, [[0, size] for size in layer.image], layer.cuttable, 3)
            kept = boxes[: draw(st.integers(1, len(boxes)))]
            homes = [draw(st.none() | st.sampled_from(places[: draw(st.sampled_from([2, 32]))])) for _ in kept]
            asked["pieces"] = [{"box": b, **({"on": on} if on else {})} for b, on in zip(kept, homes, strict=True)]
        layers[layer.name] = {**asked, **({"group": "g"} if kind != "boxes" and draw(st.booleans()) else {})}
    return {"schema": 2, "groups": {"g": draw(st.integers(2, 6))}, "layers": layers}


@settings(max_examples=25, deadline=None)
@given(partitions(), st.sampled_from(Objective))
def test_any_partition_is_exact_and_comes_to_an_end(content: dict[str, Any], objective: Objective) -> None:
    try:
        found = own_of(small(), json.dumps(content), build_topology(FEW), objective)
    except PlanError as error:
        assert "own.yaml" in str(error)
        event("refused: " + re.sub(r"\d+", "N", error.what)[:50])
        return
    event(f"at most {max(map(len, found.whole[0].tenants.values()))} pieces on an element")
    check_exact(small(), found)
    placed, _ = found.whole
    assert check_covered(found.sections[0], placed.traffic) > 0
    assert measure(found, 5).interval > 0
    for stage in found.sections[0].stages:
        for piece in content["layers"][stage.layer.name].get("pieces", ()):
            ends = [end for span in piece["box"] for end in span]
            number = stage.boxes[:, :6].tolist().index(ends)
            if "on" in piece:
                element = int(placed.element[stage.first + number])
                assert list(found.topology.position(element)) == piece["on"]
    again = own_of(small(), mapping_yaml(found).decode(), found.topology)
    assert mapping_json(again) == mapping_json(found)
