"""Random quantised ONNX models through the emitted C against ONNX Runtime's exact integer operators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dovetail.targets import load_target
from property_batches import run_batch
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

pytest.importorskip("onnxruntime", reason="ONNX Runtime is the oracle")

BATCH = 60
"""Cases that share a compilation."""

FAMILIES: Mapping[str, tuple[Make, int]] = {
    "ConvInteger": (made(convolution, as_integers), 5),
    "MatMulInteger": (made(product, as_integers), 2),
    "QLinearConv": (made(convolution, as_qlinear), 5),
    "QLinearMatMul": (made(product, as_qlinear), 2),
    "Conv QDQ": (made(convolution, as_qdq), 6),
    "MatMul QDQ": (made(product, as_qdq), 2),
    "MaxPool": (largest, 1),
    "QLinearAdd": (added, 1),
    "QLinearConcat": (joined, 1),
    "QLinearGlobalAveragePool": (averaged, 1),
}
"""Per kind of model how it is drawn, and how many batches are."""

BATCHES = [(name, batch) for name, (_, count) in FAMILIES.items() for batch in range(count)]


@pytest.mark.parametrize(("family", "batch"), BATCHES)
def test_equal(family: str, batch: int, tmp_path: Path) -> None:
    make, _ = FAMILIES[family]
    cases = [make(f"{family} {seed}") for seed in range(BATCH * batch, BATCH * (batch + 1))]
    outcome = run_batch(cases, load_target("riscv"), "host", tmp_path)
    print(outcome)
    assert outcome.compared == BATCH and not outcome.refused
