"""What a target declares is compared with what the simulated chip takes, and can be measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import dovetail
from conftest import shared_dir
from dovetail.arrays import built, seeded_inputs
from dovetail.claims import Claim
from dovetail.compile import compile_model, reserved
from dovetail.errors import TargetError
from dovetail.guests.calibrate.measure import non_negative
from dovetail.guests.check.cases import Limits
from dovetail.guests.check.suite import Order, check
from dovetail.options import Options
from dovetail.report import Report, make_report, totals
from dovetail.run import run_build
from dovetail.target import Target, calibrated
from dovetail.target.costs import kernel_cycles
from dovetail.target.registry import load_target
from firmware import require_chip
from test_small_flash import digits

LIBRARY = Path(__file__).parent / "vendor_library" / "__init__.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network digits."""
    require_chip()
    return digits(tmp_path_factory.mktemp("model"))


def report_of(model: Path, target: Target, runs_on: Target | None = None, **options: Any) -> Report:
    """The report of a network compiled for a target, and run on it or on another chip."""
    with built(compile_model(model, target, Options(**options)), runs_on or target) as build:
        return make_report(run_build(build, "iss", [seeded_inputs(build.manifest.inputs)]))


def off(report: Report) -> dict[str, list[Claim]]:
    """The claims that are off, by unit."""
    found: dict[str, list[Claim]] = {}
    for claim in report.claims:
        if claim.is_off:
            found.setdefault(claim.unit, []).append(claim)
    assert sum(line.startswith("claim ") for line in totals(report)) == sum(map(len, found.values()))
    return found


def engine_cycles(target: Target, change: Callable[[int], int]) -> Target:
    """The target with other cycles of its offloads."""

    def other(offload: Any) -> Any:
        return replace(offload, cycles=lambda match: change(offload.cycles(match)))

    engine = target.engines[0]
    return replace(target, engines=(replace(engine, offloads=tuple(map(other, engine.offloads))),))


@pytest.mark.parametrize("name", ["ne16", "kestrel", "macarray", "vta", "maeri", "diana", "spinnaker2", "riscv_xpulp"])
def test_claims_of_bundled_targets_are_true(name: str, model: Path) -> None:
    report = report_of(model, load_target(name))
    engines = {engine.name for engine in load_target(name).engines}
    assert report.claims and {claim.unit for claim in report.claims} <= {"core", *engines, *report.cycles}
    assert off(report).keys() <= {"core"}, "engines and DMAs are as declared"
    losses = [claim.taken / claim.instead for claim in report.claims if claim.is_loss]
    assert all(loss < 1.33 for loss in losses), "the core gets what it looks a third faster for"


def test_a_true_claim_of_a_slow_engine_is_named(model: Path) -> None:
    """Beside a core that is said to be a thousand times as fast, a port that insists on its engine loses, though that
    takes what it says."""
    target = load_target("macarray")
    fast = {part: rate / 1000 for part, rate in kernel_cycles("rv32imc").items()}
    engine, core = target.engines[0], replace(target.core, kernels=fast)
    engine = replace(engine, offloads=tuple(replace(one, prefer=True) for one in engine.offloads))
    report = report_of(model, replace(target, core=core, engines=(engine,)), target)
    losses = [claim for claim in report.claims if claim.is_loss and claim.unit == "macarray"]
    assert losses and not any(claim.is_off for claim in losses)
    lines = [line for line in totals(report) if line.startswith("loss ")]
    assert {f"{'loss':13} {claim.sentence}" for claim in losses} <= set(lines)
    assert all(f"; the core takes {claim.instead}" in claim.sentence for claim in losses)


