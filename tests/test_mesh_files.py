"""Mapping files for other tools, the picture, and the command; mappings of one's own are in test_mesh_own.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from command_line import dovetail, refused
from conftest import shared_dir
from dovetail.guests.mesh.mapping import measure
from dovetail.guests.mesh.picture import picture, time_spent
from dovetail.guests.mesh.reporting import mapping_json, sentence
from dovetail.targets.spinnaker2 import MESH
from test_mesh_mapping import mapped, tiny


def test_mapping_json_tells_every_piece() -> None:
    found = mapped(tiny("ic_resnet8"), MESH.resized(chips=2))
    content: dict[str, Any] = json.loads(mapping_json(found))
    pieces = [piece for stage in content["sections"][0]["stages"] for piece in stage["pieces"]]
    placed, tables = found.whole
    assert [piece["key"] for piece in pieces] == tables.key.tolist()
    places = [list(found.topology.position(element)) for element in placed.element.tolist()]
    assert [piece["element"] for piece in pieces] == places
    assert sum(len(chip["entries"]) for chip in content["sections"][0]["routes"]) == len(tables.chip)


def test_pictures_are_whole_and_load_nothing() -> None:
    for chips in (1, 6):
        found = mapped(tiny("ic_resnet8"), MESH.resized(chips=chips))
        performance = measure(found, 4)
        page = picture(found, performance, sentence(found, performance)).decode()
        assert "http" not in page and "<script" not in page
        drawings = [part.split("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]
        trees = [ElementTree.fromstring("<svg" + drawing) for drawing in drawings]
        elements = sum(len(tree.findall("rect")) for tree in trees)
        assert elements > 2 * found.sections[0].pieces
    assert any(tree.findall("line") for tree in trees)  # links between chips


def test_where_the_time_goes() -> None:
    """Shares of each layer are whole; the slowest layer computes nearly all the time."""
    found = mapped(tiny("ic_resnet8"), MESH.resized(chips=1))
    placed, timing = found.whole[0], measure(found, 12).timing
    assert timing is not None
    shares = time_spent(placed, timing)
    assert (shares >= 0).all() and np.allclose(shares.sum(axis=1), 1)
    slowest = int(np.argmax([stage.costs.clocks.max() for stage in placed.section.stages]))
    assert shares[slowest, :2].sum() > 0.8 > 0.1 > shares[-1, :2].sum()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shared_dir() / "models" / "mlperf_tiny" / "ic_resnet8_int8.tflite"
    base = ("mesh", model, "--target", "spinnaker2", "--chips", 1, "--inputs", 4)
    assert dovetail(*base, "-o", tmp_path / "a") == 0
    text = capsys.readouterr().out
    assert "equal the integer graph's in every byte" in text
    assert "of 152 elements; one input takes" in text and "times its bound" in text
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {
        *("Makefile", "chips", "link.ld", "mapping.json", "mapping.yaml", "mesh.html", "mesh.json", "network.onnx"),
        *("manager", "programs", "runtime"),
    }
    assert dovetail(*base, "--mapping", tmp_path / "a" / "mapping.yaml") == 0
    assert capsys.readouterr().out.splitlines()[-1] == text.splitlines()[-2]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--target", "riscv"], "riscv: this target is a machine alone, not a mesh"),
        (["--target", "spinnaker2", "--chips", "49"], "49 chips: a board has 48"),
        (["--target", "spinnaker2", "--boards", "25"], "25 boards: there are places for 24"),
        (["--target", "spinnaker2", "--chips", "1", "--mapping", "absent.yaml"], "cannot be read"),
    ],
)
def test_wrong_wishes(more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = shared_dir() / "models" / "mlperf_tiny" / "ic_resnet8_int8.tflite"
    assert sentence in refused(capsys, "mesh", model, *more)


@pytest.mark.parametrize(("option", "value"), [("--faults", 1.5), ("--faults", -0.1), ("--inputs", 0), ("--jobs", 0)])
def test_numbers_out_of_their_range(option: str, value: float, capsys: pytest.CaptureFixture[str]) -> None:
    model = shared_dir() / "models" / "mlperf_tiny" / "ic_resnet8_int8.tflite"
    assert dovetail("mesh", model, "--target", "spinnaker2", option, value) == 2
    assert option in capsys.readouterr().err
