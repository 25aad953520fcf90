"""The cache: whatever changes in it is noticed and made anew, it is the user's alone, and many may use it at once."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import dovetail, refused
from dovetail import files
from dovetail.arrays import seeded_inputs
from dovetail.codegen.emit.project import Project, write_project
from dovetail.codegen.manifest import MANIFEST
from dovetail.errors import DovetailError
from dovetail.folders import write_files
from dovetail.run import open_build, run_build
from firmware import require_chip

pytestmark = pytest.mark.usefixtures("compiler_itself")


def flip(path: Path, generator: random.Random) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(bytes(data))


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Of the content, or of the digest beside it."""
    path, generator = tmp_path / "entry", random.Random(0)
    for turn in range(1000):
        data = generator.randbytes(generator.randrange(1, 300))
        files.keep_file(path, data)
        assert files.kept_file(path) == data and files.is_sealed(path)
        flip(tmp_path / ("entry" + files.SEAL) if turn % 4 == 0 else path, generator)
        assert files.kept_file(path) is None and not files.is_sealed(path)
    path.unlink()
    assert files.kept_file(path) is None


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network for a core whose loops are scheduled."""
    folder = tmp_path_factory.mktemp("cache")
    assert dovetail("zoo", "digits", "-o", folder / "digits.onnx") == 0
    assert dovetail("compile", folder / "digits.onnx", "--target", "riscv_dot4", "-o", folder / "build") == 0
    return folder / "build"


@pytest.mark.parametrize("simulator", ["iss", "host"])
def test_a_damaged_cache_heals(simulator: str, build: Path, tmp_path: Path) -> None:
    """Objects, libraries and firmware are executed: a damaged one is made again, and the run is as before."""
    require_chip()
    opened, generator = open_build(build), random.Random(simulator)
    inputs = [seeded_inputs(opened.manifest.inputs)]

    def run() -> list[np.ndarray]:
        return list(run_build(opened, simulator, inputs, cache=tmp_path).outputs[0].values())

    expected = run()
    entries = [path for path in sorted((tmp_path / "objects").rglob("*")) if path.is_file()]
    good = {path: path.read_bytes() for path in entries}
    assert {path.suffix for path in entries} >= {".o", files.SEAL}
    for _ in range(6):
        flip(generator.choice(entries), generator)
        assert all(np.array_equal(one, other) for one, other in zip(run(), expected, strict=True))
    for path in entries:  # all at once
        flip(path, generator)
    assert all(np.array_equal(one, other) for one, other in zip(run(), expected, strict=True))
    assert {path: path.read_bytes() for path in entries} == good


def test_scheduled_loops_heal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Path) -> None:
    pytest.importorskip("exo", reason="schedules are made with exo (dovetail[loops])")
    from dovetail.kernels.scheduled import store

    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    made = store.Loops((store.CFunction("f", ("x",), ("x[0] = 1;",)),), (), ())
    assert store.kept_loops("a layer that is not", lambda: made) == made
    (path,) = (tmp_path / "loops").glob("*.json")
    path.write_text(path.read_text().replace("x[0] = 1;", "x[0] = 2;"))
    assert store.kept_loops("a layer that is not", lambda: made) == made
    assert "x[0] = 1;" in path.read_text()


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX")
def test_it_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "deep" / "cache"))
    assert files.default_cache().stat().st_mode & 0o777 == 0o700
    (tmp_path / "deep" / "cache").chmod(0o777)
    with pytest.raises(DovetailError, match=r"any user may write to .*deep/cache"):
        files.default_cache()
    (tmp_path / "deep" / "cache").chmod(0o755)
    (tmp_path / "deep").chmod(0o777)
    with pytest.raises(DovetailError, match=r"any user may write to .*deep, "):
        files.default_cache()
    (tmp_path / "deep").chmod(0o1777)  # where each may take away only what is his own
    assert files.default_cache() == tmp_path / "deep" / "cache"


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid(), reason="only the administrator gives files away")
@pytest.mark.parametrize("place", ["deep/cache", "deep"])
def test_that_of_another_user_is_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "deep" / "cache"))
    files.default_cache().chmod(0o755)
    os.chown(tmp_path / place, 4242, 4242)
    with pytest.raises(DovetailError, match=rf"{place} belongs to another user \(number 4242\)"):
        files.default_cache()


@pytest.mark.parametrize("fault", ["full", "file"])
def test_a_cache_that_cannot_be_written_only_costs_time(
    fault: str, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("DOVETAIL_CACHE", str(cache))
    if fault == "full":
        cache.mkdir()
        usage = shutil.disk_usage(tmp_path)._replace(free=4096)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    else:
        cache.touch()
    assert dovetail("run", build) == 0
    assert capsys.readouterr().err.count("nothing is kept in the cache") == 1


def test_many_compile_and_build_at_once(build: Path, tmp_path: Path) -> None:
    """Three processes with one empty cache, for a core whose loops are scheduled: equal bytes, nothing left behind.
    `scripts/kills.py --together 50` is the same with more."""
    model = build.parent / "digits.onnx"
    environment = {**os.environ, "DOVETAIL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "dovetail", "compile", str(model), "--target", "riscv_dot4", "-o"]
    started = [
        subprocess.Popen([*command, str(tmp_path / f"build_{number}")], env=environment, stdout=subprocess.DEVNULL)
        for number in range(3)
    ]
    assert [process.wait(300) for process in started] == [0] * 3
    contents = []
    for number in range(3):
        folder = tmp_path / f"build_{number}"
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        contents.append({str(path.relative_to(folder)): path.read_bytes() for path in paths})
    assert all(content == contents[0] for content in contents)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def failing(last: int) -> Callable[[Path, Path], None]:
    """A rename that fails at one of its turns."""
    moves, made = os.rename, list[Path]()

    def rename(source: Path, place: Path) -> None:
        made.append(place)
        if len(made) == last:
            raise OSError(28, "No space left on device")
        moves(source, place)

    return rename


def test_a_folder_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails on the way, the old one or the new one is whole; a link is not replaced, nor what it leads to."""
    project, folder = Project({MANIFEST: "{}", "a/b.c": "new"}, (), ()), tmp_path / "build"
    old = {MANIFEST: b"{}", "x.c": b"old"}
    elsewhere = tmp_path / "elsewhere"
    write_files(old, elsewhere)
    for place in (elsewhere, tmp_path / "nowhere"):
        folder.symlink_to(place)
        with pytest.raises(DovetailError, match=f"build: this is a link to {place}, and is not replaced"):
            write_project(project, folder, replace=True)
        assert folder.is_symlink() and (elsewhere / "x.c").read_bytes() == b"old" and not place.is_symlink()
        folder.unlink()
    write_files(old, folder, replace=True)
    for last in (1, 2):
        monkeypatch.setattr("dovetail.folders.os.rename", failing(last))
        with pytest.raises(DovetailError, match="No space left"):
            write_project(project, folder, replace=True)
        monkeypatch.undo()
        assert (folder / "x.c").read_bytes() == b"old", "the old one is there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "elsewhere"]


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary folders and files; not what a living one holds, nor what only looks alike."""
    pytest.importorskip("fcntl", reason="nothing is locked here")
    monkeypatch.setattr("dovetail.files._NEW_SECONDS", 0)
    code = (
        "import sys, time; from pathlib import Path; from dovetail.files import TemporaryFolder\n"
        "one = TemporaryFolder(Path(sys.argv[1])); (Path(one.name) / 'file').touch(); print(one.name, flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    held = Path(child.stdout.readline().strip())
    others = [".dovetail-tmp-notes", ".dovetail-tmp-1234567", "dovetail-tmp-12345678.c", ".b.12345678"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".dovetail-tmp-12345678").touch()
    write_files({"a.c": b""}, tmp_path / "first")
    assert (held / "file").is_file() and not (tmp_path / ".dovetail-tmp-12345678").exists()
    child.kill()
    child.wait()
    write_files({"a.c": b""}, tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["first", "second", *others])


@pytest.mark.parametrize("place", ["dovetail.prove.load_graph", "dovetail.run.firmware"])
def test_a_build_that_is_replaced_while_it_is_read_is_said(
    place: str, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_chip()
    shutil.copytree(build, tmp_path / "build")
    assert dovetail("compile", build.parent / "digits.onnx", "-t", "riscv", "-o", tmp_path / "other") == 0
    module, _, name = place.rpartition(".")
    read = getattr(sys.modules[module], name)

    def replaced(*words: object, **named: object) -> object:
        shutil.rmtree(tmp_path / "build")
        shutil.copytree(tmp_path / "other", tmp_path / "build")
        return read(*words, **named)

    monkeypatch.setattr(place, replaced)
    assert "another build took its place" in refused(capsys, "run", tmp_path / "build")
