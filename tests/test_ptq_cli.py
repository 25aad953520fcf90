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


RBE = Path(__file__).parent / "rbe_port" / "rbe.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--activation-width", "input=int2", "--integer-ends"), "it has 4 bits, not 2: ONNX has no inputs of 2 bits"),
        (("--activations", "int2", "--integer-ends"), "give --activation-width 'input=int4'"),
        (("--activations", "int2", "--integer-ends", "--activation-width", "input=int4"), ""),
        (("--activation-width", "input=int2"), ""),
    ],
)
def test_an_activation_has_the_width_that_was_asked_for(
    words: tuple[str, ...], said: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (files / "digits.onnx", "--data", files / "calibration.npz", "--target", RBE, "-o", tmp_path / "q.onnx")
    assert dovetail("quantize", *given, *words) == int(bool(said))
    assert said in " ".join(capsys.readouterr().err.split())


def test_activations_that_share_steps_are_named_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two that are joined have the steps of the whole, and so one width."""
    text = """(float[1,2,6,6] x) => (float[1,4,6,6] y)
        <float[2,2,1,1] w = {1, 0.5, 0.25, 1}, float[4,4,1,1] v = {VALUES}> {
        a = Conv (x, w) b = Relu (x) c = Concat <axis = 1> (a, b) d = Conv (c, v) y = Mul (d, d) }""".replace(
        "VALUES", ", ".join("1" * 16)
    )
    onnx.save(
        onnx.helper.make_model(
            onnx.parser.parse_graph(f"joined {text}"), opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
        ),
        tmp_path / "joined.onnx",
    )
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).random((8, 2, 6, 6)).astype(np.float32))
    given = (tmp_path / "joined.onnx", "--data", tmp_path / "data.npz", "--target", RBE, "-o", tmp_path / "q.onnx")
    assert dovetail("quantize", *given, "--activation-width", "b=int2") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "activation 'b': it has 8 bits, not 2: it shares its steps with" in said and "name these int2, too" in said


def test_a_search_counts_what_is_built(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs of integers have 4 bits at least, and a core that does not pack holds each weight in a byte."""
    given = (files / "digits.onnx", "--data", files / "calibration.npz", "--nearest", "-o", tmp_path / "q.onnx")
    mixed = ("--activations", "mixed", "--budget", "bytes=4300", "--integer-ends")
    assert dovetail("quantize", *given, "--target", RBE, *mixed) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("input "))
    assert row.split("│")[5].strip() == "" and "int2" not in row, "no bytes of an input of 2 bits"
    assert dovetail("quantize", *given, "--target", "riscv", "--weights", "mixed", "--budget", "bytes=2k") == 1
    assert "the narrowest weights need 3,512" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("scale", [1, 255])
def test_data_beyond_what_the_model_takes_are_said(
    scale: int, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(files / "test.npz") as file:
        np.savez(tmp_path / "t.npz", input=file["input"][:8] * np.float32(scale), labels=file["labels"][:8])
    json_file = tmp_path / "a.json"
    assert dovetail("accuracy", files / "int4.onnx", "--data", tmp_path / "t.npz", "--json", json_file) == 0
    said = "of the numbers of 'input' are beyond" in " ".join(capsys.readouterr().err.split())
    assert said == (scale > 1) == bool(json.loads(json_file.read_text())["notes"])
