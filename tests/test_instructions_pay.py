"""A core's own instructions are used in the layers where they pay, and both figures are said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import dovetail
from conftest import shared_dir
from core_kernel_cases import Maker
from dovetail.guests.calibrate import measure
from dovetail.ir.graph import Graph
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.types import DType
from dovetail.kernels import compared, core_traits, cycles, generate, turns, unused_instructions
from dovetail.kernels.scheduled.knobs import operand_instructions
from dovetail.target import Target, calibrated
from dovetail.target.costs import kernel_cycles
from dovetail.targets import load_target
from dovetail.targets.riscv_dot4 import DOT4
from firmware import require_chip
from test_claims import report_of
from test_small_flash import digits

DOT = load_target("riscv_dot4")
BYTES = DOT4.declarations.replace("__builtin_assume_aligned(a, 4)", "a").replace("__builtin_assume_aligned(b, 4)", "b")
"""The same instruction with operands that begin anywhere."""
HALVES = """\
static inline void dot4(int32_t *acc, const int8_t *a, const int8_t *b)
{
#if defined(DOVETAIL_HOST)
    *acc += a[0] * b[0] + a[1] * b[1];
#else
    int32_t left = ((int32_t)a[1] << 16) | (uint16_t)a[0]; /* not a[2] << 8 */
    int32_t right = ((int32_t)b[1] << 16) | (uint16_t)b[0];
    __asm__("dot2 %0, %1, %2" : "+r"(*acc) : "r"(left), "r"(right));
#endif
}
"""


def conv(rows: int, channels: int, outputs: int, kernel: int) -> Graph:
    """A requantised convolution, or a dense layer where there are no rows."""
    maker = Maker(f"{rows} {channels} {outputs} {kernel}")
    if not rows:
        x = maker.input((1, channels), DType.INT8)
        made = maker.add(FullyConnected(0, 0), x, maker.constant((outputs, channels), DType.INT8))
    else:
        x = maker.input((1, rows + kernel, rows + kernel, channels), DType.INT8)
        weights = maker.constant((outputs, kernel, kernel, channels), DType.INT8)
        made = maker.add(Conv2d((1, 1), (1, 1), 0, 0), x, weights)
    return maker.case(maker.clip(maker.requantize(made))).graph


def with_rates(target: Target, **rates: float) -> Target:
    """The target with other cycles of parts of the loops around its instructions."""
    own = {f"instruction.{part}": rate for part, rate in rates.items()}
    return replace(target, core=replace(target.core, kernels={**(target.core.kernels or {}), **own}))


@pytest.mark.parametrize(
    ("declarations", "alignment", "count"),
    [(DOT4.declarations, 4, 1), (BYTES, 4, 1), (BYTES, 1, 10), (HALVES, 1, 6), ("", 1, 1)],
)
def test_what_brings_an_operand_is_counted(declarations: str, alignment: int, count: int) -> None:
    """A word in one load; four bytes as loads, shifts and ors; two bytes widened."""
    assert operand_instructions(replace(DOT4, declarations=declarations, alignment=alignment)) == count


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3]), st.floats(0, 40))
def test_the_cheaper_kernel_counts(rows: int, channels: int, outputs: int, kernel: int, product: float) -> None:
    graph, core = conv(rows, channels, outputs, kernel), core_traits(with_rates(DOT, product=product).core)
    own, plain = compared(graph, core)
    is_own = any(part.startswith("instruction.") for part in turns(graph, core))
    assert own and plain and round(cycles(graph, core)) == (own if is_own else plain)
    assert is_own == (own <= 1.05 * plain), "beside plain kernels of another core"
    both = replace(core, plain={**(core.plain or {}), **(core.rates or {})})
    both = replace(both, rates=both.plain)
    own, plain = compared(graph, both)
    assert round(cycles(graph, both)) == min(own, plain), "where both were measured"
    assert is_own == any(part.startswith("instruction.") for part in turns(graph, core, {"pixels": 2}))


def test_wrong_rates_leave_the_instruction_unused() -> None:
    """And what is written is the core's plain kernel, to the letter."""
    graph, dear = conv(6, 8, 8, 3), core_traits(with_rates(DOT, product=100.0).core)
    (sentence,) = unused_instructions(graph, dear)
    own, plain = compared(graph, dear)
    assert sentence == f"dot4: {own:,} cycles, the core's plain kernel {plain:,}: the plain kernel is taken"
    assert generate(graph, "kernel", dear).source == generate(graph, "kernel", replace(dear, instructions=())).source
    always = replace(dear, plain=None)
    assert compared(graph, always) == (0, 0) and any("instruction" in part for part in turns(graph, always))


def test_instructions_nobody_measured_are_counted() -> None:
    """As a bundled core's, by what brings an operand."""
    unknown = replace(DOT.core, kernels=None)
    ways = (DOT4, replace(DOT4, declarations=BYTES, alignment=1))
    cores = [core_traits(replace(unknown, instructions=(instruction,))) for instruction in ways]
    (words, plain), (single, same) = (compared(conv(0, 640, 128, 1), core) for core in cores)
    assert 2 * words < single < plain == same
    measured = {**kernel_cycles("rv32imc"), "instruction.product": 1.0}
    assert core_traits(replace(unknown, kernels=measured)).plain == measured, "plain kernels were measured too"


def mac2() -> Target:
    """A stranger's port with an instruction that loses in dense layers."""
    return load_target(str(shared_dir() / "faults" / "ports" / "mac2" / "mac2.py"))


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_mac2_is_never_slower_than_without(
    is_calibrated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_chip()
    pytest.importorskip("exo", reason="schedules need exo-lang")
    target, file = mac2(), tmp_path / "mac2.cycles.json"
    plain = replace(target, core=replace(target.core, instructions=()))
    if is_calibrated:
        monkeypatch.setattr(measure, "_SHAPES", measure._SHAPES[1:9])
        assert dovetail("calibrate", shared_dir() / "faults" / "ports" / "mac2" / "mac2.py", "-o", file) == 0
        target = calibrated(target, file)
        assert target.core.kernels and target.core.kernels.keys() >= kernel_cycles("rv32imc").keys()
    for model, pays in ((shared_dir() / "models/mlperf_tiny/ad_autoencoder_int8.tflite", 0), (digits(tmp_path), 2)):
        ours, without = report_of(model, target), report_of(model, plain)
        assert (ours.cycles["total"] or 0) <= (without.cycles["total"] or 0)
        figures = [layer.kernels for layer in ours.layers if layer.kernels]
        assert sum(one["own_instructions"] <= one["plain"] for one in figures) >= pays and figures
        for layer, alone in zip(ours.layers, without.layers, strict=True):
            taken, least = layer.cycles or 0, alone.cycles or 0
            assert taken <= 1.05 * least, f"{layer.name} takes {taken:,} cycles, without the instruction {least:,}"


def test_both_figures_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    model = shared_dir() / "models/mlperf_tiny/ad_autoencoder_int8.tflite"
    port = shared_dir() / "faults" / "ports" / "mac2" / "mac2.py"
    assert dovetail("explain", model, "--target", port, "--json") == 0
    (layer,) = [one for one in json.loads(capsys.readouterr().out)["layers"] if one["name"] == "dense_1"]
    assert dovetail("explain", model, "--target", port) == 0
    own, plain = layer["kernels"]["own_instructions"], layer["kernels"]["plain"]
    sentence = f"mac2: {own:,} cycles, the core's plain kernel {plain:,}: the plain kernel is taken"
    assert plain < own and layer["instructions_not_used"] == [sentence]
    assert sentence in " ".join(capsys.readouterr().out.replace("│", " ").split())
