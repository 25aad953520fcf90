"""What users are told: text from outside is shown without its escapes, any name is taken, and advice helps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dovetail as package
from command_line import dovetail, refused
from conftest import shared_dir
from dovetail import DovetailError, Options
from dovetail.codegen.build.toolchain import compiler_error
from dovetail.errors import visible

HOSTILE = "\x1b[31m\x1b]0;title\x07\u202e\udcff"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("said") / "digits.onnx"
    assert dovetail("zoo", "digits", "-o", path) == 0
    return path


@pytest.fixture(scope="module")
def build(digits: Path) -> package.Build:
    return package.compile(digits, "riscv", digits.parent / "build")


def test_escapes_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, digits: Path) -> None:
    assert visible(f"plain é 漢\n\t{HOSTILE}") == "plain é 漢\n\t\\x1b[31m\\x1b]0;title\\x07\\u202e\\udcff"
    assert visible(HOSTILE) in str(DovetailError(HOSTILE))
    folder = tmp_path / HOSTILE
    folder.mkdir()
    shutil.copy(digits, folder / "net.onnx")
    assert dovetail("compile", folder / "net.onnx", "-t", "riscv", "-o", folder / "build") == 0
    assert dovetail("run", folder / "build", "--sim", "host") == 0
    assert dovetail("compile", folder / "none.onnx", "-t", "riscv", "-o", folder / "other") == 1
    printed = capsys.readouterr()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800-\udfff]", printed.out + printed.err)
    assert printed.out.count("title") == 1 and printed.err.count("title") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes are Linux's")
@pytest.mark.parametrize("name", [b"caf\xc3\xa9", b"n\xff"])
def test_any_file_name_in_any_locale(name: bytes, digits: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    place = os.fsencode(tmp_path) + b"/" + name
    shutil.copy(digits, place + b".onnx")
    for words in (
        ["compile", place + b".onnx", "-t", "riscv", "-o", place],
        ["run", place, "--sim", "host", "--output", place + b".npz", "--json", place + b".json"],
        ["export", place, "--to", "cmake", "-o", place + b"_export"],
        ["report", place, "--sim", "host", "-o", place + b".html"],
    ):
        command = [sys.executable, "-m", "dovetail", *words]
        ended = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert ended.returncode == 0 and b"Traceback" not in ended.stderr, ended.stderr.decode(errors="replace")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"options": {"name": "x"}}, "options: must be Options, not dict"),
        ({"options": Options}, "options: must be Options, not type"),
        ({"nmae": "x"}, "did you mean name?"),
        ({"optimize": "fast"}, "optimize: 'fast' is not one of 'speed', 'size'"),
        ({"rounding": "up"}, "rounding: 'up' is not one of 'double', 'single'"),
        ({"name": 3}, "name: must be str, not int"),
        ({"cores": True}, "cores: must be int, not bool"),
        ({"memory_budget": "32K"}, "memory_budget: must be int, not str"),
        ({"settings": ["a=1"]}, "settings: must be Mapping, not list"),
        ({"operators": 3}, "operators: must be tuple, not int"),
        ({"tuning": "none.toml"}, "none.toml: the tuning file cannot be read"),
        ({"model": 3}, "model: must be str or Path, not int"),
        ({"target": 3}, "target: must be str or Target, not int"),
    ],
    ids=str,
)
def test_python_says_what_the_command_line_says(words: dict[str, Any], said: str, digits: Path) -> None:
    with pytest.raises(DovetailError, match=re.escape(said)):
        package.compile(**{"model": digits, "target": "riscv", **words})


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (np.zeros((1, 1, 8, 8)), "inputs: must be Mapping, not ndarray"),
        ([np.zeros(3)], "inputs: must be Mapping, not ndarray"),
        ("abc", "inputs: must be Mapping, not str"),
        (3, "inputs: must be Mapping, not int"),
        ({"input": [[1], [2, 3]]}, "input: these values make no array"),
        ({"input": None}, "must be int8 [1, 1, 8, 8], got object []"),
    ],
    ids=["array", "list", "text", "number", "ragged", "none"],
)
def test_inputs_that_are_none_are_refused_in_python(inputs: Any, said: str, build: package.Build) -> None:
    with pytest.raises(DovetailError, match=re.escape(said)):
        build.run(inputs)


IMAGE = np.random.default_rng(1).integers(-128, 128, (1, 1, 8, 8)).astype(np.int8)


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.transpose(2, 3, 0, 1),
        lambda image: image.reshape(64),
        lambda image: image.astype(np.int32),
        lambda image: (image.astype(np.float32) + 128) * np.float32(0.003921568859368563),
        lambda image: ((image.astype(np.float64) + 128) * 0.003921568859368563).reshape(8, 8),
    ],
    ids=["axes", "shape", "type", "reals", "reals and shape"],
)
def test_the_advice_makes_the_input_that_was_meant(
    change: Callable[[np.ndarray], np.ndarray], build: package.Build
) -> None:
    with pytest.raises(DovetailError, match="must be int8") as refusal:
        build.run({"input": change(IMAGE)})
    expression = re.sub("^(give|quantise the real numbers:) ", "", refusal.value.hint)
    again = eval(expression, {"array": change(IMAGE)})
    assert again.dtype == np.int8 and np.array_equal(again, IMAGE)
    assert build.run({"input": again}, simulator="host").outputs


def test_the_simulator_holds_two_gigabytes(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--set", "ram.size=4G")
    assert dovetail("compile", digits, "-t", "riscv", "-o", tmp_path / "build", *size) == 0
    said = refused(capsys, "run", tmp_path / "build")
    assert "the memories have 4,297,064,448 bytes, the simulator holds at most 2,147,483,648" in said
    assert "--set ram.size=256M" in said


def test_numbers_beyond_any_count_are_refused(
    build: package.Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(build.folder, tmp_path / "build")
    manifest = json.loads((tmp_path / "build" / "dovetail.json").read_text())
    manifest["outputs"][0]["bytes"] = 1 << 70
    (tmp_path / "build" / "dovetail.json").write_text(json.dumps(manifest))
    assert "outputs[0].bytes: must be a whole number" in refused(capsys, "run", tmp_path / "build")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rp2400", "did you mean rp2040? Else use one of cortex_m0plus, "),
        ("riscvv", "did you mean riscv? Else use one of "),
        ("zzz", "what to do: use one of cortex_m0plus, "),
        ("gull_nope.py", "gull_nope.py: there is no such target file"),
    ],
)
def test_a_target_that_is_not_there(
    name: str, said: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "compile", digits, "-t", name, "-o", tmp_path / "build")


def test_a_driver_that_copies_without_a_dma_is_told_why(tmp_path: Path) -> None:
    """The template's own driver on a chip without one."""
    said = compiler_error("driver/gull.c:3:10: fatal error: 'dma.h' file not found\n", 1)
    assert said.where == "driver/gull.c:3:10" and "the target has no DMA" in said.hint and "report" not in said.hint
    assert "report it" in compiler_error("driver/gull.c:3:10: fatal error: 'own.h' file not found\n", 1).hint
    assert compiler_error("fatal error: error writing to x.o: No space left on device\n", 1).what == "the disk is full"


