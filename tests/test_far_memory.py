"""Firmware in memory at 0x80000000, where Rocket, BOOM and their kind have theirs, floats included."""

from __future__ import annotations

from pathlib import Path

import pytest

import dovetail
from dovetail.guests import zoo
from firmware import require_chip

TARGET = """
from dataclasses import replace
import dovetail.target as dt
from dovetail.targets.riscv import RV64, TARGET as RV32

DRAM = dt.Memory("dram", base=0x80000000, size=4 << 20)
TARGET = replace({core}, name="far", memories=(DRAM,), code="dram", values="dram")
"""


@pytest.mark.parametrize("core", ["RV32", "RV64"])
def test_floats_far_away(core: str, tmp_path: Path) -> None:
    """The digits in float32, soft on these cores: their functions must reach their constants wherever they lie."""
    require_chip()
    (tmp_path / "far.py").write_text(TARGET.format(core=core))
    (tmp_path / "digits.onnx").write_bytes(zoo.build_float("digits"))
    build = dovetail.compile(tmp_path / "digits.onnx", str(tmp_path / "far.py"), allow_float=True)
    run = build.run()
    assert run.proof and build.target.memory("dram").base == 0x80000000


MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
NETWORKS = (
    *(f"mlperf_tiny/{name}_int8.tflite" for name in ("ad_autoencoder", "ic_resnet8", "kws_dscnn", "vww_mobilenetv1")),
    *("field/mnist_lstm_int8.tflite", "field/keyword_svdf_16x8.tflite", "field/person_detect.tflite"),
    "field/qdq_mlp.onnx",
)


@pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not here")
@pytest.mark.parametrize("core", ["RV32", "RV64"])
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_far_away(core: str, network: str, tmp_path: Path) -> None:
    """Published and field networks, with float ends where a file has them."""
    require_chip()
    (tmp_path / "far.py").write_text(TARGET.format(core=core))
    assert dovetail.compile(MODELS / network, str(tmp_path / "far.py")).run().proof
