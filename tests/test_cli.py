"""The command line: the way through on the digits model, the report's figures, and every kind of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from command_line import dovetail, refused
from dovetail.arrays import seeded_inputs
from dovetail.cli.console import short_name
from dovetail.errors import DovetailError
from dovetail.guests import zoo
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.run import open_build, run_build
from zoo_data import digits_samples

needs_iss = pytest.mark.skipif(find_spec("unicorn") is None, reason="the simulator needs unicorn (dovetail[iss])")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("CONV_2D 0 (a/Relu;a/BatchNorm;a/Conv2D)", "CONV_2D 0 (a/Relu; …)"),
        (f"ADD 3 ({'block/' * 20}add)", f"ADD 3 (…{('block/' * 20 + 'add')[-39:]})"),
        ("Conv", "Conv"),
        ("SOFTMAX 9 (Identity)", "SOFTMAX 9 (Identity)"),
    ],
)
def test_tables_shorten_the_names_of_converters(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits model as a file."""
    path = tmp_path_factory.mktemp("model") / "digits.onnx"
    assert dovetail("zoo", "digits", "-o", path) == 0
    return path


@pytest.fixture(scope="module")
def builds(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Builds of the digits model by target."""
    folder = tmp_path_factory.mktemp("builds")
    for target in ("riscv", "ne16"):
        assert dovetail("compile", digits, "--target", target, "-o", folder / target) == 0
    return {target: folder / target for target in ("riscv", "ne16")}


def _reference(model: Path, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    pytest.importorskip("onnxruntime", reason="the reference needs onnxruntime (dovetail[check])")
    session = runtime_session(model)
    return np.stack([session.run(None, {"input": image[None]})[0] for image in images])


@needs_iss
@pytest.mark.parametrize("target", ["riscv", "ne16"])
def test_run_names_digits_and_reports(
    target: str, builds: dict[str, Path], digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels = digits_samples(8)
    np.savez(tmp_path / "x.npz", input=images[:, None])
    capsys.readouterr()
    assert (
        dovetail(
            "run",
            builds[target],
            "--input",
            tmp_path / "x.npz",
            "--output",
            tmp_path / "y.npz",
            "--json",
            tmp_path / "r.json",
        )
        == 0
    )
    captured = capsys.readouterr()
    assert "digits on " + target in captured.out and "8 inferences" in captured.out and "seed" not in captured.err
    with np.load(tmp_path / "y.npz") as outputs:
        assert outputs.files == ["output"]
        found = outputs["output"]
    assert found.shape == (8, 1, 10) and found.dtype == np.int8
    expected = _reference(digits, images)
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 4
    assert (found[:, 0].argmax(axis=1) == labels).mean() >= 0.8
    _check_report(json.loads((tmp_path / "r.json").read_text()), target)


def _check_report(report: dict[str, Any], target: str) -> None:
    """The schema's fields, and that the figures agree with one another."""
    engines = ["ne16"] if target == "ne16" else []
    assert report["schema"] == 1 and report["model"] == "digits" and report["target"] == target
    assert report["simulator"] == "iss" and report["inferences"] == 8 and len(report["each"]) == 8
    assert report["policy"] == ("engine" if engines else "exact")
    assert set(report["cycles"]) == {"total", "core", *engines, *(["dma"] if engines else [])}
    assert set(report["macs"]) == {"total", "core", *engines}
    assert set(report["sizes"]) == {"text", "rodata", "data", "bss"} and report["sizes"]["rodata"] > 0
    layers = report["layers"]
    wanted = {"name", "operators", "engine", "cycles", "macs", "bytes_moved", "reason_not_offloaded"}
    assert layers and all(wanted <= set(layer) for layer in layers)
    assert sum(layer["cycles"] for layer in layers) == report["cycles"]["total"] == report["each"][0]["cycles"]["total"]
    assert sum(layer["macs"] for layer in layers) == report["macs"]["total"] == (59456 if engines else 54848)
    for name in ("core", *engines):
        assert sum(layer["macs"] for layer in layers if layer["engine"] == name) == report["macs"][name]
    for name in engines:
        assert sum(layer["engine_cycles"] for layer in layers) == report["cycles"][name] > 0
        assert report["macs"][name] > 0.97 * report["macs"]["total"]
        moved = sum(int(bar["label"].split()[0] == "copy") for bar in report["timeline"]["dma"])
        assert moved == len(report["timeline"]["dma"]) > 0
    assert all(0 < use["lower_bound"] <= use["peak"] <= use["size"] for use in report["memory"].values() if use["peak"])
    assert report["instructions"] <= report["cycles"]["core"] <= report["cycles"]["total"]
    assert report["stack"] > 0


@needs_iss
def test_run_without_input_says_its_inputs_are_seeded(
    builds: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for sim in ("iss", "host"):
        capsys.readouterr()
        assert (
            dovetail(
                "run", builds["ne16"], "--sim", sim, "--output", tmp_path / f"{sim}.npz", "--json", tmp_path / "r.json"
            )
            == 0
        )
        assert "seed 0" in capsys.readouterr().err
        outputs.append(np.load(tmp_path / f"{sim}.npz")["output"])
    assert outputs[0].shape == (1, 10) and np.array_equal(outputs[0], outputs[1])
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["simulator"] == "host" and report["cycles"]["total"] is None and report["sizes"] == {}
    assert all(layer["cycles"] is None for layer in report["layers"])


@needs_iss
def test_bytes_moved_are_those_the_dma_wrote(builds: dict[str, Path]) -> None:
    from dovetail.arrays import seeded_inputs
    from dovetail.report import make_report
    from dovetail.run import open_build, run_build

    build = open_build(builds["ne16"])
    result = run_build(build, "iss", [seeded_inputs(build.manifest.inputs)])
    wrote = sum(activity.moved for activity in result.simulation.inferences[0].activities["dma"])
    assert sum(layer.bytes_moved for layer in make_report(result).layers) == wrote > 0


def test_explain_says_where_every_operator_goes(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert dovetail("explain", digits, "--target", "ne16", "--json") == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert {layer["engine"] for layer in layers} <= {"ne16", "core", "dma"}
    assert all(layer["reason_not_offloaded"] for layer in layers if layer["engine"] != "ne16")
    operators = " ".join(operator for layer in layers for operator in layer["operators"])
    assert all(name in operators for name in ("/conv1/Conv", "/block2/depthwise/Conv", "/head/fc/Gemm", "Softmax"))
    assert dovetail("explain", digits, "--target", "riscv") == 0
    assert "the target has no engine" in " ".join(capsys.readouterr().out.split())


def test_targets_zoo_and_program_are_printed(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert dovetail("targets") == 0 and dovetail("zoo") == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in ("riscv", "ne16", "cortex_m4", "cortex_m33", "--requant exact", *zoo.names()))
    assert dovetail("compile", digits, "-t", "ne16", "-o", tmp_path / "b", "--requant", "exact", "--print-program") == 0
    assert "program digits" in capsys.readouterr().out
    assert json.loads((tmp_path / "b" / "dovetail.json").read_text())["policy"] == "exact"


def test_a_part_stands_for_its_core_and_memories(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Listed with its data sheet, taken by name, loaded again by the build's own note, changed like any target."""
    capsys.readouterr()
    assert dovetail("targets", "--parts") == 0
    assert "rp2040" in (listed := capsys.readouterr().out) and "DS10693" in listed
    assert dovetail("compile", digits, "--part", "rp2040", "-o", tmp_path / "b", "--set", "ram.size=128K") == 0
    built = open_build(tmp_path / "b")
    assert (built.target.name, built.target.core.isa) == ("rp2040", "cortex-m0plus")
    assert [one.size for one in built.target.memories] == [2 << 20, 128 << 10]
    assert dovetail("explain", digits, "--part", "rp2040") == 0
    assert dovetail("export", tmp_path / "b", "--to", "make", "-o", tmp_path / "library") == 0
    message = refused(capsys, "compile", digits, "--part", "rp2041", "-o", tmp_path / "c")
    assert "targets --parts" in message


@pytest.mark.parametrize("command", ["compile", "run", "explain", "tune", "targets", "zoo"])
def test_every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dovetail(command, "--help") == 0
    assert f"Example: dovetail {command}" in capsys.readouterr().out


def _bad_models(digits: bytes) -> dict[str, tuple[bytes, str]]:
    """Models that are refused, and a word the message must have."""
    unknown, dynamic = onnx.load_from_string(digits), onnx.load_from_string(digits)
    next(node for node in unknown.graph.node if node.op_type == "Softmax").op_type = "Hardmax"
    dynamic.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    tensor = onnx.helper.make_tensor_value_info
    weights = onnx.numpy_helper.from_array(np.ones((4, 1, 3, 3), np.float32), "w")
    conv = onnx.helper.make_node("Conv", ["x", "w"], ["y"], "conv")
    real = onnx.helper.make_graph(
        [conv], "f", [tensor("x", 1, [1, 1, 8, 8])], [tensor("y", 1, [1, 4, 6, 6])], [weights]
    )
    floating = onnx.helper.make_model(real, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    return {
        "truncated": (digits[: len(digits) // 2], "model.onnx"),
        "operator": (unknown.SerializeToString(), "Hardmax"),
        "dynamic": (dynamic.SerializeToString(), "height"),
        "float": (floating.SerializeToString(), "quantise"),
        "empty": (b"", "model.onnx"),
    }


@pytest.mark.parametrize("kind", ["truncated", "operator", "dynamic", "float", "empty"])
def test_bad_models_are_refused(kind: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, word = _bad_models(digits.read_bytes())[kind]
    (tmp_path / "model.onnx").write_bytes(content)
    message = refused(capsys, "compile", tmp_path / "model.onnx", "--target", "riscv", "-o", tmp_path / "b")
    assert word in message
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_wrong_names_are_refused(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = tmp_path / "b"
    message = refused(capsys, "compile", digits, "--target", "npu", "-o", build)
    assert "use one of" in message and "ne16, " in message and "vta, " in message
    message = refused(capsys, "compile", digits, "--target", "ne16", "-o", build, "--requant", "fast")
    assert "'fast'" in message and "engine, exact" in message
    assert "absent.onnx" in refused(capsys, "compile", tmp_path / "absent.onnx", "--target", "ne16", "-o", build)
    assert "digits" in refused(capsys, "zoo", "imagenet", "-o", tmp_path / "z.onnx")
    assert "is not a build" in refused(capsys, "run", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_output_folder_that_exists_is_kept(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    assert "--force" in refused(capsys, "compile", digits, "--target", "riscv", "-o", mine)
    assert "not a build" in refused(capsys, "compile", digits, "--target", "riscv", "-o", mine, "--force")
    assert (mine / "thesis.txt").read_text() == "years of work" and [path.name for path in tmp_path.iterdir()] == [
        "mine"
    ]


def test_damaged_build_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dovetail.json").write_text('{"schema": 1, ')
    assert "dovetail.json:1: this is not JSON" in refused(capsys, "run", tmp_path)
    (tmp_path / "dovetail.json").write_text('{"schema": 1, "target": "riscv"}')
    error = refused(capsys, "run", tmp_path)
    assert "'dovetail' is missing" in error and "compile the model again" in error


_IMAGE = np.zeros((1, 1, 8, 8), np.int8)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"input": _IMAGE[:, :, :7]}, ("int8 [1, 1, 8, 8]", "int8 [1, 1, 7, 8]")),
        ({"input": np.zeros((0, 1, 1, 8, 8), np.int8)}, ("[1, 1, 8, 8]", "[0, 1, 1, 8, 8]")),
        ({"input": _IMAGE.astype(np.float32)}, ("must be int8", "got float32")),
        ({"input": np.full((1, 1, 8, 8), np.nan, np.float32)}, ("must be int8", "got float32")),
        ({"input": _IMAGE, "more": _IMAGE}, ("expected arrays 'input'", "'more'")),
        ({}, ("expected arrays 'input'", "got none")),
        ({"input": np.array([{"a": 1}], object)}, ("must be int8", "object")),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    arrays: dict[str, Any],
    words: tuple[str, ...],
    builds: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    message = refused(capsys, "run", builds["riscv"], "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    assert "x.npz" in message and all(word in message for word in words)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_damaged_input_files_are_refused(
    builds: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.npz"
    assert "no such file" in refused(capsys, "run", builds["riscv"], "--input", path)
    np.savez(path, inputs=_IMAGE)
    assert "expected arrays 'input', got 'inputs'" in refused(capsys, "run", builds["riscv"], "--input", path)
    np.savez(path, _IMAGE)  # without a name
    assert dovetail("run", builds["riscv"], "--input", path) == 0
    np.savez(path, input=_IMAGE)
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], whole.replace(b"NUMPY", b"NUMPX")):
        path.write_bytes(content)
        assert "npz file" in refused(capsys, "run", builds["riscv"], "--input", path)
    with zipfile.ZipFile(path, "w") as archive:
        header = "{'descr': '|i1', 'fortran_order': False, 'shape': (99999999999, 1, 1, 8, 8), }\n"
        archive.writestr("input.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    assert "npz file" in refused(capsys, "run", builds["riscv"], "--input", path)


def test_nan_and_missing_keys_are_refused(tmp_path: Path) -> None:
    from dovetail.arrays import InputError, read_inputs
    from dovetail.codegen.manifest import TensorPort

    ports = [TensorPort(name="a", shape=(2,), dtype="float32"), TensorPort(name="b", shape=(2,), dtype="int4")]
    path = tmp_path / "x.npz"
    good = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.int8)}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"a": np.array([0, np.nan], np.float32)}, "1 NaN"),
        ({"b": np.array([0, 8], np.int8)}, "-8 to 7"),
        ({"b": np.zeros((3, 2), np.int8)}, "batch axis"),
    ]
    for changed, word in bad:
        np.savez(path, **{**good, **changed})
        with pytest.raises(InputError, match=word):
            read_inputs(path, ports)
    np.savez(path, a=good["a"])
    with pytest.raises(InputError, match="expected arrays 'a', 'b', got 'a'"):
        read_inputs(path, ports)
    np.savez(path, a=np.zeros((3, 2), np.float32), b=np.zeros((3, 2), np.int8))
    sets, batched = read_inputs(path, ports)
    assert batched and len(sets) == 3 and sets[2]["b"].shape == (2,)


def test_the_process_ends_with_a_message_and_starts_light(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dovetail.cli.main", "run", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and ended.stderr.startswith("error: ") and "Traceback" not in ended.stderr
    light = (
        "import sys, dovetail, dovetail.cli.main; sys.exit(any(m in sys.modules for m in ('numpy', 'onnx', 'tflite')))"
    )
    assert subprocess.run([sys.executable, "-c", light], timeout=60, check=False).returncode == 0


def test_every_stage_is_saved_and_checked(digits: Path, tmp_path: Path) -> None:
    stages = tmp_path / "stages"
    options = ("--target", "ne16", "-o", tmp_path / "b", "--check", "--save-stages", stages)
    assert dovetail("compile", digits, *options) == 0
    names = sorted((path.name for path in stages.iterdir()), key=lambda name: int(name.partition("_")[0]))
    assert names[:3] == ["0_model.onnx", "1_integer.onnx", "2_attention.onnx"]


@needs_iss
def test_optimize_size(
    digits: Path, builds: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build says what it was made for, and its code is compiled so."""
    small = tmp_path / "small"
    assert dovetail("compile", digits, "--target", "riscv", "--optimize", "size", "-o", small) == 0
    modes, texts = [], []
    for build in map(open_build, (builds["riscv"], small)):
        modes.append(build.manifest.optimize)
        texts.append(run_build(build, "iss", [seeded_inputs(build.manifest.inputs)]).sizes["text"])
    assert modes == ["speed", "size"] and texts[1] < texts[0]
    assert "-Os" in (small / "Makefile").read_text() and "-O2" in (builds["riscv"] / "Makefile").read_text()
    assert dovetail("compile", digits, "--target", "riscv_dot4", "--optimize", "size", "-o", tmp_path / "dot4") == 0
    assert "is not used in code made for size" in capsys.readouterr().err
    text = (small / "dovetail.json").read_text()
    (small / "dovetail.json").write_text(text.replace('"optimize": "size"', '"optimize": "beauty"'))
    assert "beauty" in refused(capsys, "run", small)


@needs_iss
def test_the_targets_core_costs_are_charged(builds: dict[str, Path]) -> None:
    build = open_build(builds["riscv"])
    inputs = seeded_inputs(build.manifest.inputs)
    slow = replace(build, target=replace(build.target, core=replace(build.target.core, costs={"load": 9})))
    first, second = (run_build(b, "iss", [inputs]).simulation.inferences[0] for b in (build, slow))
    assert first.instructions == second.instructions
    assert first.total_cycles is not None and second.total_cycles is not None
    assert second.total_cycles > first.total_cycles
    wrong = replace(build, target=replace(build.target, core=replace(build.target.core, costs={"dream": 1})))
    with pytest.raises(DovetailError, match="no class of instructions"):
        run_build(wrong, "iss", [inputs])


def test_a_build_for_a_target_file_is_run_with_it(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build names the target; the file must be given again, and must be that of the target."""
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import replace\nfrom dovetail.targets.riscv import TARGET as BASE\n"
        "TARGET = replace(BASE, name='own')\n"
    )
    assert dovetail("compile", digits, "--target", own, "-o", tmp_path / "build") == 0
    message = refused(capsys, "run", tmp_path / "build", "--sim", "host")
    assert "'own'" in message and "--target" in message
    assert "not for 'riscv'" in refused(capsys, "run", tmp_path / "build", "--sim", "host", "--target", "riscv")
    assert dovetail("run", tmp_path / "build", "--sim", "host", "--target", own) == 0


def test_json_on_stdout(builds: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else stands there; the rest is told on stderr."""
    assert dovetail("run", builds["riscv"], "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == 1 and "outputs equal the integer graph" in captured.err
