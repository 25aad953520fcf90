"""What a command loads: most of the time of a small compile is imports, so their number is held."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from oracles import network_bytes

LATE = {"elftools", "flatbuffers", "google", "onnx", "onnxruntime", "rich", "scipy", "tflite", "yaml"}
"""Packages that are for other formats, tables or checks."""


def loaded(*arguments: str | Path) -> Counter[str]:
    """Modules by package after a command."""
    code = (
        "import sys; from dovetail.cli.main import main\n"
        f"try: main({[str(one) for one in arguments]!r})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Counter(name.partition(".")[0] for name in done.stdout.splitlines()[-1].split())


def test_a_compile_loads_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "kws.tflite"
    model.write_bytes(network_bytes("kws_dscnn"))
    found = loaded("compile", model, "--target", "riscv", "-o", tmp_path / "build")
    assert not LATE & found.keys()
    assert found["dovetail"] <= 242


def test_help_loads_no_stage() -> None:
    found = loaded("compile", "--help")
    assert not (LATE | {"numpy"}) & found.keys()
    assert found["dovetail"] <= 18
