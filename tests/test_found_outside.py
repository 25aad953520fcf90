"""Small inputs that failed once, found by others: each compiles and runs, or is refused by a sentence."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from command_line import dovetail, refused
from conftest import shared_dir

FUZZ = "faults/fuzz"


def network(folder: Path, name: str, text: str) -> Path:
    """A model of ONNX's own text."""
    graph = onnx.parser.parse_graph(f"{name} {text}")
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("zero_ops.onnx", ("-t", "riscv", "--float")),
        ("out_is_in.onnx", ("-t", "ne16", "--float")),
        ("const_out.onnx", ("-t", "riscv", "--float")),
        ("zdim2.onnx", ("-t", "riscv", "--float")),
        ("diana_analog_crash.tflite", ("-t", "diana", "--requant", "analog")),
        ("kestrel_report_this_0_2.onnx", ("-t", "kestrel")),
        ("m4_size_link.tflite", ("-t", "kestrel", "--optimize", "size")),
    ],
)
def test_it_compiles_and_runs(file: str, options: tuple[str, ...], tmp_path: Path) -> None:
    assert dovetail("compile", shared_dir() / FUZZ / file, *options, "-o", tmp_path / "build", "--check") == 0
    assert dovetail("run", tmp_path / "build", "--sim", "iss") == 0


@pytest.mark.parametrize(
    ("name", "target"), [("stdint", "riscv"), ("dma", "ne16"), ("dovetail_rt", "riscv"), ("ne16", "ne16")]
)
def test_a_name_that_is_in_use_begins_otherwise(
    name: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network(tmp_path, name, "(float[1,4] x) => (float[1,4] y) { y = Relu (x) }")
    assert dovetail("compile", model, "-t", target, "--float", "-o", tmp_path / "build") == 0
    assert f"C names begin with m_{name}" in capsys.readouterr().err
    assert dovetail("run", tmp_path / "build", "--sim", "iss") == 0


def test_a_value_without_elements_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "(float[1,4] x) => (float[1,4] y, float[2,0] z) <float[2,0] k = {}> { y = Relu (x) z = Relu (k) }"
    model = network(tmp_path, "hollow", text)
    assert "has no elements" in refused(capsys, "compile", model, "-t", "riscv", "--float", "-o", tmp_path / "build")


def test_paths_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = network(tmp_path, "model", "(float[1,4] x) => (float[1,4] y) { y = Relu (x) }")
    command = ("compile", model, "-t", "riscv", "--float", "-o")
    assert "file name too long" in refused(capsys, *command, tmp_path / ("n" * 300))
    (tmp_path / "file").touch()
    assert "not a directory" in refused(capsys, *command, tmp_path / "b", "--save-stages", tmp_path / "file" / "x")