def test_wrong_cycles_of_an_engine_are_found(model: Path) -> None:
    target = load_target("ne16")
    claims = off(report_of(model, engine_cycles(target, lambda cycles: cycles // 2), target))
    assert all(abs(2 * one.declared - one.taken) <= 9 for one in claims["ne16"])
    assert claims["ne16"][0].sentence.startswith(f"ne16 {claims['ne16'][0].layer}: declared ")


def test_a_wrong_dma_is_found(model: Path) -> None:
    target = load_target("ne16")
    assert target.dma is not None
    claims = off(report_of(model, replace(target, dma=replace(target.dma, setup_cycles=1000)), target))
    assert target.dma.name in claims and "ne16" not in claims


def test_wrong_rates_of_core_kernels_are_found(model: Path) -> None:
    target = load_target("riscv_dot4")
    kernels = {part: 2 * rate for part, rate in (target.core.kernels or {}).items()}
    report = report_of(model, replace(target, core=replace(target.core, kernels=kernels)))
    wrong = {claim.layer for claim in off(report)["core"]}
    assert {"conv_1", "conv_2", "conv_4", "conv_6"} <= wrong and all(one.instead == 0 for one in report.claims)


def test_waits_that_are_not_estimated_are_said(model: Path) -> None:
    notes = report_of(model, load_target("stm32l4r5")).notes
    assert any("constants in flash" in note.text and "instructions" in note.text for note in notes)


def test_small_kernels_are_not_compared(model: Path) -> None:
    report = report_of(model, load_target("riscv"), optimize="size")
    assert report.claims == ()
    assert any("are of fast ones" in note.text for note in report.notes)


def test_a_device_that_does_not_account_for_its_work_is_named(model: Path) -> None:
    target = load_target("macarray")
    assert off(report_of(model, target)) == {}
    engine = target.engines[0]
    seeded = tuple(
        replace(one, commands=lambda match, operands, own=one.commands: [
            replace(command, jobs=2) for command in own(match, operands)
        ])
        for one in engine.offloads
    )  # fmt: skip
    report = report_of(model, replace(target, engines=(replace(engine, offloads=seeded),)), target)
    assert engine.name not in {claim.unit for claim in report.claims}
    assert any(engine.name in note.text and "nor compared with those declared" in note.text for note in report.notes)


def test_check_finds_a_claim(tmp_path: Path) -> None:
    require_chip()
    order = Order(Limits(8_000, 1_500), ("iss",), ("dense without bias",))
    target = load_target("macarray")
    assert check(target, order).findings == []
    (finding,) = check(engine_cycles(target, lambda cycles: 2 * cycles), order).findings
    assert "are not those declared" in finding.title and "Offload.cycles" in finding.title


def test_a_library_is_measured_and_the_file_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stand-in of a library declares a cycle for each product and takes more."""
    require_chip()
    file = tmp_path / "vl.cycles.json"
    assert dovetail("calibrate", LIBRARY, "--only", "vl_dense", "-o", file) == 0
    said = capsys.readouterr().out
    assert said.startswith("vl vl_dense: ") and "dt.calibrated(TARGET" in said
    (call,) = json.loads(file.read_text())["calls"]
    assert call["offload"] == "vl_dense" and 1 < call["rates"]["mac"] + call["rates"]["constant"] < 30
    target = load_target(str(LIBRARY))
    order = Order(Limits(8_000, 1_500), (), ("vl_dense",))
    assert len(check(target, order).findings) == 1
    assert check(calibrated(target, file), order).findings == []


def test_acme_is_not_taken_after_calibration(tmp_path: Path) -> None:
    """A stranger's port, unedited: 1.0 times the core's cycles instead of 3.75 times."""
    require_chip()
    port = shared_dir() / "faults" / "ports" / "acme" / "acme.py"
    model = shared_dir() / "models" / "mlperf_tiny" / "ic_resnet8_f32.tflite"
    data, network, file = tmp_path / "data.npz", tmp_path / "ic.onnx", tmp_path / "acme.cycles.json"
    np.savez(data, in_0=np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.float32))
    assert dovetail("quantize", model, "--data", data, "--target", port, "-o", network) == 0
    target = load_target(str(port))
    before = report_of(network, target)
    claims = off(before)["acme"]
    taken = [layer.name for layer in before.layers if layer.engine == "acme"]
    assert [claim.layer for claim in claims] == taken and len(taken) >= 6
    assert all(claim.sentence.count("M") == 3 for claim in claims)
    assert sum(claim.taken for claim in claims) > 3 * sum(claim.instead for claim in claims)
    (note,) = [note.text for note in before.notes if "beside the plan" in note.text]
    assert "take 98,576 bytes" in note and note.endswith("of which Engine.holds says 0"), (
        "its pool is in no plan, unsaid"
    )
    telling = replace(target, engines=tuple(replace(engine, holds=96 << 10) for engine in target.engines))
    told = report_of(network, telling)
    assert not any("beside the plan" in note.text for note in told.notes) and told.cycles == before.cycles
    graph = compile_model(network, target, Options()).graph
    assert reserved(graph, telling)[target.values] == reserved(graph, target)[target.values] + (96 << 10)
    assert dovetail("calibrate", port, "-o", file) == 0
    after = report_of(network, target, calibration=file)
    assert {layer.engine for layer in after.layers} == {"core"}
    assert (after.cycles["total"] or 0) * 3 < (before.cycles["total"] or 0)
    pinned = report_of(network, target, calibration=file, pins={"conv_2": "acme"})
    assert off(pinned) == {}, "what is measured is true of larger layers too"
    assert [claim.layer for claim in pinned.claims if claim.is_loss] == ["conv_2"], "a true claim of who loses"
    (line,) = [line for line in totals(pinned) if line.startswith("loss ")]
    assert "acme conv_2: declared " in line and "; the core takes " in line
    assert not any(claim.is_loss for claim in after.claims)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target, file = load_target(str(LIBRARY)), tmp_path / "x.json"
    good = {"schema": 1, "target": target.name, "calls": [{"engine": "vl", "offload": "vl_dense", "rates": {"mac": 2}}]}
    for change, what in (
        ({"target": "ne16"}, "measured on 'ne16'"),
        ({"calls": [{"engine": "vl", "offload": "nothing", "rates": {}}]}, "has no vl nothing"),
        ({"calls": [{"engine": "vl", "offload": "vl_dense", "rates": {"mca": 2}}]}, "no part 'mca'"),
        ({"calls": [{"engine": "vl", "offload": "vl_dense", "rates": {"mac": -1}}]}, "rates"),
    ):
        file.write_text(json.dumps(good | change))
        with pytest.raises(TargetError, match=what):
            calibrated(target, file)
    with pytest.raises(TargetError, match="cannot be read"):
        calibrated(target, tmp_path / "none.json")
    assert dovetail("calibrate", "ne16") == 1


def test_rates_are_never_negative() -> None:
    table = np.array([[1.0, 2.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 3.0], [1.0, 5.0, 1.0]])
    assert np.allclose(non_negative(table, table @ [1.0, 0.5, 2.0]), [1.0, 0.5, 2.0])
    found = non_negative(table, np.array([1.0, 0.0, 4.0, 0.0]))
    assert found.min() >= 0 and found[2] > 0
