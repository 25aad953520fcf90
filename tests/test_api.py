"""Dovetail from a Python program: what `import dovetail` offers, and that users' files are checked with its types."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dovetail
from command_line import refused
from dovetail.errors import DovetailError
from dovetail.guests.zoo import build as zoo
from dovetail.ir.graph import evaluate
from dovetail.prove import read_graph
from dovetail.target import Target
from firmware import require_chip

USERS_FILE = """
from pathlib import Path

import numpy as np

import dovetail

build: dovetail.Build = dovetail.compile("digits.onnx", target="riscv", options=dovetail.Options(keep_dead=True))
run = build.run({build.inputs[0].name: np.zeros(build.inputs[0].shape, np.int8)})
cycles: int | None = run.cycles
probabilities = build.dequantize(build.outputs[0].name, run.outputs[0][build.outputs[0].name])
Path("page.html").write_text(run.page())
target = dovetail.load_target("mine.py")
dovetail.open_build(build.folder, target).run(simulator="host", check=False).print()
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "digits.onnx"
    path.write_bytes(zoo("digits"))
    return path


def test_a_network_is_compiled_and_run(digits: Path) -> None:
    build = dovetail.compile(digits, target="ne16")
    (input_,), (output,) = build.inputs, build.outputs
    arrays = [{input_.name: np.full(input_.shape, value, input_.dtype.numpy)} for value in (0, 3, 9)]
    chip, here = build.run(arrays), build.run(arrays, simulator="host")
    graph = read_graph(build._build)
    for given, one, other in zip(arrays, chip.outputs, here.outputs, strict=True):
        expected = evaluate(graph, given)[output.name]
        assert np.array_equal(one[output.name], expected) and np.array_equal(other[output.name], expected)
    assert chip.proof == "outputs equal the integer graph in 3 inferences"
    assert chip.cycles == sum(layer.cycles or 0 for layer in chip.report.layers) and here.cycles is None
    assert "<html" in chip.page()


def test_the_folder_goes_with_the_build_or_stays(digits: Path, tmp_path: Path) -> None:
    build = dovetail.compile(digits)
    folder = build.folder
    assert (folder / "dovetail.json").is_file()
    del build
    assert not folder.exists()
    kept = dovetail.compile(digits, folder=tmp_path / "net", settings={"ram.size": "64K"}).folder
    again = dovetail.open_build(kept)
    assert again.target.memory("ram").size == 64 << 10
    assert again.run().proof
    with pytest.raises(dovetail.DovetailError, match="the output folder exists"):
        dovetail.compile(digits, folder=kept)
    dovetail.compile(digits, folder=kept, replace_folder=True)


def test_a_fault_is_not_returned(digits: Path, tmp_path: Path) -> None:
    """An output that is not the network's is an error, not a result."""
    build = dovetail.compile(digits, folder=tmp_path / "net")
    kernels = next((tmp_path / "net" / "src").glob("*_kernels.c"))
    text = kernels.read_text()
    kernels.write_text(text.replace(">> 31", ">> 30"))
    assert kernels.read_text() != text
    with pytest.raises(dovetail.DovetailError, match="not those of the integer graph"):
        build.run()
    assert build.run(check=False).proof == ""


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"wrong": np.zeros(1, np.int8)}, "expected the inputs"),
        ([], "no inference"),
        ({"input": np.zeros((1, 2), np.float32)}, "must be"),
    ],
)
def test_inputs_are_what_the_model_wants(digits: Path, inputs: object, message: str) -> None:
    build = dovetail.compile(digits)
    if isinstance(inputs, dict) and "input" in inputs:
        inputs = {build.inputs[0].name: inputs["input"]}
    with pytest.raises(dovetail.DovetailError, match=message):
        build.run(inputs)  # type: ignore[arg-type]


def test_settings_and_names_are_checked(digits: Path) -> None:
    with pytest.raises(dovetail.DovetailError, match=r"there is no 'ram\.length' to set"):
        dovetail.compile(digits, settings={"ram.length": 5})
    build = dovetail.compile(digits)
    with pytest.raises(dovetail.DovetailError, match="no input or output 'x9'"):
        build.quantize("x9", 1.0)


def test_the_function_stays_beside_the_file_of_its_name() -> None:
    """`import dovetail.compile` makes the file known to Python, and `dovetail.compile` is still the function."""
    import importlib

    file = importlib.import_module("dovetail.compile")
    assert callable(dovetail.compile) and dovetail.compile is not file
    assert file.Options is dovetail.Options
    assert all(hasattr(dovetail, name) for name in dovetail.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'soup'"):
        _ = dovetail.soup  # type: ignore[attr-defined]


def test_targets(digits: Path) -> None:
    assert isinstance(dovetail.load_target("kestrel"), Target)
    assert "kestrel" in dovetail.targets.BUILT_IN


def test_users_files_pass_strict_types(tmp_path: Path) -> None:
    """A program that uses the package, and the target file `dovetail new-target` writes."""
    from dovetail.guests.newtarget import write_new_target

    write_new_target("mine", tmp_path)
    (tmp_path / "user.py").write_text(USERS_FILE)
    files = ["mine.py", "user.py"]
    found = subprocess.run([sys.executable, "-m", "mypy", "--strict", *files], cwd=tmp_path, capture_output=True)
    assert found.returncode == 0, found.stdout.decode()


def test_python_refuses_a_stack_as_the_command_line_does(
    tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The need of stack is a stage of every compilation: the same refusal, and the header says it."""
    require_chip()
    riscv = dovetail.load_target("riscv")
    small = dataclasses.replace(riscv, core=dataclasses.replace(riscv.core, stack=64))
    with pytest.raises(DovetailError, match=r"it needs [\d,]+ bytes of stack .* 64 are reserved") as raised:
        dovetail.compile(digits, small, tmp_path / "python")
    words = ("compile", digits, "--target", "riscv", "--set", "core.stack=64", "-o", tmp_path / "words")
    assert refused(capsys, *words).removeprefix("error: ").strip() == str(raised.value)
    assert not (tmp_path / "python").exists() and not (tmp_path / "words").exists()
    build = dovetail.compile(digits, riscv, tmp_path / "enough", settings={"core.stack": 4096})
    assert "_STACK_BYTES" in next((build.folder / "src").glob("digits.h")).read_text()
