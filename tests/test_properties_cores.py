"""Random TFLite models as firmware of each core, in the simulator, against TensorFlow Lite Micro."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.targets import load_target
from firmware import require_cross_compiler
from property_batches import run_batch
from test_properties_tflite import make

SEEDS = range(5000, 5025)
"""Seeds the tests on the host leave out."""


@pytest.mark.parametrize(
    ("target", "families", "each"),
    [
        ("riscv", ("convolution", "depthwise", "fully_connected", "chain"), 25),
        ("cortex_m4", ("convolution", "depthwise", "fully_connected", "chain"), 25),
        ("riscv_dot4", ("convolution", "fully_connected"), 2),
    ],
)
def test_equal_in_firmware(target: str, families: tuple[str, ...], each: int, tmp_path: Path) -> None:
    machine = load_target(target)
    require_cross_compiler(machine.core.isa)
    pytest.importorskip("unicorn", reason="the simulator's core is not installed")
    cases = [make(family, seed) for family in families for seed in SEEDS[:each]]
    outcome = run_batch(cases, machine, "iss", tmp_path)
    print(target, outcome)
    assert outcome.compared == len(cases)
