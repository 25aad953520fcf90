"""The emitted C of random builds has no warning under many flags: a slice of scripts/c_flags.py."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("tflite_micro", reason="TensorFlow Lite Micro is an oracle")
pytest.importorskip("onnxruntime", reason="ONNX Runtime is an oracle")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import c_flags


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_no_warning_is_left(tmp_path: Path) -> None:
    ways = (("gcc", "-O3"), (*c_flags.CLANG, "-O1", "-target", "x86-linux-musl"))
    made, kinds = c_flags.found_in(20, 3, ways)
    assert made == 3 and not kinds
    wrong = tmp_path / "wrong.c"
    wrong.write_text("int f(long long x);\nint f(long long x) { int y = 1; return x; }\n")
    for way in ways:
        said = "\n".join(c_flags.said_of(way, wrong, ()))
        assert "-Wconversion" in said or "-Wshorten-64-to-32" in said
