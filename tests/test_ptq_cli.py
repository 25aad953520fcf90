"""`dovetail quantize` and `dovetail accuracy` from the outside."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from command_line import dovetail
from ptq_networks import onnx_runtime
from zoo_data import digits_accuracy

needs_iss = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("unicorn", "elftools", "ziglang")),
    reason="the simulator is not installed (dovetail[iss])",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with digits.onnx (float), calibration.npz, test.npz and int4.onnx."""
    folder = tmp_path_factory.mktemp("files")
    options = ("--calibration", folder / "calibration.npz", "--test", folder / "test.npz")
    assert dovetail("zoo", "digits", "--float", "-o", folder / "digits.onnx", *options) == 0
    given = (folder / "digits.onnx", "--data", folder / "calibration.npz", "--target", "ne16")
    assert dovetail("quantize", *given, "--weights", "int4", "-o", folder / "int4.onnx") == 0
    return folder


def test_the_zoos_float_digits_read_digits(files: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle here (dovetail[check])")
    with np.load(files / "test.npz") as file:
        images, labels = file["input"], file["labels"]
    scores = onnx_runtime((files / "digits.onnx").read_bytes(), {"input": images[:, None]})
    assert (scores.argmax(axis=1) == labels).mean() == pytest.approx(digits_accuracy())


def test_the_result_is_plain_onnx_with_narrow_weights(files: Path) -> None:
    model = onnx.load(files / "int4.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    narrow = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT4 and len(t.dims) > 1]
    assert len(narrow) == 7
    assert sum(len(tensor.raw_data) or len(tensor.int32_data) for tensor in narrow) == 3512 // 2


@needs_iss
def test_accuracy_names_the_worst_layers(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--float-model", files / "digits.onnx", "--target", "ne16", "--samples", 16)
    json_file = files / "a.json"
    assert dovetail("accuracy", files / "int4.onnx", "--data", files / "test.npz", *options, "--json", json_file) == 0
    text = capsys.readouterr().out
    assert "firmware" in text and "worst 1" in text and "/conv1/Relu_output_0" in text
    found = json.loads(json_file.read_text())
    exact, integer, firmware = found["columns"]
    assert exact["samples"] == 16 and integer["top1"] == firmware["top1"] >= 80
    assert found["layers"][0]["name"] == "input"


def test_accuracy_without_a_float_model_says_what_it_compares_with(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dovetail("accuracy", files / "int4.onnx", "--data", files / "test.npz", "--samples", 8) == 0
    assert "no --float-model" in capsys.readouterr().err


def test_mixed_precision_shows_its_tables_and_draws_the_frontier(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (files / "digits.onnx", "--data", files / "calibration.npz", "--target", "ne16", "--weights", "mixed")
    rest = ("--budget", "bytes=1.5k", "--plot", files / "f.svg", "-o", files / "mixed.onnx")
    assert dovetail("quantize", *given, *rest) == 0
    text = capsys.readouterr().out
    assert "<- chosen" in text and "/head/fc/Gemm_output_0" in text and "1,4" in text
    assert (files / "f.svg").read_text().startswith("<svg")


def test_equalised_models_are_compared_with_the_float_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (files / "digits.onnx", "--data", files / "calibration.npz", "--target", "riscv")
    assert dovetail("quantize", *given, "--equalise", "--per-tensor", "-o", files / "e.onnx") == 0
    options = ("--float-model", files / "digits.onnx", "--samples", 8, "--json", files / "e.json")
    assert dovetail("accuracy", files / "e.onnx", "--data", files / "test.npz", *options) == 0
    assert min(layer["sqnr"] for layer in json.loads((files / "e.json").read_text())["layers"]) > 15


WRONG = {
    "no budget": (("--weights", "mixed"), "mixed widths need a --budget"),
    "a budget without mixed": (("--budget", "bytes=9k"), "--budget is for mixed widths only"),
    "a plot without mixed": (("--plot", "f.svg"), "--plot: this option is for mixed widths only"),
    "no such budget": (("--weights", "mixed", "--budget", "weight=3"), "'weight=3' is no budget"),
    "too small a budget": (("--weights", "mixed", "--budget", "bytes=3"), "the narrowest weights need 878"),
    "not ONNX": (("-o", "a.tflite"), "the model is written as ONNX"),
    "no target": (("--target", "abacus"), "target 'abacus': there is no such target"),
    "no data": (("--data", "nothing.npz"), "there is no such file or folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_orders_get_one_message(
    files: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options, message = WRONG[case]
    given = ("--data", files / "calibration.npz", "--target", "ne16", "-o", tmp_path / "a.onnx")
    assert dovetail("quantize", files / "digits.onnx", *given, *options) == 1
    error = capsys.readouterr().err
    assert message in " ".join(error.split()) and error.count("error:") == 1
    assert not list(tmp_path.iterdir())


def test_without_a_name_the_result_is_named_after_model_and_width(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = (files / "digits.onnx", "--data", files / "calibration.npz", "--target", "ne16", "--nearest")
    for width in ("int8", "int4"):
        assert dovetail("quantize", *given, "--samples", 2, "--weights", width) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits_int4.onnx", "digits_int8.onnx"]
    assert dovetail("quantize", tmp_path / "digits_int8.onnx", *given[1:], "--samples", 2) == 0
    assert (tmp_path / "digits_int8_int8.onnx").is_file()


def test_labels_out_of_range_are_refused(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(files / "test.npz") as file:
        np.savez(tmp_path / "t.npz", input=file["input"][:4], labels=np.array([1, 2, 10, 3]))
    assert dovetail("accuracy", files / "int4.onnx", "--data", tmp_path / "t.npz") == 1
    assert "label 10 of sample 2, the network has classes 0 to 9" in " ".join(capsys.readouterr().err.split())
