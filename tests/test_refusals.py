"""A file that its own runtime runs is never said to be damaged, or to contradict itself."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from conftest import shared_dir
from dovetail.errors import DovetailError, ModelError
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.read import load_model
from oracles import run_litert_often

BLAMED = ("damaged", "contradicts itself", "invalid")
"""Words that blame the file."""


def blame(path: Path) -> str:
    """The refusal that blames a file; empty where there is none."""
    faults = list[ModelError]()
    try:
        load_model(path, faults=faults)
    except DovetailError as error:
        faults.append(ModelError(str(error.what), where=error.where, hint=error.hint))
    said = [f"{fault.what}; {fault.hint}" for fault in faults]
    return next((text for text in said if any(word in text for word in BLAMED)), "")


def runs(path: Path) -> bool:
    """Whether the file's runtime takes it."""
    try:
        if path.suffix == ".onnx":
            runtime_session(path, optimised=False)
        else:
            run_litert_often(path.read_bytes(), [], reference=True)
    except Exception:
        return False
    return True


@pytest.mark.oracles
def test_no_file_of_the_corpus_is_blamed_for_what_its_runtime_takes() -> None:
    folders = (shared_dir() / "models", shared_dir() / "faults" / "fuzz")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".onnx", ".tflite")]
    assert len(files) > 80
    wrong = [f"{path.name}: {text}" for path in files if (text := blame(path)) and runs(path)]
    assert not wrong, "\n".join(wrong)


def test_no_node_test_of_onnx_is_blamed_for_what_its_runtime_takes(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    wrong, path = [], tmp_path / "node.onnx"
    for case in cases:
        path.write_bytes(case.model.SerializeToString())
        text = blame(path)
        if text and runs(path):
            wrong.append(f"{case.name}: {text}")
    assert not wrong, "\n".join(wrong)
