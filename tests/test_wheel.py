"""The package as a user without extras has it: a wheel in a fresh environment compiles for every target, or names the
extra it wants."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from dovetail.targets import BUILT_IN
from dovetail.tools import zoo

REPOSITORY = Path(__file__).resolve().parents[1]


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as if nothing of the repository were known."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DOVETAIL"))}
    kept["DOVETAIL_CACHE"] = str(folder / "cache")
    return subprocess.run([str(word) for word in command], cwd=folder, env=kept, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel and what it depends on, and no extra."""
    folder = tmp_path_factory.mktemp("wheel")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    made = run(python, "-m", "pip", "wheel", "-q", "--no-deps", REPOSITORY, "-w", folder, folder=folder)
    if made.returncode and re.search("Could not find a version|connection|ConnectionError|resolve", made.stderr):
        pytest.skip("the package index cannot be reached")
    assert made.returncode == 0, made.stderr
    (wheel,) = folder.glob("*.whl")
    found = run(python, "-m", "pip", "install", "-q", "--no-compile", wheel, folder=folder)
    assert found.returncode == 0, found.stderr
    (folder / "digits.onnx").write_bytes(zoo.build("digits"))
    return python


def test_it_lies_where_it_was_installed(installed: Path) -> None:
    code = "import dovetail, sys; print(dovetail.__file__); print('exo' in sys.modules)"
    found = run(installed, "-c", code, folder=installed.parents[2])
    assert str(installed.parents[1]) in found.stdout and found.stdout.endswith("False\n")
    assert run(installed, "-c", "import unicorn", folder=installed.parents[2]).returncode != 0, "an extra is there"


@pytest.mark.parametrize("target", BUILT_IN)
def test_every_target_compiles_or_names_the_extra(target: str, installed: Path) -> None:
    folder = installed.parents[2]
    command = ("-m", "dovetail", "compile", "digits.onnx", "--target", target, "-o", f"build_{target}")
    found = run(installed, *command, folder=folder)
    if found.returncode == 0:
        assert (folder / f"build_{target}" / "dovetail.json").is_file()
        return
    assert found.returncode == 1, found.stderr
    assert re.search(r"pip install 'dovetail\[[a-z]+\]'", found.stderr) and "Traceback" not in found.stderr, (
        found.stderr
    )


def test_what_simulates_names_its_extra(installed: Path) -> None:
    folder = installed.parents[2]
    assert (folder / "build_riscv").is_dir() or run(
        *(installed, "-m", "dovetail", "compile", "digits.onnx", "--target", "riscv", "-o", "build_riscv"),
        folder=folder,
    ).returncode == 0
    found = run(installed, "-m", "dovetail", "run", "build_riscv", folder=folder)
    assert found.returncode == 1 and "pip install 'dovetail[iss]'" in found.stderr and "Traceback" not in found.stderr


def test_the_version_is_the_wheels(installed: Path) -> None:
    version = run(installed, "-m", "dovetail", "--version", folder=installed.parents[2]).stdout.split()[-1]
    assert list(installed.parents[2].glob(f"dovetail-{version}-*.whl")), sys.version