@pytest.mark.skipif(not (shared_dir() / "faults").is_dir(), reason="the faults found from outside are not here")
def test_narrower_weights_are_advised_where_they_take_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shared_dir() / "faults" / "newcomer" / "ad4.onnx"
    said = refused(capsys, "compile", model, "-t", "saml11", "-o", tmp_path / "build")
    assert "what to do: a larger flash, or a smaller network" in said and "int4" not in said


def test_images_of_bytes_and_what_decided_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = tmp_path / "float.onnx", tmp_path / "cal.npz"
    assert dovetail("zoo", "digits", "--float", "-o", model, "--calibration", data) == 0
    bytes_of = {name: np.rint(array * 255 / array.max()) for name, array in np.load(data).items() if name == "input"}
    np.savez(tmp_path / "bytes.npz", **bytes_of)
    words = ("quantize", model, "-t", "ne16", "-o", tmp_path / "q.onnx", "--nearest")
    for file, how, said in (("cal", (), False), ("bytes", (), True), ("bytes", ("--scale", "0.00392157"), False)):
        capsys.readouterr()
        assert dovetail(*words, "--data", tmp_path / f"{file}.npz", *how) == 0
        assert ("warning, assumed: 'input' gets whole numbers from 0 to 255" in capsys.readouterr().err) == said
    assert dovetail(*words, "--data", data, "--weights", "mixed", "--budget", "bytes=2k") == 0
    assert "chosen: the most predicted dB within the bytes" in capsys.readouterr().err


def test_every_refused_operator_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    body = "(float[1,4] x) => (float[1,4] y) <float[1,4] a, float[1,4] b> { a = Acosh (x) b = Det (a) y = Acosh (b) }"
    graph = onnx.parser.parse_graph(f"two {body}")
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "two.onnx")
    said = refused(capsys, "compile", tmp_path / "two.onnx", "-t", "riscv", "--float", "-o", tmp_path / "build")
    assert said.count("Acosh") == 2 and "two.onnx, Det 1 (b): the operator Det" in said, said


def test_every_wrong_name_of_a_target_is_said(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        from dataclasses import replace
        from dovetail.targets import load_target
        base = load_target("macarray")
        engine = replace(base.engines[0], memory="L3", files={**base.engines[0].files, "own.c": PATH})
        TARGET = replace(base, name="wrong", code="rom", engines=(engine,))
        """
    lines = "\n".join(line.strip() for line in text.splitlines()).replace("PATH", "__import__('pathlib').Path('own.c')")
    (tmp_path / "wrong.py").write_text(lines)
    said = refused(capsys, "compile", digits, "-t", tmp_path / "wrong.py", "-o", tmp_path / "build")
    for part in (
        "no memory 'rom' for the program",
        "no memory 'L3' for the operands",
        "has no file own.c",
        "write own.c",
    ):
        assert part in said


def test_the_advised_simulator_is_another(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several cores with Helium run on no simulated chip: by default on this computer, which the refusal names, too."""
    build = tmp_path / "build"
    assert dovetail("compile", digits, "-t", "cortex_m55", "--cores", "2", "-o", build) == 0
    assert "cortex_m55 has cortex-m55+mve, core 1\n  what to do: use --sim host" in raw(
        capsys, "run", build, "--sim", "qemu"
    )
    assert dovetail("run", build) == 0


def raw(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What a command prints on stderr that fails."""
    capsys.readouterr()
    assert dovetail(*words) == 1
    return capsys.readouterr().err


def test_a_full_folder_for_temporary_files_is_said(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dovetail.folders.os.rename", full)
    said = refused(capsys, "compile", digits, "-t", "riscv", "-o", tmp_path / "build", "--anew")
    assert "No space left on device" in said and "TMPDIR" in said and not (tmp_path / "build").exists()


def test_a_sweep_without_a_result_fails(digits: Path, tmp_path: Path) -> None:
    page = ("-o", tmp_path / "s.html", "--jobs", "1")
    assert dovetail("sweep", digits, "-t", "ne16", "--set", "l2.size=64", *page) == 1
