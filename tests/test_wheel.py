"""The package as a user without extras has it: a wheel in a fresh environment compiles for every target, or names the
extra it wants."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from dovetail.guests import zoo
from dovetail.targets import BUILT_IN
from quicker import once

REPOSITORY = Path(__file__).resolve().parents[1]

COMPILE_ALL = """
import contextlib, io, json, sys
from dovetail.cli.main import main
told = {}
for name in sys.argv[1:]:
    status, out, errors = 0, io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            main(["compile", "../wheel/digits.onnx", "--target", name, "-o", f"build_{name}"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    told[name] = status, errors.getvalue()
print(json.dumps(told))
"""


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as if nothing of the repository were known."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DOVETAIL"))}
    kept["DOVETAIL_CACHE"] = str(folder / "cache")
    return subprocess.run([str(word) for word in command], cwd=folder, env=kept, capture_output=True, text=True)


def install(folder: Path) -> None:
    """A new environment with the wheel and what it depends on, and no extra; the wheel and a model beside it."""
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


def environment(factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that `install` made."""
    return once(factory, "wheel", install) / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`environment` as a fixture."""
    return environment(tmp_path_factory)


def test_it_lies_where_it_was_installed(installed: Path) -> None:
    code = "import dovetail, sys; print(dovetail.__file__); print('exo' in sys.modules)"
    found = run(installed, "-c", code, folder=installed.parents[2])
    assert str(installed.parents[1]) in found.stdout and found.stdout.endswith("False\n")
    assert run(installed, "-c", "import unicorn", folder=installed.parents[2]).returncode != 0, "an extra is there"


@pytest.fixture(scope="module")
def compiled(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the model for each target, and `told.json`: the status of each `dovetail compile` and its errors."""

    def compile_all(folder: Path) -> None:
        found = run(installed, "-c", COMPILE_ALL, *BUILT_IN, folder=folder)
        assert found.returncode == 0, found.stderr
        (folder / "told.json").write_text(found.stdout)

    return once(tmp_path_factory, "wheel_builds", compile_all)


@pytest.mark.parametrize("target", BUILT_IN)
def test_every_target_compiles_or_names_the_extra(target: str, compiled: Path) -> None:
    status, errors = json.loads((compiled / "told.json").read_text())[target]
    if status == 0:
        assert (compiled / f"build_{target}" / "dovetail.json").is_file()
        return
    assert status == 1, errors
    assert re.search(r"pip install 'dovetail\[[a-z]+\]'", errors) and "Traceback" not in errors, errors


def test_what_simulates_names_its_extra(installed: Path, compiled: Path) -> None:
    found = run(installed, "-m", "dovetail", "run", "build_riscv", folder=compiled)
    assert found.returncode == 1 and "pip install 'dovetail[iss]'" in found.stderr and "Traceback" not in found.stderr


def test_the_version_is_the_wheels(installed: Path) -> None:
    version = run(installed, "-m", "dovetail", "--version", folder=installed.parents[2]).stdout.split()[-1]
    assert list(installed.parents[2].glob(f"dovetail-{version}-*.whl")), sys.version
