"""Bytes of code and instructions per multiply-accumulate of the MLPerf Tiny networks, made for speed and for size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.ir.graph import evaluate
from dovetail.kernels import Optimize
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from firmware import require_chip
from test_end_to_end import network_file

pytestmark = pytest.mark.oracles

LIMITS = {
    ("ic_resnet8", Optimize.SPEED): (12 * 1024, 2.92),
    ("kws_dscnn", Optimize.SPEED): (5 * 1024, 3.2),
    ("vww_mobilenetv1", Optimize.SPEED): (17 * 1024, 3.3),
    ("ad_autoencoder", Optimize.SPEED): (4 * 1024, 3.3),
    ("ic_resnet8", Optimize.SIZE): (5 * 1024, 5.0),
    ("kws_dscnn", Optimize.SIZE): (5 * 1024, 7.0),
    ("vww_mobilenetv1", Optimize.SIZE): (5 * 1024, 7.0),
    ("ad_autoencoder", Optimize.SIZE): (5 * 1024, 5.0),
}
"""Network and what its code is made for -> most bytes of .text, and most instructions per multiply-accumulate, RV32."""


@pytest.mark.parametrize(("name", "optimize"), list(LIMITS))
def test_code_and_instructions_are_within_limits(
    name: str, optimize: Optimize, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    require_chip()
    compiled = compile_model(network_file(name), load_target("riscv"), Options(optimize=optimize, keep_dead=True))
    write_project(compiled.project, tmp_path / "build")
    given = sample_inputs(compiled.graph)
    result = run_build(open_build(tmp_path / "build"), "iss", [given])
    wanted = evaluate(compiled.graph, given)
    assert all(np.array_equal(result.outputs[0][value], wanted[value]) for value in compiled.graph.outputs)
    instructions, text = result.simulation.inferences[0].instructions, result.sizes["text"]
    assert instructions is not None
    per_mac = instructions / sum(region.macs for region in compiled.regions)
    record_property("text", text)
    record_property("instructions_per_mac", round(per_mac, 3))
    print(f"{name:16} {optimize.value:6} {text:6} bytes of text  {per_mac:.2f} instructions per MAC")
    most_text, most_instructions = LIMITS[name, optimize]
    assert text <= most_text
    assert per_mac <= most_instructions


def test_size_is_small_on_every_core(tmp_path: Path) -> None:
    """What the core computes beside an engine is small too, and exact."""
    require_chip()
    for target in ("cortex_m4", "ne16", "vta"):
        texts = []
        for optimize in Optimize:
            compiled = compile_model(network_file("kws_dscnn"), load_target(target), Options(optimize=optimize))
            folder = tmp_path / f"{target}_{optimize.value}"
            write_project(compiled.project, folder)
            given = sample_inputs(compiled.graph)
            result = run_build(open_build(folder), "iss", [given])
            wanted = evaluate(compiled.graph, given)
            assert all(np.array_equal(result.outputs[0][value], wanted[value]) for value in compiled.graph.outputs)
            texts.append(result.sizes["text"])
        print(f"{target}: {texts[0]} bytes of text for speed, {texts[1]} for size")
        assert texts[1] < texts[0]
