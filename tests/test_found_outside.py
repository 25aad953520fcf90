"""Small inputs that failed once, found by others: each compiles and runs, or is refused by a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from command_line import dovetail, refused
from conftest import shared_dir
from dovetail import open_build
from dovetail.ir.onnx_runtime import runtime_session

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


@pytest.mark.parametrize("file", ["q2.onnx", "q3.onnx"])
@pytest.mark.parametrize("target", ["riscv", "cortex_m4", "ne16", "vta", "diana", "gemmini"])
def test_sums_beyond_32_bits_do_not_turn(
    file: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a bias at an end of 32 bits, beside ONNX Runtime, whose floats do not wrap around."""
    model = shared_dir() / FUZZ / file
    assert dovetail("compile", model, "-t", target, "-o", tmp_path / "build") == 0
    assert "so that no sum wraps around" in capsys.readouterr().err
    image = np.random.default_rng(0).integers(-128, 128, (1, 4, 6, 6)).astype(np.int8)
    (expected,) = runtime_session(model).run(None, {"x": image})
    found = open_build(tmp_path / "build").run({"x": image}).outputs[0]["y"]
    assert np.array_equal(found, expected) and len(np.unique(expected)) == 1


def test_what_stays_float_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = network(tmp_path, "floats", "(float[1,4] x) => (float[1,4] y) { y = Relu (x) }")
    ends = ("--inputs", "int8", "--outputs", "int8")
    assert dovetail("compile", model, "-t", "riscv", "--float", *ends, "-o", tmp_path / "build") == 0
    said = capsys.readouterr().err
    assert "--inputs int8: x stay float32: they are not only quantised" in said
    assert "--outputs int8: y stay float32: they do not come from integers" in said


def test_a_big_endian_processor_is_told(tmp_path: Path) -> None:
    """By an error of the preprocessor, from whichever compiler."""
    pytest.importorskip("ziglang")
    model = network(tmp_path, "model", "(float[1,4] x) => (float[1,4] y) { y = Relu (x) }")
    assert dovetail("compile", model, "-t", "riscv", "--float", "-o", tmp_path / "build") == 0
    command = [sys.executable, "-m", "ziglang", "cc", "-Isrc", "-Iruntime", "-c", "src/model.c", "-o", "model.o"]
    for machine, code, said in (("mips", 1, "this C is for little-endian processors"), ("mipsel", 0, "")):
        compiler = [*command, "-target", f"{machine}-freestanding"]
        ended = subprocess.run(compiler, cwd=tmp_path / "build", capture_output=True, text=True, check=False)
        assert ended.returncode == code and said in ended.stderr, ended.stderr


@pytest.mark.parametrize(("op", "kind", "zero"), [("Add", "uint16", 1 << 15), ("Add", "int8", 0), ("Mul", "int16", 0)])
def test_scalars_of_any_width_are_computed(op: str, kind: str, zero: int, tmp_path: Path) -> None:
    """Parameters of a requantisation have an axis that a scalar has not."""
    body = f"""({kind} x) => ({kind} y) <float s = {{0.01}}, float t = {{0.02}}, {kind} z = {{{zero}}}> {{
        r = DequantizeLinear (x, s, z) p = {op} (r, r) y = QuantizeLinear (p, t, z) }}"""
    model = network(tmp_path, kind, body)
    assert dovetail("compile", model, "-t", "riscv", "--check", "-o", tmp_path / "build") == 0


def test_no_product_of_the_cores_instructions_fits(tmp_path: Path) -> None:
    """Dilated taps lie too far apart for pairs: the plain kernel computes them."""
    body = """(int8[1,7,1,9] x) => (int8[1,5,1,9] y) <float s = {0.01}, float t = {2.0}, int8 z = {0}> {
        w = ConstantOfShape <value = int8[1] {3}> (shape) r = DequantizeLinear (x, s, z) k = DequantizeLinear (w, s, z)
        p = Conv <pads = [1, 6, 1, 6], dilations = [1, 2]> (r, k) y = QuantizeLinear (p, t, z) }"""
    model = network(tmp_path, "image", body.replace("> {", ", int64[4] shape = {5, 7, 3, 7}> {"))
    assert dovetail("compile", model, "-t", "cortex_m0plus", "-o", tmp_path / "build") == 0
    assert dovetail("run", tmp_path / "build", "--sim", "iss") == 0


def test_one_pixel_that_lies_inside_its_padded_image(tmp_path: Path) -> None:
    """It is as dense as the image, and a kernel would write the image over it: the border alone is filled."""
    body = """(int8[1,8,6,3] x) => (int8[1,3,1,1] y) <float s = {0.01}, float t = {2.0}, int8 z = {0}, int8 i = {127},
        int64[4] shape = {3, 8, 3, 2}> {
        w = ConstantOfShape <value = int8[1] {3}> (shape) r = DequantizeLinear (x, s, z) k = DequantizeLinear (w, s, z)
        m = AveragePool <kernel_shape = [6, 3]> (r) n = QuantizeLinear (m, s, i) o = DequantizeLinear (n, s, i)
        p = Conv <pads = [1, 0, 1, 1], strides = [3, 1]> (o, k) y = QuantizeLinear (p, t, z) }"""
    model = network(tmp_path, "pixel", body)
    assert dovetail("compile", model, "-t", "spinnaker2", "-o", tmp_path / "build") == 0
    assert dovetail("run", tmp_path / "build", "--sim", "iss") == 0
