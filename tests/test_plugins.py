"""Packages of third parties: their targets, commands and operators come in by entry points, as the bundled ones do."""

from __future__ import annotations

import re
import subprocess
import venv
from pathlib import Path

import pytest

from dovetail import plugins
from dovetail.cli.main import all_commands
from dovetail.operators import installed_operators
from dovetail.target.registry import load_target
from quicker import once
from test_wheel import environment, run

PACKAGES = Path(__file__).with_name("third_party")
MODEL = """
from onnx import TensorProto, helper, save
node = helper.make_node("RowDistance", ["x"], ["y"], domain="osprey.lab", factor=3)
ends = [helper.make_tensor_value_info(name, TensorProto.INT8, [4, size]) for name, size in (("x", 20), ("y", 19))]
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("osprey.lab", 1)]
save(helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), opset_imports=opsets), "rows.onnx")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with both packages, beside what the wheel's environment has."""

    def install(folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False)
        (site,) = (folder / "venv").glob("lib/*/site-packages")
        wheel = environment(tmp_path_factory)
        (wheels,) = wheel.parents[1].glob("lib/*/site-packages")
        (site / "wheel.pth").write_text(f"{wheels}\n")
        python = folder / "venv" / "bin" / "python"
        for package in ("osprey", "broken"):
            done = run(
                *(wheel, "-m", "pip", "--python", python, "install", "-q", "--no-compile", "--no-deps"),
                PACKAGES / package,
                folder=folder,
            )
            assert done.returncode == 0, done.stderr
        assert run(python, "-c", MODEL, folder=folder).returncode == 0

    return once(tmp_path_factory, "plugins", install) / "venv" / "bin" / "python"


def dovetail(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in the folder of the model; it must end well, and never with a stack."""
    done = run(python, "-m", "dovetail", *words, folder=python.parents[2])
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_targets_of_a_package_are_listed_and_broken_ones_named(installed: Path) -> None:
    done = dovetail(installed, "targets")
    assert done.returncode == 0 and "\nne16 " in done.stdout
    assert re.search(r"^osprey +RV32IMC core, 256 KiB flash, 64 KiB RAM$", done.stdout, re.MULTILINE)
    for sentence in (
        "package broken, dovetail.targets 'absent': broken.absent:TARGET: does not import: ModuleNotFoundError: ",
        "package broken, dovetail.targets 'heron': broken:NUMBER: is int, not a Target",
        "package broken, dovetail.targets 'kite': broken.kite:TARGET: the target is called 'buzzard', not 'kite'",
        "package broken, dovetail.targets 'ne16': the name 'ne16' is that of the package dovetail already",
    ):
        assert sentence in done.stderr, done.stderr


def test_commands_of_a_package_are_listed_and_broken_ones_named(installed: Path) -> None:
    done = dovetail(installed, "--help")
    assert done.returncode == 0
    assert re.search(r"^  wingspan +Count the layers of a model\.$", done.stdout, re.MULTILINE)
    assert "  compile " in done.stdout and "moult" not in done.stdout and "preen" not in done.stdout
    for sentence in (
        "package broken, dovetail.commands 'moult': broken.raises:moult: does not import: RuntimeError: the bird has",
        "package broken, dovetail.commands 'preen': broken:NUMBER: is int, not a function",
        "package broken, dovetail.commands 'compile': the name 'compile' is that of the package dovetail already",
    ):
        assert sentence in done.stderr, done.stderr


def test_a_broken_command_says_why(installed: Path) -> None:
    done = dovetail(installed, "moult")
    assert done.returncode == 1 and done.stderr.startswith("error: package broken, dovetail.commands 'moult': ")
    assert "what to do: correct broken, install another version of it, or uninstall it" in done.stderr


def test_a_compile_with_target_and_operator_of_a_package(installed: Path) -> None:
    done = dovetail(installed, "compile", "rows.onnx", "--target", "osprey", "-o", "rows")
    assert done.returncode == 0, done.stderr
    assert (installed.parents[2] / "rows" / "dovetail.json").is_file()
    for sentence in (
        "'Conv2d': broken.operators:Conv2d: one of Dovetail's own operators is called Conv2d",
        "'Half': broken.operators:Half: the operator Half has no results",
        "'Moult': broken.raises:Moult: does not import",
    ):
        assert sentence in done.stderr, done.stderr
    assert dovetail(installed, "run", "rows", "--sim", "host").returncode in (0, 1)  # 1 where there is no C compiler


def test_a_command_of_a_package_has_options_of_compile(installed: Path) -> None:
    words = ("wingspan", "rows.onnx", "--target", "osprey", "--optimize", "size", "--set", "ram.size=32K")
    done = dovetail(installed, *words)
    assert (done.returncode, done.stdout) == (0, "1 layers for size\n"), done.stderr
    assert "A number of the target" in dovetail(installed, "wingspan", "--help").stdout


# ---- those bundled


def test_everything_bundled_loads() -> None:
    said: list[str] = []
    assert set(all_commands(said.append)) >= set(plugins.bundled(plugins.COMMANDS))
    assert len(installed_operators(said.append)) >= len(plugins.bundled(plugins.OPERATORS))
    assert all(load_target(name).name == name for name in plugins.bundled(plugins.TARGETS))
    assert not said, said
