"""What a command loads: most of the time of a small compile is imports, so their number is held."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from oracles import network_bytes

LATE = {"onnxruntime", "rich", "scipy", "yaml"}
"""Packages that are for tables or checks."""
READERS = {"elftools", "flatbuffers", "google", "onnx", "tflite"}
"""Packages that read and write files."""


def loaded(*arguments: str | Path) -> list[str]:
    """The modules after a command."""
    code = (
        "import sys; from dovetail.cli.main import main\n"
        f"try: main({[str(one) for one in arguments]!r})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


def packages(modules: list[str]) -> Counter[str]:
    """Modules by package."""
    return Counter(name.partition(".")[0] for name in modules)


@pytest.mark.parametrize(("target", "most"), [("riscv", 216), ("ne16", 235)])
def test_a_compile_loads_what_it_needs(target: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "kws.tflite"
    model.write_bytes(network_bytes("kws_dscnn"))
    found = loaded("compile", model, "--target", target, "-o", tmp_path / "build")
    assert not LATE & packages(found).keys()
    assert not [name for name in found if name.startswith("dovetail.guests")], "only models with custom operators"
    assert packages(found)["dovetail"] <= most


def test_help_loads_no_stage() -> None:
    found = packages(loaded("compile", "--help"))
    assert not (LATE | READERS | {"numpy"}) & found.keys()
    assert found["dovetail"] <= 18
