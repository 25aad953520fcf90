"""Procedures kept between runs: the same as made anew, whatever has happened to the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.loops import Procedure, memory, procedure, stored, trace
from dovetail.loops.procedures import parsed, procedure_text

COPY = """
def copy(N: size, T: size, source: [i8][N] @ DRAM, target: [i8][T + N] @ SCRATCH):
    for k in seq(0, T + N):
        if k >= T:
            target[k] = source[k - T]
        else:
            target[k] = -1.0
"""
REGION = """
def region(H: size, W: size, x: [i8][H, W] @ DRAM, v: i32 @ DRAM, y: [i32][H, 2] @ DRAM):
    for h in seq(0, H):
        row: i8[W + 1] @ SCRATCH
        copy(W, 1, x[h, 0:W], row[0:W + 1])
        for i in seq(0, 2):
            y[h, i] = shift_right(most(row[0], v), 3.0) * (y[h, i] - (v - 2.0))
    for h in seq(0, H):
        row: i8[3 * (W - (H - 1)) + 3 * H] @ SCRATCH
        copy(W, 1, x[h, 0:W], row[1:W + 2])
"""
SCOPE = {"SCRATCH": memory("SCRATCH")}
FULL = {**SCOPE, "copy": procedure(COPY, SCOPE, instruction="copy")}
ISSUES = "\n".join(line for line in REGION.splitlines() if "for i" not in line and "y[h, i]" not in line)


class Maker:
    """Counts how often a procedure is made."""

    def __init__(self, text: str) -> None:
        self.text, self.count = text, 0

    def __call__(self) -> Procedure:
        self.count += 1
        return procedure(self.text, FULL)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.loops"))


def test_the_second_run_finds_what_the_first_has_made(tmp_path: Path) -> None:
    folder, make = tmp_path / "not" / "there", Maker(REGION)
    first, second = (stored("key", folder, make, FULL) for _ in range(2))
    assert make.count == 1 and len(files(folder)) == 1
    assert procedure_text(first) == procedure_text(second) == procedure_text(make())
    stored("another key", folder, make, FULL)
    assert make.count == 3 and len(files(folder)) == 2


def test_what_is_read_back_does_the_same(tmp_path: Path) -> None:
    make, sizes = Maker(ISSUES), {"H": 3, "W": 4}
    expected = trace(make(), sizes)
    assert len(expected) == 18
    for _ in range(2):
        assert trace(stored("key", tmp_path, make, FULL), sizes) == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-20],
        lambda raw: raw.replace(b"seq(0, H)", b"seq(1, H)"),
        lambda raw: raw[10:],
        lambda raw: b"\xff\xfe" + raw,
        lambda raw: raw + b" ",
    ],
    ids=["empty", "truncated", "changed", "headless", "binary", "longer"],
)
def test_a_damaged_file_is_written_anew(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    make = Maker(REGION)
    stored("key", tmp_path, make, FULL)
    (path,) = files(tmp_path)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert procedure_text(stored("key", tmp_path, make, FULL)) == procedure_text(make())
    assert make.count == 3 and files(tmp_path) == [path] and path.read_bytes() == good


@pytest.mark.parametrize("instead", ["DRAM.mro()", "print", "unknown", "(lambda: DRAM)()", "'DRAM'"])
def test_a_file_that_is_no_procedure_is_not_used(tmp_path: Path, instead: str) -> None:
    make = Maker(REGION)
    stored("key", tmp_path, make, FULL)
    (path,) = files(tmp_path)
    text = path.read_text().partition("\n")[2].replace("@SCRATCH", f"@ {instead}", 1)
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    with pytest.raises(Exception):  # noqa: B017  # ours or Exo's
        parsed(text, FULL)
    assert procedure_text(stored("key", tmp_path, make, FULL)) == procedure_text(make())
    assert make.count == 3


def test_what_does_not_survive_its_text_is_not_kept(tmp_path: Path) -> None:
    """An argument with the name of an instruction hides it when the text is read."""
    text = REGION.replace("copy(W", "load(W")
    text = text.replace("v: i32", "copy: i32").replace("v)", "copy)").replace("(v ", "(copy ")
    scope = {**FULL, "load": FULL["copy"]}
    for _ in range(2):
        found = stored("key", tmp_path, lambda: procedure(text, scope), FULL)
        assert procedure_text(found) == procedure_text(procedure(text, scope))
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    make = Maker(REGION)
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):
        assert procedure_text(stored("key", tmp_path / "file", make, FULL)) == procedure_text(procedure(REGION, FULL))
    assert make.count == 2
