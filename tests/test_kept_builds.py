"""A second compilation of the same inputs writes the files of the first, and any other input is compiled anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dovetail.cli import kept
from dovetail.cli.main import main
from dovetail.files import keep_file
from dovetail.guests import zoo

TARGET = """
from dataclasses import replace
from dovetail.targets.riscv import TARGET as plain
from numbers_of_mine import STACK

TARGET = replace(plain, name="mine", core=replace(plain.core, stack=STACK))
"""
KEPT = "kept from the last time, as nothing has changed"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a target file with a module beside it, and pins."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "digits.onnx").write_bytes(zoo.build("digits"))
    (tmp_path / "mine.py").write_text(TARGET)
    (tmp_path / "numbers_of_mine.py").write_text("STACK = 4096\n")
    (tmp_path / "pins.toml").write_text("[pins]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compiled(*arguments: str) -> str:
    """What a process prints that compiles the model for the target."""
    command = [sys.executable, "-m", "dovetail", "compile", "digits.onnx", "-o", "build", "--force", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def longer(path: Path) -> Callable[[], None]:
    """Adds to a file."""
    return lambda: path.write_text(f"{path.read_text()}\n# more\n")


def test_the_second_compilation_writes_the_first_ones_files(place: Path) -> None:
    asked = ("--target", "mine.py", "--pins", "pins.toml")
    first = compiled(*asked)
    files = contents(place / "build")
    second = compiled(*asked)
    assert KEPT not in first and second == f"{first.rstrip()}; {KEPT}\n"
    assert contents(place / "build") == files
    assert KEPT not in compiled(*asked, "--anew") and contents(place / "build") == files


def test_what_changes_is_compiled_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model, the target file, what that imports, pins, options, and the folders of compilers."""
    asked = ("--target", "mine.py", "--pins", "pins.toml")
    compiled(*asked)
    changes = {
        "target": longer(place / "mine.py"),
        "module": lambda: (place / "numbers_of_mine.py").write_text("STACK = 8192\n"),
        "pins": longer(place / "pins.toml"),
        "model": lambda: (place / "digits.onnx").write_bytes(zoo.build("digits") + b"\x72\x00"),
    }
    for name, change in changes.items():
        assert KEPT in compiled(*asked), name
        change()
        assert KEPT not in compiled(*asked), name
    assert b"8192" in (place / "build/dovetail.json").read_bytes() + (place / "build/link.ld").read_bytes()
    assert KEPT not in compiled(*asked, "--optimize", "size")
    (place / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{place / 'bin'}")
    assert KEPT not in compiled(*asked)


def test_a_kept_build_that_is_damaged_is_made_again(place: Path) -> None:
    asked = ("--target", "riscv")
    compiled(*asked)
    (file,) = (place / "cache/builds").glob("*.msgpack")
    data = file.read_bytes()
    file.write_bytes(data[:-9] + b"x" * 9)
    assert KEPT not in compiled(*asked)
    assert file.read_bytes() == data and KEPT in compiled(*asked)


def test_a_kept_path_cannot_leave_the_build(place: Path) -> None:
    file = place / "cache/builds/a.msgpack"
    for name in ("../x", "/x", "a/../../x", ""):
        build = kept.KeptBuild({str(place / "mine.py"): kept._digest(place / "mine.py")}, {name: b""}, [], "")
        keep_file(file, msgspec.msgpack.encode(build))
        assert kept.find(file) is None
        keep_file(file, msgspec.msgpack.encode(msgspec.structs.replace(build, files={"x": b""})))
        assert kept.find(file) is not None


def test_checks_and_stages_are_not_kept(place: Path) -> None:
    for _ in range(2):
        assert KEPT not in compiled("--target", "riscv", "--save-stages", "stages")
    assert not (place / "cache/builds").exists()


def test_a_model_is_an_input_wherever_it_lies(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as below the folder that Python was installed in, as in containers."""
    assert Path(sys.prefix) not in kept._OF_SYSTEM and Path(sys.base_prefix) not in kept._OF_SYSTEM
    monkeypatch.setattr(kept, "_OF_SYSTEM", (place,))
    with kept.inputs_of(place / "digits.onnx") as inputs:
        (place / "mine.py").read_text()
    assert list(inputs) == [str(place / "digits.onnx")] and inputs[str(place / "digits.onnx")]


def test_a_file_that_changes_while_it_is_read_keeps_nothing(place: Path) -> None:
    with kept.inputs_of() as inputs:
        (place / "pins.toml").read_text()
        (place / "pins.toml").write_text("later")
        (place / "mine.py").read_text()
        (place / "written.txt").write_text("no input")
    assert inputs[str(place / "pins.toml")] == "" and inputs[str(place / "mine.py")]
    assert str(place / "written.txt") not in inputs
    kept.keep(place / "cache/builds/a.msgpack", inputs, place, [], "")
    assert not (place / "cache/builds").exists()


def test_the_oldest_give_way(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, builds = place / "some", place / "cache/builds"
    folder.mkdir()
    (folder / "data").write_bytes(bytes(5000))
    monkeypatch.setattr(kept, "MOST_BYTES", 96_000)
    for number in range(22):
        kept.keep(builds / f"{number}.msgpack", {"x": "y"}, folder, [], "")
        os.utime(builds / f"{number}.msgpack", (number, number))
    left = {int(path.stem) for path in builds.glob("*.msgpack")}
    assert left == set(range(22 - len(left), 22)) and 16 <= len(left) <= 19
    assert len(list(builds.iterdir())) == 2 * len(left), "no digest stays behind"


def test_a_build_that_another_compile_removes_meanwhile_is_no_error(place: Path) -> None:
    builds, folder = place / "cache" / "builds", place / "made"
    for one in (builds, folder):
        one.mkdir(parents=True)
    (folder / "a.c").write_text("int a;")
    (builds / "gone.msgpack").symlink_to(builds / "nothing")  # in the list of files, and not there when it is asked
    kept.keep(builds / "new.msgpack", {"x": "y"}, folder, (), "")
    assert (builds / "new.msgpack").is_file()


@pytest.mark.usefixtures("place")
def test_no_compiler_is_loaded_for_what_is_kept() -> None:
    """Which is why it takes a fraction of a second."""
    compiled("--target", "riscv")
    code = (
        "import sys; from dovetail.cli.main import main\n"
        "try: main(['compile', 'digits.onnx', '--target', 'riscv', '-o', 'build', '--force'])\n"
        "except SystemExit: print([name for name in ('numpy', 'onnx', 'dovetail.compile') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert KEPT in done.stdout and done.stdout.splitlines()[-1] == "[]"


def test_the_help_says_how_to_compile_anyway(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compile", "--help"])
    assert "--anew" in capsys.readouterr().out
