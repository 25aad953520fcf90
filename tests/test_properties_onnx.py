"""Random quantised ONNX models through the emitted C against ONNX Runtime's exact integer operators."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dovetail.targets import load_target
from property_batches import needs_compiler, run_batch
from random_onnx import (
    Make,
    added,
    as_integers,
    as_qdq,
    as_qlinear,
    averaged,
    convolution,
    joined,
    largest,
    made,
    product,
)
from test_properties_tflite import BATCH as BATCH_TFLITE
from test_properties_tflite import BATCHES as BATCHES_TFLITE
from test_properties_tflite import FAMILIES as FAMILIES_TFLITE

pytestmark = pytest.mark.oracles

pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle")

BATCH = 60
"""Cases that share a compilation."""

FAMILIES: Mapping[str, tuple[Make, int]] = {
    "ConvInteger": (made(convolution, as_integers), 3),
    "MatMulInteger": (made(product, as_integers), 1),
    "QLinearConv": (made(convolution, as_qlinear), 3),
    "QLinearMatMul": (made(product, as_qlinear), 1),
    "Conv QDQ": (made(convolution, as_qdq), 4),
    "MatMul QDQ": (made(product, as_qdq), 1),
    "MaxPool": (largest, 1),
    "QLinearAdd": (added, 1),
    "QLinearConcat": (joined, 1),
    "QLinearGlobalAveragePool": (averaged, 1),
}
"""Per kind of model how it is drawn, and how many batches are."""

BATCHES = [(name, batch) for name, (_, count) in FAMILIES.items() for batch in range(count)]


@needs_compiler
@pytest.mark.parametrize(("family", "batch"), BATCHES)
def test_equal(family: str, batch: int, tmp_path: Path) -> None:
    make, _ = FAMILIES[family]
    cases = [make(f"{family} {seed}") for seed in range(BATCH * batch, BATCH * (batch + 1))]
    outcome = run_batch(cases, load_target("riscv"), "host", tmp_path)
    print(outcome)
    assert outcome.compared == BATCH and not outcome.refused


def test_there_are_five_thousand_cases() -> None:
    """Every batch asserts that it compares all its cases, but for what TFLite's families list as refused."""
    counts = {
        "TFLite": sum(not FAMILIES_TFLITE[name].refusals for name, _ in BATCHES_TFLITE) * BATCH_TFLITE,
        "ONNX": len(BATCHES) * BATCH,
    }
    print(counts)
    assert sum(counts.values()) >= 5000


if __name__ == "__main__":  # one case again: python tests/test_properties_onnx.py "Conv QDQ 17"
    family, _, seed = sys.argv[1].rpartition(" ")
    with TemporaryDirectory() as scratch:
        print(run_batch([FAMILIES[family][0](sys.argv[1])], load_target("riscv"), "host", Path(scratch)))
