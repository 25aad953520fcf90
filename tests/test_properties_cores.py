"""Random TFLite models as firmware of each core, in the simulator, against TensorFlow Lite Micro."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from dovetail.targets import load_target
from firmware import require_cross_compiler
from property_batches import run_batch
from test_properties_tflite import make

pytestmark = pytest.mark.oracles

EVERY = (
    "chain",
    "chain",
    "convolution",
    "depthwise",
    "fully_connected",
    "pool",
    "arithmetic",
    "mean",
    "softmax",
    "function",
    "convolution_int4",
    "depthwise_int4",
    "convolution_int16",
    "depthwise_int16",
    "fully_connected_int16",
    "rescale_int16",
)
"""Families that run on plain cores; the others differ in movement alone."""


@pytest.mark.parametrize(
    ("target", "families", "each"),
    [
        ("riscv", EVERY, 6),
        ("cortex_m4", EVERY, 6),
        ("riscv_dot4", ("convolution", "fully_connected"), 2),
        ("riscv_xpulp", ("convolution", "fully_connected", "depthwise", "arithmetic"), 4),
        ("vexriscv_cfu", ("convolution", "fully_connected", "depthwise", "arithmetic"), 4),
    ],
)
def test_equal_in_firmware(target: str, families: tuple[str, ...], each: int, tmp_path: Path) -> None:
    machine = load_target(target)
    require_cross_compiler(machine.core.isa)
    if find_spec("unicorn") is None:
        pytest.skip("the simulator's core is not installed")
    cases = [make(family, each * at + seed) for at, family in enumerate(families, 1000) for seed in range(each)]
    outcome = run_batch(cases, machine, "iss", tmp_path)
    print(target, outcome)
    assert outcome.compared == len(cases)
