"""Mapping files out and in, the picture, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from conftest import shared_dir
from dovetail.cli.main import app, main
from dovetail.errors import PlanError
from dovetail.mesh.files import mapping_json, picture, read_mapping
from dovetail.mesh.mapping import Mapped, measure
from dovetail.mesh.topology import build_topology, random_faults
from dovetail.schedule.partition import partition
from dovetail.targets.spinnaker2 import MESH, TARGET
from test_mesh_mapping import check_limits, mapped, tiny

MESH_2 = MESH.resized(chips=2)


def read(path: Path, content: Any, mesh: Any = MESH_2) -> Mapped:
    """A mapping of ResNet8 from JSON."""
    file = path / "mapping.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    graph = tiny("ic_resnet8")
    return read_mapping(file, graph, partition(graph, TARGET), build_topology(mesh))


def written() -> dict[str, Any]:
    """A mapping of ResNet8 as JSON."""
    found: dict[str, Any] = json.loads(mapping_json(mapped(tiny("ic_resnet8"), MESH_2)))
    return found


def test_there_and_back(tmp_path: Path) -> None:
    first = mapped(tiny("ic_resnet8"), MESH_2)
    second = read(tmp_path, mapping_json(first).decode())
    assert np.array_equal(first.whole[0].element, second.whole[0].element)
    assert mapping_json(first) == mapping_json(second)
    check_limits(second)


def test_an_edited_mapping_is_used(tmp_path: Path) -> None:
    content = written()
    stages = content["sections"][0]["stages"]
    pieces = [piece for stage in stages for piece in stage["pieces"]]
    pieces[0]["element"], pieces[5]["element"] = pieces[5]["element"], pieces[0]["element"]
    for piece in pieces:
        del piece["box"], piece["bytes"], piece["key"]
    found = read(tmp_path, content)
    assert found.whole[0].element[0] == mapped(tiny("ic_resnet8"), MESH_2).whole[0].element[5]
    check_limits(found)
    assert measure(found, 4).interval > 0


def test_another_cut_is_used(tmp_path: Path) -> None:
    content = written()
    stages = content["sections"][0]["stages"]
    used = {tuple(piece["element"]) for stage in stages for piece in stage["pieces"]}
    free = [[*place, n] for place in MESH_2.places() for n in range(152) if (*place, n) not in used]
    pieces = stages[8]["pieces"] + [{"element": place} for place in free]
    stages[8]["cut"] = [2, 1, 2, 1]
    stages[8]["pieces"] = [{"element": piece["element"]} for piece in pieces[:4]]
    found = read(tmp_path, content)
    assert found.parts.sections[0].stages[8].pieces == 4
    check_limits(found)


def stage_of(content: dict[str, Any], number: int = 1) -> dict[str, Any]:
    """A stage of a mapping file."""
    found: dict[str, Any] = content["sections"][0]["stages"][number]
    return found


def _double(content: dict[str, Any]) -> None:
    stage_of(content)["pieces"][0]["element"] = stage_of(content)["pieces"][1]["element"]


BROKEN = [
    (_double, r"the element \[\d+, \d+, \d+\] is booked twice: for piece 0 of conv_1 and for piece 1 of conv_1"),
    (lambda c: stage_of(c)["pieces"].pop(), r"a piece is missing: 'pieces' has \d+ entries, \d+ are needed"),
    (lambda c: c["sections"][0]["stages"].pop(), "'stages' has 11 entries, 12 are needed"),
    (lambda c: stage_of(c)["pieces"][0].update(element=[9, 9, 9]), r"does not exist: \[9, 9, 9\]"),
    (lambda c: stage_of(c)["pieces"][0].update(element=[0, 0, 152]), "does not exist"),
    (lambda c: stage_of(c)["pieces"][0].update(element="x" * 10000), r"does not exist: x{40}\n"),
    (lambda c: stage_of(c)["pieces"][0].update(box=[0] * 8), "another box than its cut gives"),
    (lambda c: stage_of(c).update(cut=[1, 1, 1]), "a cut is four numbers"),
    (lambda c: stage_of(c).update(cut=[10**9, 1, 1, 1]), r"at most \[32, 2, 4, 4\]"),
    (lambda c: stage_of(c).update(cut=[True, 1, 1, 1]), "a cut is four numbers"),
    (lambda c: stage_of(c).update(slots=[0]), "slots are 1 numbers"),
    (lambda c: stage_of(c).update(slots=[900]), r"a piece takes \d+ bytes, an element has 94208"),
    (lambda c: stage_of(c).update(layer="other"), "the layer here is conv_1, not 'other'"),
    (lambda c: c.update(schema=2), "no mapping of schema 1"),
    (lambda c: c.update(sections=[]), "has 0 sections"),
    (lambda c: c.update(objective="beauty"), "there is no objective 'beauty'"),
]


@pytest.mark.parametrize(("breaks", "sentence"), BROKEN, ids=range(len(BROKEN)))
def test_broken_mappings_are_refused(tmp_path: Path, breaks: Any, sentence: str) -> None:
    content = written()
    breaks(content)
    with pytest.raises(PlanError, match=sentence) as caught:
        read(tmp_path, content)
    assert "mapping.json" in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100000, "null", '{"schema": 1, "sections": [7]}'])
def test_damaged_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PlanError):
        read(tmp_path, text)


def test_faulty_elements_are_refused(tmp_path: Path) -> None:
    mesh = random_faults(MESH_2, 0.05, 1)
    with pytest.raises(PlanError, match="is faulty or reserved"):
        read(tmp_path, written(), mesh)


def test_pictures_are_whole_and_load_nothing() -> None:
    for chips in (1, 6):
        found = mapped(tiny("ic_resnet8"), MESH.resized(chips=chips))
        page = picture(found, measure(found, 4)).decode()
        assert "http" not in page and "<script" not in page
        drawings = [part.split("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]
        trees = [ElementTree.fromstring("<svg" + drawing) for drawing in drawings]
        elements = sum(len(tree.findall("rect")) for tree in trees)
        assert elements > 2 * found.parts.sections[0].pieces
    assert any(tree.findall("line") for tree in trees)  # links between chips


def test_the_command(tmp_path: Path) -> None:
    model = str(shared_dir() / "models" / "mlperf_tiny" / "ic_resnet8_int8.tflite")
    base = ["mesh", model, "--target", "spinnaker2", "--chips", "1", "--inputs", "4"]
    result = CliRunner().invoke(app, [*base, "-o", str(tmp_path / "a")])
    assert result.exit_code == 0, result.output
    assert "equal the integer graph's in every byte" in result.stdout
    assert "of 152 elements; one input takes" in result.stdout and "times its bound" in result.stdout
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"Makefile", "chips", "link.ld", "mapping.json", "mesh.html", "programs", "runtime"}
    again = CliRunner().invoke(app, [*base, "--mapping", str(tmp_path / "a" / "mapping.json")])
    assert again.exit_code == 0 and again.stdout.splitlines()[-1] == result.stdout.splitlines()[-2]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--target", "riscv"], "riscv: this target is a machine alone, not a mesh"),
        (["--target", "spinnaker2", "--chips", "49"], "49 chips: a board has 48"),
        (["--target", "spinnaker2", "--boards", "25"], "25 boards: there are places for 24"),
        (["--target", "spinnaker2", "--faults", "1.5"], "--faults: a share is from 0 to below 1, not 1.5"),
        (["--target", "spinnaker2", "--chips", "1", "--mapping", "absent.json"], "cannot be read"),
    ],
)
def test_wrong_wishes(more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(shared_dir() / "models" / "mlperf_tiny" / "ic_resnet8_int8.tflite")
    with pytest.raises(SystemExit):
        main(["mesh", model, *more])
    assert sentence in capsys.readouterr().err
