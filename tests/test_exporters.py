"""Files of today's exporters compile, and are as near their own runtimes as the support page says."""

from __future__ import annotations

import json

import pytest

from dovetail.compile import Options, compile_model
from dovetail.targets import load_target
from exported_models import FOLDER, verdict

ENTRIES = json.loads((FOLDER / "exporters.json").read_text())


@pytest.mark.parametrize("name", ENTRIES)
def test_it_is_as_near_its_runtime_as_the_page_says(name: str) -> None:
    pytest.importorskip("ai_edge_litert" if name.endswith(".tflite") else "onnxruntime")
    assert verdict(FOLDER / name) == ENTRIES[name]["bits"]


@pytest.mark.parametrize("name", ENTRIES)
def test_it_compiles(name: str) -> None:
    compiled = compile_model(FOLDER / name, load_target("riscv"), Options(allow_float=True))
    assert compiled.project.files


def test_there_are_a_dozen_tools_and_every_file_is_listed() -> None:
    assert len({entry["tool"] for entry in ENTRIES.values()}) >= 12
    assert {path.name for path in FOLDER.iterdir()} == {*ENTRIES, "exporters.json"}
